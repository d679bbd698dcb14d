"""Adapters inside vllm-omni's worker: load tensors, bind them to layers, and read the layers back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.vllm_omni.adapter import engine_module, pairs, unpaired

ANY_PATH = "/"
"""vllm requires an existing path for every adapter, or else queries the hub; nothing is read from it."""


class TensorLoRARequest(LoRARequest):
    """A LoRA request that contains the weights, under the actor's names, and ``lora_alpha``."""

    state: Mapping[str, Tensor] | None = None
    alpha: int = 0


def lora_request(adapter_id: int, state: Mapping[str, Tensor] | None = None, alpha: int = 0) -> TensorLoRARequest:
    """The request that adds an adapter, or without ``state`` the one that samples with it."""
    name = f"flowgrpo-{adapter_id}"
    return TensorLoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=ANY_PATH, state=state, alpha=alpha)


def load_adapter(transformer: nn.Module, request: LoRARequest, dtype: torch.dtype) -> tuple[LoRAModel, PEFTHelper]:
    """The result of vllm-omni's hook ``_load_diffusion_lora_adapter``.

    Raises:
        AdapterMismatchError: the adapter was never pushed, or has half a pair.
    """
    state = getattr(request, "state", None)
    if state is None:
        raise AdapterMismatchError(f"adapter {request.lora_int_id} is not in the engine any more: call sync() again")
    layers = {}
    # Copies, since vllm scales B in place.
    present = dict(transformer.named_modules())
    pushed = pairs(state)
    rank = next(iter(pushed.values()))[0].shape[0]
    for module, (a, b) in pushed.items():
        name = engine_module(module, present)
        layers[name] = LoRALayerWeights(name, rank, request.alpha, a.to(dtype, copy=True), b.to(dtype, copy=True))
    helper = PEFTHelper(r=rank, lora_alpha=request.alpha, target_modules=list(layers))
    return LoRAModel(request.lora_int_id, rank, layers), helper


