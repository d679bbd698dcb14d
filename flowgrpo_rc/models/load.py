"""Load a diffusers pipeline part by part: nothing missing, damaged or left at random, and no network held in vain."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
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
from flowgrpo_rc.models.parts import FIELD, INDEX, Part, PipelineFiles, UnsupportedModelError, require_path
from flowgrpo_rc.models.prompts import pad
from flowgrpo_rc.models.quantization import check_packages, dequantized, loading_options, replace_rounded_layers
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.prompt import Prompt, grey_image
from flowgrpo_rc.quiet import IMPORTS, only_errors, quiet_loading
from flowgrpo_rc.transfers import indexed

SUPPORTED_PIPELINES = FAMILIES.keys()
"""Pipeline classes with an adapter in this package."""
PROCESSOR = "processor"
"""Name of the part that prepares texts and images together for a text encoder."""


def read_pipeline_class(path: str) -> str:
    """Class name in ``model_index.json`` of a folder or hub repository; loads no weights. Raises
    ``UnsupportedModelError`` for no path, no such folder, no index, or a class without an adapter."""
    return _find(path).class_name


def check_pipeline(path: str) -> str:
    """``read_pipeline_class``, after a check of the folder's files, or ``UnsupportedModelError``. It reads JSON files
    and file headers only, and of a pipeline on the hub nothing but the index."""
    files = _find(path)
    if os.path.isdir(resolve_asset(path)):
        files.check()
    return files.class_name


def pipeline_files(path: str) -> PipelineFiles:
    """The files of the pipeline at ``path``, checked as ``check_pipeline`` does; one on the hub is downloaded."""
    import diffusers

    files = _find(path)
    with only_errors(IMPORTS):
        pipeline_class = getattr(diffusers, files.class_name)
    if not os.path.isdir(resolve_asset(path)):
        with _explaining(files, "the download failed"):
            files = PipelineFiles(path, Path(pipeline_class.download(path)))
    files.check()
    return files


class PipelineLoader:
    """A pipeline whose networks are read when they are needed; the text encoders are freed afterwards.

    At first it has its tokenizers and its schedule. Transformer and VAE have no weights yet (they are on torch's
    ``meta`` device), and the text encoders are missing. So prompts can be checked and encoded before the transformer
    takes memory.

    Args:
        path: folder or hub name of the pipeline.
        dtype: of all weights, a name of ``DTYPES``.
        device: device of the networks.
        quantization: of the transformer, one of ``BASE_QUANTIZATIONS``.

    Raises:
        UnsupportedModelError: see ``check_pipeline``; or a configuration describes no such part, the parts do not fit
            each other, or a tokenizer lacks its vocabulary; or the package that quantises is not installed.
    """

    def __init__(
        self, path: str, *, dtype: str = "float32", device: Any = "cpu", quantization: str | None = None
    ) -> None:
        import diffusers

        check_packages(quantization)
        self._files = files = pipeline_files(path)
        pipeline_class = getattr(diffusers, files.class_name)
        self._classes = {part.name: _class_of(files, part) for part in files.parts}
        # The pipeline would take ``None`` for a part that its index does not name: Stable Diffusion 3 for its T5.
        needed = set(pipeline_class._get_signature_keys(pipeline_class)[0]) - {*pipeline_class._optional_components}
        missing = sorted(needed - {*self._classes, *files.left_out})
        if missing:
            raise files.damaged(f"{INDEX} names no {', '.join(missing)}, which a {files.class_name} needs")
        self._dtype = dtype
        self._device = indexed(device)
        self._quantization = quantization
        with quiet_loading("diffusers", "transformers"):
            # The pipeline itself reads parts that are not used here, such as an image encoder.
            names = ("tokenizer", "scheduler", PROCESSOR)
            ours = [part for part in files.parts if part.has_weights or part.name.startswith(names)]
            parts = dict.fromkeys(files.left_out) | {part.name: self._without_weights(part) for part in ours}
            # diffusers refuses the tokenizer of a processor in the processor's place, so it is registered later.
            later = {part.name: parts[part.name] for part in ours if part.is_processor}
            with _explaining(files, INDEX):
                self._pipe = pipeline_class.from_pretrained(str(files.folder), **parts | dict.fromkeys(later))
            self._pipe.register_modules(**later)
        for name, tokenizer in self._tokenizers.items():
            _check_tokenizer(files, name, tokenizer)
        self.model = self._adapted()  # the pipeline as a model, as far as it has been read

    def load(self, shard: Callable[[nn.Module], None] | None = None) -> DiffusionModel:
        """Read transformer and VAE and run both once; the model is then whole but for its text encoders.

        ``shard`` moves a transformer from the host to the device in slices, where no device has room for all of it.
        Raises ``UnsupportedModelError`` if a network has missing, surplus or misshaped weights, or some that are not
        finite, or it fails at its first input.
        """
        self._read([part for part in self._files.parts if part.has_weights and not part.encodes_text], shard)
        self.model = self._adapted()
        self._try_networks()
        return self.model

    def read_text_encoders(self) -> None:
        """Read the text encoders, and the VAE where prompts have images, and encode one prompt. Raises
        ``UnsupportedModelError`` as ``load``; or if a tokenizer is another text encoder's, or the embeddings are not
        those that the transformer takes."""
        self._read(self._unread())
        size = self.model.smallest_image
        prompt = Prompt("a", (grey_image(size),) * self._files.family.images[0], size * size)
        with _explaining(self._files, "a text_encoder fails at its first prompt; is its config.json another's?"):
            for part in self._encoding_parts:
                # A tokenizer with tokens that its text encoder does not embed: a later prompt would have one.
                if part.encodes_text:
                    name = part.name.replace("text_encoder", "tokenizer")
                    tokens = len(getattr(self._pipe, name))
                    rows = getattr(self._pipe, part.name).get_input_embeddings().num_embeddings
                    if tokens > rows:
                        raise self._files.mixed(f"{name} has {tokens:,} tokens, {part.name} embeds {rows:,}")
            (gives,) = self.model.encode([prompt], self.model.longest_prompt)
        # Before sampling: the transformer would fail at its first prompt, minutes later.
        found, taken = (
            [tensor.shape[-1] for tensor in (prompt.embeds, prompt.pooled) if tensor is not None]
            for prompt in (gives, self.model.blank_prompt())
        )
        if found != taken:
            fault = f"the text encoders give embeddings of width {found}, the transformer takes {taken}"
            raise self._files.mixed(fault)

    @contextmanager
    def text_encoders(self) -> Iterator[None]:
        """Hold the text encoders in memory inside ``with``; free them afterwards unless they had been read before."""
        if not self._unread():
            yield
            return
        from accelerate.utils.memory import clear_device_cache

        before = {part.name: getattr(self._pipe, part.name) for part in self._encoding_parts}
        try:
            self.read_text_encoders()
            yield
        finally:
            self._pipe.register_modules(**before)
            clear_device_cache(garbage_collection=True)

    @property
    def _tokenizers(self) -> dict[str, Any]:
        parts = self._pipe.components.items()
        return {name: part for name, part in parts if name.startswith("tokenizer") and part is not None}

    @property
    def _encoding_parts(self) -> list[Part]:
        """The networks that encode prompts."""
        takes_images = self._files.family.images[1] > 0
        return [p for p in self._files.parts if p.encodes_text or (p.name == "vae" and takes_images)]

    def _unread(self) -> list[Part]:
        """Those of the networks that encode prompts which have no weights yet."""
        networks = {part: getattr(self._pipe, part.name) for part in self._encoding_parts}
        return [p for p, network in networks.items() if network is None or any(w.is_meta for w in network.parameters())]

    def _without_weights(self, part: Part) -> Any:
        """The part before any network has been read; a text encoder is ``None`` until then."""
        if part.encodes_text:
            return None
        files = self._files
        kind = self._classes[part.name]
        folder = str(files.folder / part.name)
        file = f"{part.name}/config.json" if part.has_weights else part.name
        with _explaining(files, f"{file} cannot be read as a {part.class_name}"):
            if part.has_weights:
                from accelerate import init_empty_weights

                with init_empty_weights():
                    return kind.from_config(kind.load_config(folder))
            from transformers.utils import is_torchvision_available

            try:
                return kind.from_pretrained(folder)
            except Exception as error:
                if part.name != PROCESSOR or is_torchvision_available():
                    raise
                # Without torchvision, transformers' processors raise errors of several kinds.
                raise UnsupportedModelError(
                    f"{FIELD}: {files.path} prepares reference images with a {part.class_name}, for which transformers "
                    "needs torchvision; pip install '.[edit]' in a checkout"
                ) from error

    def _read(self, parts: list[Part], shard: Callable[[nn.Module], None] | None = None) -> None:
        # The transformer last: a fault of the VAE shows before its gigabytes are read.
        for part in sorted(parts, key=lambda part: part.name == "transformer"):
            device = torch.device("cpu" if shard and part.name == "transformer" else self._device)
            with quiet_loading("diffusers", "transformers"):
                network = self._read_network(part, device)
            network.requires_grad_(False).eval()
            # The check reads every weight, which is quicker on the device.
            network.to(device)
            _check_finite(self._files, part.name, network, self._dtype)
            if shard and part.name == "transformer":
                shard(network)
            # Pipelines read some settings of a part when it is registered.
            self._pipe.register_modules(**{part.name: network})

    def _read_network(self, part: Part, device: torch.device) -> Any:
        kind = self._classes[part.name]
        dtype = torch_dtype(self._dtype)
        if self._quantization is None or part.name != "transformer":
            # Tensor by tensor to the device, so that the host never holds the network, once for each process.
            options = {} if device.type == "cpu" else {"device_map": {"": device}}
            return _load_weights(self._files, part, kind, dtype, options)
        empty = self._pipe.transformer
        with loading_options(self._quantization, empty, device, dtype) as options:
            network = _load_weights(self._files, part, kind, dtype, options)
        replace_rounded_layers(network)
        return network

    @torch.no_grad()
    def _try_networks(self) -> None:
        """Run transformer and VAE once, on a prompt of zeros and the smallest image. A configuration can have the right
        shapes and still give a network that stops at its first input, such as with rotary embeddings of another size
        than the heads."""
        model = self.model
        device = torch.device(self._device)
        size = model.smallest_image
        guidance = 1.0 if model.transformer.config.get("guidance_embeds") else None
        conditioning = Conditioning(pad([model.blank_prompt()]), None, 1.0, guidance, size, size).to(device)
        # Zeros are enough: a network that does not fit its configuration fails at any input.
        latents = torch.zeros(1, *model.latent_shape(size, size), device=device)
        with _explaining(self._files, "the transformer fails at its first image; is its config.json another's?"):
            model.velocity(model.transformer, latents, torch.full((1,), 500.0, device=device), conditioning)
        with _explaining(self._files, "the vae fails at its first image; is its config.json another's?"):
            model.decode(latents, size, size)

    def _adapted(self) -> DiffusionModel:
        with _explaining(self._files, "its parts do not fit together"):
            model = resolve_name(self._files.family.adapter)(self._pipe)
            model.check_schedule()
        model.text_encoders = self.text_encoders
        model.digests = self._digests
        return model

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Digests of text encoders and tokenizers, and of processor and VAE where prompts have images."""
        found = {name: tokenizer_digest(part) for name, part in self._tokenizers.items()}
        processor = self._pipe.components.get(PROCESSOR)
        if processor is not None:
            found[PROCESSOR] = processor_digest(processor)
        for part in self._encoding_parts:
            with _explaining(self._files, part.name):
                found[part.name] = stored_network_digest(self._files, part)
        return found


