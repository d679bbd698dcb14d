"""The LoRA file that a run starts from, checked before the model is loaded."""

import json
import os
from pathlib import Path

from flowgrpo_rc.models.lora import AdapterMismatchError

FIELD = "actor_rollout_ref.model.lora_adapter_path"
FILE = "pytorch_lora_weights.safetensors"


def check_adapter_file(folder: str, rank: int, alpha: int) -> None:
    """``folder`` holds a readable LoRA of this rank and, as far as the file tells, this alpha; reads its header alone.

    Whether its layers are the model's is asked when it is loaded.

    Raises:
        AdapterMismatchError: names the file, what is wrong and the remedy.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(folder) / FILE
    if not os.path.isdir(folder):
        raise AdapterMismatchError(f"{FIELD}: {folder} is no folder; give the one that holds {FILE}")
    if not os.path.isfile(file):
        raise AdapterMismatchError(f"{FIELD}: {folder} holds no {FILE}; give a folder with a LoRA in diffusers' format")
    try:
        with safe_open(str(file), "pt") as content:
            ranks = {content.get_slice(name).get_shape()[0] for name in content.keys() if ".lora_A." in name}  # noqa: SIM118
            settings = json.loads((content.metadata() or {}).get("lora_adapter_metadata", "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise AdapterMismatchError(
            f"{FIELD}: {file} cannot be read ({str(error).splitlines()[0]}); copy it again, or start from another"
        ) from error
    if ranks and ranks != {rank}:
        there = ", ".join(map(str, sorted(ranks)))
        raise AdapterMismatchError(
            f"{FIELD}: {file} has rank {there}, actor_rollout_ref.model.lora_rank is {rank}; set it to that of the file"
        )
    scale = settings.get("transformer.lora_alpha") if isinstance(settings, dict) else None
    if scale is not None and scale != alpha:
        raise AdapterMismatchError(
            f"{FIELD}: {file} has lora_alpha {scale}, actor_rollout_ref.model.lora_alpha is {alpha}, which would "
            "scale its update differently; set it to that of the file"
        )
