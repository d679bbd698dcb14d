"""Images of rollouts and validations on disk, with prompt, seed and rewards.

``step_00012/`` holds a PNG per image, named by its number in the batch of all processes, and ``images.jsonl`` with a
line per image. The folder of a step appears whole or not at all and replaces an earlier one of the same step, so that a
resumed run leaves no image twice.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.run_folder import WRITING, sync_path, write_durably

LINES = "images.jsonl"
"""The file with a line per image of a step."""


@dataclass(frozen=True)
class DumpedImage:
    """One line of ``images.jsonl``, in which ``file`` replaces the pixels."""

    number: int
    """In the batch of all processes, or in the validation."""
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
        columns = {key: value for key, value in vars(self).items() if key not in ("number", "image")}
        return {"step": step, "file": self.file, **columns}


class ImageDump:
    """Writes the images of a step below one folder, which all processes must see.

    Args:
        field: the setting that names the folder, for messages.
        root: the folder; made where it is missing.
        accelerator: each process writes its own images, the main one the lines of all.

    Raises:
        ValueError: the folder cannot be made or written.
    """

    def __init__(self, field: str, root: str, accelerator: Any) -> None:
        self.root = Path(root).expanduser()
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
        """Write the images of this process; every process calls it, also with none.

        Raises:
            OSError: on every process, if one could not write; an earlier folder of the step stays.
        """
        from accelerate.utils import gather_object

        target = self.root / f"step_{step:05d}"
        temporary = target.with_name(target.name + WRITING)
        self._on_main(lambda: _begin(temporary))
        _raise_any(gather_object([_problem_of(lambda: _write_images(temporary, images))]))
        lines = gather_object([(image.number, image.line(step)) for image in images])
        self._on_main(lambda: _finish(temporary, target, lines))

    def _on_main(self, act: Callable[[], None]) -> None:
        """Run ``act`` on the main process; its failure is raised on every process."""
        from accelerate.utils import gather_object

        _raise_any(gather_object([_problem_of(act) if self._accelerator.is_main_process else None]))


def _raise_any(problems: list[str | None]) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        raise OSError(found[0])


def _problem_of(act: Callable[[], None]) -> str | None:
    """The error of ``act`` as text, which all processes can exchange."""
    try:
        act()
    except Exception as error:  # image libraries raise errors of their own
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
    """Write the lines in the order of the images, and give the folder its own name."""
    # By number: an image that two processes drew, to have equal work, is one image.
    by_number = dict(lines)
    text = "".join(json.dumps(by_number[number], ensure_ascii=False) + "\n" for number in sorted(by_number))
    write_durably(temporary / LINES, text.encode("utf-8", "backslashreplace"))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    sync_path(target.parent)
