"""The real vllm-omni engine draws what the ``diffusers`` engine draws, and proves it.

Runs in the environment of ``make vllm`` only; CPU, float32: it says nothing about GPU kernels.
"""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("vllm")

from engine_pair import make_pair, random_adapter, request_for, zero_adapter
from tolerances import LATENT, LOG_RATIO, levels

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import RolloutError
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.vllm_omni.adapter import AdapterPush

SD3_LAYERS = [
    *(f"{attention}.to_{x}" for attention in ("attn", "attn2") for x in ("q", "k", "v", "out.0")),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out", "context_embedder"),
    *(f"{feed_forward}.net.{layer}" for feed_forward in ("ff", "ff_context") for layer in ("0.proj", "2")),
    "proj_out",
]
"""All but the layers of its embeddings and norms, which are plain torch in vllm-omni."""
TENSORS = {"latents": LATENT, "next_latents": LATENT, "rollout_means": LATENT, "rollout_log_probs": LOG_RATIO}
"""What is compared of two engines, and how far it may be apart."""


FAMILIES = ("qwen_image", "stable_diffusion_3")


@pytest.fixture(scope="module")
def path_of(tiny_sd3_path):
    """Where each family's tiny model is."""
    return dict(zip(FAMILIES, ("asset:tiny_qwen_image", tiny_sd3_path), strict=True)).__getitem__


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, path_of):
    """Float32; every test that uses it syncs first."""
    if request.param == "qwen_image":
        yield request.getfixturevalue("qwen_image_pair")
        return
    pair = make_pair(path_of(request.param))
    yield pair
    pair.vllm.close()


def assert_same_images(got, expected):
    """Equal but for values that lie on the boundary between two of 256 levels."""
    difference = (got.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).sum() <= levels(difference.numel())


def assert_parity(pair, request):
    """Returns the largest difference of each tensor."""
    got, expected = pair.vllm.generate(request), pair.diffusers.generate(request)
    assert_same_images(got.images, expected.images)
    if request.window_starts is None:
        assert got.batch is None
        return {}
    assert set(got.batch.keys()) == set(expected.batch.keys())
    for name, tolerance in TENSORS.items():
        assert_close(got.batch[name], expected.batch[name], atol=tolerance, rtol=0)
    for name in ("timesteps", "sigmas", "next_sigmas", "prompt_index"):
        assert_close(got.batch[name], expected.batch[name], atol=0, rtol=0)
    return {name: (got.batch[name] - expected.batch[name]).abs().max().item() for name in TENSORS}


@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("window", [2, 0])
@pytest.mark.parametrize("adapter", [zero_adapter, random_adapter])
def test_images_latents_and_log_probs_equal_the_diffusers_engines(pair, adapter, window, cfg, record_property):
    pair.sync(adapter(pair), 3)
    differences = assert_parity(pair, request_for(pair.model, cfg=cfg, window=window))
    for name, value in differences.items():
        record_property(name, value)
    print(adapter.__name__, f"cfg={cfg}", differences)


@pytest.mark.parametrize("sde_type", ["cps", "dance_sde"])
def test_every_transition_is_the_same(pair, sde_type):
    pair.sync(random_adapter(pair), 3)
    assert_parity(pair, request_for(pair.model, sde_type=sde_type))


def test_the_adapter_changes_the_images(pair):
    request = request_for(pair.model)
    drawn = []
    for adapter in (zero_adapter(pair), random_adapter(pair), zero_adapter(pair)):
        pair.sync(adapter, 3)
        drawn.append(pair.vllm.generate(request).batch["next_latents"])
    assert (drawn[0] - drawn[1]).abs().max() > 1e-2
    assert_close(drawn[0], drawn[2], atol=LATENT, rtol=0)


@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("window", [2, 0])
def test_the_proof_accepts_it(pair, window, cfg):
    state = random_adapter(pair, seed=5)
    digest = pair.sync(state, 11)
    assert digest == pair.vllm.digest_of(state)
    request = request_for(pair.model, cfg=cfg, window=window)
    result = pair.vllm.generate(request)
    check_rollout(request, result, pair.model, HeldAdapter(11, digest), "float32")


def test_digests_tell_adapters_apart(pair):
    first, second = random_adapter(pair, 1), random_adapter(pair, 2)
    digest = pair.sync(first, 1)
    assert digest != pair.vllm.digest_of(second)
    name = next(n for n in first if "lora_A" in n)
    nudged = {**first, name: first[name].clone()}
    nudged[name].view(-1)[0] = torch.nextafter(nudged[name].view(-1)[0], torch.tensor(9.0))
    assert pair.vllm.digest_of(nudged) != digest
    assert pair.sync(nudged, 1) == pair.vllm.digest_of(nudged)


