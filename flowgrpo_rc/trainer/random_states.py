"""States of the global random generators (Python, NumPy, torch), for reward functions that draw from them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.trainer.checkpoint import CheckpointFile


def random_states() -> dict[str, Any]:
    """The states as a checkpoint holds them: types that ``torch.load(weights_only=True)`` takes."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
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
    _set_python(random, states["python"])
    _set_numpy(np.random, states["numpy"])
    _set_torch(torch.default_generator, states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check_random_states(saved: dict[str, Any], file: CheckpointFile) -> None:
    """Make sure that the generators would take the states: those made here take them, the global ones stay as they are.

    Raises:
        DamagedCheckpointError: a state is missing or none; names the file and the state.
    """
    attempts: dict[str, tuple[Callable[[Any, Any], None], Any]] = {
        "python": (_set_python, random.Random()),
        "numpy": (_set_numpy, np.random.RandomState()),
        "torch": (_set_torch, torch.Generator()),
    }
    for name, (set_state, generator) in attempts.items():
        if name not in saved:
            raise file.damaged(f"random.{name} is missing")
        try:
            set_state(generator, saved[name])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise file.damaged(f"random.{name} is no state of a generator ({why})") from error
    if "cuda" in saved and not (isinstance(saved["cuda"], Tensor) and saved["cuda"].dtype == torch.uint8):
        raise file.damaged("random.cuda is no state of a generator")


def _set_python(generator: Any, state: Any) -> None:
    version, internal, gauss = state
    generator.setstate((version, tuple(internal), gauss))


def _set_numpy(generator: Any, state: Any) -> None:
    kind, keys, position, has_gauss, cached = state
    generator.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def _set_torch(generator: torch.Generator, state: Any) -> None:
    generator.set_state(state)
