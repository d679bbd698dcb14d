"""Prompt embeddings on disk: every prompt goes through a text encoder once, for all runs and processes.

A store is a folder of safetensors files, each with some prompts' embeddings. A file is written under a temporary name
and renamed when it is complete, and never changed after. Any number of processes can therefore add to a store and read
it at the same time, without locks. Files are mapped into memory, which all processes of a machine share.
"""

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from flowgrpo_rc import __version__
from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.models.base import DiffusionModel, EncodedPrompt
from flowgrpo_rc.models.digests import short_digest
from flowgrpo_rc.paths import cache_folder
from flowgrpo_rc.prompt import Prompt, as_prompt
from flowgrpo_rc.run_folder import write_durably

FIELD = "actor_rollout_ref.model.prompt_store"
_PREFIX = "prompts-"
_SUFFIX = ".safetensors"
_ASIDE = ".damaged"
"""Ending of a damaged file's name; its prompts are missing from then on."""
_PARTS = ("", ".pooled", ".references", ".reference_grids")
"""Endings of the names of a prompt's tensors: embeddings, pooled vector, reference tokens, and their rows and columns
``(images, 2)``."""
_ENCODER = "encoder"
"""Entry of a file's metadata with the identity of the text encoders. The others are checksums, by tensor name."""

PromptKey = tuple[str | Prompt, int]
"""A prompt, and the ``max_sequence_length`` that it is encoded with."""


class PromptStoreError(ValueError):
    """A store is of another text encoder, damaged, or cannot be written; the message names it and the remedy."""


def open_store(folder: str | None, model: DiffusionModel, dtype: str) -> "PromptStore":
    """The store of a model's text encoders, which need not be loaded; ``dtype`` is their precision. ``folder=None`` is
    a folder of these text encoders alone in the user's cache. Raises ``PromptStoreError`` if the embeddings in
    ``folder`` are of other text encoders."""
    import diffusers
    import transformers

    # Prompt templates, and the tokens that are cut off of them, are code of the libraries.
    libraries = {module.__name__: module.__version__ for module in (diffusers, transformers)}
    encoder = {"pipeline": type(model.pipe).__name__, "dtype": dtype, "flowgrpo_rc": __version__}
    encoder |= {**libraries, **model.digests}
    # The digest in the name: two text encoders never share a cache folder.
    if folder is None:
        own = short_digest(json.dumps(encoder, sort_keys=True).encode())
        return PromptStore(cache_folder() / "prompts" / own, encoder)
    return PromptStore(Path(folder).expanduser(), encoder)


