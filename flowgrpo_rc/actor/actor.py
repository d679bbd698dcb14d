"""Score trajectories and update the adapter from them.

One optimizer step sees one mini-batch: the gradients of its micro-batches' loss *sums* are added, over ranks too,
and divided once by the global denominator, so that the result does not depend on how the batch was cut.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from flowgrpo_rc.actor.config import DiffusionActorConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.actor.optimizer import make_optimizer, moving_average, reduce_gradients, resume_optimizer
from flowgrpo_rc.actor.rows import MicroBatch, RecordedSteps, correction_numbers, present_as_old, rows_of_batch
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy, correct_old_policy
from flowgrpo_rc.correction import MetricAccumulator
from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.loss import LossMetrics, diffusion_loss_sums
from flowgrpo_rc.loss.clean_images import matching_log_prob
from flowgrpo_rc.loss.sums import metrics_of_update
from flowgrpo_rc.models.attention import use_attention_backend
from flowgrpo_rc.models.base import COMPILE_BACKEND, Conditioning, DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import (
    adapter_active,
    adapter_parameters,
    adapter_state,
    attach_lora,
    base_parameters,
    check_adapter_state,
    load_lora,
)
from flowgrpo_rc.models.quantization import numbers_of
from flowgrpo_rc.sde import Transition, log_prob, transition
from flowgrpo_rc.transfers import queued_to_host, to_host


class NonFiniteUpdateError(RuntimeError):
    """A log-prob, loss or gradient is not finite. Raised before the optimizer moves; names the samples to blame.

    Every process of a run raises it at the same place, also one whose samples are fine.
    """

    def __init__(self, message: str, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.samples = list(samples)  # rows of the batch on this process


@dataclass(frozen=True)
class UpdateResult:
    """Result of ``DiffusionActor.update``."""

    metrics: dict[str, float]
    optimizer_steps: int
    """Steps taken. A mini-batch that rejection empties takes none."""
    mini_batches: list[MiniBatch]
    """As given, without images that have no gradient, and in decoupled mode with their old policy. After an update with
    ``keep_old`` another update with them is a further epoch."""
    log_probs: list[Float[Tensor, "_ W"]]
    """The current policy's at the rows that each mini-batch of the last epoch learned from, before its optimizer step;
    on the host."""


class DiffusionActor:
    """The trained policy: ``model``'s transformer with a LoRA, its optimizer and its learning-rate schedule.

    Args:
        model: the loaded pipeline; the LoRA is attached to its own transformer.
        config: objective, optimizer and rollout correction.
        lora: rank, alpha and target modules; gradient checkpointing and compilation.
        accelerator: an ``accelerate.Accelerator``: device, precision and processes.
        sde_type, noise_level: of the rollouts' stochastic steps.
        total_optimizer_steps: length of the learning-rate schedule.
        score_batch_size: images per forward of the scoring pass; ``None``: rows as in the update's micro-batch.
        timestep_dtype: embed timesteps and guidance scale as in this precision; ``None``: as in the actor's own.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: DiffusionActorConfig,
        lora: ModelConfig,
        accelerator: Any,
        *,
        sde_type: str,
        noise_level: float,
        total_optimizer_steps: int,
        score_batch_size: int | None = None,
        timestep_dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._accelerator = accelerator
        self.config = config
        """The configuration; the mode in force is an argument of ``update``, since the guard may change it."""
        self._sde_type = sde_type
        self._noise_level = noise_level
        self._lr = config.optim.lr
        self._score_batch_size = score_batch_size
        self._timestep_dtype = timestep_dtype
        self.transformer: Any = model.transformer
        # Counted before the LoRA is attached: the default of gradient checkpointing depends on the frozen size.
        frozen = sum(numbers_of(parameter) for parameter in base_parameters(self.transformer).values())
        attach_lora(
            self.transformer,
            model,
            lora,
            dtype=torch_dtype(lora.lora_dtype),
            compute_dtype=torch_dtype(lora.lora_computes_in),
            device=accelerator.device,
        )
        use_attention_backend(self.transformer, lora.attn_backend)
        self.recomputes = lora.checkpoints_gradients(frozen)
        """Recompute activations in the backward pass (gradient checkpointing)."""
        if self.recomputes:
            self.transformer.enable_gradient_checkpointing()
        self._compiled = lora.torch_compile
        if lora.torch_compile:
            model.compile_blocks(self.transformer, COMPILE_BACKEND)
        self._parameters = list(adapter_parameters(self.transformer).values())
        self.optimizer, self.lr_scheduler = make_optimizer(self._parameters, config.optim, total_optimizer_steps)
        self.average: Any = None
        self.load_average(None)
        self.start: dict[str, Tensor] | None = None
        """Weights of the adapter that training started from, by name; ``None`` unless it is the KL's reference."""
        self.load_start(None)

    def load_adapter(self, folder: Path) -> None:
        """Load LoRA weights that ``save_lora`` wrote, for training to start from: moving average and ``start``, where
        they are kept, begin with them. Raises ``AdapterMismatchError`` if the file's adapter is not of this shape."""
        load_lora(self.transformer, folder)
        self.load_average(None)
        self.load_start(None)

    def load_average(self, state: dict[str, Any] | None) -> None:
        """Load the moving average, or start one from the current weights. The decay is always the configuration's."""
        self.average = moving_average(self._parameters, self.config.ema_decay, state)

    def load_start(self, state: Mapping[str, Tensor] | None) -> None:
        """Load the adapter that training started from, or take the current weights for it. Raises
        ``AdapterMismatchError`` for another adapter's."""
        if not self.config.needs_reference or self.config.kl_reference != "start":
            return
        present = adapter_state(self.transformer)
        state = present if state is None else state
        check_adapter_state(state, {name: tuple(value.shape) for name, value in present.items()})
        self.start = {name: state[name].to(value) for name, value in present.items()}

    def averaged_state(self) -> dict[str, Tensor] | None:
        """The averaged LoRA weights by name; ``None`` without ``ema_decay``."""
        if self.average is None:
            return None
        return dict(zip(adapter_parameters(self.transformer), self.average.shadow_params, strict=True))

    def load_optimizer(self, moments: dict[int, Any], taken: int) -> None:
        """Resume AdamW from its ``moments`` after ``taken`` steps of the schedule, with this configuration's
        options."""
        resume_optimizer(self.optimizer, self.lr_scheduler, self.config.optim.lr, moments, taken)

    @torch.no_grad()
    def score(self, batch: TensorDict, conditioning: Conditioning) -> OldPolicy:
        """Score the recorded steps: the old policy of the next update, on the host and not yet corrected. It has
        transition means if the objective compares them."""
        steps = rows_of_batch(batch, conditioning, self._accelerator.device)
        scored = self._score_steps(steps, torch.arange(len(batch)), means=self._compares_means)
        return OldPolicy(log_probs=scored["log_probs"], means=scored.get(steps.means))

    @torch.no_grad()
    def rescore(self, batch: TensorDict, conditioning: Conditioning) -> dict[str, Tensor]:
        """``log_probs`` and ``transition_stds`` ``(B, W)`` and ``transition_means`` ``(B, W, *L)`` of the recorded
        steps, scored again, on the host."""
        steps = rows_of_batch(batch, conditioning, self._accelerator.device)
        return self._score_steps(steps, torch.arange(len(batch)), means=True)

    def gradients(
        self,
        batch: TensorDict,
        conditioning: Conditioning,
        losses: Sequence[Callable[[dict[str, Tensor], TensorDict], Float[Tensor, ""]]],
    ) -> list[Float[Tensor, " parameters"]]:
        """The adapter's gradient of each loss, summed over the batch; no weight changes.

        All losses share one forward pass, unless the transformer is compiled.

        Args:
            batch: recorded steps, and the tensors that the losses read.
            conditioning: embeddings that ``prompt_index`` points into.
            losses: each takes the forward's output for a micro-batch (``log_probs`` and ``transition_stds`` ``(b, W)``,
                ``transition_means`` ``(b, W, *L)``, on the actor's device) and that micro-batch, and returns a sum.

        Returns:
            Flat, float32, on the host; of this process alone.

        Raises:
            NonFiniteUpdateError: a log-prob or a gradient is not finite; for a gradient it names the micro-batch.
        """
        count = sum(parameter.numel() for parameter in self._parameters)
        sums = [torch.zeros(count, device=self._accelerator.device) for _ in losses]
        steps = rows_of_batch(batch, conditioning, self._accelerator.device)
        size = self.config.micro_batch_rows(steps.window)
        # Whole windows: the losses compare the steps of an image.
        for images in torch.arange(len(batch)).split(max(1, size // steps.window)):
            found = self._gradients_of_images(steps, images, batch[images], losses, size)
            finite = torch.stack([flat.isfinite().all() for flat in found]).all()
            if on_any_process(~finite):
                self._raise_non_finite("gradient", [] if finite else images.tolist())
            for total, flat in zip(sums, found, strict=True):
                total += flat
        return [flat.cpu() for flat in sums]

    def update(
        self,
        batch: TensorDict,
        conditioning: Conditioning,
        mini_batches: Sequence[MiniBatch],
        mode: ModeInForce | None = None,
        *,
        gap: MetricAccumulator | None = None,
        epochs: int | None = None,
        keep_old: bool = False,
    ) -> UpdateResult:
        """Take one optimizer step per mini-batch, ``ppo_epochs`` times.

        Args:
            batch: this process's trajectories with ``advantages``; with calibrated limits also ``clip_widths`` and
                ``rollout_rs_bounds``.
            conditioning: embeddings that ``prompt_index`` points into.
            mini_batches: rows and old policy of each optimizer step. In decoupled mode the first mini-batch may lack
                its old policy: before the first optimizer step the current policy *is* the old one, so the update's own
                forward pass supplies log-probs, weights and rejection, also for later epochs.
            mode: correction and objective in force; ``None``: the configuration's.
            gap: measurements of this batch's correction so far; the update adds its own and reports all.
            epochs: in place of ``ppo_epochs``.
            keep_old: return all that later updates with these mini-batches need of the old policy.

        Raises:
            NonFiniteUpdateError: a log-prob, loss or gradient is not finite; weights and optimizer are untouched
                by the offending step.
            ValueError: no mini-batches, or a later one without an old policy in decoupled mode.
        """
        if not mini_batches:
            raise ValueError("update() was given no mini-batches")
        mode = mode or ModeInForce.configured(self.config)
        needs_old = not mode.bypasses and mode.objective.needs_old
        if needs_old and any(mini.old is None for mini in mini_batches[1:]):
            raise ValueError(
                "update() was given a mini-batch after the first without an old policy; in decoupled mode score() its "
                "rows, for an optimizer step comes before it"
            )
        # One transfer of all scalars and embeddings serves every epoch and mini-batch.
        steps = rows_of_batch(batch, conditioning, self._accelerator.device)
        epochs = self.config.ppo_epochs if epochs is None else epochs
        update = _Update(batch, steps, mode, gap or MetricAccumulator(), keeps_old=keep_old or epochs > 1)
        mini_batches = list(mini_batches)
        log_probs: list[Tensor] = []
        metrics: list[LossMetrics] = []
        norms: list[float] = []
        for _ in range(epochs):
            log_probs = []
            for number, mini in enumerate(mini_batches):
                # The mini-batch returns with its old policy, which later epochs must reuse.
                done = self._optimizer_step(update, mini)
                mini_batches[number] = done.mini
                log_probs.append(done.log_probs)
                metrics.append(done.metrics)
                if done.norm is not None:
                    norms.append(done.norm)
        if keep_old:
            # Images that the update itself has rejected.
            mini_batches = [self._with_gradient(update, mini) for mini in mini_batches]
        return UpdateResult(self._metrics(metrics, norms, update), len(norms), mini_batches, log_probs)

    def _optimizer_step(self, update: "_Update", mini: MiniBatch) -> "_Step":
        """Accumulate one mini-batch, reduce over ranks, divide, clip, step."""
        self.optimizer.zero_grad(set_to_none=True)
        mini = self._with_gradient(update, mini)
        done = self._backward(update, mini)
        counts_rejected = update.mode.rollout_correction.rejection_normalization == "all"
        total = done.metrics.with_left_out(mini.rejected, mini.idle, counts_rejected=counts_rejected).all_reduce()
        # At least 1: a mini-batch without a kept element has gradients of 0, not NaN.
        reduce_gradients(self._parameters, total.denominator.clamp(min=1.0), self._accelerator.num_processes)
        norm = clip_grad_norm_(self._parameters, self.config.grad_clip)
        log_probs, total, norm = _read(done.log_probs, total, norm)
        # Before correction, which would raise on this process alone and leave the others waiting.
        self._check_finite(log_probs, mini.rows)
        given = mini
        if update.corrects(mini):
            corrected = done.corrected
            if corrected is None:
                # The current policy is the old one of later epochs. The host has waited for the means above.
                means = torch.cat(done.means).unflatten(0, log_probs.shape) if done.means else None
                corrected = update.correct(mini, OldPolicy(log_probs=log_probs, means=means))
            # In bypass mode weights and rejection are computed anew at every optimizer step, so nothing is kept.
            if not update.mode.bypasses:
                mini = mini._replace(old=corrected)
        # Not even moments and weight decay may move the weights where nothing is learned.
        if total.kept == 0:
            self.optimizer.zero_grad(set_to_none=True)
            warnings.warn("rollout correction rejected a whole mini-batch: its optimizer step is skipped", stacklevel=3)
            return _Step(total, mini, log_probs, None)
        # Both are sums over all processes, so all take the same branch. A loss can be NaN while its gradient is finite.
        if not math.isfinite(total.loss) or not math.isfinite(norm):
            self._refuse(update, given)
        # Read before the schedule advances: the rate of this step.
        self._lr = float(self.lr_scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.lr_scheduler.step()
        # After the step: the average includes the new weights.
        if self.average is not None:
            self.average.step(self._parameters)
        return _Step(total, mini, log_probs, norm)

    def _with_gradient(self, update: "_Update", mini: MiniBatch) -> MiniBatch:
        """The mini-batch without images whose gradient is exactly 0: all of their steps are rejected, or their
        advantage is 0 and there is no KL. Every process keeps equally many, at least one."""
        mode = update.mode
        correction = mode.rollout_correction
        # Weights that the update itself normalises depend on every image.
        normalises = update.corrects(mini) and correction.rollout_is_batch_normalize
        if mode.objective.paired or normalises:
            return mini
        idle = torch.zeros(len(mini.rows), dtype=torch.bool)
        # A mean over the kept steps has to know which of these rejection would keep.
        counts_all = correction.rejection_normalization == "all"
        if mode.objective.scales_with_advantage and not self.config.needs_reference and counts_all:
            advantages = update.batch[Key.ADVANTAGES][mini.rows]
            idle = advantages.reshape(len(mini.rows), -1).eq(0).all(1)
        removed = torch.zeros_like(idle)
        if mini.old is not None and mini.old.keep is not None and not mode.bypasses:
            removed = ~mini.old.keep.any(1)
        # Idle images are in no metric, rejected or not, or the share of rejected ones would be too high.
        rejected = removed & ~idle
        needed = max(1, largest_on_any_process(int((~(rejected | idle)).sum())))
        # Those with a gradient first, then those that are kept, each kind in the order of the batch.
        order = (idle.int() + 2 * removed).argsort(stable=True)
        kept = order[:needed].sort().values
        gone = order[needed:]
        steps = update.steps.window
        return mini.part(kept)._replace(
            rejected=mini.rejected + steps * int(rejected[gone].sum()), idle=mini.idle + steps * int(idle[gone].sum())
        )

    def _backward(self, update: "_Update", mini: MiniBatch) -> "_Accumulated":
        """Accumulate a mini-batch's gradients over its micro-batches, without a host sync between them."""
        mode = update.mode
        window = update.steps.window
        size = self.config.micro_batch_rows(window)
        corrects = update.corrects(mini)
        corrected = None
        if mode.objective.paired:
            # The loss compares the two images of a pair.
            size = max(size - size % (2 * window), 2 * window)
        elif corrects and mode.couples_steps and update.steps.has_rollout_log_probs:
            # Weights and rejection of a window need all of its steps: score them first, or do not cut windows.
            if size < window or mode.rollout_correction.rollout_is_batch_normalize:
                needs_means = self._compares_means and not mode.bypasses
                with torch.no_grad():
                    scored = self._score_steps(update.steps, mini.rows, means=needs_means)
                self._check_finite(scored["log_probs"], mini.rows)
                present = OldPolicy(log_probs=scored["log_probs"], means=scored.get(update.steps.means))
                corrected = update.correct(mini, present)
            else:
                size -= size % window
        known = corrected if corrects else mini.old
        # Later epochs compare with the means of this first pass.
        keeps_means = known is None and not mode.bypasses and self._compares_means and update.keeps_old
        done: list[LossMetrics] = []
        log_probs: list[Tensor] = []
        means: list[Tensor] = []
        reads_means = self._compares_means or self._kl_of_means
        old = known
        if known is not None and mode.bypasses:
            old = replace(known, means=None)  # in bypass mode the rollout's means are the old ones
        for micro in update.steps.cut(mini.rows, size, rollout_means=mode.bypasses and self._compares_means, old=old):
            output = self._forward(micro, means=reads_means, learns=True)
            data = micro.data
            if known is None:
                data = data | present_as_old(mode, data, output, window)
            if mode.objective.paired:
                output, data = (_by_image(values, window) for values in (output, data))
                data[Key.CLEAN_LATENTS] = data[Key.CLEAN_LATENTS][:, 0]
            sums = diffusion_loss_sums(mode, output, data, corrected=corrects)
            self._accelerator.backward(sums.loss_sum)
            done.append(sums.metrics)
            # Detached copies stay on the device until the optimizer step's one host sync.
            log_probs.append(output["log_probs"].detach().flatten())
            if keeps_means:
                means.append(queued_to_host(output[update.steps.means].detach()))
        return _Accumulated(reduce(add, done), torch.cat(log_probs).view(len(mini.rows), window), means, corrected)

    def _score_steps(self, steps: RecordedSteps, images: Int[Tensor, " M"], *, means: bool) -> dict[str, Tensor]:
        """Score the steps of some images: ``(M, W)`` and ``(M, W, *L)`` on the host."""
        size = self.config.micro_batch_rows(steps.window)
        if self._score_batch_size is not None:
            size = self._score_batch_size * steps.window
        parts = []
        for micro in steps.cut(images, size):
            output = self._forward(micro, means=means)
            # Means are large, so their copies start at once; the scalars cross together at the end.
            parts.append({n: queued_to_host(v) if n == steps.means else v for n, v in output.items()})
        numbers = to_host({n: torch.cat([part[n] for part in parts]) for n in parts[0] if n != steps.means})
        if means:  # Complete, because the copy of the scalars came after them and has been waited for.
            numbers[steps.means] = torch.cat([part[steps.means] for part in parts])
        return {name: values.unflatten(0, (len(images), steps.window)) for name, values in numbers.items()}

    def _gradients_of_images(
        self,
        steps: RecordedSteps,
        images: Int[Tensor, " b"],
        data: TensorDict,
        losses: Sequence[Callable[[dict[str, Tensor], TensorDict], Float[Tensor, ""]]],
        size: int,
    ) -> list[Float[Tensor, " parameters"]]:
        """The flat gradient of each loss over some images, computed in micro-batches of ``size`` rows. A loss reads
        whole windows. So the chain rule is applied in two parts: the loss by the forward pass's output, then the output
        by the parameters. If windows are cut, a forward pass without gradients supplies the output."""
        micro_batches = list(steps.cut(images, size))
        cut = len(micro_batches) > 1
        with torch.set_grad_enabled(not cut):
            outputs = [self._forward(micro, means=True) for micro in micro_batches]
        shape = (len(images), steps.window)
        whole = {n: torch.cat([o[n].detach() for o in outputs]).unflatten(0, shape) for n in outputs[0]}
        self._check_finite(whole["log_probs"], images)
        moved = [whole[name].requires_grad_() for name in ("log_probs", "transition_means")]
        of_outputs = [torch.autograd.grad(loss(whole, data), moved, materialize_grads=True) for loss in losses]
        count = sum(parameter.numel() for parameter in self._parameters)
        sums = [torch.zeros(count, device=self._accelerator.device) for _ in losses]
        for micro, output in zip(micro_batches, outputs, strict=True):
            for number, gradients in enumerate(of_outputs):
                # A compiled backward pass frees its buffers, so each needs a forward pass of its own.
                if (cut and number == 0) or (self._compiled and number > 0):
                    output = self._forward(micro, means=True)
                found = torch.autograd.grad(
                    [output["log_probs"], output["transition_means"]],
                    self._parameters,
                    [gradient.flatten(0, 1)[micro.places] for gradient in gradients],
                    retain_graph=not self._compiled and number + 1 < len(losses),
                    materialize_grads=True,
                )
                sums[number] += torch.cat([gradient.float().reshape(-1) for gradient in found])
        return sums

    def _check_finite(self, log_probs: Float[Tensor, "b W"], rows: Int[Tensor, " b"]) -> None:
        """Raise on every process if a log-prob of any process is not finite: none may enter a collective alone."""
        finite = torch.isfinite(log_probs).all(1)
        if on_any_process(~finite.all()):
            self._raise_non_finite("log-prob", rows[~finite.cpu()].tolist())

    def _forward(self, micro: MicroBatch, *, means: bool, learns: bool = False) -> dict[str, Tensor]:
        """Log-probs ``(n,)`` of a micro-batch's rows; with ``means`` also means and standard deviations of the
        transitions, or at noised images the velocities; if the update ``learns`` from them also velocities, and of the
        reference, if there is one, velocities and means, from a second forward pass."""
        data = micro.data
        output: dict[str, Tensor] = {}
        clean = self.config.diffusion_loss.objective.clean
        if learns and self.config.needs_reference:
            # First: the reference's weights may take the places of the adapter's, which no graph must hold by then.
            with torch.no_grad(), self._reference():
                output["ref_velocities"] = self._velocity(data, micro.conditioning)
            if self._kl_of_means:
                output["ref_transition_means"] = self._transition(data, output["ref_velocities"]).mean
        velocity = self._velocity(data, micro.conditioning)
        if clean:
            weighting = self.config.diffusion_loss.awm_weighting
            target = data[Key.NOISE] - data[Key.CLEAN_LATENTS]
            output["log_probs"] = matching_log_prob(velocity, target, data[Key.SIGMAS], weighting)
            if means or learns:
                output["velocities"] = velocity
            return output
        step = self._transition(data, velocity)
        output["log_probs"] = log_prob(step, data[Key.NEXT_LATENTS], sde_type=self._sde_type)
        if means:
            output["transition_means"] = step.mean
            output["transition_stds"] = step.step_std
        if learns:
            output["velocities"] = velocity
        return output

    @contextmanager
    def _reference(self) -> Iterator[None]:
        """Inside, the transformer is the KL's reference; afterwards it has the actor's weights again."""
        if self.config.kl_reference == "base":
            with adapter_active(self.transformer, None):
                yield
            return
        weights = self.average.shadow_params if self.start is None else self.start.values()
        own = [parameter.data for parameter in self._parameters]
        try:
            # Exchanged, not copied, so that nothing is rounded and no memory is needed.
            for parameter, values in zip(self._parameters, weights, strict=True):
                parameter.data = values
            yield
        finally:
            for parameter, values in zip(self._parameters, own, strict=True):
                parameter.data = values

    @property
    def _kl_of_means(self) -> bool:
        """True if the KL to the reference compares transition means."""
        return self.config.use_kl_loss and self.config.kl_loss_type == "gaussian"

    @property
    def _compares_means(self) -> bool:
        """True if the objective compares transition means."""
        return self.config.diffusion_loss.objective.needs_old_means

    def _velocity(self, flat: dict[str, Tensor], cond: Conditioning) -> Tensor:
        latents, timesteps = flat[Key.LATENTS], flat[Key.TIMESTEPS]
        # The engine embeds timesteps in its own precision; rounding them alike closes that part of the gap.
        if self._timestep_dtype is not None:
            timesteps, cond = self._model.as_embedded(timesteps, cond, self._timestep_dtype)
        with self._accelerator.autocast():
            return self._model.velocity(
                self.transformer, latents, timesteps, cond, detach_unconditional=self.config.detach_unconditional
            )

    def _transition(self, flat: dict[str, Tensor], velocity: Tensor) -> Transition:
        levels = (flat[Key.SIGMAS], flat[Key.NEXT_SIGMAS])
        return transition(flat[Key.LATENTS], velocity, *levels, noise_level=self._noise_level, sde_type=self._sde_type)

    def _refuse(self, update: "_Update", mini: MiniBatch) -> None:
        """Find the samples or pairs whose gradient is not finite, by one backward pass each, and raise. The gradient is
        a sum over all processes, so all of them come here, each with equally many samples."""
        bad = []
        # This is slow, but it runs once, right before the run ends.
        for place in torch.arange(len(mini.rows)).split(2 if update.mode.objective.paired else 1):
            self.optimizer.zero_grad(set_to_none=True)
            self._backward(update, mini.part(place))
            if not all(bool(p.grad.isfinite().all()) for p in self._parameters if p.grad is not None):
                bad += mini.rows[place].tolist()
        self._raise_non_finite("gradient", bad)

    def _raise_non_finite(self, what: str, samples: list[int]) -> NoReturn:
        """Raise with all processes' samples in the message, this one's in ``samples``; every process must call."""
        self.optimizer.zero_grad(set_to_none=True)
        shares = gather_object([samples])
        where = "in the sum of a mini-batch (no single sample is to blame)"
        if any(shares):
            # Each process numbers the rows of its own share. Eight are enough to find a pattern, and leave the remedy
            # in sight.
            process = [f" of process {number}" if len(shares) > 1 else "" for number in range(len(shares))]
            rows = [f"rows {own[:8]}{of}" for own, of in zip(shares, process, strict=True) if own]
            where = f"for {sum(map(len, shares))} samples of the batch ({', '.join(rows)})"
        raise NonFiniteUpdateError(
            f"non-finite {what} {where}; the optimizer was not stepped. Try a lower "
            "actor_rollout_ref.actor.optim.lr, or float32 for actor_rollout_ref.model.dtype",
            samples,
        )

    def _metrics(
        self, mini_steps: Sequence[LossMetrics], norms: Sequence[float], update: "_Update"
    ) -> dict[str, float]:
        """Metrics of an update and of the correction."""
        metrics = metrics_of_update(mini_steps)
        if norms:
            metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/lr"] = self._lr
        # Bypass mode measures inside the actor, and its metrics have the actor's prefix, as in verl.
        prefix = "actor/" if update.mode.bypasses else ""
        return metrics | {f"{prefix}{name}": value for name, value in update.gap.compute().items()}


@dataclass(frozen=True)
class _Update:
    """State that all optimizer steps of an update share."""

    batch: TensorDict
    steps: RecordedSteps
    mode: ModeInForce
    gap: MetricAccumulator  # measurements of the correction
    keeps_old: bool  # the mini-batches will be learned from again

    def corrects(self, mini: MiniBatch) -> bool:
        """True if the correction uses the update's own log-probs, not a scoring pass's."""
        return self.mode.bypasses or mini.old is None

    def correct(self, mini: MiniBatch, present: OldPolicy) -> OldPolicy:
        """Add weights and rejection to the current policy's log-probs of a mini-batch, and their metrics to ``gap``."""
        if not self.steps.has_rollout_log_probs:
            return present
        # Only these scalars: indexing the whole batch would copy its latents.
        numbers = correction_numbers(self.batch)[mini.rows]
        corrected, moments = correct_old_policy(present, numbers, self.mode.rollout_correction)
        self.gap.add(moments)
        return corrected


def _by_image(values: Mapping[str, Tensor], window: int) -> dict[str, Tensor]:
    """Values of rows ``(n, ...)`` as ``(n / window, window, ...)``."""
    return {name: value.unflatten(0, (-1, window)) for name, value in values.items()}


class _Step(NamedTuple):
    """Results of an optimizer step."""

    metrics: LossMetrics
    mini: MiniBatch  # without images that have no gradient, and with its old policy
    log_probs: Float[Tensor, "M W"]  # the current policy's before the step, on the host
    norm: float | None  # the gradient's; ``None`` if rejection kept nothing and no step was taken


class _Accumulated(NamedTuple):
    """Results of the passes over a mini-batch, besides gradients."""

    metrics: LossMetrics
    log_probs: Float[Tensor, "M W"]  # the current policy's, on the device
    means: list[Tensor]  # its transition means ``(n, *L)`` of each micro-batch, queued to the host for later epochs
    corrected: OldPolicy | None  # the current policy with weights and rejection, if a scoring pass computed them ahead


def _read(log_probs: Tensor, metrics: LossMetrics, norm: Tensor) -> tuple[Tensor, LossMetrics, float]:
    """Copy an optimizer step's figures to the host: its only host sync."""
    parts = [log_probs.flatten(), metrics.sums, metrics.extremes, norm.reshape(1)]
    # One tensor and so one transfer; float64 holds float32 log-probs and counts exactly.
    figures = torch.cat([part.double() for part in parts]).cpu()
    values, sums, extremes, size = figures.split([len(part) for part in parts])
    return values.view(log_probs.shape).to(log_probs.dtype), LossMetrics(metrics.names, sums, extremes), float(size)


def on_any_process(flag: Tensor | bool) -> bool:
    """True if ``flag``, one boolean, is true on any process. Collective: every process must call. A process that stops
    alone leaves the others waiting in the next collective, which with a sharded transformer is the next forward
    pass."""
    return bool(largest_on_any_process(flag))


def largest_on_any_process(number: Tensor | int) -> int:
    """The largest ``number``, one that is whole, of all processes. Collective, as ``on_any_process``."""
    state = PartialState()
    if state.num_processes == 1:
        return int(number)
    # NCCL reduces integers, not booleans.
    largest = torch.as_tensor(number, device=state.device).int()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)
