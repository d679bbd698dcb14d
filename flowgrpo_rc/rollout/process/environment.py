"""What an engine's process finds when it starts: its devices, its threads, and nothing of the trainer's launcher."""

import os
from collections.abc import Mapping
from typing import Any

from flowgrpo_rc.threads import limit_spinning

_DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The trainer's process group is not the engine's."""
_FIELD = "actor_rollout_ref.rollout.devices"


def engine_environment(*devices: Any) -> dict[str, str]:
    """The trainer's environment without its process group; of GPUs with these alone, numbered from 0.

    Raises:
        ValueError: ``CUDA_VISIBLE_DEVICES`` lists no such GPU.
    """
    import torch

    own = without_process_group(os.environ)
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | own
    limit_spinning(environment)
    if not torch.accelerator.is_available():
        environment.setdefault("VLLM_TARGET_DEVICE", "cpu")
    gpus = [torch.device(device).index or 0 for device in devices if torch.device(device).type == "cuda"]
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(gpu, own.get("CUDA_VISIBLE_DEVICES")) for gpu in gpus)
    return environment


def without_process_group(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what a launcher tells the trainer's processes of each other."""
    return {k: v for k, v in environment.items() if k not in _DISTRIBUTED and not k.startswith("TORCHELASTIC_")}


def with_threads(environment: dict[str, str]) -> dict[str, str]:
    """``environment`` with as many threads to a computation as the trainer has: with others the last bits differ."""
    import torch

    return environment | {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def check_devices(*devices: str) -> None:
    """Refuse GPUs that this process does not see.

    Raises:
        ValueError: names the device.
    """
    import torch

    seen = torch.cuda.device_count()
    for device in devices:
        if torch.device(device).type == "cuda" and (torch.device(device).index or 0) >= seen:
            there = f"cuda:0 to cuda:{seen - 1}" if seen else "no GPU"
            raise ValueError(f"{_FIELD}: got {device}, but this process sees {there}; name devices that are there")


def inside(device: str) -> str:
    """What the only ``device`` of a process with ``engine_environment`` is called there."""
    return "cuda:0" if device.startswith("cuda") else device


def _visible(index: int, visible: str | None) -> str:
    """The GPU ``index`` of this process, as the variable ``CUDA_VISIBLE_DEVICES`` names it."""
    if not visible:
        return str(index)
    listed = visible.split(",")
    if index >= len(listed):
        raise ValueError(f"{_FIELD}: got cuda:{index}, but CUDA_VISIBLE_DEVICES={visible} shows {len(listed)} GPUs")
    return listed[index]
