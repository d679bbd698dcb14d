"""The text a prompt asks for, and how close a reading of the image comes to it.

As FlowGRPO defines them: the target is the first text in straight double quotes, and both sides are compared
without white space and in lower case, so that line breaks and capitals do not count.
"""

from __future__ import annotations

import re

_QUOTED = re.compile(r'"([^"]*)"')


def quoted_target(prompt: str) -> str | None:
    """The first text in straight double quotes, or None when there is none or it holds only white space."""
    match = _QUOTED.search(prompt)
    if match is None or not match.group(1).strip():
        return None
    return match.group(1)


def normalise(text: str) -> str:
    """`text` without any white space and in lower case: the form that is compared."""
    return "".join(text.split()).lower()


def text_similarity(text: str, target: str, *, contained_is_match: bool = False) -> float:
    """`1 - min(lev(text, target), len(target)) / len(target)` of the normalised strings, in [0, 1].

    `lev` is the Levenshtein distance (insertions, deletions and substitutions cost 1). The distance is capped
    at the length of the target, so a long wrong reading scores 0 and not less.

    Args:
        text: what was read in the image.
        target: what should stand there; not blank.
        contained_is_match: True: a reading that contains the whole target scores 1, whatever is around it.

    Raises:
        ValueError: `target` is blank.
        ImportError: rapidfuzz is not installed.
    """
    read, wanted = normalise(text), normalise(target)
    if not wanted:
        raise ValueError(f"the target text {target!r} is blank; there is nothing to compare a reading with")
    if contained_is_match and wanted in read:
        return 1.0
    return 1.0 - min(_levenshtein(read, wanted), len(wanted)) / len(wanted)


def _levenshtein(a: str, b: str) -> int:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise ImportError(
            "comparing texts needs rapidfuzz, which is not installed; install the extra: pip install 'flowgrpo_rc[ocr]'"
        ) from error
    return Levenshtein.distance(a, b)
