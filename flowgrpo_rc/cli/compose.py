"""From YAML and overrides to a validated ``FlowGRPOConfig``; unknown keys are refused with a remedy."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from flowgrpo_rc.correction.quoting import quote_bands, refuse_unquoted_bands
from flowgrpo_rc.paths import shipped
from flowgrpo_rc.trainer.config import FlowGRPOConfig

BASE_CONFIG = "flowgrpo_trainer"
OPEN_SECTIONS = (
    "algorithm.rollout_correction",
    "reward.functions",
    "reward.custom_reward_function.reward_kwargs",
)
"""Sections whose keys are not part of the schema; what reads them checks them."""

ELSEWHERE = {
    "actor_rollout_ref.actor.fsdp_config": "this trainer shards nothing; every process holds the frozen model",
    "actor_rollout_ref.actor.strategy": "there is one: accelerate data parallelism; remove it",
    "actor_rollout_ref.actor.shuffle": "mini-batches are whole prompt groups in the batch's (already random) order",
    "actor_rollout_ref.ref": "the reference is the actor with its adapter switched off; see actor.use_kl_loss",
    "actor_rollout_ref.rollout.agent": "there are no agent workers; remove it",
    "actor_rollout_ref.rollout.load_format": "the engine copies the actor's weights; remove it",
    "actor_rollout_ref.rollout.layered_summon": "there is no FSDP to summon weights from; remove it",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "the diffusers engine is not tensor parallel; remove it",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "the diffusers engine reserves no memory; remove it",
    "actor_rollout_ref.model.attn_backend": "diffusers' default attention is used in actor and engine; remove it",
    "data.max_prompt_length": "use actor_rollout_ref.rollout.pipeline.max_sequence_length",
    "reward.reward_model": "reward models run behind reward.custom_reward_function",
    "reward.num_workers": "rewards run in the training process; for ocr see reward.ocr.num_threads",
    "trainer.n_gpus_per_node": "the number of processes comes from `torchrun --nproc_per_node` or `accelerate launch`",
    "trainer.nnodes": "the number of machines comes from `torchrun --nnodes` or `accelerate launch`",
}
"""Keys of other trainers that mean nothing here, and why."""


class ConfigError(ValueError):
    """The configuration cannot be composed; the message names the key and the remedy."""


def compose(
    config_name: str = BASE_CONFIG, overrides: Sequence[str] = (), config_dir: str | None = None
) -> FlowGRPOConfig:
    """Compose and validate.

    Args:
        config_name: a YAML file's name without its ending, in ``config_dir`` or among the shipped ones.
        overrides: Hydra overrides, ``key=value``. A threshold's band needs no quotes of Hydra's: ``0.5_5`` is one.
        config_dir: a folder of the user's own; its files may build on the shipped ones by name.

    Raises:
        ConfigError: no such file, an unknown key (lists the nearest known ones), or a value of the wrong type.
        ValueError: a value that a configuration class refuses, or a band without quotes in a file of ``config_dir``.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="flowgrpo_schema", node=FlowGRPOConfig)
    own = str(shipped("configs"))
    primary = own
    search: list[str] = []
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: {config_dir} is not a folder")
        primary, search = str(folder), [f"hydra.searchpath=[file://{own}]"]
        for file in _own_files(folder, config_name):
            refuse_unquoted_bands(file)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(primary, version_base="1.3"):
            composed = hydra_compose(config_name, [*search, *(_admit(quote_bands(o)) for o in overrides)])
        return OmegaConf.to_object(composed)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, config_name, primary)) from error
    finally:
        GlobalHydra.instance().clear()


def _own_files(folder: Path, name: str) -> Iterator[Path]:
    """The user's file of that name, and those of the folder that its defaults list builds on."""
    import yaml

    seen, waiting = set(), [name]
    while waiting:
        name = waiting.pop().lstrip("/").removesuffix(".yaml")
        file = folder / f"{name}.yaml"
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        yield file
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        for entry in (content.get("defaults") or []) if isinstance(content, Mapping) else []:
            waiting += [f"{k}/{v}" for k, v in entry.items()] if isinstance(entry, Mapping) else [str(entry)]


def known_keys() -> list[str]:
    """Every key of the schema, dotted."""
    return list(_keys(FlowGRPOConfig))


def _admit(override: str) -> str:
    """Refuse unknown keys; let the open sections take keys that their YAML does not list."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(f"cannot read the override {override!r}; write key=value ({error})") from error
    key = parsed.key_or_group
    section = next((s for s in OPEN_SECTIONS if key == s or key.startswith(f"{s}.")), None)
    if section is not None:
        return override if override[0] in "~+" else f"++{override}"
    check_key(key)
    return override


def check_key(key: str) -> None:
    """Raise ``ConfigError`` for a dotted key that the schema does not have."""
    known = known_keys()
    if key in known or any(k.startswith(f"{key}.") for k in known):
        return
    reason = next((why for name, why in ELSEWHERE.items() if key == name or key.startswith(f"{name}.")), None)
    if reason is not None:
        raise ConfigError(f"{key} has no meaning here: {reason}")
    raise ConfigError(f"unknown configuration key {key}; nearest: {', '.join(_nearest(key, known))}")


def _nearest(key: str, known: Sequence[str]) -> list[str]:
    """By the last part first (a right name in the wrong section), then by the whole."""
    last = key.rsplit(".", 1)[-1]
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == last]
    close_name = [
        k
        for k in known
        if k.rsplit(".", 1)[-1] in difflib.get_close_matches(last, [n.rsplit(".", 1)[-1] for n in known])
    ]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return list(dict.fromkeys([*same_name, *close, *close_name]))[:4] or ["none; see configs/flowgrpo_trainer.yaml"]


def _keys(cls: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        name, kind = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(kind):
            yield from _keys(kind, f"{name}.")  # type: ignore[arg-type]
        else:
            yield name


def _explain(error: Exception, config_name: str, folder: str) -> str:
    cause: BaseException = error
    # Hydra wraps OmegaConf's error, which knows the key; OmegaConf's own inner error knows neither key nor value.
    while not getattr(cause, "full_key", None) and (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    full_key = getattr(cause, "full_key", None)
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    if type(error).__name__ == "MissingConfigException":
        names = sorted({p.stem for d in (Path(folder), shipped("configs")) for p in d.glob("*.yaml")})
        return f"--config-name: no file {config_name}.yaml; there are: {', '.join(names)}"
    if full_key:
        try:
            check_key(full_key)
        except ConfigError as unknown:
            return str(unknown)
        return f"{full_key}: {text}"
    return text


def to_yaml(config: FlowGRPOConfig | Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    from omegaconf import OmegaConf

    plain = config.to_dict() if isinstance(config, FlowGRPOConfig) else dict(config)
    return OmegaConf.to_yaml(OmegaConf.create(plain))
