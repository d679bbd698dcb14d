"""The tests' own tools: tolerances that a wrong result would not pass, and processes that leave nothing behind."""

import subprocess

import pytest
import torch
from tests_support import alive, run_process, wait_until
from tolerances import adam, of_metric, order_of_sum

ROW = {"reward/group_std_mean": 0.02}
"""The deviation of rewards in a group of the small runs."""


def test_a_sum_in_any_order_is_within_its_bound():
    generator = torch.Generator().manual_seed(0)
    for terms in (32, 1000, 30_000):
        values = torch.rand(terms, generator=generator)
        orders = [values.cumsum(0)[-1], values.flip(0).cumsum(0)[-1], values.sum()]
        bound = order_of_sum(terms, float(values.double().sum()))
        assert max(orders) - min(orders) < bound < 1e-3 * float(values.sum())


def test_adam_multiplies_an_error_as_described():
    """First steps of Adam are signs of the gradient; a small error turns some of those of the smallest gradients."""
    gradient = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = 1e-4 * torch.randn(400_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart = float(((gradient + error).sign() - gradient.sign()).norm() / gradient.sign().norm())
    assert adam(1e-4) / 4 < apart < adam(1e-4)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("actor/ppo_kl", -2.2e-5, 2.2e-5),  # a flipped ratio
        ("rollout_corr/logprob_abs_diff_mean", 3.1e-4, 2.9e-4),  # one image of sixteen left out
        ("rollout_corr/rollout_is_mean", 1.00004, 0.99996),
        ("actor/kept_fraction", 0.5, 0.53125),
        ("actor/grad_norm", 0.0363, 0.0340),
        ("reward/mean", 0.8555, 0.8550),
        ("rollout_sync/engine_gap_nats", 1e-5, 0.12),  # bfloat16
        ("rollout_sync/engine_kl_nats", 0.0, 1e-3),
    ],
)
def test_a_wrong_metric_is_told_from_rounding(name, right, wrong):
    bound = of_metric(name, ROW | {name: right}, dimensions=512, pixels=3072, steps=2)
    assert 1e-7 < bound < abs(wrong - right) / 3


@pytest.mark.process
def test_what_a_process_has_started_ends_with_it(tmp_path):
    """A shell whose child has left its process group, as those of ``torchrun`` have."""
    script = f"setsid sleep 987 & echo $! > {tmp_path / 'pid'}; wait"
    with pytest.raises(subprocess.TimeoutExpired):
        run_process("bash", "-c", script, timeout=5)
    wait_until(lambda: not alive((tmp_path / "pid").read_text().strip()))
