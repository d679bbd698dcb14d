"""The files of a pipeline's folder, checked before any weight of it is read.

Only JSON files, the headers of safetensors files and file sizes are looked at, so a full-size model takes as long as a
tiny one. What needs a part's class, such as which weights it has, is checked where the part is loaded: ``load.py``.
"""

import json
import math
import os
import re
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.paths import LFS_POINTER

FIELD = "actor_rollout_ref.model.path"
INDEX = "model_index.json"
LEFT_OUT = ([None, None], [])
"""How an index names a part that the pipeline was saved without."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
"""The JSON files that tokenizers read; others may lie beside them."""
LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors format allows no larger header."""

_WEIGHTS = {
    "diffusers": (("diffusion_pytorch_model", "safetensors"), ("diffusion_pytorch_model", "bin")),
    "transformers": (("model", "safetensors"), ("pytorch_model", "bin")),
}
"""How each library names its weights, as safetensors and as pickled files."""


class UnsupportedModelError(ValueError):
    """The path is not a diffusers pipeline, not one of a supported family, or its files are missing or damaged."""


@dataclass(frozen=True)
class Part:
    """One part of a pipeline as its index names it."""

    name: str
    library: str
    class_name: str

    @property
    def has_weights(self) -> bool:
        """Whether it is a neural network of the pipeline that is used here."""
        return self.name in ("transformer", "vae") or self.name.startswith("text_encoder")

    @property
    def is_processor(self) -> bool:
        """Whether it is a processor, of texts and images, in a tokenizer's place."""
        return self.name.startswith("tokenizer") and self.class_name.endswith("Processor")


def describe(faults: Mapping[str, Collection[str]]) -> str:
    """What is wrong with which tensors: ``3 missing (a, b, c); 5 unexpected (d, e, f, ...)``; empty without a fault."""
    found = {what: sorted(names) for what, names in faults.items() if names}
    told = [f"{len(n)} {what} ({', '.join(n[:3])}{', ...' if len(n) > 3 else ''})" for what, n in found.items()]
    return "; ".join(told)


