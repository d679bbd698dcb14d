"""The buffer: mini-batches that were learned from, on the disk, to be learned from again.

Every process has a file for its rows of a mini-batch. The list of mini-batches is the same on all processes.
Checkpoints hold the whole buffer, as hard links.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tensordict import TensorDict

from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.replay.config import ReplayConfig
from flowgrpo_rc.rollout.seeds import REPLAY, generator_for
from flowgrpo_rc.run_folder import RunFolderError, sync_path, write_whole

_RECOMPUTED = (Key.PROMPT_INDEX, Key.GROUP, Key.CLIP_WIDTHS, Key.ROLLOUT_RS_BOUNDS)
"""Keys of a batch that a file does not have: its prompts are listed, and calibrated limits move on."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A mini-batch in the buffer."""

    step: int
    """Batches that were learned from before its own."""
    number: int
    """Its place in its batch."""
    staleness: int
    """Batches by which the adapter that drew it was older than the actor's, when it was first learned from."""
    spread: float
    """Mean size of its images' advantages."""
    digests: tuple[str, ...]
    """SHA-256 of the file of each process."""
    has_old: bool = True
    """Its files have the old policy; those of bypass mode have the rollout's log-probs alone."""

    def file(self, process: int) -> str:
        """Name of a process's file."""
        return _file(self.step, self.number, process)


@dataclass(frozen=True)
class Replayed:
    """This process's part of a mini-batch from the buffer."""

    batch: TensorDict
    """Its rows, without ``prompt_index``."""
    prompts: list[int]
    """For each row the place of its prompt in the training data."""
    mini: MiniBatch
    """All rows of ``batch``, with the old policy of the first time; ``None``: the rollout's."""


