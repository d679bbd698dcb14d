"""``clip_ratio=auto``: the bands follow the measured gap, per timestep, robustly, within bounds, over a resume."""

import pytest
import torch
from tests_support import untimed

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.correction.numerics.rejection import row_statistic
from flowgrpo_rc.gap.bands import ENOUGH, IMAGE_MEMORY, MEMORY, ClipBands, RejectionBands
from flowgrpo_rc.trainer import FlowGRPOTrainer

AUTO = (
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.actor.diffusion_loss.clip_ratio=auto",
    "actor_rollout_ref.rollout.quantization=fp8",
    "actor_rollout_ref.rollout.probe.images=8",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)


def normal(count, scale, seed=0):
    return (scale * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).tolist()


def observe(bands, timesteps, gaps):
    """Images of one step each."""
    bands.observe(torch.tensor(timesteps)[:, None], torch.tensor(gaps, dtype=torch.float64)[:, None])


def test_width_is_three_times_the_quantile_of_the_size():
    bands = ClipBands(1e-6, 1.0)
    observe(bands, [500.0] * 9, [-0.009, 0.001, 0.002, -0.003, 0.004, 0.005, -0.006, 0.007, 0.008])
    # |gap| sorted is 1..9 thousandths; the 0.9 quantile lies at position 7.2 of 0..8
    assert bands.width(500.0) == pytest.approx(3 * 0.0082)


def test_widths_are_those_of_each_timestep():
    bands = ClipBands(1e-6, 1.0)
    for timestep, scale in ((1000.0, 1e-4), (500.0, 1e-3)):
        observe(bands, [timestep] * MEMORY, normal(MEMORY, scale))
    widths = bands.widths(torch.tensor([[1000.0, 500.0], [500.0, 1000.0]]))
    assert widths[0, 0] == widths[1, 1]
    assert widths[0, 1] == widths[1, 0]
    assert widths[0, 1] / widths[0, 0] == pytest.approx(10, rel=1e-5)
    assert widths[0, 0] == pytest.approx(3 * 1.645e-4, rel=0.25)  # 90 % of |normal| lie below 1.645 deviations
    named = bands.metrics()
    assert named["actor/clip_ratio_auto_min"] == pytest.approx(float(widths.min()))
    assert named["actor/clip_ratio_auto_max"] == pytest.approx(float(widths.max()))


def test_bounds_outliers_memory_and_few_samples():
    bands = ClipBands(1e-4, 1e-2)
    with pytest.raises(RuntimeError, match="no gap has been measured yet"):
        bands.width(500.0)
    observe(bands, [500.0] * 20, [0.0] * 20)
    assert bands.width(500.0) == 1e-4  # no gap: the narrowest, so calibration costs nothing
    observe(bands, [500.0], [1e3])
    assert bands.width(500.0) == 1e-4  # one outlier in 21
    observe(bands, [500.0] * MEMORY, [0.5] * MEMORY)
    assert bands.width(500.0) == 1e-2  # the old samples are forgotten, and the widest bounds it
    observe(bands, [700.0] * (ENOUGH - 1), [1e-9] * (ENOUGH - 1))
    assert bands.width(700.0) == bands.width(123.0) == 1e-2  # too few of its own: all timesteps together
    observe(bands, [700.0], [1e-9])
    assert bands.width(700.0) == 1e-4
    other = ClipBands(1e-4, 1e-2)
    other.load_state_dict(bands.state_dict())
    assert other.metrics() == bands.metrics()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.rollout_correction.bypass_mode=false",), "got auto, which follows the gap that bypass"),
        (("algorithm.rollout_correction.loss_type=reinforce",), "got auto, which follows the gap that bypass"),
        (("actor_rollout_ref.actor.diffusion_loss.loss_mode=grpo_guard",), "whose ratio has another scale"),
        (("actor_rollout_ref.actor.diffusion_loss.clip_ratio_low=0.1",), "give numbers, or only auto"),
        (("actor_rollout_ref.actor.diffusion_loss.auto_clip_max=1e-5",), "at least auto_clip_min"),
        (("actor_rollout_ref.actor.diffusion_loss.clip_ratio=wide",), "got 'wide'; give a number or auto"),
        (("actor_rollout_ref.rollout.probe.images=0",), "follows what the probe measures"),
    ],
)
def test_what_does_not_go_with_auto(overrides, message):
    with pytest.raises(ValueError, match=message):
        compose("tiny_qwen_image_ocr", [*AUTO, *overrides])


def rejection(option="seq_mean_k1", **others):
    settings = {"rollout_rs_auto_share": 0.1, "rollout_rs_auto_min": 1e-6, "rollout_rs_auto_max": 1.0, **others}
    return RejectionBands(RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold="auto", **settings))


@pytest.mark.parametrize(("option", "power"), [("seq_mean_k1", 1), ("seq_sum_k1", 1), ("seq_max_k2", 2)])
def test_the_rejection_bound_lets_the_share_through_at_each_window(option, power):
    bands = rejection(option)
    count = IMAGE_MEMORY
    windows = {1000.0: 1e-4, 750.0: 1e-3}
    for first, scale in windows.items():
        timesteps = torch.tensor([[first, first - 250]]).expand(count, 2)
        bands.observe(timesteps, torch.tensor(normal(2 * count, scale)).view(count, 2))
    fresh = torch.tensor(normal(40_000, 1.0, seed=1)).view(-1, 2)
    (criterion,) = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold="auto").plan().criteria
    for first, scale in windows.items():
        share = float((row_statistic(scale * fresh, criterion) > bands.bound(first)).double().mean())
        assert 0.06 < share < 0.15
    assert bands.bound(750.0) / bands.bound(1000.0) == pytest.approx(10**power, rel=1e-6)
    given = bands.bounds(torch.tensor([[750.0, 500.0], [1000.0, 750.0]]))
    assert given.tolist() == pytest.approx([bands.bound(750.0), bands.bound(1000.0)])
    named = bands.metrics()
    assert named["actor/rollout_rs_auto_max"] == bands.bound(750.0)
    assert named["actor/rollout_rs_auto_min"] == bands.bound(1000.0)


