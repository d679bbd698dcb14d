"""Load a diffusers pipeline after checking, from its index alone, that we can train it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.paths import resolve_asset

SUPPORTED_PIPELINES = ("QwenImagePipeline",)
"""Pipeline classes with an adapter in this package."""


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

    from flowgrpo_rc.models.qwen_image import QwenImage

    class_name = read_pipeline_class(path)
    try:
        with _without_progress_bars():
            pipe = getattr(diffusers, class_name).from_pretrained(resolve_asset(path), dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"actor_rollout_ref.model.path: {path} cannot be loaded; is the download complete? "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    pipe.to(device)
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder):
        part.requires_grad_(False).eval()
    return QwenImage(pipe)


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
