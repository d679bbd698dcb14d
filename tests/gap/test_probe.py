"""The probe before training: its statistics on gaps of known distribution, its verdicts, its command."""

import math
from dataclasses import replace

import pytest
import torch
from tolerances import LOG_PROB, divergence

from flowgrpo_rc.actor.actor import NonFiniteUpdateError
from flowgrpo_rc.actor.config import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.cli.probe import report
from flowgrpo_rc.gap import probe
from flowgrpo_rc.gap.intervals import Interval
from flowgrpo_rc.gap.probe import run_probe, sample_and_rescore
from flowgrpo_rc.gap.research.drift import Drift, DriftMeter
from flowgrpo_rc.gap.safety import JudgedFigure, advise
from flowgrpo_rc.gap.statistics import GapSample, apply_limits, row_gap_quantile, step_gap
from flowgrpo_rc.trainer import FlowGRPOTrainer

BYPASS = "algorithm.rollout_correction.bypass_mode=true"
LOSS = "actor_rollout_ref.actor.diffusion_loss"
CLIP = f"{LOSS}.clip_ratio"
RC = "algorithm.rollout_correction"


def left_out(loss, gap, kl, std=0.5):
    """``apply_limits`` of these log ratios and divergences per latent dimension, without a correction."""
    dimensions = 512
    full = torch.full_like(gap, dimensions)
    sample = GapSample(gap, gap, 0 * gap, torch.full_like(gap, std), full, dimensions, dimensions * kl)
    return apply_limits(mode_of(loss), sample)


def measured(gap, keep=None, band=(1e-3, 1e-3), *, nats=None, kl=None, timestep=None, zeroed=None, **loss):
    """``step_gap`` of these samples, each an image, with this clip band and this part of them kept."""
    options = DiffusionLossConfig(**({"clip_ratio_low": band[0], "clip_ratio_high": band[1]} | loss))
    kl = torch.zeros_like(gap) if kl is None else kl
    steps = left_out(options, gap[:, None], kl[:, None])
    changes = {"nats": gap if nats is None else nats, "kl_nats": kl}
    changes |= {name: value for name, value in (("keep", keep), ("zeroed", zeroed)) if value is not None}
    flat = steps.part(torch.ones_like(steps.keep))
    return step_gap(replace(flat, **changes), timestep)


def advised(config, overall, gap, dimensions, steps=(), **others):
    """``advise`` on this configuration."""
    parts = config.actor_rollout_ref
    lag = parts.rollout.adapter_lag
    mode = ModeInForce.configured(parts.actor)
    return advise(mode, overall, row_gap_quantile(gap), dimensions, steps, adapter_lag=lag, **others)


def probed(trainer, *images):
    """``run_probe`` of this trainer's run."""
    return run_probe(trainer.probed_run(), *images)


def mode_of(loss):
    """Bypass mode with these loss options."""
    return ModeInForce.configured(DiffusionActorConfig(diffusion_loss=loss, rollout_correction={"bypass_mode": True}))


def test_statistics_of_a_known_distribution():
    """A normal gap of mean 1e-4 and deviation 1e-3: quantiles, moments and the share outside an uneven band."""
    generator = torch.Generator().manual_seed(0)
    gap = 1e-4 + 1e-3 * torch.randn(400_000, generator=generator, dtype=torch.float64)
    found = measured(gap, band=(1e-3, 2e-3), nats=512 * gap, kl=torch.full_like(gap, 0.2), timestep=500.0)

    def below(x):
        return 0.5 * (1 + math.erf((x - 1e-4) / 1e-3 / math.sqrt(2)))

    outside = below(math.log(1 - 1e-3)) + 1 - below(math.log(1 + 2e-3))
    flipped = below(math.log(1 - 2e-3)) + 1 - below(math.log(1 + 1e-3))
    assert found.clipped == pytest.approx(outside, abs=3e-3)
    assert abs(found.clipped - flipped) > 0.01
    assert found.mean == pytest.approx(1e-4, abs=5e-6)
    assert found.abs_mean == pytest.approx(8.02e-4, rel=5e-3)
    for quantile, value in ((0.5, found.abs_median), (0.9, found.abs_q90), (0.99, found.abs_q99)):
        assert below(value) - below(-value) == pytest.approx(quantile, abs=3e-3)
    assert found.abs_max == gap.abs().max()
    assert found.nats == pytest.approx(found.abs_mean * 512)
    assert found.kl_nats == pytest.approx(0.2)
    assert found.count == 400_000
    assert found.rejected == 0
    kept = measured(gap, gap.abs() < 1.5e-3, (1e-3, 2e-3))  # what is rejected is not clipped
    share = below(1.5e-3) - below(-1.5e-3)
    assert kept.clipped == pytest.approx((below(math.log(1 - 1e-3)) - below(-1.5e-3)) / share, abs=3e-3)
    assert kept.rejected == pytest.approx(1 - share, abs=3e-3)


