"""Both engines around one tiny model, and what to ask of them."""

from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, load_model
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout import DiffusersEngine, RolloutRequest
from flowgrpo_rc.rollout.config import VllmOmniConfig
from flowgrpo_rc.rollout.seeds import seed_for
from flowgrpo_rc.rollout.vllm_omni import VllmOmniEngine

STARTS = torch.tensor([0, 0, 2, 2, 1, 1])
PROMPTS = ['the text "12"', 'the text "345678" in red', "x"]
"""Of different lengths, so that embeddings are padded and masked."""
TIMEOUTS = VllmOmniConfig(
    start_timeout_s=600.0, request_timeout_s=300.0, sync_timeout_s=300.0, silence_timeout_s=30.0, close_timeout_s=20.0
)


@dataclass(frozen=True)
class Pair:
    """The same model and adapter in both engines."""

    model: Any
    lora: ModelConfig
    vllm: VllmOmniEngine
    diffusers: DiffusersEngine

    def sync(self, state, version):
        """Both engines take the adapter; returns vllm-omni's digest."""
        self.diffusers.sync(state, version)
        return self.vllm.sync(state, version)


def adapter_like(state, seed, scale=0.3):
    """Random values for every tensor, B included."""
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(t.shape, generator=generator) for name, t in state.items()}


def zero_adapter(pair):
    """The adapter as a run begins: B is 0."""
    return {
        n: t * (".lora_A" in n)
        for n, t in adapter_like(adapter_state(pair.diffusers.transformer, pair.diffusers.adapter), 1).items()
    }


def request_for(model, *, steps=5, cfg=1.0, sde_type="sde", window=2, seed=0):
    """Two images of each of three prompts; ``window=0`` is the deterministic ODE."""
    encoder = PromptEncoder(model, 64)
    prompts, negative = encoder(PROMPTS), encoder([" "] * 3) if cfg > 1 else None
    return RolloutRequest(
        conditioning=Conditioning(prompts, negative, cfg, None, 32, 32),
        prompt_index=torch.tensor([0, 0, 1, 1, 2, 2]),
        num_inference_steps=steps,
        seeds=[seed_for(seed, 0, 0, i) for i in range(6)],
        window_starts=STARTS if window else None,
        window_size=window,
        noise_level=0.7 if window else 0.0,
        sde_type=sde_type,
        record_means=bool(window),
    )


def make_pair(path="asset:tiny_qwen_image", dtype=torch.float32, alpha=8, target_modules=None):
    """Both engines; the caller closes ``vllm``. A start takes ten to twenty seconds."""
    torch.set_num_threads(1)
    model = load_model(path)
    lora = ModelConfig(path=path, lora_rank=4, lora_alpha=alpha, target_modules=target_modules)
    vllm = VllmOmniEngine(model, lora, dtype=dtype, micro_batch_size=4, device="cpu", timeouts=TIMEOUTS)
    return Pair(model, lora, vllm, DiffusersEngine(model, lora, dtype=dtype, micro_batch_size=4, device="cpu"))


def random_adapter(pair, seed=0):
    """The adapter as it is after some training."""
    return adapter_like(adapter_state(pair.diffusers.transformer, pair.diffusers.adapter), seed)
