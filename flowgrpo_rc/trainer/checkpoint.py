"""Checkpoints: everything that a run needs to go on, written whole or not at all, and read back strictly.

``checkpoints/step_N/`` holds the adapter, ``optimizer.pt`` (all other tensors), ``trainer_state.json`` (the position
in the data, the fingerprint of what must be the same when the run goes on, and a digest of every file), and in
``replay/`` the files of the replay buffer, whose digests are in ``optimizer.pt``. The folder is filled under a
temporary name, synced and renamed; ``checkpoints/latest`` names the newest one.

Read ``save_run``, ``load_run`` and ``resume_run`` first.
"""

import hashlib
import inspect
import json
import os
import random
import re
import shlex
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models import DiffusionModel
from flowgrpo_rc.models.digests import spread, values_digest
from flowgrpo_rc.models.lora import base_parameters, save_lora
from flowgrpo_rc.models.quantization import dequantized
from flowgrpo_rc.models.sharding import whole
from flowgrpo_rc.rewards import RewardMix
from flowgrpo_rc.run_folder import MADE_AT_THE_END, WRITING, RunFolder, sync_path, temporary_folder, write_durably
from flowgrpo_rc.trainer.agreement import flatten, prompts_digest
from flowgrpo_rc.trainer.config import FlowGRPOConfig, TrainerConfig

if TYPE_CHECKING:
    from flowgrpo_rc.trainer.setup import Run

STATE_FILE = "trainer_state.json"
TENSOR_FILE = "optimizer.pt"
REPLAY_FOLDER = "replay"
"""Files of the buffer of ``algorithm.replay``."""
BITSANDBYTES_STATE = "__bnb_optimizer_quant_state__"
"""Under this name bitsandbytes saves a parameter's moments."""
_FOLDER = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_PLAIN_PATH = re.compile(r"[\w/.+-]+", re.ASCII)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is not one this run can continue from."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, unreadable or not as it was saved; the message names it."""


def save_run(run: "Run", store: "CheckpointStore", step: int, states: Sequence[dict[str, Any]]) -> None:
    """Write ``step_N``, N being the batches learned from, with the ``random_states`` of every process. The saved data
    position is the one after these batches, since rollouts may be ahead."""
    parts: dict[str, Any] = {
        "optimizer": run.actor.optimizer,
        "lr_scheduler": run.actor.lr_scheduler,
        "average": run.actor.average,
        "clip_bands": run.clip_bands,
        "rejection_bands": run.rejection_bands,
        "guard": run.guard,
    }
    # Its file may be gone by the time of a resume, or another.
    start = {} if run.actor.start is None else {"start": run.actor.start}
    old = {} if run.adapter.old is None else {"old_policy": run.adapter.old}

    def write(folder: Path) -> None:
        save_lora(run.model, run.actor.transformer, folder)
        run.replay.link_into(folder / REPLAY_FOLDER)

    # One file for all tensors: a checkpoint cannot mix two saves.
    tensors = {name: part.state_dict() for name, part in parts.items() if part is not None}
    store.save(
        step,
        {
            "step": step,
            "sampler": run.sampler.state_dict(batches=step),
            "prompts": prompts_digest(run.train_prompts),
            "fingerprint": run.fingerprint,
        },
        {**tensors, **start, **old, "random": list(states), "older_adapters": run.adapter.older}
        | {"replay": run.replay.state_dict()}
        | ({} if run.writer is None else {"writer": run.writer.state_dict()}),
        write,
    )


def load_run(run: "Run", store: "CheckpointStore", source: Path) -> int:
    """Bring ``run`` to the state that ``source`` was saved in; returns its step. Raises ``CheckpointError`` for one
    that is damaged, of another model, or of another version of this package. The message names the newest older
    checkpoint that is whole."""
    try:
        state, tensors = store.load(source, run.fingerprint)
        _restore(run, source, state, tensors)
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{error}{_where_to_go_on(run, source, error)}") from error
    return state["step"]


