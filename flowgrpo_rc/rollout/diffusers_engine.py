"""The engine ``diffusers``: the actor's transformer with another adapter, or a copy with other weights or kernels."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.checks import choice
from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.attention import NATIVE, use_attention_backend
from flowgrpo_rc.models.base import COMPILE_BACKEND, DiffusionModel, keeps_float32
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import (
    ACTOR_ADAPTER,
    activate,
    adapter_active,
    adapter_parameters,
    attach_lora,
    base_parameters,
    linear_layers,
    load_adapter_state,
    target_layers,
)
from flowgrpo_rc.models.sharding import gathered_once
from flowgrpo_rc.rollout import wide_linear
from flowgrpo_rc.rollout.base import RolloutRequest, Trajectories, batch_of, check_has_adapter
from flowgrpo_rc.rollout.cache import CacheConfig, check_cache
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.digest import HeldDigest, adapter_digest
from flowgrpo_rc.rollout.engines import EMULATED, QUANTIZATIONS
from flowgrpo_rc.rollout.sampling import RequestSampler, micro_batches
from flowgrpo_rc.rollout.weights import (
    check_kernels,
    layers_to_round,
    merge_into_weights,
    on_device,
    round_adapter,
    round_fp8_rows,
    round_layers,
)
from flowgrpo_rc.transfers import indexed


class DiffusersEngine:
    """Samples with ``model``'s transformer in ``dtype`` and an adapter of its own, which follows the actor's.

    If the transformer has this ``dtype`` and attention backend already, the engine uses the same module: its adapter
    lies beside the actor's and is active during ``generate`` only, so the two take turns. Otherwise the engine has a
    copy of the transformer, on the same storage where the numbers are the same. Its adapter is in ``dtype`` either way.
    Create the engine before the actor attaches its adapter, which the engine would freeze.

    ``quantization``, ``merge_adapter`` and ``torch_compile`` change a copy; ``model`` keeps its weights bit for bit. A
    sharded transformer can only be shared. ``gather_weights`` keeps its weights whole during a ``generate``.

    With ``alone`` there is no actor in this process: the engine converts ``model``'s transformer in place instead of
    copying it, so that memory holds one.

    Args:
        quantization: one of ``QUANTIZATIONS``; ``fp8`` is emulated on a device without float8 kernels.
        quantization_skip: see ``layers_to_round``.
        merge_adapter: add the adapter to the weights at every ``sync`` instead of computing it beside them.
        torch_compile: compile the blocks.
        cache: that of the requests to come, to find out now that the transformer cannot have it.

    Raises:
        ValueError: the quantization or a layer to skip is unknown, the transformer cannot have the cache, or the actor
            was created first.
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
        quantization_skip: Sequence[str] | None = None,
        merge_adapter: bool = False,
        torch_compile: bool = False,
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
        self._device = indexed(device)
        self._dtype = dtype
        self._micro_batch_size = micro_batch_size
        self._gathers = gather_weights
        check_kernels(quantization, dtype, self._device)
        quantization = on_device(quantization, self._device)
        self._rounds_adapter = quantization == EMULATED and not merge_adapter
        self._compiles = torch_compile
        # A shared transformer has one attention backend.
        same_attention = (attn_backend or NATIVE) == (lora.attn_backend or NATIVE)
        # Blocks are compiled for both or for neither; an actor's compiled ones can run eagerly.
        same_blocks = lora.torch_compile or not torch_compile
        # Every difference in precision or kernels needs a transformer of its own.
        held = base_parameters(model.transformer).items()
        same_dtype = all(
            p.dtype == _held_in(model.transformer, name, dtype) for name, p in held if p.is_floating_point()
        )
        same_weights = quantization is None and not merge_adapter and same_dtype
        self._shares = same_weights and same_attention and same_blocks
        self.transformer: Any = model.transformer if self._shares or alone else _copy_transformer(model.transformer)
        if not self._shares:
            _convert(self.transformer, dtype)
        # An actor beside the engine sets the backend of the transformer that they share.
        if alone or not self._shares:
            use_attention_backend(self.transformer, attn_backend)
        rounded = layers_to_round(self.transformer, model, quantization, quantization_skip)
        self.adapter = "rollout" if "rollout" not in taken else f"rollout_{len(taken)}"
        """Name of the engine's adapter in ``transformer``."""
        attach_lora(self.transformer, model, lora, dtype=dtype, device=self._device, adapter=self.adapter)
        layers = linear_layers(self.transformer)
        self._base: dict[str, Tensor] | None = None  # Weights that the adapter is added to
        if merge_adapter:
            adapted = target_layers(self.transformer, model, lora)
            self._base = {name: layers[name].weight.detach() for name in adapted}
        self._quantization = quantization
        self._rounded = rounded & set(self._base or ())  # Layers that are rounded with each adapter
        self._round([layers[name] for name in rounded - self._rounded])
        # The engine never learns, and gradients of its adapter would go to the optimizer.
        self.transformer.requires_grad_(False).eval()
        # An actor beside the engine compiles the blocks that they share.
        if torch_compile and (alone or not self._shares):
            model.compile_blocks(self.transformer, COMPILE_BACKEND)
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
            quantization_skip=config.quantization_skip,
            merge_adapter=config.merge_adapter,
            torch_compile=config.torch_compile,
            attn_backend=config.rollout_attn_backend,
            gather_weights=config.gather_weights,
            alone=alone,
            cache=config.cache,
        )

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Copy the actor's adapter into the engine's, rounding to its dtype, and through fp8 where that is emulated. It
        is added to the weights with ``merge_adapter``.

        Returns the digest of the weights that the transformer then has.

        Raises:
            AdapterMismatchError: some tensor does not bind; the engine keeps what it had.
        """
        load_adapter_state(self.transformer, state, self.adapter)
        if self._rounds_adapter:
            round_adapter(self.transformer, self.adapter)
        if self._base is not None:
            layers = linear_layers(self.transformer)
            for name, weight in self._base.items():
                merge_into_weights(self.transformer, self.adapter, {name: weight})
                # One by one: all of them unrounded would be more memory than a plan counts.
                if name in self._rounded:
                    self._round([layers[name]])
        self.adapter_version = version
        return self._held_digest()

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded as ``sync`` rounds it."""
        here = {name: tensor.to(self._device) for name, tensor in state.items()}
        return _digest_of(here, self._dtype, self._rounds_adapter)

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
        # A compiled one multiplies as its compiler does.
        plain = self._shares or self._compiles
        linear = nullcontext() if plain else wide_linear.linear_layers(self._dtype, self._device)
        # An actor's blocks may be compiled. Compiling them again for the engine's shapes would cost minutes.
        stance = torch.compiler.set_stance("default" if self._compiles else "force_eager")
        adapter = self.adapter if self._base is None else None
        with adapter_active(self.transformer, adapter), stance, gathered, linear, sampler.cache:
            for rows in micro_batches(request, self._micro_batch_size):
                images, steps = sampler.sample(rows)
                sampled.append((images, steps))
                if request.on_images is not None:
                    request.on_images(rows, images)
        record = {name: torch.cat([part[name] for _, part in sampled]) for name in sampled[0][1]}
        # Read from the weights after drawing, so that a change meanwhile is noticed.
        echo = sampler.echo(adapter_version=self.adapter_version, adapter_digest=self._held_digest())
        return Trajectories(torch.cat([images for images, _ in sampled]), batch_of(record, request), echo)

    def _round(self, layers: Sequence[nn.Linear]) -> None:
        if self._quantization is not None and layers:
            round_layers(layers, self._quantization)

    def _held_digest(self) -> str:
        return self._digest(adapter_parameters(self.transformer, self.adapter))


def digest_rule(config: RolloutConfig, lora: ModelConfig) -> Callable[[Mapping[str, Tensor]], str]:
    """``DiffusersEngine.digest_of`` of an engine with these settings on a device like this machine's."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rounded = on_device(config.quantization, here) == EMULATED and not config.merge_adapter
    return partial(_digest_of, dtype=torch_dtype(config.dtype), rounded=rounded)


def _digest_of(state: Mapping[str, Tensor], dtype: torch.dtype, rounded: bool) -> str:
    """The digest of ``state`` rounded as ``sync`` rounds it, computed on its device."""
    held = {name: tensor.detach().to(dtype) for name, tensor in state.items()}
    if rounded:
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
