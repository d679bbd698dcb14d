"""From YAML and overrides to a validated ``FlowGRPOConfig``; everything that is wrong is told at once, with a remedy.

Hydra reads the files and the grammar of overrides. What they set is kept apart from the defaults until the end, so
that settings of other trainers can be translated (``translate.py``) and a value of the wrong type be told as such.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo_rc.checks import fit, show
from flowgrpo_rc.cli.foreign_keys import find
from flowgrpo_rc.cli.refusals import ConfigError, Refusals
from flowgrpo_rc.cli.schema import OPEN_SECTIONS, flatten, nearest, nest, schema, sections
from flowgrpo_rc.cli.translate import CORRECTIONS, Translation, override
from flowgrpo_rc.cli.yaml_files import own_files
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.options.quoting import quote_bands, refuse_unquoted_bands
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.paths import shipped
from flowgrpo_rc.trainer.config import FlowGRPOConfig

__all__ = ["BASE_CONFIG", "ConfigError", "compose", "to_yaml"]

BASE_CONFIG = "flowgrpo_trainer"


class _Override(NamedTuple):
    """One override, read."""

    key: str
    value: Any
    deletes: bool
    """``~key``: take back what was set."""


def compose(
    config_name: str = BASE_CONFIG, overrides: Sequence[str] = (), config_dir: str | None = None
) -> FlowGRPOConfig:
    """Compose and validate.

    Settings of verl-omni and verl act through the keys that do the same here, or are ignored where they cannot change
    what is learned; warnings list them. Where a key is given more than once, the last counts.

    Args:
        config_name: a YAML file's name without its ending, in ``config_dir`` or among the shipped ones.
        overrides: Hydra overrides, ``key=value``. A threshold's band needs no quotes of Hydra's: ``0.5_5`` is one.
        config_dir: a folder of the user's own; its files may build on the shipped ones by name.

    Raises:
        ConfigError: no such file, or settings that cannot be used: all of them, grouped by what to do.
        ValueError: a value that a configuration class refuses, or a band without quotes in a file of ``config_dir``.
    """
    refusals = Refusals()
    try:
        raw = _files(config_name, config_dir)
        parsed = _parse(overrides, refusals)
        _make_room_for_preset(raw, parsed)
        again = _apply(raw, parsed, refusals)
        defaults = _defaults()
        leaves = flatten(_resolved(raw, defaults, refusals), refusals)
        typed: dict[str, Any] = {}
        _apply(typed, parsed, Refusals())
        overridden = flatten(typed, Refusals())
    except RecursionError as error:
        raise ConfigError("the configuration is nested too deeply; give keys of the schema, key=value") from error
    inside = (f"{key}.{part}" for key, value in overridden.items() if isinstance(value, Mapping) for part in value)
    translation = Translation(leaves, refusals, flatten(defaults, Refusals()), {*overridden, *inside})
    translation.run()
    gone = translation.gone
    _fit_types(leaves, refusals, gone)
    _check_correction(leaves, refusals, gone)
    config = _build(leaves, refusals, gone)
    refusals.raise_if_any()
    assert config is not None
    translation.warn(stacklevel=2)
    if again:
        warnings.warn(f"given more than once, so the last counts: {'; '.join(again)}", stacklevel=2)
    return config


def to_yaml(config: FlowGRPOConfig | Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    from omegaconf import OmegaConf

    plain = config.to_dict() if isinstance(config, FlowGRPOConfig) else dict(config)
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def _files(config_name: str, config_dir: str | None) -> dict[str, Any]:
    """What the YAML files set, without the defaults of the schema; interpolations as they are written."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    # The files name the schema in their defaults lists; it is laid below what they set afterwards.
    ConfigStore.instance().store(name="flowgrpo_schema", node={})
    own = str(shipped("configs"))
    primary = own
    search: list[str] = []
    if "\0" in config_name or ".." in config_name or not config_name.strip():
        raise ConfigError(
            f"--config-name: got {config_name!r}; give a file's name, without its ending; its folder is --config-dir"
        )
    if config_dir is not None:
        if "\0" in config_dir or not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir: {config_dir!r} is not a folder")
        folder = Path(config_dir).resolve()
        primary = str(folder)
        search = [f"hydra.searchpath=[file://{own}]"]
        for file in own_files(folder, config_name):
            refuse_unquoted_bands(file)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(primary, version_base="1.3"):
            composed = hydra_compose(config_name, search)
        content = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(_explain(error, config_name, primary)) from error
    finally:
        GlobalHydra.instance().clear()
    return content  # type: ignore[return-value]


