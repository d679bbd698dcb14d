"""Resuming: a damaged checkpoint costs a message that names it and the next whole one, and changes nothing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer
from flowgrpo_rc.trainer.checkpoint import CheckpointStore
from flowgrpo_rc.trainer.resume import checkpoint_to_resume, load_run

ADAPTER = "pytorch_lora_weights.safetensors"
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
    from tests_support import overrides_of

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


def edit_state(change):
    def edit(folder):
        file = folder / "trainer_state.json"
        state = json.loads(file.read_text())
        change(state)
        file.write_text(json.dumps(state))

    return edit


def moment(tensors, change):
    state = tensors["optimizer"]["state"][0]
    state["exp_avg"] = change(state["exp_avg"])


def edit_tensors(change):
    def edit(folder):
        tensors = torch.load(folder / "optimizer.pt", weights_only=True)
        change(tensors)
        torch.save(tensors, folder / "optimizer.pt")

    return edit


def edit_adapter(change):
    def edit(folder):
        tensors = load_file(folder / ADAPTER)
        change(tensors)
        save_file(tensors, folder / ADAPTER)
        state = json.loads((folder / "trainer_state.json").read_text())
        del state["digests"]  # so that the values are looked at too
        (folder / "trainer_state.json").write_text(json.dumps(state))

    return edit


def truncate(name, share):
    def edit(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return edit


def without_digests(edit):
    def both(folder):
        edit_state(lambda state: state.pop("digests"))(folder)
        edit(folder)

    return both


def first(tensors):
    return sorted(tensors)[0]


DAMAGE = {
    "adapter empty": (truncate(ADAPTER, 0), ADAPTER),
    "adapter cut": (truncate(ADAPTER, 0.5), ADAPTER),
    "adapter cut, without its digest": (without_digests(truncate(ADAPTER, 0.5)), ADAPTER),
    "adapter missing": (lambda folder: (folder / ADAPTER).unlink(), ADAPTER),
    "adapter NaN": (edit_adapter(lambda t: t[first(t)].fill_(torch.nan)), ADAPTER),
    "adapter of integers": (edit_adapter(lambda t: t.update({first(t): t[first(t)].to(torch.int32)})), ADAPTER),
    "adapter NaN in eight bits": (
        edit_adapter(lambda t: t.update({first(t): torch.full_like(t[first(t)], torch.nan).to(torch.float8_e4m3fn)})),
        ADAPTER,
    ),
    "adapter of another shape": (edit_adapter(lambda t: t.update({first(t): torch.zeros(2, 2)})), ADAPTER),
    "adapter without a weight": (edit_adapter(lambda t: t.pop(first(t))), ADAPTER),
    "optimizer empty": (truncate("optimizer.pt", 0), "optimizer.pt"),
    "optimizer cut": (truncate("optimizer.pt", 0.9), "optimizer.pt"),
    "no optimizer": (edit_tensors(lambda t: t.pop("optimizer")), "optimizer.pt is damaged: optimizer is missing"),
    "optimizer a list": (edit_tensors(lambda t: t.update(optimizer=[])), "optimizer is a list, not a dict"),
    "no moments": (edit_tensors(lambda t: t["optimizer"].update(state={})), "holds 0 of"),
    "no state": (edit_tensors(lambda t: t["optimizer"].pop("state")), "optimizer.state is missing"),
    "no groups": (edit_tensors(lambda t: t["optimizer"].pop("param_groups")), "optimizer.param_groups is missing"),
    "two groups": (edit_tensors(lambda t: t["optimizer"]["param_groups"].append({})), "is not one group of"),
    "group a number": (edit_tensors(lambda t: t["optimizer"].update(param_groups=[3])), "is not one group of"),
    "moment of another shape": (
        edit_tensors(lambda t: t["optimizer"]["state"][0].update(exp_avg=torch.zeros(3))),
        r"optimizer.state.0.exp_avg is \(3,\), not a tensor of shape",
    ),
    "moment missing": (
        edit_tensors(lambda t: t["optimizer"]["state"][1].pop("exp_avg_sq")),
        "1.exp_avg_sq is missing",
    ),
    "moment NaN": (
        edit_tensors(lambda t: t["optimizer"]["state"][0]["exp_avg"].fill_(torch.nan)),
        "optimizer.state.0.exp_avg holds values that are NaN",
    ),
    "moment sparse": (edit_tensors(lambda t: moment(t, torch.Tensor.to_sparse)), "exp_avg does not hold every one of"),
    "moment a repeated number": (
        edit_tensors(lambda t: moment(t, lambda m: torch.zeros(1).expand(m.shape))),
        "exp_avg does not hold every one of its values",
    ),
    "moment without memory": (edit_tensors(lambda t: moment(t, lambda m: m.to("meta"))), "optimizer.pt"),
    "moment in eight bits": (
        edit_tensors(lambda t: moment(t, lambda m: torch.full_like(m, torch.nan).to(torch.float8_e4m3fn))),
        "exp_avg holds values that are NaN",
    ),
    "second moment negative": (
        edit_tensors(lambda t: t["optimizer"]["state"][0]["exp_avg_sq"].fill_(-1.0)),
        "second moment is negative",
    ),
    "steps of another run": (
        edit_tensors(lambda t: t["optimizer"]["state"][0]["step"].fill_(90.0)),
        "has taken 90 steps and its schedule 6",
    ),
    "no schedule": (edit_tensors(lambda t: t.pop("lr_scheduler")), "lr_scheduler is missing"),
    "schedule without a position": (
        edit_tensors(lambda t: t["lr_scheduler"].pop("last_epoch")),
        "lr_scheduler.last_epoch is missing",
    ),
    "schedule before its start": (edit_tensors(lambda t: t["lr_scheduler"].update(last_epoch=-3)), "last_epoch is -3"),
    "schedule at a text": (edit_tensors(lambda t: t["lr_scheduler"].update(last_epoch="6")), "last_epoch is a str"),
    "no random": (edit_tensors(lambda t: t.pop("random")), "random is missing"),
    "random a number": (edit_tensors(lambda t: t.update(random=3)), "random is a int"),
    "no python": (edit_tensors(lambda t: t["random"][0].pop("python")), "random.0.python is missing"),
    "python short": (
        edit_tensors(lambda t: t["random"][0].update(python=(3, [1, 2], None))),
        "random.0.python is no state",
    ),
    "numpy a text": (edit_tensors(lambda t: t["random"][0].update(numpy="MT19937")), "random.0.numpy is no state"),
    "torch short": (edit_tensors(lambda t: t["random"][0].update(torch=torch.zeros(3))), "random.0.torch is no state"),
    "cuda a text": (edit_tensors(lambda t: t["random"][0].update(cuda="x")), "random.0.cuda is no state"),
    "average a list": (edit_tensors(lambda t: t.update(average=[])), "average is a list"),
    "average short": (edit_tensors(lambda t: t["average"]["shadow_params"].pop()), "average.shadow_params has"),
    "average NaN": (edit_tensors(lambda t: t["average"]["shadow_params"][0].fill_(torch.nan)), "shadow_params.0 holds"),
    "average at a text": (
        edit_tensors(lambda t: t["average"].update(optimization_step="1")),
        "optimization_step is a str",
    ),
    "bands a list": (edit_tensors(lambda t: t.update(clip_bands=[])), "clip_bands is a list"),
    "bands NaN": (
        edit_tensors(lambda t: next(iter(t["clip_bands"]["values"].values())).append(float("nan"))),
        "not a list of finite",
    ),
    "bands of texts": (edit_tensors(lambda t: t["clip_bands"].update(values={"a": ["b"]})), "not a list of finite"),
    "bands without values": (edit_tensors(lambda t: t["rejection_bands"].pop("values")), "KeyError: 'values'"),
    "bands of nothing": (edit_tensors(lambda t: t["rejection_bands"].update(of=[])), r"rejection_bands.of is \[\]"),
    "no guard": (edit_tensors(lambda t: t.pop("guard")), "guard is missing"),
    "guard short": (edit_tensors(lambda t: t["guard"].pop("returns")), "state of guard is of another version"),
    "guard at a text": (edit_tensors(lambda t: t["guard"].update(safe="1")), "guard.safe is a str"),
    "guard's counter": (
        edit_tensors(lambda t: t["guard"]["over"].update(dict.fromkeys(t["guard"]["over"], "1"))),
        "guard.over.* is a str",
    ),
    "guard's causes": (edit_tensors(lambda t: t["guard"].update(causes=[3])), r"guard.causes is \[3\]"),
    "state a list": (lambda folder: (folder / "trainer_state.json").write_text("[]"), "trainer_state.json is damaged"),
    "step before the first": (edit_state(lambda s: s.update(step=-5)), "its step is -5"),
    "step of another folder": (edit_state(lambda s: s.update(step=2)), "its step is 2, its folder's 3"),
    "step beyond all": (edit_state(lambda s: s.update(step=10**30)), "its folder's 3"),
    "no sampler": (edit_state(lambda s: s.pop("sampler")), "sampler is missing"),
    "sampler a number": (edit_state(lambda s: s.update(sampler=3)), "sampler is a int"),
    "sampler without a position": (edit_state(lambda s: s["sampler"].pop("position")), "sampler.position is missing"),
    "sampler at a text": (edit_state(lambda s: s["sampler"].update(epoch="0")), "sampler.epoch is a str"),
    "sampler elsewhere": (edit_state(lambda s: s["sampler"].update(position=5)), "its sampler has given 5 batches"),
    "sampler beyond its epoch": (edit_state(lambda s: s["sampler"].update(position=10**9)), "does not exist"),
    "fingerprint a list": (edit_state(lambda s: s.update(fingerprint=[])), "fingerprint is a list"),
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
    with pytest.raises(
        CheckpointError, match="No older checkpoint is whole; start afresh with trainer.resume_mode=dis"
    ):
        load_run(trained.run, CheckpointStore(checkpoints, None), checkpoints / "step_3")


def test_whole_checkpoints_load(trained, checkpoints):
    for step in (1, 2, 3):
        assert load_run(trained.run, CheckpointStore(checkpoints, None), checkpoints / f"step_{step}") == step
    (checkpoints / "step_2").rename(checkpoints / "best")
    assert load_run(trained.run, CheckpointStore(checkpoints, None), checkpoints / "best") == 2


def test_a_damaged_checkpoint_leaves_the_run_folder_as_it_was(small_config):
    folder = FlowGRPOTrainer(small_config(*AUTO)).fit().root
    edit_state(lambda state: state.update(step=-5))(folder / "checkpoints" / "step_3")
    before = tree(folder)
    with pytest.raises(CheckpointError, match=r"its step is -5.*resume_from_path=.*step_2$"):
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
        ("x" * 300, "cannot be looked into: .*File name too long"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(trained, checkpoints, path, message):
    config = compose("tiny_qwen_image_ocr", ["trainer.resume_mode=resume_path", "trainer.resume_from_path=x"]).trainer
    config.resume_from_path = str(checkpoints.parent / path)
    with pytest.raises(CheckpointError, match=f"trainer.resume_from_path: .*{message}"):
        checkpoint_to_resume(config, CheckpointStore(checkpoints, None))


def test_a_stale_latest_is_said_when_resuming(trained, checkpoints):
    config = compose("tiny_qwen_image_ocr", ["trainer.resume_mode=auto"]).trainer
    (checkpoints / "latest").write_text("step_7")
    said = []
    assert checkpoint_to_resume(config, CheckpointStore(checkpoints, None), said.append) == checkpoints / "step_3"
    assert len(said) == 1
    assert "latest names step_7" in said[0]