def resume_run(
    run: "Run", store: "CheckpointStore", folder: RunFolder, alert: Callable[[str], object]
) -> tuple[Path | None, int]:
    """Load the checkpoint that ``trainer.resume_mode`` names, and only then move aside what the run would overwrite.
    Every process calls it. Returns the checkpoint, ``None`` for a fresh start, and the step to go on from. A
    ``CheckpointError`` leaves the disk as it was."""
    from accelerate.utils import broadcast_object_list

    found: list[Path | None] = [None]
    if run.accelerator.is_main_process:
        found = [checkpoint_to_resume(run.config.trainer, store, alert)]
    # The main process decides, since file systems may show other processes another state.
    broadcast_object_list(found)
    source = found[0]
    # Read whole before anything is moved: a damaged checkpoint must not cost records.
    step = 0 if source is None else load_run(run, store, source)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        run.replay.begin(None if source is None else source / REPLAY_FOLDER)
        if source is not None and source.resolve().parent == store.root.resolve():
            number = folder.next_number()
            # Checkpoints first: a start after a kill in between then finds the right ``latest``.
            moved = store.set_aside_after(step, number)
            # A run that is resumed at step 0 validates again, which is the row of step 0.
            again = step == 0 and run.config.trainer.val_before_train and bool(run.val_prompts)
            moved += folder.set_aside_after(-1 if again else step, number)
            moved += folder.set_aside(MADE_AT_THE_END, number) if moved else []
        else:
            moved = folder.set_all_aside()
        if moved:
            alert(f"Moved aside in {folder.root}: {'; '.join(moved)}")
    run.accelerator.wait_for_everyone()
    return source, step


def command_to_continue(root: Path, total_steps: int, processes: int) -> str | None:
    """The line for a shell that continues the run in ``root`` to ``total_steps``, with its own other settings; ``None``
    if it has no checkpoint, or is as far already."""
    folder = RunFolder(root)
    newest = CheckpointStore(folder.checkpoints, None).newest_complete()
    if newest is None or not folder.config.is_file() or (step_of(newest) or 0) >= total_steps:
        return None
    launcher = f"torchrun --standalone --nproc_per_node {processes} -m flowgrpo_rc.cli.main"
    # Double quotes are for Hydra, whose grammar has characters that paths have too.
    escaped = str(root).replace("\\", "\\\\").replace('"', '\\"')
    where = str(root) if _PLAIN_PATH.fullmatch(str(root)) else f'"{escaped}"'
    return (
        f"{'flowgrpo-rc' if processes == 1 else launcher} train --config-dir {shlex.quote(str(root))} --config-name "
        f"config {shlex.quote(f'trainer.default_local_dir={where}')} trainer.resume_mode=auto "
        f"trainer.total_training_steps={total_steps}"
    )


def checkpoint_to_resume(
    trainer: TrainerConfig, store: "CheckpointStore", alert: Callable[[str], object] = lambda _text: None
) -> Path | None:
    """The checkpoint that ``resume_mode`` names, or ``CheckpointError`` if that is none; ``None``: start afresh."""
    if trainer.resume_mode == "auto":
        return store.latest(alert)
    if trainer.resume_mode == "disable":
        return None
    # ``os.path`` also takes an unknown ~user and names that are too long, for which ``Path`` raises.
    path = Path(os.path.expanduser(str(trainer.resume_from_path)))
    if os.path.isfile(path / STATE_FILE):
        return path
    wrong = f"there is no {path}"
    if os.path.exists(path):
        wrong = f"{path} holds no {STATE_FILE}, so it is not a complete checkpoint"
    roots = (path, path / "checkpoints", path.parent)
    near = [str(folder) for root in roots for folder in CheckpointStore(root, None).complete()]
    remedy = f"near it are {', '.join(near[-3:])}" if near else "give a checkpoints/step_N folder"
    raise CheckpointError(f"trainer.resume_from_path: {wrong}; {remedy}")


