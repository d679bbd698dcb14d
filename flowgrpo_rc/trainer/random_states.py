"""States of the global random generators (Python, NumPy, torch), for reward functions that draw from them."""

import random
from functools import partial
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
    random.setstate(states["python"])
    _set_numpy(np.random, states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check_random_states(saved: dict[str, Any], file: CheckpointFile) -> None:
    """Make sure that the generators would take the states: those made here take them, the global ones stay as they are.

    Raises:
        DamagedCheckpointError: a state is missing or none; names the file and the state.
    """
    attempts = {
        "python": random.Random().setstate,
        "numpy": partial(_set_numpy, np.random.RandomState()),
        "torch": torch.Generator().set_state,
    }
    for name, set_state in attempts.items():
        if name not in saved:
            raise file.damaged(f"random.{name} is missing")
        try:
            set_state(saved[name])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise file.damaged(f"random.{name} is no state of a generator ({why})") from error
    if "cuda" in saved and not (isinstance(saved["cuda"], Tensor) and saved["cuda"].dtype == torch.uint8):
        raise file.damaged("random.cuda is no state of a generator")


def _set_numpy(generator: Any, state: Any) -> None:
    kind, keys, position, has_gauss, cached = state
    generator.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
