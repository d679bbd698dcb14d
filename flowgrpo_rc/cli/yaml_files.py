"""Reading the YAML files of a user's own folder: what is wrong with one is said in a line that names it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowgrpo_rc.cli.refusals import ConfigError

LARGEST = 20_000
"""Values in one file; the schema has about a hundred keys."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def own_files(folder: Path, name: str) -> Iterator[Path]:
    """The user's file of that name, and those of the folder that its defaults list builds on, each read once.

    Raises:
        ConfigError: a file cannot be read, is not YAML, or holds something else than keys.
    """
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop().lstrip("/").removesuffix(".yaml")
        file = folder / f"{current}.yaml"
        if current in seen or not file.exists():
            continue
        seen.add(current)
        content = read_yaml(file)
        if "hydra" in content:  # Hydra takes it out, so nobody else would see it
            raise ConfigError(
                f"{file}: hydra has no meaning here: Hydra only composes the configuration; delete it. The run folder "
                "is trainer.default_local_dir"
            )
        yield file
        waiting += _builds_on(file, content.get("defaults"))


def read_yaml(file: Path) -> Mapping[Any, Any]:
    """The keys of a YAML file.

    Raises:
        ConfigError: see ``own_files``.
    """
    import yaml

    text = _text(file)
    try:
        content = yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{file} is nested too deeply to be a configuration") from error
    # A value that is not what its tag says, such as `!!bool x`, is an error of whatever class its reader raises.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{file} is not YAML{where}: {' '.join(problem.split())}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        kind = "a list" if isinstance(content, list) else f"{content!r:.60}"
        raise ConfigError(f"{file}: holds {kind} where keys are expected; write key: value")
    if not _fits(content):
        raise ConfigError(f"{file}: its aliases stand for more than {LARGEST} values; write the keys out")
    return content


def child_values(node: Any) -> Collection[Any]:
    """What a mapping or a list holds; nothing of any other value."""
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def _fits(content: Any) -> bool:
    """Whether it is at most ``LARGEST`` values; what an alias stands for counts as often as it is used."""
    waiting = [content]
    count = 0
    while waiting and count <= LARGEST:
        node = waiting.pop()
        count += 1
        waiting += child_values(node)
    return count <= LARGEST


def _text(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if raw[:2] in _UTF16 else f"byte {raw[error.start]:#04x} at position {error.start}"
        raise ConfigError(f"{file} is not UTF-8 text ({kind}); save it as UTF-8") from error


def _builds_on(file: Path, defaults: Any) -> list[str]:
    if defaults is None:
        return []
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}: defaults: got {defaults!r}; give a list of files, e.g. [flowgrpo_trainer, _self_]")
    names: list[str] = []
    for entry in defaults:
        names += [f"{k}/{v}" for k, v in entry.items()] if isinstance(entry, Mapping) else [str(entry)]
    return names
