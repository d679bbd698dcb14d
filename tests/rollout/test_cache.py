"""Caches of diffusers around the window: exact inside it, and gone afterwards."""

from dataclasses import replace

import pytest
import torch
from rollout_cases import request_for, tiny_engine
from tolerances import LOG_PROB
from torch.testing import assert_close

from flowgrpo_rc.batch import Key
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models.lora import adapter_active
from flowgrpo_rc.rollout import RolloutSyncError
from flowgrpo_rc.rollout.cache import CACHES, CacheConfig, StepCache, check_cache
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.sampling import micro_batches
from flowgrpo_rc.sde import log_prob, transition
from flowgrpo_rc.section import convert
from flowgrpo_rc.trainer import FlowGRPOTrainer

EAGER = {
    "first_block": CacheConfig(name="first_block", options={"threshold": 1e9}),
    "taylorseer": CacheConfig(name="taylorseer", options={"disable_cache_before_step": 1}),
}
"""They compute the first step of each stretch alone."""
STARTS = (3,) * 6


@pytest.fixture
def engine(tiny_model):
    return tiny_engine(tiny_model)


def rescored(model, engine, request, batch):
    """Log-probs of the recorded steps by the transformer without a cache."""
    cond = request.conditioning.rows(request.prompt_index, torch.device("cpu"))
    columns = []
    for step in range(request.window_size):
        numbers = {name: batch[name][:, step] for name in (Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS)}
        x = batch[Key.LATENTS][:, step]
        with torch.no_grad(), adapter_active(engine.transformer, engine.adapter):
            velocity = model.velocity(engine.transformer, x, numbers[Key.TIMESTEPS], cond)
        levels = (numbers[Key.SIGMAS], numbers[Key.NEXT_SIGMAS])
        distribution = transition(x, velocity, *levels, noise_level=0.7, sde_type="sde")
        columns.append(log_prob(distribution, batch[Key.NEXT_LATENTS][:, step], sde_type="sde"))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("batched", [True, False])
def test_the_window_is_computed_in_full(tiny_model, engine, name, batched):
    """Other states are visited, and the actor gives them the engine's log-probs; with ``in_window`` it does not."""
    tiny_model.batch_guidance = batched
    request = request_for(tiny_model, starts=STARTS, steps=9, cfg=3.0)
    plain = engine.generate(request)
    cached = replace(request, cache=EAGER[name])
    answer = engine.generate(cached)
    check_rollout(cached, answer, tiny_model, HeldAdapter(5, answer.echo.adapter_digest), "float32")
    assert (answer.batch[Key.LATENTS] - plain.batch[Key.LATENTS]).abs().max() > 1e-3
    found = rescored(tiny_model, engine, cached, answer.batch)
    assert_close(found, answer.batch[Key.ROLLOUT_LOG_PROBS], atol=LOG_PROB, rtol=0)
    everywhere = replace(request, cache=replace(EAGER[name], in_window=True))
    inside = engine.generate(everywhere)
    check_rollout(everywhere, inside, tiny_model, HeldAdapter(5, inside.echo.adapter_digest), "float32")
    gap = rescored(tiny_model, engine, everywhere, inside.batch) - inside.batch[Key.ROLLOUT_LOG_PROBS]
    assert gap.abs().max() > 100 * LOG_PROB
    # The cache of the window begins empty, so that its first step has no gap.
    assert gap[:, 0].abs().max() <= LOG_PROB


def test_a_cache_that_never_skips_changes_nothing(tiny_model, engine):
    request = request_for(tiny_model, starts=STARTS, steps=9, cfg=3.0)
    never = CacheConfig(name="first_block", options={"threshold": 0.0}, in_window=True)
    plain, cached = (engine.generate(one) for one in (request, replace(request, cache=never)))
    for name in (Key.LATENTS, Key.NEXT_LATENTS, Key.ROLLOUT_LOG_PROBS):
        assert torch.equal(plain.batch[name], cached.batch[name])
    assert torch.equal(plain.images, cached.images)


@pytest.mark.parametrize("name", CACHES)
def test_nothing_is_left_of_it(tiny_model, engine, name):
    request = request_for(tiny_model, starts=STARTS, steps=9)
    before = engine.generate(request)
    with StepCache(engine.transformer, EAGER[name]) as cache:
        cache.begin(inside=False)
        assert engine.transformer.is_cache_enabled
    assert not engine.transformer.is_cache_enabled
    first, second = (engine.generate(replace(request, cache=EAGER[name])) for _ in range(2))
    assert torch.equal(first.images, second.images)
    assert not torch.equal(first.images, before.images)
    after = engine.generate(request)
    assert torch.equal(before.images, after.images)
    assert torch.equal(before.batch[Key.ROLLOUT_LOG_PROBS], after.batch[Key.ROLLOUT_LOG_PROBS])


def test_blocks_that_are_computed(tiny_model, engine):
    """Of the steps 0 to 2, 3 and 4, and 5 to 8 the first block computes all, the second 0, 3, 4 and 5."""
    request = request_for(tiny_model, starts=STARTS, steps=9, cache=EAGER["first_block"])
    counts = []
    for block in engine.transformer.transformer_blocks:
        norm = block.img_mlp  # a part of the block, below the cache's hook
        counts.append([])
        norm.register_forward_hook(lambda *_, count=counts[-1]: count.append(0))
    engine.generate(request)
    assert [len(count) for count in counts] == [9, *[4] * (len(counts) - 1)]


