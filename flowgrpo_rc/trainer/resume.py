"""What a checkpoint of a run holds, how it is checked, and how a run takes it up again.

A checkpoint is read whole and checked before anything of the run or its folder is changed: a damaged one costs a
message, which names the newest older checkpoint that is whole.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.lora import AdapterMismatchError, read_lora, save_lora
from flowgrpo_rc.trainer.checkpoint import (
    STATE_FILE,
    TENSOR_FILE,
    CheckpointError,
    CheckpointFile,
    CheckpointStore,
    DamagedCheckpointError,
    step_of,
)
from flowgrpo_rc.trainer.config import TrainerConfig
from flowgrpo_rc.trainer.random_states import check_random_states, random_states, restore_random_states
from flowgrpo_rc.trainer.setup import Run


def save_run(run: Run, store: CheckpointStore, step: int) -> None:
    """Write ``step_N``: the adapter and its average if there is one, optimizer, schedule, random states, what was
    learned of the gap, and the position in the data."""
    actor = run.actor
    tensors = {
        "optimizer": actor.optimizer.state_dict(),
        "lr_scheduler": actor.lr_scheduler.state_dict(),
        "random": random_states(),
    }
    if actor.average is not None:
        tensors["average"] = actor.average.state_dict()
    tensors |= {name: part.state_dict() for name, part in _gap_parts(run).items()}
    store.save(
        step,
        {"step": step, "sampler": run.sampler.state_dict(), "fingerprint": vars(run.fingerprint)},
        tensors,
        lambda folder: save_lora(run.model, actor.transformer, folder),
    )


def _gap_parts(run: Run) -> dict[str, Any]:
    """What a run learns of its off-policy gap, by the name in a checkpoint."""
    parts = {"clip_bands": run.clip_bands, "rejection_bands": run.rejection_bands, "guard": run.guard}
    return {name: part for name, part in parts.items() if part is not None}


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
        return _checkpoint_at(str(trainer.resume_from_path))
    return store.latest(say) if trainer.resume_mode == "auto" else None


def _checkpoint_at(text: str) -> Path:
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
    roots = (path, path / "checkpoints", path.parent)
    near = [folder for root in roots for folder in CheckpointStore(root, None).complete()]
    remedy = f"near it are {', '.join(map(str, near[-3:]))}" if near else "give a checkpoints/step_N folder"
    raise CheckpointError(f"{field}: {what}; {remedy}")


def load_run(run: Run, store: CheckpointStore, source: Path) -> int:
    """Bring ``run`` to where the checkpoint was written; returns its step.

    Raises:
        CheckpointError: not a checkpoint, damaged, of another model, or of another version of this package; nothing
            was changed, and the message names the newest older checkpoint that is whole.
    """
    try:
        state, tensors = read_checkpoint(run, store, source)
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{error}{_where_to_go_on(run, store, source, error)}") from error
    actor = run.actor
    actor.load_adapter(source)
    # The moments and the position in the schedule; every option is this run's own.
    taken = tensors["lr_scheduler"]["last_epoch"]
    actor.load_optimizer(
        {**actor.optimizer.state_dict(), "state": tensors["optimizer"]["state"]},
        {**actor.lr_scheduler.state_dict(), "last_epoch": taken, "_step_count": taken + 1},
    )
    actor.load_average(tensors.get("average"))
    for name, part in _gap_parts(run).items():
        if name in tensors:
            part.load_state_dict(tensors[name])
    restore_random_states(tensors["random"])
    run.sampler.load_state_dict(state["sampler"])
    return state["step"]


def read_checkpoint(run: Run, store: CheckpointStore, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(state, tensors)`` of a checkpoint, every file of it read and found such that ``run`` can continue from it.

    Nothing of the run is changed.

    Raises:
        DamagedCheckpointError: names the file and what is wrong with it.
        CheckpointError: the checkpoint is of another model.
        ValueError: it is of another data set.
    """
    state, tensors = store.load(folder, run.fingerprint)
    _check_sampler(run, state, CheckpointFile(folder / STATE_FILE))
    try:
        read_lora(run.actor.transformer, folder)
    except AdapterMismatchError as error:
        raise DamagedCheckpointError(str(error)) from error
    file = CheckpointFile(folder / TENSOR_FILE)
    with file.reading():  # tensors of rare kinds refuse to be looked at
        _check_optimizer(run, tensors, file)
        check_random_states(file.entry(tensors, "random", dict), file)
        if run.actor.average is not None and "average" in tensors:
            _check_average(run, file.entry(tensors, "average", dict), file)
        for name, part in _gap_parts(run).items():
            # Runs without ``auto`` have calibrated nothing; the guard's state is in every checkpoint.
            if name in tensors or name == "guard":
                _check_gap_part(part, name, file.entry(tensors, name, dict), file)
    return state, tensors


def _where_to_go_on(run: Run, store: CheckpointStore, damaged: Path, error: Exception) -> str:
    """The end of the message about a checkpoint that cannot be continued from: where to go on instead."""
    damaged_step = step_of(damaged)
    for folder in reversed(CheckpointStore(damaged.parent, None).complete()):
        step = step_of(folder)
        if folder == damaged or step is None or (damaged_step is not None and step >= damaged_step):
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


