"""What a checkpoint of a run holds, how it is checked, and how a run takes it up again.

A checkpoint is read whole and checked before anything of the run or its folder is changed: a damaged one costs a
message, which names the newest older checkpoint that is whole.
"""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.models.lora import AdapterMismatchError, adapter_state, read_lora, save_lora
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
from flowgrpo_rc.trainer.setup import Run


def save_run(
    run: Run,
    store: CheckpointStore,
    step: int,
    states: Sequence[dict[str, Any]],
    older: Mapping[int, dict[str, Tensor]] | None = None,
) -> None:
    """Write ``step_N``: the adapter and its average if there is one, optimizer, schedule, what was learned of the gap,
    the position in the data before the first batch that has not been learned from, ``states``, the ``random_states`` of
    every process, and ``older``, the adapters of earlier steps that batches to come are drawn with, by their
    versions."""
    actor = run.actor
    parts = {"optimizer": actor.optimizer, "lr_scheduler": actor.lr_scheduler, "average": actor.average}
    tensors = {name: part.state_dict() for name, part in (parts | _gap_parts(run)).items() if part is not None}
    store.save(
        step,
        {"step": step, "sampler": run.sampler.state_dict(batches=step), "fingerprint": run.fingerprint},
        {**tensors, "random": list(states), "older_adapters": dict(older or {})},
        lambda folder: save_lora(run.model, actor.transformer, folder),
    )


def _gap_parts(run: Run) -> dict[str, Any]:
    """What a run learns of its off-policy gap, by the name in a checkpoint."""
    parts = {"clip_bands": run.clip_bands, "rejection_bands": run.rejection_bands, "guard": run.guard}
    return {name: part for name, part in parts.items() if part is not None}


def checkpoint_to_resume(
    trainer: TrainerConfig, store: CheckpointStore, say: Callable[[str], None] = lambda _text: None
) -> Path | None:
    """The checkpoint that ``resume_mode`` names; ``None``: start afresh. ``say`` is told when ``latest`` names one that
    is not there.

    Raises:
        CheckpointError: ``latest`` or ``resume_from_path`` names no checkpoint.
    """
    if trainer.resume_mode == "resume_path":
        return _checkpoint_at(str(trainer.resume_from_path))
    return store.latest(say) if trainer.resume_mode == "auto" else None


def _checkpoint_at(text: str) -> Path:
    """The folder at ``resume_from_path``."""
    field = "trainer.resume_from_path"
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
    """Bring ``run`` to where the checkpoint was written, its ``older_adapters`` among it; returns the step.

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
    actor.load_optimizer(tensors["optimizer"]["state"], tensors["lr_scheduler"]["last_epoch"])
    actor.load_average(tensors.get("average"))
    for name, part in _gap_parts(run).items():
        if name in tensors:
            part.load_state_dict(tensors[name])
    restore_random_states(
        states_to_restore(tensors["random"], run.accelerator.process_index, run.accelerator.num_processes)
    )
    run.sampler.load_state_dict(state["sampler"])
    run.older_adapters = tensors.get("older_adapters", {})
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
        states = file.entry(tensors, "random", list)
        if not states:
            raise file.damaged("random is empty")
        for process in range(len(states)):
            _check_random(file.entry(dict(enumerate(states)), process, dict, "random"), f"random.{process}", file)
        _check_older_adapters(run, tensors.get("older_adapters", {}), state["step"], file)
        if run.actor.average is not None and "average" in tensors:
            _check_average(run, file.entry(tensors, "average", dict), file)
        for name, part in _gap_parts(run).items():
            # Runs without ``auto`` have calibrated nothing; the guard's state is in every checkpoint.
            if name in tensors or name == "guard":
                _check_gap_part(part, name, file.entry(tensors, name, dict), file)
    return state, tensors


def _where_to_go_on(run: Run, store: CheckpointStore, damaged: Path, error: Exception) -> str:
    """The end of the message about a checkpoint that cannot be continued from: where to go on instead."""
    whole = CheckpointStore(damaged.parent, None).complete()
    step = step_of(damaged)
    older = [folder for folder in whole if folder != damaged and (step is None or (step_of(folder) or 0) < step)]
    for folder in reversed(older):
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
    sampler = copy.copy(run.sampler)
    file.check(state, {"sampler": sampler.state_dict()})
    saved = state["sampler"]
    try:
        sampler.load_state_dict(saved)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    given = saved["epoch"] * sampler.batches_per_epoch + saved["position"]
    if given != state["step"]:
        raise file.damaged(f"its step is {state['step']}, but its sampler has given {given} batches")


def _check_optimizer(run: Run, tensors: dict[str, Any], file: CheckpointFile) -> None:
    """Moments of the right shapes for every weight, as many steps as the schedule has taken, all finite."""
    file.check(tensors, {"optimizer": {"param_groups": [], "state": {}}, "lr_scheduler": {"last_epoch": 0}})
    groups = tensors["optimizer"]["param_groups"]
    moments = tensors["optimizer"]["state"]
    taken = tensors["lr_scheduler"]["last_epoch"]
    weights = dict(enumerate(_trained(run)))
    if len(groups) != 1 or not isinstance(groups[0], dict) or groups[0].get("params") != list(weights):
        raise file.damaged(f"optimizer.param_groups is not one group of {len(weights)}")
    if taken < 0:
        raise file.damaged(f"lr_scheduler.last_epoch is {taken}")
    if set(moments) != set(weights if taken else ()):  # AdamW makes its moments at the first step
        raise file.damaged(f"optimizer.state holds {len(moments)} of {len(weights)} weights after {taken} steps")
    # What AdamW keeps of every weight.
    kept = {i: {"exp_avg": weights[i], "exp_avg_sq": weights[i], "step": torch.tensor(0)} for i in moments}
    file.check(moments, kept, "optimizer.state")
    for index, own in moments.items():
        if float(own["step"]) != taken or bool((own["exp_avg_sq"] < 0).any()):
            raise file.damaged(
                f"optimizer.state.{index} has taken {float(own['step']):g} steps and its schedule {taken}, or a second "
                "moment is negative"
            )


def _trained(run: Run) -> list[Any]:
    """The weights that the optimizer moves."""
    return [parameter.detach() for parameter in run.actor.optimizer.param_groups[0]["params"]]


def _check_average(run: Run, saved: dict[str, Any], file: CheckpointFile) -> None:
    """Settings and counters of the run's own types, and a shadow of every weight."""
    file.check(saved, run.actor.average.state_dict(), "average")
    weights = _trained(run)
    shadows = saved["shadow_params"]
    if len(shadows) != len(weights):
        raise file.damaged(f"average.shadow_params has {len(shadows)} of {len(weights)} weights")
    for index, (shadow, weight) in enumerate(zip(shadows, weights, strict=True)):
        file.check_tensor(shadow, weight, f"average.shadow_params.{index}")


