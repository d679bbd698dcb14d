"""The writer's policy: score rewrites, and update the adapter from them.

As for images, the gradients of micro-batches' loss *sums* are added, over ranks too, and divided once by the global
denominator, so that the result does not depend on how the batch was cut.
"""

import math
import warnings
from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from flowgrpo_rc.actor.optimizer import make_optimizer, moving_average, reduce_gradients, resume_optimizer
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy, correct_old_policy
from flowgrpo_rc.correction import MetricAccumulator
from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.loss.inputs import ActorLossConfig
from flowgrpo_rc.loss.sums import LossMetrics, metrics_of_update
from flowgrpo_rc.loss.tokens import token_loss_sums
from flowgrpo_rc.models.lora import ACTOR_ADAPTER, adapter_active, adapter_parameters
from flowgrpo_rc.quiet import quiet_loading
from flowgrpo_rc.writer.engine import INPUT_IDS, REQUEST_LENGTHS
from flowgrpo_rc.writer.language import (
    LanguageModel,
    NonFiniteWriterError,
    recompute_activations,
    token_log_probs,
)


class WriterActor:
    """The trained writer: the language model with a float32 LoRA, its optimizer and its learning-rate schedule.

    Args:
        language: the model; the LoRA is attached to its own network.
        total_optimizer_steps: length of the learning-rate schedule.
    """

    def __init__(self, language: LanguageModel, total_optimizer_steps: int) -> None:
        self.config = language.config.actor
        self.in_force: ActorLossConfig = self.config
        """Loss and correction of the next update: the configured ones, or those that the guard has put in force."""
        self.network: Any = language.network
        self._device = language.device
        self._lr = self.config.optim.lr
        computes = torch_dtype(language.config.dtype)
        language.attach(self.network, ACTOR_ADAPTER, torch.float32, computes)
        if self.config.enable_gradient_checkpointing:
            recompute_activations(self.network)
        self._parameters = list(adapter_parameters(self.network).values())
        self.optimizer, self.lr_scheduler = make_optimizer(self._parameters, self.config.optim, total_optimizer_steps)
        self.average: Any = None
        self.load_average(None)

    @property
    def transformer(self) -> Any:
        """The network, by the name under which adapters are exchanged."""
        return self.network

    def load_average(self, state: dict[str, Any] | None) -> None:
        """Load the moving average, or start one from the current weights; there is none without ``ema_decay``."""
        self.average = moving_average(self._parameters, self.config.ema_decay, state)

    def averaged_state(self) -> dict[str, Tensor] | None:
        """The averaged LoRA weights by name; ``None`` without ``ema_decay``."""
        if self.average is None:
            return None
        return dict(zip(adapter_parameters(self.network), self.average.shadow_params, strict=True))

    def load_optimizer(self, moments: dict[int, Any], taken: int) -> None:
        """Resume from an optimizer's ``moments`` after ``taken`` steps of the schedule."""
        resume_optimizer(self.optimizer, self.lr_scheduler, self.config.optim.lr, moments, taken)

    def save(self, folder: Path) -> None:
        """Write the adapter in peft's format: ``transformers`` and ``peft`` load it on the same base."""
        with adapter_active(self.network, ACTOR_ADAPTER), quiet_loading("transformers"):
            self.network.save_pretrained(folder)
        # It is written for its owner alone, whatever the umask allows.
        for file in folder.glob("*.safetensors"):
            weights = file.read_bytes()
            file.unlink()
            file.write_bytes(weights)

    @torch.no_grad()
    def score(self, batch: TensorDict) -> OldPolicy:
        """The policy's log-probs ``(B, T)`` of the rewrites, in nats a token, on the host and not corrected."""
        size = self.config.ppo_micro_batch_size_per_gpu
        return OldPolicy(log_probs=torch.cat([self._log_probs(rows).cpu() for rows in batch.split(size)]))

    def correct(self, batch: TensorDict, old: OldPolicy) -> tuple[OldPolicy, MetricAccumulator]:
        """Decoupled mode: add weights and rejection, ``pi_old / pi_rollout``; and the measurements of the gap."""
        corrected, moments = correct_old_policy(old, batch, self.in_force.rollout_correction)
        gap = MetricAccumulator()
        gap.add(moments)
        return corrected, gap

    def update(
        self, batch: TensorDict, mini_batches: Sequence[MiniBatch], gap: MetricAccumulator | None = None
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch, ``ppo_epochs`` times; returns metrics named by ``metrics_of_update``.

        Args:
            batch: rewrites of this process with ``advantages`` ``(B,)``, as ``Written.batch`` has them.
            mini_batches: rows and old policy of each optimizer step; in bypass mode without one.
            gap: measurements of the correction so far; bypass mode adds its own.

        Raises:
            NonFiniteWriterError: a loss or gradient is not finite; the optimizer was not stepped.
            ValueError: a mini-batch without an old policy in decoupled mode.
        """
        if not self.in_force.rollout_correction.bypass_mode and any(mini.old is None for mini in mini_batches):
            raise ValueError("update() was given a mini-batch without an old policy; in decoupled mode score() it")
        gap = gap or MetricAccumulator()
        found = [self._optimizer_step(batch, mini, gap) for _ in range(self.config.ppo_epochs) for mini in mini_batches]
        metrics = metrics_of_update([step for step, _ in found])
        norms = [norm for _, norm in found if norm is not None]
        if norms:
            metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/lr"] = self._lr
        return metrics | gap.compute()

    def _optimizer_step(
        self, batch: TensorDict, mini: MiniBatch, gap: MetricAccumulator
    ) -> tuple[LossMetrics, float | None]:
        """The step's figures, and its gradient's norm; ``None`` if rejection kept nothing and no step was taken."""
        self.optimizer.zero_grad(set_to_none=True)
        parts = [
            self._backward(batch, mini.part(places), gap)
            for places in torch.arange(len(mini.rows)).split(self.config.ppo_micro_batch_size_per_gpu)
        ]
        total = reduce(add, parts).all_reduce()
        reduce_gradients(self._parameters, total.denominator.clamp(min=1.0), PartialState().num_processes)
        norm = float(clip_grad_norm_(self._parameters, self.config.grad_clip))
        # Sums over all processes, so that all take the same branch.
        if not math.isfinite(total.loss) or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteWriterError(
                "the writer's loss or gradient is not finite; the optimizer was not stepped. Try a lower "
                "algorithm.prompt_writer.actor.optim.lr, or float32 for algorithm.prompt_writer.dtype"
            )
        if total.kept == 0:
            self.optimizer.zero_grad(set_to_none=True)
            warnings.warn(
                "rollout correction rejected all rewrites of an optimizer step, which is skipped", stacklevel=3
            )
            return total, None
        # Read before the schedule advances: the rate of this step.
        self._lr = float(self.lr_scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.lr_scheduler.step()
        # After the step: the average includes the new weights.
        if self.average is not None:
            self.average.step(self._parameters)
        return total, norm

    def _backward(self, batch: TensorDict, micro: MiniBatch, gap: MetricAccumulator) -> LossMetrics:
        rows = batch[micro.rows]
        old = OldPolicy.of_rollout(rows) if micro.old is None else micro.old
        data = {name: value.to(self._device) for name, value in {**rows, **old.batch_keys()}.items()}
        if self.in_force.use_kl_loss:
            with torch.no_grad():
                data[Key.REF_LOG_PROBS] = self._log_probs(data, adapter=None)
        sums = token_loss_sums(self.in_force, {"log_probs": self._log_probs(data)}, data)
        sums.loss_sum.backward()
        if sums.correction is not None:
            gap.add(sums.correction)
        return sums.metrics

    def _log_probs(self, rows: Any, adapter: str | None = ACTOR_ADAPTER) -> Float[Tensor, "B T"]:
        length = rows[Key.RESPONSE_MASK].shape[1]
        ids, lengths = (rows[name].to(self._device) for name in (INPUT_IDS, REQUEST_LENGTHS))
        with adapter_active(self.network, adapter):
            return token_log_probs(self.network, ids, lengths, length)
