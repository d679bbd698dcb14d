"""Checkpoints: complete or absent, found again, never lost to a failed write."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_support import names

from flowgrpo_rc.trainer.checkpoint import (
    CheckpointError,
    CheckpointStore,
    DamagedCheckpointError,
    random_states,
    restore_random_states,
)


def fingerprint(pipeline, transformer, lora):
    return {"pipeline": pipeline, "transformer": transformer, "lora": lora}


FINGERPRINT = fingerprint("QwenImagePipeline", {"num_layers": 4, "axes": [8, 12]}, {"rank": 8})


def save(store, step, write_lora=lambda folder: (folder / "lora").write_text("weights")):
    state = {"step": step, "fingerprint": FINGERPRINT}
    return store.save(step, state, {"x": torch.full((3,), float(step))}, write_lora)


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


def test_saving_a_step_again_moves_the_earlier_one_aside(tmp_path):
    root = tmp_path / "checkpoints"
    store = CheckpointStore(root, keep=None)
    save(store, 3)
    for number, text in ((1, "newer"), (2, "newest")):
        save(store, 3, lambda folder, text=text: (folder / "lora").write_text(text))
        assert (root / "step_3" / "lora").read_text() == text
        assert names(root) == ["latest", "step_3"]
        assert names(tmp_path / f"checkpoints.{number}") == ["step_3"]
    assert (tmp_path / "checkpoints.1" / "step_3" / "lora").read_text() == "weights"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (fingerprint("FluxPipeline", {}, {}), "is a checkpoint of a QwenImagePipeline, this run trains a FluxPipeline"),
        (fingerprint("QwenImagePipeline", {"num_layers": 60, "axes": [8, 12]}, {"rank": 8}), "num_layers is 4 there"),
        (fingerprint("QwenImagePipeline", {"num_layers": 4, "axes": [8, 12]}, {"rank": 16}), "lora rank is 8 there"),
    ],
)
def test_another_model_is_named(tmp_path, other, message):
    store = CheckpointStore(tmp_path, keep=None)
    folder = save(store, 1)
    with pytest.raises(CheckpointError, match=message):
        store.load(folder, other)


def test_global_random_states_round_trip(tmp_path):
    import random

    def draw():
        return random.random(), np.random.rand(), torch.rand(2).tolist()  # noqa: NPY002

    states = random_states()
    torch.save(states, tmp_path / "states.pt")
    first = draw()
    restore_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draw() == first


def test_an_abandoned_branch_moves_aside(tmp_path):
    """Going back to step 1 and on to step 2 must not leave step 4 as the newest, nor lose it."""
    root = tmp_path / "checkpoints"
    store = CheckpointStore(root, keep=1)
    for step in (1, 4):
        CheckpointStore(root, keep=None).save(step, {"step": step}, {}, lambda folder: None)
    (root / "step_9").mkdir()  # incomplete
    assert store.set_aside_after(1) == ["checkpoints/step_4, step_9 to checkpoints.1/"]
    assert store.latest() == root / "step_1"
    assert (root / "latest").read_text() == "step_1"
    assert names(tmp_path / "checkpoints.1") == ["step_4", "step_9"]
    assert store.set_aside_after(1) == []
    save(store, 2)
    assert names(root) == ["latest", "step_2"]
    store.set_aside_after(0)
    assert store.latest() is None
    assert names(tmp_path / "checkpoints.2") == ["step_2"]


def change(folder, key, value):
    """Edit an entry of the state, as no run does."""
    file = folder / "trainer_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


DAMAGE = {
    "state empty": (lambda f: (f / "trainer_state.json").write_bytes(b""), "trainer_state.json is damaged"),
    "state cut": (lambda f: (f / "trainer_state.json").write_text('{"step": 1'), "trainer_state.json is damaged"),
    "state missing": (lambda f: (f / "trainer_state.json").unlink(), "trainer_state.json is damaged"),
    "state of another step": (lambda f: change(f, "step", 7), "trainer_state.json is damaged: its step is 7"),
    "state without a step": (lambda f: change(f, "step", None), "trainer_state.json is damaged: it cannot be read"),
    "adapter missing": (lambda f: (f / "lora").unlink(), "lora cannot be read: FileNotFoundError"),
    "adapter changed": (lambda f: (f / "lora").write_text("weightz"), "lora is damaged: it is not what was saved"),
    "tensors cut": (lambda f: os.truncate(f / "optimizer.pt", 100), "optimizer.pt is damaged: it is not what was"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    store = CheckpointStore(tmp_path, keep=None)
    folder = save(store, 1)
    assert store.load(folder, FINGERPRINT)
    edit, message = DAMAGE[damage]
    edit(folder)
    with pytest.raises(DamagedCheckpointError, match=f"step_1/{message}"):
        store.load(folder, FINGERPRINT)


@pytest.mark.parametrize(
    "damage", [lambda content: content[:100], lambda content: content.replace(b"\0\0\x80?", b"\0\0\x80@")]
)
def test_a_checkpoint_of_an_earlier_version_loads_and_its_damage_is_named(tmp_path, damage):
    """Its format has no digest of ``optimizer.pt``. The second damage makes another number of 1.0."""
    store = CheckpointStore(tmp_path, keep=None)
    folder = save(store, 1)
    state = json.loads((folder / "trainer_state.json").read_text())
    change(folder, "digests", {"lora": state["digests"]["lora"]})
    assert store.load(folder, FINGERPRINT)[1]["x"].tolist() == [1.0, 1.0, 1.0]
    content = (folder / "optimizer.pt").read_bytes()
    (folder / "optimizer.pt").write_bytes(damage(content))
    with pytest.raises(DamagedCheckpointError, match="step_1/optimizer.pt (cannot be read|is damaged: its checksums)"):
        store.load(folder, FINGERPRINT)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"banana", b"../../elsewhere/step_1", "step_\u00b2".encode()])
def test_a_latest_that_names_no_checkpoint_is_refused(tmp_path, content):
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"latest names no checkpoint .*remove it to go on from .*step_1$"):
        store.latest()


def test_a_stale_latest_is_reported_and_a_lost_one_replaced(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / "step_3" / "trainer_state.json").unlink()  # incomplete
    alerts = []
    for name, expected in (("step_2", 0), ("", 0), ("step_5", 1)):
        (tmp_path / "latest").write_text(name)
        assert store.latest(alerts.append) == tmp_path / "step_2"
        assert len(alerts) == expected
    assert "latest names step_5, which is no complete checkpoint; the newest" in alerts[0]
    (tmp_path / "latest").unlink()
    assert store.latest(alerts.append) == tmp_path / "step_2"


def test_everything_is_on_the_disk_when_save_returns(tmp_path, monkeypatch):
    """Each file before its rename, ``latest`` before its own, and the folder that holds the names last."""
    events = []
    fsync, replace = os.fsync, os.replace
    at = {}

    def synced(descriptor):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def renamed(old, new):
        events.append(("rename", Path(new).name))
        at[Path(new).name] = len(events)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    save(CheckpointStore(tmp_path / "checkpoints", keep=None), 1)
    first = {name for kind, name in events[: at["step_1"] - 1] if kind == "sync"}
    assert {"lora", "optimizer.pt", "trainer_state.json", ".step_1.writing"} <= first
    assert ("sync", "latest.writing") in events[at["step_1"] : at["latest"] - 1]
    assert ("sync", "checkpoints") in events[at["latest"] :]
