"""What a checkpoint of a run holds, how it is checked, and how a run takes it up again.

A checkpoint is read whole and checked before anything of the run or its folder is changed: a damaged one costs a
message, which names the newest older checkpoint that is whole.
"""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.models.lora import AdapterMismatchError, read_lora, save_lora
from flowgrpo_rc.trainer.checkpoint import (
    STATE_FILE,
    TENSOR_FILE,
    CheckpointError,
    CheckpointStore,
    DamagedCheckpointError,
    entry,
    random_states,
    reading,
    restore_random_states,
    step_of,
)
from flowgrpo_rc.trainer.config import TrainerConfig
from flowgrpo_rc.trainer.setup import Run

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every weight."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read and found whole."""

    step: int
    sampler: dict[str, Any]
    tensors: dict[str, Any]


def save_run(run: Run, store: CheckpointStore, step: int) -> None:
    """Write ``step_N``: adapter, its average if there is one, optimizer, schedule, random states, calibrated bands,
    the guard's state, data position."""
    actor = run.actor
    tensors = {
        "optimizer": actor.optimizer.state_dict(),
        "lr_scheduler": actor.lr_scheduler.state_dict(),
        "random": random_states(),
    }
    if actor.average is not None:
        tensors["average"] = actor.average.state_dict()
    tensors |= {name: part.state_dict() for name, part in _calibrated(run).items()}
    store.save(
        step,
        {"step": step, "sampler": run.sampler.state_dict(), "fingerprint": vars(run.fingerprint)},
        tensors,
        lambda folder: save_lora(run.model, actor.transformer, folder),
    )


def _calibrated(run: Run) -> dict[str, Any]:
    """What a run has learned of its gap, by the name in a checkpoint."""
    parts = {"clip_bands": run.clip_bands, "rejection_bands": run.rejection_bands}
    present: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
    return {**present, "guard": run.guard}


def checkpoint_to_resume(
    trainer: TrainerConfig, store: CheckpointStore, say: Callable[[str], None] = lambda _text: None
) -> Path | None:
    """The checkpoint that ``resume_mode`` names; ``None``: start afresh.

    Args:
        trainer: the section of the configuration.
        store: the run's own checkpoints.
        say: told when ``latest`` names a checkpoint that is not there.

    Raises:
        CheckpointError: ``latest`` or ``resume_from_path`` names no checkpoint.
    """
    if trainer.resume_mode == "resume_path":
        return _given(str(trainer.resume_from_path))
    if trainer.resume_mode != "auto":
        return None
    latest, stale = store.latest(), store.stale_pointer()
    if stale is not None:
        say(stale)
    return latest


def _given(text: str) -> Path:
    """The folder at ``resume_from_path``."""
    field = "trainer.resume_from_path"
    if "\0" in text:
        raise CheckpointError(f"{field}: got {text!r}, which holds a NUL character; give a checkpoints/step_N folder")
    try:
        path = Path(text).expanduser()
        if path.is_dir() and (path / STATE_FILE).exists():
            return path
        there = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{field}: got {text!r}, which cannot be looked into: {error}") from error
    what = f"{path} holds no {STATE_FILE}, so it is not a complete checkpoint" if there else f"there is no {path}"
    found = [f for root in (path, path / "checkpoints", path.parent) for f in CheckpointStore(root, None).complete()]
    near = f"; near it are {', '.join(map(str, found[-3:]))}" if found else "; give a checkpoints/step_N folder"
    raise CheckpointError(f"{field}: {what}{near}")


def load_run(run: Run, store: CheckpointStore, source: Path) -> int:
    """Bring ``run`` to where the checkpoint was written; returns its step.

    Raises:
        CheckpointError: not a checkpoint, damaged, of another model, or of another version of this package; nothing
            was changed, and the message names the newest older checkpoint that is whole.
    """
    try:
        saved = read_checkpoint(run, store, source)
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{error}{_older_whole(run, store, source, error)}") from error
    actor, tensors = run.actor, saved.tensors
    actor.load_adapter(source)
    actor.load_optimizer(*_optimizer_states(run, tensors))
    actor.load_average(tensors.get("average"))
    for name, part in _calibrated(run).items():
        if name in tensors:
            part.load_state_dict(tensors[name])
    restore_random_states(tensors["random"])
    run.sampler.load_state_dict(saved.sampler)
    return saved.step


