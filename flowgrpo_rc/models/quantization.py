"""The frozen base in 8 or 4 bits, under a LoRA that is trained: fewer bytes for its weights, the same products on both
sides.

torchao (``int8``, ``fp8``) and bitsandbytes (``nf4``) round each weight while its file is read, through diffusers'
quantisation configurations. Actor and engine then multiply by the same rounded numbers, so that rounding the base is no
off-policy gap. The LoRA learns on top of it (QLoRA, arXiv 2305.14314).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from flowgrpo_rc.models.parts import UnsupportedModelError

LIBRARIES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
"""The package that rounds to each of ``BASE_QUANTIZATIONS``."""
WIDE_COPIES = {"int8": 1, "fp8": 2, "nf4": 0}
"""Copies in float32 that the libraries hold of a weight while they dequantise it."""
NF4_BLOCK = 64
"""Weights that share a scale in ``nf4``."""
FP8_MAX = 448.0
"""Largest finite value of ``float8_e4m3fn``: sign, 4 exponent and 3 mantissa bits, no infinity."""


def check_packages(
    quantization: str | None = None,
    optimizer: str = "adamw",
    *,
    engine: str | None = None,
    engine_of: str = "actor_rollout_ref.rollout",
    optimizer_of: str = "actor_rollout_ref.actor",
) -> None:
    """Raise ``UnsupportedModelError`` unless the packages are installed that base, optimizer and the kernels of the
    ``engine`` need; imports none. ``engine_of`` and ``optimizer_of`` are the sections that messages name."""
    needed = []
    if quantization is not None:
        needed.append(("actor_rollout_ref.model.quantization", quantization, LIBRARIES[quantization], "null"))
    if engine in LIBRARIES:
        needed.append((f"{engine_of}.quantization", engine, LIBRARIES[engine], "null"))
    if optimizer == "adamw_8bit":
        needed.append((f"{optimizer_of}.optim.name", optimizer, "bitsandbytes", "adamw"))
    for field, value, library, without in needed:
        if find_spec(library) is None:
            raise UnsupportedModelError(
                f"{field}: got {value}, which needs {library}, and that is not installed; "
                f"pip install '.[quantization]' in a checkout, or set it to {without}"
            )


@contextmanager
def loading_options(
    quantization: str, transformer: nn.Module, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Arguments for a ``from_pretrained`` inside ``with``, which then rounds the layers of the transformer's blocks.

    Args:
        quantization: one of ``BASE_QUANTIZATIONS``.
        transformer: the same one without weights.
        device: where the weights go; each is rounded on its way there.
        dtype: of all other weights.
    """
    inside = block_layers(transformer)
    outside = [n for n, m in transformer.named_modules() if isinstance(m, nn.Linear) and n not in inside]
    if quantization == "nf4":
        from diffusers import BitsAndBytesConfig

        config: Any = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        with _own_quantizer(outside):
            yield {"quantization_config": config, "device_map": {"": device}}
        return
    from diffusers import TorchAoConfig
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    # Its settings of the compiler would be everybody's; some versions of torchao turn on TF32 with them.
    weight_only = Int8WeightOnlyConfig if quantization == "int8" else Float8WeightOnlyConfig
    kind = weight_only(set_inductor_config=False)
    config = TorchAoConfig(kind, modules_to_not_convert=[f"{name}.weight" for name in outside])
    # With a device map diffusers leaves what goes to the host unrounded.
    yield {"quantization_config": config} | ({} if device.type == "cpu" else {"device_map": {"": device}})


