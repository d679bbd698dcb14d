"""Scouts: the images that are learned from, their baseline, and a run that draws more than it learns from."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tests_support import rows_of
from torch.testing import assert_close

from flowgrpo_rc.batch import Key
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.loss import group_advantages
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout.base import RolloutSyncError
from flowgrpo_rc.rollout.build import build_engine_alone
from flowgrpo_rc.rollout.engines import EMULATED
from flowgrpo_rc.rollout.scout import ScoutConfig
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.scoring import chosen_scouts

ROLLOUT = "actor_rollout_ref.rollout"
SCOUT = f"{ROLLOUT}.scout"
FP8 = f"{SCOUT}.engine.quantization=fp8_emulated"
RC = "algorithm.rollout_correction"
REDRAW = (f"{SCOUT}.n=24", f"{SCOUT}.redraw=true")
GROUP = torch.tensor([3] * 5 + [1] * 5)
ADVANTAGES = torch.tensor([0.1, -2.0, 0.3, 1.0, 0.2, 5.0, 0.0, 0.0, -0.1, 4.0])


@pytest.mark.parametrize(
    ("select", "keep", "expected"),
    [
        ("extremes", 2, [1, 3, 5, 8]),
        # Of an odd number the larger half are the best.
        ("extremes", 3, [1, 2, 3, 5, 8, 9]),
        # One group varies most as two of the best and one of the worst, the other as one and two.
        ("spread", 3, [1, 2, 3, 5, 7, 8]),
    ],
)
def test_the_chosen_images_of_each_group(select, keep, expected):
    assert chosen_scouts(ADVANTAGES, GROUP, keep, select, 0, 0).tolist() == expected


def test_spread_is_the_subset_of_largest_variance():
    """Against all subsets."""
    generator = torch.Generator().manual_seed(0)
    for keep in (2, 3, 4, 6):
        values = torch.randn(8, generator=generator)
        rows = chosen_scouts(values, torch.zeros(8, dtype=torch.int64), keep, "spread", 0, 0)
        largest = max(float(values[list(subset)].double().var()) for subset in combinations(range(8), keep))
        assert float(values[rows].double().var()) == pytest.approx(largest, rel=1e-6)


def test_equal_images_are_taken_from_both_ends():
    flat = torch.zeros(6)
    for select in ("extremes", "spread"):
        assert chosen_scouts(flat, torch.zeros(6, dtype=torch.int64), 4, select, 0, 0).tolist() == [0, 1, 4, 5]


def test_random_images_depend_on_step_and_group_alone():
    """Not on the other groups, which other processes may have, nor on advantages."""
    both = chosen_scouts(ADVANTAGES, GROUP, 2, "random", 7, 3)
    alone = chosen_scouts(-ADVANTAGES[5:], GROUP[5:], 2, "random", 7, 3) + 5
    assert both[2:].tolist() == alone.tolist()
    steps = {tuple(chosen_scouts(ADVANTAGES, GROUP, 2, "random", 7, step).tolist()) for step in range(30)}
    assert len(steps) > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{SCOUT}.n=12"], "rollout.scout.n: got 12 with n=12; give more, or 0"),
        ([f"{SCOUT}.select=best", f"{SCOUT}.n=24"], "scout.select: got 'best'; choose one of extremes, spread, random"),
        ([f"{SCOUT}.redraw=true"], "scout.redraw: got true with n=0.*set n to more than rollout.n, or redraw to false"),
        ([f"{SCOUT}.n=24", f"{SCOUT}.steps=3"], "scout.steps: got 3 with redraw=false.*set redraw to true"),
        ([*REDRAW, f"{ROLLOUT}.ahead=1"], "scout.redraw: got true with ahead=1.*Set ahead to 0"),
        (
            [*REDRAW, f"{ROLLOUT}.algo.init_same_noise=true"],
            "redraw: got true with algo.init_same_noise",
        ),
        (
            [f"{SCOUT}.n=24", f"{SCOUT}.engine.dtype=bfloat16"],
            "scout.engine.dtype: got bfloat16 with redraw=false.*set redraw to true, or rollout.dtype in its place",
        ),
        ([*REDRAW, f"{SCOUT}.engine.quantization=fp4"], "scout.engine.quantization: got 'fp4'; choose one of fp8"),
        (
            [*REDRAW, f"{SCOUT}.engine.quantization_skip=[img_mlp]"],
            r"scout.engine.quantization_skip: got \['img_mlp'\] without a quantization",
        ),
        (
            [*REDRAW, f"{SCOUT}.engine.dtype=bfloat16", f"{ROLLOUT}.dtype=bfloat16"],
            "scout.engine.dtype: got bfloat16, as the run's engine has it",
        ),
        (
            [*REDRAW, FP8, f"{ROLLOUT}.name=vllm_omni"],
            "scout.engine.quantization: got fp8_emulated with name=vllm_omni.*rollout.name=diffusers",
        ),
        (
            [*REDRAW, FP8, "actor_rollout_ref.model.quantization=int8", "actor_rollout_ref.model.dtype=bfloat16"],
            "scout.engine.quantization: got fp8_emulated; with model.quantization=int8.*so set it to null",
        ),
        (
            [f"{SCOUT}.n=24", f"{RC}.bypass_mode=false", "algorithm.rejection_aware_baseline=true"],
            "rejection_aware_baseline: got true with actor_rollout_ref.rollout.scout.n=24",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        compose("tiny_qwen_image_ocr", settings)


@pytest.mark.run
@pytest.mark.parametrize("objective", ["flow_grpo", "diffusion_nft"])
def test_a_run_learns_from_the_extremes_of_each_prompt(small_config, monkeypatch, objective):
    """Advantages are those within all six images; only four of each prompt reach the update."""
    settings = [f"{SCOUT}.n=6", "trainer.total_training_steps=1"]
    if objective != "flow_grpo":
        settings += [f"{RC}=null", f"actor_rollout_ref.actor.diffusion_loss.loss_mode={objective}"]
    trainer = FlowGRPOTrainer(small_config(*settings))
    seen = {}
    statistics, update = trainer._advantages, trainer.run.actor.update

    def rewarded(scored, batch, old):
        seen["rewards"], seen["group"] = torch.from_numpy(scored.total), batch[Key.GROUP]
        return statistics(scored, batch, old)

    def learned(batch, *arguments, **options):
        seen["batch"] = batch
        return update(batch, *arguments, **options)

    monkeypatch.setattr(trainer, "_advantages", rewarded)
    monkeypatch.setattr(trainer.run.actor, "update", learned)
    rows = rows_of(trainer.fit().root)
    group = seen["group"]
    assert torch.bincount(group).tolist() == [6] * 4
    everyone = group_advantages(seen["rewards"], group, global_std=True).advantages.float()
    chosen = chosen_scouts(everyone, group, 4, "extremes", 0, 0)
    batch = seen["batch"]
    assert torch.equal(batch[Key.ADVANTAGES], everyone[chosen])
    assert torch.equal(batch[Key.GROUP], group[chosen])
    assert rows[-1]["scout/advantage_mean"] == pytest.approx(float(everyone[chosen].mean()), abs=1e-6)
    assert rows[-1]["reward/mean"] == pytest.approx(float(seen["rewards"].mean()), rel=1e-6)
    if objective == "diffusion_nft":
        assert batch[Key.NOISE].shape[:2] == (16, batch[Key.SIGMAS].shape[1])


CLEAN = (f"{RC}=null", "actor_rollout_ref.actor.diffusion_loss.loss_mode=awm", "trainer.total_training_steps=2")


@pytest.mark.run
def test_the_same_images_drawn_again_change_nothing(small_config):
    """On clean images a scout of as many steps is the image itself: rewards, updates and metrics are the same."""
    once, again = (
        rows_of(FlowGRPOTrainer(small_config(f"{SCOUT}.n=6", *CLEAN, *more, folder=f"run{len(more)}")).fit().root)
        for more in ((), (f"{SCOUT}.redraw=true",))
    )
    for row, other in zip(once[1:], again[1:], strict=True):
        # Six scouts of four steps for four images.
        more = {"scout/reward_change": 0, "scout/reward_change_abs": 0, "rollout/forwards_of_scouts": 6}
        assert other == row | more


@pytest.mark.run
def test_redrawn_images_are_those_that_training_draws(small_config, monkeypatch):
    """Scouts of fewer steps choose; then noise, windows and log-probs are those of a run that draws all at once. New
    rewards take the places of the scouts' in the baseline."""
    batches, scored = [], []
    kept = torch.arange(24).view(4, 6)[:, 1:5].ravel()
    monkeypatch.setattr("flowgrpo_rc.trainer.trainer.chosen_scouts", lambda *_: kept)
    for more in ((), (f"{SCOUT}.redraw=true", f"{SCOUT}.steps=2")):
        trainer = FlowGRPOTrainer(
            small_config(f"{SCOUT}.n=6", "trainer.total_training_steps=1", *more, folder=f"run{len(more)}")
        )
        statistics, update = trainer._advantages, trainer.run.actor.update

        def rewarded(result, *arguments, statistics=statistics):
            scored.append(torch.from_numpy(result.total.copy()))
            return statistics(result, *arguments)

        def learned(batch, *arguments, update=update, **options):
            batches.append(batch.clone())
            return update(batch, *arguments, **options)

        monkeypatch.setattr(trainer, "_advantages", rewarded)
        monkeypatch.setattr(trainer.run.actor, "update", learned)
        row = rows_of(trainer.fit().root)[-1]
    at_once, redrawn = batches
    for name in (Key.LATENTS, Key.NEXT_LATENTS, Key.SIGMAS, Key.ROLLOUT_LOG_PROBS):
        assert_close(redrawn[name], at_once[name], rtol=1e-3, atol=1e-3)
    assert torch.equal(redrawn[Key.GROUP], at_once[Key.GROUP])
    full, scouts, mixed = scored
    left_out = torch.tensor([i for i in range(24) if i not in kept])
    assert_close(mixed[kept], full[kept], rtol=1e-3, atol=1e-3)
    assert torch.equal(mixed[left_out], scouts[left_out])
    assert (mixed[kept] - scouts[kept]).abs().max() > 0.01
    expected = group_advantages(mixed, torch.arange(4).repeat_interleave(6), global_std=True).advantages[kept]
    assert_close(redrawn[Key.ADVANTAGES], expected.float(), rtol=1e-5, atol=1e-6)
    assert row["scout/reward_change"] == pytest.approx(float((mixed - scouts)[kept].mean()), abs=1e-6)
    assert "rollout_sync/engine_gap_per_dimension" in row


