"""Requests, adapters and comparisons that tests of rollout engines share."""

import torch

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout import DiffusersEngine, RolloutRequest
from flowgrpo_rc.rollout.seeds import seed_for

PROMPTS = ('the text "12"', 'the text "345678" in red', "x")
"""Of different lengths, so that embeddings are padded and masked."""
STARTS = (0, 0, 2, 2, 1, 1)
"""The first stochastic step of each image."""


def request_for(
    model, prompts=PROMPTS, *, index=(0, 0, 1, 1, 2, 2), starts=STARTS, steps=5, window=2, cfg=1.0, seed=0, **changes
):
    """Images of 32 x 32 pixels, the rows ``index`` of the prompts; ``window=0`` is the deterministic ODE.

    ``changes`` are fields of the request, or ``length``, ``guidance`` and the ``negatives`` of the prompts.
    """
    encoder = PromptEncoder(model, changes.pop("length", 64))
    negatives = changes.pop("negatives", [" "] * len(prompts))
    negative = encoder(negatives) if cfg > 1 else None
    settings = {
        "conditioning": Conditioning(encoder(list(prompts)), negative, cfg, changes.pop("guidance", None), 32, 32),
        "prompt_index": torch.tensor(index),
        "num_inference_steps": steps,
        "seeds": [seed_for(seed, 0, 0, i) for i in range(len(index))],
        "window_starts": torch.tensor(starts) if window else None,
        "window_size": window,
        "noise_level": 0.7 if window else 0.0,
    }
    return RolloutRequest(**(settings | changes))


def random_like(state, scale=0.2, seed=0):
    """An adapter as it is after some training: random values for every tensor, B included."""
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def tiny_engine(model, micro_batch_size=6):
    """A float32 engine around the model, with a random adapter of version 5."""
    settings = {"micro_batch_size": micro_batch_size, "device": "cpu", "dtype": torch.float32}
    engine = DiffusersEngine(model, ModelConfig(lora_rank=4, lora_alpha=4), **settings)
    engine.sync(random_like(adapter_state(engine.transformer, engine.adapter), 0.05), 5)
    return engine


def rows_of_forwards(transformer, call):
    """Rows of every forward of the transformer during ``call()``, counted by a hook."""
    rows = []
    hook = transformer.register_forward_hook(lambda *given: rows.append(len(given[-1][0])), with_kwargs=True)
    call()
    hook.remove()
    return rows


def assert_same_bits(one, other):
    """Images, recorded steps and what the engines say of themselves."""
    assert torch.equal(one.images, other.images)
    assert (one.batch is None) is (other.batch is None)
    if one.batch is not None:
        assert set(one.batch.keys()) == set(other.batch.keys())
        assert all(torch.equal(one.batch[name], tensor) for name, tensor in other.batch.items())
    for name in ("seeds", "dtype", "adapter_version", "adapter_digest", "true_cfg_scale", "noise_level", "window_size"):
        assert getattr(one.echo, name) == getattr(other.echo, name), name
    assert one.echo.request_id == other.echo.request_id
    assert torch.equal(one.echo.sigmas, other.echo.sigmas)
