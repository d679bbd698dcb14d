"""Batches of recorded preferences, in place of images that an engine draws."""

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.rewards.preference import preference_reward
from flowgrpo_rc.trainer.rollout_queue import BatchRequest, RolloutQueue
from flowgrpo_rc.trainer.setup import Run


def pixels_of(image: ReferenceImage, height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """The middle of a picture, scaled to this size."""
    return np.asarray(ImageOps.fit(image.open(), (width, height), Image.Resampling.LANCZOS))


class PreferenceQueue(RolloutQueue):
    """The pairs of ``data.preferences``, prompt by prompt: the chosen image, then the rejected one."""

    def __init__(self, run: Run, mode: ModeInForce) -> None:
        super().__init__(run, mode)
        self._reward = preference_reward()

    def _submit(self, batch: BatchRequest) -> None:
        """Nothing is drawn."""

    def draw(self) -> tuple[TensorDict, UInt8[Tensor, "B H W 3"]]:
        """Read and encode the images of the batch that ``next`` returned last, and remove it."""
        batch, _, _ = self._queue.popleft()
        asked = batch.request.conditioning
        pairs = [pixels_of(image, asked.height, asked.width) for record in batch.prompts for image in record.pair]
        images = torch.from_numpy(np.stack(pairs))
        recorded = {
            Key.CLEAN_LATENTS: self._run.model.encode_images(images),
            Key.PROMPT_INDEX: batch.request.prompt_index.clone(),
        }
        return TensorDict(recorded, batch_size=[len(images)]), images
