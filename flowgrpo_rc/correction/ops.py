"""The kernel's operations under one set of names: numpy on host memory, torch on a device.

numpy's calls cost a third of torch's on small arrays and let several threads work on separate blocks of a large one.
Every operation writes into `out`; names and order of arguments are torch's.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch

_HOST_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_HOST_BITS = {torch.float32: np.int32, torch.float64: np.int64}

Array = Any
"""A numpy array or a tensor, whichever the operations work on."""

# From so many elements on numpy's one pass beats two calls that cost less.
_CLIP_FROM = 2048
_CHUNK = 512


def _comparison(compare: Any) -> Any:
    """0 and 1 into `out`, by way of booleans: numpy's comparisons into numbers are slow."""

    def into(x: Any, y: Any, out: Any) -> Any:
        np.copyto(out, compare(x, y))
        return out

    return staticmethod(into)


class HostOps:
    """numpy, for tensors on the CPU; arrays share the tensors' memory."""

    on_host = True
    sub, add, mul, div, bitwise_and = np.subtract, np.add, np.multiply, np.divide, np.bitwise_and
    abs, exp, expm1, neg = np.absolute, np.exp, np.expm1, np.negative
    maximum, minimum = np.maximum, np.minimum

    gt, lt, eq, ne = (_comparison(f) for f in (np.greater, np.less, np.equal, np.not_equal))

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._bits = _HOST_DTYPES[dtype], _HOST_BITS[dtype]

    def new(self, shape: tuple[int, ...]) -> Any:
        """Uninitialised, in the compute dtype."""
        return np.empty(shape, self._dtype)

    def bits(self, x: Any) -> Any:
        """The same memory as integers."""
        return x.view(self._bits)

    def number(self, value: float) -> Any:
        """A constant as the operations take it fastest, rounded to the compute dtype."""
        return self._dtype(value)

    @staticmethod
    def array(tensor: torch.Tensor) -> Any:
        """The tensor's memory; a converted copy of bfloat16, which numpy does not have."""
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        return (tensor.detach() if tensor.requires_grad else tensor).numpy()

    @staticmethod
    def ends(low: Any, high: Any) -> tuple[float, float]:
        """Smallest of `low` and largest of `high`."""
        return float(np.minimum.reduce(low)), float(np.maximum.reduce(high))

    @staticmethod
    def copy(x: Any, out: Any) -> Any:
        """Into `out`, converting."""
        np.copyto(out, x, casting="unsafe")
        return out

    @staticmethod
    def fill(out: Any, value: float) -> None:
        out.fill(value)

    @staticmethod
    def clamp(x: Any, low: Any, high: Any, out: Any) -> Any:
        """Bounds as numbers; the lower may be None."""
        if low is None:
            return np.minimum(x, high, out=out)
        if out.size > _CLIP_FROM:
            return x.clip(low, high, out=out)
        return np.minimum(np.maximum(x, low, out=out), high, out=out)

    @staticmethod
    def sum(x: Any, axis: int, out: Any) -> Any:
        if axis != 1 or x.ndim != 2 or x.shape[1] < 2 * _CHUNK:
            return np.add.reduce(x, axis, None, out)
        # einsum sums a row several times faster, if one after the other: in chunks, it is as accurate
        rows, columns = x.shape
        whole = columns - columns % _CHUNK
        chunks = np.empty((rows, columns // _CHUNK + 1), x.dtype)
        np.einsum("ijk->ij", x[:, :whole].reshape(rows, -1, _CHUNK), out=chunks[:, :-1])
        np.einsum("ij->i", x[:, whole:], out=chunks[:, -1])
        return np.add.reduce(chunks, 1, None, out)

    @staticmethod
    def amax(x: Any, axis: int, out: Any) -> Any:
        return np.maximum.reduce(x, axis, out=out)

    @staticmethod
    def amin(x: Any, axis: int, out: Any) -> Any:
        return np.minimum.reduce(x, axis, out=out)

    @staticmethod
    def transpose(x: Any) -> Any:
        return x.T

    @staticmethod
    def keep(mask: Any, keep: Any, out: torch.Tensor) -> None:
        """`mask * keep` in the dtype of `out`; `keep` holds 0 and 1. Without a mask `keep` alone."""
        if out.dtype == torch.bfloat16:
            out.copy_(torch.from_numpy(mask * keep))
        elif mask is None:
            np.not_equal(keep, 0.0, out=out.numpy())
        else:
            np.multiply(mask, keep, out=out.numpy(), casting="unsafe")


class DeviceOps:
    """torch, for tensors anywhere; nothing waits for the device."""

    on_host = False
    sub, add, mul, div, bitwise_and = torch.sub, torch.add, torch.mul, torch.div, torch.bitwise_and
    abs, exp, expm1, neg = torch.abs, torch.exp, torch.expm1, torch.neg
    gt, lt, eq, ne = torch.gt, torch.lt, torch.eq, torch.ne
    clamp, sum, amax, amin = torch.clamp, torch.sum, torch.amax, torch.amin
    transpose = torch.t

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._like, self._bits = torch.empty(0, dtype=dtype, device=device), _BITS[dtype]
        self._numbers: dict[float, torch.Tensor] = {}

    def new(self, shape: tuple[int, ...]) -> Any:
        """Uninitialised, in the compute dtype."""
        return self._like.new_empty(shape)

    def bits(self, x: Any) -> Any:
        """The same memory as integers."""
        return x.view(self._bits)

    def number(self, value: float) -> Any:
        """A constant as the operations take it fastest, rounded to the compute dtype: a tensor on the host."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = torch.tensor(value, dtype=self._like.dtype, device="cpu")
        return number

    @staticmethod
    def array(tensor: torch.Tensor) -> Any:
        return tensor.detach()

    @staticmethod
    def copy(x: Any, out: Any) -> Any:
        """Into `out`, converting."""
        return out.copy_(x)

    @staticmethod
    def fill(out: Any, value: float) -> None:
        out.fill_(value)

    @staticmethod
    def keep(mask: Any, keep: Any, out: torch.Tensor) -> None:
        """`mask * keep` in the dtype of `out`; `keep` holds 0 and 1. Without a mask `keep` alone."""
        if mask is None:
            torch.ne(keep.expand_as(out), 0.0, out=out)
        else:
            torch.mul(mask, keep if mask.dtype.is_floating_point else keep.to(mask.dtype), out=out)


Ops = Any
"""`HostOps` or `DeviceOps`: one protocol, which static types of ufuncs cannot express."""


@lru_cache(maxsize=16)
def ops_for(device: torch.device, dtype: torch.dtype) -> Ops:
    """The operations for tensors on `device`, computed in `dtype`."""
    return HostOps(dtype) if device.type == "cpu" else DeviceOps(dtype, device)


_CONSTANT = ("on_host", "new", "bits", "number", "array", "transpose")
"""What a tape leaves out: it only makes memory, or a view of some."""


class Tape:
    """Carries out the operations of `ops` and remembers them, to do the same on the same memory again.

    That leaves out whatever decided on them: on small arrays, most of the time.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)
        if name in _CONSTANT:
            return operation

        def record(*args: Any, **kwargs: Any) -> Any:
            self._steps.append((operation, args, kwargs))
            return operation(*args, **kwargs)

        return record

    def replay(self) -> None:
        for operation, args, kwargs in self._steps:
            operation(*args, **kwargs)
