"""Whole runs whose reward a server computes."""

import json

import pytest
from conftest import SMALL_RUN
from reward_files import function, write
from reward_server import serving
from stub_server import Reply, StubServer

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.run_folder import TIMING_PREFIXES

pytestmark = pytest.mark.run

TINY = (
    *(override for override in SMALL_RUN if not override.startswith("reward.")),
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "data.val_files=null",
)
BRIGHTNESS = function("return images.mean((1, 2, 3)) / 255, {'text': prompts}")


def demo(folder, *overrides):
    return main(["demo", *TINY, f"trainer.default_local_dir={folder}", *overrides])


def metrics(folder):
    """The rows of the run, without what a clock measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMING_PREFIXES)} for row in rows]


def test_a_run_with_a_server_equals_one_with_the_function(tmp_path):
    path = write(tmp_path, BRIGHTNESS)
    section = "reward.custom_reward_function"
    assert demo(tmp_path / "local", f"{section}.path={path}", f"{section}.name=f") == 0
    with serving(path) as server:
        far = [f"reward.remote.f.url={server.url}", "reward.remote.f.batch_size=3", "reward.functions={f: 1.0}"]
        assert demo(tmp_path / "remote", *far) == 0
        assert server.requests > 1
    rows = metrics(tmp_path / "local")
    assert "reward/f" in rows[-1]
    assert metrics(tmp_path / "remote") == rows


def test_a_server_that_ends_during_training_ends_the_run_with_1(tmp_path, capsys):
    """The grey images before training are answered, and nothing after them."""

    def answer(call):
        images = call.json()["images"]
        return Reply({"scores": [0.5]}) if len(images) == 1 else Reply(b"CUDA error", status=500)

    with StubServer(answer) as server:
        far = [f"reward.remote.far.url={server.url}", "reward.remote.far.tries=2", "reward.functions={far: 1.0}"]
        assert demo(tmp_path / "run", *far) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {server.url}: reward.remote.far, images 0 to ")
    assert errors[0].endswith("answers 500: CUDA error (tried 2 times)")
