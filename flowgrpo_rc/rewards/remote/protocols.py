"""Requests and answers between a training run and a reward server, in three protocols.

``json``, this package's own:
    ``{"images": [base64 of a PNG or JPEG], "prompts": [...], "metadata": [a dict an image]}`` is answered with
    ``{"scores": [...], "info": {...}}``, or with ``{"error": words}`` and a status of 400 or more. Reference images in
    the metadata are ``{"base64": of the file}``.

``verl_omni``, of its ``http_scorer_client``, pickled:
    ``{"images": [JPEG], "prompts": [...], "metadata": {}}`` is answered with ``{"scores": [...]}``, or with
    ``{"error": words}`` and any status.

``flow_grpo``, of its servers, pickled:
    ``{"images": [JPEG], "prompts": [...], "meta_datas": [a dict an image], "only_strict": True}`` is answered with
    ``{"scores": [...], ...}`` (GenEval) or ``{"outputs": [...]}`` (DeQA, UnifiedReward); each server reads the keys
    that it needs. Reference images in the dicts are their files' bytes.

Sources: verl-omni's ``docs/start/http_scorer.md`` and ``http_scorer_client.py`` at a1139ba, flow_grpo's ``rewards.py``
at ac4c86e and the servers in yifan123/reward-server. Pickles are read by ``pickles.loads``, never by ``pickle``.
"""

import base64
import io
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.reference_files import IMAGES_KEY, ReferenceReader
from flowgrpo_rc.rewards.answer import brief_repr
from flowgrpo_rc.rewards.http_client import parse_json
from flowgrpo_rc.rewards.remote import pickles

FORMATS = ("png", "jpeg")
"""PNG keeps every pixel; JPEG is smaller, does not, and is what flow_grpo and verl-omni send."""
MOST_PIXELS = 2**27
"""Most pixels of all images of a request together: 128 images of 1024 x 1024, 403 MB once decoded."""
PICKLE = 4
"""The pickle protocol of requests; Python 3.4 and later read it."""


class ProtocolError(ValueError):
    """A request or an answer has another form than its protocol's."""


@dataclass(kw_only=True)
class Request:
    """N images to score."""

    files: list[bytes]
    """N PNG or JPEG files."""
    prompts: list[str]
    metadata: list[dict[str, Any]]
    """The other columns of the prompt file, a dict an image."""


Answer = tuple[Any, Mapping[str, list[Any]]]
"""Unchecked scores, and the lists that the server reports beside them."""


class JsonProtocol:
    """This package's own. All methods raise ``ValueError`` with the reason."""

    content_type = "application/json"
    # The server scores the pixels that the run has drawn.
    image_format = "png"

    def write_request(self, request: Request) -> bytes:
        images = [base64.b64encode(data).decode() for data in request.files]
        rows = [_with_files(row, lambda data: {"base64": base64.b64encode(data).decode()}) for row in request.metadata]
        return self._write({"images": images, "prompts": request.prompts, "metadata": rows})

    def read_request(self, body: bytes) -> Request:
        content = _mapping("the request", self._read(body))
        files = [self._file(f"images[{index}]", value) for index, value in enumerate(_list(content, "images"))]
        prompts = _list(content, "prompts")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise ProtocolError("prompts must be a list of texts")
        # verl-omni's client sends an empty dict in place of the list.
        metadata = content.get("metadata") or [{} for _ in files]
        if not isinstance(metadata, list) or not all(isinstance(row, dict) for row in metadata):
            raise ProtocolError("metadata must be a list of objects, one for each image, or be left out")
        if not len(files) == len(prompts) == len(metadata):
            counts = f"{len(files)} images, {len(prompts)} prompts and {len(metadata)} rows of metadata"
            raise ProtocolError(f"there are {counts}; give equally many")
        rows = [_with_references(row, f"metadata[{index}]") for index, row in enumerate(metadata)]
        return Request(files=files, prompts=prompts, metadata=rows)

    def write_answer(self, answer: Answer) -> bytes:
        scores, info = answer
        return self._write({"scores": np.asarray(scores).tolist(), "info": _plain(info)})

    def write_error(self, words: str) -> bytes:
        return self._write({"error": words})

    def read_answer(self, body: bytes) -> Answer:
        content = _mapping("the answer", self._read(body))
        if "error" in content:
            raise ProtocolError(str(content["error"]))
        # A server without reports may send null.
        return _list(content, "scores"), _mapping("the answer's info", content.get("info") or {})

    def _write(self, content: Mapping[str, Any]) -> bytes:
        try:
            # NaN is not JSON, though Python would write it; other languages refuse the whole text.
            return json.dumps(content, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"this cannot be written as JSON ({str(error)[:200]})") from error

    def _read(self, body: bytes) -> Any:
        return parse_json(body)

    def _file(self, name: str, value: Any) -> bytes:
        return _from_base64(name, value)


