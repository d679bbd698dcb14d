"""Targets and text similarity: hand-worked values and the pairs that make a reward flip."""

from __future__ import annotations

import sys

import pytest

from flowgrpo_rc.rewards.ocr import normalise, quoted_target, text_similarity


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('the text "42"', "42"),
        ('a sign "Hello World" above "Bye"', "Hello World"),
        ('"ab" first', "ab"),
        ("it's 'single'", None),
        ('only one " mark', None),
        ('empty ""', None),
        ('blank "  "', None),
    ],
)
def test_quoted_target(prompt: str, target: str | None) -> None:
    assert quoted_target(prompt) == target


def test_normalise_drops_white_space_and_case() -> None:
    assert normalise(" New\tYork\n CITY ") == "newyorkcity"


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("42", "42", 1.0),
        ("", "42", 0.0),
        ("4", "42", 0.5),  # one deletion of two
        ("43", "42", 0.5),  # one substitution of two
        ("24", "42", 0.0),  # two substitutions (or delete and insert): Levenshtein knows no swap
        ("142", "42", 0.5),  # one insertion
        ("7142999", "42", 0.0),  # five insertions, capped at the target's length
        ("kitten", "sitting", 1 - 3 / 7),  # the textbook pair: distance 3
        ("newyork", "New York", 1.0),
        ("abcd", "ab", 0.0),  # lev 2 = len 2: asymmetric, the target's length divides
        ("ab", "abcd", 0.5),
    ],
)
def test_similarity_by_hand(text: str, target: str, expected: float) -> None:
    assert text_similarity(text, target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("text", "expected"), [("7142999", 1.0), ("4 2", 1.0), ("24", 0.0), ("4", 0.5)])
def test_contained_is_match_is_flow_grpos_rule(text: str, expected: float) -> None:
    assert text_similarity(text, "42", contained_is_match=True) == expected


def test_blank_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target text '  ' is blank"):
        text_similarity("42", "  ")


def test_missing_rapidfuzz_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    with pytest.raises(ImportError, match=r"rapidfuzz.*flowgrpo_rc\[ocr\]"):
        text_similarity("42", "42")
