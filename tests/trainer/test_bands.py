"""``clip_ratio=auto``: the bands follow the measured gap, per timestep, robustly, within bounds, over a resume."""

import pytest
import torch

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.bands import ENOUGH, MEMORY, ClipBands

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


def test_width_is_three_times_the_quantile_of_the_size():
    bands = ClipBands(1e-6, 1.0)
    bands.observe([500.0] * 9, [-0.009, 0.001, 0.002, -0.003, 0.004, 0.005, -0.006, 0.007, 0.008])
    # |gap| sorted is 1..9 thousandths; the 0.9 quantile lies at position 7.2 of 0..8
    assert bands.width(500.0) == pytest.approx(3 * 0.0082)


def test_widths_are_those_of_each_timestep():
    bands = ClipBands(1e-6, 1.0)
    for timestep, scale in ((1000.0, 1e-4), (500.0, 1e-3)):
        bands.observe([timestep] * MEMORY, normal(MEMORY, scale))
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
    bands.observe([500.0] * 20, [0.0] * 20)
    assert bands.width(500.0) == 1e-4  # no gap: the narrowest, so calibration costs nothing
    bands.observe([500.0], [1e3])
    assert bands.width(500.0) == 1e-4  # one outlier in 21
    bands.observe([500.0] * MEMORY, [0.5] * MEMORY)
    assert bands.width(500.0) == 1e-2  # the old samples are forgotten, and the widest bounds it
    bands.observe([700.0] * (ENOUGH - 1), [1e-9] * (ENOUGH - 1))
    assert bands.width(700.0) == bands.width(123.0) == 1e-2  # too few of its own: all timesteps together
    bands.observe([700.0], [1e-9])
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


def test_an_fp8_run_is_not_clipped_by_its_gap_and_resumes_exactly(small_config):
    fixed = [o for o in AUTO if "clip_ratio" not in o] + ["actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-4"]
    clipped = FlowGRPOTrainer(small_config(*fixed, folder="fixed")).fit().rows()
    whole = FlowGRPOTrainer(small_config(*AUTO, "trainer.save_freq=1", folder="whole")).fit().rows()
    steps = [row for row in whole if "actor/clip_ratio_auto_mean" in row]
    assert len(steps) == 2
    for row, before in zip(steps, [r for r in clipped if "actor/pg_clipfrac_first" in r], strict=True):
        assert before["actor/pg_clipfrac_first"] > 0.5  # the gap alone empties the customary band
        assert row["actor/pg_clipfrac_first"] < 0.2
        assert 1e-4 < row["actor/clip_ratio_auto_min"] <= row["actor/clip_ratio_auto_max"] <= 1e-2
    first = FlowGRPOTrainer(small_config(*AUTO, "trainer.total_training_steps=1", folder="parts")).fit()
    assert len(first.rows()) > 0
    again = FlowGRPOTrainer(small_config(*AUTO, "trainer.resume_mode=auto", folder="parts")).fit().rows()
    last = {k: v for k, v in again[-1].items() if not k.startswith("timing")}
    assert last == {k: v for k, v in whole[-1].items() if not k.startswith("timing")}


def test_without_a_gap_calibration_changes_nothing(small_config):
    """Float32 rollouts: the band is the narrowest one, and the run that of a fixed clip of that width."""
    clip = "actor_rollout_ref.actor.diffusion_loss"
    float32 = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.dtype=float32")
    fixed = FlowGRPOTrainer(small_config(*float32, f"{clip}.clip_ratio=0.001", folder="fixed")).fit().rows()
    auto = (f"{clip}.clip_ratio=auto", f"{clip}.auto_clip_min=0.001")
    calibrated = FlowGRPOTrainer(small_config(*float32, *auto, folder="auto")).fit().rows()
    for row, expected in zip(calibrated, fixed, strict=True):
        for name, value in expected.items():
            if not name.startswith("timing"):
                assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
        assert row.get("actor/clip_ratio_auto_mean", 0.001) == 0.001
