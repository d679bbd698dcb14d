"""Validation: held-out prompts, fixed noise, deterministic sampling with the rollout engine; sample grids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import gather_object

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.evaluation.comparison import scaled
from flowgrpo_rc.evaluation.image_statistics import STATISTICS, image_statistics, summary, thumbnails
from flowgrpo_rc.report.finding import fixed
from flowgrpo_rc.rewards import PartialScoring
from flowgrpo_rc.rollout import RolloutRequest, Trajectories
from flowgrpo_rc.rollout.seeds import VALIDATION, seed_for
from flowgrpo_rc.run_folder import write_whole
from flowgrpo_rc.trainer.dumps import ScoredImage
from flowgrpo_rc.trainer.scoring import names_of_all
from flowgrpo_rc.trainer.setup import Run

CELL = 96
"""Pixels of an image's side."""
REFERENCE = 48
"""Pixels of the side of a reference image, which is left of its image."""
CAPTION = 34
"""Pixels of the two lines under an image."""
TITLE = 26
GAP = 8

Generate = Callable[[RolloutRequest], Trajectories]
"""Samples, and checks that the engine did as requested."""


@dataclass(frozen=True)
class Validation:
    """The scores of a validation, and its images."""

    rewards: list[dict[str, float]]
    """Of every image of all processes, in order: ``mean``, the mix, and the parts by name, the same for all images."""
    statistics: dict[str, np.ndarray]
    """``image_statistics`` of these images, ``(n,)`` each."""
    thumbnails: np.ndarray
    """Of these images, as features of ``spread``; ``(n, 768)`` uint8."""
    prompts: int
    """Number of prompts; image ``i`` is of prompt ``i % prompts``."""
    own: list[ScoredImage]
    """The images of this process."""
    shown: list[ScoredImage]
    """The first images of all processes, for the grids."""

    @property
    def metrics(self) -> dict[str, float]:
        """Means over all images as ``val/reward/...``, deviations of the scores of whole functions too, and their
        statistics as ``val/images/...``."""
        scores = {name: np.array([one[name] for one in self.rewards]) for name in self.rewards[0]}
        rewards = {name: float(values.mean()) for name, values in scores.items()}
        whole = [name for name in scores if name != "mean" and "/" not in name]
        rewards |= {f"std/{name}": float(scores[name].std()) for name in whole}
        images = summary(self.statistics, self.thumbnails, np.arange(len(self.rewards)) % self.prompts)
        return {f"val/reward/{n}": v for n, v in rewards.items()} | {f"val/images/{n}": v for n, v in images.items()}


