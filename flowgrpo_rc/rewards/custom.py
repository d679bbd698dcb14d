"""A user's own reward function: its place as a configuration names it, and the loading of its Python file.

``reward.custom_reward_function`` names one, ``reward.reward_functions`` and ``reward.val_functions`` name several.
"""

import gc
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from flowgrpo_rc.rewards.forms import FORMS, BatchReward, adapt
from flowgrpo_rc.rewards.user_code import UserCode

DEFAULT_NAME = "compute_score"
"""The function's name where the configuration gives none."""
_PREFIX = "flowgrpo_rc_custom_"
"""The beginning of the names of the files' modules."""
VERL_OMNIS = ("weight", "required")
"""Keys of an entry of ``reward_functions`` beside ``path``, ``name`` and the function's arguments."""


@dataclass(frozen=True, kw_only=True)
class OwnFunction:
    """The place of a function and its further arguments."""

    section: str
    """The section of the configuration, which begins every message."""
    path: str
    """The Python file."""
    name: str = DEFAULT_NAME
    """The function in that file."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""
    kwargs_field: str
    """The section that holds them."""

    def check(self) -> None:
        """Raise ``ValueError``, with field and remedy, for faults that show without loading the file."""
        # Before anything is loaded, so that a typing error costs no time.
        if not isinstance(self.path, str) or not os.path.isfile(os.path.expanduser(self.path)):
            wanted = f"the Python file that defines {self.name!r}, or null for none"
            raise ValueError(f"{self.section}.path: {self.path!r} is not a file; give the path of {wanted}")
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"{self.section}.name: got {self.name!r}; give the name of a function in {self.path}")


def of_entry(section: str, entry: Mapping[str, Any]) -> OwnFunction:
    """The function of ``{path, name, ...}``, verl-omni's form: all further keys are arguments of every call."""
    function = OwnFunction(
        section=section,
        path=entry.get("path", ""),
        # null is the default too.
        name=DEFAULT_NAME if entry.get("name") is None else entry["name"],
        kwargs={key: value for key, value in entry.items() if key not in ("path", "name", *VERL_OMNIS)},
        kwargs_field=section,
    )
    function.check()
    return function


def load_reward(
    own: OwnFunction, timeout_s: float | None = None, offered: Mapping[str, Any] | None = None
) -> BatchReward:
    """The user's function as a reward that takes a batch, in either of the two forms.

    Args:
        own: the function; a class is made into an object once, without arguments.
        timeout_s: longest time that the import of the file, and the making of the object, may take.
        offered: arguments that it gets where it declares them.

    Raises:
        ValueError: the file or the function cannot be used; names the field, the place and what to do.
    """
    function = load_function(own.path, own.name, timeout_s, own.section)
    # Scorers with a model are often written as classes.
    if isinstance(function, type):
        code = UserCode(f"{own.section}.name: {own.name!r}", str(_file(own.path)), timeout_s, error=ValueError)
        function = code.run(_object_of, function)
    return adapt(function, own.name, own.kwargs, own.kwargs_field, offered)


def load_function(
    path: str | Path, name: str, timeout_s: float | None = None, field: str = "reward.custom_reward_function"
) -> Callable[..., Any]:
    """The function ``name`` of the Python file ``path``.

    The file is executed once; loading it again returns the same module. ``field`` is the section of the
    configuration that messages name.

    Raises:
        ValueError: the file is missing, raises or exits when imported, or has no callable of that name.
    """
    file = _file(path)
    if not file.is_file():
        raise ValueError(f"{field}.path: {str(path)!r} is not a file; give the path of a Python file")
    module = _load_module(file, timeout_s, field)
    function = getattr(module, name, None)
    if function is None:
        # Without the functions that the file imports.
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__]
        found = ", ".join(sorted(own)) or "no function"
        raise ValueError(f"{field}.name: {file} defines no {name!r}; it defines {found}")
    if not callable(function):
        raise ValueError(
            f"{field}.name: {name!r} in {file} is a {type(function).__name__}, which cannot be called; name {FORMS}"
        )
    return function


_objects: dict[type, Any] = {}
"""The object of each class: making it may take long, and the reward may be built more than once."""


def _object_of(cls: type) -> Any:
    if cls not in _objects:
        _objects[cls] = cls()
    return _objects[cls]


@contextmanager
def loaded_apart() -> Iterator[None]:
    """Inside, ``load_reward`` executes files and makes objects anew; they are dropped at the end, and those from before
    are back, in the state that they were in."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith(_PREFIX)}
    objects = dict(_objects)

    def put(modules: Mapping[str, ModuleType], objects: Mapping[type, Any]) -> None:
        for name in [name for name in sys.modules if name.startswith(_PREFIX)]:
            del sys.modules[name]
        sys.modules.update(modules)
        _objects.clear()
        _objects.update(objects)

    put({}, {})
    try:
        yield
    finally:
        put(modules, objects)
        # A module and its functions refer to each other; a model that they hold would stay in memory.
        gc.collect()


def _file(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


def _load_module(file: Path, timeout_s: float | None, field: str) -> ModuleType:
    # The path is part of the name, so that files of one name in two folders do not share a module.
    module_name = f"{_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{field}.path: {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Before it is executed, as an import does: dataclasses in the file look their module up there.
    sys.modules[module_name] = module
    code = UserCode(f"{field}.path: importing {file}", str(file), timeout_s, error=ValueError)
    try:
        code.run(spec.loader.exec_module, module)
    except BaseException:
        # A file that has been mended can be loaded again.
        sys.modules.pop(module_name, None)
        raise
    return module
