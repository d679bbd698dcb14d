"""The timestep and guidance that a transformer embeds in low precision; an actor in float32 can embed them too."""

import copy

import pytest
import torch
from tiny_families import TINY, run_overrides
from tolerances import EPSILON, LOG_PROB
from torch.testing import assert_close

from flowgrpo_rc.models import Conditioning, load_model
from flowgrpo_rc.models.prompts import pad
from flowgrpo_rc.trainer import FlowGRPOTrainer

SINUSOIDS = ("Timesteps", "BriaTimesteps", "TimestepEmbedder")
"""The classes whose argument is what a transformer embeds; the last one is Z-Image's."""

ROUNDING = {
    *("flux_dev", "flux_schnell", "flux_kontext", "flux2_klein", "flux2_klein_references", "flux2_dev"),
    *("flux2_dev_reference", "chroma", "bria", "bria_static", "aura_flow"),
    *("qwen_image_edit", "qwen_image_edit_plus", "qwen_image_edit_plus_2511"),
}
"""The families that do not embed timesteps in float32, whatever they compute in."""

EXACT = ("bria", "bria_static", "aura_flow", "qwen_image_edit", "qwen_image_edit_plus", "qwen_image_edit_plus_2511")
"""Those of them in which nothing is rounded on the way back to float32."""


@pytest.fixture(scope="module", params=list(TINY))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name, folder_of_family):
    return load_model(folder_of_family(name))


def inputs_of(model, steps=9):
    """Noisy latents at the timesteps of a schedule, and a prompt that is blank."""
    size = model.smallest_image
    embedded = 3.5 if model.transformer.config.get("guidance_embeds") else None
    rows = pad([model.blank_prompt()]).rows(torch.zeros(steps, dtype=torch.long), torch.device("cpu"))
    cond = Conditioning(rows, None, 1.0, embedded, size, size)
    latents = torch.randn(steps, *model.latent_shape(size, size), generator=torch.Generator().manual_seed(0))
    return latents, model.schedule(steps, size, size).timesteps, cond


def embedded(model, transformer, latents, timesteps, cond):
    """Everything that the transformer makes sines and cosines of in a forward, and the velocity."""
    found = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, arguments: found.append(arguments[0].float()))
        for module in transformer.modules()
        if type(module).__name__ in SINUSOIDS
    ]
    with torch.no_grad():
        velocity = model.velocity(transformer, latents, timesteps, cond)
    for hook in hooks:
        hook.remove()
    assert found
    return found, velocity


@pytest.mark.portable
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_actor_embeds_what_the_engine_embeds(name, model, dtype):
    latents, timesteps, cond = inputs_of(model)
    engines = copy.deepcopy(model.transformer).to(dtype)
    expected, _ = embedded(model, engines, latents, timesteps, cond)
    own, _ = embedded(model, model.transformer, latents, timesteps, cond)
    rounds = any(not torch.equal(*pair) for pair in zip(own, expected, strict=True))
    assert rounds == (name in ROUNDING)
    same = model.as_embedded(timesteps, cond, dtype)
    found, _ = embedded(model, model.transformer, latents, *same)
    # A division by 1000 in float32, which the transformer undoes: half a unit each.
    assert_close(found, expected, rtol=0 if name in EXACT or not rounds else EPSILON, atol=0)
    # Under autocast the rounded numbers are rounded once more, which changes nothing.
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found, _ = embedded(model, model.transformer, latents, *same)
    assert_close(found, expected, rtol=0 if dtype == torch.bfloat16 else EPSILON, atol=0)
    # Nor does an actor in the engine's precision.
    found, _ = embedded(model, engines, latents, *same)
    assert_close(found, expected, rtol=0, atol=0)


def test_in_float32_nothing_is_changed(model):
    _, timesteps, cond = inputs_of(model)
    told, same = model.as_embedded(timesteps, cond, torch.float32)
    assert told is timesteps
    assert same is cond


@pytest.mark.run
@pytest.mark.parametrize("family", ["flux2_klein", "chroma", "aura_flow"])
def test_a_run_with_it_has_what_gap_other_roundings_leave(family, small_config, tmp_path, folder_of_family):
    overrides = [*run_overrides(family, folder_of_family(family), tmp_path / "data"), "trainer.total_training_steps=1"]
    own = {dtype: gap_of(small_config, overrides, dtype, "null") for dtype in ("bfloat16", "float32")}
    rounded = {dtype: gap_of(small_config, overrides, dtype, "rollout") for dtype in ("bfloat16", "float32")}
    assert max(own["float32"], rounded["float32"]) < LOG_PROB
    assert LOG_PROB < rounded["bfloat16"] < own["bfloat16"] / 2


def gap_of(small_config, overrides, dtype, timestep_dtype):
    """The mean absolute log ratio of a run's first step."""
    more = (f"actor_rollout_ref.rollout.dtype={dtype}", f"actor_rollout_ref.model.timestep_dtype={timestep_dtype}")
    run = FlowGRPOTrainer(small_config(*overrides, *more, folder=f"{dtype}_{timestep_dtype}")).fit()
    return next(row["rollout_sync/engine_gap_abs_mean"] for row in run.rows() if "reward/mean" in row)
