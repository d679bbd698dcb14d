"""Outputs for people: sample grids, kept images, profiles, the final adapters, plots and pictures.

None of it is worth losing a run: an output that cannot be written is reported, and the run goes on. The error that ends
the run then names it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.lora import ADAPTER_FILE, CARD_FILE, same_lora, save_lora
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.summary import stack_pictures, write_plots
from flowgrpo_rc.rewards import RewardResult
from flowgrpo_rc.run_folder import RunFolder, RunFolderError, write_whole
from flowgrpo_rc.trainer.dumps import ImageDump, ScoredImage
from flowgrpo_rc.trainer.model_card import model_card
from flowgrpo_rc.trainer.rollout_queue import BatchRequest, image_numbers
from flowgrpo_rc.trainer.setup import Run
from flowgrpo_rc.trainer.validation import save_grid
from flowgrpo_rc.trainer.writing import WRITER_FILE

OPERATORS = 40
"""Rows of a profile's table."""


class RunOutputs:
    """Writes outputs that a run can go on without, and reports by ``alert`` those that could not be written."""

    def __init__(self, folder: RunFolder, alert: Callable[[str], object]) -> None:
        self._folder = folder
        self._alert = alert
        self.unwritten: list[tuple[str, Exception]] = []
        """Outputs that could not be written, each named once, and the reason."""

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Report an exception of writing ``what``, and go on."""
        try:
            yield
        except Exception as error:  # drawing libraries raise errors of every kind
            # An output of every step, such as the timeline, would otherwise be listed once per step.
            if all(what != named for named, _ in self.unwritten):
                self.unwritten.append((what, error))
            self._alert(f"error: {what} could not be written: {one_line(error)}; the run goes on")

    def grid(self, step: int, samples: Sequence[ScoredImage]) -> Path | None:
        """Write the sample grid of a validation; returns the file."""
        path = self._folder.samples / f"step_{step:05d}.png"
        with self.attempt(str(path)):
            save_grid(path, f"step {step}", samples)
            return path
        return None

    def images(self, dump: ImageDump, step: int, images: Sequence[ScoredImage]) -> None:
        """Write the images of a rollout or a validation; every process calls it."""
        with self.attempt(f"images in {dump.root}/"):
            dump.write(step, images)

    def rollout(self, run: Run, step: int, images: np.ndarray, request: BatchRequest, reward: RewardResult) -> None:
        """Write the images of a rollout, under the number of the step that learns from them."""
        assert run.rollout_dump is not None
        kept = []
        for i, number in enumerate(image_numbers(request.group, run.config.actor_rollout_ref.rollout.drawn).tolist()):
            prompt = request.prompts[int(request.request.prompt_index[i])].prompt
            parts = {name: float(values[i]) for name, values in reward.parts.items()}
            seed = request.request.seeds[i]
            kept.append(ScoredImage(number, images[i], prompt, seed, float(reward.total[i]), parts))
        self.images(run.rollout_dump, step + 1, kept)

    @contextmanager
    def profile(self, step: int, accelerator: Any) -> Iterator[None]:
        """Profile the body, this process's part of a step, unless it raises. Writes ``step_00003.rank_0.pt.trace.json``
        for Perfetto and TensorBoard, and ``step_00003.rank_0.txt``, the operators by their own time."""
        with torch.profiler.profile() as profile:  # of the CPU and of the accelerator that there is
            yield
        path = self._folder.profile / f"step_{step:05d}.rank_{accelerator.process_index}.pt.trace.json"
        with self.attempt(f"{path.parent}/"):
            # Only a run that profiles has the folder.
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda temporary: profile.export_chrome_trace(str(temporary)))
            order = f"self_{accelerator.device.type}_time_total"
            table = profile.key_averages().table(sort_by=order, row_limit=OPERATORS)
            path = path.with_name(path.name.replace(".pt.trace.json", ".txt"))
            write_whole(path, lambda temporary: temporary.write_text(f"{table}\n", encoding="utf-8"))

    def timeline(self, line: dict[str, Any]) -> None:
        """Add a line to ``timeline.jsonl``."""
        with self.attempt(str(self._folder.timeline)):
            self._folder.append_to_timeline(line)

    def adapters(self, run: Run) -> list[Path]:
        """Write the final adapters of the sides that learn, and their averages if there are some, those of the image
        model with model cards; returns the files written."""
        config = run.config.algorithm.prompt_writer
        written: list[Path] = []
        if not config.learns_alone:
            average = run.actor.averaged_state()
            rows = self._folder.rows()
            for folder in [self._folder.lora, *([] if average is None else [self._folder.lora_ema])]:
                averaged = folder == self._folder.lora_ema
                card = model_card(run.config, run.model, rows, len(run.train_prompts), averaged=averaged)
                write = partial(_save, run, average if averaged else None, card)
                written += self._adapter(folder, ADAPTER_FILE, write, same_lora)
        if run.writer is not None and config.learns != "images":
            averages = run.writer.actor.average is not None
            for folder in [self._folder.writer, *([self._folder.writer_ema] if averages else [])]:
                write = partial(run.writer.save, averaged=folder == self._folder.writer_ema)
                written += self._adapter(folder, WRITER_FILE, write, lambda *_: False)
        return written

    def _adapter(
        self, folder: Path, file: str, write: Callable[[Path], None], same: Callable[[Path, Path], bool]
    ) -> list[Path]:
        """Replace a folder with an adapter; returns its file, or nothing where it could not be written."""
        with self.attempt(f"{folder}/"):
            for moved in self._folder.replace_folder(folder, write, same):
                self._alert(f"Moved aside in {self._folder.root}: {moved}")
            return [folder / file]
        return []

    def pictures(self, history: History) -> list[Path]:
        """Draw the plots, the first and last grid side by side, and ``summary.png``; returns the files to look at."""
        pictures: list[Path] = []
        if history.trained:
            with self.attempt(f"{self._folder.plots}/"):
                # The last plot is the overview; the others are for a closer look.
                pictures += write_plots(history, self._folder.plots)[-1:]
        grids = list(self._folder.grids().values())
        if len(grids) > 1:
            both = self._folder.samples / "before_after.png"
            with self.attempt(str(both)):
                stack_pictures(both, [grids[0], grids[-1]])
                pictures.append(both)
        if pictures:
            with self.attempt(str(self._folder.summary)):
                # The summary has the plots above the images.
                stack_pictures(self._folder.summary, pictures)
                pictures.insert(0, self._folder.summary)
        return pictures

    def raise_unwritten(self, step: int, kept: Sequence[Path | None]) -> None:
        """End a run that has lost outputs by a ``RunFolderError`` that names them and the files in ``kept``."""
        if self.unwritten:
            lost = "; ".join(f"{what} ({one_line(error)})" for what, error in self.unwritten)
            names = ", ".join(str(path) for path in kept if path is not None)
            raise RunFolderError(
                f"trained to step {step}, but could not write {lost}. Kept: {names}"
            ) from self.unwritten[0][1]


def _save(run: Run, state: Mapping[str, Tensor] | None, card: str, folder: Path) -> None:
    # At full strength: other programs do not read ``lora_alpha`` from the metadata.
    save_lora(run.model, run.actor.transformer, folder, state, full_strength=True)
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