def test_sync_leaves_the_trainers_tensors_alone(pair):
    """vllm multiplies alpha / rank (here 2) into B in place."""
    state = random_adapter(pair)
    before = {name: tensor.clone() for name, tensor in state.items()}
    pair.sync(state, 1)
    assert all(torch.equal(state[name], before[name]) for name in state)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scale_that_is_no_power_of_two_and_bfloat16(path_of, family):
    """alpha / rank = 1.5 rounds B once more than PEFT does; means stay a rounding apart, the digest is exact."""
    pair = make_pair(path_of(family), dtype=torch.bfloat16, alpha=6)
    state = random_adapter(pair)
    digest = pair.sync(state, 2)
    assert digest == pair.vllm.digest_of(state)
    request = replace(request_for(pair.model, cfg=4.0), window_starts=torch.full((6,), 3))
    result = pair.vllm.generate(request)
    check_rollout(request, result, pair.model, HeldAdapter(2, digest), "bfloat16")
    gap = (result.batch["rollout_means"] - pair.diffusers.generate(request).batch["rollout_means"]).abs()
    assert 0 < gap.max() < 0.3
    assert gap.mean() < 0.02
    # the window ends with the schedule; images are the trainer's decoding of it, its VAE in float32
    images = pair.model.decode(result.batch["next_latents"][:, -1], 32, 32)
    assert_same_images(result.images, images)
    pair.vllm.close()


@pytest.mark.parametrize(
    ("family", "targets", "plain"),
    [("qwen_image", "all-linear", None), ("stable_diffusion_3", SD3_LAYERS, "norm_out.linear")],
)
def test_every_linear_layer_binds(path_of, family, targets, plain):
    """Also those that vllm-omni fuses, renames, or has under two names; those that it cannot adapt are refused."""
    pair = make_pair(path_of(family), target_modules=targets)
    state = {name: tensor / 6 for name, tensor in random_adapter(pair).items()}
    assert pair.sync(state, 1) == pair.vllm.digest_of(state)
    assert_parity(pair, request_for(pair.model, cfg=4.0))
    if plain is not None:
        layer = pair.model.transformer.get_submodule(plain)
        a, b = torch.zeros(4, layer.in_features), torch.zeros(layer.out_features, 4)
        more = {**state, f"{plain}.lora_A.default.weight": a, f"{plain}.lora_B.default.weight": b}
        with pytest.raises(AdapterMismatchError, match=rf"binding is incomplete: .*unbound modules=\['{plain}'\]"):
            pair.vllm._process.call("sync", AdapterPush(more, 2, 4, 8))
    pair.vllm.close()


def test_refused_adapters_leave_the_one_before(pair):
    good = random_adapter(pair)
    digest = pair.sync(good, 7)
    missing = dict(list(good.items())[1:])
    with pytest.raises(AdapterMismatchError, match=r"1 of \d+ weights missing"):
        pair.vllm.sync(missing, 8)
    wrong = {name: tensor[:, :-1] if "lora_B" in name else tensor for name, tensor in good.items()}
    with pytest.raises(AdapterMismatchError, match="expected"):
        pair.vllm.sync(wrong, 8)
    result = pair.vllm.generate(request_for(pair.model))
    assert (result.echo.adapter_version, result.echo.adapter_digest) == (7, digest)


def test_more_images_than_a_batch_and_one_alone(pair):
    """Six images go into batches of at most four; the rows come back in the request's order."""
    pair.sync(random_adapter(pair), 1)
    request = request_for(pair.model)
    whole = pair.vllm.generate(request).batch
    for row in (0, 5):
        one = replace(
            request,
            prompt_index=request.prompt_index[row : row + 1],
            seeds=request.seeds[row : row + 1],
            window_starts=request.window_starts[row : row + 1],
        )
        alone = pair.vllm.generate(one).batch
        assert_close(alone["next_latents"], whole["next_latents"][row : row + 1], atol=LATENT, rtol=0)


def test_non_finite_latents_are_refused(pair):
    state = random_adapter(pair)
    pair.sync({name: torch.full_like(tensor, torch.inf) for name, tensor in state.items()}, 1)
    with pytest.raises(RolloutError, match="non-finite latents"):
        pair.vllm.generate(request_for(pair.model))
