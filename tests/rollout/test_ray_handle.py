"""Engines on Ray, without a cluster: refusals, the environment that Ray is started with, and its end."""

import os
import signal
import socket
import subprocess
import sys
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from test_engine_alone import MODEL
from tests_support import TIMEOUT, alive, descendants, end, wait_until

from flowgrpo_rc.rollout import EngineLostError, RolloutConfig
from flowgrpo_rc.rollout.build import check_placement
from flowgrpo_rc.rollout.config import ProcessConfig, RayConfig, Share
from flowgrpo_rc.rollout.ray import handle
from flowgrpo_rc.rollout.ray.actor import EngineActor
from flowgrpo_rc.rollout.ray.handle import (
    RayHandle,
    _address,
    actor_device,
    gpus_beside,
    ray_handles,
    set_variables_of_ray,
)

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


def handles_of(rollout):
    return ray_handles(rollout, MODEL, "cpu")


def test_without_ray_one_line_names_the_extra(monkeypatch):
    monkeypatch.setattr(handle, "find_spec", lambda name: None)
    words = r"placement=ray needs Ray, which is not installed: pip install '\.\[ray\]' in a .*placement=process$"
    with pytest.raises(ImportError, match=words) as caught:
        handles_of(config())
    assert "\n" not in str(caught.value)


def test_an_address_at_which_nothing_answers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        EngineLostError, match=f"^no Ray cluster answers at {address} .*ray start --head.*ray.address"
    ) as no:
        handles_of(config(address))
    assert "\n" not in str(no.value)


def test_the_actors_class_loads_neither_torch_nor_ray():
    """torch would read its variables before they are set."""
    code = "import sys, flowgrpo_rc.rollout.ray.actor; assert not {'torch', 'ray'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_trainer_processes_share_a_cluster_that_is_there(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=r"rollout.ray.address: got null with 4 trainer processes .*address=auto$"):
        check_placement(config(), Share(0, 4))
    check_placement(config(), Share(0, 1))
    monkeypatch.setenv("RAY_ADDRESS", "node0:6379")
    check_placement(config(), Share(0, 4))
    assert _address(config()) == "node0:6379"
    assert _address(config("node1:6379")) == "node1:6379"


def test_a_ray_of_our_own_keeps_off_the_trainers_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_beside("cuda:1") == {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert gpus_beside("cuda") == {"CUDA_VISIBLE_DEVICES": "6"}
    assert gpus_beside("cpu") == {}


def test_an_actor_has_no_process_group(monkeypatch):
    """Its node's daemon may have been started by a trainer that has one."""
    launcher = {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("flowgrpo_rc.rollout.build.build_engine_alone", lambda *_: "engine")
    EngineActor().load(config(), MODEL, "cpu", 3)
    assert not launcher.keys() & os.environ.keys()
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_ray_of_our_own_obeys_its_trainer_alone(monkeypatch):
    """It listens to the network; a user's own settings count."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    tokens = []
    for _ in range(2):
        monkeypatch.setattr(os, "environ", {})
        set_variables_of_ray()
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        tokens.append(os.environ["RAY_AUTH_TOKEN"])
    assert len(set(tokens)) == 2
    assert len(tokens[0]) == 64
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": "disabled"})
    set_variables_of_ray()
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_an_engine_finds_its_gpus_numbered_from_0():
    assert [actor_device(number) for number in (0.0, 0.5, 1.0, 2.0)] == ["cpu", "cuda:0", "cuda:0", "cuda:0+cuda:1"]


@pytest.mark.parametrize("place", ["cluster_resources", "remote", "put"])
def test_an_error_of_ray_itself_loses_one_engine(monkeypatch, place):
    """Whatever Ray is doing, such as storing an adapter; the pool starts another engine."""

    class Cluster:
        rollout = config()
        ray = SimpleNamespace(exceptions=SimpleNamespace(RayTaskError=KeyError), kill=lambda actor: None)
        users: ClassVar[set[str]] = set()

        def answer(self, name):
            if place == name:
                raise RuntimeError("the store\nis full")
            return SimpleNamespace()

        check_room = partialmethod(answer, "cluster_resources")

        @property
        def actor(self):
            return SimpleNamespace(remote=lambda: self.answer("remote"))

        def stored(self, state):
            return self.answer("put")

    made = RayHandle(Cluster(), 0)
    monkeypatch.setattr(handle._RayEngine, "wait_until_ready", lambda *_: None)

    def work():
        made.start()
        made.sync({}, 0)

    with pytest.raises(EngineLostError, match="^the store is full$"):
        work()


TRAINER = """
import signal, sys, time
sys.path[:0] = {path}
import torch
from flowgrpo_rc.rollout import RolloutPool
from flowgrpo_rc.rollout.build import digest_rule
from flowgrpo_rc.rollout.ray.handle import ray_handles
from test_ray_handle import MODEL, config
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
torch.set_num_threads(3)
rollout = config(engines=1)
handles = ray_handles(rollout, MODEL, "cpu")
assert handles[0]._cluster.arguments[-1] == 3
pool = RolloutPool(handles, digest_of=digest_rule(rollout, MODEL), dtype=torch.bfloat16, micro_batch_size=2)
try:
    print(handles[0].pid, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    pool.close()
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_of_a_ray_of_our_own_outlives_the_trainer(how, tmp_path, ray_environment):
    """kill -9 leaves it no time to close anything. SIGTERM is the trainer's to answer, and not Ray's."""
    program = TRAINER.format(path=[str(HERE), str(HERE.parent)])
    with (tmp_path / "said").open("w") as said:
        pipes = {"stdout": subprocess.PIPE, "stderr": said, "text": True, "start_new_session": True}
        trainer = subprocess.Popen([sys.executable, "-c", program], env=ray_environment, **pipes)
    assert trainer.stdout is not None
    started = []
    try:
        actor = int(trainer.stdout.readline() or "0")
        assert actor, (tmp_path / "said").read_text()
        # Two agents of Ray's hold nothing, and stay for a minute after a kill.
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in descendants(trainer.pid)}
        started = [pid for pid, name in names.items() if pid == actor or name in ("gcs_server", "raylet")]
        assert len(started) == 3
        os.kill(trainer.pid, how)
        trainer.wait(TIMEOUT)
    finally:
        end(trainer.pid)
    wait_until(lambda: not any(map(alive, started)))
    assert trainer.stdout.read() == ("interrupted\n" if how == signal.SIGTERM else "")