def overall(gap, width):
    return measured(gap.flatten(), band=(width, width))


@pytest.mark.parametrize(
    ("overrides", "scale", "safe", "mode", "clip"),
    [
        ((BYPASS, f"{CLIP}=0.001"), 2e-4, True, "bypass", 1e-3),
        ((BYPASS, f"{CLIP}=0.001"), 1e-3, False, "bypass", 5e-3),
        ((BYPASS, f"{CLIP}=0.01"), 1e-3, True, "bypass", 1e-2),
        ((BYPASS, f"{CLIP}=0.05"), 1e-4, True, "bypass", 5e-2),
        ((BYPASS, f"{CLIP}=0.001"), 1e-2, False, "decoupled", 1e-3),
        ((BYPASS, "algorithm.rollout_correction.loss_type=reinforce", f"{CLIP}=0.001"), 1e-3, True, "bypass", None),
        (("algorithm.rollout_correction.bypass_mode=false", f"{CLIP}=0.0001"), 1e-3, True, "bypass", 5e-3),
        (("algorithm.rollout_correction.bypass_mode=false", f"{CLIP}=0.0001"), 0.2, False, "decoupled", 1e-4),
    ],
)
def test_verdicts(small_config, overrides, scale, safe, mode, clip):
    """Bypass with PPO is refused where the gap empties its band; decoupled mode only where the engine is broken."""
    config = small_config(*overrides)
    gap = scale * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    width = config.actor_rollout_ref.actor.diffusion_loss.clip_ratio
    advice = advised(config, overall(gap, width), gap, 1)
    assert (advice.safe, advice.mode) == (safe, mode)
    assert advice.limit == (None if clip is None else pytest.approx(clip))
    assert advice.limit_key == (None if clip is None else "clip_ratio")


@pytest.mark.parametrize(
    ("scale", "half"), [(0.0, 1e-3), (1e-7, 1e-3), (2e-3, None), (2e-2, None), (1.0, 0.1), (1e4, 0.1)]
)
def test_the_recommended_rejection_band_holds_the_gap_within_its_bounds(small_config, scale, half):
    """99 % of the images; without a gap the bounds of ``auto``, or rounding alone would reject half of them."""
    gap = scale * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advice = advised(small_config(BYPASS, f"{CLIP}=0.01"), overall(gap, 0.01), gap, 1)
    low, high = map(float, advice.rejection_band.split("_"))
    inside = ((gap.mean(1) > math.log(low)) & (gap.mean(1) < math.log(high))).double().mean()
    assert low * high == pytest.approx(1, rel=1e-5)
    if half is None:
        assert inside == pytest.approx(0.99, abs=2e-3)
    else:
        assert math.log(high) == pytest.approx(half, rel=1e-3)
        assert bool(inside == 1) is (scale < 1)


@pytest.mark.parametrize(("std", "share"), [(0.5, 0.6171), (0.05, 3e-7)])
def test_grpo_guard_is_judged_by_its_own_ratio(small_config, std, share):
    """``exp((l + KL) * std)``: for a gap of N(-K, 2K / D) per dimension that is N(0, 2K / D) times the deviation."""
    kl = 1e-3
    dimensions = 512
    deviation = math.sqrt(2 * kl / dimensions)
    generator = torch.Generator().manual_seed(0)
    gap = -kl + deviation * torch.randn(100_000, 2, generator=generator, dtype=torch.float64)
    loss = DiffusionLossConfig(loss_mode="grpo_guard", clip_ratio=0.5 * deviation * 0.5)
    found = left_out(loss, gap, torch.full_like(gap, kl), std)
    assert found.beyond.double().mean() == pytest.approx(share, abs=5e-3)
    assert torch.quantile(found.size.flatten(), 0.9) == pytest.approx(1.645 * deviation * std, rel=1e-2)


