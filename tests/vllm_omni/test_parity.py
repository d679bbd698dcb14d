"""The real vllm-omni engine draws what the ``diffusers`` engine draws, and proves it.

Runs in the environment of ``make vllm`` only; CPU, float32: it says nothing about GPU kernels.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("vllm")

from engine_pair import FAMILIES, make_pair, random_adapter, with_amx, zero_adapter
from tolerances import LATENT, LOG_RATIO, levels

from flowgrpo_rc.models.lora import AdapterMismatchError, linear_layers
from flowgrpo_rc.rollout.base import RolloutError, rows_of
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES

pytestmark = pytest.mark.process

TENSORS = {"latents": LATENT, "next_latents": LATENT, "rollout_means": LATENT, "rollout_log_probs": LOG_RATIO}
"""The tensors of two engines that are compared, and their tolerances."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, folder_of_family):
    """Float32; every test that uses it syncs first."""
    if request.param == "qwen_image":
        yield request.getfixturevalue("qwen_image_pair")
        return
    pair = make_pair(folder_of_family(request.param), FAMILIES[request.param])
    yield pair
    pair.vllm.close()


def assert_same_images(got, expected):
    """Equal but for values that lie on the boundary between two of 256 levels."""
    difference = (got.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).sum() <= levels(difference.numel())


def assert_parity(pair, request):
    got, expected = pair.vllm.generate(request), pair.diffusers.generate(request)
    assert_same_images(got.images, expected.images)
    if request.window_starts is None:
        assert got.batch is None
        return
    assert set(got.batch.keys()) == set(expected.batch.keys())
    for name, tensor in expected.batch.items():
        assert_close(got.batch[name], tensor, atol=TENSORS.get(name, 0), rtol=0)
    print({name: (got.batch[name] - expected.batch[name]).abs().max().item() for name in TENSORS})


@pytest.mark.parametrize(
    ("adapter", "window", "guided"),
    [
        (zero_adapter, 2, True),
        (zero_adapter, 0, False),
        (random_adapter, 2, False),
        (random_adapter, 2, True),
        (random_adapter, 0, True),
    ],
)
def test_images_latents_and_log_probs_equal_the_diffusers_engines(pair, adapter, window, guided):
    pair.sync(adapter(pair), 3)
    assert_parity(pair, pair.request(guided=guided, window=window))


def test_every_transition_is_the_same_and_the_adapter_changes_the_images(pair):
    drawn = []
    for adapter in (zero_adapter(pair), random_adapter(pair), zero_adapter(pair)):
        pair.sync(adapter, 3)
        drawn.append(pair.vllm.generate(pair.request()).batch["next_latents"])
        for sde_type in ("cps", "dance_sde"):
            assert_parity(pair, pair.request(sde_type=sde_type))
    assert (drawn[0] - drawn[1]).abs().max() > 1e-2
    assert_close(drawn[0], drawn[2], atol=LATENT, rtol=0)


def test_the_proof_accepts_it_and_digests_tell_adapters_apart(pair):
    state = random_adapter(pair, seed=5)
    before = {name: tensor.clone() for name, tensor in state.items()}
    digest = pair.sync(state, 11)
    # vllm multiplies alpha / rank (here 2) into B in place.
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert digest == pair.vllm.digest_of(state)
    for window, guided in ((2, False), (0, True)):
        request = pair.request(guided=guided, window=window)
        check_rollout(request, pair.vllm.generate(request), pair.model, HeldAdapter(11, digest), "float32")
    name = next(n for n in state if "lora_A" in n)
    nudged = {**state, name: state[name].clone()}
    nudged[name].view(-1)[0] = torch.nextafter(nudged[name].view(-1)[0], torch.tensor(9.0))
    assert pair.vllm.digest_of(nudged) != digest
    assert pair.sync(nudged, 1) == pair.vllm.digest_of(nudged)


