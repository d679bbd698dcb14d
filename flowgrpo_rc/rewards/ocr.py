"""Reward ``ocr``: the similarity of the text in an image with the text that its prompt puts in double quotes.

As FlowGRPO defines it: the target is the first text in straight double quotes, and the reading is compared with it
without white space and in lower case, so that line breaks and capitals do not count.

The engine is RapidOCR (PP-OCR models on onnxruntime). Its models are inside its wheel, nothing is downloaded, and with
opencv-python-headless it needs no system library beyond the C and C++ runtimes. Making an ``OCRReward`` loads it;
importing this module does not.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rewards.registry import Places, Rows
from flowgrpo_rc.section import Check, NonNegativeInt, Section, one_of

PIXELS_PER_CHARACTER = 8
"""The recogniser emits at most one character per 8 columns of its input."""
CHUNK = 6
"""Images that share one call of the recogniser. Larger calls are not faster."""
INSTALL = "install the extra flowgrpo_rc[ocr]: pip install '.[ocr]' in a checkout"


def quoted_target(prompt: str) -> str | None:
    """The first text in straight double quotes, or None when there is none or it holds only white space."""
    match = re.search(r'"([^"]*)"', prompt)
    return match.group(1) if match and match.group(1).strip() else None


def normalise(text: str) -> str:
    """``text`` without any white space and in lower case: the form that is compared."""
    return "".join(text.split()).lower()


def _target(prompt: str, row: Mapping[str, Any]) -> str | None:
    """The text that an image should show: the row's ``ocr_target``, or the prompt's text in double quotes, or None."""
    target = str(row.get("ocr_target") or "")
    return target if target.strip() else quoted_target(prompt)


def text_similarity(text: str, target: str, *, contained_is_match: bool = False) -> float:
    """``1 - min(lev(text, target), len(target)) / len(target)`` of the normalised strings, in [0, 1].

    ``lev`` is the Levenshtein distance (insertions, deletions and substitutions cost 1). The distance is capped at the
    length of the target, so a long wrong reading scores 0 and not less.

    Args:
        text: the reading.
        target: the wanted text; not blank.
        contained_is_match: score 1 for a reading that contains the whole target, whatever is around it.

    Raises:
        ValueError: ``target`` is blank.
        ImportError: rapidfuzz is not installed.
    """
    read = normalise(text)
    wanted = normalise(target)
    if not wanted:
        raise ValueError(f"the target text {target!r} is blank; there is nothing to compare a reading with")
    if contained_is_match and wanted in read:
        return 1.0
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise ImportError(f"comparing texts needs rapidfuzz, which is not installed; {INSTALL}") from error
    return 1.0 - min(Levenshtein.distance(read, wanted), len(wanted)) / len(wanted)


@documented_fields
@dataclass(kw_only=True, slots=True)
class OCRConfig(Section):
    """The reading of images by the reward ``ocr``."""

    section = "reward.ocr"

    mode: Annotated[str, one_of(("recognition", "full"))] = "recognition"
    """The way to read an image. ``recognition`` takes it as it is for one line of text, which is right for small images
    that hold little else. ``full`` finds the lines first and then reads them, for images of about 256 pixels and up:
    the finder misses text in very small ones. It takes some 25 times as long."""
    rec_image_shape: Annotated[
        list[int],
        Check(
            lambda shape: len(shape) == 3 and shape[:2] == [3, 48] and shape[2] >= 8,
            "give [3, 48, width] with a width of at least 8 pixels",
        ),
    ] = field(default_factory=lambda: [3, 48, 64])
    """Channels, height and width in pixels of the recogniser's input, which takes 8 columns a character. A wider image
    widens it."""
    num_threads: NonNegativeInt = 0
    """Number of threads that read images side by side. 0 stands for one per core this process may use, at most 8; in
    each of ``reward.num_workers`` processes for one."""
    contained_is_match: bool = False
    """Score 1 for a reading that contains the whole target, whatever is around it, as in flow_grpo's image scorer."""


