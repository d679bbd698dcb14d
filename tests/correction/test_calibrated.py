"""``rollout_rs_threshold=auto``: every row is rejected by its own bound, and everything else is as with numbers."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowgrpo_rc import DiffusionActorConfig, apply_rollout_correction_to_diffusion_batch, diffusion_loss
from flowgrpo_rc.correction import (
    RolloutCorrectionConfig,
    compute_rollout_correction,
    compute_rollout_correction_and_rejection_mask,
)
from flowgrpo_rc.correction.numerics.rejection import row_statistic
from flowgrpo_rc.correction.plan import RS_OPTIONS

ROW_OPTIONS = [option for option in RS_OPTIONS if option.startswith("seq_")]


def config(option="seq_mean_k1", threshold="auto", **others):
    return RolloutCorrectionConfig(
        **{"rollout_is": "sequence", "rollout_rs": option, "rollout_rs_threshold": threshold, **others}
    )


def gaps(rows=40, width=3, seed=0):
    return 1e-3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("option", ROW_OPTIONS)
def test_each_row_is_held_to_its_own_bound(option):
    l = gaps()  # noqa: E741
    (criterion,) = config(option).plan().criteria
    statistic = row_statistic(l, criterion)
    bounds = torch.where(torch.arange(len(l)) % 2 == 0, statistic.median(), statistic.quantile(0.9))
    bounds *= 1 + 1e-9  # the median is a row's own statistic, up to rounding
    result = compute_rollout_correction(l, torch.zeros_like(l), config=config(option), rs_bounds=bounds)
    assert torch.equal(result.mask.all(1), statistic <= bounds)
    assert torch.equal(result.mask.any(1), result.mask.all(1))
    rejected = float((statistic > bounds).double().mean())
    assert 0.2 < rejected < 0.4
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected)
    swapped = compute_rollout_correction(l, torch.zeros_like(l), config=config(option), rs_bounds=bounds.roll(1))
    assert not torch.equal(swapped.mask, result.mask)


def test_the_statistics_by_hand():
    l = torch.tensor([[0.3, -0.1], [-0.4, 0.0]])  # noqa: E741
    k3 = torch.expm1(l) - l
    expected = {
        "seq_mean_k1": [0.1, 0.2],
        "seq_sum_k1": [0.2, 0.4],
        "seq_mean_k2": [0.025, 0.04],
        "seq_sum_k2": [0.05, 0.08],
        "seq_max_k2": [0.045, 0.08],
        "seq_mean_k3": k3.mean(1).tolist(),
        "seq_sum_k3": k3.sum(1).tolist(),
        "seq_max_k3": k3.amax(1).tolist(),
    }
    assert expected.keys() == set(ROW_OPTIONS)
    for option, values in expected.items():
        (criterion,) = config(option).plan().criteria
        assert row_statistic(l, criterion).tolist() == pytest.approx(values, rel=1e-5), option


@pytest.mark.parametrize(("option", "bound"), [("seq_mean_k1", 1e-3), ("seq_sum_k2", 2e-6)])
@pytest.mark.parametrize("masked", [False, True])
def test_one_bound_for_all_is_a_number(option, bound, masked):
    """Weights, mask and every metric."""
    l, rollout = gaps(), torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # noqa: E741
    mask = torch.rand(40, 3, generator=torch.Generator().manual_seed(2)) > 0.3 if masked else None
    threshold = f"{math.exp(-bound)}_{math.exp(bound)}" if "k1" in option else bound
    fixed = compute_rollout_correction(rollout + l, rollout, mask, config=config(option, threshold))
    bounds = torch.full((40,), bound, dtype=torch.float64)
    auto = compute_rollout_correction(rollout + l, rollout, mask, config=config(option), rs_bounds=bounds)
    assert torch.equal(auto.mask, fixed.mask)
    assert_close(auto.weights, fixed.weights, rtol=0, atol=0)
    assert auto.metrics.keys() == fixed.metrics.keys()
    for name, value in fixed.metrics.items():
        assert auto.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("bypass", [True, False])
def test_the_batchs_bounds_reach_the_loss(bypass):
    """Decoupled: through the batch function. Bypass: in the loss, from the ratio to the rollout."""
    l = gaps(8, 2).float()  # noqa: E741
    bounds = l.mean(1).abs() * torch.tensor([0.9, 1.1]).repeat(4)
    kept = torch.tensor([False, True]).repeat(4)
    rollout = torch.zeros(8, 2)
    batch = {"rollout_log_probs": rollout, "advantages": torch.ones(8), "rollout_rs_bounds": bounds}
    actor = DiffusionActorConfig(rollout_correction={**config().to_dict(), "bypass_mode": bypass})
    current = l.clone().requires_grad_()
    batch["old_log_probs"] = rollout if bypass else l
    if not bypass:
        batch, metrics = apply_rollout_correction_to_diffusion_batch(batch, actor.rollout_correction)
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    loss, metrics = diffusion_loss(actor, {"log_probs": current}, batch)
    loss.backward()
    assert metrics["actor/kept_fraction"] == 0.5
    assert (current.grad[~kept] == 0).all()
    if not bypass:  # at the old policy nothing is clipped
        assert (current.grad[kept] != 0).all()


def test_errors_name_what_is_missing():
    l = gaps(4)  # noqa: E741
    with pytest.raises(ValueError, match=r"needs the rejection bound of every row \(rollout_rs_bounds in the batch"):
        compute_rollout_correction(l, l, config=config())
    with pytest.raises(ValueError, match="rollout_rs_bounds in the batch"):
        compute_rollout_correction_and_rejection_mask(l, l, rollout_rs="seq_mean_k1", rollout_rs_threshold="auto")
    with pytest.raises(ValueError, match=r"rollout_rs_bounds has shape \(3,\), expected \(4,\)"):
        compute_rollout_correction(l, l, config=config(), rs_bounds=torch.ones(3))
    for wrong in (torch.nan, torch.inf, 0.0, -1.0):
        with pytest.raises(ValueError, match="rollout_rs_bounds: row 2 has"):
            compute_rollout_correction(l, l, config=config(), rs_bounds=torch.tensor([1.0, 1.0, wrong, 1.0]))
    for option in ("token_k1", "seq_mean_k1,seq_max_k2"):
        with pytest.raises(ValueError, match=f"calibrates one criterion of whole rows, got {option!r}"):
            config(option)
    with pytest.raises(ValueError, match="auto stands alone"):
        config("seq_mean_k1,seq_max_k2", "auto,0.1")
    with pytest.raises(ValueError, match="have no common mean"):
        config(rollout_is_batch_normalize=True)
    shares = [("share", wrong) for wrong in (0.0, 1e-5, 1.0, torch.nan)]
    for name, value in (*shares, ("min", -1.0), ("max", 1e-9)):
        with pytest.raises(ValueError, match=f"rollout_rs_auto_{name}"):
            config(**{f"rollout_rs_auto_{name}": value})


@pytest.mark.gpu
def test_bounds_on_the_host_hold_for_log_probs_on_the_device():
    l = gaps()  # noqa: E741
    bounds = torch.linspace(1e-4, 2e-3, len(l), dtype=torch.float64)
    there = compute_rollout_correction(l.cuda(), torch.zeros_like(l).cuda(), config=config(), rs_bounds=bounds)
    here = compute_rollout_correction(l, torch.zeros_like(l), config=config(), rs_bounds=bounds)
    assert torch.equal(there.mask.cpu(), here.mask)
