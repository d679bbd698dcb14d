"""Score trajectories and update the adapter from them.

One optimizer step sees one mini-batch: the gradients of its micro-batches' loss *sums* are added, over ranks too,
and divided once by the global denominator, so that the result does not depend on how the batch was cut.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from flowgrpo_rc.actor.agreement import on_any_process, rows_in_words
from flowgrpo_rc.actor.config import DiffusionActorConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy, correct_old_policy
from flowgrpo_rc.correction import MetricAccumulator
from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.loss import LossMetrics, diffusion_loss_sums
from flowgrpo_rc.models.base import Conditioning, DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import adapter_disabled, adapter_parameters, attach_lora, base_parameters, load_lora
from flowgrpo_rc.sde import Transition, log_prob, transition

BUCKET_BYTES = 256 * 2**20
"""Bytes of gradients that are summed over ranks in one collective, and copied for it at most."""
COMPILE_BACKEND = "inductor"
"""What ``torch.compile`` hands the transformer's blocks to."""

_TRANSITION_KEYS = (Key.LATENTS, Key.NEXT_LATENTS, Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS)
_LOSS_KEYS = (
    *(Key.ROLLOUT_LOG_PROBS, Key.ADVANTAGES, Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS),
    *(Key.CLIP_WIDTHS, Key.ROLLOUT_RS_BOUNDS),
)
"""What the loss reads of a batch on the device, besides the old policy."""


def buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The tensors in their order, cut where they would pass ``limit`` bytes; one that is larger goes alone."""
    bucket: list[Tensor] = []
    taken = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and taken + size > limit:
            yield bucket
            bucket = []
            taken = 0
        bucket.append(tensor)
        taken += size
    if bucket:
        yield bucket


class NonFiniteUpdateError(RuntimeError):
    """A log-prob, loss or gradient is not finite; raised before the optimizer moves, with the samples to blame.

    Every process of a run raises it at the same place, wherever the samples are.
    """

    def __init__(self, message: str, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.samples = list(samples)
        """Rows of the batch on this process."""


@dataclass(frozen=True)
class UpdateResult:
    """What ``DiffusionActor.update`` did."""

    metrics: dict[str, float]
    optimizer_steps: int
    """Steps taken; a mini-batch of which rejection kept nothing takes none."""


class DiffusionActor:
    """The trained policy: ``model``'s transformer with a LoRA, its optimizer and its learning-rate schedule.

    Args:
        model: the loaded pipeline; the LoRA is attached to its own transformer.
        config: objective, optimizer and rollout correction.
        lora: rank, alpha and target modules; gradient checkpointing and compilation.
        accelerator: an ``accelerate.Accelerator``: device, precision and processes.
        sde_type, noise_level: of the rollouts' stochastic steps.
        total_optimizer_steps: length of the learning-rate schedule.
        score_batch_size: images per forward of the scoring pass; ``None``: the update's micro-batch.
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
    ) -> None:
        from diffusers.optimization import get_scheduler

        self._model = model
        self._accelerator = accelerator
        self.config = config
        """As it was configured; ``update`` is told the mode in force."""
        self._sde_type = sde_type
        self._noise_level = noise_level
        self._lr = config.optim.lr
        self._score_batch_size = score_batch_size or config.ppo_micro_batch_size_per_gpu
        self.transformer: Any = model.transformer
        frozen = sum(parameter.numel() for parameter in base_parameters(self.transformer).values())
        attach_lora(self.transformer, model, lora, dtype=torch_dtype(lora.lora_dtype), device=accelerator.device)
        self.recomputes = lora.checkpoints_gradients(frozen)
        """Whether activations are recomputed in the backward pass (gradient checkpointing)."""
        if self.recomputes:
            self.transformer.enable_gradient_checkpointing()
        self._compiled = lora.torch_compile
        if lora.torch_compile:
            self.transformer.compile_repeated_blocks(backend=COMPILE_BACKEND)
        self._parameters = list(adapter_parameters(self.transformer).values())
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        self.lr_scheduler = get_scheduler(
            optim.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=optim.warm_up(total_optimizer_steps),
            num_training_steps=max(1, total_optimizer_steps),
        )
        self.average: Any = None
        self.load_average(None)

    def load_adapter(self, folder: Path) -> None:
        """Read LoRA weights that ``save_lora`` wrote; their average, if one is kept, starts from them.

        Raises:
            AdapterMismatchError: the file's adapter is not of this shape.
        """
        load_lora(self.transformer, folder)
        self.load_average(None)

    def load_average(self, state: dict[str, Any] | None) -> None:
        """Take over the average's ``state_dict``, or start one from the present weights; the decay is the config's."""
        if self.config.ema_decay is None:
            return
        from diffusers.training_utils import EMAModel

        self.average = EMAModel(self._parameters, decay=self.config.ema_decay, foreach=True)
        if state is not None:
            self.average.load_state_dict(state | {"decay": self.config.ema_decay})
            self.average.to(device=self._accelerator.device)

    def averaged_state(self) -> dict[str, Tensor] | None:
        """The averaged LoRA weights by name; ``None`` when no average is kept."""
        if self.average is None:
            return None
        return dict(zip(adapter_parameters(self.transformer), self.average.shadow_params, strict=True))

    def load_optimizer(self, moments: dict[int, Any], taken: int) -> None:
        """Go on with AdamW's ``moments`` after ``taken`` steps of the schedule; options are this configuration's."""
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.lr_scheduler.load_state_dict(
            {**self.lr_scheduler.state_dict(), "last_epoch": taken, "_step_count": taken + 1}
        )
        (group,) = self.optimizer.param_groups
        (scale,) = self.lr_scheduler.lr_lambdas
        group["lr"] = self.config.optim.lr * scale(taken)
        self.lr_scheduler._last_lr = [group["lr"]]

    @torch.no_grad()
    def score(self, batch: TensorDict, conditioning: Conditioning) -> OldPolicy:
        """The present policy at the recorded steps, as the old one of the next update, on the host.

        It has means where the objective compares them, and is not corrected yet.
        """
        parts = torch.arange(len(batch)).split(self._score_batch_size)
        return OldPolicy.concatenate([self._as_old_policy(self._forward(batch[p], conditioning)) for p in parts])

    @torch.no_grad()
    def rescore(self, batch: TensorDict, conditioning: Conditioning) -> dict[str, Tensor]:
        """The recorded steps under the present policy with their transitions, on the host.

        ``log_probs`` and ``transition_stds`` ``(B, W)``, ``transition_means`` ``(B, W, *L)``.
        """
        rows = torch.arange(len(batch)).split(self._score_batch_size)
        parts = [self._forward(batch[r], conditioning, means=True) for r in rows]
        return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}

    def gradients(
        self,
        batch: TensorDict,
        conditioning: Conditioning,
        losses: Sequence[Callable[[dict[str, Tensor], TensorDict], Float[Tensor, ""]]],
    ) -> list[Float[Tensor, " parameters"]]:
        """The adapter's gradient of each loss, summed over the batch; nothing moves. All losses share a forward, unless
        the transformer is compiled.

        Args:
            batch: recorded steps, and whatever the losses read.
            conditioning: what ``prompt_index`` points into.
            losses: each takes the forward's output for a micro-batch (``log_probs`` and ``transition_stds`` ``(b, W)``,
                ``transition_means`` ``(b, W, *L)``, on the actor's device) and that micro-batch, and returns a sum.

        Returns:
            Flat, float32, on the host; of this process alone.

        Raises:
            NonFiniteUpdateError: a log-prob or a gradient is not finite; of a gradient it names the micro-batch.
        """
        count = sum(parameter.numel() for parameter in self._parameters)
        sums = [torch.zeros(count, device=self._accelerator.device) for _ in losses]
        for rows in torch.arange(len(batch)).split(self.config.ppo_micro_batch_size_per_gpu):
            data = batch[rows]
            output: dict[str, Tensor] = {}
            for number, loss in enumerate(losses):
                if self._compiled or not output:
                    output = self._forward(data, conditioning, means=True, reference=False)
                    self._check_finite(output, rows)
                # A compiled backward pass gives its buffers away, so that there is one for each forward.
                shared = not self._compiled and number + 1 < len(losses)
                found = torch.autograd.grad(
                    loss(output, data), self._parameters, retain_graph=shared, materialize_grads=True
                )
                flat = torch.cat([gradient.float().reshape(-1) for gradient in found])
                finite = flat.isfinite().all()
                if on_any_process(~finite):
                    self._raise_non_finite("gradient", [] if finite else rows.tolist())
                sums[number] += flat
        return [flat.cpu() for flat in sums]

    def update(
        self,
        batch: TensorDict,
        conditioning: Conditioning,
        mini_batches: Sequence[MiniBatch],
        mode: ModeInForce | None = None,
        *,
        gap: MetricAccumulator | None = None,
    ) -> UpdateResult:
        """Take ``ppo_epochs`` passes of one optimizer step per mini-batch.

        Args:
            batch: trajectories with ``advantages``, this process's share; with calibrated limits also ``clip_widths``
                and ``rollout_rs_bounds``.
            conditioning: what ``prompt_index`` points into.
            mini_batches: the rows and the old policy of each optimizer step. In decoupled mode the first may come
                without: before the first optimizer step the present policy is the old one, so that its own forward
                supplies log-probs, weights and rejection, also for later epochs.
            mode: by which correction and objective to learn; ``None``: those of the configuration.
            gap: what correction has measured of this batch so far; its metrics are reported with the update's.

        Raises:
            NonFiniteUpdateError: a log-prob, loss or gradient is not finite; weights and optimizer are untouched
                by the offending step.
            ValueError: no mini-batches, or a later one without an old policy in decoupled mode.
        """
        if not mini_batches:
            raise ValueError("update() was given no mini-batches")
        mode = mode or ModeInForce.configured(self.config)
        if not mode.bypasses and any(mini.old is None for mini in mini_batches[1:]):
            raise ValueError(
                "update() was given a mini-batch after the first without an old policy; in decoupled mode score() its "
                "rows, for an optimizer step comes before it"
            )
        update = _Update(batch, conditioning, mode, gap or MetricAccumulator())
        mini_batches = list(mini_batches)
        metrics: list[LossMetrics] = []
        norms: list[float] = []
        for _ in range(self.config.ppo_epochs):
            for number, mini in enumerate(mini_batches):
                step_metrics, mini_batches[number], norm = self._optimizer_step(update, mini)
                metrics.append(step_metrics)
                if norm is not None:
                    norms.append(norm)
        return UpdateResult(self._metrics(metrics, norms, update), len(norms))

    def _optimizer_step(self, update: "_Update", mini: MiniBatch) -> tuple[LossMetrics, MiniBatch, float | None]:
        """Accumulate one mini-batch, reduce over ranks, divide, clip, step.

        Returns its metrics, the mini-batch with its old policy, and the gradient's norm; ``None`` where rejection kept
        nothing, and no step was taken.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = torch.arange(len(mini.rows)).split(self.config.ppo_micro_batch_size_per_gpu)
        micro = [self._backward(update, mini.part(part)) for part in parts]
        found = [old for _, old in micro if old is not None]
        if found:
            mini = mini._replace(old=OldPolicy.concatenate(found))
        total = reduce(add, [metrics for metrics, _ in micro]).all_reduce()
        kept, denominator = total.kept_and_denominator()
        # Not even moments and weight decay may move the weights where nothing is learned.
        if kept == 0:
            warnings.warn("rollout correction rejected a whole mini-batch: its optimizer step is skipped", stacklevel=3)
            return total, mini, None
        self._reduce_gradients(denominator)
        norm = float(clip_grad_norm_(self._parameters, self.config.grad_clip))
        if not norm < float("inf"):  # NaN included
            self._refuse(update, mini)
        # Read before the schedule moves on: the rate of the step that is taken.
        self._lr = float(self.lr_scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.lr_scheduler.step()
        if self.average is not None:
            self.average.step(self._parameters)
        return total, mini, norm

    def _backward(self, update: "_Update", micro: MiniBatch) -> tuple[LossMetrics, OldPolicy | None]:
        """Add one micro-batch's gradients; returns its metrics, and its old policy where that was found here."""
        data = update.batch[micro.rows]
        output = self._forward(data, update.conditioning)
        self._check_finite(output, micro.rows)
        mode = update.mode
        old = micro.old
        found = None
        if old is None and mode.bypasses:
            old = OldPolicy.of_rollout(data)
        elif old is None:
            found, correction = correct_old_policy(self._as_old_policy(output), data, mode.rollout_correction)
            old = found
            update.gap.add(correction)
        sums = diffusion_loss_sums(mode, output, self._loss_data(data, old, mode))
        self._accelerator.backward(sums.loss_sum)
        if sums.correction is not None:
            update.gap.add(sums.correction)
        return sums.metrics, found

    def _check_finite(self, output: dict[str, Tensor], rows: Int[Tensor, " b"]) -> None:
        """Every process raises where one has found something, so that none goes on to a forward alone."""
        finite = torch.isfinite(output["log_probs"]).all(1)
        if on_any_process(~finite.all()):
            self._raise_non_finite("log-prob", rows[~finite.cpu()].tolist())

    def _forward(
        self, data: TensorDict, conditioning: Conditioning, *, means: bool = False, reference: bool = True
    ) -> dict[str, Tensor]:
        """All steps of all images in one forward: log-probs ``(b, W)``, and where they are needed the transitions.

        Without ``reference`` those of the reference policy are left out, whatever the configuration wants of them.
        """
        device = self._accelerator.device
        b, w = data[Key.LATENTS].shape[:2]
        flat = {name: data[name].flatten(0, 1).to(device) for name in _TRANSITION_KEYS}
        cond = conditioning.rows(data[Key.PROMPT_INDEX].repeat_interleave(w), device)
        step = self._transition(flat, cond)
        output = {"log_probs": log_prob(step, flat[Key.NEXT_LATENTS], sde_type=self._sde_type).view(b, w)}
        if means or self.config.use_kl_loss or self._compares_means:
            output["transition_means"] = step.mean.unflatten(0, (b, w))
            output["transition_stds"] = step.step_std.view(b, w)
        # A scoring pass has no use for the reference.
        if reference and self.config.use_kl_loss and torch.is_grad_enabled():
            with torch.no_grad(), adapter_disabled(self.transformer):
                output["ref_transition_means"] = self._transition(flat, cond).mean.unflatten(0, (b, w))
        return output

    def _loss_data(self, data: TensorDict, old: OldPolicy, mode: ModeInForce) -> dict[str, Tensor]:
        """The keys that the loss reads, on the actor's device; latents stay where they are."""
        read = {name: data[name] for name in _LOSS_KEYS if name in data.keys()} | old.batch_keys()  # noqa: SIM118
        # Means go to the device only where the objective reads them, under the name that this mode reads.
        means = read.pop(Key.OLD_TRANSITION_MEANS, None)
        if self._compares_means and means is not None:
            read[Key.ROLLOUT_MEANS if mode.bypasses else Key.OLD_TRANSITION_MEANS] = means
        return {name: value.to(self._accelerator.device) for name, value in read.items()}

    @property
    def _compares_means(self) -> bool:
        return self.config.diffusion_loss.objective.needs_old_means

    def _as_old_policy(self, output: dict[str, Tensor]) -> OldPolicy:
        """A forward's output as constants on the host."""
        means = output["transition_means"].detach().cpu() if self._compares_means else None
        return OldPolicy(log_probs=output["log_probs"].detach().cpu(), means=means)

    def _transition(self, flat: dict[str, Tensor], cond: Conditioning) -> Transition:
        with self._accelerator.autocast():
            velocity = self._model.velocity(
                self.transformer,
                flat[Key.LATENTS],
                flat[Key.TIMESTEPS],
                cond,
                detach_unconditional=self.config.detach_unconditional,
            )
        return transition(
            flat[Key.LATENTS],
            velocity,
            flat[Key.SIGMAS],
            flat[Key.NEXT_SIGMAS],
            noise_level=self._noise_level,
            sde_type=self._sde_type,
        )

    def _reduce_gradients(self, denominator: float) -> None:
        """Sum the gradients over ranks, some at a time, and divide them by the global denominator."""
        # Every rank must bring the same shapes to the collectives, whatever its rows have reached.
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for bucket in buckets(gradients, BUCKET_BYTES):
            flat = parameters_to_vector(bucket)
            if self._accelerator.num_processes > 1:
                torch.distributed.all_reduce(flat)
            flat /= denominator
            vector_to_parameters(flat, bucket)

    def _refuse(self, update: "_Update", mini: MiniBatch) -> None:
        """The gradient is not finite: find the samples it comes from, one backward each, and raise.

        The gradient is that of all processes, so all come here, and each has as many samples as any other.
        """
        bad = []
        for place in torch.arange(len(mini.rows)).split(1):
            self.optimizer.zero_grad(set_to_none=True)
            self._backward(update, mini.part(place))
            if not all(bool(p.grad.isfinite().all()) for p in self._parameters if p.grad is not None):
                bad += mini.rows[place].tolist()
        self._raise_non_finite("gradient", bad)

    def _raise_non_finite(self, what: str, samples: list[int]) -> NoReturn:
        """Every process must come here; the message names the samples of all, ``samples`` of the error its own."""
        self.optimizer.zero_grad(set_to_none=True)
        count, rows = rows_in_words(samples)
        nowhere = "in the sum of a mini-batch (no single sample is to blame)"
        where = f"for {count} samples of the batch ({rows})" if count else nowhere
        raise NonFiniteUpdateError(
            f"non-finite {what} {where}; the optimizer was not stepped. Try a lower "
            "actor_rollout_ref.actor.optim.lr, or float32 for actor_rollout_ref.model.dtype",
            samples,
        )

    def _metrics(
        self, mini_steps: Sequence[LossMetrics], norms: Sequence[float], update: "_Update"
    ) -> dict[str, float]:
        """The update's metrics: means over all mini-steps, and ``..._first`` of the first."""
        first = mini_steps[0].compute()
        metrics = reduce(add, mini_steps).compute()
        for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_inert"):
            # A rejected element counts as a ratio of 1, which would thin out the share of those that are clipped.
            metrics[f"{name}_first"] = first[name] / (first["actor/kept_fraction"] or 1.0)
        metrics["actor/log_ratio_abs_mean_first"] = first["actor/log_ratio_abs_mean"]
        metrics["actor/ratio_deviation_first"] = max(
            abs(first["actor/ratio_max"] - 1), abs(first["actor/ratio_min"] - 1)
        )
        if norms:
            metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/lr"] = self._lr
        prefix = "actor/" if update.mode.bypasses else ""
        return metrics | {f"{prefix}{name}": value for name, value in update.gap.compute().items()}


@dataclass(frozen=True)
class _Update:
    """What all optimizer steps of an update share."""

    batch: TensorDict
    conditioning: Conditioning
    mode: ModeInForce
    gap: MetricAccumulator
    """Collects what correction measures."""