WITH_FP8 = (f"{SCOUT}.n=6", f"{SCOUT}.redraw=true", FP8, "trainer.total_training_steps=2")


@pytest.mark.run
def test_scouts_have_an_engine_of_their_own(small_config, pooled):
    """Scouts are the images of an fp8 engine with the adapter of their batch; those that are learned from are the run's
    engine's. A pool of engines draws the same."""
    trainer = FlowGRPOTrainer(small_config(*WITH_FP8))
    run = trainer.run
    drawn, redrawn, states = [], [], []
    generate, again = run.scouts_engine.generate, run.engine.generate

    def scouts(request):
        states.append(adapter_state(run.actor.transformer))
        drawn.append((request, generate(request)))
        return drawn[-1][1]

    def kept(request):
        redrawn.append(request)
        return again(request)

    run.scouts_engine.generate, run.engine.generate = scouts, kept
    rows = rows_of(trainer.fit().root)
    parts = trainer.config.actor_rollout_ref
    alone = build_engine_alone(replace(parts.rollout, quantization=EMULATED, scout=ScoutConfig()), parts.model, "cpu")
    exact = build_engine_alone(replace(parts.rollout, scout=ScoutConfig()), parts.model, "cpu")
    for (request, answer), state in zip(drawn, states, strict=True):
        images = []
        for engine in (alone, exact):
            engine.sync(state, 0)
            images.append(engine.generate(replace(request, on_images=None)).images)
        assert torch.equal(answer.images, images[0])
        assert not torch.equal(answer.images, images[1])
    assert not torch.equal(*(next(iter(state.values())) for state in states))
    training = [request for request in redrawn if request.window_starts is not None]
    assert [len(request.seeds) for request in training] == [16, 16]
    pooled(engines=2)
    assert rows_of(FlowGRPOTrainer(small_config(*WITH_FP8, folder="pool")).fit().root) == rows


@pytest.mark.run
def test_scouts_are_drawn_with_the_runs_cache(small_config):
    cache = (f"{ROLLOUT}.cache.name=taylorseer", f"{ROLLOUT}.cache.options={{cache_interval: 2}}")
    trainer = FlowGRPOTrainer(small_config(f"{SCOUT}.n=6", f"{SCOUT}.redraw=true", f"{SCOUT}.steps=3", *cache))
    request = trainer.rollouts.next(0)
    assert request.scouts.cache == trainer.config.actor_rollout_ref.rollout.cache
    assert (request.scouts.num_inference_steps, request.scouts.window_starts) == (3, None)
    request.scoring.abandon()
    assert rows_of(trainer.fit().root)[-1]["rollout/forwards_of_scouts"] == 4.5


@pytest.mark.run
def test_scouts_of_a_stale_adapter_are_refused(small_config):
    trainer = FlowGRPOTrainer(small_config(*WITH_FP8))
    trainer.run.scouts_engine.adapter_version = 7
    with pytest.raises(RolloutSyncError, match="sampled with adapter version 7, expected 0"):
        trainer.fit()
