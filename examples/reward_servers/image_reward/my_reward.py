"""ImageReward for ``flowgrpo-rc serve-reward``; see ../README.md."""

import ImageReward
import torch
from PIL import Image

model = ImageReward.load("ImageReward-v1.0")


@torch.no_grad()
def image_reward(images, prompts, metadata):
    """How well people would like each image for its prompt; mean 0 and deviation 1 over its authors' data."""
    pictures = [Image.fromarray(image) for image in images]
    return [model.score(prompt, picture) for prompt, picture in zip(prompts, pictures, strict=True)]
