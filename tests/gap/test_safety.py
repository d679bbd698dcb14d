"""One table of limits, one function of remedies, one rule for verdicts: probe, guard and report share them."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from flowgrpo_rc.actor.config import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.gap.guard import Guard
from flowgrpo_rc.gap.intervals import Interval
from flowgrpo_rc.gap.research.drift import Drift
from flowgrpo_rc.gap.safety import (
    CLIP,
    CLIP_AT_TIMESTEP,
    ENGINE_GAP,
    LIMITS,
    REJECTED,
    USUAL_MODE,
    ZEROED,
    StepGap,
    advise,
    decisive,
    judge_all,
    remedy,
    widen_limit,
)
from flowgrpo_rc.gap.statistics import GapSample, apply_limits, row_gap_quantile, step_gap
from flowgrpo_rc.loss.objectives import OBJECTIVES, Objective, Threshold
from flowgrpo_rc.report.health import CHECKS
from flowgrpo_rc.report.history import History

ROOT = Path(__file__).parents[2]
CHECK_OF = {CLIP: "clip_first", REJECTED: "rejected", ZEROED: "is_dropped", ENGINE_GAP: "engine_gap"}


def mode(loss=None, **correction):
    options = DiffusionLossConfig(**(loss or {}))
    actor = DiffusionActorConfig(diffusion_loss=options, rollout_correction={"bypass_mode": True, **correction})
    return ModeInForce.configured(actor)


def test_the_table():
    """The numbers, so that none moves unnoticed: from where a figure costs, is not safe, and is alarmed of."""
    correction = RolloutCorrectionConfig()
    assert {name: (x.costs, x.not_safe, x.alarm(correction)) for name, x in LIMITS.items()} == {
        CLIP: (0.1, 0.25, 0.1),
        REJECTED: (0.1, 0.5, 0.5),
        ZEROED: (0.05, 0.5, 0.5),
        ENGINE_GAP: (0.005, 0.05, 0.05),
    }


def test_the_documentation_has_the_same_table():
    page = (ROOT / "docs" / "gap.md").read_text().split("### Three verdicts")[0]
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `(clip|rejected|zeroed|engine_gap)` \|.*$", page, re.M)}
    assert rows.keys() == LIMITS.keys()
    for name, limit in LIMITS.items():
        for text in (f"| {limit.costs:g} |", f"| {limit.not_safe:g} |", f"`{limit.setting}`"):
            assert text in rows[name], (name, text)


@pytest.mark.parametrize("figure", LIMITS)
def test_the_report_s_check_has_the_limits_and_the_remedy_of_the_table(figure):
    check = next(check for check in CHECKS if check.name == CHECK_OF[figure])
    assert (check.sde.high, check.sde.problem_high) == (LIMITS[figure].costs, LIMITS[figure].not_safe)
    assert check.advice_for(History([])) == f"{remedy(figure, USUAL_MODE)}."


def measured(share, interval):
    """A measurement with every share and the engine's gap at one value."""
    values = {field.name: interval if field.name.endswith("_interval") else share for field in fields(StepGap)}
    return StepGap(**values | {"timestep": None, "count": 50, "images": 50})


def test_the_probe_judges_by_what_the_guard_is_set_to():
    """Of rejection, weights of 0 and the engine; the guard's limit of the clip is one of cost, not of safety."""
    settings = {"guard_rejected_fraction": 0.3, "guard_engine_gap": 0.2, "guard_clip_fraction": 0.05}
    judged = judge_all(mode(**settings), measured(0.1, Interval(0.05, 0.15, 50.0)), 1)
    assert {name: one.limit for name, one in judged.items()} == {
        CLIP: 0.25,
        REJECTED: 0.3,
        ZEROED: 0.3,
        ENGINE_GAP: 0.2,
    }


@pytest.mark.parametrize(
    ("share", "drift", "verdict"),
    [
        (0.45, None, "not safe"),
        (0.45, 0.0035, "safe"),
        (0.45, 0.0110, "not safe"),
        (0.50, 0.0035, "not shown safe"),
        (0.60, 0.0035, "not safe"),
        (0.10, 0.0078, "not shown safe"),
        (0.10, 0.0066, "not shown safe"),
        (0.10, None, "safe"),
    ],
)
def test_a_known_drift_judges_in_place_of_the_share_up_to_a_half(share, drift, verdict):
    found = replace(measured(0.0, Interval(0.0, 0.01, 400.0)), clipped=share)
    found = replace(found, clipped_interval=Interval(share - 0.02, share + 0.02, 400.0))
    known = None if drift is None else Drift(drift, Interval(drift - 5e-4, drift + 5e-4, 8.0), 0.9)
    judged = judge_all(mode(), found, 1, known)
    assert judged[CLIP].limit == (0.25 if drift is None else 0.5)
    assert decisive(list(judged.values())).verdict == verdict


