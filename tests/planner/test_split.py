"""Lists of GPUs; taking turns or a split, one batch ahead: seconds by hand, memory of both sides, and what is said."""

import types

import pytest

from flowgrpo_rc.planner import text
from flowgrpo_rc.planner.machines import GIB, Gpus, peak_flops, read_gpus
from flowgrpo_rc.planner.memory import RUNTIME
from flowgrpo_rc.planner.work import (
    Split,
    StepFlops,
    StepTime,
    best_split,
    one_ahead,
    split_seconds,
    step_time,
    taking_turns,
)

SECOND = 0.4 * 989e12
"""Operations of an H100 in bfloat16 in a second, as plans assume."""


def work(rollout, update):
    """So many seconds of one GPU."""
    return StepFlops(rollout=rollout * SECOND, score=0.0, update=update * SECOND, recomputed=0.0)


def test_a_fixed_number_of_gpus_gains_nothing_by_a_split(run):
    """R = U = 40 s of one GPU: 2 GPUs take 20 + 20 in turns, and max(40, 40) split."""
    gpus = Gpus(2, 80)
    assert step_time(work(40, 40), run, gpus).total == pytest.approx(40)
    split = split_seconds(work(40, 40), run, gpus, 1)
    assert (split.rollout, split.learning, split.total) == pytest.approx((40, 40, 40))
    # R = 2 U on 3 GPUs: 80 / 3 + 40 / 3 = 40, and max(80 / 2, 40 / 1) = 40.
    assert step_time(work(80, 40), run, Gpus(3, 80)).total == pytest.approx(40)
    assert split_seconds(work(80, 40), run, Gpus(3, 80), 1).total == pytest.approx(40)
    # The same on 4 GPUs, which do not divide as 2 to 1: 30 in turns, and max(80 / 2, 40 / 2) or max(80 / 3, 40).
    assert step_time(work(80, 40), run, Gpus(4, 80)).total == pytest.approx(30)
    assert split_seconds(work(80, 40), run, Gpus(4, 80), 2).total == pytest.approx(40)
    assert split_seconds(work(80, 40), run, Gpus(4, 80), 1).total == pytest.approx(40)


def test_rewards_that_leave_gpus_idle_make_it_pay(run):
    """R = 4 U and a reward as long as the update on 4 GPUs: 20 + 5 + 5 in turns; 80 / 3, rounded up to whole
    micro-batches, against 5 + 20 split."""
    gpus = Gpus(4, 80)
    assert step_time(work(80, 20), run, gpus).total + 5 == pytest.approx(30)
    split = split_seconds(work(80, 20), run, gpus, 1, reward=5)
    # 16 micro-batches of 4 images over 3 engines: one draws 6 of them, 24 of the 64 images.
    assert (split.rollout, split.learning) == pytest.approx((80 * 24 / 64, 25))
    assert split.total == pytest.approx(30)
    by_one = run.with_rollout(micro_batch_size=1)
    assert split_seconds(work(80, 20), by_one, gpus, 1, reward=5).rollout == pytest.approx(80 * 22 / 64)


def test_each_process_has_engines_of_its_own(run):
    """2 trainer processes and 3 engines: one process has 1 engine for its half of the images."""
    split = split_seconds(work(64, 0), run, Gpus(5, 80), 2)
    assert (split.trainers, split.engines) == (2, 3)
    assert split.rollout == pytest.approx(32)
    # One micro-batch is not divided, whatever the number of engines.
    whole = run.with_rollout(micro_batch_size=64)
    assert split_seconds(work(64, 0), whole, Gpus(4, 80), 1).rollout == pytest.approx(64)