class PromptStore:
    """The embeddings in a folder, which need not exist yet.

    Every file records the ``encoder``: everything that embeddings depend on besides prompt and length. A folder with
    another one, and a file for a folder, is a ``PromptStoreError``.
    """

    def __init__(self, folder: Path, encoder: Mapping[str, str]) -> None:
        self.folder = folder
        self._encoder = dict(encoder)
        self.refresh()

    def refresh(self) -> None:
        """Open the files that are there now."""
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}  # of each tensor
        self._damaged: dict[Path, str] = {}
        """Files that are no safetensors files of a store, or have changed, and why."""
        if self.folder.is_file():
            raise PromptStoreError(f"{FIELD}: {self.folder} cannot be read (it is a file); name a folder")
        for path in sorted(self.folder.glob(f"{_PREFIX}*{_SUFFIX}")):
            self._open(path)

    def __contains__(self, key: PromptKey) -> bool:
        return _name(key) in self._file_of

    def __len__(self) -> int:
        """Number of prompts."""
        return sum(not name.endswith(_PARTS[1:]) for name in self._file_of)

    def __str__(self) -> str:
        size = sum(path.stat().st_size for path in self._files)
        return f"{self.folder}, {len(self)} prompts in {len(self._files)} file(s) of {size:,} bytes"

    def nbytes(self, keys: Iterable[PromptKey]) -> int:
        """Bytes of the embeddings of those of these prompts that are stored."""
        names = [_name(key) + part for key in keys for part in _PARTS]
        # The files are mapped, so that this reads none of the tensors.
        return sum(self._files[self._file_of[name]].get_tensor(name).nbytes for name in names if name in self._file_of)

    def read(self, key: PromptKey) -> EncodedPrompt:
        """One prompt's embeddings, in memory that is mapped from the file. Raises ``KeyError`` if it is not stored,
        ``PromptStoreError`` if its bytes have changed since they were written."""
        name = _name(key)
        embeds = self._tensor(name)
        pooled, references, grids = (
            self._tensor(name + part) if name + part in self._file_of else None for part in _PARTS[1:]
        )
        sizes = () if grids is None else tuple((int(rows), int(columns)) for rows, columns in grids)
        return EncodedPrompt(embeds, pooled, references, sizes)

    def add(self, rows: Mapping[PromptKey, EncodedPrompt]) -> None:
        """Write some prompts' embeddings, on the disk when this returns; raises ``PromptStoreError`` if that fails."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for key, row in rows.items():
            grids = None if row.references is None else torch.tensor(row.reference_grids)
            for part, tensor in zip(_PARTS, (row.embeds, row.pooled, row.references, grids), strict=True):
                if tensor is not None:
                    tensors[_name(key) + part] = tensor.contiguous()
        metadata = {name: _checksum(tensor) for name, tensor in tensors.items()}
        metadata[_ENCODER] = json.dumps(self._encoder)

        # A new file per call: appending to one would need a lock between processes.
        path = self.folder / f"{_PREFIX}{uuid4().hex}{_SUFFIX}"
        try:
            write_durably(path, save(tensors, metadata))
        except OSError as error:
            raise self._unwritable(error) from error
        self._open(path)

    def check_writable(self) -> None:
        """Create the folder and a temporary file in it, before anything is encoded, or raise ``PromptStoreError``."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise self._unwritable(error) from error

    def set_damaged_aside(self, keys: Iterable[PromptKey]) -> list[str]:
        """Rename damaged files: those with an unreadable header, and those with changed bytes of these prompts. All
        prompts of such a file are missing from then on, and can be added again. Returns a line for each file with its
        fault. Raises ``PromptStoreError`` if one cannot be renamed."""
        for key in keys:
            try:
                if key in self:
                    self.read(key)
            except PromptStoreError:
                self._damaged[self._file_of[_name(key)]] = "its bytes have changed since they were written"
        damaged = self._damaged
        for path, why in damaged.items():
            try:
                os.replace(path, f"{path}{_ASIDE}")
            except FileNotFoundError:  # another process was quicker
                pass
            except OSError as error:
                raise PromptStoreError(
                    f"{FIELD}: {path} is damaged ({why}) and cannot be renamed ({reason(error)}); remove it"
                ) from error
        self.refresh()
        return [f"{path} is damaged ({why}), renamed to *{_ASIDE}" for path, why in damaged.items()]

    def _tensor(self, name: str) -> Tensor:
        path = self._file_of[name]
        tensor = self._files[path].get_tensor(name)
        # A safetensors header covers lengths, not values: a flipped bit would silently be another embedding.
        if _checksum(tensor) != self._files[path].metadata().get(name):
            raise PromptStoreError(
                f"{FIELD}: {path} has changed since it was written; start again, and its prompts are encoded anew"
            )
        return tensor

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            # It checks that the header can be read and that the file has the length in the header.
            file: Any = safe_open(path, "pt")
            found = json.loads((file.metadata() or {})[_ENCODER])
            if not isinstance(found, dict):
                raise ValueError(f"its {_ENCODER} is no object")
        except FileNotFoundError:  # renamed in between
            return
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            self._damaged[path] = one_line(error, 120)
            return
        differ = sorted(k for k in {*found, *self._encoder} if found.get(k) != self._encoder.get(k))
        if differ:
            words = ", ".join(f"{k} {found.get(k)} there and {self._encoder.get(k)} here" for k in differ)
            raise PromptStoreError(
                f"{FIELD}: {self.folder} holds embeddings of another text encoder ({words}); name another folder, or "
                "null for one in the user's cache"
            )
        self._files[path] = file
        self._file_of |= dict.fromkeys(file.keys(), path)

    def _unwritable(self, error: OSError) -> PromptStoreError:
        return PromptStoreError(
            f"{FIELD}: {self.folder} cannot be written ({reason(error)}); name a folder that can, with room for the "
            "embeddings"
        )


def _name(key: PromptKey) -> str:
    """Name of the tensor of a prompt's embeddings."""
    given, length = key
    prompt = as_prompt(given)
    content = f"{length} {prompt.text}"
    # A NUL ends the text: no text can contain one, so that two prompts never give one name.
    if prompt.negative:
        content = f"{content}\0negative"
    if prompt.images:
        digests = " ".join(image.digest for image in prompt.images)
        content = f"{content}\0{prompt.reference_area} {digests}"
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _checksum(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.view(torch.uint8).numpy().data):08x}"
