"""The token path of the loss: a slow float64 loop in every mode, hand-worked numbers, padding, cuts and ranks."""

import math

import pytest
import torch
from loss_cases import EXACT, F64, MODES, accumulated, loop_correction, on_two_ranks, tensor
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.correction import compute_rollout_correction
from flowgrpo_rc.loss import diffusion_loss, token_loss, token_loss_sums
from flowgrpo_rc.loss.aggregation import AGGREGATIONS

CORRECTIONS = {
    "none": {},
    "token TIS": {"rollout_is": "token", "rollout_is_threshold": 1.1},
    "token IcePop": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    "token TIS, token_k1": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.05,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.8_1.15",
    },
    "sequence TIS, seq_mean_k1": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.2,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.95_1.04",
    },
}
LENGTHS = (5, 3, 1, 4, 0, 5, 2, 4)
"""Valid tokens of eight responses, padded to 6; one is empty."""


def make_config(mode="decoupled", rc=None, kl=None, **loss):
    """Band of the policy ratio [.9, 1.3], dual clip at 1.6, advantages clamped nowhere."""
    return DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig(
            **{"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.6, "adv_clip_max": 0.01, **loss}
        ),
        rollout_correction={**MODES[mode], **(rc or {})},
        use_kl_loss=kl is not None,
        kl_loss_coef=kl or 0.0,
    )


def random_batch(seed=0, spread=0.3):
    """`log_probs, data` of eight responses, with an advantage for every token."""
    generator = torch.Generator().manual_seed(seed)
    b, t = len(LENGTHS), 6

    def draw():
        return torch.randn(b, t, generator=generator, dtype=F64)

    rollout = draw() - 2.0
    old = rollout + 0.5 * spread * draw()
    new = old + spread * draw()
    mask = torch.arange(t) < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = False  # a hole, as a tool's answer in a dialogue leaves
    return new, {
        "old_log_probs": old,
        "rollout_log_probs": rollout,
        "ref_log_probs": new + spread * draw(),
        "advantages": 2.0 * draw(),
        "response_mask": mask,
    }


def prepared(mode, rc, data):
    """The trainer's batch; in decoupled mode it has its correction."""
    if mode != "decoupled":
        return data
    options = make_config(mode, rc).rollout_correction
    weights, keep, _ = compute_rollout_correction(
        data["old_log_probs"], data["rollout_log_probs"], data["response_mask"], config=options
    )
    corrected = {**data, "rollout_keep": keep}
    return corrected if weights is None else {**corrected, "rollout_is_weights": weights}


def run(config, log_probs, data):
    """`loss, gradient, metrics` of tokens, equal for both functions; without a mask of SDE steps."""
    if data.get("response_mask") is None:
        return run_once(diffusion_loss, config, log_probs, data)
    results = run_once(token_loss, config, log_probs, data)
    with pytest.warns(UserWarning, match="response_mask, so diffusion_loss hands it to flowgrpo_rc.token_loss"):
        handed_on = run_once(diffusion_loss, config, log_probs, data)
    assert_close(handed_on[:2], results[:2], **EXACT)
    assert handed_on[2] == results[2]
    return results


def run_once(function, config, log_probs, data):
    log_probs = log_probs.detach().clone().requires_grad_()
    loss, metrics = function(config, {"log_probs": log_probs}, data)
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


# ---------------------------------------------------------------- the loop


def loop_aggregate(values, keep, mode, factor):
    """Of `{(i, j): value}` over kept tokens."""
    rows = [[values[i, j] for j in range(keep.shape[1]) if keep[i, j]] for i in range(len(keep))]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    of_row = {
        "seq-mean-token-sum": sum,
        "seq-mean-token-mean": lambda row: sum(row) / len(row),
        "seq-mean-token-sum-norm": lambda row: sum(row) / (factor or keep.shape[1]),
    }[mode]
    return sum(map(of_row, rows)) / len(rows)