@pytest.mark.parametrize(
    ("kl", "safe", "said"),
    [
        (9e-6, True, "0% of the samples lie beyond kl_mask_threshold=1e-05"),
        (2e-4, False, "100% of the samples lie beyond kl_mask_threshold=1e-05"),
    ],
)
def test_flow_dppo_is_judged_by_its_trust_region(small_config, kl, safe, said):
    gap = 1e-3 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = gap.flatten()
    found = measured(flat, kl=torch.full_like(flat, kl), loss_mode="flow_dppo")
    config = small_config(BYPASS, f"{LOSS}.loss_mode=flow_dppo")
    advice = advised(config, found, gap, 512)
    assert advice.safe is safe
    assert said in advice.reasons[0]
    assert advice.limit_key == "kl_mask_threshold"
    assert advice.limit == pytest.approx(5e-5 if safe else 1e-3)  # three times the KL, rounded up
    assert any("kl_mask_threshold=0.001 holds the gap" in reason for reason in advice.reasons) is not safe


@pytest.mark.run
@pytest.mark.parametrize(("loss_mode", "metric"), [("grpo_guard", "clipfrac"), ("flow_dppo", "clipfrac_inert")])
def test_what_the_probe_says_of_an_objective_is_what_its_first_update_meets(small_config, loss_mode, metric):
    """The probe trains on its samples to time it, and says what is expected of them; ``flow_dppo`` leaves out half."""
    limit = {"grpo_guard": f"{CLIP}=2e-4", "flow_dppo": f"{LOSS}.kl_mask_threshold=5e-4"}[loss_mode]
    settings = (BYPASS, f"{LOSS}.loss_mode={loss_mode}", "actor_rollout_ref.rollout.quantization=fp8", limit)
    trainer = FlowGRPOTrainer(small_config(*settings, f"{RC}.rollout_rs=null", f"{RC}.rollout_rs_threshold=null"))
    update = trainer.run.actor.update
    seen = []
    trainer.run.actor.update = lambda *a, **k: seen.append(update(*a, **k)) or seen[0]
    result = probed(trainer, 16)
    assert 0.1 < result.overall.clipped < 0.95
    of_the_update = seen[0].metrics[f"actor/pg_{metric}_first"]
    if metric == "clipfrac":
        assert of_the_update == pytest.approx(result.overall.clipped, abs=0.08)
    else:
        assert of_the_update == pytest.approx(result.overall.clipped / 2, abs=0.12)


@pytest.mark.run
def test_a_calibrated_clip_is_judged_by_the_bands_of_this_gap(small_config):
    """Three times the 90 % quantile holds all but outliers, unless it may not, where a fixed clip is emptied."""
    fp8 = "actor_rollout_ref.rollout.quantization=fp8"
    rejects = (f"{RC}.rollout_rs=null", f"{RC}.rollout_rs_threshold=null")
    auto = (BYPASS, fp8, *rejects, f"{CLIP}=auto", f"{LOSS}.auto_clip_min=1e-5")
    fixed = probed(FlowGRPOTrainer(small_config(BYPASS, fp8, *rejects, f"{CLIP}=1e-4", folder="f")), 16)
    result = probed(FlowGRPOTrainer(small_config(*auto, folder="a")), 16)
    assert fixed.overall.abs_mean == result.overall.abs_mean
    assert (fixed.advice.safe, result.advice.safe, result.advice.limit) == (False, True, "auto")
    assert result.overall.clipped < 0.03 < 0.5 < fixed.overall.clipped
    assert result.setting["clip_band"] == pytest.approx(
        [min(3 * edge(step.abs_q90 for step in result.steps), 1e-2) for edge in (min, max)]
    )
    narrow = probed(FlowGRPOTrainer(small_config(*auto, f"{LOSS}.auto_clip_max=1e-4", folder="n")), 16)
    assert not narrow.advice.safe
    assert "outside clip_ratio=auto (1e-05 to 0.0001) before" in narrow.advice.reasons[0]
    assert 3 * result.overall.abs_q90 <= narrow.advice.limit <= 2.5 * 3 * result.overall.abs_q90
    assert "clip band auto, 1 +- " in report(result)
    assert "clip_ratio=auto;" in report(result)