@pytest.mark.parametrize(("option", "low", "high"), [("seq_mean_k1", 1e-3, 0.1), ("seq_sum_k2", 1e-6, 1e-2)])
def test_the_rejection_bound_is_bounded_in_log_ratios(option, low, high):
    """1e-3 to 0.1 of l on each of two steps: for the sum of l^2/2, 1e-6 to 1e-2."""
    bands = rejection(option, rollout_rs_auto_min=1e-3, rollout_rs_auto_max=0.1)
    with pytest.raises(RuntimeError, match="no gap has been measured yet"):
        bands.bound(500.0)
    timesteps = torch.full((ENOUGH, 2), 500.0)
    bands.observe(timesteps, torch.zeros(ENOUGH, 2).double())
    assert bands.bound(500.0) == pytest.approx(low)
    bands.observe(timesteps.repeat(100, 1), torch.ones(100 * ENOUGH, 2).double())
    assert bands.bound(500.0) == pytest.approx(high)


@pytest.mark.parametrize(("option", "power"), [("seq_mean_k1", 1), ("seq_mean_k2", 2)])
@pytest.mark.parametrize("count", [16, 64, 256])
def test_few_images_do_not_reject_more_than_the_tail(option, power, count):
    """The share that fresh images lose, over many calibrations with so few: near the target of 1 % from the start."""
    fresh = torch.tensor(normal(20_000, 1e-3, seed=99)).view(-1, 1)
    shares = []
    for seed in range(60):
        bands = rejection(option, rollout_rs_auto_share=0.01, rollout_rs_auto_min=1e-9)
        bands.observe(torch.full((count, 1), 500.0), torch.tensor(normal(count, 1e-3, seed=seed)).view(-1, 1))
        (criterion,) = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold="auto").plan().criteria
        shares.append(float((row_statistic(fresh, criterion) > bands.bound(500.0)).double().mean()))
    assert 0.006 < sum(shares) / len(shares) < (0.045 if count == 16 else 0.02)


def whole_and_resumed(small_config, overrides):
    """The rows of a run; one that is stopped and resumed ends with the same."""
    whole = FlowGRPOTrainer(small_config(*overrides, "trainer.save_freq=1", folder="whole")).fit().rows()
    FlowGRPOTrainer(small_config(*overrides, "trainer.total_training_steps=1", folder="parts")).fit()
    again = FlowGRPOTrainer(small_config(*overrides, "trainer.resume_mode=auto", folder="parts")).fit().rows()
    assert untimed(again[-1:]) == untimed(whole[-1:])
    return whole


@pytest.mark.run
@pytest.mark.parametrize("bypass", ["true", "false"])
def test_a_run_with_calibrated_rejection(small_config, bypass):
    """About the target share of an fp8 run is rejected, and a resumed run goes on exactly."""
    rc = "algorithm.rollout_correction"
    auto = (
        f"{rc}.bypass_mode={bypass}",
        f"{rc}.rollout_rs=seq_mean_k1",
        f"{rc}.rollout_rs_threshold=auto",
        f"{rc}.rollout_rs_auto_share=0.2",
        f"{rc}.rollout_rs_auto_min=1e-6",
        *(o for o in AUTO if "rollout_correction" not in o and "clip_ratio" not in o),
        "actor_rollout_ref.actor.optim.lr=1e-6",
    )
    for row in whole_and_resumed(small_config, auto)[1:]:
        assert 0.5 <= row["actor/kept_fraction"] < 1
        assert 1e-4 < row["actor/rollout_rs_auto_min"] <= row["actor/rollout_rs_auto_max"] < 1e-2


@pytest.mark.run
def test_an_fp8_run_is_not_clipped_by_its_gap_and_resumes_exactly(small_config):
    fixed = [o for o in AUTO if "clip_ratio" not in o] + ["actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-4"]
    clipped = FlowGRPOTrainer(small_config(*fixed, folder="fixed")).fit().rows()
    whole = whole_and_resumed(small_config, AUTO)
    steps = [row for row in whole if "actor/clip_ratio_auto_mean" in row]
    assert len(steps) == 2
    for row, before in zip(steps, [r for r in clipped if "actor/pg_clipfrac_first" in r], strict=True):
        assert before["actor/pg_clipfrac_first"] > 0.5  # the gap alone empties the customary band
        assert row["actor/pg_clipfrac_first"] < 0.2
        assert 1e-4 < row["actor/clip_ratio_auto_min"] <= row["actor/clip_ratio_auto_max"] <= 1e-2


@pytest.mark.run
def test_without_a_gap_calibration_changes_nothing(small_config):
    """Float32 rollouts: the band is the narrowest one, and the run that of a fixed clip of that width."""
    clip = "actor_rollout_ref.actor.diffusion_loss"
    float32 = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.dtype=float32")
    fixed = FlowGRPOTrainer(small_config(*float32, f"{clip}.clip_ratio=0.001", folder="fixed")).fit().rows()
    auto = (f"{clip}.clip_ratio=auto", f"{clip}.auto_clip_min=0.001")
    calibrated = FlowGRPOTrainer(small_config(*float32, *auto, folder="auto")).fit().rows()
    for row, expected in zip(calibrated, untimed(fixed), strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-7)
        assert row.get("actor/clip_ratio_auto_mean", 0.001) == 0.001