def validate(run: Run, generate: Generate) -> Validation:
    """Score ``val_kwargs.n`` images of every validation prompt, split over the processes.

    The number of image ``k`` of prompt ``i`` is ``k * prompts + i``. It always starts from the same noise, so that two
    validations differ by the adapter only. Raises ``RewardError`` if a function failed, or did not report the same
    parts of its score for all images.
    """
    accelerator = run.accelerator
    count = len(run.val_prompts) * run.config.actor_rollout_ref.rollout.val_kwargs.n
    own = list(range(accelerator.process_index, count, accelerator.num_processes))
    # Equal work on every process: a sharded transformer gathers its weights in every forward.
    most = -(-count // accelerator.num_processes)
    numbers = own + [0] * (most - len(own))
    scored_records = drawn = [run.val_prompts[number % len(run.val_prompts)] for number in numbers]
    if run.writer is not None:
        rewrites = run.writer.for_validation(drawn, numbers)
        scored_records, drawn = rewrites.scored, rewrites.drawn
    images = _sample(run, generate, numbers, drawn)[: len(own)]
    scored = _score(run, own, images, scored_records, [one.prompt for one in drawn]) if own else []
    rewards = [{"mean": one.reward} | one.rewards for one in scored]
    statistics = np.stack(list(image_statistics(images).values()), axis=1)
    # In the order of the images, whatever the number of processes.
    everyones = gather_object(list(zip(own, rewards, statistics, thumbnails(images), strict=True)))
    _, rewards, statistics, small = map(list, zip(*sorted(everyones, key=itemgetter(0)), strict=True))
    # A mean over some of the images only would be another metric under the same name.
    names_of_all(rewards)
    columns = dict(zip(STATISTICS, np.array(statistics).T, strict=True))
    shown = gather_object([one for one in scored if one.number < run.config.trainer.log_val_generations])
    shown.sort(key=lambda one: one.number)
    return Validation(rewards, columns, np.array(small), len(run.val_prompts), scored, shown)


def _sample(run: Run, generate: Generate, numbers: list[int], records: Sequence[PromptRecord]) -> np.ndarray:
    """The images of these numbers and records, ``(n, H, W, 3)`` uint8."""
    rollout = run.config.actor_rollout_ref.rollout
    # Images with the same inputs of the model share a row of the conditioning.
    keys = [(record.prompt, record.negative_prompt, record.images) for record in records]
    distinct = dict(zip(keys, records, strict=True))
    row = {key: i for i, key in enumerate(distinct)}
    pipeline = rollout.validation_pipeline
    trajectories = generate(
        RolloutRequest(
            conditioning=run.conditioning(list(distinct.values()), pipeline),
            prompt_index=torch.tensor([row[key] for key in keys]),
            num_inference_steps=pipeline.num_inference_steps,
            seeds=[_seed(run, number) for number in numbers],
            # No SDE steps: validation is deterministic, so that its curve shows the adapter alone.
            window_starts=None,
        )
    )
    return trajectories.images.numpy()


def _score(
    run: Run, numbers: list[int], images: np.ndarray, records: Sequence[PromptRecord], drawn: Sequence[str]
) -> list[ScoredImage]:
    """Reward the images of these numbers by their records; the parts of observers are included. ``drawn`` are the
    prompts that were drawn."""
    records = records[: len(numbers)]
    prompts = [record.prompt for record in records]
    metadata = [record.metadata for record in records]
    # Functions that stream get as many images per call as in training, since their time-outs are per call.
    part = run.config.actor_rollout_ref.rollout.micro_batch_size
    mixes = [run.reward] if run.observers is None else [run.reward, run.observers]
    results = [PartialScoring(mix, prompts, metadata, part).result(images) for mix in mixes]
    scores = {name: values for one in results for name, values in (one.parts | one.inner_parts).items()}
    reward = results[0]
    return [
        ScoredImage(
            number=number,
            image=images[i],
            prompt=drawn[i],
            seed=_seed(run, number),
            reward=float(reward.total[i]),
            rewards={name: float(values[i]) for name, values in scores.items()},
            text=reward.texts[i] if reward.texts else None,
            text_score=None if reward.reader is None else float(reward.parts[reward.reader][i]),
            reference=next(iter(records[i].images), None),
        )
        for i, number in enumerate(numbers)
    ]


def _seed(run: Run, number: int) -> int:
    return seed_for(run.config.actor_rollout_ref.rollout.val_kwargs.seed, VALIDATION, 0, number)


def save_grid(path: Path, title: str, samples: Sequence[ScoredImage], columns: int = 12) -> None:
    """Write one PNG with captioned images under a title, each to the right of its reference image. Raises
    ``ValueError`` if a reference is gone or has changed."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(11)
    across = CELL + (REFERENCE + 2 if any(sample.reference for sample in samples) else 0)
    # As wide as a grid without references.
    columns = max(1, columns * (CELL + GAP) // (across + GAP))
    rows = -(-len(samples) // columns)
    width = GAP + columns * (across + GAP)
    height = GAP + TITLE + rows * (CELL + CAPTION + GAP)
    canvas = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(canvas)
    pen.text((GAP, GAP), title, fill="black", font=ImageFont.load_default(15))
    for i, sample in enumerate(samples):
        x = GAP + (i % columns) * (across + GAP)
        y = GAP + TITLE + (i // columns) * (CELL + CAPTION + GAP)
        if sample.reference is not None:
            # The file is read again, so that a run does not hold all its references in memory.
            canvas.paste(scaled(sample.reference.open(), (REFERENCE, REFERENCE)), (x, y))
        right = x + across - CELL
        canvas.paste(scaled(Image.fromarray(sample.image), (CELL, CELL)), (right, y))
        prompt = sample.prompt if len(sample.prompt) <= 17 else f"{sample.prompt[:16]}…"
        pen.rectangle((right, y, right + CELL - 1, y + CELL - 1), outline="#bbbbbb")
        pen.text((x, y + CELL + 2), prompt, fill="black", font=font)
        score = fixed(sample.reward, 2)
        colour = "black"
        if sample.text is not None:  # a reading is right or wrong, other rewards are not
            score += f' read "{sample.text}"'
            read = sample.reward if sample.text_score is None else sample.text_score
            colour = "#0a7d32" if read >= 0.999 else "#b3261e"
        pen.text((x, y + CELL + 16), score[:20], fill=colour, font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: canvas.save(temporary, format="PNG"))
