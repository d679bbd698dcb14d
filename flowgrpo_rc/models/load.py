"""Load a diffusers pipeline part by part, so that nothing of it is missing, damaged, left at random or held in vain."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.base import Conditioning, DiffusionModel, NonFiniteImageError, UnsupportedSchedulerError
from flowgrpo_rc.models.digests import processor_digest, stored_network_digest, tokenizer_digest
from flowgrpo_rc.models.parts import FIELD, INDEX, Part, PipelineFiles, UnsupportedModelError, describe
from flowgrpo_rc.models.prompts import pad
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.prompt import Prompt, grey_image
from flowgrpo_rc.quiet import IMPORTS, only_errors, quiet_loading

SUPPORTED_PIPELINES = FAMILIES.keys()
"""Pipeline classes with an adapter in this package."""
TEXT = "text_encoder"
"""How the names of text encoders begin in a pipeline."""
PROCESSOR = "processor"
"""The name of what prepares texts and images for a text encoder that is shown both."""


def read_pipeline_class(path: str) -> str:
    """Class name in ``model_index.json`` of a folder or hub repository; loads no weights.

    Raises:
        UnsupportedModelError: no path, no such folder, no index, or a class without an adapter.
    """
    return _find(path).class_name


def check_pipeline(path: str) -> str:
    """The class name as ``read_pipeline_class`` gives it, after the files of a pipeline's folder have been checked.

    Reads JSON files and file headers only; of a pipeline on the hub nothing but its index.

    Raises:
        UnsupportedModelError: see ``read_pipeline_class``; or a file of the folder is missing or damaged.
    """
    files = _find(path)
    if os.path.isdir(resolve_asset(path)):
        files.check()
    return files.class_name


class PipelineLoader:
    """A pipeline whose networks are read from their files when they are needed, and the text encoders given up after.

    At first it has its tokenizers and its schedule. Transformer and VAE have no weights yet (they are on torch's
    ``meta`` device), and the text encoders are missing. So prompts can be checked and encoded before the transformer
    takes memory.

    Args:
        path: folder or hub name of the pipeline.
        dtype: of all weights, a name of ``DTYPES``.
        device: where networks go.

    Raises:
        UnsupportedModelError: see ``check_pipeline``; or a configuration describes no such part, the parts do not fit
            each other, or a tokenizer lacks its vocabulary.
    """

    def __init__(self, path: str, *, dtype: str = "float32", device: Any = "cpu") -> None:
        import diffusers

        files = _find(path)
        with only_errors(IMPORTS):
            pipeline_class = getattr(diffusers, files.class_name)
        if not os.path.isdir(resolve_asset(path)):
            with _explaining(files, "the download failed"):
                files = PipelineFiles(path, Path(pipeline_class.download(path)))
        files.check()
        self._files = files
        self._classes = {part.name: _class_of(files, part, pipeline_class) for part in files.parts}
        _check_complete(files, pipeline_class)
        self._dtype = dtype
        self._device = device
        with quiet_loading("diffusers", "transformers"):
            # What is none of ours, such as an image encoder, the pipeline reads by itself.
            names = ("tokenizer", "scheduler", PROCESSOR)
            ours = [part for part in files.parts if part.has_weights or part.name.startswith(names)]
            parts = dict.fromkeys(files.left_out) | {part.name: self._without_weights(part) for part in ours}
            # What a processor's tokenizer is, diffusers would refuse in its place.
            later = {part.name: parts[part.name] for part in ours if part.is_processor}
            with _explaining(files, INDEX):
                self._pipe = pipeline_class.from_pretrained(str(files.folder), **parts | dict.fromkeys(later))
            self._pipe.register_modules(**later)
        for name, part in parts.items():
            if name.startswith("tokenizer") and part is not None:
                _check_tokenizer(files, name, part)
        self.model = self._adapted()
        """The pipeline as a model, as far as it has been read."""

    def load(self, shard: Callable[[nn.Module], None] | None = None) -> DiffusionModel:
        """Read transformer and VAE and try them out; the model is whole then but for its text encoders.

        Small networks come first, so that what is wrong with them is known before the large ones are read. ``shard``
        brings a transformer that is on the host to the device, in slices, where no device has room for all of it.

        Raises:
            UnsupportedModelError: a network has missing, surplus or misshaped weights, or some that are not finite, or
                it fails at its first input.
        """
        self._read([part for part in self._files.parts if part.has_weights and not part.name.startswith(TEXT)], shard)
        self.model = self._adapted()
        _try_networks(self._files, self.model, torch.device(self._device))
        return self.model

    def read_text_encoders(self) -> None:
        """Read what encodes prompts and try it out: the text encoders, and the VAE where prompts have images.

        Raises:
            UnsupportedModelError: as ``load``; or a text encoder does not fit its tokenizer or the transformer.
        """
        self._read([part for part in self._encoding_parts if not self._is_read(part)])
        self._check_parts(self.model)
        for part in self._text_encoders:
            name = part.name.replace("text_encoder", "tokenizer")
            tokenizer = getattr(self._pipe, name, None)
            if tokenizer is not None:
                _check_vocabulary(self._files, name, tokenizer, getattr(self._pipe, part.name))
        with _explaining(self._files, "a text_encoder fails at its first prompt; is its config.json another's?"):
            self.model.encode([self._sample_prompt], self.model.longest_prompt)

    @contextmanager
    def text_encoders(self) -> Iterator[None]:
        """Have the text encoders read inside ``with``; afterwards they and their memory are given up, unless they had
        been read before."""
        before = {part.name: getattr(self._pipe, part.name) for part in self._encoding_parts}
        if all(self._is_read(part) for part in self._encoding_parts):
            yield
            return
        from accelerate.utils.memory import clear_device_cache

        try:
            self.read_text_encoders()
            yield
        finally:
            self._pipe.register_modules(**before)
            clear_device_cache(garbage_collection=True)

    @property
    def _encoding_parts(self) -> list[Part]:
        """What must be read to encode prompts."""
        takes_images = FAMILIES[self._files.class_name].images[1] > 0
        vae = [part for part in self._files.parts if part.name == "vae" and takes_images]
        return [*self._text_encoders, *vae]

    def _is_read(self, part: Part) -> bool:
        """Whether a network has its weights."""
        network = getattr(self._pipe, part.name)
        return network is not None and not any(p.is_meta for p in network.parameters())

    @property
    def _sample_prompt(self) -> Prompt:
        """A short prompt, with a grey image where the family needs one."""
        size = self.model.smallest_image
        return Prompt("a", (grey_image(size),) * FAMILIES[self._files.class_name].images[0], size * size)

    @property
    def _text_encoders(self) -> list[Part]:
        return [part for part in self._files.parts if part.name.startswith(TEXT)]

    def _without_weights(self, part: Part) -> Any:
        """The part as it is before any network has been read; a text encoder is ``None`` until then."""
        if part.name.startswith(TEXT):
            return None
        files = self._files
        kind = self._classes[part.name]
        folder = str(files.folder / part.name)
        if not part.has_weights:
            with (
                _explaining(files, f"{part.name} cannot be read as a {part.class_name}"),
                _naming_torchvision(files, part),
            ):
                return kind.from_pretrained(folder)
        from accelerate import init_empty_weights

        with _explaining(files, _misfit(files, part)), init_empty_weights():
            return kind.from_config(kind.load_config(folder))

    def _read(self, parts: list[Part], shard: Callable[[nn.Module], None] | None = None) -> None:
        for part in sorted(parts, key=self._files.size):
            with quiet_loading("diffusers", "transformers"):
                network = _load_weights(self._files, part, self._classes[part.name], torch_dtype(self._dtype))
            network.requires_grad_(False).eval()
            if shard is not None and part.name == "transformer":
                _check_finite(self._files, part.name, network, self._dtype)
                shard(network)
            else:
                # What is left to check needs the weights, and is quicker on the device.
                network.to(self._device)
                _check_finite(self._files, part.name, network, self._dtype)
            self._pipe.register_modules(**{part.name: network})

    def _adapted(self) -> DiffusionModel:
        # Whatever the adapter's checks stumble over is a fault of the parts; what they refuse has words of its own.
        with _explaining(self._files, "its parts do not fit together"):
            model = resolve_name(FAMILIES[self._files.class_name].adapter)(self._pipe)
            self._check_parts(model)
        model.text_encoders = self.text_encoders
        model.digests = self._digests
        return model

    def _check_parts(self, model: DiffusionModel) -> None:
        try:
            model.check_parts()
        except UnsupportedSchedulerError as error:
            raise UnsupportedModelError(f"{FIELD}: {self._files.path}: {error}") from error
        except ValueError as error:
            raise self._files.damaged(str(error)) from error

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Of each text encoder and tokenizer, and of processor and VAE where prompts have images, by the name in the
        pipeline."""
        tokenizers = {name: part for name, part in self._pipe.components.items() if name.startswith("tokenizer")}
        found = {name: tokenizer_digest(part) for name, part in tokenizers.items() if part is not None}
        processor = self._pipe.components.get(PROCESSOR)
        if processor is not None:
            found[PROCESSOR] = processor_digest(processor)
        for part in self._encoding_parts:
            with _explaining(self._files, part.name):
                found[part.name] = stored_network_digest(self._files, part)
        return found


