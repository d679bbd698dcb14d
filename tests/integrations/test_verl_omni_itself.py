"""The verl-omni drop-in inside verl-omni: its own trainer, its own loss, its own way of loading an `external_lib`.

Needs verl-omni v0.2.0 and the verl that it pins, which are on GitHub alone: `make verl-omni`. There is no GPU and no
vllm: what rolls out is replaced by empty modules, and the trainer is given a batch. The rest is verl-omni's own code.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import site
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import OmegaConf

DROP_IN = "flowgrpo_rc.integrations.verl_omni"
ABSENT = ("vllm", "vllm_omni", "datasets", "uvicorn", "fastapi", "msgspec", "aiohttp")
"""Imports of verl-omni that this test does without."""
OF_VLLM = ("verl.third_party.vllm", "verl.workers.rollout.vllm_rollout", "verl_omni.workers.rollout.vllm_rollout")
"""The module that looks for a version of vllm."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl_omni") is None, reason="needs verl-omni, which is on GitHub alone: make verl-omni"
)


class Empty(types.ModuleType):
    """A module in which everything is found, and nothing does anything."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        # Classes may be inherited from.
        value = type(name, (), {}) if name[:1].isupper() else MagicMock()
        setattr(self, name, value)
        return value


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        absent = any(f"{name}.".startswith(f"{one}.") for one in (*ABSENT, *OF_VLLM))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def omni():
    """verl-omni, imported as it is."""
    absent = Absent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "getsitepackages", list)  # into which it writes where it finds a vllm
        sys.meta_path.insert(0, absent)
        try:
            import verl_omni
            import verl_omni.trainer.diffusion.ray_diffusion_trainer
            import verl_omni.trainer.diffusion.v1.trainer_base
            import verl_omni.workers.utils.losses

            yield verl_omni
        finally:
            sys.meta_path.remove(absent)


@pytest.fixture
def drop_in(omni):
    """Loaded as verl-omni's trainer process and its workers load it, and taken out again."""
    from verl_omni.pipelines.model_base import DiffusionModelBase

    sys.modules.pop(DROP_IN, None)
    DiffusionModelBase.get_class_by_name("QwenImagePipeline", "flow_grpo", DROP_IN)  # `TaskRunner.run` does this
    loaded = sys.modules[DROP_IN]
    yield loaded
    loaded.installed.undo()


OLD = torch.log(torch.tensor([[1.0, 1.5], [0.55, 1.0], [1.0, 1.0], [2.5, 1.2]]))
"""Of rollout log-probs of 0: the ratios of train over rollout."""
TIMES = torch.tensor([[900.0, 700.0]] * 4)


class Stages:
    """The trainer that `_step_once` calls: it gives a batch and learns from one."""

    def __init__(self, base, section):
        self.base = base
        self.config = OmegaConf.create({"algorithm": {"rollout_correction": section}})
        self.tokenizer = types.SimpleNamespace(pad_token_id=0)
        self.reward_loop_manager = types.SimpleNamespace(reward_loop_worker_handles=[])
        self.use_rm = self.use_reference_policy = self.use_teacher_policy = False
        self.on_sample_begin = self.on_sample_end = lambda: None
        self.global_steps = 1
        keys = types.SimpleNamespace(keys=[str(row) for row in range(len(OLD))], partition_id="train")
        self.replay_buffer = types.SimpleNamespace(sample=lambda *_, **__: (keys, {}))
        self.learned = None

    def _balance_batch(self, data, metrics):
        return data

    def _compute_old_log_prob(self, data):
        return self.base.DataProto.from_dict({"old_log_probs": OLD})

    def _compute_advantage(self, data):
        data.batch["advantages"] = torch.tensor([[1.0], [-1.0], [0.5], [2.0]]).expand(-1, 2).contiguous()
        return data

    def _update_actor(self, data):
        self.learned = data
        return types.SimpleNamespace(meta_info={"metrics": {}})

    def step(self, monkeypatch):
        """verl-omni's own step on it; returns its metrics."""
        import verl_omni.trainer.diffusion.v1.tq_utils as queue

        batch = self.base.DataProto.from_dict({"rollout_log_probs": torch.zeros(4, 2), "all_timesteps": TIMES})
        monkeypatch.setattr(self.base, "diffusion_tq_batch_to_dataproto", lambda meta, pad_token_id: batch)
        monkeypatch.setattr(queue, "put_dataproto_fields_to_tq", lambda *args, **kwargs: None)
        metrics = {}
        self.base.PolicyGradientDiffusionTrainerV1._step_once(self, metrics, {}, 4)
        return metrics


