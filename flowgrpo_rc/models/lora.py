"""The adapter: attach it, copy it from the actor to an engine, save it so that diffusers reloads it exactly."""

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ALL_LINEAR

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""The adapter's file in a folder that diffusers' ``load_lora_weights`` takes."""
CARD_FILE = "README.md"
"""The model card in such a folder."""
METADATA_KEY = "lora_adapter_metadata"
"""Entry of the file's metadata where diffusers looks for peft's settings, as JSON."""
START_FIELD = "actor_rollout_ref.model.lora_adapter_path"
"""The option that names the adapter which a run starts from."""
ACTOR_ADAPTER = "default"
"""Name of the trained adapter in the transformer, and in the names of an adapter's tensors wherever they travel."""


class AdapterMismatchError(ValueError):
    """An adapter's tensors do not fit the module they are meant for."""


def check_adapter_file(folder: str, rank: int, alpha: int) -> None:
    """Raise ``AdapterMismatchError`` unless ``folder`` holds a readable LoRA of this rank, with this alpha or alpha =
    rank.

    It is called before the model is loaded. ``load_lora`` checks the layers.
    """
    file = Path(folder).expanduser() / ADAPTER_FILE
    weights, settings = read_adapter(Path(folder).expanduser(), f"{START_FIELD}: ")
    _check_one_scale(settings, f"{START_FIELD}: {file}")
    # The rank decides the shapes; a wrong one would fail only after the model is loaded.
    ranks = {weight.shape[0] for name, weight in weights.items() if ".lora_A." in name}
    if ranks and ranks != {rank}:
        there = ", ".join(map(str, sorted(ranks)))
        raise AdapterMismatchError(
            f"{START_FIELD}: {file} has rank {there}, actor_rollout_ref.model.lora_rank is {rank}; set it to that of "
            "the file"
        )
    # A file at full strength, such as a run's final one, is converted to the run's alpha when it is read.
    scale = settings.get("transformer.lora_alpha")
    if scale is not None and scale not in (alpha, rank):
        raise AdapterMismatchError(
            f"{START_FIELD}: {file} has lora_alpha {scale}, actor_rollout_ref.model.lora_alpha is {alpha}, which would "
            "scale its update differently; set it to that of the file"
        )


@runtime_checkable
class TakesLora(Protocol):
    """A model with the layers that get a LoRA where ``target_modules`` is null."""

    @property
    def default_lora_targets(self) -> str | Sequence[str]: ...


@runtime_checkable
class LoraSettings(Protocol):
    """The fields of ``ModelConfig`` that make a LoRA, and the section that messages name."""

    @property
    def section(self) -> str: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_alpha(self) -> int: ...
    @property
    def lora_init_weights(self) -> str: ...
    @property
    def target_modules(self) -> Any: ...


def attach_lora(
    transformer: Any,
    model: TakesLora,
    config: LoraSettings,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    device: Any = None,
    adapter: str = ACTOR_ADAPTER,
) -> None:
    """Add a trainable LoRA under the name ``adapter`` and make it the active one; others that are there stay. Its
    weights are in ``dtype`` whatever the base is in, and on ``device``; ``None``: where the base is. Its products are
    computed in ``compute_dtype``; ``None``: in ``dtype``. The initial values come from torch's global generator: seed
    it for a reproducible start."""
    from peft import LoraConfig

    # peft's name for Kaiming's is True.
    init: Any = True if config.lora_init_weights == "default" else config.lora_init_weights
    # Rank and targets alone; dropout would make the policy random.
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        init_lora_weights=init,
        # Full names: an ending may also be that of a list of layers, which peft refuses.
        target_modules=target_layers(transformer, model, config),
    )
    with warnings.catch_warnings():
        # A second adapter on one model is meant: see ``DiffusersEngine``.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        # A quantised layer cannot be merged with its LoRA, and nothing here merges in place.
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
        transformer.add_adapter(settings, adapter_name=adapter)
    for parameter in adapter_parameters(transformer, adapter).values():
        # Trained weights may stay in float32 over a bfloat16 base, whose rounding would swallow Adam's steps.
        parameter.data = parameter.data.to(device, dtype)
    for layer in _adapted_layers(transformer):
        # peft would convert a layer's input to the weights' dtype, for all of its adapters alike.
        layer.cast_input_dtype_enabled = False
        for matrices in (layer.lora_A, layer.lora_B):
            for name, matrix in list(matrices.items()):
                if not isinstance(matrix, _LoraMatrix):
                    own = compute_dtype or dtype if name == adapter else matrix.weight.dtype
                    matrices[name] = _LoraMatrix(matrix.weight, own)