@pytest.mark.run
def test_an_update_that_fails_is_not_safe(small_config):
    """The measurements so far are kept."""
    trainer = FlowGRPOTrainer(small_config(BYPASS, f"{CLIP}=0.01"))

    def fails(*_, **__):
        raise NonFiniteUpdateError("the gradient is nan", [0])

    trainer.run.actor.update = fails
    result = probed(trainer, 2)
    assert not result.advice.safe
    assert result.saved is None
    assert "an optimizer step on these samples fails: the gradient is nan" in report(result)
    assert "leaves out" not in report(result)


@pytest.mark.run
def test_a_sliding_window_is_probed_at_its_own_places(small_config):
    algo = "actor_rollout_ref.rollout.algo"
    window = (f"{algo}.sde_window_size=2", f"{algo}.sde_window_range=[0,4]")
    found = {}
    for strategy in ("random", "progressive"):
        trainer = FlowGRPOTrainer(small_config(BYPASS, *window, f"{algo}.sample_strategy={strategy}", folder=strategy))
        found[strategy] = probed(trainer, 2)
    assert (found["random"].setting["images"], found["progressive"].setting["images"]) == (3 * 2, 2 * 2)
    assert [step.count for step in found["random"].steps] == [2, 4, 4, 2]  # from 0, 1, 2
    assert [step.count for step in found["progressive"].steps] == [2, 2, 2, 2]  # from 0, 2


@pytest.mark.run
def test_equal_engines_have_no_gap(small_config):
    trainer = FlowGRPOTrainer(small_config(BYPASS, "actor_rollout_ref.rollout.dtype=float32"))
    result = probed(trainer, 8)
    assert result.overall.abs_max < LOG_PROB
    assert result.overall.kl_nats < divergence(512)
    assert result.advice.safe
    assert len(result.steps) == 3  # every step that the window can reach
    assert sum(step.count for step in result.steps) == result.overall.count == 8 * 2 * 2
    assert result.overall.images == 8 * 2
    assert 0 < result.saved < 1


@pytest.mark.run
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_the_gap_is_that_of_the_means(small_config, sde_type):
    """For a Gaussian step the gap in nats and the KL come from the same shift of the mean, whatever its scale."""
    algo = f"actor_rollout_ref.rollout.algo.sde_type={sde_type}"
    trainer = FlowGRPOTrainer(small_config(BYPASS, "actor_rollout_ref.rollout.quantization=fp8", algo))
    result = probed(trainer, 8)
    for step in result.steps:
        # the gap is N(-KL, 2 KL) in nats for a draw of the engine: its size is that of sqrt(2 KL)
        assert 0.3 < step.nats / math.sqrt(2 * step.kl_nats) < 1.6
    assert result.steps[-1].kl_nats > result.steps[0].kl_nats  # grows towards the image


WINDOW_4 = ("actor_rollout_ref.rollout.algo.sde_window_size=4", "actor_rollout_ref.rollout.algo.sde_window_range=[0,4]")


def out_of(images, steps, outside, width=1e-3):
    """``StepGap`` of ``images`` x ``steps`` samples of which the first ``outside`` leave the band."""
    gap = torch.full((images, steps), 0.1 * width, dtype=torch.float64)
    gap.view(-1)[torch.randperm(images * steps, generator=torch.Generator().manual_seed(0))[:outside]] = 3 * width
    found = left_out(DiffusionLossConfig(clip_ratio=width), gap, 0 * gap)
    flat = replace(found, nats=gap).part(torch.ones_like(found.keep))
    return step_gap(flat, None), gap


@pytest.mark.parametrize(
    ("images", "outside", "verdict"),
    [
        (16, 15, "not shown safe"),  # 23 % of 64, as a run that unlearned was measured before it
        (16, 19, "not shown safe"),
        (16, 0, "safe"),
        (16, 40, "not safe"),
        (128, 154, "not safe"),  # 30 % of 512
        (128, 118, "not shown safe"),  # 23 % of 512
        (128, 82, "safe"),  # 16 % of 512
        (2000, 1840, "safe"),  # 23 % of 8000
    ],
)
def test_a_share_is_judged_by_its_interval(small_config, images, outside, verdict):
    found, gap = out_of(images, 4, outside)
    advice = advised(small_config(BYPASS, f"{CLIP}=1e-3"), found, gap, 512, images=images)
    said = " ".join(advice.reasons)
    assert advice.verdict == verdict
    assert advice.safe is (verdict == "safe")
    assert found.clipped_interval.low < outside / images / 4 < found.clipped_interval.high or not outside
    assert ("the limit lies within that interval" in said) is (verdict == "not shown safe")
    assert ("decoupled mode does without" in said) is (verdict != "safe")
    assert advice.because.startswith("outside clip_ratio=0.001: ")
    assert "limit 25%" in advice.because