def _explain(error: Exception, config_name: str, folder: str) -> str:
    if type(error).__name__ == "MissingConfigException":
        missing = getattr(error, "missing_cfg_file", None) or config_name
        names = sorted({p.stem for d in (Path(folder), shipped("configs")) for p in d.glob("*.yaml")})
        missing = (missing if isinstance(missing, str) else config_name).removesuffix(".yaml")
        where = "--config-name" if missing == config_name.removesuffix(".yaml") else config_name
        return f"{where}: no file {missing}.yaml; there are: {', '.join(names)}"
    cause: BaseException = error
    while not str(cause).strip() and (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return f"{config_name}: {one_line(cause, 300)}"


def _parse(overrides: Sequence[str], refusals: Refusals) -> list[_Override]:
    """The overrides that can be read; the others are refused."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[_Override] = []
    for text in overrides:
        try:
            found = parser.parse_override(quote_bands(text))
            key = found.key_or_group.replace("/", ".")  # a group of files is none here
            value = found.value()
        except RecursionError:
            refusals.wrong(f"{text[:60]}...: nested too deeply to be a setting")
            continue
        except ValueError:  # of a number that Python will not read
            refusals.wrong(f"{text.partition('=')[0]}: got a number of {len(text)} digits; give a shorter one")
            continue
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
            parsed.append(_Override(key, value, found.is_delete()))
    return parsed


def _quoted(text: str) -> str:
    """``: 'key="value"'`` of an override that can be read with its value in quotes, else nothing."""
    key, equals, value = text.partition("=")
    plain = equals and re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*", key) and len(value) <= 80 and "(" not in value
    return f": {override(key, value)}" if plain else ""


def _make_room_for_preset(raw: dict[str, Any], overrides: Sequence[_Override]) -> None:
    """A preset on the command line replaces what the files say of the correction; overrides beside it refine it."""
    for one in overrides:
        for section in CORRECTIONS:
            within = one.key == section and isinstance(one.value, Mapping) and one.value.get("preset") is not None
            if within or (one.key == f"{section}.preset" and one.value is not None and not one.deletes):
                for place in CORRECTIONS:
                    _take_out(raw, place)


def _apply(raw: dict[str, Any], overrides: Sequence[_Override], refusals: Refusals) -> list[str]:
    """Lay the overrides over what the files set; returns those whose key an earlier one set to something else."""
    earlier: dict[str, Any] = {}
    again: dict[str, str] = {}
    for one in overrides:
        if one.deletes:
            _remove(raw, one.key, refusals)
            continue
        if one.key in earlier and earlier[one.key] != one.value:
            again[one.key] = f"{one.key}={show(one.value)} (before: {show(earlier[one.key])})"
        earlier[one.key] = one.value
        _set(raw, one.key.split("."), copy.deepcopy(one.value))
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


def _remove(raw: dict[str, Any], key: str, refusals: Refusals) -> None:
    """``~key`` takes back what a file or an earlier override set, so that the default holds."""
    if not _take_out(raw, key) and key not in schema() and key not in sections() and find(key) is None:
        refusals.unknown(key, nearest(key))


def _take_out(raw: dict[str, Any], key: str) -> bool:
    """Delete what was set; whether there was something."""
    *parents, last = key.split(".")
    node: Any = raw
    for part in parents:
        node = node.get(part, {}) if isinstance(node, dict) else {}
    found = isinstance(node, dict) and last in node
    if found:
        del node[last]
    return found


@cache
def _defaults() -> Mapping[str, Any]:
    """The schema's own values, interpolations as they are written."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.structured(FlowGRPOConfig), resolve=False)  # type: ignore[return-value]


def _resolved(raw: dict[str, Any], defaults: Mapping[str, Any], refusals: Refusals) -> dict[str, Any]:
    """``raw`` with the values that its interpolations stand for; they may refer to any key, set or not."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if "${" not in repr(raw) and "???" not in repr(raw):
        return raw
    try:
        whole = OmegaConf.merge(OmegaConf.create(dict(defaults)), OmegaConf.create(raw))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be read: {_first_line(error)}") from error

    def resolve(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result = {}
        for key, value in node.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                result[key] = resolve(value, f"{path}.")
                continue
            if value == "???" and path in schema():
                refusals.wrong(f"{path}: is ???, which stands for a value that must be given; give one")
                continue
            try:
                found = OmegaConf.select(whole, path) if "${" in repr(value) else value
                is_node = OmegaConf.is_config(found)
                result[key] = OmegaConf.to_container(found, resolve=True) if is_node else found
            except OmegaConfBaseException as error:
                refusals.wrong(f"{path}: {value} cannot be resolved ({_first_line(error)})")
        return result

    return resolve(raw, "")


def _fit_types(leaves: dict[str, Any], refusals: Refusals, gone: list[str]) -> None:
    """Every value as its field's type; those that cannot be are refused, left out and added to ``gone``."""
    for key, value in list(leaves.items()):
        try:
            if key in OPEN_SECTIONS and not isinstance(value, Mapping | None):
                raise ValueError(f"{key}: got {show(value)}; give {OPEN_SECTIONS[key]}")
            leaves[key] = fit(key, schema()[key], value)
        except ValueError as error:
            refusals.wrong(str(error))
            del leaves[key]
            gone.append(key)


def _check_correction(leaves: dict[str, Any], refusals: Refusals, gone: list[str]) -> None:
    """The correction's class checks its section, whose name goes before what it refuses; the section is left out then
    and added to ``gone``."""
    section = CORRECTIONS[0]
    given = leaves.get(section)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when the whole configuration is made
            RolloutCorrectionConfig.from_dict(given)
    except (TypeError, ValueError) as error:
        message = str(error)
        starts_with_key = re.split(r"\W", message, maxsplit=1)[0] in (given or {})
        refusals.wrong(f"{section}{'.' if starts_with_key else ': '}{message}")
        del leaves[section]
        gone.append(section)


def _build(leaves: Mapping[str, Any], refusals: Refusals, gone: list[str]) -> FlowGRPOConfig | None:
    """The configuration; what its classes refuse is noted, each further refusal with the refused settings left out.

    ``gone`` holds the keys that were left out before.
    """
    remaining = dict(leaves)
    while True:
        try:
            return _construct(remaining)
        except ValueError as error:
            message = str(error)
        if not _is_consequence(message, gone):
            refusals.wrong(message)
        key = _leading_key(message, remaining)
        if key is None:
            return None
        gone.append(key)
        del remaining[key]


def _construct(leaves: Mapping[str, Any]) -> FlowGRPOConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(FlowGRPOConfig), OmegaConf.create(nest(leaves)))
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'the configuration'}: {_first_line(error)}") from error


def _leading_key(message: str, leaves: Mapping[str, Any]) -> str | None:
    """The setting that a message of a configuration class begins with, if it was given."""
    found = re.match(r"[\w.]+", message)
    key = found[0] if found else ""
    while key and key not in leaves:
        key = key.rpartition(".")[0]
    # What the correction's class says does not begin with its section, so that one of its keys cannot be told.
    return key if key and not key.endswith(".rollout_correction") else None


def _is_consequence(message: str, gone: Sequence[str]) -> bool:
    """Whether a message speaks of a setting that was left out before: then its default is what is refused."""
    return any(re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", message) for key in gone)
