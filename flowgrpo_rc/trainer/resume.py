"""What a checkpoint of a run holds, and how a run takes it up again."""

from pathlib import Path
from typing import Any

from flowgrpo_rc.models.lora import save_lora
from flowgrpo_rc.trainer.checkpoint import CheckpointError, CheckpointStore, random_states, restore_random_states
from flowgrpo_rc.trainer.config import TrainerConfig
from flowgrpo_rc.trainer.setup import Run


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


def checkpoint_to_resume(trainer: TrainerConfig, store: CheckpointStore) -> Path | None:
    """The checkpoint that ``resume_mode`` names; ``None``: start afresh."""
    if trainer.resume_mode == "resume_path":
        return Path(str(trainer.resume_from_path))
    return store.latest() if trainer.resume_mode == "auto" else None


def load_run(run: Run, store: CheckpointStore, source: Path) -> int:
    """Bring ``run`` to where the checkpoint was written; returns its step.

    Raises:
        CheckpointError: not a checkpoint, unreadable, of another model, or of another version of this package.
    """
    state, tensors = store.load(source, run.fingerprint)
    run.actor.load_adapter(source)
    run.actor.load_optimizer(tensors["optimizer"], tensors["lr_scheduler"])
    run.actor.load_average(tensors.get("average"))
    for name, part in _calibrated(run).items():
        if name in tensors:
            _take_up(part, name, tensors[name], source)
    restore_random_states(tensors["random"])
    run.sampler.load_state_dict(state["sampler"])
    return int(state["step"])


def _take_up(part: Any, name: str, state: Any, source: Path) -> None:
    try:
        part.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: its state of {name} is of another version ({type(error).__name__}: {error}). Start afresh with "
            "trainer.resume_mode=disable"
        ) from error
