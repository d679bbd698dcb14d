"""Ready questions to a judge, by the parser of their answers. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """The two requests for an answer that one parser can read."""

    question: str
    """The default question; ``{prompt}`` is replaced with the image's prompt."""
    again: str
    """The second request, after an answer that cannot be read."""


FORMS: Mapping[str, Form] = {
    "score": Form(
        question=(
            "This image was generated from the caption below. Judge how well it shows what the caption says, and how "
            "good it looks. First give your reasons in one or two sentences, then a score from 0 (nothing is right) to "
            "5 (perfect), in exactly this form: <Score>X</Score>\n\nCaption: {prompt}"
        ),
        again="I could not read the score. Give the number alone, in exactly this form: <Score>X</Score>",
    ),
    # The two of UnifiedReward are the words that its models were trained on.
    "unified_reward_1_5": Form(
        question=(
            "You are given a text caption and a generated image based on that caption. Your task is to evaluate this "
            "image based on two key criteria:\n"
            "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider the "
            "accuracy of depicted objects, their relationships, and attributes as described in the caption.\n"
            "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail "
            "preservation, color accuracy, and overall aesthetic appeal.\n"
            "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
            "Your task is provided as follows:\nText Caption: [{prompt}]"
        ),
        again="I could not read the score. Give it from 1 to 5, in exactly this form: Final Score: X",
    ),
    "unified_reward_2": Form(
        question=(
            "You are presented with a generated image and its associated text caption. Your task is to analyze the "
            "image across multiple dimensions in relation to the caption. Specifically:\n"
            "Provide overall assessments for the image along the following axes (each rated from 1 to 5):\n"
            "- Alignment Score: How well the image matches the caption in terms of content.\n"
            "- Coherence Score: How logically consistent the image is (absence of visual glitches, object distortions, "
            "etc.).\n"
            "- Style Score: How aesthetically appealing the image looks, regardless of caption accuracy.\n\n"
            "Output your evaluation using the format below:\n\n"
            "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n\n"
            "Your task is provided as follows:\nText Caption: [{prompt}]"
        ),
        again=(
            "I could not read the scores. Give the three of them from 1 to 5, in exactly this form:\n"
            "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z"
        ),
    ),
    "yes_no": Form(
        question="Does this image show what the following caption says? Answer with Yes or No.\n\nCaption: {prompt}",
        again="Answer with one word, Yes or No.",
    ),
    "ocr": Form(
        question="Write down the text that stands in this image, and nothing else. Describe and explain nothing.",
        again="Write down the text that stands in the image, and nothing else.",
    ),
}
"""The parsers of ``parsers.py`` by name, with their questions."""