def held_adapter(manager: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The active adapter from the layers' own buffers, under the actor's names.

    With tensor parallelism every process of the group must call this, and each assembles all parts.

    Raises:
        AdapterMismatchError: a pushed module is bound to no layer, a layer holds what was not pushed, a buffer holds
            more than the rank that was, or a layer divides its matrices in a way that is not known here.
    """
    present = dict(manager.pipeline.transformer.named_modules())
    pushed = pairs(state)
    names = {engine_module(m, present): m for m in pushed}
    rank = next(iter(pushed.values()))[0].shape[0]
    held: dict[str, tuple[Tensor, Tensor]] = {}
    aliases: list[tuple[str, Any, Tensor, Tensor]] = []
    # The first part of a name is the component; only the transformer has adapters.
    layers = {full_name.split(".", 1)[1]: layer for full_name, layer in manager._lora_modules.items()}
    # Gather all before checking any: a process that raises half-way would leave the others waiting.
    whole = {module: _whole_matrices(module, layer) for module, layer in layers.items()}
    for module, layer in layers.items():
        all_a, all_b = whole[module]
        for engine_name, slices in _slices(manager, module, layer):
            # Slices without an adapter hold no part of it.
            if not any(layer._diffusion_lora_active_slices[i] for i in slices):
                continue
            wide_a = [all_a[i] for i in slices]
            wide_b = torch.cat([all_b[i] for i in slices])
            # vllm's buffers have the largest rank; a smaller adapter must leave the rest at 0.
            if any(bool(a[rank:].any()) for a in wide_a) or bool(wide_b[:, rank:].any()):
                raise AdapterMismatchError(f"{module}: the engine's buffer holds a rank above {rank}")
            if not all(torch.equal(a, wide_a[0]) for a in wide_a):
                raise AdapterMismatchError(f"{module}: the engine holds different A matrices for one layer's slices")
            a = wide_a[0][:rank]
            b = wide_b[:, :rank]
            if engine_name in names:
                held[names[engine_name]] = a, b
            else:
                aliases.append((engine_name, layer.base_layer, a, b))
    unbound = sorted(set(names.values()) - held.keys())
    if unbound:
        raise AdapterMismatchError(
            f"the adapter does not bind: {len(unbound)} of {len(names)} modules reach no layer of vllm-omni's model "
            f"(first: {unbound[0]})"
        )
    # vllm-omni's model has its entry layer under two names, and wraps both.
    for engine_name, base, a, b in aliases:
        twin = next((n for n in names if n in layers and layers[n].base_layer is base), None)
        if twin is None or not (torch.equal(held[names[twin]][0], a) and torch.equal(held[names[twin]][1], b)):
            raise AdapterMismatchError(f"the adapter does not bind: vllm-omni applies it to {engine_name} as well")
    return unpaired(held)


def _whole_matrices(module: str, layer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The A and the B matrix of each slice of a layer, which tensor parallelism divides like the layer's own weight:
    B by its rows where outputs are divided, A by its columns where inputs are.

    Raises:
        AdapterMismatchError: the layer divides them otherwise.
    """
    all_a = [a[0, 0] for a in layer.lora_a_stacked]
    all_b = [b[0, 0] for b in layer.lora_b_stacked]
    base = layer.base_layer
    if getattr(layer, "tp_size", 1) == 1 or isinstance(base, ReplicatedLinear):
        return all_a, all_b
    group = get_tp_group()
    if isinstance(base, RowParallelLinear):
        return [group.all_gather(a.contiguous(), dim=1) for a in all_a], all_b
    # Several outputs in one slice are divided one by one, and heads may be there more than once.
    fused = isinstance(base, MergedColumnParallelLinear | QKVParallelLinear) and len(all_b) == 1
    if fused or getattr(base, "num_kv_head_replicas", 1) > 1 or not isinstance(base, ColumnParallelLinear):
        raise AdapterMismatchError(
            f"{module}: how vllm-omni divides the adapter of a {type(base).__name__} over {layer.tp_size} GPUs cannot "
            "be read back, so nothing would prove what it samples with; name one GPU for each engine in "
            "actor_rollout_ref.rollout.devices"
        )
    return all_a, [group.all_gather(b.contiguous(), dim=0) for b in all_b]


def held_by_all(manager: Any, state: Mapping[str, Tensor]) -> tuple[int | None, str]:
    """The active adapter's id and the digest of ``held_adapter``, checked to be equal in all processes of this engine.

    Raises:
        AdapterMismatchError: see ``held_adapter``; or they hold different adapters.
    """
    # Collected instead of raised, so that every process reaches the gather below.
    mine: tuple[int | None, str, str]
    try:
        mine = manager._active_adapter_id, adapter_digest(held_adapter(manager, state)), ""
    except AdapterMismatchError as error:
        mine = None, "", str(error)
    group = get_tp_group()
    found = [mine] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    for _, _, fault in found:
        if fault:
            raise AdapterMismatchError(fault)
    if len(set(found)) > 1:
        raise AdapterMismatchError("the GPUs of one vllm-omni engine hold different adapters")
    return mine[:2]


def _slices(manager: Any, module: str, layer: Any) -> list[tuple[str, list[int]]]:
    """The layers of the adapter that a layer of vllm-omni computes, each with its slices: the layer itself, or the
    projections that vllm-omni fuses into it."""
    # A layer of several slices that is one layer of the adapter has the same A for all, and its B is cut along them.
    count = getattr(layer, "n_slices", 1)
    prefix, _, suffix = module.rpartition(".")
    parts = None if count == 1 else manager._get_packed_sublayer_suffixes(suffix, count)
    if parts is None:
        return [(module, list(range(count)))]
    return [(f"{prefix}.{part}", [i]) for i, part in enumerate(parts)]


class RolloutWorker(CustomPipelineWorkerExtension):
    """Methods of vllm-omni's worker that the server calls through ``collective_rpc``."""

    model_runner: Any
    lora_manager: Any

    def flowgrpo_prepare(self, vae_dtype: str, batch_guidance: bool, tea_cache: str | None = None) -> None:
        """Prepare the pipeline once, after loading. Raises ``RuntimeError`` if blocks that were to be compiled are not:
        vllm-omni would say so in its log, and go on."""
        asked = not self.model_runner.od_config.enforce_eager
        blocks = self.model_runner.pipeline.transformer.modules()
        if asked and not any(hasattr(block.forward, "_torchdynamo_orig_callable") for block in blocks):
            raise RuntimeError(
                "actor_rollout_ref.rollout.torch_compile: got true, but vllm-omni has compiled no block of this "
                "transformer; its log says why. Set it to false"
            )
        self.model_runner.pipeline.prepare(vae_dtype, batch_guidance, tea_cache, self.lora_manager)

    def flowgrpo_activate(self, request: Any) -> None:
        """Bind an adapter to the layers now; vllm-omni would bind it, and fail, at the first image only."""
        self.lora_manager.set_active_adapter(request, 1.0)

    def flowgrpo_held(self, state: Mapping[str, Tensor]) -> tuple[int | None, str]:
        """The active adapter's id, and the digest of the layers' values."""
        return held_by_all(self.lora_manager, state)