def test_a_micro_batch_has_one_window(tiny_model):
    request = request_for(tiny_model, index=(0, 0, 0, 0, 1, 1, 2, 2), starts=(1, 1, 1, 1, 1, 1, 2, 2))
    sizes = [len(rows) for rows in micro_batches(request, 4)]
    assert sizes == [4, 4]
    cached = replace(request, cache=EAGER["taylorseer"])
    assert [rows.tolist() for rows in micro_batches(cached, 4)] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert [len(rows) for rows in micro_batches(replace(cached, window_starts=None), 4)] == [4, 4]


def test_another_cache_than_asked_for_is_refused(tiny_model, engine):
    request = request_for(tiny_model, starts=STARTS, steps=9)
    cached = replace(request, cache=EAGER["taylorseer"])
    answer = engine.generate(cached)
    held = HeldAdapter(5, answer.echo.adapter_digest)
    for other in (request, replace(request, cache=EAGER["first_block"])):
        with pytest.raises(RolloutSyncError, match="cache: got taylorseer outside of the window, expected"):
            check_rollout(other, answer, tiny_model, held, "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "teacache"}, "cache.name: got 'teacache'; choose one of first_block, taylorseer"),
        ({"options": {"threshold": 0.1}}, r"cache.name: got null with options=.*; choose one of first_block"),
        ({"in_window": True}, r"cache.name: got null with .*in_window=True; choose one of"),
        ({"name": "first_block", "options": 3}, "cache.options: got 3; give the options of diffusers' class"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        convert(RolloutConfig, {"cache": settings})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("first_block", {"treshold": 0.1}, "cache.options: got treshold; name=first_block takes threshold"),
        ("first_block", {"threshold": "abc"}, "cache.options.threshold: got 'abc'; give a number"),
        ("taylorseer", {"cache_interval": 0}, "cache.options.cache_interval: got 0; give 1 or more"),
        ("taylorseer", {"max_order": "two"}, "cache.options.max_order: got 'two'; .*give a whole number"),
        ("taylorseer", {"cache_identifiers": "attn"}, "cache.options.cache_identifiers: got 'attn'; give a list"),
        ("taylorseer", {"cache_identifiers": ["*attn"]}, "cache.options.cache_identifiers: got .*nothing to repeat"),
        ("taylorseer", {"taylor_factors_dtype": None}, "cache.options.taylor_factors_dtype: got null; give text"),
    ],
)
def test_options_that_diffusers_does_not_take(tiny_model, name, options, message):
    with pytest.raises(ValueError, match=message):
        check_cache(CacheConfig(name=name, options=options), tiny_model.transformer)


def test_one_cache_after_another(tiny_model, engine):
    request = request_for(tiny_model, starts=STARTS, steps=9)
    first = engine.generate(replace(request, cache=EAGER["first_block"]))
    engine.generate(replace(request, cache=EAGER["taylorseer"]))
    again = engine.generate(replace(request, cache=EAGER["first_block"]))
    assert torch.equal(first.images, again.images)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("actor_rollout_ref.rollout.name=vllm_omni", "caches of diffusers, so set it to null or"),
        (
            "actor_rollout_ref.rollout.algo.sde_window_size=6 actor_rollout_ref.rollout.algo.sde_window_range=[0,6]",
            "cache.name: got first_block with a window of all steps",
        ),
        ("actor_rollout_ref.actor.fsdp_config.shard=true", "cache.name: got first_block with a sharded transformer"),
    ],
)
def test_runs_that_have_none(more, message):
    with pytest.raises(ValueError, match=message):
        compose("tiny_qwen_image_ocr", ["actor_rollout_ref.rollout.cache.name=first_block", *more.split()])


def test_vllm_omnis_cache_is_not_one_of_diffusers():
    with pytest.raises(
        ValueError, match="got tea_cache with name=diffusers; it is vllm-omni's, so choose one of first"
    ):
        compose("tiny_qwen_image_ocr", ["actor_rollout_ref.rollout.cache.name=tea_cache"])
    options = {"rel_l1_thresh": "0.5", "coefficients": [1, 2, 3, 4, 5]}
    checked = CacheConfig(name="tea_cache", options=options).checked()
    assert (checked.rel_l1_thresh, checked.coefficients) == (0.5, [1.0, 2.0, 3.0, 4.0, 5.0])


@pytest.mark.run
def test_a_run_with_a_cache_and_a_tail(small_config):
    """Micro-batches of uneven sizes, scored as they arrive."""
    rollout = "actor_rollout_ref.rollout"
    cache = [f"{rollout}.cache.name=taylorseer", f"{rollout}.cache.options={{disable_cache_before_step: 1}}"]
    more = [f"{rollout}.tail.steps=0.5", f"{rollout}.micro_batch_size=5", "trainer.total_training_steps=2"]
    rows = FlowGRPOTrainer(small_config(*cache, *more)).fit().rows()
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
    assert all(row["rollout_sync/engine_gap_abs_mean"] < 5e-3 for row in rows if "reward/mean" in row)
