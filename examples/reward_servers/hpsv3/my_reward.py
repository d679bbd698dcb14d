"""HPSv3 for ``flowgrpo-rc serve-reward``; see ../README.md."""

import torch
from hpsv3 import HPSv3RewardInferencer
from PIL import Image

BATCH = 8

inferencer = HPSv3RewardInferencer(device="cuda")


@torch.no_grad()
def hpsv3(images, prompts, metadata):
    """The mean of the preference that HPSv3 predicts for each image; its deviation is reported beside it."""
    pictures = [Image.fromarray(image) for image in images]
    outputs = []
    for start in range(0, len(pictures), BATCH):
        part = slice(start, start + BATCH)
        # By name: the two have changed places between versions.
        outputs.append(inferencer.reward(image_paths=pictures[part], prompts=prompts[part]).float())
    mean, spread = torch.cat(outputs).unbind(-1)
    return mean, {"spread": spread}
