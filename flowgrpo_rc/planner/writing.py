"""Memory of a prompt writer: its weights, and what sampling and learning add, under fake tensors."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.planner.live_bytes import LiveBytes
from flowgrpo_rc.planner.machines import ENGINE_RUNTIME, GIB
from flowgrpo_rc.planner.pipeline import PlanError, bytes_of, parameters_of, replace_tensors
from flowgrpo_rc.planner.settings import adamw_moments, on_trainers_gpus
from flowgrpo_rc.rollout.config import IN_TRAINER
from flowgrpo_rc.writer.config import VLLM, PromptWriterConfig
from flowgrpo_rc.writer.engine import SeededSampler
from flowgrpo_rc.writer.language import (
    default_lora_targets,
    describe_network,
    log_probs_at,
    recompute_activations,
)

REQUEST = 128
"""Tokens of a request with its chat template, assumed: a plan reads no data."""


class WriterPlan:
    """A prompt writer's memory on one GPU; every process holds it whole.

    Raises:
        PlanError: its configuration cannot be read.
    """

    def __init__(self, config: PromptWriterConfig) -> None:
        self.config = config
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._actor = self._network(config.dtype, "float32")
        if config.actor.enable_gradient_checkpointing:
            recompute_activations(self._actor)
        self._engine = self._network(config.engine.dtype, config.engine.dtype)
        lora = sum(parameter.numel() for parameter in adapter_parameters(self._actor).values())
        self.parameters = parameters_of(self._actor) - lora
        """Parameters without the LoRA."""
        self._lora = 4 * lora  # in float32
        self._moments = 0 if config.learns == "images" else adamw_moments(config.actor.optim.name, lora, 4)
        self._sampling = cache(self._measure_sampling)
        self._update = cache(self._measure_update)

    def resident(self, gpus: int) -> dict[str, int]:
        """Resident bytes on one of the trainer's ``gpus`` GPUs, by component."""
        settings = self.config.engine
        process = ENGINE_RUNTIME if settings.placement != IN_TRAINER else 0
        if settings.name == VLLM:
            process += round(settings.kv_cache_gib * GIB)
        return {
            "prompt writer": bytes_of(self._actor) - self._lora,
            "its engine": bytes_of(self._engine) + process if self._engine_is_here(gpus) else 0,
            "its LoRA and AdamW's moments": self._lora + self._moments,
            "average of its LoRA": self._lora if self.config.actor.ema_decay is not None else 0,
        }

    def stages(self, rewrites: int, gpus: int) -> dict[str, int]:
        """Bytes that each stage adds, with so many rewrites in a step on one GPU."""
        stages = {}
        if self._engine_is_here(gpus):
            # Of vllm too, whose activations are not known: its cache is then counted twice.
            stages["writing"] = self._sampling(min(self.config.engine.micro_batch_size, rewrites))
        if self.config.learns != "images":
            rows = min(self.config.actor.ppo_micro_batch_size_per_gpu, rewrites)
            # An optimizer step has gradients twice, as for images.
            stages["writer's update"] = max(self._update(rows), 2 * self._lora)
        return stages

    def _engine_is_here(self, gpus: int) -> bool:
        return on_trainers_gpus(self.config.engine.devices, gpus)

    def _network(self, dtype: str, lora_dtype: str) -> Any:
        from transformers import AutoModelForCausalLM

        try:
            described = describe_network(resolve_asset(self.config.path or ""))
        except ValueError as error:
            raise PlanError(str(error)) from error
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(described, dtype=torch_dtype(dtype))
        network.requires_grad_(False).eval()
        model: Any = SimpleNamespace(default_lora_targets=default_lora_targets(network))
        with torch.device("meta"):
            attach_lora(network, model, self.config, dtype=torch_dtype(lora_dtype), compute_dtype=torch_dtype(dtype))
        with self._fake:
            replace_tensors(network, lambda tensor: torch.empty_like(tensor, device="cpu"))
        return network

    def _live(self, network: Any) -> LiveBytes:
        return LiveBytes([*network.parameters(), *network.buffers()])

    def _measure_sampling(self, rows: int) -> int:
        """The last token of ``rows`` rewrites, which attends to all others."""
        before = REQUEST + self.config.max_new_tokens - 1
        sampler = SeededSampler([0] * rows, 1)
        network = self._engine
        with self._fake, torch.no_grad(), self._live(network) as live:
            ids = torch.zeros(rows, REQUEST, dtype=torch.long)
            held = network(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
            for layer in held.layers:
                layer.keys, layer.values = (_longer(kept, before) for kept in (layer.keys, layer.values))
            logits = network(input_ids=ids[:, :1], past_key_values=held, use_cache=True, logits_to_keep=1).logits
            sampler(ids, logits[:, -1])
        return live.peak

    def _measure_update(self, rows: int) -> int:
        """Forward and backward of ``rows`` rewrites of the longest."""
        length = self.config.max_new_tokens
        network = self._actor
        with self._fake, self._live(network) as live:
            ids = torch.zeros(rows, REQUEST + length, dtype=torch.long)
            log_probs_at(network, ids, ids[:, :length], REQUEST - 1).sum().backward()
        network.zero_grad(set_to_none=True)
        return live.peak


def _longer(kept: Tensor, length: int) -> Tensor:
    return kept.new_empty(*kept.shape[:2], length, kept.shape[3])
