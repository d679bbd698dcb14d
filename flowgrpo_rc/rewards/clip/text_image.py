"""Rewards for images that fit their prompt (``pickscore``, ``clipscore``, ``clip_cosine``, ``hpsv2``), or are beautiful
(``aesthetic``)."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.rewards.clip.hpsv2 import find_checkpoint, load_checkpoint, padded_pixels
from flowgrpo_rc.rewards.clip.scorer import CLIP_L, FOLDER, Pixels, Scorer, explained, located, unit
from flowgrpo_rc.rewards.config import AestheticConfig, HPSv2Config

HEAD = "sac+logos+ava1-l14-linearMSE.pth"
REPOSITORY = "https://github.com/christophschuhmann/improved-aesthetic-predictor"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""The CLIP that PickScore and HPSv2 were fine-tuned from; they read prompts with its tokenizer."""


class TextImageReward(Scorer):
    """``cos(image, prompt)``, or the network's own logit ``exp(logit_scale) * cos`` divided by ``divisor``."""

    divisor: ClassVar[float | None] = None
    """None: the score is the cosine."""

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
    ) -> np.ndarray:
        """Score images against their prompts; metadata is not used.

        Args:
            images: (N, H, W, 3) uint8, RGB.
            prompts: N prompts; what goes beyond the network's longest (77 tokens) is not read.

        Returns:
            (N,) float32.
        """
        cosines = (self._encode_images(list(images)) * self._encode_texts(prompts)).sum(-1)
        if self.divisor is not None:
            # The scale is trained, so that it comes from the weights and is no constant.
            cosines = cosines * self.network.logit_scale.float().exp() / self.divisor
        return cosines.cpu().numpy()

    def _prepare(self) -> None:
        from transformers import AutoTokenizer

        path = self._processor_path
        files = FOLDER.format("tokenizer.json, or vocab.json and merges.txt")
        with explained(f"{self.section}.processor_path", path, files):
            tokenizer = AutoTokenizer.from_pretrained(located(path))
            # transformers loads a tokenizer without its files, and every prompt is then the same.
            if len(tokenizer) <= len(tokenizer.all_special_tokens) + 1:
                raise ValueError("its vocabulary is missing")
            # A GPU would stop with a failed assertion at the first token that the network does not know.
            vocabulary = self.network.config.text_config.vocab_size
            if len(tokenizer) > vocabulary:
                raise ValueError(f"it has {len(tokenizer)} tokens, but the network knows {vocabulary}")
        self._tokenizer = tokenizer

    def _try(self) -> None:
        super()._try()
        self._encode_texts(["a photo"])

    @torch.inference_mode()
    def _encode_texts(self, prompts: Sequence[str]) -> Tensor:
        """(N, D) float32 embeddings of length 1 of N prompts, each distinct one encoded once."""
        # A group of images has one prompt.
        distinct = list(dict.fromkeys(prompts))
        longest = self.network.config.text_config.max_position_embeddings
        embeddings = []
        for batch in self._batches(distinct):
            # Padded to the longest, so that a prompt's embedding does not depend on those beside it.
            tokens = self._tokenizer(
                batch, padding="max_length", truncation=True, max_length=longest, return_tensors="pt"
            ).to(self.network.device)
            features = self.network.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
            embeddings.append(unit(features))
        places = {prompt: place for place, prompt in enumerate(distinct)}
        return torch.cat(embeddings)[[places[prompt] for prompt in prompts]]


class PickScore(TextImageReward):
    """People's preference: ``exp(logit_scale) * cos / 26``, as flow_grpo scales PickScore's logit."""

    name = "pickscore"
    published = "yuvalkirstain/PickScore_v1"
    published_processor = CLIP_H
    divisor = 26.0


class CLIPScore(TextImageReward):
    """flow_grpo's ``clipscore``: ``exp(logit_scale) * cos / 30``, with OpenAI's CLIP ``cos / 0.3``."""

    name = "clipscore"
    published = CLIP_L
    divisor = 30.0


