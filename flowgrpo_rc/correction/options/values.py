"""Reading what another project's keys hold: switches, choices, single bounds, and the band that two bounds make.

Every dialect writes a band of ratios in its own keys. Here it has one form, ``"lower_upper"``; ``BoundKeys`` makes it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flowgrpo_rc.checks import show
from flowgrpo_rc.correction.plan import is_band, parse_number, plain_threshold, split_band

Values = Mapping[str, Any]
"""Keys as the user gave them, each with its value."""


def given(values: Values, keys: Iterable[str]) -> dict[str, Any]:
    """Those of ``keys`` that are there and not null."""
    return {key: values[key] for key in keys if values.get(key) is not None}


def switch(values: Values, key: str) -> bool | None:
    """A boolean key; the texts "true" and "false" are booleans too. ``None`` where it is absent or null.

    Raises:
        TypeError: anything else, which must not count as true.
    """
    value = values.get(key)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(f"{key} must be true or false, got {show(value)}.")


def bound(values: Values, key: str) -> Any:
    """A bound as it was written, checked; ``None`` where it is absent or null.

    A lower bound may be 0. In place of an upper bound a whole band may stand, which the configuration checks.
    """
    value = plain_threshold(values.get(key), key)
    is_lower = "lower" in key
    if value is not None and (is_lower or not is_band(value)):
        parse_number(value, key, zero_allowed=is_lower)
    return value.strip() if isinstance(value, str) else value


class BoundKeys(NamedTuple):
    """The two keys in which a dialect writes the bounds of one band; messages name them."""

    lower: str
    upper: str

    def read(self, values: Values) -> tuple[Any, Any]:
        """The lower and the upper bound as they were written; ``None`` for one that is not given."""
        return bound(values, self.lower), bound(values, self.upper)

    def band(self, lower: Any, upper: Any, *, preset_lower: Any = None, preset: str | None = None) -> str:
        """``"lower_upper"`` of two bounds. ``upper`` may be a whole band already.

        A ``lower`` of ``None`` takes the lower bound of the preset of that name, or else the reciprocal of ``upper``.

        Raises:
            ValueError: the lower bound is above the upper one, or is given twice.
        """
        if is_band(upper):
            if lower is not None:
                raise ValueError(
                    f"{self.lower}={show(lower)} beside {self.upper}={show(upper)}, which has a lower bound already; "
                    "give one of them."
                )
            return upper
        above = parse_number(upper, self.upper)
        below = preset_lower if lower is None else lower
        if below is None:
            return f"{1.0 / above!r}_{upper}"
        if float(below) > above and lower is not None:
            raise ValueError(f"{self.lower}={show(lower)} exceeds {self.upper}={show(upper)}.")
        if float(below) > above:
            raise ValueError(
                f"{self.upper}={show(upper)} is below {show(below)}, the lower bound of preset {preset!r}; "
                f"give {self.lower} as well."
            )
        return f"{below}_{upper}"

    def changed_band(self, threshold: Any, values: Values, preset: str | None) -> str:
        """The preset's ``threshold`` with the halves that ``values`` give; a lower one of null is the reciprocal."""
        below, above = split_band(threshold, self.upper)
        lower, upper = self.read(values)
        kept = None if self.lower in values else below
        return self.band(lower, above if upper is None else upper, preset_lower=kept, preset=preset)


def refuse_unused(wrong: Values, preset: str | None, where: str, remedy: str) -> None:
    """Refuses keys that nothing in the preset takes up. Without a preset there is nothing that they could act on, which
    is usual: slime's file, for one, sets all of its keys.
    """
    for key, value in wrong.items() if preset is not None else ():
        raise ValueError(f"{key}={show(value)} has no effect beside preset {preset!r} {where}; {remedy}.")