def _restore(run: "Run", source: Path, state: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Load every part. The digests were right, so that a part that does not fit is of another version."""
    process = run.accelerator.process_index
    actor = run.actor
    _check_optimizer(actor.config.optim.name, tensors.get("optimizer", {}).get("state", {}), "actor_rollout_ref.actor")
    if run.writer is not None and "writer" in tensors:
        moments = tensors["writer"]["optimizer"]["state"]
        _check_optimizer(run.writer.config.actor.optim.name, moments, "algorithm.prompt_writer.actor")
    try:
        run.sampler.load_state_dict(state["sampler"])
        prompts = prompts_digest(run.train_prompts)
        if state.get("prompts", prompts) != prompts and run.accelerator.is_main_process:
            warnings.warn(f"the training prompts are not those that {source} has learned from", stacklevel=2)
        # A checkpoint without one is of a run with another reference; then the configuration's adapter is the start.
        start = tensors.get("start", actor.start)
        # Average and start begin with the adapter, so that the adapter comes first.
        actor.load_adapter(source)
        actor.load_optimizer(tensors["optimizer"]["state"], tensors["lr_scheduler"]["last_epoch"])
        actor.load_average(tensors.get("average"))
        actor.load_start(start)
        for name in ("clip_bands", "rejection_bands", "guard"):
            part = getattr(run, name)
            # Runs without ``auto`` have calibrated nothing; the guard's state is in every checkpoint.
            if part is not None and (name in tensors or name == "guard"):
                part.load_state_dict(tensors[name])
        if run.writer is not None:
            run.writer.load_state_dict(tensors["writer"])
        saved = tensors["random"]
        # With another number of processes no saved state belongs to this one, and all take the first's.
        restore_random_states(saved[process if len(saved) == run.accelerator.num_processes else 0])
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise  # the checkpoint is whole; the machine is too small
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error, 300)}"
        raise DamagedCheckpointError(f"{source} is damaged or of another version of flowgrpo_rc ({why})") from error
    run.replay.load_state_dict(tensors.get("replay", {"entries": [], "settings": {}}))
    run.adapter.restore(state["step"], tensors.get("older_adapters", {}), tensors.get("old_policy"))


def _check_optimizer(name: str, moments: Mapping[int, Any], section: str) -> None:
    """Raise ``CheckpointError`` for moments of the other optimizer; ``section`` is the one with ``optim``."""
    in_8_bits = any(BITSANDBYTES_STATE in state for state in moments.values())
    saved = "adamw_8bit" if in_8_bits else "adamw"
    if moments and saved != name:
        raise CheckpointError(
            f"{section}.optim.name: got {name}, but the checkpoint has the moments of {saved}; set it to "
            f"{saved}, or use trainer.resume_mode=disable to start afresh"
        )


def _where_to_go_on(run: "Run", damaged: Path, error: Exception) -> str:
    """The end of the message about a checkpoint that cannot be continued from."""
    store = CheckpointStore(damaged.parent, None)
    step = step_of(damaged)
    older = [folder for folder in store.complete() if step is None or (step_of(folder) or 0) < step]
    # The newest older one costs the fewest steps.
    for folder in reversed(older):
        with suppress(CheckpointError):
            store.load(folder, run.fingerprint)
            return (
                f". Nothing was changed. The newest older checkpoint that is whole is {folder}; resume from it with "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
            )
    if not isinstance(error, DamagedCheckpointError):
        return ""
    return ". Nothing was changed. No older checkpoint is whole; start afresh with trainer.resume_mode=disable"


def random_states() -> dict[str, Any]:
    """States of the global random generators, which reward functions may draw from. They are of types that
    ``torch.load(weights_only=True)`` takes."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    # numpy's state has an array, which ``weights_only`` refuses.
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo ``random_states``."""
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    # A run may move to a machine without a GPU.
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@torch.no_grad()
def fingerprint(
    config: FlowGRPOConfig, model: DiffusionModel, reward: RewardMix | None = None, references: str = ""
) -> dict[str, Any]:
    """Everything that changes the numbers of a run and that its settings do not show, as JSON gives it back.

    ``pipeline`` is the pipeline's class. ``transformer`` has its settings and a digest of frozen weights. ``lora`` has
    rank, alpha and target modules. ``parts`` has digests of text encoders, vocabularies and VAE, and the schedule.
    ``rewards`` has a digest of each scorer's network, and ``references`` that of the training prompts' images. A
    sharded transformer gathers weights, so that every process must call.
    """
    lora = config.actor_rollout_ref.model
    targets = lora.target_modules or list(model.default_lora_targets)
    transformer = _settings(model.pipe.transformer)
    frozen = list(base_parameters(model.transformer).values())
    # Clones, so that the whole tensors that a sharded transformer gathers are freed.
    samples = [dequantized(whole(p)).flatten()[:256].clone() for p in frozen[:: max(1, len(frozen) // 16)]]
    transformer["weights"] = values_digest(samples)
    # A text encoder's files are digested, since a run may never load it.
    parts: dict[str, Any] = dict(model.digests)
    for name, part in model.pipe.components.items():
        if isinstance(part, torch.nn.Module) and name not in parts:
            parts[name] = values_digest([spread(dequantized(whole(p))) for p in base_parameters(part).values()])
        elif name == "scheduler" and part is not None:
            parts |= {f"scheduler {k}": v for k, v in _settings(part).items()}
    # The factors and offsets of latents.
    scales = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
    parts |= {f"vae {name}": value for name, value in model.pipe.vae.config.items() if name in scales}
    networks = {} if reward is None else reward.networks()
    found = {
        "pipeline": type(model.pipe).__name__,
        "transformer": transformer,
        "lora": {"rank": lora.lora_rank, "alpha": lora.lora_alpha, "target_modules": targets},
        "parts": parts,
        "rewards": {name: values_digest([spread(w).cpu() for w in weights]) for name, weights in networks.items()},
        "references": references,
    }
    return json.loads(json.dumps(found, default=str))


def check_fingerprint(own: Mapping[str, Any], saved: Mapping[str, Any], folder: Path) -> None:
    """Raise ``CheckpointError`` naming the first difference between this run's fingerprint and the ``saved`` one."""
    own = {"rewards": {}, "references": "", **own}
    saved = {"rewards": {}, "references": "", **saved}
    if saved.get("pipeline") != own["pipeline"]:
        raise CheckpointError(
            f"{folder} is a checkpoint of a {saved.get('pipeline')}, this run trains a {own['pipeline']}"
        )
    if "parts" in own and "parts" not in saved:
        warnings.warn(
            f"{folder} was written before checkpoints recorded text encoders, vocabularies, VAE and schedule: "
            "that these are the same is not checked",
            stacklevel=3,
        )
        saved["parts"] = own["parts"]
    here, there = flatten(own), flatten(saved)
    for key in {**here, **there}:
        part, _, name = key.partition(".")
        if here.get(key) == there.get(key):
            continue
        what = f"is a checkpoint of another model: {part} {name} is {there.get(key)!r:.300} there and "
        what += f"{here.get(key)!r:.300} here. Give the same model and LoRA settings"
        if part == "rewards":
            if key not in here or key not in there:
                continue  # a run may go on with other rewards
            what = f"was trained with other weights or another dtype of the reward {name!r} ({there[key]!r} there, "
            what += f"{here[key]!r} here). Give the same in reward.{name}'s settings"
        elif part == "writer":
            what = f"is a checkpoint with another prompt writer: {name} is {there.get(key)!r} there and "
            what += f"{here.get(key)!r} here. Give the same in algorithm.prompt_writer"
        elif part == "references":
            what = f"was trained with other reference images ({there[key] or 'none'} there, {here[key] or 'none'} "
            what += "here). Give the images of data.train_files or data.preferences as they were"
        raise CheckpointError(f"{folder} {what}, or use trainer.resume_mode=disable to start afresh")


def _settings(part: Any) -> dict[str, Any]:
    """The entries of a part's configuration that its class takes; files may hold others, which have no effect."""
    taken = inspect.signature(type(part).__init__).parameters
    return {k: v for k, v in dict(part.config).items() if k in taken}


class CheckpointStore:
    """The folder ``checkpoints/`` of a run: ``step_N/`` folders, the newest ``keep`` (``None``: all), and the file
    ``latest`` with the newest's name."""

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root = root
        self._keep = keep
        self._pointer = root / "latest"

    def latest(self, alert: Callable[[str], object] = lambda _text: None) -> Path | None:
        """The checkpoint that ``latest`` names; if it is not complete, the newest complete one, and an alert. Raises
        ``CheckpointError`` if ``latest`` does not hold the name of a checkpoint."""
        newest = self.newest_complete()
        try:
            name = self._pointer.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return newest
        if name and not _FOLDER.fullmatch(name):
            raise CheckpointError(
                f"{self._pointer} names no checkpoint ({name!r:.200}); write step_N into it, or remove it to go on "
                f"from {newest or 'step 0'}"
            )
        # ``latest`` counts, not the largest number: a user may have gone back on purpose.
        if self.root / name in self.complete():
            return self.root / name
        if name and newest is not None:
            alert(f"{self._pointer} names {name}, which is no complete checkpoint; the newest complete one is {newest}")
        return newest

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first; folders of other names (a user's copy) are left out."""
        # The folder is renamed when it is whole, so that one with a state file has everything.
        return [folder for folder in self._steps() if os.path.isfile(folder / STATE_FILE)]

    def newest_complete(self) -> Path | None:
        """The complete checkpoint of the largest step, whatever ``latest`` names."""
        return next(reversed(self.complete()), None)

    def set_aside_after(self, step: int, number: int | None = None) -> list[str]:
        """Move the checkpoints of later steps to ``checkpoints.number/``: a run resumed at ``step`` makes its own.
        Returns what was moved, as text."""
        later = [folder for folder, own in self._steps().items() if own > step]
        if not later:
            return []
        kept = [folder for folder in self.complete() if folder not in later]
        # First: a kill after it leaves no ``latest`` that names a folder that was moved.
        if kept:
            write_durably(self._pointer, kept[-1].name.encode())
        else:
            self._pointer.unlink(missing_ok=True)
        aside = self._folder_aside(number)
        for folder in later:
            os.replace(folder, aside / folder.name)
        sync_path(self.root)
        return [f"checkpoints/{', '.join(folder.name for folder in later)} to {aside.name}/"]

    def save(self, step: int, state: dict[str, Any], tensors: dict[str, Any], write: Callable[[Path], object]) -> Path:
        """Write ``step_N``. An earlier ``step_N`` stays until the new one is complete, and is then moved aside.

        Args:
            state: JSON-compatible: data position, fingerprint and the like.
            tensors: for ``torch.save``: optimizer, schedule, random states.
            write: called with the folder; writes the adapter, and the replay buffer if there is one.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
        """
        final = self.root / f"step_{step}"
        try:
            for stale in self.root.glob(f".*{WRITING}"):  # a kill has left it
                shutil.rmtree(stale, ignore_errors=True)
            with temporary_folder(final) as temporary:
                write(temporary)
                torch.save(tensors, temporary / TENSOR_FILE)
                digests = {path.name: _digest(path) for path in sorted(temporary.iterdir()) if path.is_file()}
                (temporary / STATE_FILE).write_text(json.dumps({**state, "digests": digests}, indent=1))
                for path in (*temporary.iterdir(), temporary):
                    sync_path(path)
                if final.exists():
                    os.replace(final, self._folder_aside() / final.name)
                os.replace(temporary, final)
            # Last: a kill before it leaves ``latest`` at the checkpoint before this one.
            write_durably(self._pointer, final.name.encode())
        # torch and safetensors wrap the system's errors in types of their own.
        except (OSError, RuntimeError, SafetensorError) as error:
            why = f"writing failed ({one_line(error, 300)})"
            if "No space left" in str(error) or shutil.disk_usage(self.root.parent).free < 1 << 20:
                why = "the disk is full"
            raise CheckpointError(
                f"cannot save {final}: {why}. The newest complete checkpoint is {self.newest_complete() or 'none'}; "
                "free some space (trainer.max_actor_ckpt_to_keep limits what is kept) and start again to resume from it"
            ) from error
        self._prune()
        return final

    def load(self, folder: Path, fingerprint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """``(state, tensors)`` of a checkpoint, after every file of it was compared with its digest. Raises
        ``DamagedCheckpointError`` if a file of it is missing, unreadable or changed, ``CheckpointError`` if it is of
        another model."""
        path = folder / STATE_FILE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            step = int(state["step"])
            saved = dict(state["fingerprint"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = f"{type(error).__name__}: {one_line(error, 300)}"
            raise DamagedCheckpointError(f"{path} is damaged: it cannot be read ({why})") from error
        numbered = step_of(folder)
        if numbered not in (None, step):
            raise DamagedCheckpointError(f"{path} is damaged: its step is {step}, its folder's {numbered}")
        check_fingerprint(fingerprint, saved, folder)
        digests = state.get("digests", {})
        file = folder / TENSOR_FILE
        try:
            for file in map(folder.joinpath, digests):
                if _digest(file) != digests[file.name]:
                    raise DamagedCheckpointError(f"{file} is damaged: it is not what was saved (its digest differs)")
            file = folder / TENSOR_FILE
            # Earlier versions saved no digest of this file; the archive's own sums find changed bits too.
            if file.name not in digests and zipfile.ZipFile(file).testzip() is not None:
                raise DamagedCheckpointError(f"{file} is damaged: its checksums differ")
            return state, dict(torch.load(file, map_location="cpu", weights_only=True))
        except (MemoryError, CheckpointError):
            raise  # too small a machine leaves the checkpoint whole
        except Exception as error:  # pickles and archives raise errors of every kind
            why = f"{type(error).__name__}: {one_line(error, 300)}"
            raise DamagedCheckpointError(f"{file} cannot be read: {why}") from error

    def _steps(self) -> dict[Path, int]:
        """The folders ``step_N``, complete or not, and their numbers, oldest first."""
        numbers = {folder: step_of(folder) for folder in self.root.glob("step_*")}
        return dict(sorted(((f, n) for f, n in numbers.items() if n is not None), key=lambda item: item[1]))

    def _folder_aside(self, number: int | None = None) -> Path:
        """The folder ``checkpoints.N/``, made where it is missing."""
        number = RunFolder(self.root.parent).next_number() if number is None else number
        aside = self.root.with_name(f"{self.root.name}.{number}")
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def _prune(self) -> None:
        for old in self.complete()[: -self._keep] if self._keep else []:
            # Renamed first: a kill during the removal must not leave a partial checkpoint.
            doomed = old.with_name(f".{old.name}{WRITING}")
            with suppress(OSError):
                os.replace(old, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def step_of(folder: Path) -> int | None:
    """The number of a folder ``step_N``; ``None`` for any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return None if match is None else int(match[1])


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