def loop_loss(mode, rc, new, data, agg_mode, factor=None, kl=0.0):
    """`loss, gradient, kept fraction` from the formulas: band [.9, 1.3], dual clip 1.6."""
    mask = data["response_mask"]
    anchor = data["old_log_probs"] if mode == "decoupled" else data["rollout_log_probs"]
    policy = data["old_log_probs"] if mode == "decoupled" else new
    weights, keep = loop_correction(policy, data["rollout_log_probs"], rc, mask)
    values, slopes = {}, {}
    for i, j in keep.nonzero().tolist():
        advantage, weight, x = float(data["advantages"][i, j]), float(weights[i, j]), float(new[i, j])
        if mode == "bypass reinforce":
            value, slope = -advantage * x * weight, -advantage * weight
        else:
            weight = weight if mode == "decoupled" else 1.0
            ratio = math.exp(x - float(anchor[i, j]))
            value, slope = -advantage * ratio, -advantage * ratio
            clipped = -advantage * min(max(ratio, 0.9), 1.3)
            if clipped > value:
                value, slope = clipped, 0.0
            if advantage < 0 and value > -advantage * 1.6:
                value, slope = -advantage * 1.6, 0.0
            value, slope = value * weight, slope * weight
        gap = float(data["ref_log_probs"][i, j]) - x
        values[i, j] = value + kl * (math.exp(gap) - gap - 1)
        slopes[i, j] = slope + kl * (1 - math.exp(gap))
    gradient = torch.zeros_like(new)
    for at in values:
        unit = {other: float(other == at) for other in values}
        gradient[at] = slopes[at] * loop_aggregate(unit, keep, agg_mode, factor)
    return tensor(loop_aggregate(values, keep, agg_mode, factor))[0], gradient, int(keep.sum()) / int(mask.sum())


