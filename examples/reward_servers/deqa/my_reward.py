"""DeQA for ``flowgrpo-rc serve-reward``; see ../README.md."""

import torch
from PIL import Image
from transformers import AutoModelForCausalLM

BATCH = 8

model = AutoModelForCausalLM.from_pretrained(
    "zhiyuanyou/DeQA-Score-Mix3",
    trust_remote_code=True,
    attn_implementation="eager",
    torch_dtype=torch.float16,
    device_map="auto",
)


@torch.no_grad()
def deqa(images, prompts, metadata):
    """The expected quality of each image, from 0.2 to 1; the prompt does not count."""
    pictures = [Image.fromarray(image) for image in images]
    batches = [pictures[start : start + BATCH] for start in range(0, len(pictures), BATCH)]
    return torch.cat([model.score(batch) for batch in batches]) / 5