def test_it_says_how_many_images_would_settle_it(small_config):
    """If the share is what it seems: as many then do, and no other number up to the most where it is at its limit."""
    found, gap = out_of(16, 4, 15)
    config = small_config(BYPASS, f"{CLIP}=1e-3")
    said = next(r for r in advised(config, found, gap, 512, images=16).reasons if "--images" in r)
    images = int(said.partition("--images ")[2].partition(" ")[0])
    assert said == (
        "16 images a place do not show on which side of its limit the share lies (outside clip_ratio=0.001); "
        f"--images {images} would, if it is what it seems, 23%"
    )
    again, gap = out_of(images, 4, round(images * 4 * 15 / 64))
    assert advised(config, again, gap, 512, images=images).verdict == "safe"
    at_the_limit, gap = out_of(16, 4, 16)
    said = " ".join(advised(config, at_the_limit, gap, 512, images=16).reasons)
    assert "not even --images 4096 would show" in said
    assert "take it for too much" in said
    assert "--images" not in " ".join(advised(config, found, gap, 512).reasons)


@pytest.mark.run
def test_it_samples_on_until_it_is_settled(small_config):
    """The window-4 setting that unlearned: 16 images do not tell, more find it not safe; the first images stay."""
    settings = (BYPASS, "actor_rollout_ref.rollout.quantization=fp8", f"{CLIP}=2e-4", *WINDOW_4)
    settings += ("actor_rollout_ref.rollout.pipeline.num_inference_steps=6", f"{RC}.rollout_rs=null")
    settings += (f"{RC}.rollout_rs_threshold=null",)
    narrow = probed(FlowGRPOTrainer(small_config(*settings, folder="narrow")), 4, 128)
    assert narrow.advice.verdict == "not safe"
    assert narrow.images < 128  # as soon as it is clear
    assert narrow.overall.count == 4 * narrow.images
    assert narrow.overall.images == narrow.images
    whole = probed(FlowGRPOTrainer(small_config(*settings, folder="whole")), narrow.images)
    assert whole.overall.clipped == narrow.overall.clipped  # the same images, asked for at once
    assert whole.overall.abs_mean == pytest.approx(narrow.overall.abs_mean, rel=1e-3)
    assert whole.confidence == pytest.approx(0.95)
    assert narrow.confidence > 0.95