class PipelineFiles:
    """A pipeline's folder and what its index says of it. Files are named by their paths in it: ``vae/config.json``.

    Args:
        path: of the pipeline as the configuration gives it, for messages.
        folder: where it lies.

    Raises:
        UnsupportedModelError: its index cannot be read or is not a JSON object.
    """

    def __init__(self, path: str, folder: Path) -> None:
        self.path = path
        self.folder = folder
        self.index = self.read_json(INDEX)

    @property
    def class_name(self) -> str:
        """The pipeline's class.

        Raises:
            UnsupportedModelError: the index names none, or one without a family.
        """
        name = self.index.get("_class_name")
        if not isinstance(name, str):
            raise self.damaged(f"{INDEX}: _class_name is {show(name)}; it must name a pipeline class")
        if name not in FAMILIES:
            raise UnsupportedModelError(f"{FIELD}: {self.path} is a {name}; supported: {', '.join(FAMILIES)}")
        return name

    @cached_property
    def parts(self) -> list[Part]:
        """The parts that the index names; those that it leaves out on purpose are not among them.

        Raises:
            UnsupportedModelError: an entry is not a pair of a library's and a class's name.
        """
        found = []
        for name, entry in self.index.items():
            if name.startswith("_") or not isinstance(entry, list) or entry in LEFT_OUT or name in self.left_out:
                continue
            if len(entry) != 2 or not all(isinstance(value, str) and value for value in entry):
                raise self.damaged(f"{INDEX}: {name} is {show(entry)}; it must be [library, class]")
            if os.sep in name or name in (".", ".."):
                raise self.damaged(f"{INDEX}: {name!r} is no name of a part")
            found.append(Part(name, *entry))
        return found

    @property
    def left_out(self) -> list[str]:
        """The parts that the index leaves out on purpose and that the pipeline draws without.

        A tokenizer goes with its encoder: an encoder without one would have nothing to read.
        """
        absent = [name for name in FAMILIES[self.class_name].optional_parts if self.index.get(name) in LEFT_OUT]
        return [name for name in absent if name.replace("tokenizer", "text_encoder") in absent]

    def damaged(self, fault: str) -> UnsupportedModelError:
        """The refusal of an incomplete or damaged pipeline; ``fault`` names the file and what is wrong with it."""
        return UnsupportedModelError(
            f"{FIELD}: {self.path} cannot be loaded; is the download complete? ({fault}). Repair it or download it "
            "again"
        )

    def check(self) -> None:
        """Every part has its files, and none is cut off or of another format.

        Raises:
            UnsupportedModelError: names the part, the file and what is wrong.
        """
        missing = [part.name for part in self.parts if not os.path.isdir(self.folder / part.name)]
        if missing:
            raise self.damaged(f"it holds no {', '.join(missing)}")
        for part in self.parts:
            if part.has_weights:
                self._check_configuration(part, "config.json")
                self._check_weights(part)
            elif part.name == "scheduler":
                self._check_configuration(part, "scheduler_config.json")
            elif part.name.startswith("tokenizer"):
                # Whether the vocabulary is whole is asked of the loaded tokenizer.
                self._require(f"{part.name}/tokenizer_config.json")
                for file in TOKENIZER_FILES:
                    if os.path.lexists(self.folder / part.name / file):
                        self.read_json(f"{part.name}/{file}")

    def size(self, part: Part) -> int:
        """Bytes of the part's files."""
        return sum(file.stat().st_size for file in (self.folder / part.name).glob("*") if file.is_file())

    def weights(self, part: Part) -> tuple[str, str | None]:
        """The file that a part's weights are read from, and the variant that its name carries (``fp16``), if any.

        An index of shards stands for its shards. Files without a variant go before those with one, and safetensors
        before pickled files, as the loaders prefer them.

        Raises:
            UnsupportedModelError: there are no weights.
        """
        variant = r"(?:\.([\w-]+)(?<!-of-\d{5}))?"  # shards are named by their index
        forms: list[str] = []
        for stem, ending in _WEIGHTS.get(part.library, _WEIGHTS["diffusers"]):
            single = rf"{stem}{variant}\.{ending}"
            index = rf"{stem}\.{ending}\.index{variant}\.json"
            # diffusers reads the shards where both are there, transformers the single file.
            forms += [index, single] if part.library == "diffusers" else [single, index]
        names = [file.name for file in (self.folder / part.name).glob("*")]
        found = [(place, m) for place, form in enumerate(forms) for name in names if (m := re.fullmatch(form, name))]
        if not found:
            raise self.damaged(f"{part.name} holds no weights: no .safetensors or .bin file of a {part.class_name}")
        _, file = min(found, key=lambda entry: (entry[1][1] is not None, entry[0], entry[1][1]))
        return f"{part.name}/{file[0]}", file[1]

    def weight_files(self, part: Part) -> list[str]:
        """The files that hold a part's weights: one, or its shards."""
        file, _ = self.weights(part)
        if not file.endswith(".json"):
            return [file]
        return sorted({f"{part.name}/{shard}" for shard in self.read_json(file)["weight_map"].values()})

    def stored_values(self, part: Part) -> int | None:
        """How many numbers the part's weights are, from the headers of its files; None for pickled files."""
        held = [self._tensor_shapes(name) for name in self.weight_files(part)]
        return sum(math.prod(shape) for shapes in held if shapes for shape in shapes.values()) or None

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file.

        Raises:
            UnsupportedModelError: it cannot be read, or is no JSON object.
        """
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        # A JSON file can also nest deeper than Python recurses, or hold an integer with more digits than it converts.
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{name} is not JSON: {one_line(error, 120)}") from error
        except OSError as error:
            raise self.damaged(f"{name} cannot be read: {reason(error)}") from error
        if not isinstance(content, dict):
            raise self.damaged(f"{name} holds a JSON {type(content).__name__}; it must be an object")
        return content

    def _require(self, name: str) -> None:
        if not os.path.isfile(self.folder / name):
            linked = os.path.islink(self.folder / name)
            raise self.damaged(f"{name} is {'a link to a file that is not there' if linked else 'missing'}")

    def _check_configuration(self, part: Part, file: str) -> None:
        name = f"{part.name}/{file}"
        self._require(name)
        other = self.read_json(name).get("_class_name", part.class_name)
        if part.library == "diffusers" and other != part.class_name:
            raise self.damaged(f"{name} is that of a {other}, but {INDEX} names {part.class_name}")

    def _check_weights(self, part: Part) -> None:
        file, _ = self.weights(part)
        if file.endswith(".json"):
            self._check_shards(part, file)
        else:
            self._tensor_shapes(file)

    def _check_shards(self, part: Part, index: str) -> None:
        """Every shard that the index names is there and whole, and holds the tensors that the index says, no others."""
        self._require(index)
        where = self.read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
            raise self.damaged(f"{index} has no weight_map from tensors to files")
        for shard in sorted(set(where.values())):
            if Path(shard).name != shard:
                raise self.damaged(f"{index} names {shard!r}, which is not a file beside it")
            shapes = self._tensor_shapes(f"{part.name}/{shard}")
            expected = {tensor for tensor, file in where.items() if file == shard}
            if shapes is not None and set(shapes) != expected:
                faults = describe(
                    {"missing in the file": expected - {*shapes}, "not in the index": {*shapes} - expected}
                )
                raise self.damaged(f"{part.name}/{shard} and {Path(index).name} disagree: {faults}")

    def _tensor_shapes(self, name: str) -> dict[str, tuple[int, ...]] | None:
        """The tensors of a weights file from its header alone; None for pickled files, which have no header."""
        self._require(name)
        file = self.folder / name
        try:
            size = file.stat().st_size
            with file.open("rb") as handle:
                start = handle.read(max(8, len(LFS_POINTER)))
                handle.seek(8)
                length = int.from_bytes(start[:8], "little")
                header = handle.read(length) if length <= LARGEST_HEADER else b""
        except OSError as error:
            raise self.damaged(f"{name} cannot be read: {reason(error)}") from error
        if start.startswith(LFS_POINTER):
            raise self.damaged(f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`")
        if file.suffix == ".bin":
            # torch writes a zip archive, whose table of contents is at the end: one that is cut off has none.
            if size == 0 or (start.startswith(b"PK") and not zipfile.is_zipfile(file)):
                raise self.damaged(f"{name} is cut off: it has {size:,} bytes")
            return None
        if size < 8:
            raise self.damaged(f"{name} is cut off: it has {size} bytes")
        if length > LARGEST_HEADER or start[8:9] not in (b"{", b""):
            raise self.damaged(f"{name} is not a safetensors file")
        if 8 + length > size:
            raise self.damaged(f"{name} is cut off: it has {size:,} bytes and its header alone {8 + length:,}")
        try:
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            shapes = {key: tuple(int(side) for side in entry["shape"]) for key, entry in tensors.items()}
            end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise self.damaged(f"{name} has a header that cannot be read ({type(error).__name__})") from error
        if end != size:
            state = "is cut off" if size < end else "is longer than its header says"
            raise self.damaged(f"{name} {state}: it has {size:,} bytes instead of {end:,}")
        return shapes
