"""The adapter inside vllm-omni's worker: tensors in, bound layers, and what those layers hold read back."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.vllm_omni.adapter import AdapterPush, engine_module, pairs, unpaired

ANY_PATH = "/"
"""vllm insists on an existing path for every adapter and would ask the hub otherwise; nothing is read from it."""


class TensorLoRARequest(LoRARequest):
    """A LoRA whose weights come with the request."""

    push: AdapterPush | None = None


def lora_request(adapter_id: int, push: AdapterPush | None = None) -> LoRARequest:
    """The request that adds an adapter, or without ``push`` the one that samples with it."""
    name = f"flowgrpo-{adapter_id}"
    if push is None:
        return LoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=ANY_PATH)
    return TensorLoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=ANY_PATH, push=push)


def load_adapter(transformer: nn.Module, request: LoRARequest, dtype: torch.dtype) -> tuple[LoRAModel, PEFTHelper]:
    """What vllm-omni's hook ``_load_diffusion_lora_adapter`` must return; vllm scales B in place, so all is copied.

    Raises:
        AdapterMismatchError: the adapter was never pushed, or has half a pair.
    """
    push = getattr(request, "push", None)
    if push is None:
        raise AdapterMismatchError(f"adapter {request.lora_int_id} is not in the engine any more: call sync() again")
    layers = {}
    present = dict(transformer.named_modules())
    for module, (a, b) in pairs(push.state).items():
        name = engine_module(module, present)
        layers[name] = LoRALayerWeights(name, push.rank, push.alpha, a.to(dtype, copy=True), b.to(dtype, copy=True))
    helper = PEFTHelper(r=push.rank, lora_alpha=push.alpha, target_modules=list(layers))
    return LoRAModel(request.lora_int_id, push.rank, layers), helper


def held_adapter(manager: Any, push: AdapterPush) -> dict[str, Tensor]:
    """The active adapter out of the layers' own buffers, named as the actor names it.

    Raises:
        AdapterMismatchError: a pushed module is bound to no layer, a layer holds what was not pushed, or a buffer holds
            more than the rank that was.
    """
    present = dict(manager.pipeline.transformer.named_modules())
    names = {engine_module(m, present): m for m in pairs(push.state)}
    held: dict[str, tuple[Tensor, Tensor]] = {}
    aliases: list[tuple[str, Any, Tensor, Tensor]] = []
    layers = {full_name.split(".", 1)[1]: layer for full_name, layer in manager._lora_modules.items()}
    for module, layer in layers.items():
        for engine_name, slices in _slices(manager, module, layer):
            if not any(layer._diffusion_lora_active_slices[i] for i in slices):
                continue
            wide_a = [layer.lora_a_stacked[i][0, 0] for i in slices]
            wide_b = torch.cat([layer.lora_b_stacked[i][0, 0] for i in slices])
            # vllm's buffers have room for the largest rank; a smaller adapter leaves the rest at 0.
            if any(bool(a[push.rank :].any()) for a in wide_a) or bool(wide_b[:, push.rank :].any()):
                raise AdapterMismatchError(f"{module}: the engine's buffer holds a rank above {push.rank}")
            if not all(torch.equal(a, wide_a[0]) for a in wide_a):
                raise AdapterMismatchError(f"{module}: the engine holds different A matrices for one layer's slices")
            a = wide_a[0][: push.rank]
            b = wide_b[:, : push.rank]
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
    # vllm-omni's model has its entry layer under two names, and wraps it under both.
    for engine_name, base, a, b in aliases:
        twin = next((n for n in names if n in layers and layers[n].base_layer is base), None)
        if twin is None or not (torch.equal(held[names[twin]][0], a) and torch.equal(held[names[twin]][1], b)):
            raise AdapterMismatchError(f"the adapter does not bind: vllm-omni applies it to {engine_name} as well")
    return unpaired(held)


def _slices(manager: Any, module: str, layer: Any) -> list[tuple[str, list[int]]]:
    """What a layer computes, with the slices that are of it: itself, or the projections that vllm-omni fuses into it.

    A layer of several slices that is one in the adapter too has the same A for all, and its B is cut along them.
    """
    count = getattr(layer, "n_slices", 1)
    prefix, _, suffix = module.rpartition(".")
    parts = None if count == 1 else manager._get_packed_sublayer_suffixes(suffix, count)
    if parts is None:
        return [(module, list(range(count)))]
    return [(f"{prefix}.{part}", [i]) for i, part in enumerate(parts)]


class RolloutWorker(CustomPipelineWorkerExtension):
    """Methods that vllm-omni mixes into its worker; the server calls them through ``collective_rpc``."""

    model_runner: Any
    lora_manager: Any

    def flowgrpo_prepare(self, vae_dtype: str, batch_guidance: bool) -> None:
        """Once, after loading."""
        self.model_runner.pipeline.prepare(vae_dtype, batch_guidance, self.lora_manager)

    def flowgrpo_activate(self, request: Any) -> None:
        """Bind an adapter to the layers now: vllm-omni would do it, and find out that it cannot, at the first image."""
        self.lora_manager.set_active_adapter(request, 1.0)

    def flowgrpo_held(self, push: AdapterPush) -> tuple[int | None, str]:
        """Which adapter is active, and the digest of what the layers hold of it."""
        return self.lora_manager._active_adapter_id, adapter_digest(held_adapter(self.lora_manager, push))