def load_model(path: str, *, dtype: str = "float32", device: Any = "cpu") -> DiffusionModel:
    """The whole pipeline at ``path``, text encoders too, with all weights in ``dtype`` on ``device``, frozen and in
    evaluation mode. Every weight is read once.

    Raises:
        UnsupportedModelError: see ``PipelineLoader`` and its methods.
    """
    loader = PipelineLoader(path, dtype=dtype, device=device)
    loader.read_text_encoders()
    return loader.load()


def _try_networks(files: PipelineFiles, model: DiffusionModel, device: torch.device) -> None:
    """Transformer and VAE do their work once, on a prompt of zeros and the smallest image.

    A configuration can have the right shapes and still give a network that stops at its first input, such as with
    rotary embeddings of another size than the heads.
    """
    transformer: Any = model.transformer
    size = model.smallest_image
    guidance = 1.0 if transformer.config.get("guidance_embeds") else None
    prompts = pad([model.blank_prompt()])
    conditioning = Conditioning(prompts, None, 1.0, guidance, size, size).rows(torch.tensor([0]), device)
    latents = torch.zeros(1, *model.latent_shape(size, size), device=device)
    with torch.no_grad():
        with _explaining(files, "the transformer fails at its first image; is its config.json another's?"):
            model.velocity(transformer, latents, torch.full((1,), 500.0, device=device), conditioning)
        with _explaining(files, "the vae fails at its first image; is its config.json another's?"):
            model.decode(latents, size, size)


