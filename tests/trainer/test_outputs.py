"""A run's output for people: metrics lines, grids, the closing table."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests_support import names
from tiny_families.references import as_reference

from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.summary import stack_pictures
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer.dumps import ScoredImage
from flowgrpo_rc.trainer.logging import NonFiniteMetricError, RunLogger
from flowgrpo_rc.trainer.validation import save_grid

ROW = {
    "reward/mean": 0.5,
    "actor/pg_clipfrac": 0.1,
    "actor/pg_clipfrac_first": 0.0,
    "actor/ppo_kl": 1e-5,
    "actor/log_ratio_abs_mean_first": 2e-4,
    "actor/ratio_deviation_first": 1e-3,
}


class OneProcess:
    """As much of an accelerator as the logger talks to."""

    is_main_process = True

    def __init__(self):
        self.trackers = []

    def end_training(self):
        pass


def test_lines_after_a_resume_point_move_aside(tmp_path):
    folder = RunFolder.open(str(tmp_path / "run"), fresh=False)
    for step in range(4):
        folder.append({"step": step, "x": step / 2})
    with folder.metrics.open("a") as handle:
        handle.write('{"step": 4, "x"')  # cut off by a kill
    assert [r["step"] for r in folder.rows()] == [0, 1, 2, 3]
    assert folder.set_aside_after(2) == ["2 line(s) of metrics.jsonl to metrics.1.jsonl"]
    assert (folder.root / "metrics.1.jsonl").read_text() == '{"step": 3, "x": 1.5}\n{"step": 4, "x"\n'
    folder.append({"step": 3, "x": 7})
    assert [json.loads(line)["x"] for line in folder.metrics.read_text().splitlines()] == [0.0, 0.5, 1.0, 7]
    assert folder.set_aside_after(3) == []
    assert folder.set_aside_after(1) == ["2 line(s) of metrics.jsonl to metrics.2.jsonl"]


@pytest.mark.parametrize(
    "line", [b"7", b"[]", b'{"x": 1}', b'{"step": "2"}', b'{"step": true}', b"\xff\xfe", b"\x00" * 50]
)
def test_what_is_no_row_moves_aside_and_rows_stay_byte_for_byte(tmp_path, line):
    folder = RunFolder(tmp_path)
    rows = b'{"step":1,  "x": 1e-05}\n'
    folder.metrics.write_bytes(rows + line + b"\n" + b'{"step": 2}')
    assert folder.set_aside_after(2) == ["1 line(s) of metrics.jsonl to metrics.1.jsonl"]
    assert folder.metrics.read_bytes() == rows + b'{"step": 2}\n'
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == line + b"\n"


@pytest.mark.parametrize("left", [b"", b'{"step": 0}', b'{"step": 0}\n', b'{"step": 0}\r\n'])
def test_a_row_never_shares_a_line(tmp_path, left):
    """Also not with one that lost its end to a kill, an editor or a copy."""
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(left)
    folder.append({"step": 1})
    folder.append({"step": 2})
    assert [row["step"] for row in folder.rows()] == ([0] if left else []) + [1, 2]
    assert folder.metrics.read_bytes().startswith(left)


@pytest.mark.parametrize("moves", range(4))
def test_a_kill_between_the_moves_leaves_nothing_behind(tmp_path, monkeypatch, moves):
    folder = RunFolder(tmp_path)
    for name in ("metrics.jsonl", "config.yaml", "summary.png"):
        (tmp_path / name).write_text(name)
    folder.lora.mkdir()
    (folder.lora / "adapter").touch()
    rename = Path.rename
    done = []

    def killed(path, target):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(rename(path, target))

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.set_all_aside()
    monkeypatch.undo()
    assert folder.set_all_aside()
    assert len(list(tmp_path.iterdir())) == 4
    assert not any((tmp_path / name).exists() for name in ("metrics.jsonl", "config.yaml", "summary.png", "lora"))


def test_grids_and_profiles_are_in_the_order_of_their_steps(tmp_path):
    """Also beyond the five digits of their names; what is not a step's grid is none."""
    folder = RunFolder(tmp_path)
    folder.samples.mkdir()
    pictures = ("step_100000", "step_99999", "step_00000", "step_50000", "step_last", "step_²", "before_after")
    for name in pictures:
        (folder.samples / f"{name}.png").touch()
    assert list(folder.grids()) == [0, 50000, 99999, 100000]
    assert folder.grids()[100000].name == "step_100000.png"
    folder.profile.mkdir()
    for step in (1, 50001):
        (folder.profile / f"step_{step:05d}.rank_0.txt").touch()
    assert "1 file(s) of profiles of later steps to profile.1/" in folder.set_aside_after(50000)
    assert names(folder.profile) == ["step_00001.rank_0.txt"]
    assert names(tmp_path / "profile.1") == ["step_50001.rank_0.txt"]
    assert list(folder.grids()) == [0, 50000]
    assert names(tmp_path / "samples.1") == ["step_100000.png", "step_99999.png"]
    assert (folder.samples / "step_last.png").exists()


