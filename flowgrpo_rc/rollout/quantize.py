"""Weights rounded to a narrow format and stored in a wide one: the effect of fp8 weights without fp8 hardware."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

FP8_MAX = 448.0
"""Largest finite value of ``float8_e4m3fn``: sign, 4 exponent and 3 mantissa bits, no infinity."""


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


def round_linear_weights(module: nn.Module, *, adapter: bool) -> None:
    """Give every ``nn.Linear`` in ``module`` a weight of its own, rounded; biases and all else stay as they are.

    Args:
        module: a transformer. The tensors that its linear layers held before are left untouched.
        adapter: round the LoRA matrices alone (true) or all others (false).
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and (".lora_" in name) is adapter:
            layer.weight = nn.Parameter(round_fp8_rows(layer.weight), requires_grad=False)
