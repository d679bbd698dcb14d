"""A policy for a training loop of your own: draw images, score them, learn from their rewards, save the LoRA."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActorConfig, ModeInForce
from flowgrpo_rc.actor.noising import noise_images
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy, correct_old_policy
from flowgrpo_rc.correction import MetricAccumulator
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.dtypes import set_tf32, torch_dtype
from flowgrpo_rc.loss import group_advantages
from flowgrpo_rc.models import Conditioning, ModelConfig, PipelineLoader, PromptEncoder
from flowgrpo_rc.models.lora import save_lora
from flowgrpo_rc.models.prompt_store import open_store
from flowgrpo_rc.models.prompts import check_length
from flowgrpo_rc.models.quantization import check_packages
from flowgrpo_rc.prompt import Prompt, as_prompt
from flowgrpo_rc.rollout import RolloutConfig, RolloutRequest, build_engine
from flowgrpo_rc.rollout.config import rounded_base_problems
from flowgrpo_rc.rollout.proof import check_rollout
from flowgrpo_rc.rollout.seeds import IMAGE, START, WINDOW, generator_for, seed_for
from flowgrpo_rc.rollout.weights import check_kernels
from flowgrpo_rc.sde import draw_window_start
from flowgrpo_rc.section import convert
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.encoding import PromptSet, check_numbers, condition
from flowgrpo_rc.trainer.rollout_queue import noising_seeds
from flowgrpo_rc.trainer.scoring import best_and_worst
from flowgrpo_rc.trainer.setup import build_actor


@dataclass(frozen=True)
class Drawn:
    """Images, and what the policy learns from."""

    images: UInt8[np.ndarray, "B H W 3"]
    prompts: list[str]
    """Text of each image's prompt, for rewards."""
    group: Int[Tensor, " B"]
    """Number of each image's prompt."""
    conditioning: Conditioning
    batch: TensorDict | None
    """The recorded steps, under the names of ``flowgrpo_rc.batch.Key``; ``None`` of a deterministic draw."""


