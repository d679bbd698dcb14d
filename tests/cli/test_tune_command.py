"""``flowgrpo-rc tune``: the samplers that it tries, its verdicts by hand, and the command on the tiny model."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.cli.tune import prompts_of_budget, report
from flowgrpo_rc.rollout.cache import CacheConfig
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.scout import ScoutConfig
from flowgrpo_rc.section import convert
from flowgrpo_rc.trainer.tune import cheapest, judged, samplers, with_settings

FULL_SAMPLER = {"algo.init_same_noise": False, "tail.steps": None, "tail.solver": "euler"}
SAME = {"algo.init_same_noise": True}
HALF = {"tail.steps": 0.5}
DPM = {"tail.solver": "dpm++2m"}


def rollout(steps=10, **algo):
    window = {"sde_window_size": 2, "sde_window_range": [0, 5]} | algo
    return convert(RolloutConfig, {"pipeline": {"num_inference_steps": steps}, "algo": window})


def test_what_is_tried():
    quarter = {"tail.steps": 0.25}
    tails = [HALF, HALF | DPM, quarter]  # of 8 steps 4 and 2, and two steps of dpm++2m are Euler's
    expected = [{}, *tails, SAME, *(SAME | tail for tail in tails)]
    assert list(samplers(rollout(), clean=False)) == [FULL_SAMPLER | one for one in expected]
    # Of 10 steps without a window 5 and 3.
    expected = [{}, HALF, HALF | DPM, quarter, quarter | DPM]
    assert list(samplers(rollout(), clean=True)) == [FULL_SAMPLER | one for one in expected]
    # Scouts that are drawn again differ by their starting noise alone.
    redrawn = replace(rollout(), scout=ScoutConfig(n=24, redraw=True))
    assert list(samplers(redrawn, clean=False)) == [FULL_SAMPLER | one for one in ({}, *tails)]
    # Of one step none is left out.
    short = rollout(steps=5, sde_window_range=[2, 5])
    assert list(samplers(short, clean=False)) == [FULL_SAMPLER, FULL_SAMPLER | SAME]


NAMED = {"name": "taylorseer", "options": {"cache_interval": 2}, "in_window": True}
CACHE = {"cache.name": NAMED["name"]}
NO_CACHE = {"cache.name": None, "cache.options": None, "cache.in_window": False}


def test_a_configured_cache_is_tried_with_every_sampler():
    configured = replace(rollout(steps=5, sde_window_range=[2, 5]), cache=CacheConfig(**NAMED))
    found = list(samplers(configured, clean=False))
    assert found == [FULL_SAMPLER | steps | one for steps in ({}, SAME) for one in (NO_CACHE, CACHE)]
    assert [with_settings(configured, one).cache.name for one in found] == [None, "taylorseer"] * 2
    assert with_settings(configured, found[1]).cache == configured.cache


def test_settings_that_undo_a_cache():
    text = tried(FULL, NO_CACHE).settings
    named = ["actor_rollout_ref.rollout.cache={name: taylorseer, options: {cache_interval: 2}, in_window: true}"]
    assert compose("tiny_qwen_image_ocr", named).actor_rollout_ref.rollout.cache == CacheConfig(**NAMED)
    assert compose("tiny_qwen_image_ocr", [*named, *text]).actor_rollout_ref.rollout.cache == CacheConfig()


def test_a_cache_has_to_save_time():
    full = tried(FULL, NO_CACHE, forwards=6.0)
    slow, fast = (tried(FULL.clone(), CACHE, forwards=6.0, without=seconds) for seconds in (0.1, 0.125))
    assert slow.objections == ("the cache saved no time",)
    assert cheapest([full, slow]) is full
    assert cheapest([full, fast]) is fast
    dear = replace(full, seconds=0.125)
    assert "0% fewer forwards, 20% less time" in report([dear, fast], fast, 6)
    # A forward less counts more: no cache's time is compared with another sampler's.
    assert cheapest([full, fast, tried(FULL.clone(), SAME | NO_CACHE, forwards=5.0)]).forwards == 5


def test_a_sampler_takes_the_place_of_the_configured_one():
    configured = compose(
        "tiny_qwen_image_ocr", ["actor_rollout_ref.rollout.tail.steps=1", "actor_rollout_ref.rollout.tail.solver=heun"]
    ).actor_rollout_ref.rollout
    full = with_settings(configured, FULL_SAMPLER)
    assert full.tail.is_whole
    assert not full.algo.init_same_noise
    both = with_settings(configured, FULL_SAMPLER | SAME | HALF)
    assert (both.tail.steps, both.tail.solver, both.algo.init_same_noise) == (0.5, "euler", True)


FULL = torch.tensor([[0.0, 1.0], [0.2, 0.8], [0.4, 0.6]], dtype=torch.float64)


def tried(rewards, overrides=HALF, forwards=4.0, full=FULL, distinct=3, without=None):
    figures = {"overrides": FULL_SAMPLER | overrides, "forwards": forwards, "seconds": 0.1, "gap": None}
    return judged(figures, rewards, full, distinct, without)


def test_figures_by_hand():
    full = tried(FULL, {}, forwards=6.0)
    # Variances within the prompts are .5, .18 and .02.
    assert full.spread == pytest.approx(math.sqrt(0.7 / 3))
    assert (full.reward, full.shift, full.objections) == (0.5, 0.0, ())
    # Every image .1 lower: an interval of no width, and a quarter of the deviation .3742 is accepted.
    lower = tried(FULL - 0.09)
    assert [lower.shift, lower.low, lower.high] == pytest.approx([-0.09] * 3)
    assert lower.objections == ()
    (objection,) = tried(FULL - 0.1).objections
    assert objection == "the reward may fall by 0.1, and 0.0935 is accepted"
    # Means of the prompts move by -.3, 0 and .3: Student's t of two degrees of freedom, 4.3, times .3 / sqrt 3.
    moved = tried(FULL + torch.tensor([[-0.3], [0.0], [0.3]]))
    assert moved.high == pytest.approx(4.303 * 0.3 / math.sqrt(3), rel=1e-3)
    assert "may fall by 0.745" in moved.objections[0]
    (objection,) = tried(0.5 + 0.4 * (FULL - 0.5)).objections
    assert objection == "rewards of a prompt spread by 0.193, the full sampler's by 0.483"
    # A prompt that is drawn twice counts once, so that the interval is wider.
    offsets = FULL + torch.tensor([[-0.3], [0.3], [-0.3]])
    assert tried(offsets, distinct=2).high > 2 * tried(offsets).high


def test_equal_rewards_show_nothing():
    nothing = torch.zeros(3, 2, dtype=torch.float64)
    (objection,) = tried(nothing.clone(), full=nothing).objections
    assert "all have the same reward" in objection


def test_the_cheapest_that_is_safe():
    full = tried(FULL, {}, forwards=6.0)
    safe = tried(FULL.clone(), SAME, forwards=5.0)
    better = tried(FULL + 0.1, forwards=5.0)
    wrong = tried(FULL - 0.5, SAME | HALF, forwards=3.0)
    found = [full, safe, better, wrong]
    assert cheapest(found) is better
    text = report(found, better, 6)
    here = "actor_rollout_ref.rollout"
    # Every setting is told, since the configuration may have another.
    assert text.splitlines()[-1] == f"{here}.algo.init_same_noise=false {here}.tail.steps=0.5 {here}.tail.solver=euler"
    assert "17% fewer forwards" in text
    assert "not taken: the reward may fall by 0.5" in text
    assert safe.settings[:2] == [f"{here}.algo.init_same_noise=true", f"{here}.tail.steps=null"]
    alone = report([full, wrong], cheapest([full, wrong]), 6)
    assert "Nothing cheaper is shown safe: keep the full sampler, or give a larger --budget" in alone
    assert alone.splitlines()[-1] == " ".join(full.settings)


def test_budgets():
    assert prompts_of_budget(None, 6, 12) == 8
    assert prompts_of_budget(300, 6, 12) == 4
    assert prompts_of_budget(299, 6, 12) == 3
    with pytest.raises(ValueError, match=r"--budget: got 155; 6 samplers with two prompts of 12 images .* need 156"):
        prompts_of_budget(155, 6, 12)


@pytest.mark.run
@pytest.mark.parametrize("objective", ["flow_grpo", "awm"])
def test_the_command(tmp_path, capsys, objective):
    """Its overrides are accepted by a configuration, also beside a cache; forwards are those of the shortest tail."""
    mode = [f"actor_rollout_ref.actor.diffusion_loss.loss_mode={objective}"]
    if objective == "awm":
        mode += ["algorithm.rollout_correction=null", "actor_rollout_ref.rollout.cache.name=taylorseer"]
        mode.append("actor_rollout_ref.rollout.cache.options={cache_interval: 2, disable_cache_before_step: 1}")
    out = tmp_path / "out"
    command = ["tune", "--config-name", "tiny_qwen_image_ocr", "--budget", "204", "--out", str(out)]
    assert main([*command, *mode, "reward.ocr.num_threads=1"]) == 0
    result = json.loads((out / "tune.json").read_text())
    forwards = [one["forwards"] for one in result["tried"]]
    assert forwards[0] == 6
    assert min(forwards) == pytest.approx(2.0 if objective == "awm" else 2 / 12 + 2)
    caches = [one["overrides"].get("cache.name") for one in result["tried"]]
    assert caches == ([None, "taylorseer"] * 4 if objective == "awm" else [None] * 6)
    if objective == "awm":
        # Of six steps it computes every second one, so that rewards differ.
        assert result["tried"][1]["shift"] != 0
        for plain, cached in pairwise(result["tried"]):
            if cached["overrides"]["cache.name"]:
                idle = cached["seconds"] >= plain["seconds"]
                assert ("the cache saved no time" in cached["objections"]) is idle
    for one in result["tried"]:
        assert 0 <= one["reward"] <= 1
        assert one["low"] <= one["shift"] <= one["high"]
        assert (one["gap"] is None) == (objective == "awm")
        assert objective == "awm" or one["gap"] < 1e-3
    compose("tiny_qwen_image_ocr", [*mode, *result["cheapest"]])
    assert "forwards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "10"], "--budget: got 10; 6 samplers with two prompts of 12 images"),
        (["data.preferences=pairs.jsonl", "actor_rollout_ref.actor.diffusion_loss.loss_mode=dpo"], "preferences"),
        (["actor_rollout_ref.rollout.tail.steps=0"], "tail.steps: got 0"),
    ],
)
def test_refusals_before_the_model_loads(arguments, message, capsys, tmp_path):
    command = ["tune", "--config-name", "tiny_qwen_image_ocr", "--out", str(tmp_path / "out")]
    assert main([*command, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
