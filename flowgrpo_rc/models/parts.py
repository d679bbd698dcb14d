"""Files of a pipeline's folder, checked before any weight is read.

The checks read JSON files and the headers of safetensors files alone, so that a full-size model takes as long as a tiny
one. ``load.py`` checks the weights themselves.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.paths import LFS_POINTER

FIELD = "actor_rollout_ref.model.path"
INDEX = "model_index.json"
LEFT_OUT = ([None, None], [])
"""Entries of a part that the pipeline was saved without."""

# The variant (``fp16``) stands before the ending, or after ``index`` where the weights are in shards. The names of
# shards have a hyphen and do not match.
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|model|pytorch_model)(?:\.(\w+))?\.(?:safetensors|bin)(?:\.index(?:\.(\w+))?\.json)?"
)


class UnsupportedModelError(ValueError):
    """The path is no diffusers pipeline of a supported family, or its files are missing or damaged."""


def require_path(path: str) -> None:
    """Raise ``UnsupportedModelError`` for no path. Commands call it before they import torch."""
    if not path:
        raise UnsupportedModelError(f"{FIELD}: is empty; give a pipeline folder or hub name")


@dataclass(frozen=True)
class Part:
    """One part of a pipeline, as its index names it."""

    name: str
    library: str
    class_name: str

    @property
    def encodes_text(self) -> bool:
        """The part is a text encoder."""
        return self.name.startswith("text_encoder")

    @property
    def has_weights(self) -> bool:
        """The part is one of the networks that are used here."""
        return self.encodes_text or self.name in ("transformer", "vae")

    @property
    def is_processor(self) -> bool:
        """The part is a processor of texts and images in the place of a tokenizer."""
        return self.name.startswith("tokenizer") and self.class_name.endswith("Processor")


def refuse_two_transformers(path: str, index: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedModelError`` where the index names one transformer for high noise and one for low."""
    if index.get("transformer_2") not in (None, *LEFT_OUT) or index.get("boundary_ratio") is not None:
        raise UnsupportedModelError(
            f"{FIELD}: {path} has two transformers, one for high noise and one for low (transformer_2, "
            "boundary_ratio), and only one would be trained; take a model that has one, such as Wan 2.1 or Wan 2.2 "
            "TI2V-5B"
        )


