"""The table of objectives: torch-free, consistent with the functions that it names, and open at run time."""

import pytest
import torch
from loss_cases import F64
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.loss import OBJECTIVES, Objective, diffusion_loss
from flowgrpo_rc.loss.objectives import CLIP_BAND, KL_TRUST_REGION, Threshold
from flowgrpo_rc.loss.policy import PolicyInputs, PolicyLimits, PolicyTerms, TransitionShift


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if OBJECTIVES[name].has_limit])
def test_the_limit_tells_what_the_objective_leaves_out(name):
    """Elements beyond the limit have no gradient in the direction that leads on, and those within have one."""
    objective = OBJECTIVES[name]
    generator = torch.Generator().manual_seed(0)
    log_ratio = 0.2 * torch.randn(400, generator=generator, dtype=F64)
    kl = 0.02 * torch.rand(400, generator=generator, dtype=F64)
    std = 0.5 + torch.rand(400, generator=generator, dtype=F64)
    options = DiffusionLossConfig(loss_mode=name, clip_ratio_low=0.05, clip_ratio_high=0.1, kl_mask_threshold=0.01)
    measured = objective.measure(log_ratio, kl, std)
    beyond = objective.limit.exceeded(measured, options)
    assert 0.2 < beyond.double().mean() < 0.8
    outward = torch.sign(log_ratio if name != "grpo_guard" else measured)
    for direction in (1.0, -1.0):
        log_prob = log_ratio.clone().requires_grad_()
        shift = TransitionShift(kl, std, torch.ones_like(std))
        limits = PolicyLimits(0.05, 0.1, threshold=0.01)
        inputs = PolicyInputs(log_prob, torch.zeros_like(log_ratio), direction * outward, shift=shift)
        objective.load()(inputs, limits).loss.sum().backward()
        without = log_prob.grad == 0
        assert torch.equal(without, beyond if direction > 0 else torch.zeros_like(beyond))


def test_clip_band_by_hand():
    options = DiffusionLossConfig(clip_ratio=0.1, clip_ratio_high=0.3)
    assert CLIP_BAND.sides(options) == (0.1, 0.3)
    assert CLIP_BAND.ends(options) == [0.1, 0.3]
    assert CLIP_BAND.setting(options) == "clip_ratio_low=0.1 and clip_ratio_high=0.3"
    ratios = torch.tensor([0.89, 0.91, 1.29, 1.31], dtype=F64)
    assert CLIP_BAND.exceeded(ratios.log(), options).tolist() == [True, False, False, True]
    assert CLIP_BAND.setting(DiffusionLossConfig(clip_ratio=2e-4)) == "clip_ratio=0.0002"
    assert CLIP_BAND.share_beyond(0.3) == 0.3


def test_calibrated_clip_band_by_hand():
    options = DiffusionLossConfig(clip_ratio="auto", auto_clip_min=1e-3, auto_clip_max=0.5)
    widths = torch.tensor([0.01, 0.2], dtype=F64)
    assert CLIP_BAND.ends(options, widths) == [0.01, 0.2]
    assert CLIP_BAND.ends(options) == [1e-3, 0.5]
    assert CLIP_BAND.setting(options) == "clip_ratio=auto (0.001 to 0.5)"
    assert CLIP_BAND.exceeded(torch.tensor([0.1, 0.1], dtype=F64), options, widths).tolist() == [True, False]
    with pytest.raises(ValueError, match="data lacks 'clip_widths', which clip_ratio=auto reads"):
        CLIP_BAND.sides(options)


def test_trust_region_by_hand():
    """``flow_dppo`` leaves out the half that moves on, so the share beyond the threshold is twice what it counts."""
    options = DiffusionLossConfig(loss_mode="flow_dppo", kl_mask_threshold=2e-5)
    assert KL_TRUST_REGION.ends(options) == [2e-5]
    assert KL_TRUST_REGION.setting(options) == "kl_mask_threshold=2e-05"
    assert KL_TRUST_REGION.exceeded(torch.tensor([1e-5, 2e-5, 3e-5], dtype=F64), options).tolist() == [
        False,
        True,
        True,
    ]
    assert [KL_TRUST_REGION.share_beyond(share) for share in (0.2, 0.6)] == [0.4, 1.0]


