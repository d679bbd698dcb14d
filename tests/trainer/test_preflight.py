"""The probe before training: its statistics on gaps of known distribution, its verdicts, its command."""

import json
import math

import pytest
import torch

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.cli.probe import report
from flowgrpo_rc.rollout import RolloutError
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.preflight import advise, run_preflight, step_gap

BYPASS = "algorithm.rollout_correction.bypass_mode=true"
CLIP = "actor_rollout_ref.actor.diffusion_loss.clip_ratio"


def test_statistics_of_a_known_distribution():
    """A normal gap of mean 1e-4 and deviation 1e-3: quantiles, moments and the share outside an uneven band."""
    generator = torch.Generator().manual_seed(0)
    gap = 1e-4 + 1e-3 * torch.randn(400_000, generator=generator, dtype=torch.float64)
    keep = torch.ones_like(gap, dtype=torch.bool)
    found = step_gap(gap, 512 * gap, torch.full_like(gap, 0.2), keep, (1e-3, 2e-3), 500.0)

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
    kept = step_gap(gap, 512 * gap, gap, gap.abs() < 1.5e-3, (1e-3, 2e-3), 500.0)  # what is rejected is not clipped
    share = below(1.5e-3) - below(-1.5e-3)
    assert kept.clipped == pytest.approx((below(math.log(1 - 1e-3)) - below(-1.5e-3)) / share, abs=3e-3)
    assert kept.rejected == pytest.approx(1 - share, abs=3e-3)


def overall(gap, width):
    flat = gap.flatten()
    return step_gap(flat, flat, flat, torch.ones_like(flat, dtype=torch.bool), (width, width), None)


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
    advice = advise(config, overall(gap, width), gap, 1)
    assert (advice.safe, advice.mode) == (safe, mode)
    assert advice.clip_ratio == (None if clip is None else pytest.approx(clip))


@pytest.mark.parametrize(
    ("scale", "half"),
    [(0.0, 1e-3), (1e-7, 1e-3), (2e-3, None), (2e-2, None), (1.0, 0.1), (1e4, 0.1)],
)
def test_the_recommended_rejection_band_holds_the_gap_within_its_bounds(small_config, scale, half):
    """99 % of the images; without a gap the bounds of ``auto``, or rounding alone would reject half of them."""
    gap = scale * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advice = advise(small_config(BYPASS, f"{CLIP}=0.01"), overall(gap, 0.01), gap, 1)
    low, high = map(float, advice.rejection_band.split("_"))
    inside = ((gap.mean(1) > math.log(low)) & (gap.mean(1) < math.log(high))).double().mean()
    assert low * high == pytest.approx(1, rel=1e-5)
    if half is None:
        assert inside == pytest.approx(0.99, abs=2e-3)
    else:
        assert math.log(high) == pytest.approx(half, rel=1e-3)
        assert bool(inside == 1) is (scale < 1)


def test_a_narrow_rejection_band_keeps_its_digits(small_config):
    gap = 1e-6 * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = small_config(BYPASS, f"{CLIP}=0.01", "algorithm.rollout_correction.rollout_rs_auto_min=1e-7")
    low, high = map(float, advise(config, overall(gap, 0.01), gap, 1).rejection_band.split("_"))
    inside = ((gap.mean(1) > math.log(low)) & (gap.mean(1) < math.log(high))).double().mean()
    assert inside == pytest.approx(0.99, abs=2e-3)


def test_a_band_with_two_sides_is_named_with_both(small_config):
    sides = (f"{CLIP}_low=0.00001", f"{CLIP}_high=0.01")
    gap = 1e-3 * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = gap.flatten()
    found = step_gap(flat, flat, flat, torch.ones_like(flat, dtype=torch.bool), (1e-5, 1e-2), None)
    advice = advise(small_config(BYPASS, *sides), found, gap, 1)
    assert not advice.safe
    assert "outside clip_ratio_low=1e-05 and clip_ratio_high=0.01 before" in advice.reasons[0]
    assert advice.clip_ratio == pytest.approx(5e-3)
    assert "clip_ratio=0.005 holds the gap" in advice.reasons[1]