class PipelineFiles:
    """A pipeline's ``folder`` and its index. File names are relative to the folder: ``vae/config.json``.

    Messages name the pipeline by ``path``, as the configuration does. Raises ``UnsupportedModelError`` if the index
    cannot be read, names no pipeline class or one without a family, or names two transformers.
    """

    def __init__(self, path: str, folder: Path) -> None:
        self.path = path
        self.folder = folder
        self.index = self.read_json(INDEX)
        name = self.index.get("_class_name")
        if not isinstance(name, str):
            raise self.damaged(f"{INDEX}: _class_name is {show(name)}; it must name a pipeline class")
        if name not in FAMILIES:
            raise UnsupportedModelError(f"{FIELD}: {path} is a {name}; supported: {', '.join(FAMILIES)}")
        refuse_two_transformers(path, self.index)
        self.class_name = name
        self.family = FAMILIES[name]
        self.left_out = [name for name in self.family.optional_parts if self.index.get(name) in LEFT_OUT]
        """The parts that the index leaves out on purpose and that the pipeline draws without."""

    @cached_property
    def parts(self) -> list[Part]:
        """The parts that the index names, without those that it leaves out on purpose. Raises ``UnsupportedModelError``
        if an entry is no pair of a library's and a class's name."""
        found = []
        for name, entry in self.index.items():
            if name.startswith("_") or not isinstance(entry, list) or entry in LEFT_OUT:
                continue
            # The library's name is imported: nothing but a pair of names may pass.
            if len(entry) != 2 or not all(isinstance(value, str) for value in entry) or os.sep in name:
                raise self.damaged(f"{INDEX}: {name} is {show(entry)}; it must be [library, class]")
            found.append(Part(name, *entry))
        return found

    def damaged(self, fault: str) -> UnsupportedModelError:
        """The refusal of an incomplete or damaged pipeline; ``fault`` names the file and its fault."""
        return UnsupportedModelError(
            f"{FIELD}: {self.path} cannot be loaded; is the download complete? ({fault}). Repair it or download it "
            "again"
        )

    def mixed(self, fault: str) -> UnsupportedModelError:
        """The refusal of a pipeline whose parts are whole and do not fit together."""
        return UnsupportedModelError(
            f"{FIELD}: {self.path} cannot be loaded: its parts are of different models ({fault}); take all of them "
            "from one pipeline"
        )

    def check(self) -> None:
        """Raise ``UnsupportedModelError`` with part, file and fault unless every part has its files, and none is cut
        off."""
        # A download that was interrupted lacks whole folders.
        missing = [part.name for part in self.parts if not os.path.isdir(self.folder / part.name)]
        if missing:
            raise self.damaged(f"it holds no {', '.join(missing)}")
        for part in self.parts:
            if part.has_weights:
                config = self.read_json(f"{part.name}/config.json")
                # A scale of infinity would silently make one image of all latents.
                wrong = [
                    name for name, value in config.items() if isinstance(value, float) and not math.isfinite(value)
                ]
                if wrong:
                    raise self.damaged(f"{part.name}/config.json: {wrong[0]} is {config[wrong[0]]}")
                for file in self.weight_files(part):
                    self._check_weights(file)
            elif part.name == "scheduler":
                self.read_json(f"{part.name}/scheduler_config.json")
            elif part.name.startswith("tokenizer"):
                self.read_json(f"{part.name}/tokenizer_config.json")

    def weights(self, part: Part) -> tuple[str, str | None]:
        """The file that a part's weights are read from, and its variant (``fp16``) if its name carries one. An index of
        shards stands for its shards. Files without a variant go before those with one, and safetensors before pickled
        files, as in the libraries. Raises ``UnsupportedModelError`` if there are none."""
        names = [file.name for file in (self.folder / part.name).glob("*")]
        found = [(match[1] or match[2], name) for name in names if (match := _WEIGHTS.fullmatch(name))]
        if not found:
            raise self.damaged(f"{part.name} holds no weights: no .safetensors or .bin file of a {part.class_name}")
        variant, name = min(found, key=lambda entry: (entry[0] is not None, ".bin" in entry[1], entry[1]))
        return f"{part.name}/{name}", variant

    def weight_files(self, part: Part) -> list[str]:
        """The files that hold a part's weights: one, or its shards."""
        file, _ = self.weights(part)
        if not file.endswith(".json"):
            return [file]
        where = self.read_json(file).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise self.damaged(f"{file} has no weight_map from tensors to files")
        return sorted({f"{part.name}/{shard}" for shard in where.values()})

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file. Raises ``UnsupportedModelError`` if it cannot be read, or is no object."""
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise self.damaged(f"{name} is missing") from error
        except (ValueError, OSError) as error:
            raise self.damaged(f"{name} is not JSON: {one_line(error, 120)}") from error
        if not isinstance(content, dict):
            raise self.damaged(f"{name} holds a JSON {type(content).__name__}; it must be an object")
        return content

    def _check_weights(self, name: str) -> None:
        """Refuse a weights file that is missing, a Git LFS pointer, or shorter than its header requires."""
        from safetensors import SafetensorError, safe_open

        file = self.folder / name
        if not os.path.isfile(file):
            raise self.damaged(f"{name} is missing")
        with file.open("rb") as handle:
            if handle.read(len(LFS_POINTER)) == LFS_POINTER:
                raise self.damaged(f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`")
        # The loader refuses a pickled file that is cut off; it has no header to look at first.
        if file.suffix != ".safetensors":
            return
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise self.damaged(
                f"{name} is cut off: it has {file.stat().st_size:,} bytes, or is no safetensors file "
                f"({one_line(error, 120)})"
            ) from error