@pytest.mark.parametrize(
    ("low", "high", "verdict", "says"),
    [
        (0.0082, 0.0091, "not safe", "runs like that lost what they had learned"),
        (0.0061, 0.0086, "not shown safe", "a limit lies within that interval"),
        (0.0062, 0.0070, "not shown safe", "with a high learning rate they lost what they had learned"),
        (0.0052, 0.0064, "not shown safe", "a limit lies within that interval"),
        (0.0048, 0.0058, "safe", "(safe below 0.006, not safe above 0.0075)"),
        (0.0, 0.002, "safe", "whatever is rewarded, an update moves toward the engine's error"),
    ],
)
def test_the_drift_is_judged_by_its_interval(small_config, low, high, verdict, says):
    """Also where hardly a sample leaves the clip band."""
    drift = Drift((low + high) / 2, Interval(low, high, 8.0), 0.95)
    gap = 2e-4 * torch.randn(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advice = advised(small_config(BYPASS, f"{CLIP}=1e-3"), overall(gap, 1e-3), gap, 512, drift=drift, images=16)
    assert advice.verdict == verdict
    said = " ".join(advice.reasons)
    assert says in said
    assert ("decoupled mode does without" in said) is (verdict == "not shown safe")
    if verdict != "safe":
        assert (
            advice.because
            == f"drift: {drift.value:.2g} ({low:.2g} to {high:.2g}), safe below 0.006, not safe above 0.0075"
        )


@pytest.mark.run
def test_the_probe_measures_the_drift_where_the_engine_anchors_the_clip(small_config):
    fp8 = ("actor_rollout_ref.rollout.quantization=fp8", f"{RC}.rollout_rs=null", f"{RC}.rollout_rs_threshold=null")
    found = {}
    for name, overrides in {
        "narrow": (BYPASS, f"{CLIP}=1e-4"),
        "wide": (BYPASS, f"{CLIP}=5e-2"),
        "auto": (BYPASS, f"{CLIP}=auto", f"{LOSS}.auto_clip_min=1e-5"),
        "reinforce": (BYPASS, f"{RC}.loss_type=reinforce"),
        "decoupled": (f"{RC}.bypass_mode=false",),
    }.items():
        result = probed(FlowGRPOTrainer(small_config(*fp8, *overrides, folder=name)), 8)
        found[name] = result.drift
        written = result.to_dict()["drift"]
        assert (written is None) is (result.drift is None)
        assert any("drift" in one.what for one in result.advice.judged) is (result.drift is not None)
    assert found["reinforce"] is None
    assert found["decoupled"] is None
    assert found["narrow"].value > 20 * found["auto"].value
    assert found["narrow"].cosine < 0.9 < 0.999 < found["wide"].cosine
    assert found["wide"].value == pytest.approx(0, abs=1e-6)
    assert found["narrow"].interval.low < found["narrow"].value < found["narrow"].interval.high


@pytest.mark.run
def test_calibrated_limits_of_the_last_look_hold_for_all_images(small_config, monkeypatch):
    """Two looks give the drift that one look at all images gives: of the first ones no gradient under bands of fewer
    images is left."""
    overrides = (
        BYPASS,
        "actor_rollout_ref.rollout.quantization=fp8",
        f"{CLIP}=1e-4",
        *(f"{RC}.rollout_rs=seq_mean_k1", f"{RC}.rollout_rs_threshold=auto"),
        *(f"{RC}.rollout_rs_auto_share=0.3", f"{RC}.rollout_rs_auto_min=1e-6"),
    )
    once = FlowGRPOTrainer(small_config(*overrides)).probed_run()
    batches = [sample_and_rescore(once, 2, before) for before in (0, 2)]
    unsettled = JudgedFigure("drift", 1.0, 0.0, 2.0, 1.0, 1.0, False, "not shown safe")
    monkeypatch.setattr(probe, "decisive", lambda judged: unsettled)
    found = run_probe(FlowGRPOTrainer(small_config(*overrides, folder="two")).probed_run(), 2, 4)
    assert found.images == 4
    samples = [batch.sample for batch in batches]
    bounds = [
        probe._calibrated_limits(once.mode, sample)["rollout_rs_bounds"]
        for sample in (GapSample.concatenate(samples), samples[0])
    ]
    expected = drift_under(once, batches, bounds[0])
    mixed = drift_under(once, batches, torch.cat([bounds[1], bounds[0][len(bounds[1]) :]]))
    assert found.drift.value == pytest.approx(expected, rel=1e-4)
    assert abs(mixed - expected) > 1e-2 * expected


def drift_under(run, batches, bounds):
    """The drift of these images under these rejection bounds."""
    meter = DriftMeter(run.mode, run.rollout.algo.sde_type, run.seed)
    for batch, part in zip(batches, bounds.split(len(batches[0].trajectories)), strict=True):
        batch.trajectories["rollout_rs_bounds"] = part
        meter.add(run.actor, batch.trajectories, batch.scored, batch.conditioning)
    return meter.result(0.95).value


@pytest.mark.run
def test_a_run_is_probed_from_its_own_end(small_config, finished_run):
    """By its last checkpoint or by its final adapter, which are the same weights, and not those of the start."""
    model = "actor_rollout_ref.model"
    ends = {
        "start": (),
        "adapter": (f"{model}.lora_adapter_path={finished_run.root / 'lora'}",),
        "checkpoint": (
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={finished_run.root / 'checkpoints' / 'step_2'}",
        ),
    }
    found = {}
    for name, overrides in ends.items():
        config = small_config(BYPASS, "actor_rollout_ref.rollout.quantization=fp8", *overrides, folder=name)
        found[name] = sample_and_rescore(FlowGRPOTrainer(config).probed_run(), 2).sample.engine
    assert torch.equal(found["adapter"], found["checkpoint"])
    assert (found["adapter"] - found["start"]).abs().max() > 1e-5
