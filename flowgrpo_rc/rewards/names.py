"""Names of rewards and of parts of a score, which become names of metrics."""

from __future__ import annotations

import re
from collections.abc import Collection

STATISTICS = ("mean", "std", "max", "min", "group_std_mean", "zero_std_fraction")
"""Metrics ``reward/...`` of the total, beside ``reward/<name>`` and ``reward/std/<name>`` of every function, which may
have none of these names."""

METRIC_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
"""Names that every tracker can store as one level of a metric's name."""


def check_name(field_name: str, name: str) -> None:
    """Raise ``ValueError`` unless ``reward/<name>`` is a metric of its own, which every tracker can store."""
    if name in STATISTICS:
        raise ValueError(
            f"{field_name}: got {name!r}, but the run logs reward/{name} about the total; rename your function, or "
            f"give it a second name in its file (my_{name} = {name})"
        )
    if not METRIC_NAME.fullmatch(name):
        raise ValueError(
            f"{field_name}: got {name!r}, which becomes the metric reward/{name}; give your function a name of "
            "the letters a to z, digits and underscores"
        )


def refuse_taken(field_name: str, name: str, taken: Collection[str | None]) -> None:
    """Raise ``ValueError`` where another reward has the name."""
    if name in taken:
        raise ValueError(
            f"{field_name}: another reward is called {name!r} too; rename this one, so that their metrics can be told "
            "apart"
        )
