"""Engines on Ray, without a cluster: what is refused in one line, what Ray is started with, and that nothing outlives
the trainer."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_host import MODEL
from tests_support import TIMEOUT, descendants, end, wait_until

import flowgrpo_rc.rollout.ray as room
from flowgrpo_rc.rollout import EngineLostError, RolloutConfig
from flowgrpo_rc.rollout.engines import check_placement
from flowgrpo_rc.rollout.host import EngineHost
from flowgrpo_rc.rollout.placement import ProcessConfig, RayConfig, Share
from flowgrpo_rc.rollout.ray import check_ray
from flowgrpo_rc.rollout.ray.connection import RayConnection
from flowgrpo_rc.rollout.ray.driver import _device
from flowgrpo_rc.rollout.ray.handle import ray_handles

HERE = Path(__file__).parent


def config(address=None, *, engines=1, num_gpus=0.0, **timeouts):
    return RolloutConfig(
        dtype="bfloat16",
        micro_batch_size=2,
        placement="ray",
        engines=engines,
        ray=RayConfig(address=address, num_gpus=num_gpus),
        process=ProcessConfig(**{"start_timeout_s": 300.0, "close_timeout_s": 20.0} | timeouts),
    )


def one_handle(*arguments, **settings):
    return ray_handles(config(*arguments, **settings), MODEL, "cpu")[0]


def unused_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_without_ray_one_line_names_the_extra(monkeypatch):
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    words = r"placement=ray needs Ray, which is not installed: pip install 'flowgrpo_rc\[ray\]' .*placement=process$"
    with pytest.raises(ImportError, match=words) as caught:
        check_ray()
    assert "\n" not in str(caught.value)
    with pytest.raises(ImportError, match=words):
        one_handle()


def test_nothing_of_ray_is_in_the_trainers_process():
    """It would take over signals and outputs, and end the process with its cluster."""
    code = (
        "import sys; from flowgrpo_rc.rollout.ray import check_ray; check_ray(); assert 'torch' not in sys.modules\n"
        "from flowgrpo_rc.rollout.ray import connection, driver, handle; assert 'ray' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys; import flowgrpo_rc.rollout.ray.driver; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_address_at_which_nothing_answers():
    address = unused_address()
    handle = one_handle(address)
    began = time.monotonic()
    with pytest.raises(
        EngineLostError, match=f"^no Ray cluster answers at {address} .*ray start --head.*address"
    ) as no:
        handle.start()
    assert "\n" not in str(no.value)
    assert time.monotonic() - began < 60
    with pytest.raises(EngineLostError, match="no Ray cluster answers"):  # a later start tries anew
        handle.start()
    handle.close()
    with pytest.raises(EngineLostError, match="it has been closed"):
        handle.start()


def test_an_address_that_is_none():
    handle = one_handle("nonsense")
    with pytest.raises(EngineLostError, match="Invalid address format: nonsense"):
        handle.start()
    handle.close()


def test_what_has_not_been_started_is_lost():
    with pytest.raises(EngineLostError, match="it has not been started"):
        one_handle().sync({}, 0)


def test_several_trainer_processes_share_a_cluster_that_is_there(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=r"rollout.ray.address: got null with 4 trainer processes .*address=auto$"):
        check_placement(config(), Share(0, 4))
    check_placement(config(), Share(0, 1))
    monkeypatch.setenv("RAY_ADDRESS", "node0:6379")
    check_placement(config(), Share(0, 4))
    assert one_handle()._connection._settings.address == "node0:6379"
    assert one_handle("node1:6379")._connection._settings.address == "node1:6379"


def test_a_ray_of_our_own_keeps_off_the_trainers_gpu_and_process_group(monkeypatch):
    for name, value in {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def environment(address, device):
        return RayConnection(config(address), MODEL, device)._environment

    assert environment(None, "cuda:1")["CUDA_VISIBLE_DEVICES"] == "0,2,3"
    assert "CUDA_VISIBLE_DEVICES" not in environment("node0:6379", "cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert environment(None, "cuda")["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment(None, "cpu")["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment(None, "cpu").keys()
    assert environment(None, "cpu")["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_ray_of_our_own_obeys_its_trainer_alone(monkeypatch):
    """It listens to the network; to a cluster that is there, the user's own token counts."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    tokens = set()
    for _ in range(2):
        own = RayConnection(config(), MODEL, "cpu")._environment
        assert own["RAY_AUTH_MODE"] == "token"
        tokens.add(own["RAY_AUTH_TOKEN"])
    assert min(map(len, tokens)) == 64
    assert len(tokens) == 2
    assert "RAY_AUTH_MODE" not in RayConnection(config("node0:6379"), MODEL, "cpu")._environment
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_TOKEN" not in RayConnection(config(), MODEL, "cpu")._environment


