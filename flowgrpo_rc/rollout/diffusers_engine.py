"""The engine ``diffusers``: the actor's transformer with another adapter, or a copy in another precision."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowgrpo_rc.checks import choice
from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.attention import NATIVE, use_attention_backend
from flowgrpo_rc.models.base import DiffusionModel, keeps_float32
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import (
    ACTOR_ADAPTER,
    activate,
    adapter_active,
    adapter_parameters,
    attach_lora,
    base_parameters,
    load_adapter_state,
)
from flowgrpo_rc.models.sharding import gathered_once
from flowgrpo_rc.rollout.base import RolloutRequest, Trajectories, batch_of, check_has_adapter
from flowgrpo_rc.rollout.cache import CacheConfig, check_cache
from flowgrpo_rc.rollout.config import QUANTIZATIONS, RolloutConfig
from flowgrpo_rc.rollout.digest import HeldDigest, adapter_digest
from flowgrpo_rc.rollout.sampling import RequestSampler, micro_batches
from flowgrpo_rc.rollout.wide_linear import linear_layers

FP8_MAX = 448.0
"""Largest finite value of ``float8_e4m3fn``: sign, 4 exponent and 3 mantissa bits, no infinity."""


class DiffusersEngine:
    """Samples with ``model``'s transformer in ``dtype`` and an adapter of its own, which follows the actor's.

    If the transformer has this ``dtype`` and attention backend already, the engine uses the same module: its adapter
    lies beside the actor's and is active during ``generate`` only, so the two take turns. Otherwise the engine has a
    copy of the transformer. Its adapter is in ``dtype`` either way. Create the engine before the actor attaches its
    adapter, which the engine would freeze.

    ``quantization="fp8"`` rounds the base's weights once and the adapter's at every ``sync``, in a copy; ``model``
    keeps its weights bit for bit. A sharded transformer can only be shared. ``gather_weights`` keeps its weights whole
    during a ``generate``.

    With ``alone`` there is no actor in this process: the engine converts ``model``'s transformer in place instead of
    copying it, so that memory holds one.

    Args:
        cache: that of the requests to come, to find out now that the transformer cannot have it.

    Raises:
        ValueError: the quantization is unknown, the transformer cannot have the cache, or the actor was created first.
    """

    def __init__(
        self,
        model: DiffusionModel,
        lora: ModelConfig,
        *,
        dtype: torch.dtype,
        micro_batch_size: int,
        device: Any,
        quantization: str | None = None,
        attn_backend: str | None = None,
        gather_weights: bool = False,
        alone: bool = False,
        cache: CacheConfig | None = None,
    ) -> None:
        if cache is not None:
            check_cache(cache, model.transformer)
        choice("quantization", quantization, (*QUANTIZATIONS, None))
        taken = getattr(model.transformer, "peft_config", {})
        if ACTOR_ADAPTER in taken:
            raise ValueError("the actor's adapter is attached already; create the rollout engine before the actor")
        self._model = model
        self._device = torch.device(device)
        self._dtype = dtype
        self._micro_batch_size = micro_batch_size
        self._gathers = gather_weights
        self._quantized = quantization is not None
        # A shared transformer has one attention backend, and the actor sets it.
        same_attention = (attn_backend or NATIVE) == (lora.attn_backend or NATIVE)
        # Every difference in precision or kernels needs weights of its own.
        held = base_parameters(model.transformer).items()
        same_dtype = all(
            p.dtype == _held_in(model.transformer, name, dtype) for name, p in held if p.is_floating_point()
        )
        self._shares = not self._quantized and same_attention and same_dtype
        self.transformer: Any = model.transformer if self._shares or alone else _copy_transformer(model.transformer)
        if not self._shares:
            _convert(self.transformer, dtype)
            use_attention_backend(self.transformer, attn_backend)
        if self._quantized:
            round_linear_weights(self.transformer, adapter=False)
        self.adapter = "rollout" if "rollout" not in taken else f"rollout_{len(taken)}"
        """Name of the engine's adapter in ``transformer``."""
        attach_lora(self.transformer, model, lora, dtype=dtype, device=self._device, adapter=self.adapter)
        # The engine never learns, and gradients of its adapter would go to the optimizer.
        self.transformer.requires_grad_(False).eval()
        # Outside of a rollout the transformer is the actor's.
        activate(self.transformer, None)
        self._digest = HeldDigest()
        # Below every version, so that the engine refuses to draw before its first adapter.
        self.adapter_version = -1

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any, *, alone: bool = False
    ) -> "DiffusersEngine":
        """The engine that the section ``actor_rollout_ref.rollout`` describes."""
        return cls(
            model,
            lora,
            dtype=torch_dtype(config.dtype),
            micro_batch_size=config.micro_batch_size,
            device=device,
            quantization=config.quantization,
            attn_backend=config.rollout_attn_backend,
            gather_weights=config.gather_weights,
            alone=alone,
            cache=config.cache,
        )

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Copy the actor's adapter into the engine's, rounding to its dtype and then to its quantization.

        Returns the digest of the weights that the transformer then has.

        Raises:
            AdapterMismatchError: some tensor does not bind; the engine keeps what it had.
        """
        load_adapter_state(self.transformer, state, self.adapter)
        if self._quantized:
            round_linear_weights(self.transformer, adapter=True)
        self.adapter_version = version
        return self._held_digest()

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded as ``sync`` rounds it."""
        here = {name: tensor.to(self._device) for name, tensor in state.items()}
        return _digest_of(here, self._dtype, self._quantized)

    def close(self) -> None:
        """Drop the engine's transformer if it is a copy, and its adapter alone from one that is shared."""
        # A shared transformer goes on living with the actor.
        if self._shares and self.adapter in self._model.transformer.peft_config:
            self._model.transformer.delete_adapters(self.adapter)
        self.transformer = nn.Identity()

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            RolloutError: no adapter has been synchronised yet, or an image's latents are not finite.
        """
        check_has_adapter(self.adapter_version)
        sampler = RequestSampler(self._model, self.transformer, request, self._device)
        sampled: list[tuple[Tensor, dict[str, Tensor]]] = []
        gathered = gathered_once(self.transformer) if self._gathers else nullcontext()
        # A shared transformer computes as the actor does, whose backward pass needs torch's own layers.
        linear = nullcontext() if self._shares else linear_layers(self._dtype, self._device)
        # An actor's blocks may be compiled. Compiling them again for the engine's shapes would cost minutes.
        eager = torch.compiler.set_stance("force_eager")
        with adapter_active(self.transformer, self.adapter), eager, gathered, linear, sampler.cache:
            for rows in micro_batches(request, self._micro_batch_size):
                images, steps = sampler.sample(rows)
                sampled.append((images, steps))
                if request.on_images is not None:
                    request.on_images(rows, images)
        record = {name: torch.cat([part[name] for _, part in sampled]) for name in sampled[0][1]}
        # Read from the weights after drawing, so that a change meanwhile is noticed.
        echo = sampler.echo(adapter_version=self.adapter_version, adapter_digest=self._held_digest())
        return Trajectories(torch.cat([images for images, _ in sampled]), batch_of(record, request), echo)

    def _held_digest(self) -> str:
        return self._digest(adapter_parameters(self.transformer, self.adapter))


def digest_rule(config: RolloutConfig, lora: ModelConfig) -> Callable[[Mapping[str, Tensor]], str]:
    """``DiffusersEngine.digest_of`` of an engine with these settings, without an engine."""
    return partial(_digest_of, dtype=torch_dtype(config.dtype), quantized=config.quantization is not None)


def _digest_of(state: Mapping[str, Tensor], dtype: torch.dtype, quantized: bool) -> str:
    """The digest of ``state`` rounded as ``sync`` rounds it, computed on its device."""
    held = {name: tensor.detach().to(dtype) for name, tensor in state.items()}
    if quantized:
        held = {name: round_fp8_rows(tensor) for name, tensor in held.items()}
    return adapter_digest(held)


def _held_in(transformer: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter after diffusers loads the transformer in ``dtype``."""
    return torch.float32 if keeps_float32(transformer, name) else dtype


