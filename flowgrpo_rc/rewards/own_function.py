"""A function of the user's own as a configuration names it: file, name, arguments, and the field that says so.

``reward.custom_reward_function`` holds one, ``reward.reward_functions`` and ``reward.val_functions`` one for each name.
Importing this loads no function; ``custom.py`` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_NAME = "compute_score"
"""What a function is called where the configuration does not say."""


@dataclass(frozen=True, kw_only=True)
class OwnFunction:
    """Where a function is and what it is called with."""

    section: str
    """The section of the configuration, which begins every message."""
    path: str
    """The Python file."""
    name: str = DEFAULT_NAME
    """The function in that file."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""
    kwargs_field: str
    """The section that those are keys of."""

    def check(self) -> None:
        """Whatever can be told without loading the file.

        Raises:
            ValueError: the file is not there, or the arguments have no names; tells the field and the remedy.
        """
        if not isinstance(self.path, str) or not os.path.isfile(os.path.expanduser(self.path)):
            raise ValueError(
                f"{self.section}.path: {self.path!r} is not a file; give the path of the Python file that defines "
                f"{self.name!r}, or null for none"
            )
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"{self.section}.name: got {self.name!r}; give the name of a function in {self.path}")
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(key, str) for key in self.kwargs):
            raise ValueError(f"{self.kwargs_field}: got {self.kwargs!r}; give a mapping from parameter names to values")


def of_entry(section: str, entry: Mapping[str, Any]) -> OwnFunction:
    """The function of ``{path, name, ...}``, verl-omni's form: all further keys are arguments of every call.

    Raises:
        ValueError: there is no such function; tells the field and the remedy.
    """
    kwargs = {key: value for key, value in entry.items() if key not in ("path", "name")}
    name = entry.get("name")
    function = OwnFunction(
        section=section,
        path=entry.get("path", ""),
        name=DEFAULT_NAME if name is None else name,
        kwargs=kwargs,
        kwargs_field=section,
    )
    function.check()
    return function
