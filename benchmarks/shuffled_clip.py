"""A control reward: the tiny CLIP's cosines dealt to the wrong images. Their mean is the true one; what they teach is
nothing."""

import numpy as np

from flowgrpo_rc.rewards import ScorerConfig
from flowgrpo_rc.rewards.clip.text_image import CLIPCosine

_clip = CLIPCosine(ScorerConfig(model_path="asset:tiny_clip", device="cpu"))
_rng = np.random.default_rng(0)


def compute_score(images, prompts, metadata):
    """The cosines of these images with their prompts, in random order."""
    return _rng.permutation(_clip(images, prompts, metadata))
