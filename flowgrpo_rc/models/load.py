"""Load a diffusers pipeline after checking, from its index alone, that we can train it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.paths import resolve_asset

_ADAPTERS = {
    "QwenImagePipeline": ("qwen_image", "QwenImage"),
    "StableDiffusion3Pipeline": ("stable_diffusion_3", "StableDiffusion3"),
}
"""Module and class of each pipeline's adapter."""
SUPPORTED_PIPELINES = tuple(_ADAPTERS)
"""Pipeline classes with an adapter in this package."""
_DISPENSABLE = ("text_encoder_3", "tokenizer_3")
"""What Stable Diffusion 3 draws without: its T5, by far its largest part."""


class UnsupportedModelError(ValueError):
    """The path is not a diffusers pipeline, or not one of a supported family."""


def read_pipeline_class(path: str) -> str:
    """Class name in ``model_index.json`` of a folder or hub repository; loads no weights.

    Raises:
        UnsupportedModelError: no path, no such folder, no index, or a class without an adapter.
    """
    if not path:
        raise UnsupportedModelError("actor_rollout_ref.model.path: is empty; give a pipeline folder or hub name")
    index = _index(resolve_asset(path))
    name = index.get("_class_name")
    if name not in SUPPORTED_PIPELINES:
        raise UnsupportedModelError(
            f"actor_rollout_ref.model.path: {path} is a {name}; supported: {', '.join(SUPPORTED_PIPELINES)}"
        )
    return str(name)


def load_model(path: str, *, dtype: str = "float32", device: Any = "cpu") -> DiffusionModel:
    """The pipeline at ``path`` with all weights in ``dtype`` on ``device``, frozen and in evaluation mode.

    Raises:
        UnsupportedModelError: see ``read_pipeline_class``; or parts of the pipeline are missing.
    """
    import diffusers
    import torch

    class_name, folder = read_pipeline_class(path), resolve_asset(path)
    left_out = _check_parts(path, folder)
    try:
        with _without_progress_bars():
            pipe = getattr(diffusers, class_name).from_pretrained(folder, dtype=getattr(torch, dtype), **left_out)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"actor_rollout_ref.model.path: {path} cannot be loaded; is the download complete? "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    pipe.to(device)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    module, adapter = _ADAPTERS[class_name]
    return getattr(import_module(f"flowgrpo_rc.models.{module}"), adapter)(pipe)


def _check_parts(path: str, source: str) -> dict[str, None]:
    """Parts that were left out on purpose; a folder must hold all others, since some load without their files."""
    parts = {name: entry for name, entry in _index(source).items() if isinstance(entry, list)}
    missing = [name for name, entry in parts.items() if any(entry) and not (Path(source) / name).is_dir()]
    if Path(source).is_dir() and missing:
        raise UnsupportedModelError(
            f"actor_rollout_ref.model.path: {path} cannot be loaded; is the download complete? (it holds no "
            f"{', '.join(missing)})"
        )
    return {name: None for name in _DISPENSABLE if name in parts and not any(parts[name])}


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """diffusers and transformers each draw a bar per component; a run shows one bar, its own."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()


def _index(path: str) -> dict[str, Any]:
    folder = Path(path)
    if folder.exists():
        file = folder / "model_index.json"
        if not file.is_file():
            raise UnsupportedModelError(
                f"actor_rollout_ref.model.path: {path} holds no model_index.json, so it is not a diffusers pipeline; "
                "give the folder that save_pretrained wrote"
            )
        return json.loads(file.read_text())
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return json.loads(Path(hf_hub_download(path, "model_index.json")).read_text())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UnsupportedModelError(
            f"actor_rollout_ref.model.path: {path} is neither an existing folder nor a pipeline on the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
