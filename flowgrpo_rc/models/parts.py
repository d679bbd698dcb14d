"""The files of a pipeline's folder, checked before any weight of it is read.

Only JSON files, the headers of safetensors files and file sizes are looked at, so a full-size model takes as long as a
tiny one. What needs a part's class, such as which weights it has, is checked where the part is loaded: ``load.py``.
"""

import json
import math
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.paths import LFS_POINTER

FIELD = "actor_rollout_ref.model.path"
INDEX = "model_index.json"
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

_STEMS = {
    "diffusers": ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    "transformers": ("model", "pytorch_model"),
}
"""How each library names its weights: as safetensors, and as pickled ``.bin`` files."""


class UnsupportedModelError(ValueError):
    """The path is not a diffusers pipeline, not one of a supported family, or its files are missing or damaged."""


@dataclass(frozen=True)
class Part:
    """One part of a pipeline as its index names it."""

    name: str
    library: str
    class_name: str

    @property
    def is_tokenizer(self) -> bool:
        """Whether it turns text into tokens; its files hold no weights."""
        return self.name.startswith("tokenizer")

    @property
    def is_scheduler(self) -> bool:
        """Whether it is the noise schedule; its only file is a configuration."""
        return self.name == "scheduler"

    @property
    def has_weights(self) -> bool:
        """Whether it is a neural network of the pipeline that is used here."""
        return self.name in ("transformer", "vae") or self.name.startswith("text_encoder")


def damaged(path: str, reason: str) -> UnsupportedModelError:
    """The refusal of an incomplete or damaged pipeline; ``reason`` names the file and what is wrong with it."""
    return UnsupportedModelError(
        f"{FIELD}: {path} cannot be loaded; is the download complete? ({one_line(reason)}). Repair it or download it "
        "again"
    )


def one_line(text: object, limit: int = 300) -> str:
    """The first non-blank line of a message, cut where it is longer than ``limit``."""
    first = next((line.strip() for line in str(text).splitlines() if line.strip()), "no message")
    return first if len(first) <= limit else f"{first[:limit]}..."


def read_index(path: str, file: Path) -> dict[str, Any]:
    """The content of a ``model_index.json``.

    Raises:
        UnsupportedModelError: it cannot be read or is not a JSON object.
    """
    return _read_json(path, file, INDEX)


def parts_of(path: str, index: dict[str, Any]) -> list[Part]:
    """The parts that an index names; those that it leaves out on purpose (``[null, null]``) are not among them.

    Raises:
        UnsupportedModelError: an entry is not a pair of a library's and a class's name.
    """
    found = []
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list):
            continue
        if entry in ([None, None], []) or name in left_out(index):
            continue
        if len(entry) != 2 or not all(isinstance(value, str) and value for value in entry):
            raise damaged(path, f"{INDEX}: {name} is {entry!r}; it must be [library, class]")
        if os.sep in name or name in (".", ".."):
            raise damaged(path, f"{INDEX}: {name!r} is no name of a part")
        found.append(Part(name, *entry))
    return found


def left_out(index: dict[str, Any]) -> list[str]:
    """The parts that an index leaves out on purpose and that the pipeline draws without.

    A tokenizer goes with its encoder: an encoder without one would have nothing to read.
    """
    family = FAMILIES.get(index.get("_class_name", ""))
    optional = () if family is None else family.optional_parts
    absent = [name for name in optional if index.get(name) in ([None, None], [])]
    return [name for name in absent if name.replace("tokenizer", "text_encoder") in absent]


def check_files(path: str, folder: Path, parts: list[Part]) -> None:
    """Every part of a pipeline's folder has its files, and none is cut off or of another format.

    Raises:
        UnsupportedModelError: names the part, the file and what is wrong.
    """
    missing = [part.name for part in parts if not os.path.isdir(folder / part.name)]
    if missing:
        raise damaged(path, f"it holds no {', '.join(missing)}")
    for part in parts:
        if part.has_weights:
            _check_configuration(path, folder, part, "config.json")
            _check_weights(path, folder, part)
        elif part.is_scheduler:
            _check_configuration(path, folder, part, "scheduler_config.json")
        elif part.is_tokenizer:
            _check_tokenizer(path, folder, part)


def weight_files(folder: Path, library: str) -> tuple[list[Path], str | None]:
    """The files that a part's weights are read from, and the variant that their names carry (``fp16``), if any.

    An index of shards stands for its shards. Safetensors go before pickled files, and files without a variant before
    those with one, as the loaders prefer them. An empty list: there are none.
    """
    safe, pickled = _STEMS.get(library, _STEMS["diffusers"])
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return [], None
    for stem, ending in ((safe, "safetensors"), (pickled, "bin")):
        single, index = f"{stem}.{ending}", f"{stem}.{ending}.index.json"
        # diffusers reads the shards where both are there, transformers the single file.
        preferred = (index, single) if library == "diffusers" else (single, index)
        for name in preferred:
            if name in names:
                return [folder / name], None
    for stem, ending in ((safe, "safetensors"), (pickled, "bin")):
        pattern = re.compile(
            rf"{re.escape(stem)}\.(?:(?P<a>[\w-]+)\.{ending}|{ending}\.index\.(?P<b>[\w-]+)\.json)(?<!-of-\d{{5}}\.{ending})"
        )
        found = [(name, match["a"] or match["b"]) for name in names if (match := pattern.fullmatch(name))]
        variants = sorted({variant for _, variant in found})
        if variants:
            return [folder / name for name, variant in found if variant == variants[0]][:1], variants[0]
    return [], None


