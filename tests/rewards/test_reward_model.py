"""A reward model that the run serves itself, with a stub in the place of vllm."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml
from reward_files import METADATA, write
from test_reward_run import TINY
from tests_support import alive, rows_of, wait_until

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.rewards import RewardConfig, build_reward
from flowgrpo_rc.rewards.reward_model import server as server_module

pytestmark = pytest.mark.process

STUB = Path(__file__).with_name("stub_vllm.py")
MODEL = "Qwen/Qwen3-VL-8B-Instruct"
IMAGES = np.zeros((3, 8, 8, 3), np.uint8)
PROMPTS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    """A program ``vllm`` on the path, and the file in which it says what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "vllm"
    program.write_text(f"#!{sys.executable}\n{STUB.read_text()}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_STUB_NOTES", str(tmp_path / "notes.jsonl"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(server_module, "POLL_S", 0.05)
    monkeypatch.setattr(server_module, "PROGRESS_S", 0.1)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "notes.jsonl"
    for note in read(tmp_path / "notes.jsonl"):
        for pid, words in ((note["pid"], str(folder)), (note["worker"], "time.sleep(600)")):
            if alive(pid) and words in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)


def read(notes):
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def config(**reward_model):
    return RewardConfig(
        functions={"judge": 1.0},
        judge={"questions": ["score"]},
        reward_model={"enable": True, "model_path": MODEL, **reward_model},
    )


def assert_ends(*pids):
    wait_until(lambda: not any(map(alive, pids)))


def test_the_judge_asks_the_server_that_the_run_has_started(notes, tmp_path, capsys):
    settings = config(
        rollout={"tensor_model_parallel_size": 4, "gpu_memory_utilization": 0.4, "max_model_len": 4096},
        extra_args=["--trust-remote-code"],
    )
    reward = build_reward(settings)
    np.testing.assert_array_equal(reward(IMAGES, PROMPTS).total, np.float32([0.6] * 3))
    (note,) = read(notes)
    port = note["arguments"][note["arguments"].index("--port") + 1]
    assert " ".join(note["arguments"]) == (
        f"serve {MODEL} --host 127.0.0.1 --port {port} --served-model-name {MODEL} --tensor-parallel-size 4 "
        "--data-parallel-size 1 --dtype auto --gpu-memory-utilization 0.4 --max-model-len 4096 --enforce-eager "
        "--trust-remote-code"
    )
    # What config.yaml records: who judged, and not where, which is another place the next time.
    assert (settings.judge.model, settings.judge.base_url) == (MODEL, None)
    assert settings.in_words() == f"1 x judge ({MODEL})"
    said = capsys.readouterr().err
    assert f"starting vllm serve {MODEL} on port {port}" in said
    assert "vllm serve is starting: loading the model" in said
    reward.close()
    reward.close()
    assert_ends(note["pid"], note["worker"])
    assert not list(tmp_path.glob("*.log"))


def test_a_server_that_ends_before_it_answers(notes, monkeypatch):
    monkeypatch.setenv("VLLM_STUB_FAILS", "1")
    with pytest.raises(
        ValueError,
        match=rf"^reward\.reward_model: vllm serve {MODEL} ended with exit code 3 before it answered; the end of its "
        r"log: loading the model \| torch\.OutOfMemoryError: CUDA out of memory$",
    ):
        build_reward(config())
    (note,) = read(notes)
    assert_ends(note["pid"], note["worker"])


def test_a_server_that_dies_in_the_middle_leaves_its_log(notes, capsys):
    reward = build_reward(config())
    (note,) = read(notes)
    os.kill(note["pid"], signal.SIGTERM)
    reward.server._process.wait(20)
    reward.close()
    reward.close()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "starting" not in line]
    found = re.fullmatch(
        rf"reward\.reward_model: vllm serve {MODEL} died of signal 15; log: (\S+), which ends: .*", line
    )
    assert Path(found[1]).read_text().strip() == "loading the model"


RUN = """
    import json, os, signal, sys, time
    from flowgrpo_rc.rewards import RewardConfig, build_reward
    reward = build_reward(RewardConfig(**json.loads(sys.argv[1])))
    print("built", flush=True)
    {after}
"""