def _copy_transformer(transformer: nn.Module) -> nn.Module:
    """A second base model on the same storage."""
    # ``deepcopy`` takes objects in the memo as copied already, so that both models share the weights.
    # Parameters are shared storage here; converting them later gives the copy its own.
    memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in transformer.parameters()}
    copied: Any = copy.deepcopy(transformer, memo)
    for adapter in list(getattr(copied, "peft_config", {})):
        copied.delete_adapters(adapter)
    return copied


def _convert(transformer: nn.Module, dtype: torch.dtype) -> None:
    """Bring a base model into ``dtype``."""
    for name, parameter in transformer.named_parameters():
        # In place, so that no second set of all parameters ever exists. Packed codes of a rounded base are no numbers.
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(_held_in(transformer, name, dtype))
    for module in transformer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Buffers that are in no file keep the dtype in which the class makes them.
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


@torch.no_grad()
def round_fp8_rows(weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """``weight`` rounded through ``float8_e4m3fn`` with one scale per output row, absmax / 448; dtype unchanged.

    A row's largest element lands on 448 and comes back exactly, so rounding twice is rounding once. Rows of zeros stay
    zero. A row that is not finite becomes NaN. Every device gives the same bits.
    """
    wide = weight.float()
    # A tensor: CUDA multiplies by the rounded reciprocal of a plain number, where a host divides.
    fp8_max = torch.full((), FP8_MAX, device=weight.device)
    absmax = wide.abs().amax(dim=1, keepdim=True)
    absmax = torch.where(absmax == 0, 1.0, absmax)  # a row of zeros would be divided by 0
    codes = (wide / absmax * fp8_max).to(torch.float8_e4m3fn)
    return (codes.float() / fp8_max * absmax).to(weight.dtype)


def round_linear_weights(module: nn.Module, *, adapter: bool) -> None:
    """Give every ``nn.Linear`` in ``module`` a weight of its own, rounded; biases and all else stay as they are.

    Args:
        module: a transformer. The tensors that its linear layers held before are left untouched.
        adapter: round the LoRA matrices alone (true) or all others (false).
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and (".lora_" in name) is adapter:
            layer.weight = nn.Parameter(round_fp8_rows(layer.weight), requires_grad=False)
