"""From YAML and overrides to a validated ``FlowGRPOConfig``.

Hydra reads the files and the grammar of overrides. Settings stay apart from the defaults until the end, so that those
of other trainers can be translated (``foreign.py``). All refusals are reported together.
"""

import argparse
import copy
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flowgrpo_rc.checks import show
from flowgrpo_rc.cli.arguments import BASE_CONFIG
from flowgrpo_rc.cli.foreign import CORRECTIONS, ConfigError, Refusals, Translation, find, is_one_value, override
from flowgrpo_rc.cli.schema import flatten, nest, schema, sections
from flowgrpo_rc.correction.options.quoting import quote_bands, refuse_unquoted_bands
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.paths import shipped
from flowgrpo_rc.section import INVALID, Problems, convert
from flowgrpo_rc.trainer.config import SHARED_CORRECTION, FlowGRPOConfig

__all__ = ["BASE_CONFIG", "ConfigError", "compose", "compose_without_run", "to_yaml"]

# Key, value, and true for ``~key``, which takes back an earlier setting.
_Override: TypeAlias = tuple[str, Any, bool]


def compose(
    config_name: str = BASE_CONFIG, overrides: Sequence[str] = (), config_dir: str | None = None
) -> FlowGRPOConfig:
    """Compose and validate.

    Settings of verl-omni and verl act through the keys that do the same here, or are ignored where they cannot change
    what is learned; warnings list them. The last of several overrides of a key counts.

    Args:
        config_name: name of a YAML file without its ending, in ``config_dir`` or among the shipped ones.
        overrides: Hydra overrides, ``key=value``. A threshold's band such as ``0.5_5`` needs no quotes.
        config_dir: folder of the user's own YAML files, which may build on the shipped ones by name.

    Raises:
        ConfigError: no such file, or settings that cannot be used: all of them, grouped by what to do.
        ValueError: a band without quotes in a file of ``config_dir``.
    """
    # Every stage goes on after a refusal, so that one error lists them all.
    refusals = Refusals()
    raw = _files(config_name, config_dir)
    parsed = _parse(overrides, refusals)
    # The command line wins over files, so its keys are kept apart from theirs.
    typed: dict[str, Any] = {}
    _apply(typed, parsed, Refusals())
    overridden = flatten(typed, is_one_value, Refusals().wrong)
    for key, value in list(overridden.items()):
        if isinstance(value, Mapping):
            overridden |= {f"{key}.{part}": item for part, item in value.items()}
    # Options of the files would refine a preset that the user chose in their place.
    if any(overridden.get(f"{section}.preset") is not None for section in CORRECTIONS):
        for section in CORRECTIONS:
            _take_out(raw, section)
    repeated = _apply(raw, parsed, refusals)
    leaves = _resolved(flatten(raw, is_one_value, refusals.wrong), refusals)
    translation = Translation(leaves, refusals, overridden.keys())
    translation.run()
    config = _build(leaves, refusals)
    refusals.raise_if_any()
    assert config is not None
    translation.warn(stacklevel=2)
    if config.actor_rollout_ref.rollout.shares_one_step:
        warnings.warn(
            "actor_rollout_ref.rollout.algo.init_same_noise: got true with windows that all begin with the first step, "
            "so that a prompt's images have no more than that step in common; let sde_window_range begin later",
            stacklevel=2,
        )
    # A script's own settings are there to be replaced.
    if repeated and not os.environ.get("FLOWGRPO_RC_SCRIPT"):
        warnings.warn(f"given more than once, so the last counts: {'; '.join(repeated)}", stacklevel=2)
    return config