def load_model(
    path: str, *, dtype: str = "float32", device: Any = "cpu", quantization: str | None = None
) -> DiffusionModel:
    """The whole pipeline at ``path``, text encoders too, with all weights in ``dtype`` on ``device``, frozen and in
    evaluation mode. Every weight is read once. Raises as ``PipelineLoader`` and its methods."""
    loader = PipelineLoader(path, dtype=dtype, device=device, quantization=quantization)
    loader.read_text_encoders()
    return loader.load()


def _find(path: str) -> PipelineFiles:
    """The pipeline's folder, or of one on the hub its index alone."""
    require_path(path)
    folder = Path(resolve_asset(path))
    if os.path.exists(folder):
        if not os.path.exists(folder / INDEX):
            raise UnsupportedModelError(
                f"{FIELD}: {path} holds no {INDEX}, so it is not a diffusers pipeline; give the folder that "
                "save_pretrained wrote"
            )
        return PipelineFiles(path, folder)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(hf_hub_download(path, INDEX)).parent
    except (OSError, HFValidationError) as error:  # the hub's other errors are OSErrors
        raise UnsupportedModelError(
            f"{FIELD}: {path} is neither an existing folder nor a pipeline on the hub "
            f"({type(error).__name__}: {one_line(error, 300)})"
        ) from error
    return PipelineFiles(path, folder)