def _check_older_adapters(run: Run, saved: Any, step: int, file: CheckpointFile) -> None:
    """For every step that has one, up to the one before this checkpoint's, all weights of an adapter."""
    where = "older_adapters"
    own = adapter_state(run.actor.transformer)
    if not isinstance(saved, dict) or list(saved) != list(range(step - len(saved), step)):
        raise file.damaged(f"{where} does not hold the adapters of the steps before {step}")
    for version in saved:
        adapter = file.entry(saved, version, dict, where)
        if set(adapter) != set(own):
            raise file.damaged(f"{where}.{version} has {len(adapter)} weights, not the {len(own)} of the adapter")
        for name, weight in own.items():
            file.check_tensor(adapter[name], weight, f"{where}.{version}.{name}")


def _check_gap_part(part: Any, name: str, state: dict[str, Any], file: CheckpointFile) -> None:
    """The state has every entry that the part's own has, of the same kind."""
    own = part.state_dict()
    missing = [key for key in own if key not in state]
    if missing:
        raise DamagedCheckpointError(
            f"{file.path.parent}: its state of {name} is of another version (KeyError: {missing[0]!r}), or "
            f"{file.path.name} is damaged"
        )
    for key, example in own.items():
        found = file.entry(state, key, type(example), name)
        if isinstance(example, dict):
            # Which counters and timesteps there are depends on the version and the run: what both have is compared.
            file.check(found, {entry: example[entry] for entry in example.keys() & found.keys()}, f"{name}.{key}")
    for timestep, numbers in state["values"].items() if "values" in own else ():
        listed = isinstance(timestep, float) and isinstance(numbers, list | tuple)
        if not listed or not all(isinstance(number, float) and isfinite(number) for number in numbers):
            raise file.damaged(f"{name}.values.{timestep} is not a list of finite numbers")
    if "of" in own and [type(value) for value in state["of"]] != [str, int]:
        raise file.damaged(f"{name}.of is {state['of']!r}")
    if not all(isinstance(cause, str) for cause in state.get("causes", ())):
        raise file.damaged(f"{name}.causes is {state['causes']!r}")


def random_states() -> dict[str, Any]:
    """States of the global random generators, for reward functions that draw from them; of types that
    ``torch.load(weights_only=True)`` takes."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def states_to_restore(saved: Sequence[dict[str, Any]], process: int, processes: int) -> dict[str, Any]:
    """Of the states of all processes those of this one; process 0's on every process where there were more or fewer."""
    return saved[process if len(saved) == processes else 0]


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo ``random_states``."""
    random.setstate(states["python"])
    _set_numpy(np.random, states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _check_random(saved: dict[str, Any], where: str, file: CheckpointFile) -> None:
    """Generators made here take the states; the global ones stay as they are."""
    attempts: dict[str, Callable[[Any], object]] = {
        "python": random.Random().setstate,
        "numpy": partial(_set_numpy, np.random.RandomState()),
        "torch": torch.Generator().set_state,
    }
    for name, set_state in attempts.items():
        if name not in saved:
            raise file.damaged(f"{where}.{name} is missing")
        try:
            set_state(saved[name])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise file.damaged(f"{where}.{name} is no state of a generator ({why})") from error
    if "cuda" in saved and not (isinstance(saved["cuda"], Tensor) and saved["cuda"].dtype == torch.uint8):
        raise file.damaged(f"{where}.cuda is no state of a generator")


def _set_numpy(generator: Any, state: Any) -> None:
    kind, keys, position, has_gauss, cached = state
    generator.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
