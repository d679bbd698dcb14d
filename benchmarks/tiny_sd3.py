"""A tiny Stable Diffusion 3 that draws two-digit numbers, for the probe on another model than the demo's.

    python benchmarks/tiny_sd3.py                 # trains it, some minutes on a core; not again where it lies already

The real classes in small sizes: two random CLIPs, no T5, an image VAE, and a transformer of joint attention blocks. It
learns from the pictures that the demo's Qwen-Image was made of (``examples/tiny_qwen_image``), and like that one it
stops early, so that reinforcement learning has something to improve. It is no part of the package: it is written to
``outputs/tiny_sd3``.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from flowgrpo_rc.rewards import OCRReward
from flowgrpo_rc.rewards.config import OCRConfig

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "examples" / folder) for folder in ("tiny_qwen_image", "tiny_kontext")]
from image_vae import make_vae, normalised_latents, train_vae  # noqa: E402
from number_images import IMAGE_SIZE, NUMBERS, make_dataset, prompt_for  # noqa: E402
from text_encoders import clip_config, clip_tokenizer, enlarge_embeddings  # noqa: E402
from training import Average, Descent, on_the_line  # noqa: E402

FOLDER = HERE.parent / "outputs" / "tiny_sd3"
SCORES = "scores.json"
SEED = 0
PICTURES = 8000
LATENT_CHANNELS = 8
CLIP_WIDTH = 32
CLIP_TOKENS = 16
NO_T5_TOKENS = 1
"""``max_sequence_length``: as many zeros stand for the T5's embeddings."""
OPTIONS = {"guidance_scale": 1.0, "max_sequence_length": NO_T5_TOKENS}
"""Arguments of its pipeline, besides prompts, sizes and noise."""
WIDTH = 128


def clip(tokens: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Two random layers. They stay random: the transformer learns to read digits and places from them."""
    model = CLIPTextModelWithProjection(clip_config(tokens, CLIP_WIDTH))
    # The pipeline takes the embeddings before the last layer, where nothing has normalised them.
    enlarge_embeddings(model)
    return model


def build() -> StableDiffusion3Pipeline:
    """The untrained pipeline. 32 pixels become 8 x 8 latents of 8 channels, and those 16 tokens."""
    torch.manual_seed(SEED)
    tokenizers = [clip_tokenizer(CLIP_TOKENS), clip_tokenizer(CLIP_TOKENS)]
    pipe = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=4,
            attention_head_dim=WIDTH // 4,
            num_attention_heads=4,
            joint_attention_dim=2 * CLIP_WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=2 * CLIP_WIDTH,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=make_vae(LATENT_CHANNELS, (8, 16, 32), groups=8),
        text_encoder=clip(tokenizers[0]),
        tokenizer=tokenizers[0],
        text_encoder_2=clip(tokenizers[1]),
        tokenizer_2=tokenizers[1],
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def train_flow(
    pipe: StableDiffusion3Pipeline,
    latents: Tensor,
    labels: Tensor,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    ema_decay: float = 0.99,
    empty_share: float = 0.0,
) -> None:
    """Learn the rectified flow, with this share of the prompts left empty. The averaged weights are kept."""
    transformer = pipe.transformer
    with torch.no_grad():
        embeds, _, pooled, _ = pipe.encode_prompt(
            [*(prompt_for(number) for number in NUMBERS), ""],
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=NO_T5_TOKENS,
        )
    generator = torch.Generator().manual_seed(SEED)
    descent = Descent("flow", torch.optim.AdamW(transformer.parameters(), lr=learning_rate), learning_rate, steps)
    average = Average(transformer, ema_decay)
    transformer.train()
    for _ in range(steps):
        index = torch.randint(len(latents), (batch_size,), generator=generator)
        noisy, sigma, target = on_the_line(latents[index], generator)
        prompts = labels[index]
        if empty_share:
            # The last row is the empty prompt's.
            prompts = torch.where(torch.rand(batch_size, generator=generator) < empty_share, len(NUMBERS), prompts)
        velocity = transformer(
            hidden_states=noisy,
            timestep=1000 * sigma,
            encoder_hidden_states=embeds[prompts],
            pooled_projections=pooled[prompts],
            return_dict=False,
        )[0]
        descent.step(F.mse_loss(velocity, target))
        average.update()
    average.put_in()


@torch.no_grad()
def score(pipe: Any, steps: int, seeds: int, guidance: float = 1.0) -> dict[str, float]:
    """Mean OCR reward and share of exactly right pictures, over all hundred numbers."""
    reward = OCRReward(OCRConfig(num_threads=1))
    prompts = [prompt_for(number) for number in NUMBERS]
    found = []
    for seed in range(seeds):
        images = pipe(
            prompt=prompts,
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=NO_T5_TOKENS,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images
        found.append(reward((images * 255).round().astype(np.uint8), prompts)[0])
    values = np.concatenate(found)
    return {"reward": float(values.mean()), "exact": float((values == 1).mean()), "images": len(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pipeline (%(default)s)")
    parser.add_argument("--vae-steps", type=int, default=1000)
    parser.add_argument("--flow-steps", type=int, default=1200)
    parser.add_argument("--empty-share", type=float, default=0.0, help="share of empty prompts, for guidance")
    arguments = parser.parse_args()
    if (arguments.out / SCORES).is_file():
        print(f"{arguments.out}: {(arguments.out / SCORES).read_text()}")
        return 0
    torch.set_num_threads(1)
    start = time.process_time()
    pipe = build()
    images, labels = make_dataset(PICTURES, SEED)
    train_vae(pipe.vae, images, steps=arguments.vae_steps, batch_size=32, learning_rate=4e-3, seed=SEED)
    latents = normalised_latents(pipe.vae, images)
    train_flow(
        pipe,
        latents,
        labels,
        steps=arguments.flow_steps,
        batch_size=64,
        learning_rate=1e-3,
        empty_share=arguments.empty_share,
    )
    scores: dict[str, Any] = {"6 steps": score(pipe, 6, 3)}
    if arguments.empty_share:
        scores |= {f"guidance {scale}": score(pipe, 6, 3, scale) for scale in (1.5, 2.0, 3.0, 4.5)}
    scores |= {"vae_steps": arguments.vae_steps, "flow_steps": arguments.flow_steps}
    scores["cpu_minutes"] = round((time.process_time() - start) / 60, 1)
    pipe.save_pretrained(arguments.out)
    # Written last: a folder without it is not a finished model.
    (arguments.out / SCORES).write_text(json.dumps(scores, indent=1) + "\n")
    print(f"{arguments.out}: {scores}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
