"""Settings that the actor's configuration refuses, and the sources of its rollout correction."""

import subprocess
import sys

import pytest

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig, OptimizerConfig
from flowgrpo_rc.correction import RolloutCorrectionConfig


def test_rollout_correction_from_object_mapping_preset_or_nothing():
    made = RolloutCorrectionConfig(bypass_mode=True)
    assert DiffusionActorConfig(rollout_correction=made).rollout_correction is made
    assert DiffusionActorConfig(rollout_correction={"bypass_mode": True}).rollout_correction == made
    preset = DiffusionActorConfig(rollout_correction={"preset": "decoupled_token_is"}).rollout_correction
    assert (preset.rollout_is, preset.bypass_mode) == ("token", False)
    assert DiffusionActorConfig(rollout_correction=None).rollout_correction.rollout_is is None


MAPPINGS = """
from flowgrpo_rc import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.actor import OptimizerConfig

made = DiffusionActorConfig(diffusion_loss={"clip_ratio": 1e-3, "loss_mode": "flow_dppo"}, optim={"lr": 2e-4})
loss, optim = DiffusionLossConfig(clip_ratio=1e-3, loss_mode="flow_dppo"), OptimizerConfig(lr=2e-4)
assert made == DiffusionActorConfig(diffusion_loss=loss, optim=optim), made
try:
    DiffusionActorConfig(diffusion_loss={"clip": 0.1})
except ValueError as error:
    assert "actor.diffusion_loss: has no key clip; its keys are loss_mode, clip_ratio" in str(error), error
else:
    raise AssertionError("a key that does not exist was accepted")
"""


def test_sections_may_be_mappings():
    """In a process of its own: the tests' type checks hold the fields to what they are once constructed."""
    done = subprocess.run([sys.executable, "-c", MAPPINGS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiffusionActorConfig(ppo_epochs=0), "actor.ppo_epochs: got 0; give a number above 0"),
        (lambda: DiffusionActorConfig(ppo_micro_batch_rows=0), "actor.ppo_micro_batch_rows: got 0; give .* or null"),
        (lambda: DiffusionActorConfig(kl_loss_coef=-1.0), "actor.kl_loss_coef: got -1.0; give 0 or more"),
        (
            lambda: DiffusionActorConfig(use_kl_loss=True, kl_loss_type="mse"),
            "actor.kl_loss_type: got 'mse'; choose one of gaussian, velocity",
        ),
        (
            lambda: DiffusionActorConfig(use_kl_loss=True, kl_reference="old"),
            "actor.kl_reference: got 'old'; choose one of base, start, average",
        ),
        (
            lambda: DiffusionActorConfig(use_kl_loss=True, kl_reference="average"),
            "actor.kl_reference: got average without ema_decay; set ema_decay=0.99, or kl_reference to base or start",
        ),
        (
            lambda: DiffusionActorConfig(kl_reference="start"),
            "actor.kl_reference: got start with use_kl_loss=false, which computes no KL; set use_kl_loss=true",
        ),
        (lambda: DiffusionActorConfig(kl_loss_type="velocity"), "actor.kl_loss_type: got velocity with use_kl_loss="),
        (
            lambda: DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(ref_kl_coef=0.5)),
            "diffusion_loss.ref_kl_coef: got 0.5 with loss_mode=flow_grpo, which does not read it; set it to 0",
        ),
        (lambda: DiffusionActorConfig(ema_decay=1.0), "actor.ema_decay: got 1.0; give a number between 0 and 1 or"),
        (lambda: DiffusionActorConfig(ema_decay=0.0), "actor.ema_decay: got 0.0"),
        (lambda: DiffusionLossConfig(clip_ratio=0.0), "diffusion_loss.clip_ratio: got 0.0"),
        (lambda: DiffusionLossConfig(clip_ratio=float("nan")), "diffusion_loss.clip_ratio: got nan"),
        (lambda: DiffusionLossConfig(loss_mode="ppo"), "loss_mode: got 'ppo'; choose one of flow_grpo, dance_grpo"),
        (lambda: OptimizerConfig(lr_warmup_steps=5), "lr_warmup_steps: got 5, but lr_scheduler_type=constant has no"),
        (lambda: OptimizerConfig(betas=[0.9]), r"optim.betas: got \[0.9\]; give two numbers"),
        (
            lambda: DiffusionActorConfig(
                rollout_correction={"bypass_mode": True, "rollout_is": "token", "rollout_is_batch_normalize": True}
            ),
            "rollout_is_batch_normalize: got true with bypass_mode=true",
        ),
        (lambda: DiffusionActorConfig(rollout_correction={"rollout_iz": "token"}), "rollout_iz.*rollout_is"),
    ],
)
def test_refusals_name_field_value_and_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
