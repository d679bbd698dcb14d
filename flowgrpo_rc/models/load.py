"""Load a diffusers pipeline part by part, so that nothing of it is missing, damaged or left at random."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.base import DiffusionModel, NonFiniteImageError
from flowgrpo_rc.models.parts import (
    FIELD,
    INDEX,
    Part,
    UnsupportedModelError,
    check_files,
    damaged,
    describe,
    left_out,
    one_line,
    parts_of,
    read_index,
    stored_values,
    weight_files,
)
from flowgrpo_rc.models.quiet import only_errors
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.models.vocabulary import check_tokenizer
from flowgrpo_rc.paths import resolve_asset

SUPPORTED_PIPELINES = FAMILIES.keys()
"""Pipeline classes with an adapter in this package."""
_QUIET = ("transformers.modeling_utils", "diffusers.models.modeling_utils")
"""What logs tables of missing weights that here are an error's one line."""


def read_pipeline_class(path: str) -> str:
    """Class name in ``model_index.json`` of a folder or hub repository; loads no weights.

    Raises:
        UnsupportedModelError: no path, no such folder, no index, or a class without an adapter.
    """
    return _class_name(path, _index(path))


def check_pipeline(path: str) -> str:
    """The class name as ``read_pipeline_class`` gives it, after the files of a pipeline's folder have been checked.

    Reads JSON files and file headers only; of a pipeline on the hub nothing but its index.

    Raises:
        UnsupportedModelError: see ``read_pipeline_class``; or a file of the folder is missing or damaged.
    """
    index = _index(path)
    name = _class_name(path, index)
    folder = resolve_asset(path)
    if os.path.isdir(folder):
        check_files(path, Path(folder), parts_of(path, index))
    return name


def load_model(path: str, *, dtype: str = "float32", device: Any = "cpu") -> DiffusionModel:
    """The pipeline at ``path`` with all weights in ``dtype`` on ``device``, frozen and in evaluation mode.

    The weights are read once. Small parts come first, so that what is wrong with them is known before the large ones
    are read.

    Raises:
        UnsupportedModelError: see ``check_pipeline``; or a part cannot be loaded, has missing, surplus or misshaped
            weights or some that are not finite, does not fit the other parts, or a tokenizer lacks its vocabulary.
    """
    import diffusers
    import torch

    class_name = check_pipeline(path)
    pipeline_class = getattr(diffusers, class_name)
    folder = _local_folder(path, pipeline_class)
    index = read_index(path, folder / INDEX)
    parts = parts_of(path, index)
    check_files(path, folder, parts)
    classes = {part.name: _class_of(path, part, pipeline_class) for part in parts}
    _check_complete(path, pipeline_class, {*classes, *left_out(index)})
    loaded: dict[str, Any] = dict.fromkeys(left_out(index))
    with _quiet():
        for part in sorted(parts, key=lambda part: _size(folder / part.name)):
            if part.has_weights:
                loaded[part.name] = _load_weights(path, folder, part, classes[part.name], torch_dtype(dtype))
            elif part.is_tokenizer or part.is_scheduler:
                loaded[part.name] = _load_small(path, folder, part, classes[part.name])
        with _explaining(path, INDEX):
            pipe = pipeline_class.from_pretrained(str(folder), **loaded)
    for name, tokenizer in loaded.items():
        if name.startswith("tokenizer") and tokenizer is not None:
            check_tokenizer(path, name, tokenizer, loaded.get(name.replace("tokenizer", "text_encoder")))
    pipe.to(device)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            _check_finite(path, name, part, dtype)
    with _explaining(path, "its parts do not fit together"):
        model = resolve_name(FAMILIES[class_name].adapter)(pipe)
        try:
            model.check_parts()
        except ValueError as error:
            raise damaged(path, str(error)) from error
    _try_out(path, model)
    return model


