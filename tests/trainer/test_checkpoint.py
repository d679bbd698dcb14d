"""Checkpoints: complete or absent, found again, never lost to a failed write."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flowgrpo_rc.trainer.checkpoint import (
    CheckpointError,
    CheckpointStore,
    Fingerprint,
    random_states,
    restore_random_states,
)

FINGERPRINT = Fingerprint("QwenImagePipeline", {"num_layers": 4, "axes": [8, 12]}, {"rank": 8})


def save(store, step, write_lora=lambda folder: (folder / "lora").write_text("weights")):
    state = {"step": step, "fingerprint": vars(FINGERPRINT)}
    return store.save(step, state, {"x": torch.full((3,), float(step))}, write_lora)


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_save_load_and_latest(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    assert store.latest() is None
    for step in (2, 10):
        save(store, step)
    assert store.latest() == tmp_path / "checkpoints" / "step_10"
    state, tensors = store.load(store.latest(), FINGERPRINT)
    assert state["step"] == 10
    assert tensors["x"].tolist() == [10.0, 10.0, 10.0]


def test_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
    assert names(tmp_path) == ["latest", "step_10", "step_2"]


def test_latest_survives_a_lost_pointer_and_an_incomplete_folder(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 9)
    save(store, 10)
    (tmp_path / "latest").unlink()
    (tmp_path / "step_10" / "trainer_state.json").unlink()
    assert store.latest() == tmp_path / "step_9"


def test_a_full_disk_keeps_what_was_there(tmp_path):
    """The device /dev/full refuses every write, as a full disk does."""
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)

    def full(folder: Path):
        (folder / "optimizer.pt").symlink_to("/dev/full")

    with pytest.raises(CheckpointError, match=r"cannot save .*step_2.*newest complete checkpoint is .*step_1"):
        save(store, 2, full)

    def full_lora(folder: Path):
        with open("/dev/full", "w") as handle:
            handle.write("x")

    with pytest.raises(CheckpointError, match=r"cannot save .*step_2: the disk is full"):
        save(store, 2, full_lora)
    assert names(tmp_path) == ["latest", "step_1"]
    assert store.latest() == tmp_path / "step_1"


def test_an_error_that_is_not_about_writing_travels(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)

    def broken(folder: Path):
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        save(store, 1, broken)
    assert names(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 3)
    save(store, 3, lambda folder: (folder / "lora").write_text("newer"))
    assert (tmp_path / "step_3" / "lora").read_text() == "newer"
    assert names(tmp_path) == ["latest", "step_3"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Fingerprint("FluxPipeline", {}, {}), "is a checkpoint of a QwenImagePipeline, this run trains a FluxPipeline"),
        (Fingerprint("QwenImagePipeline", {"num_layers": 60, "axes": [8, 12]}, {"rank": 8}), "num_layers is 4 there"),
        (Fingerprint("QwenImagePipeline", {"num_layers": 4, "axes": [8, 12]}, {"rank": 16}), "lora rank is 8 there"),
    ],
)
def test_another_model_is_named(tmp_path, other, message):
    store = CheckpointStore(tmp_path, keep=None)
    folder = save(store, 1)
    with pytest.raises(CheckpointError, match=message):
        store.load(folder, other)


def test_a_damaged_checkpoint_is_named(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    folder = save(store, 1)
    (folder / "trainer_state.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(CheckpointError, match="cannot be read: KeyError"):
        store.load(folder, FINGERPRINT)


def test_global_random_states_round_trip(tmp_path):
    import random

    def draw():
        return random.random(), np.random.rand(), torch.rand(2).tolist()  # noqa: NPY002

    states = random_states()
    torch.save(states, tmp_path / "states.pt")
    first = draw()
    restore_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draw() == first


def test_a_users_copy_is_left_alone(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    folder = save(store, 4)
    folder.rename(tmp_path / "step_4_best")
    save(store, 5)
    save(store, 6)
    assert names(tmp_path) == ["latest", "step_4_best", "step_6"]


def test_an_abandoned_branch_is_forgotten(tmp_path):
    """Going back to step 1 and on to step 2 must not leave step 4 as the newest."""
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 4):
        CheckpointStore(tmp_path, keep=None).save(step, {"step": step}, {}, lambda folder: None)
    store.forget_after(1)
    assert store.latest() == tmp_path / "step_1"
    save(store, 2)
    assert names(tmp_path) == ["latest", "step_2"]
    store.forget_after(-1)
    assert store.latest() is None


def test_a_truncated_checkpoint_is_named(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    folder = save(store, 1)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step_1 cannot be read"):
        store.load(folder, FINGERPRINT)
