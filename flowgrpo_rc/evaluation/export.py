"""A LoRA in the formats of other programs, and merged into its transformer.

All read ``alpha / rank * up @ down`` as the change of a layer's weight. ``export_names.py`` has their names.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.evaluation.export_names import NAMES, SAME, STACKED, formats_of, their_name
from flowgrpo_rc.models.lora import ADAPTER_FILE, AdapterMismatchError, odd_scales, read_adapter
from flowgrpo_rc.models.parts import PipelineFiles

Updates = dict[str, tuple[Tensor, Tensor]]
"""Name of a layer in the transformer -> ``down`` and ``up`` of its LoRA; ``up @ down`` is the whole change."""


def read_updates(folder: Path) -> Updates:
    """The LoRA in a folder; raises ``AdapterMismatchError`` unless it is one of a transformer alone, with one scale."""
    weights, settings = read_adapter(folder)
    scale = settings.get("transformer.lora_alpha", 1) / settings.get("transformer.r", 1)
    odd = odd_scales(settings)
    updates = {}
    for first in [name for name in weights if re.fullmatch(r"transformer\..+\.lora_A\.weight", name)]:
        second = first.replace(".lora_A.", ".lora_B.")
        if second in weights:
            layer = first.removeprefix("transformer.").removesuffix(".lora_A.weight")
            updates[layer] = (weights.pop(first), weights.pop(second) * scale)
    odd += sorted(weights)
    if odd or not updates:
        fault = f"has {odd[0]}" if odd else "is empty"
        raise AdapterMismatchError(
            f"{folder / ADAPTER_FILE} {fault}; give a LoRA of a transformer alone, with one scale, as a run writes it"
        )
    return updates


def check_fit(updates: Updates, layers: Mapping[str, nn.Linear], model: str, remedy: str) -> None:
    """Raise ``AdapterMismatchError`` with a remedy where an update is of a layer that ``model`` lacks or has in another
    shape."""
    for name, (down, up) in updates.items():
        shape = f"{up.shape[0]}x{down.shape[1]}"
        there = f"{layers[name].out_features}x{layers[name].in_features}" if name in layers else "missing"
        if shape != there:
            raise AdapterMismatchError(
                f"the LoRA is another model's than {model}: its layer {name} is {shape}, there it is {there}; {remedy}"
            )


def diffusers_file(updates: Updates, dtype: torch.dtype | None) -> bytes:
    """diffusers' file. Without metadata its readers take the ranks from the matrices, and the whole strength."""
    tensors = {}
    for layer, (down, up) in updates.items():
        tensors[f"transformer.{layer}.lora_A.weight"] = _cast(layer, down, dtype)
        tensors[f"transformer.{layer}.lora_B.weight"] = _cast(layer, up, dtype)
    return save(tensors, {"format": "pt"})


def renamed_file(
    updates: Updates, dtype: torch.dtype | None, form: str, pipeline_class: str, layers: Mapping[str, nn.Linear]
) -> bytes:
    """A file for ComfyUI or kohya's tools, named ``form``; ``layers`` are all of the transformer.

    A layer of theirs that stacks several of ours gets one LoRA of the summed rank: its ``up`` is block diagonal, with
    rows of zeros for parts without a LoRA. Raises ``ValueError`` where the format has no names for the family.
    """
    names = NAMES[form].get(pipeline_class)
    if names is None:
        known = ", ".join(formats_of(pipeline_class))
        raise ValueError(f"--format: {form} has no names for a {pipeline_class}; its formats: {known}")
    parts: dict[str, list[str]] = {}
    for layer in layers:
        parts.setdefault(their_name(names, layer), []).append(layer)
    tensors: dict[str, Tensor] = {}
    for theirs, ours in parts.items():
        if not updates.keys() & set(ours):
            continue
        if len(ours) > 1:
            ours.sort(key=lambda layer: STACKED.index(layer.rpartition(".")[2]))
        down = torch.cat([updates[layer][0] for layer in ours if layer in updates])
        without = {layer: down.new_zeros(layers[layer].out_features, 0) for layer in ours}
        up = torch.block_diag(*(updates[layer][1] if layer in updates else zeros for layer, zeros in without.items()))
        # The last norm of the other models reads shift before scale, diffusers' scale before shift.
        is_last_norm = ours[0].endswith(("norm_out.linear", "norm1_context.linear")) and len(up) == 2 * down.shape[1]
        if is_last_norm and names is not SAME:
            up = torch.cat(up.chunk(2)[::-1])
        name = f"diffusion_model.{theirs}" if form == "comfyui" else f"lora_unet_{theirs.replace('.', '_')}"
        tensors[f"{name}.lora_down.weight"] = _cast(name, down, dtype)
        tensors[f"{name}.lora_up.weight"] = _cast(name, up, dtype)
        tensors[f"{name}.alpha"] = torch.tensor(float(len(down)))
    return save(tensors, {"format": "pt"})


def merge(updates: Updates, dtype: torch.dtype | None, files: PipelineFiles, target: Path) -> None:
    """Write the transformer of ``files`` with the updates in its weights into the folder ``target``. The sums are taken
    in float32. One shard at a time is read and written, each tensor in ``dtype`` or as it is stored."""
    part = next(part for part in files.parts if part.name == "transformer")
    index, variant = files.weights(part)
    if ".bin" in index:
        raise ValueError(f"--format=merged: {index} is pickled; save the pipeline anew with save_pretrained")
    for file in {"transformer/config.json", index, *files.weight_files(part)}:
        source = files.folder / file
        # ``from_pretrained`` looks for a name without a variant; the shards are found by the index.
        copy = target / (source.name.replace(f".{variant}", "") if file == index else source.name)
        if source.suffix == ".json":
            shutil.copyfile(source, copy)
            continue
        tensors = load_file(source)
        for name, stored in tensors.items():
            changed = stored
            if name.removesuffix(".weight") in updates:
                down, up = updates[name.removesuffix(".weight")]
                changed = stored.float() + up.float() @ down.float()
            tensors[name] = _cast(name, changed, dtype or stored.dtype)
        copy.write_bytes(save(tensors, {"format": "pt"}))


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype``; numbers that it does not hold are refused."""
    cast = tensor.to(dtype or tensor.dtype).contiguous()
    if not cast.isfinite().all():
        raise ValueError(f"--dtype: {name} has numbers that {dtype_name(cast.dtype)} does not hold; take another")
    return cast