def _try_out(path: str, model: DiffusionModel) -> None:
    """Every network does its work once, on one prompt and the smallest image.

    A configuration can have the right shapes and still give a network that stops at its first input, such as with
    rotary embeddings of another size than the heads.
    """
    import torch

    from flowgrpo_rc.models.base import Conditioning
    from flowgrpo_rc.models.prompts import pad

    transformer: Any = model.transformer
    device = transformer.device
    size = model.smallest_image
    with torch.no_grad():
        with _explaining(path, "a text_encoder fails at its first prompt; is its config.json another's?"):
            prompts = pad(model.encode(["a"], model.longest_prompt))
        guidance = 1.0 if transformer.config.get("guidance_embeds") else None
        conditioning = Conditioning(prompts, None, 1.0, guidance, size, size).rows(
            torch.tensor([0]), transformer.device
        )
        latents = torch.zeros(1, *model.latent_shape(size, size), device=device)
        with _explaining(path, "the transformer fails at its first image; is its config.json another's?"):
            model.velocity(transformer, latents, torch.full((1,), 500.0, device=device), conditioning)
        with _explaining(path, "the vae fails at its first image; is its config.json another's?"):
            model.decode(latents, size, size)


def _class_name(path: str, index: dict[str, Any]) -> str:
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise damaged(path, f"{INDEX}: _class_name is {name!r}; it must name a pipeline class")
    if name not in SUPPORTED_PIPELINES:
        raise UnsupportedModelError(f"{FIELD}: {path} is a {name}; supported: {', '.join(SUPPORTED_PIPELINES)}")
    return name


