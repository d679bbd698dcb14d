"""Resuming: a damaged checkpoint costs a message that names it and the next whole one, and changes nothing."""

import json
import os
import shutil

import pytest
import torch
from tests_support import ADAPTER, overrides_of

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer
from flowgrpo_rc.trainer.checkpoint import CheckpointStore, checkpoint_to_resume, load_run

pytestmark = pytest.mark.run
AUTO = ("trainer.resume_mode=auto", "trainer.save_freq=1", "trainer.total_training_steps=3", "data.val_files=null")
LEARNING = (
    "actor_rollout_ref.actor.ema_decay=0.9",
    "actor_rollout_ref.actor.diffusion_loss.clip_ratio=auto",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=auto",
)
"""Everything that a checkpoint may hold."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer, three steps on, and its folder; the tests damage copies of its checkpoints."""
    root = tmp_path_factory.mktemp("trained") / "run"
    trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", overrides_of(root, *AUTO, *LEARNING)))
    trainer.fit()
    return trainer


@pytest.fixture
def checkpoints(trained, tmp_path):
    shutil.copytree(trained.folder.checkpoints, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def tree(root):
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def edit_tensors(change):
    """Change tensors, with the digests of what is changed, as another version of the program might write them."""

    def edit(folder):
        tensors = torch.load(folder / "optimizer.pt", weights_only=True)
        change(tensors)
        torch.save(tensors, folder / "optimizer.pt")
        file = folder / "trainer_state.json"
        state = json.loads(file.read_text())
        del state["digests"]["optimizer.pt"]
        file.write_text(json.dumps(state))

    return edit


def truncate(name, share):
    def edit(folder):
        os.truncate(folder / name, int(os.path.getsize(folder / name) * share))

    return edit


OTHER = "is damaged or of another version"
DAMAGE = {
    "state cut": (truncate("trainer_state.json", 0.5), "trainer_state.json is damaged"),
    "no optimizer": (edit_tensors(lambda t: t.pop("optimizer")), rf"{OTHER} .*KeyError: 'optimizer'"),
    "guard short": (edit_tensors(lambda t: t["guard"].pop("returns")), rf"{OTHER} .*KeyError: 'returns'"),
    "bands of nothing": (edit_tensors(lambda t: t["rejection_bands"].pop("values")), rf"{OTHER} .*KeyError: 'values'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_with_the_next_whole_checkpoint(trained, checkpoints, damage):
    """Step 3 is damaged, and so is step 2: the message leads to step 1, and nothing has been touched."""
    edit, message = DAMAGE[damage]
    edit(checkpoints / "step_3")
    truncate("optimizer.pt", 0.5)(checkpoints / "step_2")
    before = tree(checkpoints)
    store = CheckpointStore(checkpoints, keep=1)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_run(trained.run, store, checkpoints / "step_3")
    text = str(caught.value)
    assert text.startswith(str(checkpoints / "step_3"))
    assert "\n" not in text
    assert text.endswith(
        f"The newest older checkpoint that is whole is {checkpoints / 'step_1'}; resume from it with "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={checkpoints / 'step_1'}"
    )
    assert tree(checkpoints) == before


def test_without_a_whole_one_it_says_so(trained, checkpoints):
    for step in (1, 2, 3):
        truncate(ADAPTER, 0.5)(checkpoints / f"step_{step}")
    with pytest.raises(CheckpointError, match="No older checkpoint is whole; start afresh with trainer.resume_mode="):
        load_run(trained.run, CheckpointStore(checkpoints, None), checkpoints / "step_3")


def test_whole_checkpoints_load(trained, checkpoints):
    for step in (1, 2, 3):
        assert load_run(trained.run, CheckpointStore(checkpoints, None), checkpoints / f"step_{step}") == step
    (checkpoints / "step_2").rename(checkpoints / "best")
    assert load_run(trained.run, CheckpointStore(checkpoints, None), checkpoints / "best") == 2


def test_other_training_prompts_are_warned_of(trained, checkpoints, monkeypatch):
    """As many as before, so that the sampler goes on."""
    monkeypatch.setattr(trained.run, "train_prompts", trained.run.train_prompts[::-1])
    with pytest.warns(UserWarning, match="the training prompts are not those that .*step_1 has learned from"):
        load_run(trained.run, CheckpointStore(checkpoints, None), checkpoints / "step_1")


def test_a_damaged_checkpoint_leaves_the_run_folder_as_it_was(small_config):
    folder = FlowGRPOTrainer(small_config(*AUTO)).fit().root
    truncate("trainer_state.json", 0.5)(folder / "checkpoints" / "step_3")
    before = tree(folder)
    with pytest.raises(CheckpointError, match=r"trainer_state.json is damaged.*resume_from_path=.*step_2$"):
        FlowGRPOTrainer(small_config(*AUTO))
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", r"there is no .*nowhere; give a checkpoints/step_N folder"),
        ("checkpoints", r"checkpoints holds no trainer_state.json.*; near it are .*step_1, .*step_2, .*step_3"),
        (".", r"holds no trainer_state.json.*; near it are .*step_1"),
        ("checkpoints/latest", r"latest holds no trainer_state.json.*near it are .*step_3"),
        ("checkpoints/step_9", r"there is no .*step_9; near it are .*step_3"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(trained, checkpoints, path, message):
    config = compose("tiny_qwen_image_ocr", ["trainer.resume_mode=resume_path", "trainer.resume_from_path=x"]).trainer
    config.resume_from_path = str(checkpoints.parent / path)
    with pytest.raises(CheckpointError, match=f"trainer.resume_from_path: .*{message}"):
        checkpoint_to_resume(config, CheckpointStore(checkpoints, None))
