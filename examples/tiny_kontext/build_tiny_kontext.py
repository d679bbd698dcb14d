"""Build a real `FluxKontextPipeline` in miniature that edits pictures of two-digit numbers, on purpose not too well.

    python examples/tiny_kontext/build_tiny_kontext.py

takes four to five minutes of one core; the defaults are those of the shipped model, `assets/tiny_kontext`, and of its
prompts and references, `assets/tiny_edit`. It learns from pairs of pictures, two numbers in one style, to turn one into
the other. Training of the transformer stops early on purpose, so that about 60 % of the OCR reward is reached and
reinforcement learning has room to improve it. The result depends on the seed alone on a given machine and thread count.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FluxKontextPipeline

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny_qwen_image"))
from components import TEXT_TOKENS, build_pipeline  # noqa: E402
from edit_images import make_pairs, write_edits  # noqa: E402
from flow import pair_tokens, train_flow  # noqa: E402
from image_vae import train_vae  # noqa: E402
from kontext_card import write_kontext_card  # noqa: E402
from kontext_evaluation import EditScore, evaluate_edits  # noqa: E402
from saving import refuse_other_folders, replacing, save_in_half  # noqa: E402
from training import round_to_half  # noqa: E402

from flowgrpo_rc.rewards import OCRReward  # noqa: E402
from flowgrpo_rc.rewards.config import OCRConfig  # noqa: E402

ASSETS = HERE.parents[1] / "assets"
EVALUATED_STEPS = (6, 10)


@dataclass(frozen=True)
class EditSettings:
    """Everything that decides what comes out."""

    seed: int
    threads: int
    pairs: int
    vae_steps: int
    vae_batch_size: int
    vae_learning_rate: float
    vae_ground_weight: float
    flow_steps: int
    flow_batch_size: int
    flow_learning_rate: float
    flow_ema_decay: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ASSETS / "tiny_kontext", help="folder of the pipeline")
    parser.add_argument(
        "--prompts", type=Path, help="folder of the prompts and references; not given: tiny_edit beside the output"
    )
    parser.add_argument("--eval-seeds", type=int, default=5, help="pictures per prompt to score; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what decides the result")
    parser.add_argument("--pairs", type=int, default=4000, help="pairs of rendered pictures to train on")
    parser.add_argument("--vae-steps", type=int, default=1200)
    parser.add_argument("--vae-batch-size", type=int, default=32)
    parser.add_argument("--vae-learning-rate", type=float, default=4e-3)
    parser.add_argument("--vae-ground-weight", type=float, default=2.0, help="of the mean colours of large squares")
    parser.add_argument("--flow-steps", type=int, default=1000)
    parser.add_argument("--flow-batch-size", type=int, default=64)
    parser.add_argument("--flow-learning-rate", type=float, default=2e-3)
    parser.add_argument("--flow-ema-decay", type=float, default=0.99)
    arguments = parser.parse_args()
    refuse_other_folders(parser, arguments.output, "model_index.json", "not a pipeline")
    return arguments


def train(settings: EditSettings) -> FluxKontextPipeline:
    """The trained pipeline, in float32 but with weights that float16 holds exactly."""
    pipeline = build_pipeline(settings.seed)
    for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
        round_to_half(encoder)
    pairs, labels = make_pairs(settings.pairs, settings.seed)
    train_vae(
        pipeline.vae,
        pairs.flatten(0, 1),
        steps=settings.vae_steps,
        batch_size=settings.vae_batch_size,
        learning_rate=settings.vae_learning_rate,
        ground_weight=settings.vae_ground_weight,
        seed=settings.seed,
    )
    train_flow(
        pipeline,
        pair_tokens(pipeline, pairs),
        labels,
        text_tokens=TEXT_TOKENS,
        steps=settings.flow_steps,
        batch_size=settings.flow_batch_size,
        learning_rate=settings.flow_learning_rate,
        ema_decay=settings.flow_ema_decay,
        seed=settings.seed,
    )
    return pipeline


def score(folder: Path, prompts: Path, seeds: int, threads: int) -> dict[int, EditScore]:
    """Scores of the saved pipeline by number of sampling steps; empty for `seeds` = 0."""
    if seeds == 0:
        return {}
    pipeline = FluxKontextPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    reward = OCRReward(OCRConfig(num_threads=threads))
    files = [prompts / "train.jsonl", prompts / "test.jsonl"]
    return {
        steps: evaluate_edits(pipeline, files, reward, text_tokens=TEXT_TOKENS, steps=steps, seeds=seeds)
        for steps in EVALUATED_STEPS
    }


def main() -> None:
    arguments = vars(parse_arguments())
    output = arguments.pop("output")
    prompts = arguments.pop("prompts") or output.parent / "tiny_edit"
    eval_seeds = arguments.pop("eval_seeds")
    settings = EditSettings(**arguments)
    torch.set_num_threads(settings.threads)

    start = time.process_time()
    pipeline = train(settings)
    minutes = (time.process_time() - start) / 60

    write_edits(prompts, settings.seed)
    with replacing(output) as folder:
        save_in_half(pipeline, folder)
        scores = score(folder, prompts, eval_seeds, settings.threads)
        write_kontext_card(folder, pipeline, settings, scores, minutes)
    for steps, result in scores.items():
        print(f"{steps} sampling steps: {result}")
    print(f"{output}, {minutes:.1f} CPU minutes")


if __name__ == "__main__":
    main()
