"""The mode in force: what it reads of the configuration, and what decoupled mode makes of it."""

import pytest

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig, ModeInForce


def configured(correction, **loss):
    config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(**loss), rollout_correction=correction)
    return config, ModeInForce.configured(config)


@pytest.mark.parametrize(
    ("correction", "limited"),
    [
        ({"bypass_mode": True}, (True, True, True)),
        ({"bypass_mode": True, "loss_type": "reinforce"}, (True, False, False)),
        ({"bypass_mode": False}, (False, True, False)),
    ],
)
def test_what_limits_the_gap(correction, limited):
    _, mode = configured(correction)
    assert (mode.bypasses, mode.has_limit, mode.limits_the_gap) == limited


def test_decoupled_mode_has_the_same_objective_and_the_narrowest_clip_band():
    config, mode = configured({"bypass_mode": True}, clip_ratio="auto", auto_clip_min=5e-4)
    other = mode.decoupled()
    assert (other.bypasses, other.diffusion_loss.clip_ratio) == (False, 5e-4)
    assert other.objective is mode.objective
    # Neither the mode it came from nor the configuration has changed.
    assert (mode.bypasses, mode.diffusion_loss.clip_ratio) == (True, "auto")
    assert (config.rollout_correction.bypass_mode, config.diffusion_loss.clip_ratio) == (True, "auto")
    _, plain = configured({"bypass_mode": True}, clip_ratio=2e-3)
    assert plain.decoupled().diffusion_loss is plain.diffusion_loss