class _LoraMatrix(nn.Linear):
    """A LoRA's matrix that may compute in another dtype than its weights have. Their gradients have the weights' dtype,
    so that float32 weights keep small steps while engine and actor multiply the same bfloat16 numbers."""

    def __init__(self, weight: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self._dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.to(self._dtype), self.weight.to(self._dtype))


def target_layers(transformer: nn.Module, model: TakesLora, config: LoraSettings) -> list[str]:
    """Full names of the linear layers that get a LoRA. A module name that matches nothing is a ``ValueError``."""
    targets = model.default_lora_targets if config.target_modules is None else config.target_modules
    names = [targets] if isinstance(targets, str) else list(targets)
    # A name that matches nothing would silently train fewer layers.
    modules = linear_layers(transformer)
    unmatched = [t for t in names if t != ALL_LINEAR and not any(f".{m}".endswith(f".{t}") for m in modules)]
    if unmatched:
        # ``blocks.0.attn.to_out.0`` -> ``to_out.0``: the part of a layer's name that repeats over blocks.
        endings = sorted({re.findall(r"[^.]+(?:\.\d+)?$", name)[0] for name in modules})
        others = [type(m).__name__ for n, m in transformer.named_modules() if f".{n}".endswith(f".{unmatched[0]}")]
        hint = f" ({unmatched[0]} is a {others[0]}; only linear layers take a LoRA here)" if others else ""
        given = f"{', '.join(unmatched)} match"
        if config.target_modules is None:
            # The fault is not the user's: the setting was left alone.
            given = f"is null, and of this family's attention layers {given}"
        raise ValueError(
            f"{config.section}.target_modules: {given} no linear layer{hint}; its layers end in: {', '.join(endings)}"
        )
    if names == [ALL_LINEAR]:
        return list(modules)
    return [name for name in modules if any(f".{name}".endswith(f".{target}") for target in names)]