@pytest.mark.parametrize(
    ("loss", "widened"),
    [
        ({}, "Widen diffusion_loss.clip_ratio"),
        ({"clip_ratio": "auto"}, "Raise diffusion_loss.auto_clip_max"),
        ({"clip_ratio_low": 1e-3}, "Widen diffusion_loss.clip_ratio_low and clip_ratio_high"),
        ({"loss_mode": "grpo_guard"}, "Widen diffusion_loss.clip_ratio"),
        ({"loss_mode": "flow_dppo"}, "Raise diffusion_loss.kl_mask_threshold"),
        ({"loss_mode": "flow_dppo", "clip_ratio_low": 1e-3}, "Raise diffusion_loss.kl_mask_threshold"),
    ],
)
def test_the_limit_that_is_set_is_given_more_room(loss, widened):
    assert widen_limit(mode(loss)) == widened
    for finding in (CLIP, CLIP_AT_TIMESTEP):
        text = remedy(finding, mode(loss))
        assert text.startswith(widened) or "auto, whose" in text
        assert ("auto" in text.replace("auto_clip", "")) is (loss == {})  # no other objective or band takes it


@pytest.mark.parametrize(
    ("correction", "text"),
    [
        ({}, "Widen rollout_is_threshold, or"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}, "Widen rollout_rs_threshold, or"),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}, "Widen rollout_rs_threshold or set it to a"),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto"}, "Raise rollout_rs_auto_max, or"),
    ],
)
def test_the_rejection_that_is_set_is_loosened(correction, text):
    assert remedy(REJECTED, mode(**correction)).startswith(text)


def test_a_mode_that_is_in_force_is_no_remedy():
    assert remedy(CLIP, mode()).endswith("or set it to auto, or set rollout_correction.bypass_mode=false")
    assert " beyond the gap, or set rollout_correction.bypass_mode=false" in remedy(
        CLIP, mode({"loss_mode": "grpo_guard"})
    )
    assert remedy(CLIP, mode().decoupled()) == "Widen diffusion_loss.clip_ratio"
    assert remedy(CLIP, mode(), fallen_back=True) == "Widen diffusion_loss.clip_ratio"
    # After a fallback the lower bound of the calibrated band is in force.
    assert remedy(CLIP, mode({"clip_ratio": "auto"}), fallen_back=True) == "Raise diffusion_loss.auto_clip_min"


def test_an_objective_that_is_added_is_judged_guarded_and_remedied_by_its_record(monkeypatch):
    """One that bounds the squared log ratio: what the gap does to it, and what to do, follows from the table alone."""
    squared = Threshold(
        key="adv_clip_max", name="trust region", edge="squared log ratio", share_metric="actor/pg_clipfrac_first"
    )
    record = Objective(name="squared", function="none:at_all", limit=squared, measure=lambda ratio, kl, std: ratio**2)
    monkeypatch.setitem(OBJECTIVES, "squared", record)
    own = mode({"loss_mode": "squared", "adv_clip_max": 4e-6}, guard_patience=1)
    gap = torch.tensor([[1e-3, -1e-3], [3e-3, -3e-3]], dtype=torch.float64).repeat(50, 1)
    full = torch.full_like(gap, 16.0)
    steps = apply_limits(own, GapSample(gap, gap, 0 * gap, full, full, 16, 0 * gap))
    assert torch.equal(steps.beyond, gap.abs() > 2e-3)  # 1e-6 and 9e-6 against 4e-6
    found = step_gap(steps.part(torch.ones_like(steps.keep)), None)
    advice = advise(own, found, row_gap_quantile(gap), 16)
    assert (advice.verdict, advice.limit_key, advice.limit) == ("not safe", "adv_clip_max", pytest.approx(5e-5))
    assert "50% of the samples lie beyond adv_clip_max=4e-06" in advice.reasons[0]
    assert advice.reasons[-1] == "adv_clip_max=5e-05 holds the gap; decoupled mode does without"
    with pytest.warns(UserWarning, match="the trust region before .* Raise diffusion_loss.adv_clip_max beyond the gap"):
        Guard(own)({"actor/pg_clipfrac_first": 0.2, "actor/kept_fraction": 1.0}, 1)
    actor = {"diffusion_loss": {"loss_mode": "squared"}, "rollout_correction": {"bypass_mode": True}}
    history = History([{"actor/pg_clipfrac_first": 0.2}], {"actor_rollout_ref": {"actor": actor}})
    check = next(check for check in CHECKS if check.name == "clip_first")
    assert check.run(history).advice.startswith("Raise diffusion_loss.adv_clip_max beyond the gap, or set")
