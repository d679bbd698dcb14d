"""A digest of an adapter: equal exactly when names, dtypes, shapes and bits are."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def adapter_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors in the order of their names, wherever they lie; 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        # The header keeps apart what has equal bytes: a transposed matrix, or another dtype.
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