def linear_layers(transformer: nn.Module) -> dict[str, nn.Linear]:
    """The base model's linear layers, named as before any adapter was attached."""
    return {
        name.removesuffix(".base_layer"): module
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


def base_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The base model's parameters, named as before any adapter was attached."""
    return {n.replace(".base_layer.", "."): p for n, p in transformer.named_parameters() if ".lora_" not in n}


def adapter_parameters(transformer: nn.Module, adapter: str = ACTOR_ADAPTER) -> dict[str, nn.Parameter]:
    """An adapter's parameters, named as those of ``ACTOR_ADAPTER`` whatever its own name, so that they compare."""
    own = f".{adapter}."
    return {
        name.replace(own, f".{ACTOR_ADAPTER}."): p
        for name, p in transformer.named_parameters()
        if ".lora_" in name and own in name
    }


def adapter_state(transformer: nn.Module, adapter: str = ACTOR_ADAPTER) -> dict[str, Tensor]:
    """Detached copies of an adapter's weights, named as ``adapter_parameters`` names them."""
    return {name: p.detach().clone() for name, p in adapter_parameters(transformer, adapter).items()}


def check_adapter_state(state: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``AdapterMismatchError`` unless every expected tensor is there in its shape, and none besides."""
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    if missing or unexpected:
        raise AdapterMismatchError(
            f"the adapter does not bind: {len(missing)} of {len(expected)} weights missing (first: "
            f"{next(iter(missing), '-')}), {len(unexpected)} unexpected (first: {next(iter(unexpected), '-')}); "
            "lora_rank or target_modules differ, or it is of another model"
        )
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise AdapterMismatchError(
                f"the adapter does not bind: {name} is {tuple(state[name].shape)}, expected {shape}; "
                "lora_rank or target_modules differ"
            )


@torch.no_grad()
def load_adapter_state(transformer: nn.Module, state: Mapping[str, Tensor], adapter: str = ACTOR_ADAPTER) -> None:
    """Copy ``state``, named as ``adapter_state`` names it, into an adapter, casting to its dtype. If a name or a shape
    does not fit, ``AdapterMismatchError`` is raised and nothing is changed."""
    own = adapter_parameters(transformer, adapter)
    # Before the first copy, so that a state which does not fit leaves nothing half changed.
    check_adapter_state(state, {name: tuple(p.shape) for name, p in own.items()})
    for name, parameter in own.items():
        parameter.copy_(state[name])


@contextmanager
def adapter_active(transformer: nn.Module, adapter: str | None) -> Iterator[None]:
    """Inside, this adapter alone acts, with ``None`` the base model; afterwards what was active before."""
    before = [(layer, layer.active_adapters) for layer in _adapted_layers(transformer)]
    activate(transformer, adapter)
    try:
        yield
    finally:
        for layer, active in before:
            layer._active_adapter = active


def activate(transformer: nn.Module, adapter: str | None) -> None:
    """From now on this adapter alone acts; with ``None`` the transformer is the base model."""
    # peft's ``set_adapter`` would also make the adapter's weights trainable and freeze all others.
    for layer in _adapted_layers(transformer):
        layer._active_adapter = [] if adapter is None else [adapter]


def _adapted_layers(transformer: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


def save_lora(
    model: DiffusionModel,
    transformer: nn.Module,
    folder: Path,
    state: Mapping[str, Tensor] | None = None,
    *,
    full_strength: bool = False,
) -> None:
    """Write the adapter in diffusers' LoRA format, readable by whom the umask allows.

    ``pipe.load_lora_weights(folder)`` on the same base model then draws the identical image, and where the pipeline has
    no such method ``pipe.transformer.load_lora_adapter(folder, weight_name=ADAPTER_FILE)``.

    Args:
        state: other weights for this adapter, named as ``adapter_state`` names them.
        full_strength: multiply the second matrices by ``lora_alpha / lora_rank`` and record an alpha equal to the rank:
            ``delta W = B @ A``. Readers that do not know the metadata, such as ComfyUI and kohya's tools, then apply
            the whole update. Exact where the factor is a power of two, else to rounding.
    """
    from peft.utils import get_peft_model_state_dict

    state = adapter_state(transformer) if state is None else state
    peft_config: Any = transformer.peft_config
    settings = peft_config[ACTOR_ADAPTER].to_dict()
    if full_strength:
        state = _scaled(state, settings["lora_alpha"] / settings["r"])
        settings["lora_alpha"] = settings["r"]
    # peft knows the names that diffusers expects in the file.
    weights = get_peft_model_state_dict(transformer, state_dict=dict(state))
    layers: dict[str, Tensor] = {f"transformer.{k}": v.detach().cpu().contiguous() for k, v in weights.items()}
    own = json.dumps({f"transformer.{k}": v for k, v in settings.items()}, indent=2, sort_keys=True, default=sorted)
    folder.mkdir(parents=True, exist_ok=True)
    # Not by ``save_file``, which makes files of mode 0600 that colleagues and servers could not read.
    (folder / ADAPTER_FILE).write_bytes(save(layers, {"format": "pt", METADATA_KEY: own}))


def _check_one_scale(settings: Mapping[str, Any], what: str) -> None:
    """Raise ``AdapterMismatchError`` if peft's settings give layers other scales than ``lora_alpha / r``."""
    odd = odd_scales(settings)
    if odd:
        raise AdapterMismatchError(
            f"{what} has {odd[0]}, by which its layers have other scales than lora_alpha / r; give a LoRA with one "
            "scale, as a run writes it"
        )


def odd_scales(settings: Mapping[str, Any]) -> list[str]:
    """peft's settings of a transformer by which a layer has another scale than ``lora_alpha / r``."""
    names = ("rank_pattern", "alpha_pattern", "use_rslora")
    return [name for name in names if settings.get(f"transformer.{name}")]


def _scaled(state: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """An adapter whose update ``B @ A`` is ``factor`` times that of ``state``."""
    return {name: value * factor if ".lora_B." in name else value for name, value in state.items()}


def load_lora(transformer: nn.Module, folder: Path) -> None:
    """Read a LoRA in diffusers' format into the adapter that is attached.

    The second matrices are scaled so that the update under the run's ``lora_alpha`` equals the file's. A file that
    records no alpha has full strength, as in diffusers. Raises ``AdapterMismatchError`` if the file cannot be read, its
    adapter is not of this shape, or a weight of it is NaN or infinite.
    """
    saved, settings = read_adapter(folder)
    file = folder / ADAPTER_FILE
    _check_one_scale(settings, str(file))
    scale = settings.get("transformer.lora_alpha", 1) / settings.get("transformer.r", 1)
    peft_config: Any = transformer.peft_config
    own = peft_config[ACTOR_ADAPTER].lora_alpha / peft_config[ACTOR_ADAPTER].r
    # peft leaves the adapter's name out of what it saves.
    state = {
        name.removeprefix("transformer.").replace(".weight", f".{ACTOR_ADAPTER}.weight"): value
        for name, value in saved.items()
    }
    try:
        load_adapter_state(transformer, state if scale == own else _scaled(state, scale / own))
    except AdapterMismatchError as error:
        raise AdapterMismatchError(f"{file}: {error}") from error


def same_lora(one: Path, other: Path) -> bool:
    """Two folders hold the same adapter and nothing else but a model card. The comparison is not byte for byte,
    because the order of a file's entries is random."""
    if not all({p.name for p in folder.iterdir()} - {CARD_FILE} == {ADAPTER_FILE} for folder in (one, other)):
        return False
    try:
        (weights, settings), (others, other_settings) = read_adapter(one), read_adapter(other)
    except AdapterMismatchError:
        return False
    alike = settings == other_settings and weights.keys() == others.keys()
    return alike and all(v.dtype == others[n].dtype and torch.equal(v, others[n]) for n, v in weights.items())


def read_adapter(folder: Path, field: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and peft settings of an adapter's file; raises ``AdapterMismatchError`` if it cannot be read, or a weight
    is NaN or infinite."""
    file = folder / ADAPTER_FILE
    # ``os.path`` also takes names that are too long, for which ``Path`` raises.
    if not os.path.isfile(file):
        fault = f"is no folder; give the one that holds {ADAPTER_FILE}"
        if os.path.isdir(folder):
            fault = f"holds no {ADAPTER_FILE}; give a folder with a LoRA in diffusers' format"
        raise AdapterMismatchError(f"{field}{folder} {fault}")
    try:
        with safe_open(file, "pt") as content:
            settings = dict(json.loads((content.metadata() or {}).get(METADATA_KEY, "{}")))
            saved = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise AdapterMismatchError(f"{field}{file} cannot be read ({one_line(error)}); is it complete?") from error
    # A NaN would spread to every weight with the first update.
    bad = [name for name, value in saved.items() if not (value.is_floating_point() and value.float().isfinite().all())]
    if bad:
        raise AdapterMismatchError(f"{field}{file} holds values that are NaN, infinite or no floats, first in {bad[0]}")
    return saved, settings
