"""Images of rollouts and validations on disk, with what was asked, what they were rewarded and how to draw them again.

A folder a step, ``step_00012/``: a PNG for every image, named by its number in the batch over all processes, and
``images.jsonl`` with a line for each. A step's folder appears whole or not at all and replaces an earlier one of the
same step, so that a resumed run, on any number of processes, leaves no image twice.
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

from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.run_folder import WRITING, sync_path, write_durably

LINES = "images.jsonl"
"""The file with a line for every image of a step."""


@dataclass(frozen=True)
class DumpedImage:
    """One line of ``images.jsonl``, in which ``file`` takes the place of the pixels."""

    number: int
    """In the batch over all processes, or in the validation."""
    image: np.ndarray
    """``(H, W, 3)`` uint8."""
    prompt: str
    seed: int
    """Of the image's noise."""
    reward: float
    """The weighted total."""
    rewards: dict[str, float]
    """The parts by name, unweighted."""

    @property
    def file(self) -> str:
        """Name of the PNG."""
        return f"{self.number:05d}.png"

    def line(self, step: int) -> dict[str, Any]:
        """The image's line."""
        told = {key: value for key, value in vars(self).items() if key not in ("number", "image")}
        return {"step": step, "file": self.file, **told}


class ImageDump:
    """Writes the images of a step below one folder, which all processes see.

    Args:
        field: the setting that names the folder, for messages.
        root: the folder; made if it is not there.
        accelerator: tells the processes; each writes its own images, the main one the lines of all.

    Raises:
        ValueError: the folder cannot be made or written.
    """

    def __init__(self, field: str, root: str, accelerator: Any) -> None:
        self.root = Path(root).expanduser()
        """Where the folders of steps lie."""
        self._accelerator = accelerator
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise ValueError(
                f"{field}: {self.root} cannot be written ({reason(error)}); give a folder that can, or null"
            ) from error

    def write(self, step: int, images: Sequence[DumpedImage]) -> None:
        """Write the images of this process; every process calls it, with none too.

        Raises:
            OSError: on every process, if one could not write; what was there before stays.
        """
        from accelerate.utils import gather_object

        main = self._accelerator.is_main_process
        target = self.root / f"step_{step:05d}"
        temporary = target.with_name(target.name + WRITING)
        problem = _problem_of(lambda: _begin(temporary)) if main else None
        self._raise_any(gather_object([problem]))
        problem = _problem_of(lambda: _write_images(temporary, images))
        lines = gather_object([(image.number, image.line(step)) for image in images])
        self._raise_any(gather_object([problem]))
        problem = _problem_of(lambda: _finish(temporary, target, lines)) if main else None
        self._raise_any(gather_object([problem]))

    def _raise_any(self, problems: list[str | None]) -> None:
        told = [problem for problem in problems if problem is not None]
        if told:
            raise OSError(told[0])


def _problem_of(act: Any) -> str | None:
    """What kept ``act`` from being done, in words that travel between processes."""
    try:
        act()
    except OSError as error:
        return f"{reason(error)}: {error.filename}" if error.filename else reason(error)
    except Exception as error:  # libraries that write images raise others; all processes must hear of it, too
        return one_line(error)
    return None


def _begin(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _write_images(folder: Path, images: Sequence[DumpedImage]) -> None:
    from PIL import Image

    for image in images:
        Image.fromarray(image.image).save(folder / image.file, format="PNG")
        sync_path(folder / image.file)


def _finish(temporary: Path, target: Path, lines: list[tuple[int, dict[str, Any]]]) -> None:
    """The lines in the order of the images, and the folder under its own name."""
    # By number: where processes were given an image twice to have equal work, it is one image.
    by_number = dict(lines)
    text = "".join(json.dumps(by_number[number], ensure_ascii=False) + "\n" for number in sorted(by_number))
    write_durably(temporary / LINES, text.encode("utf-8", "backslashreplace"))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    sync_path(target.parent)
