"""Random numbers by address: every image and every window has a stream of its own.

A stream depends on (seed, purpose, step, index) alone, so rollouts do not change with the batch they are sampled
in, with the number of processes, or with a resumed run.
"""

import numpy as np
import torch

IMAGE, WINDOW, VALIDATION = 0, 1, 2
"""Purposes of a stream."""


def generator_for(seed: int, purpose: int, step: int, index: int) -> torch.Generator:
    """A CPU generator for one image's noise (or one prompt group's window)."""
    state = np.random.SeedSequence((seed, purpose, step, index)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
