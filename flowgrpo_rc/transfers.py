"""Copies between the host and an accelerator that wait for the accelerator at most once.

A copy to or from ordinary host memory waits until everything that was queued on the accelerator before it is done. One
to it from page-locked ("pinned") memory is queued like a computation, and of many tensors copied back one by one each
is a wait. On a machine without an accelerator nothing is copied.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def indexed(device: Any) -> torch.device:
    """``device`` with the number of the current CUDA device where it has none, so that other threads, which have a
    current device of their own, take the same one."""
    named = torch.device(device)
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. A copy to a CUDA device is queued and not waited for; the caller may drop ``tensor``,
    whose page-locked copy torch keeps until it is read."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # A copy from ordinary memory would wait for everything queued on the device.
    return tensor.pin_memory().to(device, non_blocking=True)


def queued_to_host(tensor: Tensor) -> Tensor:
    """``tensor`` on the host, detached. A copy from a CUDA device is queued: its numbers are there once the host has
    waited for the device, as it does in ``to_host``."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host by their names, detached, of one device and any dtypes: one transfer for each dtype.

    Those that are on the host already are handed on as they are; the others become views of one block for each dtype.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return {name: tensor.detach() for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        part = {name: tensor.detach() for name, tensor in tensors.items() if tensor.dtype == dtype}
        # One block for each dtype: a copy per tensor would be a wait per tensor.
        flat = torch.cat([tensor.reshape(-1) for tensor in part.values()])
        host = torch.empty(flat.shape, dtype=dtype, pin_memory=flat.is_cuda)
        pieces = host.copy_(flat).split([tensor.numel() for tensor in part.values()])
        found |= {name: piece.view(part[name].shape) for name, piece in zip(part, pieces, strict=True)}
    return {name: found[name] for name in tensors}