@pytest.mark.parametrize("family", ["qwen_image", "flux2_klein_references", "wan"])
def test_a_scale_that_is_no_power_of_two_and_bfloat16(folder_of_family, family, monkeypatch):
    """alpha / rank = 1.5 rounds B once more than PEFT does; means stay a rounding apart, the digest is exact.

    In the precision that vllm has AMX kernels for, on a processor that seems to have them.
    """
    monkeypatch.setenv("PYTHONPATH", with_amx())
    path = "asset:tiny_qwen_image" if family == "qwen_image" else folder_of_family(family)
    pair = make_pair(path, FAMILIES[family], dtype=torch.bfloat16, alpha=6)
    state = random_adapter(pair)
    digest = pair.sync(state, 2)
    assert digest == pair.vllm.digest_of(state)
    request = replace(pair.request(guided=True), window_starts=torch.full((6,), 3))
    result = pair.vllm.generate(request)
    check_rollout(request, result, pair.model, HeldAdapter(2, digest), "bfloat16")
    gap = (result.batch["rollout_means"] - pair.diffusers.generate(request).batch["rollout_means"]).abs()
    print(family, f"bfloat16 means apart by {gap.mean():.2g}, at most {gap.max():.2g}")
    assert 0 < gap.max() < 0.3
    assert gap.mean() < 0.02
    # the window ends with the schedule; images are the trainer's decoding of it, its VAE in float32
    images = pair.model.decode(result.batch["next_latents"][:, -1], 32, 32)
    assert_same_images(result.images, images)
    pair.vllm.close()


def test_every_linear_layer_binds(pair):
    """Also those that vllm-omni fuses, renames, or has under two names; those that it cannot adapt are refused."""
    refused = PIPELINES[type(pair.model.pipe).__name__].takes_no_adapter
    layers = linear_layers(pair.model.transformer)
    wide = pair.with_targets([n for n in layers if not any(fnmatchcase(n, pattern) for pattern in refused)])
    state = {name: tensor / 6 for name, tensor in random_adapter(wide).items()}
    assert wide.sync(state, 1) == wide.vllm.digest_of(state)
    assert_parity(wide, wide.request(guided=True))
    for pattern in refused:
        plain, layer = next((name, layer) for name, layer in layers.items() if fnmatchcase(name, pattern))
        a, b = torch.zeros(4, layer.in_features), torch.zeros(layer.out_features, 4)
        more = {**state, f"{plain}.lora_A.default.weight": a, f"{plain}.lora_B.default.weight": b}
        with pytest.raises(AdapterMismatchError, match=rf"unbound modules=\['{plain}'\]"):
            pair.vllm._handle.call("sync", more, 2)


def test_more_images_than_a_batch_and_one_alone(pair):
    """Six images go into batches of at most four; the rows come back in the request's order."""
    pair.sync(random_adapter(pair), 1)
    request = pair.request()
    whole = pair.vllm.generate(request).batch
    for row in (0, 5):
        alone = pair.vllm.generate(rows_of(request, torch.tensor([row]))).batch
        assert_close(alone["next_latents"], whole["next_latents"][row : row + 1], atol=LATENT, rtol=0)


def test_non_finite_latents_are_refused(pair):
    pair.sync({name: torch.full_like(tensor, torch.inf) for name, tensor in random_adapter(pair).items()}, 1)
    with pytest.raises(RolloutError, match="non-finite latents"):
        pair.vllm.generate(pair.request())


def test_a_wan_whose_positions_vllm_omni_divides_otherwise_is_refused():
    """A head of 128 is 44, 42 and 42 in both; one of 16 is 8, 4 and 4 in diffusers, 6, 5 and 5 in vllm-omni."""
    from flowgrpo_rc.rollout.vllm_omni.families.wan import check_head_width

    check_head_width(128)
    with pytest.raises(ValueError, match="attention_head_dim=16, which vllm-omni divides"):
        check_head_width(16)
