"""A digest of an adapter: equal exactly when names, dtypes, shapes and bits are."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def adapter_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors, on one device, in the order of their names; 64 hexadecimal digits."""
    # Distinguishes states with equal bytes, such as a transposed matrix or another dtype. No line of it is empty, so
    # that an empty one ends it.
    header = "".join(f"{name} {state[name].dtype} {tuple(state[name].shape)}\n" for name in sorted(state))
    digest = hashlib.sha256(f"{header}\n".encode())
    # Bytes, because NaN differs from itself and -0 equals 0 as numbers. Concatenated on the device, so that they reach
    # the host in one transfer.
    flat = [state[name].detach().reshape(-1).view(torch.uint8) for name in sorted(state)]
    bits = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    digest.update(bits.cpu().numpy().data)
    return digest.hexdigest()