def compose_without_run(arguments: argparse.Namespace, folder: str) -> FlowGRPOConfig:
    """``compose`` for a command that measures and leaves no run behind; what a run writes goes to a temporary
    ``folder``."""
    quiet = [f"trainer.default_local_dir={folder}/run", "trainer.logger=[console]"]
    config = compose(arguments.config_name, [*arguments.overrides, *quiet], arguments.config_dir)
    # The folder is new, so there is nothing to resume; a path given by the user stays.
    if config.trainer.resume_mode == "auto":
        config.trainer.resume_mode = "disable"
    return config


def to_yaml(config: FlowGRPOConfig | Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    from omegaconf import OmegaConf

    plain = config.to_dict() if isinstance(config, FlowGRPOConfig) else dict(config)
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def _files(config_name: str, config_dir: str | None) -> dict[str, Any]:
    """The settings of the YAML files, without the schema's defaults; interpolations stay as they are written."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    # The files name the schema in their defaults lists. It is empty: the dataclasses hold the defaults.
    ConfigStore.instance().store(name="flowgrpo_schema", node={})
    own = str(shipped("configs"))
    primary = own
    search: list[str] = []
    if ".." in config_name or not config_name.strip():
        raise ConfigError(
            f"--config-name: got {config_name!r}; give a file's name, without its ending; its folder is --config-dir"
        )
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: {config_dir!r} is not a folder")
        primary = str(folder)
        search = [f"hydra.searchpath=[file://{own}]"]
    # The caller may have initialized Hydra for a program of its own, and Hydra allows one at a time.
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(primary, version_base="1.3"):
            composed = hydra_compose(config_name, search)
        content = OmegaConf.to_container(composed, resolve=False)
    # Hydra raises ValueErrors too, and text that is not UTF-8 is one.
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ConfigError(_explain(error, config_name, primary)) from error
    finally:
        GlobalHydra.instance().clear()
    for file in _own_files(Path(primary), config_name):
        refuse_unquoted_bands(file)
    return content  # type: ignore[return-value]


def _own_files(folder: Path, name: str) -> Iterator[Path]:
    """The user's file of that name, and the files of the folder that its defaults list builds on."""
    import yaml

    file = folder / f"{name.lstrip('/').removesuffix('.yaml')}.yaml"
    if not file.is_file():
        return
    yield file
    content = yaml.safe_load(file.read_text(encoding="utf-8-sig")) or {}
    # Hydra takes this section out, so nobody else would see it.
    if "hydra" in content:
        raise ConfigError(
            f"{file}: hydra has no meaning here: Hydra only composes the configuration; delete it. The run folder is "
            "trainer.default_local_dir"
        )
    for entry in content.get("defaults", []):
        names = [f"{group}/{option}" for group, option in entry.items()] if isinstance(entry, Mapping) else [entry]
        for other in names:
            if other not in ("_self_", name):
                yield from _own_files(folder, other)


def _explain(error: BaseException, config_name: str, folder: str) -> str:
    """One line about a file that Hydra cannot compose."""
    if type(error).__name__ == "MissingConfigException":
        missing = getattr(error, "missing_cfg_file", None) or config_name
        names = sorted({p.stem for d in (Path(folder), shipped("configs")) for p in d.glob("*.yaml")})
        missing = (missing if isinstance(missing, str) else config_name).removesuffix(".yaml")
        where = "--config-name" if missing == config_name.removesuffix(".yaml") else config_name
        return f"{where}: no file {missing}.yaml; there are: {', '.join(names)}; --config-dir adds a folder of your own"
    # Some of Hydra's errors have no text; the one below them has.
    while not str(error).strip() and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"{mark.name} is not YAML, line {mark.line + 1}: {getattr(error, 'problem', None)}"
    return f"{config_name}: {one_line(error, 300)}"


def _parse(overrides: Sequence[str], refusals: Refusals) -> list[_Override]:
    """The overrides that can be read; refuses the others."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[_Override] = []
    for text in overrides:
        try:
            # Hydra reads a band such as 0.5_5 as the number 0.55.
            found = parser.parse_override(quote_bands(text))
            key = found.key_or_group.replace("/", ".")  # There are no groups of files here.
            value = found.value()
        except HydraException as error:
            why = f"{_quoted(text)} ({_first_line(error)})"
            refusals.wrong(f"cannot read the override {show(text)}; write key=value{why}")
            continue
        if not key:
            refusals.wrong(f"cannot read the override {show(text)}; write key=value")
        elif found.package is not None:
            refusals.wrong(f"{key}@{found.package}: nothing here is placed by @; write {key}=...")
        elif found.is_sweep_override():
            refusals.wrong(
                f"{key}: got {show(text.partition('=')[2])}, which is a sweep of several runs; write a list as "
                f"[a,b], and text with commas in quotes{_quoted(text)}"
            )
        else:
            parsed.append((key, value, found.is_delete()))
    return parsed


def _quoted(text: str) -> str:
    """``: 'key="value"'`` of an override that can be read with its value in quotes, else nothing."""
    key, equals, value = text.partition("=")
    plain = equals and re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*", key) and len(value) <= 80 and "(" not in value
    return f": {override(key, value)}" if plain else ""


def _apply(raw: dict[str, Any], overrides: Sequence[_Override], refusals: Refusals) -> list[str]:
    """Lay the overrides over the files' settings; returns those whose key an earlier one set to another value."""
    earlier: dict[str, Any] = {}
    again: dict[str, str] = {}
    for key, value, deletes in overrides:
        if deletes:
            # The default holds again.
            known = key in schema() or key in sections() or find(key) is not None
            if not _take_out(raw, key) and not known:
                refusals.unknown(key)
            continue
        if key in earlier and earlier[key] != value:
            again[key] = f"{key}={show(value)} (before: {show(earlier[key])})"
        earlier[key] = value
        # Later overrides may change parts of this mapping in place.
        _set(raw, key.split("."), copy.deepcopy(value))
    return list(again.values())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _set(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Mappings are merged into what is there, everything else replaces it."""
    *parents, last = path
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    if isinstance(value, dict) and isinstance(node.get(last), dict):
        for key, item in value.items():
            _set(node[last], [key], item)
    else:
        node[last] = value


def _take_out(raw: dict[str, Any], key: str) -> bool:
    """Delete a setting; false where there is none."""
    *parents, last = key.split(".")
    node: Any = raw
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        return False
    del node[last]
    return True


def _resolved(leaves: dict[str, Any], refusals: Refusals) -> dict[str, Any]:
    """``leaves``, and the defaults with interpolations, with their values; they may refer to any key, set or not."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    every = {**schema(), **leaves}
    resolved = dict(leaves)
    tree = OmegaConf.create(nest(every))
    for key, value in every.items():
        if value == "???" and key in schema():
            refusals.wrong(f"{key}: is ???, which stands for a value that must be given; give one")
            resolved[key] = INVALID
        elif "${" in repr(value):
            try:
                found = OmegaConf.select(tree, key)
                is_node = OmegaConf.is_config(found)
                resolved[key] = OmegaConf.to_container(found, resolve=True) if is_node else found
            except OmegaConfBaseException as error:
                resolved[key] = INVALID
                # A default cannot be resolved where a setting that it refers to cannot: that one is refused.
                if key in leaves:
                    refusals.wrong(f"{key}: {value} cannot be resolved ({_first_line(error)})")
    return {key: value for key, value in resolved.items() if value is not INVALID or key in schema()}


def _build(leaves: Mapping[str, Any], refusals: Refusals) -> FlowGRPOConfig | None:
    """The configuration; refuses the values that its classes refuse."""
    # Unknown keys have been refused; the classes would report them a second time.
    known = {key: value for key, value in leaves.items() if key in schema()}
    try:
        return convert(FlowGRPOConfig, nest({**known, CORRECTIONS[1]: SHARED_CORRECTION}))
    except Problems as error:
        for message in error.found:
            refusals.wrong(message)
    return None
