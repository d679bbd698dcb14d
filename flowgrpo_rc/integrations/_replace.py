"""Puts functions in the place of another project's, also where they were imported by name before."""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class Replacement:
    """Functions of one module, replaced; ``undo`` puts the originals back."""

    def __init__(self) -> None:
        self._places: list[tuple[ModuleType, str, Any]] = []

    @property
    def places(self) -> tuple[str, ...]:
        """Every replaced function, as ``module.name``."""
        return tuple(f"{module.__name__}.{name}" for module, name, _ in self._places)

    def apply(self, home: ModuleType, functions: Mapping[str, Callable[..., Any]], package: str) -> None:
        """Replaces ``functions`` in ``home``, and in every loaded module of ``package`` that holds the originals.

        Raises:
            AttributeError: ``home`` has no function of that name, so it is another version than expected.
        """
        # Replacing half of the functions would mix two conventions in silence.
        missing = [name for name in functions if not hasattr(home, name)]
        if missing:
            raise AttributeError(f"{home.__name__} has no {', '.join(missing)}: an unexpected version.")
        # Modules that imported a function by name hold the original, and would go on calling it.
        originals = {name: getattr(home, name) for name in functions}
        loaded = [m for name, m in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
        for module in [home, *(m for m in loaded if isinstance(m, ModuleType))]:
            for name, original in originals.items():
                if vars(module).get(name) is original and original is not functions[name]:
                    self._places.append((module, name, original))
                    setattr(module, name, functions[name])

    def undo(self) -> None:
        """Restores what ``apply`` replaced."""
        while self._places:
            module, name, original = self._places.pop()
            setattr(module, name, original)
