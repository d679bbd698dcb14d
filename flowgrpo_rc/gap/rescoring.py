"""The probe: a few stored transitions of every batch, rescored by the actor.

The log-prob that the engine recorded differs from the actor's present one for two reasons: the engine computes
otherwise with the same weights (**engine gap**), and the actor has moved on since (**staleness**). Rescoring under
the very adapter that drew the batch, and once more under the present one, tells them apart:

    rollout - present = (rollout - actor at the engine's version) + (actor at the engine's version - present)
"""

import warnings

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor, NonFiniteUpdateError
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.clipping import outside
from flowgrpo_rc.gap.units import GapSample, gap_metrics, to_nats
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.sde import transition_kl
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.config import FlowGRPOConfig

PREFIX = "rollout_sync/"


class Probe:
    """Measures ``rollout_sync/...`` for each batch; leaves the batch, the adapter and all random streams alone.

    Args:
        config: how many images to probe, when to warn, the clip band to compare with.
        actor: rescores.
        adapter: knows the engine's version and can give it to the actor for a while.
        clip, rejection: bands that learn from what is measured, where they are configured.
    """

    def __init__(
        self,
        config: FlowGRPOConfig,
        actor: DiffusionActor,
        adapter: AdapterSync,
        clip: ClipBands | None = None,
        rejection: RejectionBands | None = None,
    ) -> None:
        self._rollout, self._loss = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.diffusion_loss
        self._clips = config.rollout_correction.loss_type == "ppo_clip" and not self._loss.needs_old_means
        self._actor, self._adapter, self._clip, self._rejection = actor, adapter, clip, rejection
        self._total = config.data.train_batch_size * self._rollout.n
        self._images = min(self._rollout.probe.images, self._total)
        self._warned = False

    def __call__(self, batch: TensorDict, conditioning: Conditioning, step: int) -> dict[str, float]:
        """Metrics over all processes; empty when the probe is off.

        Raises:
            NonFiniteUpdateError: a rescored log-prob is NaN or infinite, on whatever process; no band has seen it.
        """
        if not self._images:
            return {}
        rows = self.rows(batch, step)
        own = self.rescore(batch, rows, conditioning)
        sample = GapSample.concatenate(gather_object([own]))
        _check_finite(sample, own, rows)
        metrics = gap_metrics(sample, PREFIX)
        metrics[f"{PREFIX}version_lag"] = float(self._adapter.behind)
        metrics[f"{PREFIX}probe_forwards"] = float(sample.engine.numel() * (2 if self._adapter.behind else 1))
        self._warn(metrics, step)
        for bands in filter(None, (self._clip, self._rejection)):
            bands.observe(sample.timesteps, sample.total)
            metrics |= bands.metrics()
        if self._clips:
            metrics[f"{PREFIX}outside_clip"] = self._outside_clip(sample)
        return metrics

    def rows(self, batch: TensorDict, step: int) -> Int[Tensor, " b"]:
        """This process's rows of the step's images, which are spread evenly over the batch and move on by one a step.

        Which images are probed does not depend on the number of processes.
        """
        chosen = (torch.arange(self._images) * self._total // self._images + step) % self._total
        number = batch["group"] * self._rollout.n + torch.arange(len(batch)) % self._rollout.n
        return torch.isin(number, chosen).nonzero().flatten()

    def rescore(self, batch: TensorDict, rows: Tensor, conditioning: Conditioning) -> GapSample:
        """The gap of these rows, split: rescored under both adapters; in one pass when they are the same."""
        part = batch[rows]
        recorded, timesteps = part["rollout_log_probs"].double(), part["timesteps"].double()
        means = part.get("rollout_means", None)
        dimensions = part["latents"].shape[2:].numel()
        if not len(rows):
            return GapSample(timesteps, recorded, recorded, recorded, dimensions, None if means is None else recorded)
        with self._adapter.actor_at_rollout_version():
            scored = self._actor.rescore(part, conditioning)
        now = self._actor.rescore(part, conditioning) if self._adapter.behind else scored
        stds = scored["transition_stds"].double()
        kl = None
        if means is not None:
            kl = dimensions * transition_kl(
                means.double().flatten(0, 1), scored["transition_means"].double().flatten(0, 1), stds.flatten()
            ).view(stds.shape)
        return GapSample(
            timesteps,
            engine=scored["log_probs"].double() - recorded,
            staleness=now["log_probs"].double() - scored["log_probs"].double(),
            to_nats=to_nats(stds, dimensions, self._rollout.algo.sde_type),
            dimensions=dimensions,
            kl=kl,
        )

    def _outside_clip(self, sample: GapSample) -> float:
        """Share of the probed steps that a clip centred at the engine's log-probs leaves out before any learning."""
        widths = None if self._clip is None else self._clip.widths(sample.timesteps).double()
        return float(outside(sample.total, self._loss, widths).double().mean())

    def _warn(self, metrics: dict[str, float], step: int) -> None:
        limit, gap = self._rollout.probe.warn_gap, metrics[f"{PREFIX}engine_gap_per_dimension"]
        if limit is None or gap <= limit or self._warned or not PartialState().is_main_process:
            return
        self._warned = True
        warnings.warn(
            f"step {step + 1}: {PREFIX}engine_gap_per_dimension is {gap:.3g}, above "
            f"actor_rollout_ref.rollout.probe.warn_gap={limit:g}: "
            "with equal weights the rollout engine and the actor disagree. Give both one precision "
            "(actor_rollout_ref.rollout.dtype, quantization) and one attention kernel, or keep "
            "diffusion_loss.clip_ratio well above the gap and correct it with algorithm.rollout_correction",
            stacklevel=3,
        )


def _check_finite(sample: GapSample, own: GapSample, rows: Tensor) -> None:
    bad = ~torch.isfinite(sample.total)
    if bad.any():
        raise NonFiniteUpdateError(
            f"the actor gives {int(bad.sum())} of {bad.numel()} probed steps a NaN or infinite log-prob, before the "
            "update; check actor_rollout_ref.model.dtype and the adapter",
            rows[~torch.isfinite(own.total).all(1)].tolist(),
        )
