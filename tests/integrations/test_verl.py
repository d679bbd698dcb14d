"""The verl drop-in against verl 0.9.1 itself."""

import math
import random

import pytest
import torch
from torch import Tensor

from flowgrpo_rc.integrations import verl as ours

pytest.importorskip("verl")
theirs = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

K1 = ("0.6_1.4", "0.9_1.05", "0.5_2.0", "1.3", "0.7_3.0", "1.01_1.2")
UPPER = {"k2": ("0.02", "0.3", "0.001"), "k3": ("0.02", "0.3", "0.001")}


def _case(seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, object]]:
    """A batch and options: lengths, masks, dtypes and thresholds all drawn from `seed`."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    rows, columns = rng.choice([(1, 1), (5, 1), (16, 2), (7, 10), (3, 70), (2, 300)])
    spread, shift = rng.choice([0.01, 0.1, 0.5, 2.0]), rng.choice([0.0, 0.05, -0.3])
    p = -2.0 * torch.rand(rows, columns, generator=g)
    q = p - shift - spread * torch.randn(rows, columns, generator=g)
    mask = (torch.rand(rows, columns, generator=g) < rng.choice([1.1, 0.7, 0.3])).to(
        rng.choice([torch.float32, torch.int64, torch.bool])
    )
    mask[0, 0] = 1
    options = rng.sample(ours.RS_OPTIONS, rng.choice([0, 1, 1, 2, 3, 4]))
    entries = [rng.choice(K1 if o.endswith("k1") else UPPER[o[-2:]]) for o in options]
    return (p, q, mask), {
        "rollout_is": rng.choice([None, "token", "sequence"]),
        "rollout_is_threshold": rng.choice([2.0, 1.05, 0.8, "3.0", "0.5_1.7", "0.95_1.02", "1.1_4.0"]),
        "rollout_is_batch_normalize": rng.random() < 0.3,
        "rollout_rs": ",".join(options) or None,
        "rollout_rs_threshold": ",".join(entries) or None,
    }


@pytest.mark.parametrize("block", range(20))
def test_agrees_with_verl_on_random_configurations(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        (p, q, mask), options = _case(seed)
        try:
            expected = theirs.compute_rollout_correction_and_rejection_mask(p, q, mask, **options)
            exact = theirs.compute_rollout_correction_and_rejection_mask(p.double(), q.double(), mask, **options)
        except ZeroDivisionError:  # verl's effective sample size, when every weight is zero
            continue
        actual = ours.compute_rollout_correction_and_rejection_mask(p, q, mask, **options)
        about = f"seed {seed}: {options}"
        assert (expected[0] is None) == (actual[0] is None), about
        if expected[0] is not None:
            weights, verl_weights = (proto.batch["rollout_is_weights"] for proto in (actual[0], expected[0]))
            torch.testing.assert_close(
                weights, verl_weights, rtol=1e-5, atol=1e-9, msg=lambda m, about=about: f"{m}\n{about}"
            )
        assert torch.equal(actual[1], expected[1]), about
        assert actual[1].dtype == expected[1].dtype
        _check_metrics(actual[2], expected[2], 1e-4, about, exact=False)  # verl in float32, with its rounding
        _check_metrics(actual[2], exact[2], 2e-6, about, exact=True)


def _check_metrics(
    actual: dict[str, float], expected: dict[str, float], absolute: float, about: str, *, exact: bool
) -> None:
    for name, value in expected.items():
        assert math.isfinite(actual[name])
        if (name.endswith("eff_sample_size") and value > 1.0) or not math.isfinite(value):
            continue  # an overflow of verl's, or its 1e-8 in a denominator that is smaller still
        if name.endswith("_std") and not exact:  # a difference of squares of float32 figures, in verl worse
            continue
        within = 1e-4 if name.endswith("_std") else absolute
        close = math.isclose(actual[name], value, rel_tol=1e-4, abs_tol=within)
        assert close, f"{name}: {actual[name]}, verl {value}; {about}"