@pytest.mark.parametrize("sides", [(), (f"{CLIP}_low=0.01", f"{CLIP}_high=0.01"), (f"{CLIP}_high=0.02",)])
def test_the_recommendation_says_what_would_keep_it_from_working(small_config, sides):
    """A side of its own overrides ``clip_ratio``, also where both are equal."""
    result = run_preflight(FlowGRPOTrainer(small_config(BYPASS, f"{CLIP}=0.01", *sides, folder=str(len(sides)))), 2)
    said = report(result)
    assert f"clip_ratio={result.advice.clip_ratio:g}" in said
    assert ("with clip_ratio_low=null clip_ratio_high=null" in said) is bool(sides)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_a_broken_engine_is_one_in_nats_per_dimension(small_config, scale):
    """``cps`` log-probs leave out 1/(2 std^2), here 5: the same engine is as broken, at a fifth of the log ratio."""
    config = small_config("algorithm.rollout_correction.bypass_mode=false")
    for mean, safe in ((0.06, False), (0.04, True)):
        gap = torch.full((100, 2), mean / scale, dtype=torch.float64)
        flat = gap.flatten()
        found = step_gap(flat, 512 * scale * flat, flat, flat > 0, (1e-3, 1e-3), None)
        assert advise(config, found, gap, 512).safe is safe


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_other_weights_in_the_engine_are_broken_for_every_sde_type(small_config, sde_type):
    """Actor and engine are as far apart, whatever the log-prob leaves out."""
    algo = "actor_rollout_ref.rollout.algo"
    settings = (f"{algo}.sde_type={sde_type}", f"{algo}.sde_window_range=[2,3]", f"{algo}.sde_window_size=1")
    for scale, safe in ((0.0, True), (0.3, False)):
        decoupled = "algorithm.rollout_correction.bypass_mode=false"
        trainer = FlowGRPOTrainer(small_config(decoupled, *settings, folder=f"{sde_type}{scale}"))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in trainer.run.engine.transformer.named_parameters():
            if "lora" not in name:  # whose digest is checked
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.data = parameter.data + scale * parameter.data.std(correction=0) * noise
        result = run_preflight(trainer, 4)
        assert result.advice.safe is safe
        assert ("computes something else" in " ".join(result.advice.reasons)) is not safe


def test_what_the_actor_cannot_score_is_an_error(small_config):
    trainer = FlowGRPOTrainer(small_config(BYPASS))
    rescore = trainer.run.actor.rescore
    trainer.run.actor.rescore = lambda *a: {k: v * float("nan") for k, v in rescore(*a).items()}
    with pytest.raises(RolloutError, match=r"gives 8 of 8 steps that the engine sampled a NaN .*model.dtype"):
        run_preflight(trainer, 2)


@pytest.mark.parametrize(("loss", "mode"), [("reinforce", "bypass"), ("ppo_clip", "decoupled")])
def test_no_mode_is_recommended_that_the_objective_refuses(small_config, loss, mode):
    gap = 5e-2 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = small_config(BYPASS, f"algorithm.rollout_correction.loss_type={loss}")
    assert advise(config, overall(gap, 1e-3), gap, 1).mode == mode


@pytest.mark.parametrize(("kept", "safe"), [(0.6, True), (0.4, False), (0.0, False)])
def test_a_rejection_of_most_samples_is_not_safe(small_config, kept, safe):
    gap = 4e-3 * torch.ones(100).double()
    keep = torch.arange(100) < 100 * kept
    found = step_gap(gap, gap, gap, keep, (1e-2, 1e-2), None)
    advice = advise(small_config(BYPASS, f"{CLIP}=0.01"), found, gap[:, None], 1)
    assert advice.safe is safe
    assert any(f"rejection removes {1 - kept:.0%}" in reason for reason in advice.reasons)
    assert any("widen rollout_rs_threshold" in reason for reason in advice.reasons) is not safe
    assert not any("holds the gap" in reason for reason in advice.reasons)  # it is not the clip