@pytest.mark.slow
def test_memory_of_both_sides(run, plan):
    """The trainer's GPU has no engine; the engine's has weights, VAE, LoRA and what drawing takes, and no actor."""
    split = best_split(plan, work(40, 40), Gpus(2, 80), [1])
    assert split is not None
    sizes = plan.sizes
    weights = 2 * sizes.parameters
    lora = 4 * sizes.lora_parameters
    drawing = max(plan.engine.forward(4).peak, plan.engine.decode(4).peak)
    assert split.engine_bytes == weights + sizes.buffers + sizes.vae + lora // 2 + drawing + RUNTIME
    beside = plan.memory(taking_turns(run), 1)
    assert "engine's LoRA" in beside.resident
    trainer = plan.memory(one_ahead(run, 1, 1), 1)
    assert "engine's LoRA" not in trainer.resident
    assert not {"sampling", "decoding"} & trainer.stages.keys()
    assert split.trainer_bytes == trainer.total


@pytest.mark.slow
def test_the_fastest_split_that_fits(run, plan):
    work_of_both = work(60, 30)
    gpus = Gpus(6, 80)
    assert best_split(plan, work_of_both, gpus, [1, 2, 3, 4]).trainers == 2  # 64 images: 15 and 15 s, by hand below
    assert split_seconds(work_of_both, run, gpus, 2).total == pytest.approx(15)
    assert best_split(plan, work_of_both, gpus, [4, 5]) is None  # an engine for each process
    assert best_split(plan, work_of_both, gpus, []) is None
    fits = best_split(plan, work(1, 1), gpus, [2])
    assert fits.overrides == (
        "actor_rollout_ref.rollout.placement=process 'actor_rollout_ref.rollout.devices=[cuda:2,cuda:3,cuda:4,cuda:5]' "
        "actor_rollout_ref.rollout.ahead=1"
    )
    small = Gpus(6, max(fits.trainer_bytes, fits.engine_bytes) / GIB / 2)
    assert best_split(plan, work_of_both, small, [2]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "reward", "fits", "parts"),
    [
        (
            Split(1, 3, 30.0, 25.0, GIB, 2 * GIB),
            5.0,
            True,
            ["takes 25% less time", "rewards of 5 s counted"],
        ),
        (Split(2, 2, 30.0, 40.0, GIB, 2 * GIB), 0.0, True, ["taking turns is no slower: 40.0 s a step, 40.0 s with 2"]),
        (Split(2, 2, 30.0, 50.0, GIB, 2 * GIB), 0.0, False, ["taking turns does not fit", "devices=[cuda:2,cuda:3]'"]),
        (None, 0.0, True, ["no split of the 4 GPUs into trainer and engines fits"]),
    ],
)
def test_what_is_said(monkeypatch, plan, split, reward, fits, parts):
    monkeypatch.setattr(text, "step_time", lambda *_: StepTime(40.0 - reward, 0.0))
    monkeypatch.setattr(text, "best_split", lambda *_: split)
    if not fits:
        monkeypatch.setattr(plan, "memory", lambda *_: types.SimpleNamespace(fits=lambda _: False), raising=True)
    (says,) = text._split(plan, Gpus(4, 80), [1, 2], reward)
    assert all(part in says for part in parts)
    assert text._split(plan, Gpus(1, 80), [], reward) == []


def test_lists_of_gpus():
    assert read_gpus("4x80") == [Gpus(4, 80)]
    assert read_gpus("4x80, 8X24,1*141GB") == [Gpus(4, 80), Gpus(8, 24), Gpus(1, 141)]
    assert read_gpus("1x79.6")[0].bytes == round(79.6 * 2**30)
    assert str(Gpus(4, 80)) == "4 x 80 GB"


@pytest.mark.parametrize(
    "text",
    ["", "80", "4x", "x80", "0x80", "4x0", "4x0.0", "-4x80", "4x-80", "4x80,", "fourx80", "4x80x2", "nan", "1e3x80"],
)
def test_what_is_no_list_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="--gpus: got .*; give how many of how many GB, e.g. 4x80"):
        read_gpus(text)


def test_peaks_by_the_names_that_torch_gives():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("NVIDIA L40S", "float16") == peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA L4", "bfloat16") == 121e12
    assert peak_flops("NVIDIA RTX 6000 Ada Generation", "bfloat16") == 364e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "bfloat16") == 165e12
    assert peak_flops("AMD Instinct MI300X", "bfloat16") is None
