"""Run a program with a CPU's float16 linear layers computed in float32 and rounded to float16; by ``gap_study.py``.

    python benchmarks/float16_on_cpu.py -m flowgrpo_rc.cli.main train <arguments>
    python benchmarks/float16_on_cpu.py benchmarks/clip_alternatives.py centred <arguments>

A processor without float16 arithmetic computes such a product that way too, element by element, and takes several
times as long as for float32. ``--compare`` prints how long both take and how far each lies from float64: one element in
a thousand comes out on the other side of a rounding, as the sums run in another order.
"""

import runpy
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

OWN_LINEAR = functional.linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``; for float16 on a CPU with the sums in float32, rounded once at the end."""
    if input.dtype != torch.float16 or input.device.type != "cpu":
        return OWN_LINEAR(input, weight, bias)
    return OWN_LINEAR(input.float(), weight.float(), None if bias is None else bias.float()).half()


def compare() -> None:
    """Both products side by side on layers of the demo's model's sizes."""
    torch.manual_seed(0)
    for rows, inputs, outputs in ((3072, 128, 512), (3072, 512, 128), (3072, 128, 128)):
        layer = (torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs))
        arguments = tuple(tensor.half() for tensor in layer)
        exact = OWN_LINEAR(*(tensor.double() for tensor in arguments))
        results = {name: product(*arguments) for name, product in PRODUCTS.items()}
        errors = {name: float((result - exact).abs().mean()) for name, result in results.items()}
        seconds = {name: _seconds(product, arguments) for name, product in PRODUCTS.items()}
        other = float((results["torch"] != results["float32"]).float().mean())
        print(
            f"{rows} x {inputs} -> {outputs}: {seconds['torch'] / seconds['float32']:.1f} times as fast, mean error "
            f"{errors['torch']:.3e} (torch) {errors['float32']:.3e} (float32), {other:.1e} of the elements differ"
        )


PRODUCTS: dict[str, Callable[..., Tensor]] = {"torch": OWN_LINEAR, "float32": linear}


def _seconds(product: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        product(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    if sys.argv[1:] == ["--compare"]:
        compare()
        return
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        sys.exit(__doc__)
    functional.linear = linear
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