def _class_of(files: PipelineFiles, part: Part) -> Any:
    """The class that the index names; of a processor in a tokenizer's place that of its tokenizer."""
    # The index comes from a download: no other library is imported by its name.
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
    # The processor is given texts alone here, and its other half, for images, would need torchvision.
    return library.PreTrainedTokenizerFast if part.is_processor else found


def _load_weights(files: PipelineFiles, part: Part, kind: Any, dtype: Any, options: dict[str, Any]) -> Any:
    """A network with every weight from its files. The libraries only warn of missing, surplus and misshaped weights,
    and leave missing ones at random values."""
    file, variant = files.weights(part)
    options = options | ({"variant": variant} if variant else {})
    # The two libraries name the same option differently.
    options["dtype" if part.library == "transformers" else "torch_dtype"] = dtype
    with _explaining(files, f"{part.name}/config.json and {Path(file).name} do not give a {part.class_name}"):
        read = partial(
            kind.from_pretrained, str(files.folder / part.name), output_loading_info=True, ignore_mismatched_sizes=True
        )
        try:
            network, info = read(**options)
        except NotImplementedError:
            # Weights that no file has cannot go to a device. Read to the host, they are named below.
            network, info = read(**options | {"device_map": None})
    misshaped = [f"{name} {list(here)} instead of {list(wanted)}" for name, here, wanted in info["mismatched_keys"]]
    loaded = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": misshaped}
    faults = [_counted(names, fault) for fault, names in loaded.items() if names]
    if faults:
        raise files.damaged(f"{file} and config.json are not of one {part.class_name}: {'; '.join(faults)}")
    return network


