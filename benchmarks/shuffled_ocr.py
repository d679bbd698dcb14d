"""A control reward: OCR scores dealt to the wrong images. Their mean is the true one; what they teach is nothing."""

import numpy as np

from flowgrpo_rc.rewards import OCRReward

_ocr = OCRReward()
_rng = np.random.default_rng(0)


def compute_score(images, prompts, metadata):
    """The OCR rewards of these images, in random order."""
    scores, _ = _ocr(images, prompts, metadata)
    return _rng.permutation(scores)
