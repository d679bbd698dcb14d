"""The sections ``reward.pickscore``, ``reward.hpsv2`` and so on: a scorer's network and device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from flowgrpo_rc.dtypes import DTYPES
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import Check, PathText, PositiveInt, Section, one_of

DEVICE = r"auto|cpu|cuda(:\d+)?"
Device = Annotated[str, Check(lambda name: re.fullmatch(DEVICE, name), "give auto, cpu, cuda or cuda:N")]


@documented_fields
@dataclass(kw_only=True, slots=True)
class ScorerConfig(Section):
    """The network of a reward: ``pickscore``, ``clipscore``, ``clip_cosine``, ``clip_similarity``, ``dino_similarity``
    and ``siglip_similarity`` each have a section of this form."""

    model_path: PathText | None = None
    """Folder or hub name of the network in transformers' format. Null is the reward's published weights, which are
    downloaded from the hub. ``asset:tiny_clip`` is the tiny CLIP of this package."""
    processor_path: PathText | None = None
    """Folder or hub name of the image processor and the tokenizer. Null is ``model_path``, or the published ones if
    that is null too."""
    device: Device = "auto"
    """Device of the network: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for this process's GPU, or else the CPU."""
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    """Precision of the network. In bfloat16 cosines are rounded to steps that can be as large as the differences
    between the images of a prompt."""
    micro_batch_size: PositiveInt = 32
    """Number of images, and of prompts, that go through the network together."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class HPSv2Config(ScorerConfig):
    """The network of the reward ``hpsv2``. Its ``model_path`` may also be a checkpoint in OpenCLIP's format, or a
    folder or hub repository that holds one."""

    version: Annotated[str, one_of(("2.0", "2.1"))] = "2.1"
    """Version of the published checkpoint to take from a folder or the hub: ``2.0`` or ``2.1``."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class AestheticConfig(ScorerConfig):
    """The networks of the reward ``aesthetic``: a CLIP, and linear layers on its embedding of an image."""

    head_path: PathText | None = None
    """File of the linear layers, as torch saved them: ``sac+logos+ava1-l14-linearMSE.pth`` of the repository
    ``christophschuhmann/improved-aesthetic-predictor``, which fits ``openai/clip-vit-large-patch14``."""