def _counted(names: Any, fault: str) -> str:
    """The number of tensors with a fault, and the first of them: ``5 missing (a, b, c, ...)``."""
    first = sorted(names)
    return f"{len(first)} {fault} ({', '.join(first[:3])}{', ...' if len(first) > 3 else ''})"


def _check_tokenizer(files: PipelineFiles, name: str, tokenizer: Any) -> None:
    """Refuse a tokenizer without a vocabulary: transformers builds one, and every prompt then gives the same tokens."""
    # Any vocabulary has tokens for these texts, all different.
    tokens = {tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in ("a", "the cat", "1 2 3")}
    if len(tokens) < 3 or not all(tokens) or any(tokenizer.unk_token_id in row for row in tokens):
        raise files.damaged(
            f"{name} has a vocabulary of {len(tokenizer)} tokens and cannot tell texts apart; are its files "
            f"there and whole? It reads {', '.join(sorted({*tokenizer.vocab_files_names.values()}))}"
        )


def _check_finite(files: PipelineFiles, name: str, network: Any, dtype: str) -> None:
    """Refuse weights that are NaN or infinite, in the file or because they do not fit into ``dtype``."""
    # Of a base in 4 bits diffusers' loader has checked the weights before they were rounded.
    held = network.state_dict(keep_vars=True)
    weights = {key: p.detach() for key, p in held.items() if p.is_floating_point() and p.numel()}
    # The largest magnitude is NaN or infinite where a value is; one transfer from the device for all.
    sizes = [torch.linalg.vector_norm(dequantized(p), float("inf")).float() for p in weights.values()]
    largest = torch.stack(sizes)
    wrong = [key for key, fine in zip(weights, torch.isfinite(largest).tolist(), strict=True) if not fine]
    if wrong:
        raise files.damaged(f"{name}: {_counted(wrong, 'of its weights hold values that are not finite')} in {dtype}")


@contextmanager
def _explaining(files: PipelineFiles, fault: str) -> Iterator[None]:
    """Turn an error of the libraries into the refusal of a damaged pipeline; they have no common class of errors. A
    damaged file shows as an ``OSError``, ``KeyError``, ``RuntimeError``, ``TypeError`` or others, by where it
    strikes."""
    try:
        yield
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except (UnsupportedSchedulerError, NonFiniteImageError) as error:
        raise UnsupportedModelError(f"{FIELD}: {files.path}: {error}") from error
    except ImportError as error:
        raise UnsupportedModelError(
            f"{FIELD}: {files.path} needs a package that is not installed ({fault}: {one_line(error, 300)}); install it"
        ) from error
    except Exception as error:
        raise files.damaged(f"{fault}: {type(error).__name__}: {one_line(error, 300)}") from error
