"""Checks of a reward function's answer, which becomes scores and captions."""

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rewards.errors import AnswerError, brief_repr
from flowgrpo_rc.rewards.registry import METRIC_NAME

WANTED = "return one float per image, or (floats, info dict)"

Scores = tuple[np.ndarray, dict[str, list[Any]]]
"""Scores of some images, and the info beside them: lists with an entry for each image."""
CAPTIONS = "text"
"""The key of ``info`` whose strings caption the samples."""
PARTS = "part/"
"""The beginning of keys of ``info`` with numbers that make up a function's score. A run logs their means."""


def read_answer(name: str, answer: Any, prompts: Sequence[str]) -> Scores:
    """The scores, (N,) float32, and the info in an answer of the reward function ``name`` for N prompts.

    Numbers may come as a list, a numpy array, a torch tensor of any device, dtype and gradient, a pandas series, or a
    list of zero-dimensional tensors. flow_grpo's ``({"avg": total, "part": ...}, {})`` counts with its total.

    Raises:
        AnswerError: anything else, a wrong length, or a score that is not finite; names function, value and remedy.
    """
    returned = f"reward function {name!r} returned"
    scores, info = _split(answer)
    values = _numbers(returned, scores)
    # (N, 1) too: summed with another reward's (N,) it would broadcast to (N, N).
    if values.shape != (len(prompts),):
        raise AnswerError(f"{returned} scores of shape {values.shape}, expected ({len(prompts)},): one float per image")
    _check_range(returned, values, prompts)
    entries = {key: _checked_entries(returned, key, value, len(prompts)) for key, value in info.items()}
    return values.astype(np.float32), entries


def joined(parts: Sequence[Scores]) -> Scores:
    """Scores and info of several parts of a batch, in their order.

    An image whose part reports nothing under a key that another part has is None there.
    """
    keys = dict.fromkeys(key for _, info in parts for key in info)
    info = {key: [entry for s, i in parts for entry in i.get(key, [None] * len(s))] for key in keys}
    return np.concatenate([scores for scores, _ in parts]), info


def check_parts(name: str, parts: Sequence[Scores]) -> None:
    """Raise ``AnswerError`` unless all parts of a batch have the same keys of ``PARTS``; a mean needs every image."""
    count = sum(len(scores) for scores, _ in parts)
    # Other keys may be missing in a part; ``joined`` fills them with None.
    for key in dict.fromkeys(key for _, info in parts for key in info if key.startswith(PARTS)):
        reported = sum(len(scores) for scores, info in parts if key in info)
        if reported < count:
            raise AnswerError(
                f"reward function {name!r} returned info[{brief_repr(key)}] for {reported} of {count} images of a "
                f"batch; its mean is logged, so report {key} for every image"
            )


def _split(answer: Any) -> tuple[Any, Mapping[Any, Any]]:
    """Scores and info; a pair of two numbers is two scores."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        return answer, {}
    scores, info = answer
    # flow_grpo's ``multi_score`` puts the sum in its dict of scores.
    if isinstance(scores, Mapping) and "avg" in scores:
        parts = dict(scores)
        return parts.pop("avg"), parts | dict(info)
    return scores, info


def _numbers(returned: str, scores: Any) -> np.ndarray:
    """``scores`` as real numbers, of any shape."""
    kind = "None" if scores is None else type(scores).__name__
    # numpy would make an array of one object of these.
    if scores is None or isinstance(scores, (str, bytes, Mapping, Set, Iterator)):
        raise AnswerError(f"{returned} {kind}; {WANTED}")
    try:
        values = _without_torch(scores)
        values = values if isinstance(values, Sequence) else np.asarray(values)
        # Entry by entry, since numpy would take strings and None in a list.
        if isinstance(values, Sequence) or values.dtype == object:
            values = np.asarray([_entry(index, value) for index, value in enumerate(values)])
        if values.dtype.kind not in "biuf":
            raise TypeError(f"its type is {values.dtype}")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise AnswerError(f"{returned} {kind} that does not convert to floats ({one_line(error)}); {WANTED}") from error
    return values.astype(np.float64)


def _entry(index: int, value: Any) -> Any:
    """One entry of a list: a number, or an array that the check of the shape refuses."""
    value = _without_torch(value)
    if isinstance(value, (Real, np.bool_)):
        return float(value)
    if isinstance(value, (list, tuple)):
        return np.asarray([_entry(index, inner) for inner in value])
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    kind = "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
    raise TypeError(f"its entry {index} is {kind}")


def _without_torch(value: Any) -> Any:
    """A tensor as an array; anything else unchanged."""
    # Not an import: nobody can have returned a tensor before torch is loaded.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        raise TypeError(f"its type is {value.dtype}")
    # numpy has no bfloat16.
    return value.detach().to("cpu").double().numpy()


def _check_range(returned: str, values: np.ndarray, prompts: Sequence[str]) -> None:
    """Raise ``AnswerError`` unless float32 holds every score as a finite number."""
    # Written so that NaN counts too. float64 holds larger numbers, which float32 would make infinite.
    wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if wrong.any():
        first = int(wrong.argmax())
        finite = np.isfinite(values[wrong]).all()
        scores = f"of {values.size} scores beyond float32's largest number, 3.4e38"
        raise AnswerError(
            f"{returned} {int(wrong.sum())} {scores if finite else f'non-finite of {values.size} scores'}; the first "
            f"is {values[first]} for sample {first}, prompt {brief_repr(prompts[first])}"
            f"{': scale them down' if finite else ''}"
        )


def _checked_entries(returned: str, key: Any, value: Any, count: int) -> list[Any]:
    """One value of ``info`` as a list of its own, which the function cannot change later."""
    if not isinstance(key, str):
        raise AnswerError(f"{returned} info with the key {brief_repr(key)}; its keys must be strings")
    where = f"{returned} info[{brief_repr(key)}]"
    # Arrays, tensors and pandas series are no sequences. A text is one, but of letters.
    listed = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
    if not listed or isinstance(value, (str, bytes)):
        raise AnswerError(
            f"{where} of type {type(value).__name__}; give a list with one entry for each of the {count} images"
        )
    # ``tolist`` makes Python's own numbers, which JSON and the tracker can write.
    tolist = getattr(value, "tolist", None)
    entries = list(value) if tolist is None else tolist()
    if len(entries) != count:
        raise AnswerError(f"{where} with {len(entries)} entries for {count} images; give one entry for each image")
    is_part = key.startswith(PARTS)
    if is_part and not METRIC_NAME.fullmatch(key.removeprefix(PARTS)):
        raise AnswerError(
            f"{where}; what follows {PARTS} becomes part of a metric's name: give it the letters a to z, digits and "
            "underscores"
        )
    for index, entry in enumerate(entries):
        if is_part:
            entries[index] = _part_number(f"{where}[{index}]", entry)
        elif key == CAPTIONS and not isinstance(entry, str):
            raise AnswerError(
                f"{where}[{index}] = {brief_repr(entry)}; it captions the samples, so every entry must be a string"
            )
    return entries


def _part_number(where: str, entry: Any) -> float:
    """An entry under a key of ``PARTS``, of any type that scores may have."""
    # As strict as for scores: a mean of texts that spell numbers is a mistake too.
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = np.asarray(_entry(0, entry), np.float64)
        if not number.shape and np.isfinite(number):
            return float(number)
    raise AnswerError(f"{where} = {brief_repr(entry)}; its mean is logged, so every entry must be a finite number")