class VerlOmniProtocol(JsonProtocol):
    """That of verl-omni's ``http_scorer_client``, pickled. All methods raise ``ValueError`` with the reason."""

    content_type = "application/octet-stream"
    # As verl-omni's client sends them, so that scores are comparable.
    image_format = "jpeg"

    def write_request(self, request: Request) -> bytes:
        return self._write({"images": request.files, "prompts": request.prompts, "metadata": {}})

    def write_answer(self, answer: Answer) -> bytes:
        # verl-omni's client reads nothing else.
        return self._write({"scores": np.asarray(answer[0]).tolist()})

    def _write(self, content: Mapping[str, Any]) -> bytes:
        return pickle.dumps(content, protocol=PICKLE)

    def _read(self, body: bytes) -> Any:
        return pickles.loads(body)

    def _file(self, name: str, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise ProtocolError("images must be a list of bytes, a JPEG or PNG file each")
        return value


class FlowGrpoProtocol:
    """That of flow_grpo's servers for GenEval, DeQA and UnifiedReward. There is no server for it here.

    GenEval's reports are named as flow_grpo logs them; those of a tag are -10 for images of other tags.
    """

    content_type = "application/octet-stream"
    image_format = "jpeg"

    def write_request(self, request: Request) -> bytes:
        rows = [
            {"prompt": prompt, **_with_files(row, bytes)}
            for prompt, row in zip(request.prompts, request.metadata, strict=True)
        ]
        content = {"images": request.files, "prompts": request.prompts, "meta_datas": rows, "only_strict": True}
        return pickle.dumps(content, protocol=PICKLE)

    def read_answer(self, body: bytes) -> Answer:
        content = _mapping("the answer", pickles.loads(body))
        if "scores" not in content:
            return _list(content, "outputs"), {}
        # With "only_strict" the server fills its "rewards" and "group_rewards" with zeros.
        info = {"strict_accuracy": content["strict_rewards"]} if "strict_rewards" in content else {}
        groups = _mapping("the answer's group_strict_rewards", content.get("group_strict_rewards", {}))
        info |= {f"{tag}_strict_accuracy": values for tag, values in groups.items()}
        return _list(content, "scores"), info


SERVED: dict[str, JsonProtocol] = {"json": JsonProtocol(), "verl_omni": VerlOmniProtocol()}
"""Protocols of ``flowgrpo-rc serve-reward``."""
PROTOCOLS: dict[str, JsonProtocol | FlowGrpoProtocol] = {**SERVED, "flow_grpo": FlowGrpoProtocol()}
"""Protocols of a run's requests, by their name in ``reward.remote.<name>.protocol``."""


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{name} is a {type(value).__name__}, where a mapping is expected")
    return value


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(content.get(key), list):
        found = ", ".join(map(brief_repr, list(content)[:9])) or "no key"
        raise ProtocolError(f"there is no list under {key!r}; there is {found}")
    return content[key]


def _from_base64(name: str, text: Any) -> bytes:
    try:
        # Without ``validate`` characters of other alphabets are dropped, and the file is another one.
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{name} is not base64 text ({error})") from error


def are_references(value: Any) -> TypeGuard[list[ReferenceImage]]:
    """Return True for the value of a prompt file's column ``images``."""
    return isinstance(value, list) and all(isinstance(image, ReferenceImage) for image in value)


def _with_files(row: Mapping[str, Any], write: Callable[[bytes], Any]) -> dict[str, Any]:
    """The row with its reference images' files in the form of a protocol."""
    images = row.get(IMAGES_KEY)
    return {**row, IMAGES_KEY: [write(image.read()) for image in images]} if are_references(images) else dict(row)


def _with_references(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The row before ``_with_files``."""
    images = row.get(IMAGES_KEY)
    # A column of this name may hold anything else, such as file names that only the server's function reads.
    if not isinstance(images, list) or not all(isinstance(image, dict) and "base64" in image for image in images):
        return row
    files = [_from_base64(f"{name}.{IMAGES_KEY}", image["base64"]) for image in images]
    return {**row, IMAGES_KEY: list(ReferenceReader()(files, name))}


def _plain(value: Any) -> Any:
    """A value of ``info`` as JSON: NaN becomes null, and a value without a form in JSON its text."""
    # First, since numpy's float64 is a float too.
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    # Arrays and scalars of numpy and torch.
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return brief_repr(value)


def encode(image: np.ndarray, image_format: str, quality: int = 75) -> bytes:
    """One image, (H, W, 3) uint8 RGB, as a file of a format of ``FORMATS``; ``quality`` is JPEG's."""
    buffer = io.BytesIO()
    # Each format ignores the other's option. Pillow's default level for PNG takes four times as long.
    Image.fromarray(image).save(buffer, format=image_format.upper(), quality=quality, compress_level=1)
    return buffer.getvalue()


def decode(files: Sequence[bytes]) -> np.ndarray:
    """Images of one size, and of at most ``MOST_PIXELS``, as (N, H, W, 3) uint8 RGB; others raise ``ValueError``."""
    if not files:
        raise ValueError("there are no images; give one or more")
    images = []
    for index, data in enumerate(files):
        try:
            # Pillow's other formats have a larger surface for attacks, and nobody sends them.
            images.append(Image.open(io.BytesIO(data), formats=[name.upper() for name in FORMATS]))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            kind = type(error).__name__
            raise ValueError(f"image {index} is no PNG or JPEG file that can be read ({kind})") from error
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        found = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:4])
        raise ValueError(f"the images differ in size ({found}); give those of one size in one request")
    # Known from the headers, before anything is decoded.
    width, height = images[0].size
    if len(images) * width * height > MOST_PIXELS:
        size = f"{len(images)} images of {width} x {height} pixels"
        raise ValueError(f"{size} are more than the {MOST_PIXELS} that a request may hold; give fewer at a time")
    pixels = np.empty((len(images), height, width, 3), np.uint8)
    for index, image in enumerate(images):
        try:
            # ``convert`` would copy an image that is RGB already.
            pixels[index] = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"image {index} is damaged ({error})") from error
        # Pillow keeps what it has decoded as long as the image.
        image.close()
    return pixels
