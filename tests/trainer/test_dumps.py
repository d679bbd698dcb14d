"""Images kept of rollouts and validations: what is in them, on several processes, written again, and refusals."""

import json
import os
import warnings

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from tests_support import free_port, names

from flowgrpo_rc.rollout.seeds import IMAGE, VALIDATION, seed_for
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.dumps import ImageDump, ScoredImage


def lines(folder):
    return [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]


def kept(number, step=1, reward=0.5):
    pixels = np.full((4, 4, 3), number, dtype=np.uint8)
    return ScoredImage(number, pixels, f"prompt {number}", 7 + number, reward, {"ocr": reward})


class Alone:
    """One process's accelerator."""

    is_main_process = True


@pytest.mark.run
def test_a_run_keeps_what_it_drew(small_config, tmp_path):
    rollouts, validations = tmp_path / "rollouts", tmp_path / "validations"
    config = small_config(f"trainer.rollout_data_dir={rollouts}", f"trainer.validation_data_dir={validations}")
    trainer = FlowGRPOTrainer(config)
    rows = trainer.fit().rows()
    assert names(rollouts) == ["step_00001", "step_00002"]
    assert names(validations) == ["step_00000", "step_00002"]
    for step in (1, 2):
        told = lines(rollouts / f"step_{step:05d}")
        assert [line["file"] for line in told] == [f"{i:05d}.png" for i in range(16)]
        # Steps are counted from 0 where noise is drawn.
        assert [line["seed"] for line in told] == [seed_for(42, IMAGE, step - 1, i) for i in range(16)]
        assert {line["step"] for line in told} == {step}
        row = next(row for row in rows if row["step"] == step and "reward/mean" in row)
        assert np.mean([line["reward"] for line in told]) == pytest.approx(row["reward/mean"], rel=1e-6)
        # The reward is the mean brightness, so the pixels are those that were rewarded.
        for line in told:
            pixels = np.asarray(Image.open(rollouts / f"step_{step:05d}" / line["file"]))
            assert pixels.mean() / 255 == pytest.approx(line["reward"], abs=1e-5)
            assert line["rewards"] == {"compute_score": line["reward"]}
    validated = lines(validations / "step_00002")
    assert [line["seed"] for line in validated] == [seed_for(42, VALIDATION, 0, i) for i in range(4)]
    assert [line["prompt"] for line in validated] == [record.prompt for record in trainer.run.val_prompts]
    assert np.mean([line["reward"] for line in validated]) == pytest.approx(rows[-1]["val/reward/mean"], rel=1e-6)


def test_a_step_written_again_replaces_its_images(tmp_path):
    dump = ImageDump("trainer.rollout_data_dir", str(tmp_path / "new" / "dump"), Alone())
    dump.write(3, [kept(0), kept(1), kept(2)])
    dump.write(3, [kept(1, reward=0.25), kept(0)])
    folder = tmp_path / "new" / "dump" / "step_00003"
    assert names(folder) == ["00000.png", "00001.png", "images.jsonl"]
    assert [(line["file"], line["reward"]) for line in lines(folder)] == [("00000.png", 0.5), ("00001.png", 0.25)]
    assert [path.name for path in folder.parent.iterdir()] == ["step_00003"]


@pytest.mark.run
def test_images_of_an_earlier_run_are_told_of(small_config, tmp_path):
    """A run that starts afresh replaces those of its own steps; one that goes on has written them itself."""
    folder = tmp_path / "dump"
    (folder / "step_00007").mkdir(parents=True)
    settings = (f"trainer.rollout_data_dir={folder}", "trainer.logger=[]", "trainer.resume_mode=auto")
    once = FlowGRPOTrainer(small_config(*settings, "trainer.total_training_steps=1"))
    with pytest.warns(UserWarning, match="dump has images of an earlier run; this run's replace those of equal steps"):
        once.fit()
    again = FlowGRPOTrainer(small_config(*settings))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*images of an earlier run")
        again.fit()
    assert names(folder) == ["step_00001", "step_00002", "step_00007"]


def test_a_step_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    dump = ImageDump("trainer.rollout_data_dir", str(tmp_path), Alone())
    dump.write(1, [kept(0)])

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "x.png")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space left on device: 'x.png'"):
        dump.write(1, [kept(1)])
    assert [line["file"] for line in lines(tmp_path / "step_00001")] == ["00000.png"]


def write_as_a_rank(rank, world, folder, port):
    """Each process has every other image."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dump = ImageDump("trainer.rollout_data_dir", folder, Accelerator(cpu=True))
    dump.write(1, [kept(number) for number in range(rank, 5, world)])
    dump.write(2, [kept(0)] if rank else [])
    torch.distributed.destroy_process_group()


@pytest.mark.process
def test_two_processes_write_one_folder(tmp_path):
    torch.multiprocessing.spawn(write_as_a_rank, (2, str(tmp_path), free_port()), nprocs=2)
    first = tmp_path / "step_00001"
    assert [line["file"] for line in lines(first)] == [f"{i:05d}.png" for i in range(5)]
    for i in range(5):
        assert (np.asarray(Image.open(first / f"{i:05d}.png")) == i).all()
    assert len(lines(tmp_path / "step_00002")) == 1
    assert names(tmp_path) == ["step_00001", "step_00002"]


@pytest.mark.parametrize("field", ["rollout_data_dir", "validation_data_dir"])
def test_relative_folders_are_refused(small_config, field):
    with pytest.raises(ValueError, match=rf"trainer\.{field}: got 'dumps', a relative path; give the whole one"):
        small_config(f"trainer.{field}=dumps")