@pytest.mark.parametrize("loss_mode", ["grpo_guard", "flow_dppo"])
def test_objectives_with_another_ratio_are_not_judged_by_this_one(small_config, loss_mode):
    config = small_config(BYPASS, f"{CLIP}=0.0001", f"actor_rollout_ref.actor.diffusion_loss.loss_mode={loss_mode}")
    gap = 1e-3 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advice = advise(config, overall(gap, 1e-4), gap, 1)
    assert advice.safe
    assert advice.clip_ratio is None
    assert len(advice.reasons) == 1
    assert f"loss_mode={loss_mode} does not clip the ratio that is measured here" in advice.reasons[0]


def test_equal_engines_have_no_gap(small_config):
    trainer = FlowGRPOTrainer(small_config(BYPASS, "actor_rollout_ref.rollout.dtype=float32"))
    result = run_preflight(trainer, 2)
    assert result.overall.abs_max < 1e-6
    assert result.overall.kl_nats < 1e-9
    assert result.advice.safe
    assert len(result.steps) == 3  # every step that the window can reach
    assert sum(step.count for step in result.steps) == result.overall.count == 2 * 2 * 2
    assert 0 < result.saved < 1


@pytest.mark.parametrize("threshold", ["auto", "0.9995_1.0005"])
def test_rejection_is_taken_into_account(small_config, threshold):
    rc = "algorithm.rollout_correction"
    settings = (BYPASS, "actor_rollout_ref.rollout.quantization=fp8", f"{CLIP}=1e-3", f"{rc}.rollout_rs=seq_mean_k1")
    auto = (f"{rc}.rollout_rs_auto_share=0.25", f"{rc}.rollout_rs_auto_min=1e-6")
    without = run_preflight(FlowGRPOTrainer(small_config(*settings, f"{rc}.rollout_rs_threshold=0.5_2.0")), 8)
    result = run_preflight(FlowGRPOTrainer(small_config(*settings, f"{rc}.rollout_rs_threshold={threshold}", *auto)), 8)
    assert without.overall.rejected == 0
    assert result.overall.abs_mean == without.overall.abs_mean
    assert 0.1 < result.overall.rejected < 0.9
    assert result.overall.clipped < without.overall.clipped
    assert any("for the gap alone" in reason for reason in result.advice.reasons)


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_the_gap_is_that_of_the_means(small_config, sde_type):
    """For a Gaussian step the gap in nats and the KL come from the same shift of the mean, whatever its scale."""
    algo = f"actor_rollout_ref.rollout.algo.sde_type={sde_type}"
    trainer = FlowGRPOTrainer(small_config(BYPASS, "actor_rollout_ref.rollout.quantization=fp8", algo))
    result = run_preflight(trainer, 8)
    for step in result.steps:
        # the gap is N(-KL, 2 KL) in nats for a draw of the engine: its size is that of sqrt(2 KL)
        assert 0.3 < step.nats / math.sqrt(2 * step.kl_nats) < 1.6
    assert result.steps[-1].kl_nats > result.steps[0].kl_nats  # grows towards the image


def test_the_command_gates_on_its_exit_code(tmp_path, capsys):
    common = ["--config-name", "tiny_qwen_image_ocr", "--images", "4", "--out", str(tmp_path), BYPASS]
    common += ["reward.functions.ocr=0", "reward.functions.jpeg_compressibility=1"]
    assert main(["probe", *common, f"{CLIP}=0.01"]) == 0
    assert "Verdict: SAFE" in capsys.readouterr().out
    assert main(["probe", *common, f"{CLIP}=0.00001"]) == 3
    said = capsys.readouterr().out
    assert "Verdict: NOT SAFE" in said
    assert "clip_ratio=1e-05 before anything is learned" in said
    saved = json.loads((tmp_path / "probe.json").read_text())
    assert saved["advice"]["safe"] is False
    assert saved["overall"]["clipped"] > 0.5
    assert (tmp_path / "probe.png").stat().st_size > 10_000
    assert main(["probe", *common, "--images", "1"]) == 2
    assert "images: got 1" in capsys.readouterr().err
    assert main(["probe", *common, f"{CLIP}=auto"]) == 2
    assert "clip_ratio: got auto" in capsys.readouterr().err
    assert main(["probe", *common, "--out", str(tmp_path / "probe.json")]) == 2  # a file
    assert "probe.json" in capsys.readouterr().err