def test_a_folder_that_cannot_be_filled_leaves_the_earlier_one(tmp_path):
    folder = RunFolder(tmp_path)

    def write(text, failure=None):
        def fill(target):
            (target / "adapter").write_text(text)
            if failure is not None:
                raise failure

        return fill

    assert folder.replace_folder(folder.lora, write("first"), same=lambda *_: False) == []
    with pytest.raises(OSError, match="No space left"):
        folder.replace_folder(folder.lora, write("second", OSError(28, "No space left")), same=lambda *_: False)
    assert (folder.lora / "adapter").read_text() == "first"
    assert folder.replace_folder(folder.lora, write("third"), same=lambda *_: True) == []
    assert folder.replace_folder(folder.lora, write("third"), same=lambda *_: False) == ["lora to lora.1"]
    assert names(tmp_path) == ["lora", "lora.1"]


def test_fresh_folders_number_on(tmp_path):
    for expected in ("run", "run-2", "run-3"):
        folder = RunFolder.open(str(tmp_path / "run"), fresh=True)
        folder.append({"step": 0})
        assert folder.root.name == expected


def test_non_finite_metrics_stop_the_run_and_are_not_written(tmp_path):
    folder = RunFolder.open(str(tmp_path / "run"), fresh=False)
    logger = RunLogger(folder, OneProcess(), [], total_steps=2)
    with pytest.raises(NonFiniteMetricError, match="step 1: non-finite metrics: actor/loss, reward/mean"):
        logger.log(1, {"reward/mean": float("nan"), "actor/loss": float("inf"), "x": 1.0})
    assert folder.rows() == []


def test_terminal_shows_reward_kl_and_gap(tmp_path, capsys):
    folder = RunFolder.open(str(tmp_path / "run"), fresh=False)
    logger = RunLogger(folder, OneProcess(), ["console"], total_steps=2)
    logger.log(1, {**ROW, "val/reward/mean": 0.625})
    logger.log(2, ROW)
    logger.summary(History(folder.rows()), ["a.png"])
    shown = capsys.readouterr().out
    assert "step 1/2  reward 0.500  held-out 0.625  kl +1.0e-05  clipped 10%  gap 2.0e-04" in shown
    assert "held-out reward" in shown
    assert "a.png" in shown


def shown(image, prompt, reward, **more):
    return ScoredImage(0, image, prompt, 0, reward, {}, **more)


def test_grid_shows_every_image_in_its_place(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    samples = [shown(np.full((32, 32, 3), c, np.uint8), f"prompt {i}", 1.0, text="42") for i, c in enumerate(colours)]
    save_grid(tmp_path / "grid.png", "step 0", samples, columns=2)
    picture = np.asarray(Image.open(tmp_path / "grid.png"))
    cell, step = 96, 104
    for i, colour in enumerate(colours):
        y, x = 8 + 26 + (i // 2) * (cell + 34 + 8) + 48, 8 + (i % 2) * step + 48
        assert tuple(picture[y, x]) == colour
    stack_pictures(tmp_path / "both.png", [tmp_path / "grid.png"] * 2)
    assert Image.open(tmp_path / "both.png").size == (picture.shape[1], 2 * picture.shape[0])


def test_an_edit_stands_behind_its_reference(tmp_path):
    """A cell is as much wider as the reference is; a picture that has none keeps its place."""
    blue = as_reference(Image.new("RGB", (20, 30), (0, 0, 255)))
    red = np.full((32, 32, 3), (255, 0, 0), np.uint8)
    samples = [shown(red, "make it red", 1.0, reference=reference) for reference in (blue, None, blue)]
    save_grid(tmp_path / "grid.png", "", samples, columns=3)
    picture = np.asarray(Image.open(tmp_path / "grid.png"))
    assert picture.shape[1] == 8 + 2 * (96 + 50 + 8)
    for i, reference in enumerate((0, 255, 0)):
        y, x = 8 + 26 + (i // 2) * (96 + 34 + 8) + 10, 8 + (i % 2) * (96 + 50 + 8)
        assert tuple(picture[y, x + 10]) == (reference, reference, 255)
        assert tuple(picture[y, x + 50 + 10]) == (255, 0, 0)


def test_a_run_that_is_hacked_is_named_once(tmp_path, capsys):
    folder = RunFolder.open(str(tmp_path / "run"), fresh=False)
    logger = RunLogger(folder, OneProcess(), ["console"], total_steps=80)
    for step in range(1, 60):
        contrast = 0.3 if step < 20 else 0.08
        logger.log(step, {"reward/mean": 0.01 * step, "images/contrast": contrast, "actor/loss": 0.0})
    lines = [line for line in capsys.readouterr().out.splitlines() if "images/contrast" in line]
    assert len(lines) == 1
    assert lines[0].startswith("step 28: watch: images/contrast went from 0.3 (steps 1-8) to ")
