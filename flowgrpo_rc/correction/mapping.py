"""Reading tensors by name from a dict, a ``TensorDict`` or an object that holds one. Every error names the key."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor


@runtime_checkable
class TensorMapping(Protocol):
    """A dict of tensors, a ``TensorDict``, or anything else with keys."""

    def keys(self) -> Any: ...
    def __getitem__(self, name: str, /) -> Any: ...


@runtime_checkable
class BatchHolder(Protocol):
    """An object with its tensors in ``.batch``, such as verl's ``DataProto``."""

    @property
    def batch(self) -> Any: ...


def as_mapping(batch: object) -> TensorMapping:
    """The mapping inside: ``batch.batch`` where there is one, else the batch itself.

    Raises:
        ValueError: neither is a mapping.
    """
    for data in (None if isinstance(batch, Mapping) else getattr(batch, "batch", None), batch):
        if isinstance(data, TensorMapping):
            return data
    raise ValueError(f"A {type(batch).__name__} is no batch: give a TensorDict, a dict, or an object with .batch.")


def optional(mapping: TensorMapping, name: str) -> Tensor | None:
    """The tensor of that name; ``None`` where it is absent or ``None``."""
    return mapping[name] if name in mapping.keys() else None  # noqa: SIM118  (a TensorDict refuses plain ``in``)


def response_mask(data: TensorMapping, log_prob: Tensor) -> Bool[Tensor, "B T"] | None:
    """Valid tokens, from a mask of any dtype; ``None`` on the diffusion path, which has no such key."""
    # SDE windows are dense, so that only tokens have a mask.
    mask = optional(data, "response_mask")
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape != log_prob.shape:
        raise ValueError(
            f"response_mask has shape {tuple(mask.shape)} and log_probs {tuple(log_prob.shape)}; "
            "on the token path both must be (B, T)"
        )
    return mask != 0