def _index(path: str) -> dict[str, Any]:
    if not path:
        raise UnsupportedModelError(f"{FIELD}: is empty; give a pipeline folder or hub name")
    folder = Path(resolve_asset(path))
    if os.path.exists(folder):
        file = folder / INDEX
        if not os.path.exists(file):
            raise UnsupportedModelError(
                f"{FIELD}: {path} holds no {INDEX}, so it is not a diffusers pipeline; give the folder that "
                "save_pretrained wrote"
            )
        return read_index(path, file)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return read_index(path, Path(hf_hub_download(path, INDEX)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UnsupportedModelError(
            f"{FIELD}: {path} is neither an existing folder nor a pipeline on the hub "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error


def _local_folder(path: str, pipeline_class: Any) -> Path:
    """The pipeline's folder; that of a hub repository is its snapshot in the cache, downloaded where it is missing."""
    folder = resolve_asset(path)
    if os.path.isdir(folder):
        return Path(folder)
    with _explaining(path, "the download failed"):
        return Path(pipeline_class.download(path))


def _names(pipeline_class: Any) -> set[str]:
    return set(pipeline_class._get_signature_types())


def _class_of(path: str, part: Part, pipeline_class: Any) -> Any:
    """The class that the index names, if the pipeline takes it in this place."""
    if part.library not in ("diffusers", "transformers"):
        raise UnsupportedModelError(
            f"{FIELD}: {path} takes its {part.name} from {part.library!r}; only parts of diffusers and transformers "
            "are supported"
        )
    library = import_module(part.library)
    found = getattr(library, part.class_name, None)
    if not isinstance(found, type):
        raise UnsupportedModelError(
            f"{FIELD}: {path}/{INDEX} names {part.library}.{part.class_name} as its {part.name}, which "
            f"{part.library} {library.__version__} does not have; correct it, or install the version that wrote it"
        )
    wanted = [kind for kind in pipeline_class._get_signature_types().get(part.name, ()) if isinstance(kind, type)]
    # A tokenizer's slow and fast class are not derived from each other; what it does is checked when it is loaded.
    if (part.has_weights or part.is_scheduler) and wanted and not issubclass(found, tuple(wanted)):
        raise UnsupportedModelError(
            f"{FIELD}: {path}/{INDEX} names {part.class_name} as its {part.name}; {pipeline_class.__name__} takes "
            f"{' or '.join(kind.__name__ for kind in wanted)}"
        )
    return found


def _check_complete(path: str, pipeline_class: Any, named: set[str]) -> None:
    missing = sorted(_names(pipeline_class) - {*pipeline_class._optional_components} - named)
    if missing:
        raise damaged(path, f"{INDEX} names no {', '.join(missing)}, which a {pipeline_class.__name__} needs")


def _load_weights(path: str, folder: Path, part: Part, kind: Any, dtype: Any) -> Any:
    """A network with every weight from its files.

    Libraries only warn of missing, surplus and misshaped weights, and leave what is missing at random values.
    """
    files, variant = weight_files(folder / part.name, part.library)
    options: dict[str, Any] = {"dtype" if part.library == "transformers" else "torch_dtype": dtype}
    options |= {"variant": variant} if variant else {}
    if part.library == "transformers":
        _check_configured_size(path, folder, part, kind)
    with _explaining(path, f"{part.name}/config.json and {files[0].name} do not give a {part.class_name}"):
        network, info = kind.from_pretrained(
            str(folder / part.name), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    misshaped = [f"{name} {list(here)} instead of {list(wanted)}" for name, here, wanted in info["mismatched_keys"]]
    faults = [
        describe(sorted(info["missing_keys"]), "missing"),
        describe(sorted(info["unexpected_keys"]), "unexpected"),
        describe(sorted(misshaped), "of another shape"),
    ]
    if any(faults):
        raise damaged(
            path,
            f"{part.name}/{files[0].name} and config.json are not of one {part.class_name}: "
            f"{'; '.join(filter(None, faults))}",
        )
    return network


def _check_configured_size(path: str, folder: Path, part: Part, kind: Any) -> None:
    """The configuration is one of this kind, and of a network of about the size that the files hold.

    transformers builds a network of one kind from the configuration of another with a warning alone, and what a
    damaged configuration leaves out takes the defaults of a large model, whose missing weights it then draws at random:
    tens of gigabytes. Here the network is built without memory first.
    """
    import torch

    name = f"{part.name}/config.json"
    with _explaining(path, name):
        config = kind.config_class.from_pretrained(str(folder / part.name))
        there = kind.config_class.get_config_dict(str(folder / part.name))[0].get("model_type")
        with torch.device("meta"):
            described = sum(p.numel() for p in kind(config).parameters())
    # A full model's configuration also describes the part of it that is a text encoder.
    wanted = getattr(kind.config_class, "model_type", "")
    if there is not None and there != wanted and not wanted.startswith(f"{there}_"):
        raise damaged(path, f"{name} is that of a {there}, but {INDEX} names {part.class_name}")
    held = stored_values(path, folder, part)
    # Twice: a matrix that is tied to another is stored once.
    if held is not None and described > 2 * held:
        raise damaged(path, f"{name} describes a network of {described:,} parameters, its files hold {held:,}")


def _load_small(path: str, folder: Path, part: Part, kind: Any) -> Any:
    """A tokenizer or a scheduler."""
    with _explaining(path, f"{part.name} cannot be read as a {part.class_name}"):
        return kind.from_pretrained(str(folder / part.name))


def _check_finite(path: str, name: str, network: Any, dtype: str) -> None:
    """No weight is NaN or infinite: in the file, or because it does not fit into ``dtype``."""
    import torch

    weights = {key: p for key, p in network.state_dict().items() if p.is_floating_point() and p.numel()}
    if not weights:
        return
    # The largest magnitude is NaN or infinite where a value is; one transfer from the device for all.
    largest = torch.stack([torch.linalg.vector_norm(p.detach(), float("inf")).float() for p in weights.values()])
    wrong = [key for key, fine in zip(weights, torch.isfinite(largest).tolist(), strict=True) if not fine]
    if wrong:
        raise damaged(path, f"{name}: {describe(wrong, 'of its weights hold values that are not finite')} in {dtype}")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file())


@contextmanager
def _explaining(path: str, what: str) -> Iterator[None]:
    """Turn whatever a loader raises into the refusal of a damaged pipeline.

    diffusers and transformers have no common class of errors: a damaged file shows as an ``OSError``, ``KeyError``,
    ``RuntimeError``, ``TypeError`` or others, by where it strikes.
    """
    import torch

    try:
        yield
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except NonFiniteImageError as error:
        raise UnsupportedModelError(f"{FIELD}: {path}: {error}") from error
    except ImportError as error:
        raise UnsupportedModelError(
            f"{FIELD}: {path} needs a package that is not installed ({one_line(what)}: {one_line(error)}); install it"
        ) from error
    except Exception as error:
        raise damaged(path, f"{what}: {type(error).__name__}: {one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars (a run shows one, its own) and no tables of missing weights while parts are loaded."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        with only_errors(*_QUIET):
            yield
    finally:
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()