def _read_json(path: str, file: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    # A JSON file can also nest deeper than Python recurses, or hold an integer with more digits than it converts.
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{name} is not JSON: {one_line(error, 120)}") from error
    except OSError as error:
        raise damaged(path, f"{name} cannot be read: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise damaged(path, f"{name} holds a JSON {type(content).__name__}; it must be an object")
    return content


def _require(path: str, file: Path, name: str) -> None:
    if os.path.isfile(file):
        return
    if os.path.islink(file):
        raise damaged(path, f"{name} is a link to a file that is not there")
    raise damaged(path, f"{name} is missing")


def _check_configuration(path: str, folder: Path, part: Part, file_name: str) -> None:
    file, name = folder / part.name / file_name, f"{part.name}/{file_name}"
    _require(path, file, name)
    config = _read_json(path, file, name)
    other = config.get("_class_name", part.class_name)
    if part.library == "diffusers" and other != part.class_name:
        raise damaged(path, f"{name} is that of a {other}, but {INDEX} names {part.class_name}")


def _check_tokenizer(path: str, folder: Path, part: Part) -> None:
    """Its JSON files. Whether the vocabulary is whole is asked of the loaded tokenizer."""
    _require(path, folder / part.name / "tokenizer_config.json", f"{part.name}/tokenizer_config.json")
    for name in TOKENIZER_FILES:
        if os.path.lexists(folder / part.name / name):
            _read_json(path, folder / part.name / name, f"{part.name}/{name}")


def _check_weights(path: str, folder: Path, part: Part) -> None:
    files, _ = weight_files(folder / part.name, part.library)
    if not files:
        raise damaged(path, f"{part.name} holds no weights: no .safetensors or .bin file of a {part.class_name}")
    file = files[0]
    if file.suffix == ".json":
        _check_shards(path, file, part.name)
    else:
        _tensor_shapes(path, file, f"{part.name}/{file.name}")


def _check_shards(path: str, index: Path, part: str) -> None:
    """Every shard that the index names is there and whole, and holds the tensors that the index says, and no others."""
    name = f"{part}/{index.name}"
    _require(path, index, name)
    where = _read_json(path, index, name).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise damaged(path, f"{name} has no weight_map from tensors to files")
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard:
            raise damaged(path, f"{name} names {shard!r}, which is not a file beside it")
        shapes = _tensor_shapes(path, index.parent / shard, f"{part}/{shard}")
        if shapes is None:
            continue
        held = set(shapes)
        expected = {tensor for tensor, file in where.items() if file == shard}
        if held != expected:
            absent, surplus = sorted(expected - held), sorted(held - expected)
            raise damaged(
                path,
                f"{part}/{shard} and {index.name} disagree: {describe(absent, 'missing in the file')}"
                f"{', ' if absent and surplus else ''}{describe(surplus, 'not in the index')}",
            )


def describe(names: list[str], what: str) -> str:
    """``3 missing (a, b, c)``: how many, and the first few; nothing of none."""
    if not names:
        return ""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} {what} ({', '.join(names[:3])}{more})"


def stored_values(path: str, folder: Path, part: Part) -> int | None:
    """How many numbers the part's weights are, from the headers of its files; None for pickled files."""
    files, _ = weight_files(folder / part.name, part.library)
    if files and files[0].suffix == ".json":
        where = _read_json(path, files[0], f"{part.name}/{files[0].name}")["weight_map"]
        files = [files[0].parent / shard for shard in sorted(set(where.values()))]
    held = [_tensor_shapes(path, file, f"{part.name}/{file.name}") for file in files]
    return sum(math.prod(shape) for shapes in held if shapes for shape in shapes.values()) or None


def _tensor_shapes(path: str, file: Path, name: str) -> dict[str, tuple[int, ...]] | None:
    """The tensors of a weights file from its header alone; None for pickled files, which have no header."""
    _require(path, file, name)
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(max(8, len(LFS_POINTER)))
            if start.startswith(LFS_POINTER):
                raise damaged(path, f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`")
            if file.suffix == ".bin":
                _check_pickled(path, file, name, start, size)
                return None
            length = int.from_bytes(start[:8], "little")
            if size < 8:
                raise damaged(path, f"{name} is cut off: it has {size} bytes")
            if length > LARGEST_HEADER or start[8:9] not in (b"{", b""):
                raise damaged(path, f"{name} is not a safetensors file")
            if 8 + length > size:
                raise damaged(path, f"{name} is cut off: it has {size:,} bytes and its header alone {8 + length:,}")
            handle.seek(8)
            header = handle.read(length)
    except OSError as error:
        raise damaged(path, f"{name} cannot be read: {error.strerror or error}") from error
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        shapes = {key: tuple(int(side) for side in entry["shape"]) for key, entry in tensors.items()}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise damaged(path, f"{name} has a header that cannot be read ({type(error).__name__})") from error
    if end != size:
        state = "is cut off" if size < end else "is longer than its header says"
        raise damaged(path, f"{name} {state}: it has {size:,} bytes instead of {end:,}")
    return shapes


def _check_pickled(path: str, file: Path, name: str, start: bytes, size: int) -> None:
    """torch writes a zip archive, whose table of contents is at the end: one that is cut off has none."""
    if size == 0 or (start.startswith(b"PK") and not zipfile.is_zipfile(file)):
        raise damaged(path, f"{name} is cut off: it has {size:,} bytes")