@pytest.fixture
def step(omni, monkeypatch):
    import verl_omni.trainer.diffusion.v1.trainer_base as base

    def run(**section):
        stages = Stages(base, {"bypass_mode": False, **section})
        return stages.step(monkeypatch), stages.learned.batch

    return run


REJECTING = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.6_1.4",
}


def test_external_lib_puts_it_everywhere_where_verl_omni_corrects(drop_in):
    home = "verl_omni.trainer.diffusion"
    names = ("apply_bypass_mode_to_diffusion_batch", "apply_rollout_correction_to_diffusion_batch")
    more = ("compute_rollout_corr_metrics_from_batch", "rollout_correction_enabled")
    for module in ("rollout_correction", "ray_diffusion_trainer", "v1.trainer_base"):
        for name in (*names, *more):
            assert f"{home}.{module}.{name}" in drop_in.installed.places
    helper = "verl_omni.workers.utils.losses.compute_rollout_correction_and_rejection_mask"
    assert helper in drop_in.installed.places


def test_a_step_of_its_trainer_corrects_with_the_documented_band(step, drop_in):
    metrics, learned = step(**REJECTING)
    # Ratios 1.5, .55 and 2.5 lie outside [.6, 1.4]; the weights of the others are the ratios, capped at 2.
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.2]])
    torch.testing.assert_close(learned["rollout_is_weights"], expected)
    assert learned["rollout_keep"].tolist() == expected.bool().tolist()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 8)
    assert metrics["rollout_corr/logprob_abs_diff/ts_900"] == pytest.approx(float(OLD[:, 0].abs().mean()))


def test_without_rejection_both_learn_from_the_same_weights(step, omni):
    section = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
    _, theirs = step(**section)
    drop = importlib.import_module(DROP_IN)
    drop.install()
    try:
        _, ours = step(**section)
    finally:
        drop.installed.undo()
    torch.testing.assert_close(ours["rollout_is_weights"], theirs["rollout_is_weights"])


def test_in_bypass_mode_its_loss_rejects_by_the_documented_band(drop_in):
    """Its own `diffusion_loss`, with its own configuration."""
    from tensordict import TensorDict
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.utils import tensordict_utils
    from verl_omni.workers.config import FSDPDiffusionActorConfig
    from verl_omni.workers.config.diffusion.actor import DiffusionLossConfig
    from verl_omni.workers.utils.losses import diffusion_loss

    rejecting = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.4")
    config = FSDPDiffusionActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=4,
        rollout_correction=rejecting,
        diffusion_loss=DiffusionLossConfig(clip_ratio=10.0),
    )
    ratio = torch.tensor([1.5, 0.65, 1.0, 0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    data = TensorDict({"old_log_probs": torch.zeros(4), "advantages": advantages}, batch_size=4)
    tensordict_utils.assign_non_tensor(data, gradient_accumulation_steps=1, sp_size=1)
    loss, metrics = diffusion_loss(config, {"log_probs": ratio.log()}, data)
    loss.backward()
    # 1.5 and .5 are outside of [.6, 1.4]; in the mirrored band 1.5 would stay, and .65 would go.
    kept = torch.tensor([0.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(ratio.grad, -advantages * kept / 4)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].aggregate() == pytest.approx(0.5)
