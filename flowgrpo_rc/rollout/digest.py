"""A digest of an adapter: equal exactly when names, dtypes, shapes and bits are."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from flowgrpo_rc.models.lora import ACTOR_ADAPTER, AdapterMismatchError
from flowgrpo_rc.transfers import to_host

_A = f".lora_A.{ACTOR_ADAPTER}.weight"
_B = f".lora_B.{ACTOR_ADAPTER}.weight"


def adapter_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors, on one device, in the order of their names; 64 hexadecimal digits."""
    # Concatenated on the device, so that they reach the host in one transfer.
    return _digest(_header(state), _bits(state))


class HeldDigest:
    """``adapter_digest`` with a cache: recomputed only if the adapter has changed.

    Names, dtypes and shapes are compared, and every bit with a copy on the adapter's device. So the result is always
    that of ``adapter_digest``, and an unchanged adapter costs one comparison on the device instead of a transfer and a
    hash on the host.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, Tensor, str] = b"", torch.empty(0, dtype=torch.uint8), ""

    def __call__(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` as it is now."""
        header = _header(state)
        bits = _bits(state)
        known_header, known_bits, digest = self._known
        if not (header == known_header and bits.device == known_bits.device and torch.equal(bits, known_bits)):
            digest = _digest(header, bits)
            self._known = header, bits, digest
        return digest


def _header(state: Mapping[str, Tensor]) -> bytes:
    """Distinguishes states with equal bytes, such as a transposed matrix or another dtype."""
    return "".join(f"{name} {state[name].dtype} {tuple(state[name].shape)}\n" for name in sorted(state)).encode()


def _bits(state: Mapping[str, Tensor]) -> Tensor:
    """All bytes in the order of the names; a copy on the tensors' device."""
    # Bytes, because NaN differs from itself and -0 equals 0 as numbers.
    flat = [state[name].detach().reshape(-1).view(torch.uint8) for name in sorted(state)]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _digest(header: bytes, bits: Tensor) -> str:
    digest = hashlib.sha256(header + b"\n")  # no line of the header is empty, so this one ends it
    # The only transfer of a digest.
    digest.update(bits.cpu().numpy().data)
    return digest.hexdigest()


def as_held(state: Mapping[str, Tensor], dtype: torch.dtype, scaling: float) -> dict[str, Tensor]:
    """``state`` as vllm's layers hold it: in their dtype, with ``alpha / rank`` multiplied into the B matrices."""
    # Rounded first and scaled then, as vllm does; the other order differs in the last bit.
    rounded = {name: tensor.to(dtype) for name, tensor in to_host(state).items()}
    return rounded | {name: tensor * scaling for name, tensor in rounded.items() if name.endswith(_B)}


def pairs(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """``{module: (A, B)}`` under the actor's names."""
    modules = sorted({name.removesuffix(_A).removesuffix(_B) for name in state})
    # Half a pair would bind silently as a zero matrix.
    absent = [m + ending for m in modules for ending in (_A, _B) if m + ending not in state]
    if absent:
        raise AdapterMismatchError(f"the adapter does not bind: {absent[0]} is missing")
    return {m: (state[m + _A], state[m + _B]) for m in modules}


def unpaired(held: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The inverse of ``pairs``."""
    return {m + ending: t for m, ab in held.items() for ending, t in zip((_A, _B), ab, strict=True)}
