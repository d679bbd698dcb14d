"""Count bytes of live tensors and floating-point operations, by stretches of time.

Under torch's fake tensors, which have shapes and no values, this measures a step of a model of any size without its
memory and its time. Around a real step it counts the same tensors.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class Stretch:
    """A contiguous part of a run under one label."""

    label: Any  # Argument of ``LiveBytes.enter``
    peak: int  # Most bytes alive at a time
    flops: int = 0
    """Floating-point operations of matrix products, attention and convolutions; a multiply-add counts as two."""
    recorded_flops: int = 0  # Operations with gradients enabled. Within a backward pass these are the recomputed ones.


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered (``with LiveBytes(...) as live:``).

    A storage counts from the operation that makes it until its last reference is gone, as in an allocator without
    fragmentation. Memory inside kernels is not seen.

    Args:
        resident: tensors not to count, such as the weights.
    """

    def __init__(self, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self.stretches = [Stretch(label=None, peak=0)]
        """Stretches so far, in order."""
        # By the address of the storage's own object; the storages are held, so that no new one gets the same address.
        self._resident = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in resident)}
        self._counted: dict[int, int] = {}

    @property
    def peak(self) -> int:
        """Most bytes alive at a time, over all stretches."""
        return max(stretch.peak for stretch in self.stretches)

    def enter(self, label: Any) -> None:
        """Begin another stretch, unless the label is the present one."""
        if self.stretches[-1].label != label:
            self.stretches.append(Stretch(label, self.live))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Tensors are counted after the operation: an in-place result is already known.
        out = func(*args, **kwargs)
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        flops = _flops(func._overloadpacket, args, kwargs, out)
        self.stretches[-1].flops += flops
        # Checkpointing recomputes with gradients, a plain backward runs without.
        if torch.is_grad_enabled():
            self.stretches[-1].recorded_flops += flops
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._resident or key in self._counted:
            return
        self._counted[key] = storage.nbytes()
        self.live += self._counted[key]
        self.stretches[-1].peak = max(self.stretches[-1].peak, self.live)
        # The storage must not be kept alive by being counted.
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._counted.pop(key)


def _flops(operation: Any, args: Any, kwargs: Any, out: Any) -> int:
    # torch's table has the attention kernels of GPUs alone.
    if operation is _ATTENTION:
        query, key, value = args[:3]
        return sdpa_flop_count(query.shape, _per_head(key, query), _per_head(value, query))
    if operation is _ATTENTION_BACKWARD:
        gradient, query, key, value = args[:4]
        return sdpa_backward_flop_count(gradient.shape, query.shape, _per_head(key, query), _per_head(value, query))
    if operation in flop_registry:
        return flop_registry[operation](*args, **kwargs, out_val=out)
    return 0


def _per_head(shared: Tensor, query: Tensor) -> torch.Size:
    """The shape of keys or values, one for each head of the query: torch before 2.12 counts no shared ones (GQA)."""
    return torch.Size((shared.shape[0], query.shape[1], *shared.shape[2:]))
