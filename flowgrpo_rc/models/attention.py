"""Attention backends of diffusers, tried on this machine before a model is loaded.

The names are a torch-free table. A trial on a tensor of a few kilobytes shows that a backend works on this device, in
this precision and with a gradient. Importing this loads no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.registry import FAMILIES

if TYPE_CHECKING:
    import torch

NATIVE = "native"
"""torch's ``scaled_dot_product_attention``, which chooses a kernel itself: diffusers' default, on every device."""
ATTENTION_BACKENDS = (
    *(NATIVE, "_native_math", "_native_efficient", "_native_flash", "_native_cudnn", "_native_npu", "_native_xla"),
    *("flash", "flash_hub", "flash_varlen", "flash_varlen_hub", "flash_4_hub"),
    *("_flash_3", "_flash_3_hub", "_flash_varlen_3", "_flash_3_varlen_hub"),
    *("sage", "sage_hub", "sage_varlen", "_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90"),
    *("_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton"),
    *("aiter_fa2_hub", "flex", "xformers"),
)
"""The names of diffusers' ``AttentionBackendName``."""
LARGEST_ERROR = 0.1
"""Largest relative error, in the Euclidean norm, of a backend's output and gradients against ``NATIVE`` in float32.
8-bit attention stays within a few per cent; one that drops the mask or mixes up dimensions is off by more than this."""
USUAL_HEAD = 64
"""Size of an attention head where a model's configuration does not tell."""


def check_attention_backend(
    field: str, name: str | None, pipeline_class: str, *, folder: str, dtype: torch.dtype, device: Any, trains: bool
) -> None:
    """Make sure that the transformers of a pipeline class can compute with the backend ``name``; loads no model.

    Attention of a few tokens is computed with it on ``device`` in ``dtype``, with a mask where the family has one, and
    compared with ``NATIVE`` in float32; where the backend ``trains``, so are the gradients. Null, the family's own way,
    is not tried. The configuration in the pipeline's ``folder`` holds the size of a head.

    Raises:
        ValueError: the family has one way to compute attention, or the backend does not work here: a package or a GPU
            is missing, or it has no gradient, no mask or not this precision. Names ``field``, fault and remedy.
    """
    if name is None:
        return
    family = FAMILIES[pipeline_class]
    if not family.dispatches_attention:
        if name != NATIVE:
            raise ValueError(
                f"{field}: got {name}, but the transformer of a {pipeline_class} computes attention in one way, by "
                "torch's scaled_dot_product_attention; set it to null"
            )
        return
    # A backend may work without a mask and fail with one.
    adapter = resolve_name(family.adapter)
    masks = adapter.masks_prompts or adapter.masks_attention
    file = Path(folder) / "transformer" / "config.json"
    # A pipeline on the hub has no folder yet.
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    fault = _fault(name, config.get("attention_head_dim") or USUAL_HEAD, masks, dtype, device, trains)
    if fault:
        how = " with a mask" * masks + " and a gradient" * trains
        raise ValueError(
            f"{field}: got {name}, which does not compute attention{how} on {device} in "
            f"{str(dtype).removeprefix('torch.')} ({fault}). Provide what it needs, or set it to {NATIVE}, which works "
            "everywhere"
        )


def use_attention_backend(transformer: Any, name: str | None) -> None:
    """Have every attention layer of ``transformer``, and of no other network, compute with the backend ``name``."""
    if name is None:
        return
    from diffusers.models.attention_dispatch import attention_backend

    from flowgrpo_rc.quiet import only_errors

    # diffusers also makes the name the default of the whole process; leaving the context takes that back.
    # Restricted to this transformer, so that engine and actor can differ.
    with attention_backend(name), only_errors("diffusers.models.modeling_utils"):
        transformer.set_attention_backend(name)


def kernels_in_words(name: str | None, head: int | None, masks: bool, dtype: torch.dtype, device: torch.device) -> str:
    """A transformer's attention, and a GPU's products of float32, in words: ``attention by native (flash), ...``.

    Args:
        name: ``model.attn_backend``. ``NATIVE`` is followed by the kernel that torch chooses with a gradient, for a few
            tokens; others may have another one.
        head: size of an attention head; ``None`` if the configuration does not tell.
        masks: attention takes a mask.
        dtype: of queries, keys and values.
        device: where it computes.
    """
    import torch
    from torch.nn.attention import SDPBackend

    words = name or NATIVE
    if words == NATIVE:
        query = torch.zeros(1, 2, 24, head or USUAL_HEAD, dtype=dtype, device=device).requires_grad_()
        mask = torch.ones(1, 1, 1, 24, dtype=torch.bool, device=device) if masks else None
        # SDPBackend's names end alike.
        chosen = SDPBackend(torch._fused_sdp_choice(query, query, query, attn_mask=mask)).name
        words += f" ({chosen.removesuffix('_ATTENTION').lower()})"
    if device.type != "cuda":
        return f"attention by {words}"
    products = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    return f"attention by {words}, products of float32 in {products}"


def _fault(name: str, head: int, masks: bool, dtype: torch.dtype, device: Any, trains: bool) -> str:
    """Fault of a backend on this machine; empty without one."""
    import torch

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 2, 24, 2, head, generator=generator)
    # The second sequence is shorter, as a shorter prompt's is.
    mask = (torch.arange(24) < torch.tensor([[24], [17]]))[:, None, None] if masks else None
    try:
        found = _attend(values.to(device, dtype), mask, name, trains)
    except Exception as error:  # each backend has errors of its own
        return one_line(error, 300)
    names = ("the output", "the gradient of the queries", "of the keys", "of the values")
    for what, one, exact in zip(names, found, _attend(values, mask, NATIVE, trains), strict=False):
        error = float(torch.linalg.vector_norm(one.float().cpu() - exact) / torch.linalg.vector_norm(exact))
        if not error <= LARGEST_ERROR:  # NaN is a fault too
            return f"{what} is off by {error:.0%}"
    return ""


def _attend(values: torch.Tensor, mask: torch.Tensor | None, name: str, trains: bool) -> list[torch.Tensor]:
    """The attention of queries, keys and values ``(3, B, T, heads, head)``, with ``trains`` also their gradients."""
    import torch
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    # Leaves of their own, cut from the mask's and the caller's.
    parts = [part.clone().requires_grad_(trains) for part in values]
    with torch.set_grad_enabled(trains), attention_backend(name):
        out = dispatch_attention_fn(*parts, attn_mask=None if mask is None else mask.to(values.device))
    if not trains:
        return [out]
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), parts)]
