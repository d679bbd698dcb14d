"""A pipeline from its configuration files alone: its networks as fake tensors, which have shapes and no memory.

The files come from a pipeline's folder, with or without weights; from ``SHIPPED``, for a few released pipelines; or
from the hub.
"""

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.parts import refuse_two_transformers
from flowgrpo_rc.models.quantization import WIDE_COPIES, QuantizedLinear, held_bytes
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.quiet import only_errors
from flowgrpo_rc.rollout.weights import layers_to_round

FIELD = "actor_rollout_ref.model.path"
# Folders ORGANISATION/NAME of configuration files. Their README names the sources.
SHIPPED = Path(__file__).with_name("pipelines")


class PlanError(ValueError):
    """The run cannot be planned; the message has the reason and the remedy."""


class FakePipeline:
    """The networks of a pipeline with fake weights in ``dtype``.

    Args:
        path: a pipeline's folder, ``asset:NAME``, or the hub name of a shipped one.
        dtype: of all weights.
        quantization: of the transformer, one of ``LIBRARIES``.
        skip: layers that it leaves as they are; see ``layers_to_round``.

    Raises:
        PlanError: there is no such pipeline, its class is not supported, or a file cannot be used.
    """

    def __init__(
        self, path: str, dtype: torch.dtype, quantization: str | None = None, skip: Iterable[str] | None = ()
    ) -> None:
        folder = find_folder(path)
        index = _read_json(folder / "model_index.json")
        self.class_name = str(index.get("_class_name"))
        if self.class_name not in FAMILIES:
            raise PlanError(f"{FIELD}: {path} is a {self.class_name}; what can be planned: {', '.join(FAMILIES)}")
        refuse_two_transformers(path, index)
        # Schedules and grids are real tensors that meet fake ones.
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        """The mode under which the networks were built and must be run."""
        networks = {
            name: self._network(path, folder / name / "config.json", entry, dtype)
            for name, entry in index.items()
            if (name in ("transformer", "vae") or name.startswith("text_encoder")) and entry and entry[0]
        }
        self.transformer: Any = networks["transformer"]
        self.parameters = parameters_of(self.transformer)
        """Parameters of the transformer."""
        self.vae: Any = networks["vae"]
        self.text_encoders = [network for name, network in networks.items() if name.startswith("text_encoder")]
        self.model: Any = self._adapter(index)
        """The family's adapter, which calls the networks: a ``models.base.DiffusionModel`` or a part of one."""
        if quantization is not None:
            self._quantize(quantization, layers_to_round(self.transformer, self.model, quantization, skip))

    def _quantize(self, quantization: str, names: Iterable[str]) -> None:
        """Give these layers of the transformer the bytes that they have in ``quantization``."""
        with self.fake:
            for layer in map(self.transformer.get_submodule, names):
                size = held_bytes(quantization, layer.out_features, layer.in_features)
                layer.__class__ = _FakeQuantized
                vars(layer).update(quantization=quantization, dtype=layer.weight.dtype)
                layer.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)

    def _network(self, path: str, file: Path, entry: list[str], dtype: torch.dtype) -> nn.Module:
        library, class_name = entry
        content = _read_json(file)
        try:
            kind = getattr(import_module(library), class_name)
            with self.fake, only_errors("transformers.modeling_utils", "diffusers.configuration_utils"):
                if library == "diffusers":
                    network = kind.from_config(content)
                else:
                    network = kind(kind.config_class.from_dict(content))
                replace_tensors(network, lambda tensor: torch.empty_like(tensor, dtype=dtype))
        # Libraries raise errors of many classes for a file that is not theirs.
        except Exception as error:
            raise PlanError(
                f"{FIELD}: {path}: {file.parent.name}/config.json gives no {class_name} ({type(error).__name__}: "
                f"{one_line(error, 200)}); is it another's?"
            ) from error
        # Frozen as in training, where the LoRA alone has gradients.
        return network.requires_grad_(False).eval()

    def _adapter(self, index: dict[str, Any]) -> Any:
        import diffusers

        pipeline_class = getattr(diffusers, self.class_name)
        # Other parts have no weights or are not called here; entries that are no list are a pipeline's own settings.
        parts = dict.fromkeys(pipeline_class._get_signature_types())
        parts |= {name: index[name] for name in parts if not isinstance(index.get(name, []), list)}
        parts |= {"transformer": self.transformer, "vae": self.vae}
        # Noise levels do not change memory, and the saved scheduler may need files.
        parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
        # Some pipelines cast the VAE, which fake tensors refuse and tensors on the meta device allow.
        replace_tensors(self.vae, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        with only_errors("diffusers.models.modeling_utils"):
            pipe = pipeline_class(**parts)
        model = resolve_name(FAMILIES[self.class_name].adapter)(pipe)
        with self.fake:
            replace_tensors(self.vae, lambda tensor: torch.empty_like(tensor, device="cpu"))
        return model


class _FakeQuantized(QuantizedLinear):
    """A layer whose fake weight has as many bytes as a rounded one with its scales."""

    quantization: str
    dtype: torch.dtype
    recorded: bool

    def forward(self, input: Tensor) -> Tensor:
        self.recorded = torch.is_grad_enabled()
        return super().forward(input)

    def product(self, input: Tensor) -> Tensor:
        # Its operations count as recomputed ones by this mode, which an autograd function turns off.
        with torch.set_grad_enabled(self.recorded):
            return super().product(input.detach())

    def dense(self) -> Tensor:
        shape = self.out_features, self.in_features
        made = torch.empty(shape, dtype=self.dtype)
        # The library's intermediate results live as long as the product of this call is being made.
        _ = [torch.empty(shape) for _ in range(WIDE_COPIES[self.quantization])]
        return made


def find_folder(path: str) -> Path:
    """The folder with a pipeline's configuration files: ``path`` itself, a shipped one, or a download of these files.

    Raises:
        PlanError: ``path`` is neither a folder with a ``model_index.json``, nor shipped, nor a pipeline on the hub.
    """
    names = ", ".join(shipped_names())
    if not path:
        raise PlanError(f"{FIELD}: is empty; give a pipeline folder, or one of {names}")
    local = Path(resolve_asset(path))
    for folder in (local, SHIPPED / path):
        if (folder / "model_index.json").is_file():
            return folder
    fault = f"{FIELD}: {path} is no folder of a pipeline here"
    remedy = (
        f"A plan needs its configuration files alone: shipped with flowgrpo_rc are those of {names}; of another, give "
        "its name on the hub (with access to it), or a folder with its model_index.json and the config.json of every "
        "part"
    )
    if local.exists() or path.count("/") != 1:
        raise PlanError(f"{fault}. {remedy}")
    from huggingface_hub import snapshot_download

    try:
        # Without weights, so that a plan of any pipeline downloads a few kilobytes.
        folder = Path(snapshot_download(path, allow_patterns=["model_index.json", "*/config.json"]))
    except Exception as error:  # no network, no such name, no access: each has errors of its own
        raise PlanError(f"{fault} and cannot be read from the hub ({one_line(error, 200)}). {remedy}") from error
    if not (folder / "model_index.json").is_file():
        raise PlanError(f"{fault}, and on the hub it is no diffusers pipeline. {remedy}")
    return folder


def shipped_names() -> list[str]:
    """The hub names of the pipelines whose configuration files come with the package."""
    return sorted(str(file.parent.relative_to(SHIPPED)) for file in SHIPPED.glob("*/*/model_index.json"))


def replace_tensors(network: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace a network's parameters and floating-point buffers, each once. ``Module.to`` swaps tensors in place, which
    fake ones refuse, as they are held by weak references."""
    made = {p: nn.Parameter(change(p), requires_grad=p.requires_grad) for p in network.parameters()}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[parameter]  # one for all places of a tied weight
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = change(buffer)


def parameters_of(network: nn.Module) -> int:
    """Number of a network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def bytes_of(network: nn.Module) -> int:
    """Bytes of a network's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*network.parameters(), *network.buffers()))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{FIELD}: {file} cannot be read ({one_line(error, 200)})") from error
    if not isinstance(content, dict):
        raise PlanError(f"{FIELD}: {file} holds a JSON {type(content).__name__}; it must be an object")
    # A shipped pipeline may name another one for a part, with the keys that differ.
    same = content.pop("_same_as", None)
    return content if same is None else _read_json(SHIPPED / str(same) / file.name) | content