@pytest.mark.parametrize("agg_mode", AGGREGATIONS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_the_loop(mode, correction, agg_mode):
    rc = CORRECTIONS[correction]
    for seed, kl, factor in ((0, None, None), (1, 0.4, 7.0)):
        new, data = random_batch(seed)
        expected, gradient, kept = loop_loss(mode, rc, new, data, agg_mode, factor, kl or 0.0)
        config = make_config(mode, rc, kl, loss_agg_mode=agg_mode, loss_scale_factor=factor)
        loss, slope, metrics = run(config, new, prepared(mode, rc, data))
        assert_close(loss, expected)
        assert_close(slope, gradient)
        assert metrics["actor/loss"] == pytest.approx(expected.item())
        assert metrics["actor/kept_fraction"] == pytest.approx(kept)
        assert (0.1 < kept < 0.95) is ("rollout_rs" in rc)


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("agg_mode", "factor", "loss", "scales"),
    [
        ("token-mean", None, 2.0 / 5, (5, 5)),
        ("seq-mean-token-sum", None, 2.0 / 2, (2, 2)),
        ("seq-mean-token-mean", None, (-3.4 / 3 + 5.4 / 2) / 2, (6, 4)),
        ("seq-mean-token-sum-norm", None, 2.0 / 4 / 2, (8, 8)),
        ("seq-mean-token-sum-norm", 10.0, 2.0 / 10 / 2, (20, 20)),
    ],
)
def test_by_hand(agg_mode, factor, loss, scales):
    """Band [.9, 1.3], dual clip 1.6, T = 4; the third response is empty.

    A = 1: ratios 1.5, .8, 2: -1.3, -.8, -1.3: sum -3.4, slope -.8 at .8 alone.
    A = -2: ratios 1.1, 2.5: 2.2 with that slope, and 5 bounded by 3.2, without: sum 5.4.
    """
    new = torch.log(tensor([1.5, 0.8, 2.0, 7.0], [1.1, 2.5, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0]))
    data = {
        "old_log_probs": torch.zeros_like(new),
        "response_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        "advantages": tensor(1.0, -2.0, 3.0),
    }
    config = make_config(loss_agg_mode=agg_mode, loss_scale_factor=factor)
    value, slope, metrics = run(config, new, data)
    assert_close(value, tensor(loss)[0])
    first, second = scales
    assert_close(slope, tensor([0.0, -0.8 / first, 0.0, 0.0], [2.2 / second, 0.0, 0.0, 0.0], [0.0] * 4))
    # five valid tokens: higher 1.5, 2, 2.5; lower .8; inert 1.5 and 2 (A > 0), dual 2.5 (A < 0)
    expected = {
        "actor/kept_fraction": 1.0,
        "actor/pg_clipfrac_higher": 3 / 5,
        "actor/pg_clipfrac_lower": 1 / 5,
        "actor/pg_clipfrac_dual": 1 / 5,
        "actor/pg_clipfrac_inert": 3 / 5,
        "actor/ratio_mean": (1.5 + 0.8 + 2.0 + 1.1 + 2.5) / 5,
        "actor/ratio_min": 0.8,
        "actor/ratio_max": 2.5,
        "actor/ppo_kl": -math.log(1.5 * 0.8 * 2.0 * 1.1 * 2.5) / 5,
        "actor/loss": loss,
        "actor/pg_loss": loss,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_kl_by_hand():
    """k3 of d = log pi_ref - log pi_theta: log 2 gives 1 - log 2 (slope -1), -log 2 gives log 2 - .5 (slope .5)."""
    new = torch.zeros(1, 3, dtype=F64)
    data = {
        "old_log_probs": new,
        "ref_log_probs": tensor([math.log(2), -math.log(2), math.nan]),
        "response_mask": torch.tensor([[1, 1, 0]]),
        "advantages": tensor(0.0),
    }
    loss, slope, metrics = run(make_config(kl=0.1), new, data)
    assert_close(loss, tensor(0.1 * 0.5 / 2)[0])
    assert_close(slope, tensor([-0.05, 0.025, 0.0]))
    assert metrics["actor/kl_loss"] == pytest.approx(0.25)
    assert metrics["actor/pg_loss"] == 0.0
    far = {**data, "ref_log_probs": tensor([1e4, -1e4, 0.0])}  # the exponent stops at +-20, and so does the slope
    _, slope, metrics = run(make_config(kl=0.1), new, far)
    assert metrics["actor/kl_loss"] == pytest.approx((math.exp(20) - 21 + math.exp(-20) + 19) / 2)
    assert slope.eq(0).all()


# ---------------------------------------------------------------- verl's formulas


def verl_agg_loss(loss, mask, mode, factor=None):
    """verl 0.9.1's ``agg_loss`` of one whole batch, from its documentation; its 1e-8 is left out."""
    tokens = mask.sum(-1)
    present = (tokens > 0).to(loss.dtype)
    if mode == "token-mean":
        return (loss * mask).sum() / mask.sum()
    of_sequence = (loss * mask).sum(-1)
    if mode == "seq-mean-token-mean":
        of_sequence = of_sequence / tokens.clamp(min=1)
    mean = (of_sequence * present).sum() / present.sum()
    return mean / (factor or mask.shape[-1]) if mode.endswith("norm") else mean


def verl_policy_loss(old, new, advantages, mask, low, high, c, weights=None):
    """verl 0.9.1's vanilla policy loss, token by token, and its `pg_clipfrac_lower`."""
    ratio = (new - old).clamp(-20, 20).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    bounded = torch.where(advantages < 0, torch.minimum(-advantages * c, clipped), clipped)
    lower = ((clipped > -advantages * c) & (advantages < 0)).to(F64)
    return bounded if weights is None else bounded * weights, (lower * mask).sum() / mask.sum()


@pytest.mark.parametrize("factor", [None, 17.0])
@pytest.mark.parametrize("agg_mode", AGGREGATIONS)
def test_equals_verls_formulas(agg_mode, factor):
    """Decoupled with weights, and KL by its k3 estimate."""
    rc, bounded = CORRECTIONS["token TIS"], 0.0
    for seed in range(3):
        new, data = random_batch(seed, spread=0.6)
        data = prepared("decoupled", rc, data)
        mask = data["response_mask"].to(F64)
        weights = data["rollout_is_weights"]
        losses, dual = verl_policy_loss(data["old_log_probs"], new, data["advantages"], mask, 0.1, 0.3, 1.6, weights)
        gap = data["ref_log_probs"] - new
        kl = verl_agg_loss(gap.exp() - gap - 1, mask, agg_mode, factor)
        config = make_config("decoupled", rc, kl=0.2, loss_agg_mode=agg_mode, loss_scale_factor=factor)
        loss, _, metrics = run(config, new, data)
        assert_close(loss, verl_agg_loss(losses, mask, agg_mode, factor) + 0.2 * kl, rtol=1e-6, atol=1e-8)
        assert metrics["actor/pg_clipfrac_dual"] == pytest.approx(dual.item())
        assert metrics["actor/kl_loss"] == pytest.approx(kl.item())
        bounded += dual.item()
    assert bounded > 0


# ---------------------------------------------------------------- the table of modes


def same(config, new, one, other):
    assert_close(run(config, new, one)[:2], run(config, new, other)[:2], **EXACT)


def test_decoupled_mask_is_response_mask_and_keep():
    """A keep-mask of ones does not bring padding back; without one a weight of 0 (IcePop) stays in the denominator."""
    new, data = random_batch()
    ones = {"rollout_keep": torch.ones_like(data["response_mask"])}
    same(make_config(), new, data, {**data, **ones})
    zero = {"rollout_is_weights": torch.zeros_like(new)}
    sums = token_loss_sums(make_config(), {"log_probs": new}, {**data, **zero})
    assert (sums.loss_sum, sums.denominator) == (0.0, data["response_mask"].sum())
    keep = data["response_mask"].roll(1, 0)
    both = data["response_mask"] & keep
    sums = token_loss_sums(make_config(), {"log_probs": new}, {**data, "rollout_keep": keep})
    assert sums.denominator == both.sum()
    same(make_config(), new, {**data, "rollout_keep": keep.long()}, {**data, "response_mask": both})


def test_dual_clip_does_not_enter_reinforce_nor_the_diffusion_path():
    new, data = random_batch()
    none, wide = (run(make_config(clip_ratio_c=c), new, data) for c in (None, 1e9))
    assert_close(none[:2], wide[:2], **EXACT)
    assert "actor/pg_clipfrac_dual" not in none[2]
    for mode in MODES:
        tight, wide = (run(make_config(mode, clip_ratio_c=c, clip_ratio_high=0.01), new, data) for c in (1.02, 1e9))
        if mode == "bypass reinforce":
            assert_close(tight[:2], wide[:2], **EXACT)
            assert "actor/pg_clipfrac_dual" not in tight[2]
        else:
            assert tight[0] < wide[0] - 1e-3
            assert tight[2]["actor/pg_clipfrac_dual"] > wide[2]["actor/pg_clipfrac_dual"] == 0.0
    dense = {k: v for k, v in data.items() if k != "response_mask"}
    tight, wide = (run(make_config(clip_ratio_c=c, adv_clip_max=9.0), new, dense) for c in (1.02, 1e9))
    assert_close(tight[:2], wide[:2], **EXACT)
    assert "actor/pg_clipfrac_dual" not in tight[2]


def test_advantages_are_clamped_on_the_diffusion_path_alone():
    new, data = random_batch()
    tight, wide = make_config(adv_clip_max=0.01), make_config(adv_clip_max=100.0)
    assert_close(run(tight, new, data)[:2], run(wide, new, data)[:2], **EXACT)
    dense = {k: v for k, v in data.items() if k != "response_mask"}
    assert abs(run(tight, new, dense)[0] - run(wide, new, dense)[0]) > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_masks_of_any_dtype(mode):
    rc = CORRECTIONS["token TIS, token_k1"]
    new, data = random_batch()
    data = prepared(mode, rc, data)
    config = make_config(mode, rc, kl=0.1)
    for dtype in (torch.int64, torch.uint8, torch.float32, torch.bfloat16):
        same(config, new, data, {**data, "response_mask": data["response_mask"].to(dtype)})


# ---------------------------------------------------------------- what is masked or rejected


@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("mode", MODES)
def test_masked_equals_removed(mode, agg_mode):
    """Sequences cut to their length and taken one by one, the empty one left out."""
    new, data = random_batch()
    data["response_mask"][0, 2] = True  # no hole, so that responses can be cut
    rc = CORRECTIONS["sequence TIS, seq_mean_k1"]
    data = prepared(mode, rc, data)
    config = make_config(mode, rc, kl=0.2, loss_agg_mode=agg_mode)
    total, denominator, gradient = 0.0, 0.0, torch.zeros_like(new)
    for i, length in enumerate(LENGTHS):
        if length == 0:
            continue
        cut = {k: v[i : i + 1, :length] for k, v in data.items()}
        log_probs = new[i : i + 1, :length].clone().requires_grad_()
        part = token_loss_sums(config, {"log_probs": log_probs}, cut)
        part.loss_sum.backward()
        gradient[i, :length] = log_probs.grad
        total, denominator = total + part.loss_sum.detach(), denominator + part.denominator
    loss, slope, _ = run(config, new, data)
    assert_close((total / denominator, gradient / denominator), (loss, slope))


PADDED = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "rollout_is_weights")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("agg_mode", AGGREGATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_padding_may_hold_anything(mode, agg_mode, value):
    rc = CORRECTIONS["sequence TIS, seq_mean_k1"]
    new, data = random_batch()
    data = prepared(mode, rc, data)
    config = make_config(mode, rc, kl=0.2, loss_agg_mode=agg_mode)
    expected = run(config, new, data)
    bad = {k: v.masked_fill(~data["response_mask"], value) if k in PADDED else v for k, v in data.items()}
    with torch.autograd.set_detect_anomaly(True):  # no NaN is met on the way back either
        loss, slope, metrics = run(config, new.masked_fill(~data["response_mask"], value), bad)
    assert_close((loss, slope), expected[:2], **EXACT)
    assert metrics == expected[2]
    assert slope[~data["response_mask"]].eq(0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", PADDED)
def test_rejected_tokens_may_hold_anything_in_decoupled_mode(name, value):
    new, data = random_batch()
    data = prepared("decoupled", CORRECTIONS["token TIS, token_k1"], data)
    rejected = data["response_mask"] & ~data["rollout_keep"]
    assert rejected.any()
    config = make_config(kl=0.2, loss_agg_mode="seq-mean-token-mean")
    expected = run(config, new, data)
    if name == "log_probs":
        new = new.masked_fill(rejected, value)
    else:
        data[name] = data[name].masked_fill(rejected, value)
    with torch.autograd.set_detect_anomaly(True):
        loss, slope, metrics = run(config, new, data)
    assert_close((loss, slope), expected[:2], **EXACT)
    assert metrics == expected[2]


@pytest.mark.parametrize("how", ["masked", "rejected"])
@pytest.mark.parametrize("agg_mode", AGGREGATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_left_is_zero_with_zero_gradients_and_a_warning(mode, agg_mode, how):
    rc = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "50_60"}
    new, data = random_batch()
    if how == "masked":
        data["response_mask"] = torch.zeros_like(data["response_mask"])
    elif mode == "decoupled":
        data["rollout_keep"] = torch.zeros_like(data["response_mask"])
    with pytest.warns(UserWarning, match="rejected every element of this batch: loss and gradients are 0"):
        loss, slope, metrics = run(make_config(mode, rc, kl=0.5, loss_agg_mode=agg_mode), new, data)
    assert_close((loss, slope), (tensor(0.0)[0], torch.zeros_like(new)), **EXACT)
    assert metrics["actor/kept_fraction"] == metrics["actor/loss"] == metrics["actor/kl_loss"] == 0.0
    assert metrics["actor/ratio_min"] == metrics["actor/ratio_mean"] == metrics["actor/ratio_max"] == 1.0
    assert all(map(math.isfinite, metrics.values()))


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("agg_mode", AGGREGATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_any_cut_and_any_order_give_the_same_update(mode, agg_mode):
    """In float32, to 1e-6; one of the micro-batches is the empty response alone."""
    rc = {**CORRECTIONS["sequence TIS, seq_mean_k1"], "rollout_rs_threshold": "0.8_1.1"}
    config = make_config(mode, rc, kl=0.3, loss_agg_mode=agg_mode)
    new, data = random_batch(5)
    data = {k: v.float() if v.is_floating_point() else v for k, v in prepared(mode, rc, data).items()}

    loss, slope, metrics = run(config, new.float(), data)
    assert 0 < metrics["actor/kept_fraction"] < 1
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    for cut in (torch.arange(8).split(8), torch.arange(8).split(1), torch.arange(8).split(3), shuffled.split(5)):
        parts = accumulated(token_loss_sums, config, {"log_probs": new.float().requires_grad_()}, data, cut)
        assert_close(parts[:2], (loss, {"log_probs": slope}), rtol=1e-6, atol=1e-6)
        assert parts[2] == pytest.approx({k: metrics[k] for k in parts[2]}, rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("loss_mode", ["grpo_guard", "flow_dppo"])
def test_objectives_on_transition_means_are_refused(loss_mode):
    new, data = random_batch()
    with pytest.raises(ValueError, match=f"loss_mode: got {loss_mode} with a response_mask in data, but tokens have"):
        token_loss(make_config(loss_mode=loss_mode), {"log_probs": new}, data)


@pytest.mark.parametrize("loss_mode", ["awm", "dpo", "diffusion_nft"])
def test_objectives_on_clean_images_are_refused(loss_mode):
    new, data = random_batch()
    with pytest.raises(ValueError, match=f"loss_mode: got {loss_mode} with a response_mask in data, but tokens"):
        token_loss(make_config(loss_mode=loss_mode), {"log_probs": new}, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_mask": (8, 5)}, r"response_mask has shape \(8, 5\) and log_probs \(8, 6\); on the token path"),
        ({"response_mask": None}, r"data lacks 'response_mask'; it holds: advantages, old_log_probs"),
        ({"advantages": (6,)}, r"advantages has shape \(6,\); expected \(8,\) or \(8, 6\)"),
        ({"ref_log_probs": (8,)}, r"ref_log_probs has shape \(8,\) but log_probs has \(8, 6\)"),
        ({"ref_log_probs": None}, r"data \(use_kl_loss=true\) lacks 'ref_log_probs'; it holds: advantages"),
    ],
)
def test_errors_name_what_is_missing_or_misshapen(change, message):
    new, data = random_batch()
    for name, shape in change.items():
        data[name] = None if shape is None else torch.ones(shape, dtype=F64)
    with pytest.raises(ValueError, match=message):
        token_loss(make_config(kl=0.1), {"log_probs": new}, data)


def test_a_flat_mask_beside_flat_log_probs_is_refused():
    new, data = random_batch()
    flat = {k: v[:, 0] for k, v in data.items()}
    with pytest.raises(ValueError, match=r"on the token path both must be \(B, T\)"):
        token_loss(make_config(), {"log_probs": new[:, 0]}, flat)


# ---------------------------------------------------------------- ranks

RANK_CASES = [(mode, agg_mode, full) for mode in MODES for agg_mode in AGGREGATIONS for full in (True, False)]
"""`full=False`: rank 0 has no valid token."""


def rank_batch(mode, agg_mode, full):
    """Rank 0 holds the first three responses, rank 1 the other five."""
    rc = CORRECTIONS["token TIS, token_k1"]
    new, data = random_batch(6)
    if not full:
        data["response_mask"][:3] = False
    return make_config(mode, rc, kl=0.2, loss_agg_mode=agg_mode), new, prepared(mode, rc, data)


@pytest.mark.process
def test_averaging_over_ranks_gives_gradient_and_metrics_of_the_joined_batch(tmp_path):
    for results in on_two_ranks(tmp_path, token_loss, RANK_CASES, rank_batch, first=3):
        for case, result in zip(RANK_CASES, results, strict=True):
            expected = run(*rank_batch(*case))
            assert_close(result[:2], expected[:2], msg=lambda m, c=case: f"{c}: {m}")
            assert result[3] == pytest.approx(expected[2])
