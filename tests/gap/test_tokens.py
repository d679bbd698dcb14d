"""The gap of a prompt writer's tokens, by hand."""

import math

import pytest
import torch

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.gap.tokens import token_gap
from flowgrpo_rc.writer import PromptWriterConfig

NAN = math.nan
LOG_RATIO = torch.tensor([[0.1, -0.3, NAN], [0.0, 0.02, 0.5], [-0.1, NAN, NAN], [0.0, 0.0, NAN]])
MASK = LOG_RATIO.isfinite()


def mode(clip_ratio=0.2, **correction):
    actor = {"token_loss": {"clip_ratio": clip_ratio}, "rollout_correction": correction}
    config = PromptWriterConfig(path="asset:tiny_writer", actor=actor).actor
    return ModeInForce(config.rollout_correction, config.diffusion_loss)


def test_the_gap_is_that_of_the_tokens_alone():
    """Ratios 1.105, .741, 1, 1.020, 1.649, .905, 1, 1; of rewrites .819, 1.682, .905, 1."""
    found = token_gap(mode(bypass_mode=True), LOG_RATIO, MASK)
    gap = found.gap
    assert (gap.count, gap.images) == (8, 4)
    assert gap.mean == pytest.approx(0.22 / 8)
    assert gap.abs_mean == pytest.approx(1.02 / 8)
    assert gap.abs_max == pytest.approx(0.5)
    assert gap.clipped == pytest.approx(2 / 8)
    # The limit of SDE steps, .05, is not theirs.
    assert [one.limit for one in found.judged] == [1.0, 0.25]
    assert (gap.rejected, gap.zeroed) == (0, 0)
    values = [0.1, -0.3, 0.0, 0.02, 0.5, -0.1, 0.0, 0.0]
    assert gap.kl_nats == pytest.approx(sum(math.exp(v) - 1 - v for v in values) / 8)
    whole = [math.exp(v) for v in (-0.2, 0.52, -0.1, 0.0)]
    assert found.effective_sample_size == pytest.approx(sum(whole) ** 2 / sum(w * w for w in whole) / 4)
    assert {one.what for one in found.judged} == {"mean |log ratio| per token", "outside clip_ratio=0.2"}


@pytest.mark.parametrize(
    ("correction", "rejected"),
    [
        # Mean log ratios of rewrites are -.1, .173, -.1, 0: the band of log ratios is -.105 to .182, then to .166.
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2"}, 0),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.18"}, 3),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.2"}, 2),
        ({"rollout_token_veto_threshold": 0.8}, 2),
    ],
)
def test_rejection_is_the_configured_one(correction, rejected):
    found = token_gap(mode(**correction), LOG_RATIO, MASK)
    assert found.gap.rejected == pytest.approx(rejected / 8)
    # In decoupled mode the clip band does not lie around the engine.
    assert not any("clip_ratio" in one.what for one in found.judged)


def test_a_band_that_the_gap_fills_is_not_safe():
    """Half of many tokens lie outside."""
    log_ratio = torch.tensor([0.005, 0.03]).repeat(64, 8)
    found = token_gap(mode(0.01, bypass_mode=True), log_ratio, torch.ones(64, 16, dtype=torch.bool))
    assert found.decisive.what == "outside clip_ratio=0.01"
    assert found.decisive.verdict == "not safe"
    assert found.to_dict()["verdict"] == "not safe"
