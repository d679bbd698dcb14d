"""Base of the rewards of this package: a network from a folder or the hub, tried before training, and its encoder.

Every error of a network, image processor or tokenizer names the field of the configuration and what to do.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.paths import ASSET_PREFIX, resolve_asset
from flowgrpo_rc.quiet import quiet_loading
from flowgrpo_rc.rewards.config import ScorerConfig

Pixels = Callable[[Sequence[np.ndarray]], Tensor]
"""Images, each (H, W, 3) uint8 RGB, as a network takes them: (N, 3, height, width) float32."""
HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"
FOLDER = "Give a folder with {}, as save_pretrained writes it"
"""Remedy of messages; the braces are the files that the folder must hold."""
CLIP_L = "openai/clip-vit-large-patch14"
"""The CLIP of flow_grpo's ``clipscore``, of the aesthetic score and of its image similarity."""


class Scorer:
    """A reward of a frozen network, made with its section of the configuration, by default the default one.

    Raises:
        ValueError: a field is wrong, or the network or its processor cannot be loaded or do not fit each other; names
            the field.
    """

    name: ClassVar[str]
    """Of the reward and of its section."""
    published: ClassVar[str]
    """Hub name of the reward's published weights."""
    published_processor: ClassVar[str | None] = None
    """That of their image processor and tokenizer; None for the same."""
    model_types: ClassVar[tuple[str, ...]] = ("clip",)
    """Accepted values of ``model_type`` in a network's ``config.json``."""
    config_class: ClassVar[type[ScorerConfig]] = ScorerConfig

    def __init__(self, config: ScorerConfig | None = None) -> None:
        self.section = f"reward.{self.name}"
        self.config = self.config_class() if config is None else config
        self.config.check(self.section)
        # Before the network is loaded, which takes minutes.
        device = find_device(self.section, self.config.device)
        self.network = self._load_network().to(device)
        self._pixels = self._load_pixels()
        self._prepare()
        # Sizes of images and vocabularies fit or not only in a forward.
        try:
            self._try()
        except Exception as error:
            raise ValueError(
                f"{self.section}.processor_path: what {self._processor_path} makes of images and prompts does not fit "
                f"the network of {self._model_path} ({type(error).__name__}: {one_line(error, 300)}); give the "
                "network's own processor"
            ) from error

    @property
    def _model_path(self) -> str:
        return self.config.model_path or self.published

    @property
    def _processor_path(self) -> str:
        config = self.config
        return config.processor_path or config.model_path or self.published_processor or self.published

    def _load_network(self) -> Any:
        """The network in transformers' format: frozen, in evaluation mode, in the section's dtype, on the CPU."""
        from transformers import AutoConfig, AutoModel

        path = self._model_path
        with explained(f"{self.section}.model_path", path, FOLDER.format("config.json and the weights")):
            # ``AutoModel`` would load any network, and fail much later.
            kind = AutoConfig.from_pretrained(located(path)).model_type
            if kind not in self.model_types:
                takes = ", ".join(self.model_types)
                raise ValueError(f"it holds a network of the kind {kind!r}, but this reward takes {takes}")
            dtype = torch_dtype(self.config.dtype)
            network, found = AutoModel.from_pretrained(located(path), dtype=dtype, output_loading_info=True)
            # transformers would leave these at random.
            if missing := sorted(found["missing_keys"]):
                raise ValueError(f"{len(missing)} tensors are missing ({', '.join(missing[:3])})")
        return network.requires_grad_(False).eval()

    def _load_pixels(self) -> Pixels:
        """The preprocessing of the image processor, always by Pillow. transformers would resize with torchvision where
        that is installed, which changes scores in the third digit."""
        # ``transformers.AutoImageProcessor`` itself is a placeholder that refuses, unless torchvision is installed.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        path = self._processor_path
        with explained(f"{self.section}.processor_path", path, FOLDER.format("preprocessor_config.json")):
            # One choice under its two names: ``use_fast`` up to transformers 5.3, ``backend`` from 5.4 on.
            processor = AutoImageProcessor.from_pretrained(located(path), use_fast=False, backend="pil")
        return lambda images: processor(images=[Image.fromarray(i) for i in images], return_tensors="pt")[
            "pixel_values"
        ]

    def _prepare(self) -> None:
        """Load what the reward needs besides the network."""

    def _try(self) -> None:
        """Run a forward, so that parts that do not fit together fail before training."""
        self._encode_images([np.zeros((8, 8, 3), np.uint8)])

    def weights(self) -> list[Tensor]:
        """The tensors that decide the scores; checkpoints record their digest."""
        return list(self.network.state_dict().values())

    @torch.inference_mode()
    def _encode_images(self, images: Sequence[np.ndarray]) -> Tensor:
        """(N, D) float32 embeddings of length 1 of N images, each (H, W, 3) uint8 RGB. A network without
        ``get_image_features``, such as DINOv2, gives its pooled output."""
        encode = getattr(self.network, "get_image_features", self.network)
        embeddings = []
        # In micro-batches: the pixels of a whole batch may not fit beside the actor.
        for batch in self._batches(images):
            pixels = self._pixels(batch).to(self.network.device, self.network.dtype)
            embeddings.append(unit(encode(pixel_values=pixels)))
        return torch.cat(embeddings)

    def _batches(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        size = self.config.micro_batch_size
        return [items[start : start + size] for start in range(0, len(items), size)]


def unit(features: Any) -> Tensor:
    """Features divided by their norm, in float32. transformers 4 gives a tensor, 5 an object that holds it."""
    pooled = features if isinstance(features, Tensor) else features.pooler_output
    # The norm of a bfloat16 vector would have two digits.
    pooled = pooled.float()
    return pooled / pooled.norm(dim=-1, keepdim=True)


def find_device(section: str, name: str) -> torch.device:
    """The device of the configuration's ``device``; ``ValueError`` where there is no such GPU. Each process of a launch
    has the GPU of its local rank, modulo the number of GPUs, as accelerate assigns them."""
    # No call that would open a CUDA context on another process's GPU.
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        # Rewards are made before the processes of a launch have chosen their GPUs.
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, count)}"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"{section}.device: got {name}, but torch sees {count} GPUs here; give cpu or auto")
    return device


def located(path: str) -> str:
    """The folder or file that ``path`` names, with ``asset:`` and ``~`` resolved; a hub name stays as it is."""
    return resolve_asset(os.path.expanduser(path))


@contextmanager
def explained(field: str, path: str, remedy: str, *, on_hub: bool = True) -> Iterator[None]:
    """Raise every error inside as a ``ValueError`` of one line with the field and the remedy; transformers is silent.
    The remedy is the last sentence; ``path`` may be a name on the hub where ``on_hub`` is true."""
    try:
        with quiet_loading("transformers"):
            yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        advice = remedy
        # The hub's own message is about the network; a wrong folder name is the likelier reason.
        if on_hub and not path.startswith(ASSET_PREFIX) and not os.path.exists(located(path)):
            advice = "There is no such folder, and it is not the name of a repository on the hub (owner/name)"
            if re.fullmatch(HUB_NAME, path):
                advice = (
                    "It is no folder here and could not be had from the hub. On a machine with a network: hf download "
                    f"{path} --local-dir FOLDER; then {field}=FOLDER"
                )
        raise ValueError(f"{field}: {path} cannot be used: {kind}{one_line(error, 300)}. {advice}") from error
