"""Rollout correction against verl's helper: time ratios and memory.

    python benchmarks/correction.py --json benchmarks/results/correction.json

Both run in one process and alternate; the figure is the median of the pairwise ratios verl / ours. Token-level
weights, three criteria, all metrics; once with bounds beyond the largest differences, once with bounds within them.
Runs on the GPU with CUDA events where there is one, else on the CPU; without verl 0.9.1 (`make verl` puts it into
`.venv/verl`: `PYTHONPATH=.venv/verl`) only our own figures are made.
"""

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe

from flowgrpo_rc.correction import compute_rollout_correction_and_rejection_mask

SHAPES = ((16, 1), (512, 2), (512, 10), (64, 4096), (256, 8192))
OPTIONS: dict[str, Any] = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2",
    "rollout_rs_threshold": "0.6_1.4,0.01,0.5",
}
BINDING: dict[str, Any] = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.05,
    "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2",
    "rollout_rs_threshold": "0.95_1.05,0.001,0.01",
}
"""At differences of 0.05 a sixth of the elements lies above each bound and a sixth below."""
LARGEST = SHAPES[-1]


def batch(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs 0.05 apart and a float mask; long rows end at random lengths."""
    g = torch.Generator().manual_seed(0)
    p = -torch.rand(rows, columns, generator=g)
    q = p + 0.05 * torch.randn(rows, columns, generator=g)
    ends = torch.randint(max(columns // 2, 1), columns + 1, (rows, 1), generator=g)
    mask = (torch.arange(columns) < ends).float() if columns > 10 else torch.ones(rows, columns)
    return p.to(device), q.to(device), mask.to(device)


def clock(run: Callable[[], object], device: str) -> float:
    """Seconds of one call: by CUDA events on a GPU, by the wall clock otherwise."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def compare(
    rows: int, columns: int, device: str, verl: Callable[..., object] | None, options: dict[str, Any] = OPTIONS
) -> dict[str, float]:
    """Median seconds of ours, and of verl with the median of the pairwise ratios where there is verl."""
    data = batch(rows, columns, device)
    elements = rows * columns
    pairs = 200
    if elements >= 1e5:
        pairs = 30 if elements < 1e6 else 10
    for _ in range(3):
        compute_rollout_correction_and_rejection_mask(*data, **options)
        if verl is not None:
            verl(*data, **options)
    ours = []
    theirs = []
    for _ in range(pairs):
        ours.append(clock(lambda: compute_rollout_correction_and_rejection_mask(*data, **options), device))
        if verl is not None:
            theirs.append(clock(lambda: verl(*data, **options), device))
    out = {"ours_s": statistics.median(ours), "ours_best_s": min(ours), "pairs": pairs}
    if verl is not None:
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        out |= {"verl_s": statistics.median(theirs), "verl_best_s": min(theirs), "ratio": statistics.median(ratios)}
    return out


def extra_memory(device: str) -> float:
    """Peak memory of a first call beyond its inputs, outputs and kept buffers included, in float32 copies."""
    copy = LARGEST[0] * LARGEST[1] * 4
    data = batch(*LARGEST, device)
    compute_rollout_correction_and_rejection_mask(*batch(16, 1, device), **BINDING)  # what is loaded or parsed once
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = compute_rollout_correction_and_rejection_mask(*data, **BINDING)
        assert result.mask.numel()
        return (torch.cuda.max_memory_allocated() - before) / copy
    tracemalloc.start()  # numpy reports to it, torch to its profiler; the sum of both peaks is an upper bound
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = compute_rollout_correction_and_rejection_mask(*data, **BINDING)
    arrays = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.mask.numel()
    return (_peak(profile) + arrays) / copy


def _peak(profile: Any) -> int:
    """The largest number of bytes held at once, from every allocation and release of tensor memory."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def load_verl() -> Callable[..., object] | None:
    try:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl
    except ImportError as error:
        print(f"without verl: {error}")
        return None
    return verl


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    verl = load_verl()
    memory = extra_memory(arguments.device)
    print(f"extra memory at {LARGEST}: {memory:.2f} float32 copies of the log-probs, outputs included")
    shapes = {}
    for kind, options in (("loose", OPTIONS), ("binding", BINDING)):
        for rows, columns in SHAPES:
            figures = compare(rows, columns, arguments.device, verl, options)
            shapes[f"{rows}x{columns} {kind}"] = figures
            text = f"({rows}, {columns}), {kind} bounds: ours {figures['ours_s'] * 1e6:.0f} us"
            if verl is not None:
                text += f", verl {figures['verl_s'] * 1e6:.0f} us, {figures['ratio']:.1f} times"
            print(text, flush=True)
    if arguments.json:
        result = {
            "machine": describe(),
            "device": arguments.device,
            "threads": arguments.threads,
            "shapes": shapes,
            "extra_memory_copies": memory,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