def read_checkpoint(run: Run, store: CheckpointStore, folder: Path) -> Saved:
    """Reads every file of a checkpoint and checks that ``run`` can continue from it; changes nothing.

    Raises:
        DamagedCheckpointError: names the file and what is wrong with it.
        CheckpointError: the checkpoint is of another model.
        ValueError: it is of another data set.
    """
    state, tensors = store.load(folder, run.fingerprint)
    state_file, tensor_file = folder / STATE_FILE, folder / TENSOR_FILE
    sampler = _check_sampler(run, state, state_file)
    try:
        read_lora(run.actor.transformer, folder)
    except AdapterMismatchError as error:
        raise DamagedCheckpointError(str(error)) from error
    with reading(tensor_file):  # tensors of rare kinds refuse to be looked at
        _check_optimizer(run, tensors, tensor_file)
        _check_random(entry(tensors, "random", dict, tensor_file), tensor_file)
        if run.actor.average is not None and "average" in tensors:
            _check_average(run, entry(tensors, "average", dict, tensor_file), tensor_file)
        for name, part in _calibrated(run).items():
            if name in tensors or name == "guard":
                _check_part(part, name, entry(tensors, name, dict, tensor_file), folder)
    return Saved(state["step"], sampler, tensors)


def _older_whole(run: Run, store: CheckpointStore, damaged: Path, error: Exception) -> str:
    """The end of the message about a checkpoint that cannot be continued from: where to go on instead."""
    number = step_of(damaged)
    for folder in reversed(CheckpointStore(damaged.parent, None).complete()):
        own = step_of(folder)
        if folder == damaged or own is None or (number is not None and own >= number):
            continue
        try:
            read_checkpoint(run, store, folder)
        except (CheckpointError, ValueError):
            continue
        return (
            f". Nothing was changed. The newest older checkpoint that is whole is {folder}; resume from it with "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )
    if not isinstance(error, DamagedCheckpointError):
        return ""
    return ". Nothing was changed. No older checkpoint is whole; start afresh with trainer.resume_mode=disable"


def _check_sampler(run: Run, state: dict[str, Any], file: Path) -> dict[str, Any]:
    saved = entry(state, "sampler", dict, file)
    for name, own in run.sampler.state_dict().items():
        entry(saved, name, type(own), file, "sampler")
    probe = copy.copy(run.sampler)
    try:
        probe.load_state_dict(saved)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    drawn = saved["epoch"] * probe.batches_per_epoch + saved["position"]
    if drawn != state["step"]:
        raise DamagedCheckpointError(
            f"{file} is damaged: its step is {state['step']}, but its sampler has given {drawn} batches"
        )
    return saved


def _check_optimizer(run: Run, tensors: dict[str, Any], file: Path) -> None:
    """Moments of the right shapes for every weight, as many steps as the schedule has taken, all finite."""
    optimizer = entry(tensors, "optimizer", dict, file)
    groups = entry(optimizer, "param_groups", list, file, "optimizer")
    moments = entry(optimizer, "state", dict, file, "optimizer")
    schedule = entry(tensors, "lr_scheduler", dict, file)
    taken = entry(schedule, "last_epoch", int, file, "lr_scheduler")
    shapes = [tuple(p.shape) for p in run.actor.optimizer.param_groups[0]["params"]]
    everyone = list(range(len(shapes)))
    if len(groups) != 1 or not isinstance(groups[0], dict) or groups[0].get("params") != everyone:
        raise DamagedCheckpointError(f"{file} is damaged: optimizer.param_groups is not one group of {len(shapes)}")
    if taken < 0:
        raise DamagedCheckpointError(f"{file} is damaged: lr_scheduler.last_epoch is {taken}")
    if set(moments) != set(everyone if taken else ()):
        raise DamagedCheckpointError(
            f"{file} is damaged: optimizer.state holds {len(moments)} of {len(shapes)} weights after {taken} steps"
        )
    for index, shape in enumerate(shapes if taken else ()):
        name = f"optimizer.state.{index}"
        own = entry(moments, index, dict, file, "optimizer.state")
        for moment in MOMENTS:
            _check_tensor(own.get(moment), shape, file, f"{name}.{moment}")
        _check_tensor(own.get("step"), (), file, f"{name}.step")
        if float(own["step"]) != taken or bool((own["exp_avg_sq"] < 0).any()):
            raise DamagedCheckpointError(
                f"{file} is damaged: {name} has taken {float(own['step']):g} steps and its schedule {taken}, or "
                "a second moment is negative"
            )