def block_layers(transformer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the transformer's blocks, by name. Those before, between and behind the blocks hold a
    percent of the weights, and their rounding would enter every block."""
    blocks = set(getattr(transformer, "_no_split_modules", None) or ())
    return {
        f"{place}.{name}": layer
        for place, block in transformer.named_modules()
        if type(block).__name__ in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    }


@contextmanager
def _own_quantizer(kept: list[str]) -> Iterator[None]:
    """Inside, diffusers loads bitsandbytes' weights on a CPU too, leaves the layers with the full names ``kept`` as
    they are, and refuses weights that are not finite."""
    from diffusers.quantizers import auto
    from diffusers.quantizers.bitsandbytes import BnB4BitDiffusersQuantizer

    class Quantizer(BnB4BitDiffusersQuantizer):
        def validate_environment(self, *_args: Any, **_kwargs: Any) -> None:
            """diffusers asks for a GPU, though bitsandbytes has kernels for a CPU."""

        def _process_model_before_weight_loading(self, model: Any, *args: Any, **more: Any) -> None:
            layers = {name: model.get_submodule(name) for name in kept}
            super()._process_model_before_weight_loading(model, *args, **more)
            # By names diffusers cannot tell FLUX's last ``proj_out`` from those of its blocks.
            for name, layer in layers.items():
                model.set_submodule(name, layer)

        def create_quantized_param(self, model: Any, param_value: Any, param_name: str, *args: Any, **more: Any) -> Any:
            # Rounding would turn NaN into some number.
            if not torch.isfinite(param_value).all():
                raise UnsupportedModelError(f"{param_name} holds values that are not finite")
            return super().create_quantized_param(model, param_value, param_name, *args, **more)

    name = "bitsandbytes_4bit"
    before = auto.AUTO_QUANTIZER_MAPPING[name]
    auto.AUTO_QUANTIZER_MAPPING[name] = Quantizer
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING[name] = before


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that multiplies by its dequantised weight, with and without gradients alike.

    Autograd keeps the rounded weight for the backward pass. torchao's own layers keep a dequantised one each: the whole
    transformer in ``dtype`` at the end of a forward without gradient checkpointing.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self)  # pyright: ignore[reportReturnType]

    def product(self, input: Tensor) -> Tensor:
        """The layer's output, without gradients."""
        return F.linear(input, self.dense(), self.bias)

    def dense(self) -> Tensor:
        """The weight that the layer multiplies by, ``(out, in)``."""
        return dequantized(self.weight)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return layer.product(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ ctx.layer.dense(), None


def replace_rounded_layers(transformer: nn.Module) -> None:
    """Turn the rounded layers of a loaded transformer into ``QuantizedLinear``."""
    for module in transformer.modules():
        if isinstance(module, nn.Linear) and is_quantized(module.weight):
            module.requires_grad_(False)
            module.__class__ = QuantizedLinear
    # diffusers and peft would treat the layers as the library's own.
    for name in ("is_loaded_in_4bit", "is_quantized", "hf_quantizer", "quantization_method"):
        if name in vars(transformer):
            delattr(transformer, name)


def is_quantized(weight: Tensor) -> bool:
    """The weight is rounded to one of ``BASE_QUANTIZATIONS``."""
    return hasattr(weight, "quant_state") or (type(weight).__module__.startswith("torchao."))


def dequantized(weight: Tensor) -> Tensor:
    """A weight's numbers ``(out, in)`` as the layer multiplies by them; of one that is not rounded, itself."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, state)
    return weight.dequantize() if is_quantized(weight) else weight


def numbers_of(weight: Tensor) -> int:
    """The number of values in a weight; bitsandbytes packs two in a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else state.shape.numel()


def held_bytes(quantization: str, out: int, inputs: int) -> int:
    """Bytes of a rounded weight ``(out, in)`` with its scales, which are float32."""
    numbers = out * inputs
    if quantization == "nf4":
        return -(-numbers // 2) + 4 * -(-numbers // NF4_BLOCK)
    # torchao has a scale a row, and in int8 a zero point of a byte.
    return numbers + out * (5 if quantization == "int8" else 4)


@torch.no_grad()
def round_fp8_rows(weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """``weight`` rounded through ``float8_e4m3fn`` with one scale per output row, absmax / 448; dtype unchanged.

    A row's largest element lands on 448 and comes back exactly, so rounding twice is rounding once. Rows of zeros stay
    zero. A row that is not finite becomes NaN. Every device gives the same bits.
    """
    wide = weight.float()
    # A tensor: CUDA multiplies by the rounded reciprocal of a plain number, where a host divides.
    fp8_max = torch.full((), FP8_MAX, device=weight.device)
    absmax = wide.abs().amax(dim=1, keepdim=True)
    absmax = torch.where(absmax == 0, 1.0, absmax)  # a row of zeros would be divided by 0
    codes = (wide / absmax * fp8_max).to(torch.float8_e4m3fn)
    return (codes.float() / fp8_max * absmax).to(weight.dtype)


def round_fp8_layers(layers: Iterable[nn.Linear]) -> None:
    """Give linear layers weights of their own, rounded by ``round_fp8_rows``."""
    for layer in layers:
        layer.weight = nn.Parameter(round_fp8_rows(layer.weight), requires_grad=False)
