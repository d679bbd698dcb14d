"""Random numbers by address: every image and every window has a stream of its own.

A stream depends on (seed, purpose, step, index) alone, so rollouts do not change with the batch they are sampled
in, with the number of processes, or with a resumed run. The number that a stream is seeded with can travel to an
engine in another process. torch's generator on the CPU takes 32 bits of it, so that among 100,000 images a pair or two
share their noise.
"""

import numpy as np
import torch

# The purpose of a stream is part of its address, so that no two purposes share numbers.
IMAGE = 0
WINDOW = 1
VALIDATION = 2
PROBE = 3
NOISING = 4
START = 5
REPLAY = 6
SCOUT = 7
WRITER = 8


def seed_for(seed: int, purpose: int, step: int, index: int) -> int:
    """The number, below 2**63, that seeds one image's noise (or one prompt group's window)."""
    state = np.random.SeedSequence((seed, purpose, step, index)).generate_state(1, np.uint64)[0]
    # Torch's generators take seeds below 2**63.
    return int(state >> np.uint64(1))


def generator_for(seed: int, purpose: int, step: int, index: int) -> torch.Generator:
    """A CPU generator seeded with ``seed_for``."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, step, index))