def _find(path: str) -> PipelineFiles:
    """The pipeline's folder, or of one on the hub its index alone."""
    if not path:
        raise UnsupportedModelError(f"{FIELD}: is empty; give a pipeline folder or hub name")
    folder = Path(resolve_asset(path))
    if os.path.exists(folder):
        if not os.path.exists(folder / INDEX):
            raise UnsupportedModelError(
                f"{FIELD}: {path} holds no {INDEX}, so it is not a diffusers pipeline; give the folder that "
                "save_pretrained wrote"
            )
        return PipelineFiles(path, folder)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return PipelineFiles(path, Path(hf_hub_download(path, INDEX)).parent)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UnsupportedModelError(
            f"{FIELD}: {path} is neither an existing folder nor a pipeline on the hub "
            f"({type(error).__name__}: {one_line(error, 300)})"
        ) from error


def _class_of(files: PipelineFiles, part: Part, pipeline_class: Any) -> Any:
    """The class that the index names, if the pipeline takes it in this place; of a processor its tokenizer's."""
    if part.library not in ("diffusers", "transformers"):
        raise UnsupportedModelError(
            f"{FIELD}: {files.path} takes its {part.name} from {part.library!r}; only parts of diffusers and "
            "transformers are supported"
        )
    library = import_module(part.library)
    found = getattr(library, part.class_name, None)
    if not isinstance(found, type):
        raise UnsupportedModelError(
            f"{FIELD}: {files.path}/{INDEX} names {part.library}.{part.class_name} as its {part.name}, which "
            f"{part.library} {library.__version__} does not have; correct it, or install the version that wrote it"
        )
    wanted = [kind for kind in pipeline_class._get_signature_types().get(part.name, ()) if isinstance(kind, type)]
    # A tokenizer's slow and fast class are not derived from each other; what it does is checked when it is loaded.
    if (part.has_weights or part.name == "scheduler") and wanted and not issubclass(found, tuple(wanted)):
        raise UnsupportedModelError(
            f"{FIELD}: {files.path}/{INDEX} names {part.class_name} as its {part.name}; {pipeline_class.__name__} "
            f"takes {' or '.join(kind.__name__ for kind in wanted)}"
        )
    # It is given texts alone, and its other half, for images, would need torchvision.
    return library.PreTrainedTokenizerFast if part.is_processor else found