@pytest.mark.parametrize(
    ("after", "number", "code"),
    [("raise RuntimeError", None, 1), ("time.sleep(60)", signal.SIGKILL, -signal.SIGKILL)],
    ids=["exception", "SIGKILL"],
)
def test_however_the_process_ends_the_server_does_too(notes, after, number, code):
    settings = {"functions": {"judge": 1.0}, "judge": {"questions": ["score"]}}
    settings["reward_model"] = {"enable": True, "model_path": MODEL}
    source = textwrap.dedent(RUN).format(after=after)
    with subprocess.Popen(
        [sys.executable, "-c", source, json.dumps(settings)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout.readline() == b"built\n"
        (note,) = read(notes)
        if number is not None:
            assert alive(note["worker"])
            run.send_signal(number)
        assert run.wait(30) == code
    assert_ends(note["pid"], note["worker"])


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [(None, None, None), ("4,5,6", None, "4,5,6"), (None, [2, 3], "2,3"), ("4,5,6", [2], "6")],
)
def test_the_gpus_of_the_server(monkeypatch, visible, devices, seen):
    """Indices into what the run sees; the launcher's variables are the run's alone."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ValueError, match=r"devices: got \[3\], but the run sees 3 GPUs \(CUDA_VISIBLE_DEVICES=4,5"):
            server_module._environment([3])
    monkeypatch.setenv("LOCAL_RANK", "0")
    environment = server_module._environment(devices)
    assert environment.get("CUDA_VISIBLE_DEVICES") == seen
    assert "LOCAL_RANK" not in environment


def test_processes_of_one_launcher_share_a_server(notes, monkeypatch):
    """The second finds the first's, and does not end it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setenv("LOCAL_RANK", "0")
    first = build_reward(config())
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = build_reward(config())
    second.close()
    np.testing.assert_array_equal(first(IMAGES, PROMPTS).total, np.float32([0.6] * 3))
    first.close()
    assert len(read(notes)) == 1
    with pytest.raises(ValueError, match=r"did not answer within .*timeout_s=0.3 s; the first process of the run"):
        build_reward(config(start_timeout_s=0.3))
    monkeypatch.setenv("LOCAL_RANK", "0")
    port = int(first.server.address.partition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ValueError, match=rf"the port {port} cannot be had"):
        build_reward(config())


FUNCTION = """
def f(data_source, solution_image, ground_truth, extra_info, reward_router_address, model_name=None):
    import urllib.request
    served = urllib.request.urlopen(f"http://{reward_router_address}/v1/models", timeout=10).read().decode()
    return {"score": float(model_name in served), "address": reward_router_address}
"""


def test_a_function_of_verl_omnis_form_gets_its_address(notes, tmp_path):
    custom = {"path": str(write(tmp_path, FUNCTION)), "name": "f"}
    reward_model = {"enable": True, "model_path": MODEL}
    reward = build_reward(RewardConfig(custom_reward_function=custom, reward_model=reward_model))
    result = reward(IMAGES, PROMPTS, METADATA)
    np.testing.assert_array_equal(result.total, np.ones(3, np.float32))
    (note,) = read(notes)
    assert result.info["f"]["address"] == [f"127.0.0.1:{note['arguments'][5]}"] * 3
    reward.close()


@pytest.mark.parametrize(
    ("name", "servers"),
    # "clipscore" is here a function of the user's own, under a built-in reward's name.
    [("judge", 1), ("clipscore", 1), ("jpeg_compressibility", 0)],
)
def test_check_reward_starts_the_runs_server_for_what_asks_it(name, servers, notes, tmp_path, capsys):
    """With the overrides of a run that has a judge too."""
    path = write(tmp_path, FUNCTION)
    asks = [f"reward.reward_functions.{own}={{path: {path}, name: f, weight: 0.5}}" for own in ("mine", "clipscore")]
    overrides = ["reward.functions.judge=1", "reward.judge.questions=[score]", *asks]
    enabled = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={MODEL}"]
    # The stub says the same of every image, which is wrong of a judge.
    assert main(["check-reward", name, *overrides, *enabled]) == (3 if name == "judge" else 0)
    assert f"1 x {name}" in capsys.readouterr().out
    assert len(read(notes)) == servers


JUDGE = {"enable": True, "model_path": MODEL}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"functions": {"ocr": 1.0}}, "reward_model.enable: true, but no reward asks a model"),
        ({"judge": {"base_url": "http://x/v1"}}, "judge.base_url: got http://x/v1, but reward.reward_model.enable"),
        ({"reward_model": {"enable": True}}, "reward_model.model_path: null, but reward.reward_model.enable=true"),
        ({"reward_model": {"rollout": {"name": "sglang"}}}, "reward_model.rollout.name: got 'sglang'; choose one of"),
        ({"reward_model": {"devices": []}}, r"reward_model.devices: got \[\]"),
        ({"reward_model": {"extra_args": ["--api_key", "sk-secret"]}}, "reward_model.extra_args: leave --api-key out"),
        ({"reward_model": {"extra_args": ["--port", "8000"]}}, "reward_model.extra_args: leave --port out"),
        ({}, "reward_model.enable: true, but there is no program vllm on the PATH"),
    ],
)
def test_settings_that_cannot_be_used(notes, monkeypatch, settings, told):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=rf"^reward\.{told}") as caught:
        build_reward(RewardConfig(**{"functions": {"judge": 1.0}, "reward_model": JUDGE} | settings))
    assert "sk-secret" not in str(caught.value)
    assert read(notes) == []


VERL_OMNIS = (
    "reward.reward_model.enable=True",
    f"reward.reward_model.model_path={MODEL}",
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.rollout.tensor_model_parallel_size=4",
    "reward.custom_reward_function.path=verl_omni/utils/reward_score/genrm_ocr.py",
    "reward.custom_reward_function.name=compute_score_ocr",
)


@pytest.mark.run
def test_a_run_with_verl_omnis_settings(notes, tmp_path, monkeypatch, capsys):
    """The judge of a whole run is served with it, transcribes its images, is recorded, and ends with it."""
    monkeypatch.setenv("VLLM_STUB_SAYS", "7")
    folder = f"trainer.default_local_dir={tmp_path / 'run'}"
    with pytest.warns(UserWarning, match="custom_reward_function -> reward.functions.judge=1.0"):
        assert main(["demo", *TINY, folder, "reward.functions.ocr=0", *VERL_OMNIS]) == 0
    (row,) = rows_of(tmp_path / "run")
    assert 0 <= row["reward/judge"] == row["reward/mean"] <= 1
    (note,) = read(notes)
    assert_ends(note["pid"], note["worker"])
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["reward"]
    assert recorded["judge"]["model"] == MODEL
    assert recorded["judge"]["base_url"] is None
    assert f"Reward: 1 x judge ({MODEL})" in " ".join(capsys.readouterr().out.split())
