"""vllm-omni's TeaCache around the window: exact inside it, and the plain forward where it never skips."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("vllm")

from engine_pair import FAMILIES, make_pair, random_adapter
from tolerances import LATENT, LOG_RATIO
from vllm_omni.diffusion.cache.teacache.config import TeaCacheConfig
from vllm_omni.diffusion.cache.teacache.extractors import get_extractor

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_active
from flowgrpo_rc.rollout.cache import CacheConfig
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.vllm_omni import VllmOmniEngine
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES
from flowgrpo_rc.sde import log_prob, transition

NEVER = CacheConfig(name="tea_cache", options={"rel_l1_thresh": 1e-30, "coefficients": [0, 0, 0, 0, 1]}, in_window=True)
ALWAYS = replace(NEVER, options={"rel_l1_thresh": 1e30}, in_window=False)
"""It computes the first step of each stretch alone."""
CACHED = ("qwen_image", "flux_dev", "flux2_klein_references", "flux2_dev", "z_image")
"""A model for each of vllm-omni's rules."""


def rescored(pair, request, batch):
    """Log-probs ``(B, W)`` of the recorded steps by the trainer's transformer."""
    cond = request.conditioning.rows(request.prompt_index, torch.device("cpu"))
    columns = []
    for step in range(request.window_size):
        x, timesteps, *levels = (batch[name][:, step] for name in ("latents", "timesteps", "sigmas", "next_sigmas"))
        with torch.no_grad(), adapter_active(pair.diffusers.transformer, pair.diffusers.adapter):
            velocity = pair.model.velocity(pair.diffusers.transformer, x, timesteps, cond)
        distribution = transition(x, velocity, *levels, noise_level=request.noise_level, sde_type=request.sde_type)
        columns.append(log_prob(distribution, batch["next_latents"][:, step], sde_type=request.sde_type))
    return torch.stack(columns, 1)


def proven(pair, request, digest):
    """The engine's answer, whose echo has been checked."""
    answer = pair.vllm.generate(request)
    check_rollout(request, answer, pair.model, HeldAdapter(3, digest), "float32")
    return answer


@pytest.mark.process
@pytest.mark.parametrize("family", CACHED)
def test_the_window_is_computed_in_full(folder_of_family, family):
    path = "asset:tiny_qwen_image" if family == "qwen_image" else folder_of_family(family)
    pair = make_pair(path, FAMILIES[family], cache=NEVER)
    digest = pair.sync(random_adapter(pair), 3)
    # Unequal windows, so that a batch of vllm-omni's is drawn in parts; some begin with the schedule.
    request = replace(pair.request(guided=True), window_starts=torch.tensor([3, 0, 3, 0, 3, 2]))
    plain = proven(pair, request, digest)
    never = proven(pair, replace(request, cache=NEVER), digest)
    for name in ("latents", "next_latents", "rollout_log_probs"):
        assert_close(never.batch[name], plain.batch[name], atol=LATENT, rtol=0)
    cached = proven(pair, replace(request, cache=ALWAYS), digest)
    late = request.window_starts > 1
    assert (cached.batch["latents"] - plain.batch["latents"])[late].abs().amax((1, 2, 3)).min() > 1e-3
    assert_close(cached.batch["latents"][~late], plain.batch["latents"][~late], atol=LATENT, rtol=0)
    assert not torch.equal(cached.images, plain.images)
    found = rescored(pair, request, cached.batch)
    assert_close(found, cached.batch["rollout_log_probs"], atol=LOG_RATIO, rtol=0)
    inside = proven(pair, replace(request, cache=replace(ALWAYS, in_window=True)), digest)
    gap = (rescored(pair, request, inside.batch) - inside.batch["rollout_log_probs"]).abs()
    assert gap[:, 0].max() <= LOG_RATIO
    assert gap[:, 1].mean() > 100 * LOG_RATIO
    again = proven(pair, request, digest)
    assert_close(again.batch["rollout_log_probs"], plain.batch["rollout_log_probs"], atol=LATENT, rtol=0)
    pair.vllm.close()


def test_the_rules_are_those_of_vllm_omni():
    kinds = {entry.tea_cache for entry in PIPELINES.values()} - {None}
    assert len(kinds) == len(CACHED)
    for kind in kinds:
        assert TeaCacheConfig(transformer_type=kind).coefficients
        assert callable(get_extractor(kind))


def test_a_pipeline_without_rules_and_options_without_sense_are_refused(folder_of_family):
    """Before a process starts."""
    for path, cache, message in (
        (folder_of_family("wan"), NEVER, r"cache.name: got tea_cache, which vllm-omni has for Qwen.* but not for Wan"),
        (
            "asset:tiny_qwen_image",
            replace(NEVER, options={"rel_l1_thresh": 0}),
            "rel_l1_thresh: got 0.0; give a number above 0",
        ),
        ("asset:tiny_qwen_image", replace(NEVER, options={"coefficients": [1.0]}), "coefficients: .*five numbers"),
        ("asset:tiny_qwen_image", replace(NEVER, options={"threshold": 1}), "takes rel_l1_thresh, coefficients"),
    ):
        config = RolloutConfig(name="vllm_omni", cache=cache)
        with pytest.raises(ValueError, match=message):
            VllmOmniEngine(config, load_model(path), ModelConfig(path=path, lora_rank=4), "cpu")
