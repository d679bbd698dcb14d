"""Checks of a reward function's answer, which becomes scores and captions; errors of rewards."""

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rewards.registry import METRIC_NAME

LONGEST = 400
"""Characters of an exception's text, a prompt or a value in a message."""
WANTED = "return one float per image, or (floats, info dict)"

Scores = tuple[np.ndarray, dict[str, list[Any]]]
"""Scores of some images, and the info beside them: lists with an entry for each image."""
CAPTIONS = "text"
"""The key of ``info`` whose strings caption the samples."""
PARTS = "part/"
"""The beginning of keys of ``info`` with numbers that make up a function's score. A run logs their means."""


class RewardError(RuntimeError):
    """A reward function failed or gave an answer unfit for training. The message names the function."""


class AnswerError(RewardError):
    """A reward function returned something unfit; a check of ours found it."""


def brief_repr(value: Any) -> str:
    """Python's representation of a value in one line, shortened for a message."""
    return shortened(" ".join(repr(value).splitlines()))


def shortened(text: str) -> str:
    """The first ``LONGEST`` characters of a text."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


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
    entries = {key: _checked_entries(returned, key, value, len(prompts)) for key, value in info.items()}
    return values.astype(np.float32), entries


def joined(parts: Sequence[Scores]) -> Scores:
    """Scores and info of several parts of a batch, in their order. An image whose part reports nothing under a key that
    another part has is None there."""
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
    """``scores`` as float64, of any shape."""
    kind = "None" if scores is None else type(scores).__name__
    # numpy would make an array of one object of these.
    if scores is None or isinstance(scores, (str, bytes, Mapping, Set, Iterator)):
        raise AnswerError(f"{returned} {kind}; {WANTED}")
    try:
        return _array(scores)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise AnswerError(f"{returned} {kind} that does not convert to floats ({one_line(error)}); {WANTED}") from error


def _array(value: Any) -> np.ndarray:
    # Not an import: nobody can have returned a tensor before torch is loaded.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_complex():
            raise TypeError(f"its type is {value.dtype}")
        # numpy has no bfloat16.
        return value.detach().to("cpu").double().numpy()
    if not isinstance(value, Sequence):
        value = np.asarray(value)
        if value.dtype.kind in "biuf":
            return value.astype(np.float64)
        if value.dtype != object:
            raise TypeError(f"its type is {value.dtype}")
    # Entry by entry, since numpy would take strings and None in a list.
    return np.asarray([_entry(index, entry) for index, entry in enumerate(value)], np.float64)


def _entry(index: int, value: Any) -> Any:
    """One entry of a list: a number, or an array that the check of the shape refuses."""
    if isinstance(value, (Real, np.bool_)):
        return float(value)
    if isinstance(value, (list, tuple)) or hasattr(value, "ndim"):
        return _array(value)
    kind = "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
    raise TypeError(f"its entry {index} is {kind}")


def _checked_entries(returned: str, key: Any, value: Any, count: int) -> list[Any]:
    """One value of ``info`` as a list of its own, which the function cannot change later."""
    if not isinstance(key, str):
        raise AnswerError(f"{returned} info with the key {brief_repr(key)}; its keys must be strings")
    where = f"{returned} info[{brief_repr(key)}]"
    # Arrays, tensors and pandas series are no sequences. A text is one, but of letters.
    if isinstance(value, (str, bytes)) or not (isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0):
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
        raise AnswerError(f"{where}; what follows {PARTS} becomes part of a metric's name: use a to z, digits and _")
    for index, entry in enumerate(entries):
        if is_part:
            number: Any = None
            # As strict as for scores: a mean of texts that spell numbers is a mistake too.
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):
                number = np.asarray(_entry(0, entry))
            if number is None or number.shape or not np.isfinite(number):
                wanted = "its mean is logged, so every entry must be a finite number"
                raise AnswerError(f"{where}[{index}] = {brief_repr(entry)}; {wanted}")
            entries[index] = float(number)
        elif key == CAPTIONS and not isinstance(entry, str):
            raise AnswerError(
                f"{where}[{index}] = {brief_repr(entry)}; it captions the samples, so every entry must be a string"
            )
    return entries