def _check_complete(files: PipelineFiles, pipeline_class: Any) -> None:
    # Without its settings, which are arguments with a default.
    needed = set(pipeline_class._get_signature_keys(pipeline_class)[0]) - {*pipeline_class._optional_components}
    missing = sorted(needed - {part.name for part in files.parts} - {*files.left_out})
    if missing:
        raise files.damaged(f"{INDEX} names no {', '.join(missing)}, which a {pipeline_class.__name__} needs")


def _load_weights(files: PipelineFiles, part: Part, kind: Any, dtype: Any) -> Any:
    """A network with every weight from its files.

    Libraries only warn of missing, surplus and misshaped weights, and leave what is missing at random values.
    """
    file, variant = files.weights(part)
    options = {"variant": variant} if variant else {}
    if part.library == "transformers":
        _check_configured_size(files, part, kind)
    options["dtype" if part.library == "transformers" else "torch_dtype"] = dtype
    with _explaining(files, _misfit(files, part)):
        network, info = kind.from_pretrained(
            str(files.folder / part.name), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    misshaped = [f"{name} {list(here)} instead of {list(wanted)}" for name, here, wanted in info["mismatched_keys"]]
    loaded = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": misshaped}
    faults = describe(loaded)
    if faults:
        raise files.damaged(f"{file} and config.json are not of one {part.class_name}: {faults}")
    return network


def _misfit(files: PipelineFiles, part: Part) -> str:
    """What is said where a part's class cannot be made from its files."""
    file, _ = files.weights(part)
    return f"{part.name}/config.json and {Path(file).name} do not give a {part.class_name}"


def _check_configured_size(files: PipelineFiles, part: Part, kind: Any) -> None:
    """The configuration is one of this kind, and of a network of about the size that the files hold.

    transformers builds a network of one kind from the configuration of another with a warning alone, and what a
    damaged configuration leaves out takes the defaults of a large model, whose missing weights it then draws at random:
    tens of gigabytes. Here the network is built without memory first.
    """
    name = f"{part.name}/config.json"
    with _explaining(files, name):
        config = kind.config_class.from_pretrained(str(files.folder / part.name))
        with torch.device("meta"):
            described = sum(p.numel() for p in kind(config).parameters())
    # A full model's configuration also describes the part of it that is a text encoder.
    there = files.read_json(name).get("model_type")
    wanted = getattr(kind.config_class, "model_type", "")
    if there is not None and there != wanted and not wanted.startswith(f"{there}_"):
        raise files.damaged(f"{name} is that of a {there}, but {INDEX} names {part.class_name}")
    held = files.stored_values(part)
    # Twice: a matrix that is tied to another is stored once.
    if held is not None and described > 2 * held:
        raise files.damaged(f"{name} describes a network of {described:,} parameters, its files hold {held:,}")


def _check_tokenizer(files: PipelineFiles, name: str, tokenizer: Any) -> None:
    """It tells texts apart.

    transformers builds one without its vocabulary too, and every prompt then gives the same tokens.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise files.damaged(f"{name} is a {type(tokenizer).__name__}, which is no tokenizer")
    # Any vocabulary has tokens for these texts, all different.
    tokens = {tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in ("a", "the cat", "1 2 3")}
    if len(tokens) < 3 or not all(tokens) or any(tokenizer.unk_token_id in row for row in tokens):
        raise files.damaged(
            f"{name} has a vocabulary of {len(tokenizer)} tokens and cannot tell texts apart; are its files "
            f"there and whole? It reads {', '.join(sorted({*tokenizer.vocab_files_names.values()}))}"
        )


def _check_vocabulary(files: PipelineFiles, name: str, tokenizer: Any, encoder: Any) -> None:
    """Its text encoder has an embedding for every token."""
    largest = max(tokenizer.get_vocab().values())
    rows = encoder.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise files.damaged(
            f"{name} has tokens up to {largest}, its text encoder only {rows}; it is that of another model"
        )


def _check_finite(files: PipelineFiles, name: str, network: Any, dtype: str) -> None:
    """No weight is NaN or infinite: in the file, or because it does not fit into ``dtype``."""
    weights = {key: p for key, p in network.state_dict().items() if p.is_floating_point() and p.numel()}
    if not weights:
        return
    # The largest magnitude is NaN or infinite where a value is; one transfer from the device for all.
    largest = torch.stack([torch.linalg.vector_norm(p.detach(), float("inf")).float() for p in weights.values()])
    wrong = [key for key, fine in zip(weights, torch.isfinite(largest).tolist(), strict=True) if not fine]
    if wrong:
        faults = describe({"of its weights hold values that are not finite": wrong})
        raise files.damaged(f"{name}: {faults} in {dtype}")


@contextmanager
def _naming_torchvision(files: PipelineFiles, part: Part) -> Iterator[None]:
    """transformers' processors of images and videos insist on torchvision, which reads the videos, and what they raise
    without it depends on the files."""
    from transformers.utils import is_torchvision_available

    try:
        yield
    except Exception as error:
        if part.name != PROCESSOR or is_torchvision_available():
            raise
        raise UnsupportedModelError(
            f"{FIELD}: {files.path} prepares reference images with a {part.class_name}, for which transformers needs "
            "torchvision; pip install 'flowgrpo_rc[edit]'"
        ) from error


@contextmanager
def _explaining(files: PipelineFiles, what: str) -> Iterator[None]:
    """Turn whatever a loader raises into the refusal of a damaged pipeline.

    diffusers and transformers have no common class of errors: a damaged file shows as an ``OSError``, ``KeyError``,
    ``RuntimeError``, ``TypeError`` or others, by where it strikes.
    """
    try:
        yield
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except NonFiniteImageError as error:
        raise UnsupportedModelError(f"{FIELD}: {files.path}: {error}") from error
    except ImportError as error:
        raise UnsupportedModelError(
            f"{FIELD}: {files.path} needs a package that is not installed ({what}: {one_line(error, 300)}); install it"
        ) from error
    except Exception as error:
        raise files.damaged(f"{what}: {type(error).__name__}: {one_line(error, 300)}") from error
