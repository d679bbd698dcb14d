"""Guidance at some noise levels alone: the same velocity for engine and actor, and the forwards that it saves."""

from dataclasses import replace

import pytest
import torch
from rollout_cases import request_for, rows_of_forwards, tiny_engine
from test_actor import Setup
from tolerances import LOG_PROB
from torch.testing import assert_close

from flowgrpo_rc.rollout import RolloutSyncError
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.tail import TailConfig
from flowgrpo_rc.section import convert

INTERVAL = (0.3, 0.7)


@pytest.fixture(params=["tiny_model", "tiny_sd3_model"])
def model(request):
    return request.getfixturevalue(request.param)


def rows_of(model, *, cfg=3.0):
    """Six rows at six noise levels: latents, timesteps, levels and conditioning."""
    request = request_for(model, cfg=cfg, negatives=["a", "b c", "d"])
    cond = request.conditioning.rows(request.prompt_index, torch.device("cpu"))
    levels = [0.2, 0.3, 0.5, 0.7, 0.71, 1.0]
    latents = torch.stack([model.initial_noise(torch.Generator().manual_seed(i), 32, 32) for i in range(6)])
    return latents, torch.tensor(levels) * 1000, levels, replace(cond, guidance_interval=INTERVAL)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_rows_are_guided_by_their_levels(model, batched, detach):
    """Each row has the guided or the plain velocity of itself, with its gradient."""
    model.batch_guidance = batched
    latents, timesteps, levels, cond = rows_of(model)

    def answer(conditioning):
        x = latents.clone().requires_grad_()
        found = model.velocity(model.transformer, x, timesteps, conditioning, detach_unconditional=detach)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
        return found.detach(), gradient

    everywhere = answer(replace(cond, guidance_interval=None))
    nowhere = answer(replace(cond, negative=None))
    found = answer(cond.at_levels(levels))
    inside = torch.tensor([False, True, True, True, False, False])
    assert (everywhere[0] - nowhere[0]).abs().amax() > 1e-3
    for one, guided, plain in zip(found, everywhere, nowhere, strict=True):
        size = float(guided.abs().max())
        assert_close(one[inside], guided[inside], atol=1e-5 * size, rtol=1e-4)
        assert_close(one[~inside], plain[~inside], atol=1e-5 * size, rtol=1e-4)


def rows_computed(model, latents, timesteps, cond):
    transformer = model.transformer
    return rows_of_forwards(transformer, lambda: model.velocity(transformer, latents, timesteps, cond))


def test_rows_outside_cost_one_forward(tiny_model):
    latents, timesteps, levels, cond = rows_of(tiny_model)
    assert rows_computed(tiny_model, latents, timesteps, cond.at_levels(levels)) == [9]
    assert rows_computed(tiny_model, latents, timesteps, cond.at_levels([0.9] * 6)) == [6]
    assert rows_computed(tiny_model, latents, timesteps, cond.at_levels([0.5] * 6)) == [12]
    tiny_model.batch_guidance = False
    assert rows_computed(tiny_model, latents, timesteps, cond.at_levels(levels)) == [6, 3]


@pytest.mark.parametrize("batched", [True, False])
def test_a_sharded_transformer_is_called_equally_often(tiny_model, monkeypatch, batched):
    """One process may have guided rows, and another none."""
    from flowgrpo_rc.models import base

    tiny_model.batch_guidance = batched
    latents, timesteps, levels, cond = rows_of(tiny_model)
    plain = tiny_model.velocity(tiny_model.transformer, latents, timesteps, replace(cond, negative=None))
    monkeypatch.setattr(base, "is_sharded", lambda transformer: True)
    some = rows_computed(tiny_model, latents, timesteps, cond.at_levels(levels))
    none = rows_computed(tiny_model, latents, timesteps, cond.at_levels([0.9] * 6))
    assert len(some) == len(none) == (1 if batched else 2)
    found = tiny_model.velocity(tiny_model.transformer, latents, timesteps, cond.at_levels([0.9] * 6))
    assert torch.equal(found, plain)


def test_the_actor_rescores_what_was_drawn(tiny_model):
    """Windows from level 1 to .4 of 5 steps hold guided and plain rows."""
    setup = Setup(tiny_model, cfg=4.0, window=3)
    cond = replace(setup.cond, guidance_interval=(0.0, 0.7))
    request = request_for(tiny_model, cfg=4.0, window=3, starts=(0, 0, 1, 1, 1, 0))
    request = replace(request, conditioning=replace(request.conditioning, guidance_interval=(0.0, 0.7)))
    answer = setup.engine.generate(request)
    check_rollout(request, answer, tiny_model, HeldAdapter(0, answer.echo.adapter_digest), "float32")
    scored = setup.actor.score(answer.batch, request.conditioning).log_probs
    assert_close(scored, answer.batch["rollout_log_probs"], atol=LOG_PROB, rtol=0)
    everywhere = setup.actor.score(answer.batch, replace(request.conditioning, guidance_interval=None)).log_probs
    assert (everywhere - scored).abs().max() > 10 * LOG_PROB
    assert cond.at_levels([0.9, 0.5]).guided == (False, True)


def test_rows_of_images_in_a_rollout(tiny_model):
    """With 5 steps the levels are 1, .8, .6, .4 and .2 as far as the model's shift leaves them."""
    engine = tiny_engine(tiny_model)
    levels = tiny_model.schedule(5, 32, 32).sigmas.tolist()
    interval = (levels[3] - 0.01, levels[1] + 0.01)
    request = request_for(tiny_model, cfg=4.0, window=0, record_clean=True, tail=TailConfig(solver="heun"))
    request = replace(request, conditioning=replace(request.conditioning, guidance_interval=interval))
    rows = rows_of_forwards(engine.transformer, lambda: engine.generate(request))
    # Heun's second forward is at the level where the step ends; the last step has none.
    assert rows == [6, 12, 12, 12, 12, 12, 12, 6, 6]
    answer = engine.generate(request)
    held = HeldAdapter(5, answer.echo.adapter_digest)
    check_rollout(request, answer, tiny_model, held, "float32")
    other = replace(request, conditioning=replace(request.conditioning, guidance_interval=None))
    with pytest.raises(RolloutSyncError, match="guidance_interval: got "):
        check_rollout(other, answer, tiny_model, held, "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_interval": [0.2, 0.8]}, "guidance_interval: got .* with true_cfg_scale=1, which is no guidance"),
        ({"guidance_interval": [0.8, 0.2], "true_cfg_scale": 4}, "guidance_interval: got .*lowest and the highest"),
        ({"guidance_interval": [0.2], "true_cfg_scale": 4}, "guidance_interval: got .*lowest and the highest"),
        ({"guidance_interval": [20, 80], "true_cfg_scale": 4}, "guidance_interval: got .*between 0 and 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        convert(PipelineConfig, settings)


def test_validation_takes_the_interval_of_training():
    def validation(**own):
        pipeline = {"guidance_interval": [0.2, 0.8], "true_cfg_scale": 4.0}
        config = convert(RolloutConfig, {"pipeline": pipeline, "val_kwargs": {"pipeline": own}})
        return config.validation_pipeline.guidance_interval

    assert validation() == [0.2, 0.8]
    assert validation(guidance_interval=[0, 1]) == [0, 1]
    assert validation(true_cfg_scale=1.0) is None
