"""Images of rollouts and validations on disk, with prompt, seed and rewards.

``step_00012/`` holds a PNG per image, named by its number in the batch of all processes, and ``images.jsonl`` with a
line per image. The folder of a step appears whole or not at all and replaces an earlier one of the same step, so that a
resumed run leaves no image twice.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from PIL import Image

from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.run_folder import WRITING, sync_path, write_durably

LINES = "images.jsonl"
"""The file with a line per image of a step."""


@dataclass(frozen=True)
class ScoredImage:
    """An image of a rollout or a validation with its rewards."""

    number: int  # in the batch of all processes, or in the validation
    image: np.ndarray  # ``(H, W, 3)`` uint8
    prompt: str
    seed: int  # of the image's noise
    reward: float  # the weighted total
    rewards: dict[str, float]  # the parts by name, unweighted
    text: str | None = None  # the text that an OCR reward read
    text_score: float | None = None  # that reward's score; ``None``: the whole reward
    reference: ReferenceImage | None = None  # the first reference image of the prompt

    def line(self, step: int) -> dict[str, Any]:
        """The image's line of ``images.jsonl``."""
        columns = {name: getattr(self, name) for name in ("prompt", "seed", "reward", "rewards")}
        return {"step": step, "file": f"{self.number:05d}.png", **columns}


class ImageDump:
    """Writes the images of a step below one folder, which all processes must see and which is made where it is missing.

    Each process writes its own images, the main one the lines of all. Raises ``ValueError`` with the setting,
    ``field``, if the folder cannot be made or written.
    """

    def __init__(self, field: str, root: str, accelerator: Any) -> None:
        self.root = Path(root).expanduser()
        self._main = accelerator.is_main_process
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Found now rather than after the first rollout.
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise ValueError(
                f"{field}: {self.root} cannot be written ({reason(error)}); give a folder that can, or null"
            ) from error

    @property
    def used(self) -> bool:
        """True if the folder has images of a step."""
        return any(self.root.glob("step_*"))

    def write(self, step: int, images: Sequence[ScoredImage]) -> None:
        """Write the images of this process; every process calls it, also with none. Raises ``OSError`` if one could not
        write its images, or the main one the rest; an earlier folder of the step stays."""
        target = self.root / f"step_{step:05d}"
        temporary = target.with_name(target.name + WRITING)
        problem = None
        try:
            temporary.mkdir(exist_ok=True)  # by another process, or one that was killed
            for image in images:
                path = temporary / f"{image.number:05d}.png"
                Image.fromarray(image.image).save(path, format="PNG")
                sync_path(path)
        except Exception as error:  # image libraries raise errors of their own
            problem = one_line(error)
        shares = gather_object([(problem, {image.number: image.line(step) for image in images})])
        problems = [one for one, _ in shares if one is not None]
        try:
            if problems:
                raise OSError(problems[0])
            if self._main:
                # By number: an image that two processes drew, to have equal work, is one image.
                lines = {number: line for _, own in shares for number, line in own.items()}
                for file in temporary.glob("*.png"):
                    if int(file.stem) not in lines:
                        file.unlink()  # of the killed process
                text = "".join(json.dumps(lines[number], ensure_ascii=False) + "\n" for number in sorted(lines))
                write_durably(temporary / LINES, text.encode("utf-8", "backslashreplace"))
                shutil.rmtree(target, ignore_errors=True)
                os.replace(temporary, target)
                sync_path(self.root)
        finally:
            if self._main:
                shutil.rmtree(temporary, ignore_errors=True)