class ReplayBuffer:
    """Mini-batches of the last ``config.batches`` batches.

    Args:
        folder: of the files; all processes share it, and nothing else is in it.
        config: the section ``algorithm.replay``.
        seed: of the random choices.
        settings: those that the recorded numbers depend on, as JSON has them; a buffer with others is not taken over.
        together: images that follow each other and must stay on one process, 2 for pairs.

    ``say`` takes a line about what is left out.
    """

    def __init__(
        self,
        folder: Path,
        config: ReplayConfig,
        seed: int,
        settings: Mapping[str, Any] | None = None,
        together: int = 1,
    ) -> None:
        self.folder = folder
        self.entries: list[Entry] = []
        """Oldest first."""
        self.say: Callable[[str], None] = lambda _text: None
        self._config = config
        self._seed = seed
        self._settings = dict(settings or {})
        self._together = together

    def __bool__(self) -> bool:
        """True if the run keeps mini-batches at all."""
        return self._config.batches > 0

    def add(
        self,
        batch: TensorDict,
        mini_batches: Sequence[MiniBatch],
        prompts: Sequence[int],
        texts: Sequence[str],
        *,
        step: int,
        staleness: int,
    ) -> None:
        """Write the mini-batches of a batch, and remove those that are too old. Every process calls it.

        Args:
            batch: this process's rows with their advantages.
            mini_batches: as an update with ``keep_old`` returns them; of bypass mode without an old policy.
            prompts, texts: for each row of ``batch`` the place of its prompt in the training data, and the prompt.
            step: batches that were learned from before this one.
            staleness: see ``Entry``.

        Raises:
            RunFolderError: a file cannot be written.
        """
        process = PartialState().process_index
        own = []
        problem = ""
        for number, mini in enumerate(mini_batches):
            content = _packed(batch, mini, prompts, texts)
            path = self.folder / _file(step, number, process)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, lambda temporary, content=content: temporary.write_bytes(content))
            except OSError as error:
                problem = f"cannot write {path}: {one_line(error, 300)}"
                break
            window = int(batch[Key.TIMESTEPS].shape[1])
            images = len(mini.rows) + (mini.idle + mini.rejected) // window
            size = float(batch[Key.ADVANTAGES][mini.rows].abs().double().sum())
            own.append((hashlib.sha256(content).hexdigest(), size, images))
        # All processes raise together, so that none waits for another.
        if problems := [text for text in gather_object([problem]) if text]:
            raise RunFolderError(
                f"{problems[0]}; free some space, or set algorithm.replay.batches (now {self._config.batches}) lower"
            )
        for number, parts in enumerate(zip(*gather_object([own]), strict=True)):
            digests, sizes, counts = zip(*parts, strict=True)
            self.entries.append(
                Entry(
                    step=step,
                    number=number,
                    staleness=staleness,
                    spread=sum(sizes) / sum(counts),
                    digests=tuple(digests),
                    has_old=mini_batches[number].old is not None,
                )
            )
        for entry in [entry for entry in self.entries if entry.step <= step - self._config.batches]:
            self._remove(entry)

    def choose(self, step: int, count: int) -> list[Entry]:
        """Up to ``count`` different mini-batches to learn from after batch ``step``; the same on all processes."""
        limit = self._config.max_staleness
        there = [e for e in self.entries if limit is None or step - e.step + e.staleness <= limit]
        if self._config.select == "random":
            generator = generator_for(self._seed, REPLAY, step, 0)
            there = [there[i] for i in torch.randperm(len(there), generator=generator).tolist()]
        else:
            by_spread = self._config.select == "spread"
            there.sort(key=lambda e: (e.spread if by_spread else 0.0, e.step, -e.number), reverse=True)
        return there[:count]

    def read(self, entry: Entry, texts: Sequence[str]) -> Replayed | None:
        """This process's rows of a mini-batch; ``None`` on every process, and a line, if one process cannot read its
        own or its prompts are not those of ``texts``, the training data's. It is then removed. With another number of
        processes than the files' the rows are dealt anew."""
        state = PartialState()
        same = len(entry.digests) == state.num_processes
        processes = [state.process_index] if same else range(len(entry.digests))
        found: Replayed | None = None
        problem = ""
        try:
            parts = [self._part(entry, process, texts) for process in processes]
            found = parts[0] if same else _dealt(parts, state.process_index, state.num_processes, self._together)
        except (OSError, ValueError) as error:
            problem = one_line(error, 300)
        problems = [text for text in gather_object([problem]) if text]
        if problems:
            self.say(f"replay: the mini-batch {entry.number} of step {entry.step + 1} is left out: {problems[0]}")
            self._remove(entry)
            return None
        return found

    def remove_without_old(self) -> None:
        """Remove mini-batches that lack an old policy, and say so in a line."""
        lacking = [entry for entry in self.entries if not entry.has_old]
        for entry in lacking:
            self._remove(entry)
        if lacking:
            self.say(
                f"replay: {len(lacking)} mini-batch(es) of bypass mode are left out, since in decoupled mode "
                "algorithm.replay.old_policy=kept needs the actor's log-probs of them"
            )

    def _part(self, entry: Entry, process: int, texts: Sequence[str]) -> Replayed:
        """The rows of one process. Raises ``OSError`` or ``ValueError`` if its file is missing or damaged."""
        path = self.folder / entry.file(process)
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry.digests[process]:
            raise ValueError(f"{path} is not what was saved (its digest differs)")
        return _unpacked(content, texts, self._config.steps)

    def _remove(self, entry: Entry) -> None:
        """Forget a mini-batch, and remove its files, which no process needs any more."""
        self.entries.remove(entry)
        for process in range(len(entry.digests)):
            (self.folder / entry.file(process)).unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """The list of mini-batches, for a checkpoint."""
        return {"entries": [asdict(entry) for entry in self.entries], "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``, as far as the present ``batches`` reaches back; nothing, and a line, if the present
        settings would give the recorded steps other log-probs or advantages."""
        self.entries = []
        saved = state["settings"]
        changed = [name for name, value in self._settings.items() if saved.get(name, value) != value]
        if self and state["entries"] and changed:
            self.say(
                f"replay: the checkpoint's buffer is left out, since {changed[0]} was {saved[changed[0]]} there "
                f"and is {self._settings[changed[0]]} here"
            )
            return
        entries = [Entry(**{**one, "digests": tuple(one["digests"])}) for one in state["entries"]]
        newest = max((entry.step for entry in entries), default=0)
        self.entries = [entry for entry in entries if entry.step > newest - self._config.batches]

    def link_into(self, folder: Path) -> None:
        """Give a checkpoint's folder the files of all processes; raises ``OSError`` if the disk is full. A missing file
        is named by ``read``."""
        if self.entries:
            folder.mkdir()
        for entry in self.entries:
            for process in range(len(entry.digests)):
                _link(self.folder / entry.file(process), folder)
        if self.entries:
            sync_path(folder)

    def begin(self, source: Path | None) -> None:
        """Empty the folder, and take the files from a checkpoint's. One process calls it, before the first batch."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if source is None or not source.is_dir() or not self.entries:
            return
        self.folder.mkdir(parents=True)
        for entry in self.entries:
            for process in range(len(entry.digests)):
                _link(source / entry.file(process), self.folder)

    def end(self) -> None:
        """Remove the folder; checkpoints keep what they need. One process calls it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _file(step: int, number: int, process: int) -> str:
    return f"step_{step}.{number}.{process}.pt"


def _link(file: Path, folder: Path) -> None:
    """Give ``folder`` the file too, as a hard link where the file system has them."""
    target = folder / file.name
    try:
        os.link(file, target)
    except FileNotFoundError:
        return
    except OSError:
        shutil.copyfile(file, target)
    sync_path(target)


def _packed(batch: TensorDict, mini: MiniBatch, prompts: Sequence[int], texts: Sequence[str]) -> memoryview:
    """The content of a file: the rows of a mini-batch with its old policy."""
    rows = mini.rows.tolist()
    names = [name for name in batch.keys() if name not in _RECOMPUTED]  # noqa: SIM118  (it iterates over rows)
    tensors = {name: batch[name][mini.rows] for name in names}
    old = {} if mini.old is None else {name: v.cpu() for name, v in vars(mini.old).items() if v is not None}
    content = io.BytesIO()
    counts = {"rejected": mini.rejected, "idle": mini.idle}
    named = {"prompts": [prompts[row] for row in rows], "texts": [texts[row] for row in rows]}
    torch.save({"batch": tensors, "old": old, "counts": counts, **named}, content)
    return content.getbuffer()


def _unpacked(content: bytes, texts: Sequence[str], steps: int | None) -> Replayed:
    """Undo ``_packed``; with ``steps`` the windows have so many steps, their first ones. Raises ``ValueError`` if
    ``texts``, the prompts of the training data, have changed."""
    saved = torch.load(io.BytesIO(content), weights_only=True)
    prompts = saved["prompts"]
    if any(place >= len(texts) or texts[place] != text for place, text in zip(prompts, saved["texts"], strict=True)):
        raise ValueError("its prompts are not those of the training data")
    window = int(saved["batch"][Key.TIMESTEPS].shape[1])
    kept = min(window, steps or window)
    # Scalars of an image are one-dimensional; the second dimension of all else is the window.
    batch, old = (
        {name: values if values.dim() == 1 or kept == window else values[:, :kept] for name, values in part.items()}
        for part in (saved["batch"], saved["old"])
    )
    count = len(prompts)
    counts = {name: number * kept // window for name, number in saved["counts"].items()}
    mini = MiniBatch(torch.arange(count), OldPolicy(**old) if old else None, **counts)
    return Replayed(TensorDict(batch, batch_size=[count]), prompts, mini)


def _dealt(parts: Sequence[Replayed], process: int, processes: int, together: int) -> Replayed:
    """The share of one process of rows that another number of processes has written, ``together`` of them at a time."""
    count = sum(len(part.batch) for part in parts)
    if count % (together * processes):
        raise ValueError(f"its {count} images cannot be dealt to {processes} processes")
    share = count // processes
    own = slice(process * share, (process + 1) * share)
    batch = TensorDict.cat([part.batch for part in parts])[own]
    olds = [part.mini.old for part in parts if part.mini.old is not None]
    old = OldPolicy.concatenate(olds).rows(torch.arange(count)[own]) if olds else None
    # They count in sums over all processes.
    counts = {name: sum(getattr(p.mini, name) for p in parts) if process == 0 else 0 for name in ("rejected", "idle")}
    prompts = [place for part in parts for place in part.prompts]
    return Replayed(batch, prompts[own], MiniBatch(torch.arange(share), old, **counts))