# ---------------------------------------------------------------- an objective that is added at run time

SQUARED = Threshold(
    key="adv_clip_max", name="trust region", edge="squared log ratio", share_metric="actor/pg_clipfrac_first"
)


def penalised(inputs: PolicyInputs, limits: PolicyLimits) -> PolicyTerms:
    """``-A * log_prob + (log_ratio^2 + kl) / threshold``, without what is beyond it."""
    log_ratio = inputs.log_prob - inputs.old_log_prob
    left_out = log_ratio.detach() ** 2 >= limits.threshold
    loss = -inputs.advantages * inputs.log_prob + (log_ratio**2 + inputs.shift.kl) / limits.threshold
    return PolicyTerms(torch.where(left_out, 0.0, loss), log_ratio, left_out)


def test_one_record_and_one_function_make_an_objective(monkeypatch):
    """Configuration and loss take it; nothing else knows its name."""
    with pytest.raises(ValueError, match="loss_mode: got 'penalised'; choose one of flow_grpo"):
        DiffusionLossConfig(loss_mode="penalised")
    record = Objective(
        name="penalised",
        function=f"{__name__}:penalised",
        limit=SQUARED,
        measure=lambda log_ratio, kl, step_std: log_ratio**2,
        needs_old_means=True,
    )
    monkeypatch.setitem(OBJECTIVES, record.name, record)
    config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(loss_mode="penalised", adv_clip_max=4.0))
    with pytest.raises(ValueError, match="clip_ratio: got auto with loss_mode=penalised"):
        DiffusionLossConfig(loss_mode="penalised", clip_ratio="auto")
    log_prob = torch.tensor([-1.0, -2.0, 2.5], dtype=F64, requires_grad=True)  # log ratios .5, -.5 and 3: 9 is beyond
    output = {
        "log_probs": log_prob,
        "transition_means": torch.zeros(3, 2, dtype=F64),
        "transition_stds": torch.full((3,), 0.5, dtype=F64),
    }
    data = {
        "old_log_probs": torch.tensor([-1.5, -1.5, -0.5], dtype=F64),
        "advantages": torch.tensor([1.0, -1.0, 1.0], dtype=F64),
        "old_transition_means": torch.full((3, 2), 0.2, dtype=F64),
    }
    loss, metrics = diffusion_loss(config, output, data)
    loss.backward()
    kl = 0.04 / (2 * 0.25)
    assert loss.item() == pytest.approx((1.0 + (0.25 + kl) / 4 - 2.0 + (0.25 + kl) / 4) / 3)
    assert_close(log_prob.grad, torch.tensor([-1 + 0.25, 1 - 0.25, 0.0], dtype=F64) / 3)
    assert metrics["actor/pg_clipfrac_inert"] == pytest.approx(1 / 3)
    limit = config.diffusion_loss.objective.limit
    squares = config.diffusion_loss.objective.measure(torch.tensor([0.5, 3.0]), None, None)
    assert limit.exceeded(squares, config.diffusion_loss).tolist() == [False, True]
    assert limit.setting(config.diffusion_loss) == "adv_clip_max=4"
    assert config.diffusion_loss.objective.beyond == "beyond the squared log ratio"


def scaled(inputs: PolicyInputs, limits: PolicyLimits, *, kl_mask_threshold: float) -> PolicyTerms:
    """``-A * log_prob`` times the option."""
    loss = -inputs.advantages * inputs.log_prob * kl_mask_threshold
    return PolicyTerms(loss, inputs.log_prob - inputs.old_log_prob)


def test_an_objective_gets_its_own_options_as_keywords(monkeypatch):
    record = Objective(name="scaled", function=f"{__name__}:scaled", options=("kl_mask_threshold",))
    monkeypatch.setitem(OBJECTIVES, record.name, record)
    options = DiffusionLossConfig(loss_mode="scaled", kl_mask_threshold=0.25)
    data = {"old_log_probs": torch.zeros(2), "advantages": torch.tensor([1.0, 3.0])}
    loss, _ = diffusion_loss(
        DiffusionActorConfig(diffusion_loss=options), {"log_probs": torch.tensor([2.0, 4.0])}, data
    )
    assert loss.item() == pytest.approx(-0.25 * (1 * 2 + 3 * 4) / 2)
