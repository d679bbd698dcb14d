"""Devices and environment variables of an engine's process."""

import os

import torch

from flowgrpo_rc.processes import without_process_group
from flowgrpo_rc.threads import limit_spinning

_FIELD = "actor_rollout_ref.rollout.devices"


def engine_environment(*devices: str) -> dict[str, str]:
    """The trainer's environment without its process group, and with these GPUs alone, numbered from 0.

    Raises:
        ValueError: ``CUDA_VISIBLE_DEVICES`` lists no such GPU.
    """
    own = without_process_group(os.environ)
    # vllm would report each start to its authors, and fill the output with progress.
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | own
    limit_spinning(environment)
    if not torch.accelerator.is_available():
        # vllm cannot find out by itself that there is no accelerator.
        environment.setdefault("VLLM_TARGET_DEVICE", "cpu")
    gpus = [torch.device(device).index or 0 for device in devices if torch.device(device).type == "cuda"]
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(gpu, own.get("CUDA_VISIBLE_DEVICES")) for gpu in gpus)
    return environment


def with_threads(environment: dict[str, str]) -> dict[str, str]:
    """``environment`` with the trainer's number of threads; with another number the last bits differ."""
    return environment | {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def check_devices(*devices: str) -> None:
    """Refuse GPUs that this process does not see.

    Raises:
        ValueError: names the device.
    """
    seen = torch.cuda.device_count()
    for device in devices:
        if torch.device(device).type == "cuda" and (torch.device(device).index or 0) >= seen:
            there = f"cuda:0 to cuda:{seen - 1}" if seen else "no GPU"
            raise ValueError(f"{_FIELD}: got {device}, but this process sees {there}; name devices that are there")


def inside(device: str) -> str:
    """The name of ``device`` in a process that ``engine_environment`` shows no other GPU."""
    return "cuda:0" if device.startswith("cuda") else device


def _visible(index: int, visible: str | None) -> str:
    """The GPU ``index`` of this process, as the variable ``CUDA_VISIBLE_DEVICES`` names it."""
    if not visible:
        return str(index)
    listed = visible.split(",")
    if index >= len(listed):
        raise ValueError(f"{_FIELD}: got cuda:{index}, but CUDA_VISIBLE_DEVICES={visible} shows {len(listed)} GPUs")
    return listed[index]
