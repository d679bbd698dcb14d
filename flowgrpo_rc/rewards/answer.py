"""What a reward function returned, checked and turned into scores and captions before anything uses it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.errors import AnswerError, shown

WANTED = "return one float per image, or (floats, info dict)"

CAPTIONS = "text"
"""The key of `info` whose strings caption the samples."""

TOTAL = "avg"
"""Where flow_grpo's `multi_score` puts the sum in its dict of scores."""


def read_answer(name: str, answer: Any, prompts: Sequence[str]) -> tuple[np.ndarray, dict[str, list[Any]]]:
    """The scores, (N,) float32, and the info of a reward function's answer.

    Numbers may come as a list, a numpy array, a torch tensor of any device, dtype and gradient, a pandas series, or a
    list of zero-dimensional tensors. flow_grpo's `({"avg": total, "part": ...}, {})` counts with its total.

    Args:
        name: of the function, for messages.
        answer: what it returned.
        prompts: the N prompts that were scored.

    Raises:
        AnswerError: anything else, a wrong length, or a score that is not finite; names function, value and remedy.
    """
    scores, info = _split(name, answer)
    values = _real(name, scores)
    if values.shape != (len(prompts),):
        raise AnswerError(
            f"reward function {name!r} returned scores of shape {values.shape}, expected ({len(prompts)},): "
            "one float per image"
        )
    _check_finite(name, values, prompts)
    return values.astype(np.float32), _info(name, info, len(prompts))


def _split(name: str, answer: Any) -> tuple[Any, Mapping[Any, Any]]:
    pair = isinstance(answer, tuple) and len(answer) == 2
    if not (pair and isinstance(answer[1], Mapping)):
        return answer, {}
    scores, info = answer
    if isinstance(scores, Mapping) and TOTAL in scores:
        parts = {key: value for key, value in scores.items() if key != TOTAL}
        return scores[TOTAL], {**parts, **info}
    return scores, info


# ---------------------------------------------------------------------- scores


def _real(name: str, scores: Any) -> np.ndarray:
    """`scores` as real numbers, of whatever shape they have."""
    kind = type(scores).__name__
    if scores is None or isinstance(scores, (str, bytes, Mapping, Set, Iterator)):
        got = "None" if scores is None else kind
        raise AnswerError(f"reward function {name!r} returned {got}; {WANTED}")
    try:
        values = _array(scores)
    except (TypeError, ValueError, OverflowError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise AnswerError(
            f"reward function {name!r} returned {kind} that does not convert to floats ({reason}); {WANTED}"
        ) from error
    if values.dtype.kind not in "biuf":
        raise AnswerError(
            f"reward function {name!r} returned {kind} that does not convert to floats (its type is "
            f"{values.dtype}); {WANTED}"
        )
    return values if values.dtype.kind == "f" else values.astype(np.float64)


def _array(scores: Any) -> np.ndarray:
    if _is_tensor(scores):
        return _from_tensor(scores)
    if isinstance(scores, np.ma.MaskedArray):
        hidden = int(np.ma.getmaskarray(scores).sum())
        if hidden:
            raise ValueError(f"{hidden} of its values are masked")
        return np.asarray(scores.data)
    if isinstance(scores, Sequence) and not hasattr(scores, "__array__"):
        return np.asarray([_entry(index, value) for index, value in enumerate(scores)])
    values = np.asarray(scores)
    if values.dtype == object and values.ndim == 1:
        return np.asarray([_entry(index, value) for index, value in enumerate(values)])
    return values


def _entry(index: int, value: Any) -> Any:
    """One entry of a list: a number, or an array that the shape check will judge."""
    if _is_tensor(value):
        return _from_tensor(value)
    if isinstance(value, (Real, Decimal, np.bool_)):
        return float(value)
    if isinstance(value, (np.ma.core.MaskedConstant, complex)):
        raise TypeError(f"its entry {index} is {value!r}")
    if isinstance(value, (list, tuple)):
        return np.asarray([_entry(index, inner) for inner in value])
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    kind = "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
    raise TypeError(f"its entry {index} is {kind}")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_tensor(tensor: Any) -> np.ndarray:
    if tensor.is_complex():
        raise TypeError(f"its type is {tensor.dtype}")
    dense = tensor.detach()
    if dense.is_quantized:
        dense = dense.dequantize()
    return dense.to("cpu").double().numpy().copy()


def _check_finite(name: str, values: np.ndarray, prompts: Sequence[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        first = int(bad[0])
        raise AnswerError(
            f"reward function {name!r} returned {bad.size} non-finite of {values.size} scores; the first is "
            f"{values[first]} for sample {first}, prompt {shown(prompts[first])}"
        )
    large = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if large.size:
        first = int(large[0])
        raise AnswerError(
            f"reward function {name!r} returned {large.size} of {values.size} scores beyond float32's largest "
            f"number, 3.4e38; the first is {values[first]} for sample {first}, prompt {shown(prompts[first])}: scale "
            "them down"
        )


# ---------------------------------------------------------------------- info


def _info(name: str, info: Mapping[Any, Any], count: int) -> dict[str, list[Any]]:
    return {_key(name, key): _per_image(name, key, value, count) for key, value in info.items()}


def _key(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise AnswerError(f"reward function {name!r} returned info with the key {shown(key)}; its keys must be strings")
    return key


def _per_image(name: str, key: str, value: Any, count: int) -> list[Any]:
    """One entry of `info` as a list of its own, which the function can no longer change."""
    entries = value.detach().to("cpu") if _is_tensor(value) else value
    listed = hasattr(entries, "__len__") and hasattr(entries, "__getitem__")
    scalar = getattr(entries, "ndim", 1) == 0
    if not listed or scalar or isinstance(entries, (str, bytes, Mapping)):
        raise AnswerError(
            f"reward function {name!r} returned info[{shown(key)}] of type {type(value).__name__}; give a list with "
            f"one entry for each of the {count} images"
        )
    entries = entries.tolist() if hasattr(entries, "tolist") else list(entries)
    if len(entries) != count:
        raise AnswerError(
            f"reward function {name!r} returned info[{shown(key)}] with {len(entries)} entries for {count} images; "
            "give one entry for each image"
        )
    wrong = [index for index, entry in enumerate(entries) if key == CAPTIONS and not isinstance(entry, str)]
    if wrong:
        raise AnswerError(
            f"reward function {name!r} returned info[{shown(key)}][{wrong[0]}] = {shown(entries[wrong[0]])}; it "
            "captions the samples, so every entry must be a string"
        )
    return entries
