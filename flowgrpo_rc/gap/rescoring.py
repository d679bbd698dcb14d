"""Rescore a few stored transitions of every batch, to measure how far engine and actor are apart, and why.

The log-prob that the engine recorded differs from the actor's present one for two reasons: the engine computes
differently with the same weights (**engine gap**), and the actor has moved on since (**staleness**). Rescoring under
the adapter that drew the batch, and once more under the present one, separates them:

    rollout - present = (rollout - actor at the engine's version) + (actor at the engine's version - present)

The measurement before training, over many images, is ``flowgrpo_rc.gap.probe``.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor, NonFiniteUpdateError
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.statistics import GapSample, gap_metrics
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout.config import RolloutConfig

PREFIX = "rollout_sync/"


@dataclass
class Rescoring:
    """Measures ``rollout_sync/...`` for each batch; changes neither batch nor adapter nor random streams."""

    rollout: RolloutConfig  # Number of images to rescore, the limit for a warning, the ``sde_type``
    mode: ModeInForce  # The configured mode; the gap is compared with its clip band also after a fallback of the guard
    prompts: int  # Prompts of a batch, over all processes
    actor: DiffusionActor  # Rescores
    adapter: Any  # The trainer's ``AdapterSync``, which gives the engine's version to the actor for a while
    clip_bands: ClipBands | None = None  # Updated by every batch; None if the clip band is not calibrated
    rejection_bands: RejectionBands | None = None  # The same of the rejection band
    _warned: bool = field(default=False, init=False)

    def __call__(self, batch: TensorDict, conditioning: Conditioning, step: int) -> dict[str, float]:
        """Metrics over all processes; empty with ``rollout.probe.images=0``, and for clean images: the engine records
        no log-probs of them.

        Raises:
            NonFiniteUpdateError: a rescored log-prob is NaN or infinite on a process; the bands have not seen it.
        """
        if not self.rollout.probe.images or self.mode.objective.clean:
            return {}
        rows = self.rows(batch, step)
        # Every process must take part, also one without a row of its own: gathering waits for all.
        own = self.rescore(batch, rows, conditioning)
        sample = GapSample.concatenate(gather_object([own]))
        bad = ~torch.isfinite(sample.total)
        if bad.any():
            raise NonFiniteUpdateError(
                f"the actor gives {int(bad.sum())} of {bad.numel()} probed steps a NaN or infinite log-prob, before "
                "the update; check actor_rollout_ref.model.dtype and the adapter",
                rows[~torch.isfinite(own.total).all(1)].tolist(),
            )
        metrics = gap_metrics(sample, PREFIX)
        metrics[f"{PREFIX}version_lag"] = float(self.adapter.behind)
        metrics[f"{PREFIX}probe_forwards"] = float(sample.engine.numel() * (2 if self.adapter.behind else 1))
        self._warn(metrics, step)
        # Staleness counts here: training compares the old policy with the present one, not with the engine's version.
        for bands in filter(None, (self.clip_bands, self.rejection_bands)):
            bands.observe(sample.timesteps, sample.total)
            metrics |= bands.metrics()
        if self.mode.has_limit and self.mode.objective.clips_plain_ratio:
            # Before any learning, of a clip band that is centred at the engine.
            widths = None if self.clip_bands is None else self.clip_bands.widths(sample.timesteps).double()
            outside = self.mode.objective.limit.exceeded(sample.total, self.mode.diffusion_loss, widths)
            metrics[f"{PREFIX}outside_clip"] = float(outside.double().mean())
        return metrics

    def rows(self, batch: TensorDict, step: int) -> Int[Tensor, " b"]:
        """This process's rows of the step's images, which are spread evenly over the batch and move on by one per step.
        The choice does not depend on the number of processes."""
        # An image has one number over all processes, which follows from its prompt group and its place in that.
        n = len(batch) // len(batch[Key.GROUP].unique())
        total = self.prompts * n
        # Spread over the batch, since neighbours share a prompt.
        images = min(self.rollout.probe.images, total)
        chosen = (torch.arange(images) * total // images + step) % total
        number = batch[Key.GROUP] * n + torch.arange(len(batch)) % n
        return torch.isin(number, chosen).nonzero().flatten()

    def rescore(self, batch: TensorDict, rows: Tensor, conditioning: Conditioning) -> GapSample:
        """The gap of these rows, rescored under both adapters; in one pass if they are the same.

        Every process rescores as many rows as the one with most, so that all make the same forwards; results of the
        rows added for that are dropped.
        """
        own = len(rows)
        most = max(gather_object([own]))
        padded = batch[torch.cat([rows, rows.new_zeros(most - own)])]
        # The engine's version first: its exit restores the present one, also after an error.
        with self.adapter.actor_at_rollout_version():
            scored = self.actor.rescore(padded, conditioning)
        present = self.actor.rescore(padded, conditioning) if self.adapter.behind else scored
        scored, present = ({name: values[:own] for name, values in one.items()} for one in (scored, present))
        return GapSample.of(batch[rows], scored, present, self.rollout.algo.sde_type)

    def _warn(self, metrics: dict[str, float], step: int) -> None:
        limit = self.rollout.probe.warn_gap
        gap = metrics[f"{PREFIX}engine_gap_per_dimension"]
        if limit is None or gap <= limit or self._warned or not PartialState().is_main_process:
            return
        self._warned = True  # once per run, since the engine's precision does not change
        warnings.warn(
            f"step {step + 1}: {PREFIX}engine_gap_per_dimension is {gap:.3g}, above "
            f"actor_rollout_ref.rollout.probe.warn_gap={limit:g}: "
            "with equal weights the rollout engine and the actor disagree. Give both one precision "
            "(actor_rollout_ref.rollout.dtype, quantization) and one attention kernel, or keep "
            "diffusion_loss.clip_ratio well above the gap and correct it with algorithm.rollout_correction",
            stacklevel=3,
        )