def test_an_engine_finds_its_gpus_numbered_from_0():
    assert [_device(number) for number in (0.0, 0.5, 1.0, 2.0)] == ["cpu", "cuda:0", "cuda:0", "cuda:0+cuda:1"]


def test_vllm_omni_takes_all_of_them(monkeypatch):
    from flowgrpo_rc.rollout.vllm_omni import engine

    made = {}

    class Handle:
        def __init__(self, model, lora, **settings):
            made.update(settings)

        def start(self):
            made["started"] = True

    monkeypatch.setattr(engine, "VllmOmniHandle", Handle)
    rollout = RolloutConfig(name="vllm_omni", placement="ray", ray=RayConfig(num_gpus=2.0))
    EngineHost(rollout, MODEL, _device(2.0))
    assert made["devices"] == ["cuda:0", "cuda:1"]
    assert made["started"]


def test_threads_are_the_trainers_where_they_decide_the_last_bits(monkeypatch):
    torch.set_num_threads(3)
    assert one_handle()._connection._settings.threads == 3
    assert one_handle(num_gpus=1.0)._connection._settings.threads is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_gpus": -1.0}, "ray.num_gpus: got -1.0; give 0 or more"),
        ({"num_gpus": 1.5}, "ray.num_gpus: got 1.5; Ray gives a share of one GPU or whole GPUs"),
        ({"num_cpus": -1.0}, "ray.num_cpus: got -1.0; give 0 or more"),
        ({"address": "ray://node0:10001"}, "ray.address: got 'ray://node0:10001', .*ray start --address=HEAD:6379"),
    ],
)
def test_settings_that_make_no_sense(values, says):
    with pytest.raises(ValueError, match=f"actor_rollout_ref.rollout.{says}"):
        RayConfig(**values)


def test_several_gpus_are_for_an_engine_that_can_use_them():
    with pytest.raises(ValueError, match=r"ray.num_gpus: got 2; the diffusers engine computes on one device"):
        config(num_gpus=2.0)
    RolloutConfig(name="vllm_omni", placement="ray", ray=RayConfig(num_gpus=2.0))


TRAINER = """
import sys, time
sys.path[:0] = {path}
import torch
from flowgrpo_rc.rollout import RolloutPool
from flowgrpo_rc.rollout.host import digest_rule
from test_ray_handle import MODEL, config, ray_handles
rollout = config(engines=1, close_timeout_s={seconds})
handles = ray_handles(rollout, MODEL, "cpu")
pool = RolloutPool(handles, digest_of=digest_rule(rollout, MODEL), dtype=torch.bfloat16, micro_batch_size=2)
try:
    print(handles[0].place[1], flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    pool.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "stopped", "seconds"),
    [(signal.SIGKILL, False, 20.0), (signal.SIGINT, False, 20.0), (signal.SIGINT, True, 2.0)],
    ids=["killed", "interrupted", "interrupted, and what speaks to Ray does not answer"],
)
def test_nothing_of_a_ray_of_our_own_outlives_the_trainer(how, stopped, seconds, tmp_path, ray_environment):
    """kill -9 leaves it no time to close anything. Ctrl-C is answered by the trainer alone."""
    program = TRAINER.format(path=[str(HERE), str(HERE.parent)], seconds=seconds)
    with (tmp_path / "said").open("w") as said:
        pipes = {"stdout": subprocess.PIPE, "stderr": said, "text": True, "start_new_session": True}
        trainer = subprocess.Popen([sys.executable, "-c", program], env=ray_environment, **pipes)
    assert trainer.stdout is not None
    try:
        actor = int(trainer.stdout.readline() or "0")
        assert actor, (tmp_path / "said").read_text()
        started = descendants(trainer.pid)
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in started}
        assert {"gcs_server", "raylet"} <= names
        assert actor in started
        if stopped:
            (driver,) = filter(is_driver, started)
            os.kill(driver, signal.SIGSTOP)
        os.killpg(trainer.pid, how)
        trainer.wait(TIMEOUT)
    finally:
        end(trainer.pid)
    wait_until(lambda: not any(map(holds_anything, started)), 40)
    assert (tmp_path / "said").read_text() == ""
    assert trainer.stdout.read() == ("interrupted\n" if how == signal.SIGINT else "")


def is_driver(pid):
    return b"flowgrpo_rc.rollout.ray.driver" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def holds_anything(pid):
    """False for zombies too, which wait for whoever adopted them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
