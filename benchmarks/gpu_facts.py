"""Prints as JSON what a GPU chooses: versions, TF32, attention kernels and their times, and what keeps its bits.

    python benchmarks/gpu_facts.py

Without a GPU it tries one small shape and measures no time.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from machine import describe
from torch import Tensor

KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
SHAPES = {
    "Qwen-Image, 512": (16, 24, 1280, 128),
    "Qwen-Image, 1024": (2, 24, 4352, 128),
    "SD3.5, 512": (16, 24, 1357, 64),
}
"""Rows, heads, tokens and the size of a head."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def main() -> None:
    shapes = SHAPES if CUDA else {"tiny": (2, 2, 40, 32)}
    facts = {
        "machine": describe(),
        "cudnn": torch.backends.cudnn.version(),
        "TF32 in products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 in convolutions": torch.backends.cudnn.allow_tf32,
        "attention": [
            attention(label, shape, dtype, masked)
            for label, shape in shapes.items()
            for dtype in (torch.bfloat16, torch.float32)
            for masked in (False, True)
        ],
        "rows whose product has the bits of 4096": rows_with_equal_bits(),
        "products": [product(*sizes) for sizes in ((3072, 3072), (3072, 12288), (12288, 3072))] if CUDA else [],
    }
    print(json.dumps(facts, indent=1))


def milliseconds(run: Callable[[], object]) -> float | None:
    """Of one call, by CUDA events; ``None`` without a GPU."""
    run()
    if not CUDA:
        return None
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(5):
        run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 5


def attention(label: str, shape: tuple[int, int, int, int], dtype: torch.dtype, masked: bool) -> dict[str, Any]:
    """The kernel that torch chooses, its time, and whether its numbers repeat."""
    rows, heads, tokens, size = shape
    values = (torch.randn(rows, tokens, heads, size, device=DEVICE, dtype=dtype).transpose(1, 2) for _ in range(3))
    q, k, v = (one.requires_grad_() for one in values)
    mask = None
    if masked:
        lengths = torch.randint(tokens // 2, tokens, (rows, 1), device=DEVICE)
        mask = (torch.arange(tokens, device=DEVICE) < lengths)[:, None, None]
    found: dict[str, Any] = {"shape": label, "dtype": str(dtype), "mask": masked}
    try:
        found["kernel"] = KERNELS[torch._fused_sdp_choice(q, k, v, attn_mask=mask)]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)

        found["forward, ms"] = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask).detach())
        found["backward, ms"] = milliseconds(backward)
        found["backward repeats"] = torch.equal(backward()[0], backward()[0])
        one = F.scaled_dot_product_attention(q[:1], k[:1], v[:1], attn_mask=None if mask is None else mask[:1])
        found["one row has the batch's bits"] = torch.equal(one, out[:1])
    except (RuntimeError, NotImplementedError) as error:  # a kernel that this GPU does not have
        found["error"] = str(error)[:300]
    return found


def rows_with_equal_bits() -> dict[int, bool]:
    """By number of rows: a bfloat16 product of so many has the bits of 4096. Engine and actor differ in their rows."""
    x, w = (torch.randn(rows, 3072, device=DEVICE, dtype=torch.bfloat16) for rows in (4096, 3072))
    whole = x @ w.T
    return {rows: torch.equal(x[:rows] @ w.T, whole[:rows]) for rows in (64, 256, 1024, 2048)}


def product(inputs: int, outputs: int, rows: int = 32 * 1280, rank: int = 64) -> dict[str, Any]:
    """Milliseconds of one of Qwen-Image's layers: in bfloat16, in fp8 and int8, and of a LoRA beside it."""
    x, w = (torch.randn(n, inputs, device=DEVICE, dtype=torch.bfloat16) for n in (rows, outputs))
    a, b = torch.randn(rank, inputs, device=DEVICE), torch.randn(outputs, rank, device=DEVICE)
    found: dict[str, Any] = {"rows": rows, "inputs": inputs, "outputs": outputs}
    found["bfloat16"] = milliseconds(lambda: x @ w.T)
    found["LoRA, bfloat16"] = milliseconds(lambda: x @ a.bfloat16().T @ b.bfloat16().T)
    found["LoRA, float32"] = milliseconds(lambda: x.float() @ a.T @ b.T)
    one = torch.ones(1, device=DEVICE)
    try:
        halves = (x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn))
        fast = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        found["fp8"] = milliseconds(lambda: torch._scaled_mm(halves[0], halves[1].T, **fast))
        integers = (x.to(torch.int8), w.to(torch.int8))
        found["int8"] = milliseconds(lambda: torch._int_mm(integers[0], integers[1].T))
    except (RuntimeError, NotImplementedError) as error:
        found["error"] = str(error)[:300]
    return found


if __name__ == "__main__":
    main()