def _check_sampler(run: Run, state: dict[str, Any], file: CheckpointFile) -> None:
    """The run's own sampler takes the saved position, and had given a batch for every step there."""
    saved = file.entry(state, "sampler", dict)
    for name, own in run.sampler.state_dict().items():
        file.entry(saved, name, type(own), "sampler")
    sampler = copy.copy(run.sampler)
    try:
        sampler.load_state_dict(saved)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    given = saved["epoch"] * sampler.batches_per_epoch + saved["position"]
    if given != state["step"]:
        raise file.damaged(f"its step is {state['step']}, but its sampler has given {given} batches")


def _check_optimizer(run: Run, tensors: dict[str, Any], file: CheckpointFile) -> None:
    """Moments of the right shapes for every weight, as many steps as the schedule has taken, all finite."""
    optimizer = file.entry(tensors, "optimizer", dict)
    groups = file.entry(optimizer, "param_groups", list, "optimizer")
    moments = file.entry(optimizer, "state", dict, "optimizer")
    schedule = file.entry(tensors, "lr_scheduler", dict)
    taken = file.entry(schedule, "last_epoch", int, "lr_scheduler")
    shapes = [tuple(parameter.shape) for parameter in _trained(run)]
    indices = list(range(len(shapes)))
    if len(groups) != 1 or not isinstance(groups[0], dict) or groups[0].get("params") != indices:
        raise file.damaged(f"optimizer.param_groups is not one group of {len(shapes)}")
    if taken < 0:
        raise file.damaged(f"lr_scheduler.last_epoch is {taken}")
    if set(moments) != set(indices if taken else ()):  # AdamW makes its moments at the first step
        raise file.damaged(f"optimizer.state holds {len(moments)} of {len(shapes)} weights after {taken} steps")
    for index in moments:
        where = f"optimizer.state.{index}"
        own = file.entry(moments, index, dict, "optimizer.state")
        for moment in ("exp_avg", "exp_avg_sq"):  # what AdamW keeps of every weight
            _check_tensor(own.get(moment), shapes[index], file, f"{where}.{moment}")
        _check_tensor(own.get("step"), (), file, f"{where}.step")
        if float(own["step"]) != taken or bool((own["exp_avg_sq"] < 0).any()):
            raise file.damaged(
                f"{where} has taken {float(own['step']):g} steps and its schedule {taken}, or a second moment is "
                "negative"
            )


def _trained(run: Run) -> list[torch.nn.Parameter]:
    """The weights that the optimizer moves."""
    return run.actor.optimizer.param_groups[0]["params"]


def _check_average(run: Run, saved: dict[str, Any], file: CheckpointFile) -> None:
    from diffusers.training_utils import EMAModel

    parameters = _trained(run)
    try:
        EMAModel(parameters, decay=0.5).load_state_dict(saved | {"decay": 0.5})
    except Exception as error:
        raise file.damaged(f"average: {error}") from error
    shadows = file.entry(saved, "shadow_params", list, "average")
    if len(shadows) != len(parameters):
        raise file.damaged(f"average.shadow_params has {len(shadows)} of {len(parameters)} weights")
    for index, (shadow, parameter) in enumerate(zip(shadows, parameters, strict=True)):
        _check_tensor(shadow, tuple(parameter.shape), file, f"average.shadow_params.{index}")


def _check_gap_part(part: Any, name: str, state: dict[str, Any], file: CheckpointFile) -> None:
    """The state has every entry that the part's own has, of the same kind."""
    own = part.state_dict()
    missing = [key for key in own if key not in state]
    if missing:
        raise DamagedCheckpointError(
            f"{file.path.parent}: its state of {name} is of another version (KeyError: {missing[0]!r}), or "
            f"{file.path.name} is damaged"
        )
    _check_types(own, state, file, name)
    for key, numbers in state["values"].items() if "values" in own else ():
        listed = isinstance(key, float) and isinstance(numbers, Sequence) and not isinstance(numbers, str)
        if not listed or not all(isinstance(number, float) and isfinite(number) for number in numbers):
            raise file.damaged(f"{name}.values.{key} is not a list of finite numbers")
    if "of" in own and [type(value) for value in state["of"]] != [str, int]:
        raise file.damaged(f"{name}.of is {state['of']!r}")
    if not all(isinstance(cause, str) for cause in state.get("causes", ())):
        raise file.damaged(f"{name}.causes is {state['causes']!r}")


def _check_types(own: Mapping[str, Any], saved: Any, file: CheckpointFile, where: str) -> None:
    """Entries that both have are of one type, all the way down."""
    for key, value in own.items():
        if key in saved:
            found = file.entry(saved, key, type(value), where)
            if isinstance(value, Mapping):
                _check_types(value, found, file, f"{where}.{key}")


def _check_tensor(value: Any, shape: tuple[int, ...], file: CheckpointFile, where: str) -> None:
    """A dense tensor of this shape that holds every one of its values, all of them finite floats."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise file.damaged(f"{where} is {found}, not a tensor of shape {shape}")
    # An expanded tensor repeats a few values, and optimizers write into every one.
    if value.layout is not torch.strided or value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise file.damaged(f"{where} does not hold every one of its values")
    if not value.is_floating_point() or not bool(value.float().isfinite().all()):
        raise file.damaged(f"{where} holds values that are NaN, infinite or no floats")