class OCRReward:
    """``1 - min(lev, len) / len`` between the text read in an image and the quoted text of its prompt.

    Example:
        >>> reward = OCRReward()
        >>> scores, info = reward(images, ['the text "42"'])  # images: (1, H, W, 3) uint8 RGB
        >>> scores, info["text"]
        (array([1.], dtype=float32), ['42'])

    Raises:
        ImportError: RapidOCR, onnxruntime or rapidfuzz is missing.
    """

    streams = True
    """Each image is read by itself, so that a batch may come in parts."""

    def __init__(self, config: OCRConfig | None = None) -> None:
        self.config = OCRConfig() if config is None else config
        # The cores that this process may use, which a container or a launcher may limit.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._num_threads = self.config.num_threads or min(cores, 8)
        self._engine = _load_engine(self.config)
        # The engine loads its models when they are first used, and a broken one should show before training.
        blank = np.zeros((48, 64, 3), dtype=np.uint8)
        self._engine.recognize_txt([blank])
        if self.config.mode == "full":
            self._engine(blank, use_cls=False)

    @staticmethod
    def worker_options(config: OCRConfig | None) -> OCRConfig:
        """The options of one of several worker processes: a thread in each, unless their number is given."""
        config = OCRConfig() if config is None else config
        return replace(config, num_threads=config.num_threads or 1)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
    ) -> tuple[np.ndarray, dict[str, list[str]]]:
        """Score images against the text that they should show.

        Args:
            images: (N, H, W, 3) uint8, RGB.
            prompts: N prompts, each with its target in double quotes.
            metadata: a row for each prompt; its ``ocr_target`` takes the place of the quoted text.

        Returns:
            (N,) float32 in [0, 1], and ``{"text": the reading of each image}``.

        Raises:
            ValueError: a prompt has no target, or one that the recogniser cannot emit at this image size.
        """
        self.check_prompts(prompts, image_size=(images.shape[1], images.shape[2]), metadata=metadata)
        texts = self.read(images)
        contained = self.config.contained_is_match
        targets = [_target(*pair) or "" for pair in zip(prompts, metadata or [{}] * len(prompts), strict=True)]
        scores = [text_similarity(*pair, contained_is_match=contained) for pair in zip(texts, targets, strict=True)]
        return np.asarray(scores, dtype=np.float32), {"text": texts}

    def read(self, images: np.ndarray) -> list[str]:
        """The text in each of ``images``, (N, H, W, 3) uint8 RGB; an empty string where nothing is found."""
        if len(images) == 0:
            return []
        # The models were trained on OpenCV's channel order.
        bgr = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
        # With the finder, images have different numbers of lines and cannot share a call.
        size = CHUNK if self.config.mode == "recognition" else 1
        chunks = [bgr[start : start + size] for start in range(0, len(bgr), size)]
        with ThreadPoolExecutor(min(self._num_threads, len(chunks))) as pool:
            return [text for texts in pool.map(self._read_chunk, chunks) for text in texts]

    def _read_chunk(self, bgr: list[np.ndarray]) -> list[str]:
        if self.config.mode == "recognition":
            return [text.strip() for text in self._engine.recognize_txt(bgr).txts]
        lines = [self._engine(image, use_cls=False).txts or () for image in bgr]
        return [" ".join(line.strip() for line in found) for found in lines]

    def check_prompts(
        self,
        prompts: Sequence[str],
        *,
        image_size: tuple[int, int] | None = None,
        sources: Places = None,
        metadata: Rows = None,
        **known: Any,
    ) -> None:
        """Raise ``ValueError`` for a prompt that this reward cannot score; arguments of ``RewardMix.check_prompts``."""
        # Only the recogniser alone has an input of fixed width; a target that it cannot emit would score 0 for ever.
        room = math.inf
        if image_size is not None and self.config.mode == "recognition":
            height, width = image_size
            _, input_height, input_width = self.config.rec_image_shape
            room = max(input_width, input_height * width // height) // PIXELS_PER_CHARACTER
        for index, prompt in enumerate(prompts):
            where = f"prompt {index}" if sources is None else sources[index]
            target = _target(prompt, {} if metadata is None else metadata[index])
            if target is None:
                raise ValueError(
                    f"{where}: {prompt!r} has no text in double quotes, which the reward 'ocr' compares with; write "
                    'the wanted text in quotes, as in: a sign that says "42", or into a column ocr_target, or turn '
                    "the reward off with reward.functions.ocr=0"
                )
            length = len(normalise(target))
            if length > room:
                raise ValueError(
                    f"{where}: the target {target!r} has {length} characters, but at image size {image_size} the "
                    f"recogniser's input is wide enough for {room}; widen reward.ocr.rec_image_shape or set "
                    "reward.ocr.mode=full"
                )


def _load_engine(config: OCRConfig) -> Any:
    """A RapidOCR engine that logs errors only, and reads without detection except in the mode ``full``."""
    try:
        import onnxruntime  # noqa: F401
        import rapidfuzz  # noqa: F401
        from rapidocr import RapidOCR
    except ImportError as error:
        raise ImportError(f"the reward 'ocr' cannot be loaded ({error}); {INSTALL}") from error
    shape = list(config.rec_image_shape) if config.mode == "recognition" else [3, 48, 320]
    return RapidOCR(
        params={
            "Global.log_level": "error",
            # Keep every line that was read, however unsure: the comparison judges it.
            "Global.text_score": 0.0,
            # One thread per call, several calls at a time: threads that share one small image wait for each
            # other at every layer, which on a busy machine takes longer than the work itself.
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "Rec.rec_batch_num": CHUNK,
            "Rec.rec_img_shape": shape,
            # PaddleOCR's sizes: shrink above 960 pixels, never enlarge. RapidOCR's own enlarge 512 to 736.
            "Det.limit_type": "max",
            "Det.limit_side_len": 960,
        }
    )
