"""Rewards in whole runs: exit codes, the line at the start, the log's keys, and verl-omni's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import SMALL_RUN
from reward_files import function, write

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.rewards import STATISTICS
from flowgrpo_rc.run_folder import TIMING_PREFIXES

pytestmark = pytest.mark.run
TINY = (
    *(o for o in SMALL_RUN if not o.startswith("reward.")),
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "data.val_files=null",
)


def demo(folder: Path, reward: Path, *overrides: str) -> int:
    """The demo's exit code, one step of it, with the reward `f` of that file."""
    return main(
        [
            "demo",
            *TINY,
            f"trainer.default_local_dir={folder / 'run'}",
            f"reward.custom_reward_function.path={reward}",
            "reward.custom_reward_function.name=f",
            *overrides,
        ]
    )


def error_lines(capsys: pytest.CaptureFixture) -> list[str]:
    """Lines that report an error; other libraries' notes aside."""
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return [line for line in error.splitlines() if line.startswith("error: ")]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("line", ["sys.exit(0)", "images[0] = 0"])
def test_a_reward_that_fails_ends_the_command_with_1(tmp_path: Path, capsys: pytest.CaptureFixture, line: str) -> None:
    assert demo(tmp_path, write(tmp_path, function(line))) == 1
    error = error_lines(capsys)
    assert len(error) == 1
    assert error[0].startswith("error: reward function 'f' raised ")
    assert "mine.py:5, in f" in error[0]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("sys.exit(0)", "mine.py raised SystemExit: 0 at"),
        ("def f(images, prompts): return [1.0] * len(prompts)", "'f'(images, prompts) cannot be called as a reward"),
        (
            "def f(data_source, solution_image, ground_truth, extra_info): return 1.0",
            "train.txt:1 has no data_source, which the reward function 'f'(",
        ),
    ],
)
def test_what_can_be_seen_before_training_ends_it_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    monkeypatch.setattr("flowgrpo_rc.trainer.setup.open_checked", lambda *a, **k: pytest.fail("the model was loaded"))
    assert demo(tmp_path, write(tmp_path, source)) == 2
    error = error_lines(capsys)
    assert len(error) == 1
    assert error[0].startswith("error: ")
    assert told in error[0]


def test_a_reward_that_never_returns_ends_the_command_with_1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert demo(tmp_path, write(tmp_path, function("time.sleep(600)")), "reward.timeout_s=0.5") == 1
    error = error_lines(capsys)
    assert len(error) == 1
    assert "did not return within reward.timeout_s=0.5 s; it was at" in error[0]
    assert "mine.py:5, in f (time.sleep(600))" in error[0]


def test_the_log_has_the_known_statistics_and_one_key_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The first lines show the sum in force."""
    path = write(tmp_path, function("return images.reshape(len(images), -1).mean(1) / 255"))
    assert demo(tmp_path, path, "reward.functions.jpeg_compressibility=0.5") == 0
    logged = {key.removeprefix("reward/") for key in rows(tmp_path)[-1] if key.startswith("reward/")}
    names = ("jpeg_compressibility", "f")
    assert logged == {*STATISTICS, *names, *(f"std/{name}" for name in names)}
    said = "".join(capsys.readouterr().out.split())
    assert f"Reward:0.5xjpeg_compressibility+1xf({path})" in said


def test_a_reward_that_turns_gradients_off_changes_nothing(tmp_path: Path) -> None:
    """The same steps as with the same reward that does not."""
    score = "return images.reshape(len(images), -1).mean(1) / 255"
    for name, first in (
        ("plain", "pass"),
        ("hostile", "torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64)"),
    ):
        path = write(tmp_path, function(f"{first}\n{score}"), f"{name}.py")
        (tmp_path / name).mkdir()
        assert demo(tmp_path / name, path, "trainer.total_training_steps=2") == 0
    plain, hostile = (
        [{k: v for k, v in row.items() if not k.startswith(TIMING_PREFIXES)} for row in rows(tmp_path / name)]
        for name in ("plain", "hostile")
    )
    assert plain == hostile
    assert plain[-1]["actor/grad_norm"] > 0
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_verl_omnis_form_trains_on_a_file_with_its_columns(tmp_path: Path) -> None:
    """From the layout that verl-omni's data preparation, and ours, write."""
    lines = "".join(f'the text "{number}"\n' for number in range(10, 18))
    (tmp_path / "train.txt").write_text(lines)
    assert main(["prepare-data", "ocr", "--input", str(tmp_path), "--output", str(tmp_path / "data")]) == 0
    source = """
    async def f(data_source, solution_image, ground_truth, extra_info=None, **kwargs):
        assert data_source == "flow_grpo/ocr" and extra_info["split"] == "train"
        score = float(solution_image.float().mean() / 255)
        return {"score": score, "target": float(ground_truth)}
    """
    train = f"data.train_files={tmp_path / 'data' / 'train.parquet'}"
    assert demo(tmp_path, write(tmp_path, source), train) == 0
    row = rows(tmp_path)[-1]
    assert 0 < row["reward/f"] < 1
    assert row["reward/mean"] == row["reward/f"]
