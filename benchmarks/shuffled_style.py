"""A control reward: how near an edit is to the reference of another image of the batch, which teaches no colours."""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "tiny_kontext"))
from style_reward import same_style

_rng = np.random.default_rng(0)


def shuffled_style(images, prompts, metadata):
    """``same_style`` with the references of the batch in random order."""
    return same_style(images, prompts, [metadata[i] for i in _rng.permutation(len(metadata))])
