"""The sections ``reward.pickscore``, ``reward.hpsv2`` and so on: where a scorer's network lies and where it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowgrpo_rc.checks import choice, fit_fields, path, positive
from flowgrpo_rc.dtypes import DTYPES
from flowgrpo_rc.field_docs import documented_fields

DEVICE = r"auto|cpu|cuda(:\d+)?"


@documented_fields
@dataclass(kw_only=True, slots=True)
class ScorerConfig:
    """The network of one of the rewards ``pickscore``, ``clipscore``, ``clip_cosine``, ``clip_similarity``,
    ``dino_similarity`` and ``siglip_similarity``, each of which has a section of its own."""

    model_path: str | None = None
    """Folder or hub name of the network in transformers' format. Null stands for the weights that the reward is known
    by, which are downloaded from the hub. ``asset:tiny_clip`` is the tiny CLIP of this package."""

    processor_path: str | None = None
    """Folder or hub name of the image processor and the tokenizer. Null stands for ``model_path``, or where that is
    null too for those that the reward is known by."""

    device: str = "auto"
    """Where the network is: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for this process's GPU where there is one."""

    dtype: str = "float32"
    """Precision of the network. In bfloat16 cosines are rounded to steps that can be as large as the differences
    between the images of a prompt."""

    micro_batch_size: int = 32
    """Number of images, and of prompts, that go through the network together."""

    def check(self, section: str) -> None:
        """Raise ``ValueError`` unless every field is one that can be used; ``section`` is the section's dotted name."""
        fit_fields(section, self)
        path(f"{section}.model_path", self.model_path, optional=True)
        path(f"{section}.processor_path", self.processor_path, optional=True)
        if not re.fullmatch(DEVICE, self.device):
            raise ValueError(f"{section}.device: got {self.device!r}; give auto, cpu, cuda or cuda:N")
        choice(f"{section}.dtype", self.dtype, tuple(DTYPES))
        positive(f"{section}.micro_batch_size", self.micro_batch_size)


@documented_fields
@dataclass(kw_only=True, slots=True)
class HPSv2Config(ScorerConfig):
    """The network of the reward ``hpsv2``. Its ``model_path`` may also be a checkpoint in OpenCLIP's format, or a
    folder or hub repository that holds one."""

    version: str = "2.1"
    """Which of the published checkpoints is taken from a folder or the hub: ``2.0`` or ``2.1``."""

    def check(self, section: str) -> None:
        """Raise ``ValueError`` unless every field is one that can be used; ``section`` is the section's dotted name."""
        ScorerConfig.check(self, section)
        choice(f"{section}.version", self.version, ("2.0", "2.1"))


@documented_fields
@dataclass(kw_only=True, slots=True)
class AestheticConfig(ScorerConfig):
    """The networks of the reward ``aesthetic``: a CLIP, and linear layers on its embedding of an image."""

    head_path: str | None = None
    """File of the linear layers, as torch saved them: ``sac+logos+ava1-l14-linearMSE.pth`` of the repository
    ``christophschuhmann/improved-aesthetic-predictor``, which fits ``openai/clip-vit-large-patch14``."""

    def check(self, section: str) -> None:
        """Raise ``ValueError`` unless every field is one that can be used; ``section`` is the section's dotted name."""
        ScorerConfig.check(self, section)
        path(f"{section}.head_path", self.head_path, optional=True)