def _optimizer_states(run: Run, tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The moments and the position in the schedule; every option is this run's own."""
    actor, taken = run.actor, tensors["lr_scheduler"]["last_epoch"]
    optimizer = {**actor.optimizer.state_dict(), "state": tensors["optimizer"]["state"]}
    schedule = {**actor.lr_scheduler.state_dict(), "last_epoch": taken, "_step_count": taken + 1}
    return optimizer, schedule


def _check_random(saved: dict[str, Any], file: Path) -> None:
    """Generators of our own take the states; the global ones stay as they are."""
    checks: dict[str, Callable[[Any], None]] = {"python": _try_python, "numpy": _try_numpy, "torch": _try_torch}
    for name, check in checks.items():
        if name not in saved:
            raise DamagedCheckpointError(f"{file} is damaged: random.{name} is missing")
        try:
            check(saved[name])
        except Exception as error:
            raise DamagedCheckpointError(
                f"{file} is damaged: random.{name} is no state of a generator ({type(error).__name__}: {error})"
            ) from error
    if "cuda" in saved and not (isinstance(saved["cuda"], Tensor) and saved["cuda"].dtype == torch.uint8):
        raise DamagedCheckpointError(f"{file} is damaged: random.cuda is no state of a generator")


def _try_python(state: Any) -> None:
    version, internal, gauss = state
    random.Random().setstate((version, tuple(internal), gauss))


def _try_numpy(state: Any) -> None:
    kind, keys, position, has_gauss, cached = state
    values = (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    np.random.RandomState().set_state(values)


def _try_torch(state: Any) -> None:
    torch.Generator().set_state(state)


def _check_average(run: Run, saved: dict[str, Any], file: Path) -> None:
    from diffusers.training_utils import EMAModel

    parameters = run.actor.optimizer.param_groups[0]["params"]
    average = EMAModel(parameters, decay=0.5)
    try:
        average.load_state_dict(saved | {"decay": 0.5})
    except Exception as error:
        raise DamagedCheckpointError(f"{file} is damaged: average: {error}") from error
    shadows = entry(saved, "shadow_params", list, file, "average")
    if len(shadows) != len(parameters):
        raise DamagedCheckpointError(
            f"{file} is damaged: average.shadow_params has {len(shadows)} of {len(parameters)} weights"
        )
    for index, (shadow, parameter) in enumerate(zip(shadows, parameters, strict=True)):
        _check_tensor(shadow, tuple(parameter.shape), file, f"average.shadow_params.{index}")


def _check_part(part: Any, name: str, state: dict[str, Any], folder: Path) -> None:
    """The state has every entry that the part's own has, of the same kind."""
    own, file = part.state_dict(), folder / TENSOR_FILE
    missing = [key for key in own if key not in state]
    if missing:
        raise DamagedCheckpointError(
            f"{folder}: its state of {name} is of another version (KeyError: {missing[0]!r}), or {file.name} is damaged"
        )
    _check_like(own, state, file, name)
    if "values" in own:
        _check_numbers(state["values"], file, f"{name}.values")
    if "of" in own and [type(value) for value in state["of"]] != [str, int]:
        raise DamagedCheckpointError(f"{file} is damaged: {name}.of is {state['of']!r}")
    if not all(isinstance(cause, str) for cause in state.get("causes", ())):
        raise DamagedCheckpointError(f"{file} is damaged: {name}.causes is {state['causes']!r}")


def _check_like(own: Mapping[str, Any], saved: Any, file: Path, where: str) -> None:
    """Entries that both have are of one type, all the way down."""
    for key, value in own.items():
        if key in saved:
            found = entry(saved, key, type(value), file, where)
            if isinstance(value, Mapping):
                _check_like(value, found, file, f"{where}.{key}")


def _check_numbers(values: Mapping[Any, Any], file: Path, where: str) -> None:
    for key, numbers in values.items():
        fine = isinstance(key, float) and isinstance(numbers, Sequence) and not isinstance(numbers, str)
        if not fine or not all(isinstance(n, float) and isfinite(n) for n in numbers):
            raise DamagedCheckpointError(f"{file} is damaged: {where}.{key} is not a list of finite numbers")


def _check_tensor(value: Any, shape: tuple[int, ...], file: Path, where: str) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise DamagedCheckpointError(f"{file} is damaged: {where} is {found}, not a tensor of shape {shape}")
    if value.layout is not torch.strided or value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise DamagedCheckpointError(f"{file} is damaged: {where} does not hold every one of its values")
    if not value.is_floating_point() or not bool(value.float().isfinite().all()):
        raise DamagedCheckpointError(f"{file} is damaged: {where} holds values that are NaN, infinite or no floats")