class CLIPCosine(TextImageReward):
    """The plain cosine between an image and its prompt, in [-1, 1]."""

    name = "clip_cosine"
    published = CLIP_L


class HPSv2(TextImageReward):
    """Human Preference Score v2 and v2.1: the cosine of a fine-tuned OpenCLIP ViT-H/14.

    The image is not cropped: its longest side becomes the network's (224 pixels), and black bars fill the square.
    """

    name = "hpsv2"
    published = "xswu/HPSv2"
    published_processor = CLIP_H
    config_class = HPSv2Config
    config: HPSv2Config

    def _load_network(self) -> Any:
        self._checkpoint = find_checkpoint(self.section, self._model_path, self.config.version)
        if self._checkpoint is None:
            return super()._load_network()
        return load_checkpoint(self.section, self._checkpoint, self.config.dtype)

    def _load_pixels(self) -> Pixels:
        # The published processor of this CLIP crops.
        return partial(padded_pixels, side=self.network.config.vision_config.image_size)

    @property
    def _processor_path(self) -> str:
        # A checkpoint of OpenCLIP brings no tokenizer.
        own = self.config.model_path if self._checkpoint is None else None
        return self.config.processor_path or own or CLIP_H


class Aesthetic(Scorer):
    """The predictor of LAION's aesthetic ratings, about 1 to 10: linear layers on CLIP's normalised image embedding."""

    name = "aesthetic"
    published = CLIP_L
    config_class = AestheticConfig
    config: AestheticConfig

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str] = (), metadata: Sequence[dict[str, Any]] | None = None
    ) -> np.ndarray:
        """Score images, (N, H, W, 3) uint8 RGB; prompts and metadata are not used.

        Returns:
            (N,) float32.
        """
        embeddings = self._encode_images(list(images))
        return (embeddings.cpu().double() @ self._weight + self._bias).float().numpy()

    def _load_network(self) -> Any:
        field = f"{self.section}.head_path"
        path = self.config.head_path
        if path is None:
            raise ValueError(f"{field}: is null; download {HEAD} from {REPOSITORY} and give its path")
        with explained(field, path, f"Give the file {HEAD} of {REPOSITORY}", on_hub=False):
            state = torch.load(os.path.expanduser(path), map_location="cpu", weights_only=True)
            self._weight, self._bias = affine(state)
        # The small file first: a mistake in it shows at once.
        network = super()._load_network()
        width = network.config.projection_dim
        if len(self._weight) != width:
            raise ValueError(
                f"{field}: its layers take {len(self._weight)} values, but the embeddings of {self._model_path} have "
                f"{width}; give the CLIP that they were trained with in {self.section}.model_path"
            )
        return network

    def weights(self) -> list[Tensor]:
        """The tensors that decide the scores; checkpoints record their digest."""
        return [*super().weights(), self._weight, self._bias]


def affine(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weight (D,) and bias () in float64 of the linear layers ``layers.N.{weight,bias}`` as one map. Only dropout is
    between them. Raises ``ValueError`` for tensors of other names or shapes."""
    numbers = sorted({int(match[1]) for name in state if (match := re.fullmatch(r"layers\.(\d+)\.weight", name))})
    expected = {f"layers.{number}.{part}" for number in numbers for part in ("weight", "bias")}
    if not numbers or expected != state.keys():
        raise ValueError(
            f"its tensors are {', '.join(sorted(state))[:200]}; expected layers.N.weight and layers.N.bias"
        )
    first = state[f"layers.{numbers[0]}.weight"].shape[-1]
    weight = torch.eye(first, dtype=torch.float64)
    bias = torch.zeros(first, dtype=torch.float64)
    for number in numbers:
        layer = state[f"layers.{number}.weight"].double()
        weight = layer @ weight
        bias = layer @ bias + state[f"layers.{number}.bias"].double()
    if len(weight) != 1:
        raise ValueError(f"its last layer gives {len(weight)} values; a score is one")
    return weight[0], bias[0]
