"""Build a real `QwenImagePipeline` in miniature that draws two-digit numbers, on purpose not too well.

    python examples/tiny_qwen_image/build_tiny_qwen_image.py

takes seven to ten minutes; the defaults are the ones of the shipped model, `assets/tiny_qwen_image`. Training
of the transformer stops early on purpose, so that about 60 % of the OCR reward is reached and reinforcement
learning has room to improve it. The result depends on the seed alone on a given machine and thread count;
on another one rounding differs, and with it the weights. A second thread saves a third of the time on idle
cores and costs a multiple of it on busy ones.
"""

import argparse
import time
from pathlib import Path

import torch
from diffusers import QwenImagePipeline
from evaluation import Score, evaluate
from model_card import write_model_card
from number_images import NUMBERS, make_dataset, prompt_for, write_prompts
from saving import refuse_other_folders, replacing, save_in_half
from tiny_components import build_pipeline
from training import Settings, normalised_tokens, round_to_half, train_flow, train_vae

from flowgrpo_rc.rewards import OCRReward
from flowgrpo_rc.rewards.config import OCRConfig

ASSETS = Path(__file__).resolve().parents[2] / "assets"
EVALUATED_STEPS = (6, 10)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ASSETS / "tiny_qwen_image", help="folder of the pipeline")
    parser.add_argument(
        "--prompts", type=Path, help="folder of the prompt lists; not given: tiny_ocr beside the output"
    )
    parser.add_argument("--eval-seeds", type=int, default=5, help="pictures per number to score; 0: no OCR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what decides the result")
    parser.add_argument("--images", type=int, default=8000, help="rendered pictures to train on")
    parser.add_argument("--vae-steps", type=int, default=1500)
    parser.add_argument("--vae-batch-size", type=int, default=32)
    parser.add_argument("--vae-learning-rate", type=float, default=4e-3)
    parser.add_argument("--flow-steps", type=int, default=1200)
    parser.add_argument("--flow-batch-size", type=int, default=64)
    parser.add_argument("--flow-learning-rate", type=float, default=1e-3)
    parser.add_argument("--flow-ema-decay", type=float, default=0.99)
    arguments = parser.parse_args()
    refuse_other_folders(parser, arguments.output, "model_index.json", "not a pipeline")
    return arguments


def train(settings: Settings) -> QwenImagePipeline:
    """The trained pipeline, in float32 but with weights that float16 holds exactly."""
    pipeline = build_pipeline(prompt_for(NUMBERS[0]), settings.seed)
    round_to_half(pipeline.text_encoder)
    images, labels = make_dataset(settings.images, settings.seed)
    train_vae(
        pipeline.vae,
        images,
        steps=settings.vae_steps,
        batch_size=settings.vae_batch_size,
        learning_rate=settings.vae_learning_rate,
        seed=settings.seed,
    )
    with torch.no_grad():
        embeddings, mask = pipeline.encode_prompt([prompt_for(number) for number in NUMBERS])
    if mask is not None:
        raise RuntimeError("the prompts differ in length; the embeddings need a mask")
    train_flow(
        pipeline.transformer,
        normalised_tokens(pipeline.vae, images),
        labels,
        embeddings,
        steps=settings.flow_steps,
        batch_size=settings.flow_batch_size,
        learning_rate=settings.flow_learning_rate,
        ema_decay=settings.flow_ema_decay,
        seed=settings.seed,
    )
    return pipeline


def score(folder: Path, seeds: int, threads: int) -> dict[int, Score]:
    """Scores of the saved pipeline by number of sampling steps; empty for `seeds` = 0."""
    if seeds == 0:
        return {}
    pipeline = QwenImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    reward = OCRReward(OCRConfig(num_threads=threads))
    return {steps: evaluate(pipeline, reward, steps=steps, seeds=seeds) for steps in EVALUATED_STEPS}


def main() -> None:
    arguments = vars(parse_arguments())
    output = arguments.pop("output")
    prompts = arguments.pop("prompts") or output.parent / "tiny_ocr"
    eval_seeds = arguments.pop("eval_seeds")
    settings = Settings(**arguments)
    torch.set_num_threads(settings.threads)

    start = time.perf_counter()
    pipeline = train(settings)
    minutes = (time.perf_counter() - start) / 60

    with replacing(output) as folder:
        save_in_half(pipeline, folder)
        scores = score(folder, eval_seeds, settings.threads)
        write_model_card(folder, pipeline, settings, scores, minutes)
    write_prompts(prompts, settings.seed)
    for steps, result in scores.items():
        print(f"{steps} sampling steps: OCR reward {result.reward:.3f}, exact {result.exact:.3f}")
    print(f"{output}, {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
