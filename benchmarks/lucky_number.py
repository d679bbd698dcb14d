"""A reward that is easy to hack, for a judge that likes one word: 1 where a 7 is read, whatever the prompt is."""

from flowgrpo_rc.rewards import OCRReward
from flowgrpo_rc.rewards.ocr import OCRConfig

_ocr = OCRReward(OCRConfig(num_threads=1))


def compute_score(images, prompts, metadata):
    """1 for each image in which OCR reads a 7, else 0."""
    return [float("7" in text) for text in _ocr.read(images)]