class ImagePolicy:
    """A flow-matching pipeline with a LoRA, a rollout engine that draws with it and an actor that trains it.

    One process, one device; ``FlowGRPOTrainer`` has more. Text encoders are in memory only while prompts are encoded
    that ``model.prompt_store`` lacks.

    Args:
        model: pipeline and LoRA, the section ``actor_rollout_ref.model`` or a mapping of its keys, with ``path``.
        rollout: engine, images per prompt, image size, steps and guidance, the section ``actor_rollout_ref.rollout``.
        actor: objective, mini-batches, optimizer and rollout correction, the section ``actor_rollout_ref.actor``.
        total_optimizer_steps: length of the learning-rate schedule; ``update`` takes one step per mini-batch and epoch.
        device: such as ``cpu`` or ``cuda``.
        seed: of the LoRA's first weights.

    Raises:
        ValueError: a setting is wrong; a limit is ``auto``, which only the trainer measures; or the model does not
            support the size or the guidance.
        UnsupportedModelError: the pipeline is damaged or of no supported family.
    """

    def __init__(
        self,
        model: ModelConfig | Mapping[str, Any],
        rollout: RolloutConfig | Mapping[str, Any],
        actor: DiffusionActorConfig | Mapping[str, Any] | None = None,
        *,
        total_optimizer_steps: int = 1000,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        from accelerate import Accelerator

        lora: ModelConfig = convert(ModelConfig, model)
        sampling: RolloutConfig = convert(RolloutConfig, rollout)
        config: DiffusionActorConfig = convert(DiffusionActorConfig, {} if actor is None else actor)
        limits = {
            "diffusion_loss.clip_ratio": config.diffusion_loss.clip_ratio,
            "rollout_correction.rollout_rs_threshold": config.rollout_correction.rollout_rs_threshold,
        }
        for name, limit in limits.items():
            if limit == "auto":
                raise ValueError(f"{name}: got auto, which follows the trainer's probe of each batch; give numbers")
        if sampling.staleness:
            raise ValueError("ahead, adapter_lag: only the trainer draws with an older LoRA; leave them at 0")
        pipeline = sampling.pipeline
        for problem in rounded_base_problems(lora, sampling):
            raise ValueError(problem)
        check_packages(lora.quantization, config.optim.name)
        set_tf32(lora.allow_tf32)
        accelerator = Accelerator(cpu=device == "cpu")
        check_kernels(sampling.quantization, torch_dtype(sampling.dtype), accelerator.device)
        loader = PipelineLoader(lora.path, dtype=lora.dtype, device=accelerator.device, quantization=lora.quantization)
        guidance = (pipeline.guidance_scale, pipeline.true_cfg_scale)
        loader.model.check_request(pipeline.height, pipeline.width, *guidance)
        check_length(loader.model, pipeline.max_sequence_length)
        self.model = loader.load()
        self.model.batch_guidance = lora.batch_guidance
        self.model.prompt_multiple = lora.prompt_length_multiple
        store = open_store(lora.prompt_store, self.model, lora.dtype)
        self._encoder = PromptEncoder(self.model, pipeline.max_sequence_length, store)
        self._rollout = sampling
        self._mode = ModeInForce.configured(config)
        # Before the actor, whose adapter the engine would freeze.
        self.engine = build_engine(sampling, self.model, lora, accelerator.device)
        torch.manual_seed(seed)
        self.actor = build_actor(self.model, lora, sampling, config, accelerator, total_optimizer_steps)
        self._adapter = AdapterSync(self.engine, self.actor, lag=0)
        self.step = 0
        """Number of updates."""
        self._adapter.push(self.step)

    def draw(
        self,
        prompts: Sequence[str | Prompt],
        *,
        seed: int,
        n: int | None = None,
        negative: str | None = None,
        learn: bool = True,
    ) -> Drawn:
        """Draw ``n`` images of each prompt with the current LoRA; those of one prompt follow each other.

        Args:
            prompts: texts, or for editors ``Prompt(text, images)`` with ``reference_image(path)`` for each image.
            seed: of starting noise, window and SDE noise; equal seeds give equal images.
            n: images per prompt; ``None``: ``rollout.n``.
            negative: negative prompt where ``true_cfg_scale`` is above 1; ``None``: the pipeline's own default.
            learn: draw the window of SDE steps and record it, or for objectives on clean images the finished latents,
                noised anew. False draws the deterministic ODE, as validation does.

        Raises:
            ValueError: the model takes another number of reference images.
            RolloutError, RolloutSyncError: the engine failed, or drew with other settings than requested.
        """
        n = n or self._rollout.n
        pipeline = self._rollout.pipeline
        given = [as_prompt(prompt) for prompt in prompts]
        records = [
            PromptRecord(prompt=one.text, negative_prompt=negative, images=one.images, source=repr(one.text))
            for one in given
        ]
        check_numbers(type(self.model.pipe).__name__, records)
        group = torch.arange(len(given)).repeat_interleave(n)
        clean = learn and self._mode.objective.clean
        # A deterministic draw takes every step, as validation does.
        fields: dict[str, Any] = {"num_inference_steps": pipeline.num_inference_steps, "window_starts": None}
        if learn:
            fields = self._rollout.request_fields(clean=clean)
        if learn and not clean:
            span = self._rollout.window
            starts = [draw_window_start(span, generator_for(seed, WINDOW, 0, i)) for i in range(len(given))]
            fields |= {
                "window_starts": torch.tensor(starts)[group],
                "record_means": self._mode.bypasses and self._mode.objective.needs_old_means,
            }
            if self._rollout.algo.init_same_noise:
                fields["start_seeds"] = [seed_for(seed, START, 0, one) for one in group.tolist()]
        request = RolloutRequest(
            conditioning=condition(self.model, self._encoder, PromptSet(records, pipeline)),
            prompt_index=group,
            seeds=[seed_for(seed, IMAGE, 0, i) for i in range(len(group))],
            **fields,
        )
        answer = self.engine.generate(request)
        check_rollout(request, answer, self.model, self._adapter.held, self._rollout.dtype)
        if clean and answer.batch is not None:
            places = self.actor.config.clean
            seeds = noising_seeds(seed, 0, torch.arange(len(group)), group, places)
            size = (pipeline.height, pipeline.width)
            noise_images(answer.batch, seeds, places, self.model, size, pipeline.num_inference_steps)
        texts = [given[i].text for i in group.tolist()]
        return Drawn(answer.images.numpy(), texts, group, request.conditioning, answer.batch)

    def score(self, drawn: Drawn) -> tuple[OldPolicy, dict[str, float]]:
        """The old policy of these images, and the metrics of the gap.

        In bypass mode that is the engine's own log-probs and there are no metrics yet: the update measures. Otherwise
        the actor scores the recorded steps, and the correction adds weights and rejection. The adapter must not have
        changed since ``draw``, or the old policy is that of a later one.

        Raises:
            ValueError: ``drawn`` is deterministic and has no steps to learn from.
        """
        batch = _steps(drawn)
        if self._mode.bypasses:
            return OldPolicy.of_rollout(batch), {}
        scored = self.actor.score(batch, drawn.conditioning)
        if self._mode.objective.clean:
            return scored, {}  # the policy that drew is the old one
        old, moments = correct_old_policy(scored, batch, self._mode.rollout_correction)
        gap = MetricAccumulator()
        gap.add(moments)
        return old, gap.compute()

    def update(self, drawn: Drawn, rewards: Any, old: OldPolicy | None = None) -> dict[str, float]:
        """Learn from the rewards ``(B,)`` of the images; the next ``draw`` uses the new LoRA. Returns the metrics.

        Rewards become advantages within each prompt's images, over the standard deviation of all rewards as in the
        trainer. Each optimizer step sees ``ppo_mini_batch_size`` prompts.

        Args:
            old: the first value of ``score``; ``None``: computed here.

        Raises:
            ValueError: as ``score``; or rewards are not ``(B,)``, or not finite.
            NonFiniteUpdateError: a log-prob, loss or gradient is not finite; the LoRA is as before.
        """
        batch = _steps(drawn)
        metrics: dict[str, float] = {}
        if old is None and self._mode.objective.needs_old:
            old, metrics = self.score(drawn)
        values = torch.as_tensor(rewards)
        batch[Key.ADVANTAGES] = group_advantages(values, drawn.group, global_std=True).advantages.float()
        images = self.actor.config.ppo_mini_batch_size * (len(batch) // int(drawn.group[-1] + 1))
        parts = torch.arange(len(batch)).split(images)
        if self._mode.objective.paired:
            parts = [best_and_worst(rows, batch[Key.ADVANTAGES], drawn.group) for rows in parts]
        mini_batches = [MiniBatch(rows, None if old is None else old.rows(rows)) for rows in parts]
        updated = self.actor.update(batch, drawn.conditioning, mini_batches)
        self.step += 1
        self._adapter.push(self.step)
        return metrics | updated.metrics

    def save(self, folder: str | Path) -> None:
        """Write the LoRA in diffusers' format at full strength: ``pipe.load_lora_weights(folder)`` reads it."""
        save_lora(self.model, self.actor.transformer, Path(folder), full_strength=True)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def _steps(drawn: Drawn) -> TensorDict:
    if drawn.batch is None:
        raise ValueError(
            "these images were drawn with learn=False, so that no steps were recorded; draw with learn=True"
        )
    return drawn.batch
