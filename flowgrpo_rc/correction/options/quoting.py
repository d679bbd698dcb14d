"""Bounds in text. ``0.5_5`` is a lower and an upper bound here; to YAML and Hydra ``_`` separates digits: 0.55.

The command line reads a threshold's value as bounds. A YAML file with unquoted bounds is refused, since YAML's own
rules have made one number of them.
"""

import itertools
import math
import re
from pathlib import Path
from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.correction.options.dialects import slime_name

_THRESHOLD_KEYS = (
    *("rollout_is_threshold", "rollout_rs_threshold", "rollout_token_veto_threshold", "rollout_rs_threshold_lower"),
    *("tis_lower_bound", "tis_upper_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
)
_BAND = r"(?=[\w.+-]*_)[-+]?[.\d][\w.+-]*"
_ENTRY = re.compile(rf"([\w-]+)(\s*:\s*)({_BAND})(?=\s*[,}}])", re.ASCII)
"""``key: 0.5_5`` inside of braces."""


def quote_bands(override: str) -> str:
    """A Hydra override with bounds in quotes: those of ``key=0.5_5``, and inside of ``section={key: 0.5_5}``."""
    key, equals, value = override.partition("=")
    if _is_threshold(key.rpartition(".")[2].strip("+ ")):
        return f'{key}="{value.strip()}"' if _is_band(value) else override
    if not value.lstrip().startswith("{"):
        return override
    return key + equals + _ENTRY.sub(lambda m: f'{m[1]}{m[2]}"{m[3]}"' if _is_threshold(m[1]) else m[0], value)


def read_value(key: str, text: str) -> Any:
    """The value of ``key=text`` by YAML's rules, except that a threshold's bounds need no quotes.

    Raises:
        ValueError: the text is no value to YAML.
    """
    import yaml

    # YAML would read 0.5_5 as 0.55.
    if _is_threshold(key) and _is_band(text):
        return text.strip()
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{key}: got {show(text)}, which cannot be read; give a number, a word, or null") from error


def refuse_unquoted_bands(path: Path) -> None:
    """Checks a YAML file.

    Raises:
        ValueError: a threshold without quotes that has a ``_`` and is a number to YAML; or the file is not YAML.
    """
    import yaml

    try:
        # Only parsed, since a loaded file no longer shows how a number was written.
        events = list(yaml.parse(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    scalars = [event for event in events if isinstance(event, yaml.ScalarEvent)]
    for key, value in itertools.pairwise(scalars):
        if value.style is None and "_" in value.value and _is_threshold(key.value) and _is_number(value.value):
            raise ValueError(
                f"{path}, line {value.start_mark.line + 1}: {key.value}: got {value.value} without quotes, which YAML "
                f'reads as one number, without the _. Write {key.value}: "{value.value}" for the band.'
            )


def _is_threshold(key: str) -> bool:
    return (slime_name(key) or key.replace("-", "_")) in _THRESHOLD_KEYS


def _is_band(text: str) -> bool:
    return re.fullmatch(_BAND, text.strip(), re.ASCII) is not None


def _is_number(text: str) -> bool:
    """A number by YAML 1.1, or by Python, whose exponents without a point OmegaConf reads too."""
    import yaml

    try:
        return isinstance(yaml.safe_load(text), int | float) or math.isfinite(float(text))
    except ValueError:
        return False
