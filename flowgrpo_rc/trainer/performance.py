"""Speed of a step and memory of the run, under verl-omni's names for the metrics that it logs too."""

import resource
import sys

import torch

TRAINING_STAGES = ("rollout", "probe", "reward", "score", "correct", "advantage", "update", "sync")
"""The stages of every batch of images; validation, checkpoints and logging are left out."""
_GB = 1024**3


def speed(
    times: dict[str, float], images: int, processes: int, seconds_at_peak: float | None = None
) -> dict[str, float]:
    """Time per image by stage, and images per second.

    Args:
        times: seconds as ``timing_s/<stage>``. Without an update there are no metrics.
        images: of the batch, over all processes.
        processes: each has one GPU.
        seconds_at_peak: time of one such GPU at its peak for the transformer's forwards and backwards and for decoding;
            ``None`` if unknown.
    """
    found = {stage: times[f"timing_s/{stage}"] for stage in TRAINING_STAGES if f"timing_s/{stage}" in times}
    # A row of a validation alone has no images of training.
    if "update" not in found:
        return {}
    seconds = sum(found.values())
    metrics = {
        **{f"timing_per_image_ms/{stage}": 1000 * value / images for stage, value in found.items()},
        "perf/total_num_images": float(images),
        "perf/time_per_step": seconds,
        "perf/images_per_second": images / seconds,
        "perf/throughput": images / seconds / processes,
    }
    if seconds_at_peak is not None:
        metrics["perf/mfu"] = seconds_at_peak / (seconds * processes)
    return metrics


def peak_memory(device: torch.device) -> dict[str, float]:
    """The most memory that this process has held so far, in GiB."""
    # The kernel counts kilobytes on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"perf/max_memory_resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GB}
    if device.type == "cuda":
        found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / _GB
        found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / _GB
    return found
