"""The probe: a few stored transitions of every batch, rescored by the actor.

The log-prob that the engine recorded differs from the actor's present one for two reasons: the engine computes
otherwise with the same weights (**engine gap**), and the actor has moved on since (**staleness**). Rescoring under
the very adapter that drew the batch, and once more under the present one, tells them apart:

    rollout - present = (rollout - actor at the engine's version) + (actor at the engine's version - present)
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.bands import ClipBands

_PREFIX = "rollout_sync"


@dataclass(frozen=True)
class Rescored:
    """Log-probs ``(b, W)`` of the probed images, on the host."""

    rollout: Float[Tensor, "b W"]
    """As the engine recorded them."""
    same_weights: Float[Tensor, "b W"]
    """The actor's, with the adapter that drew them."""
    present: Float[Tensor, "b W"]
    """The actor's, with its adapter of now."""


class Probe:
    """Measures ``rollout_sync/...`` for each batch; leaves the batch, the adapter and all random streams alone.

    Args:
        rollout: how many images to probe, when to warn, images per prompt.
        actor: rescores.
        adapter: knows the engine's version and can give it to the actor for a while.
        gather: concatenates every process's tensor in rank order.
        images_per_batch: over all processes.
        bands: learns from what is measured, for ``clip_ratio=auto``.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        actor: DiffusionActor,
        adapter: AdapterSync,
        gather: Callable[[Tensor], Tensor],
        images_per_batch: int,
        bands: ClipBands | None = None,
    ) -> None:
        self._rollout, self._actor, self._adapter, self._gather = rollout, actor, adapter, gather
        self._total = images_per_batch
        self._images = min(rollout.probe.images, images_per_batch)
        self._bands = bands
        self._warned = False

    def __call__(self, batch: TensorDict, conditioning: Conditioning, step: int) -> dict[str, float]:
        """Metrics over all processes; empty when the probe is off."""
        if not self._images:
            return {}
        rows = self.rows(batch, step)
        scored = self.rescore(batch, rows, conditioning)
        metrics = self._metrics(scored, batch["latents"].shape[2:].numel())
        self._warn(metrics, step)
        if self._bands is not None:
            own = (batch["timesteps"][rows].flatten().tolist(), (scored.present - scored.rollout).flatten().tolist())
            for timesteps, gaps in gather_object([own]):
                self._bands.observe(timesteps, gaps)
            metrics |= self._bands.metrics()
        return metrics

    def rows(self, batch: TensorDict, step: int) -> Int[Tensor, " b"]:
        """This process's rows of the step's images, which are spread evenly over the batch and move on by one a step.

        Which images are probed does not depend on the number of processes.
        """
        chosen = (torch.arange(self._images) * self._total // self._images + step) % self._total
        number = batch["group"] * self._rollout.n + torch.arange(len(batch)) % self._rollout.n
        return torch.isin(number, chosen).nonzero().flatten()

    def rescore(self, batch: TensorDict, rows: Tensor, conditioning: Conditioning) -> Rescored:
        """The actor's log-probs of these rows under both adapters; one pass when they are the same."""
        part = batch[rows]
        recorded = part["rollout_log_probs"]
        if not len(rows):
            return Rescored(recorded, recorded, recorded)
        with self._adapter.actor_at_rollout_version():
            same_weights = self._actor.score(part, conditioning)["old_log_probs"]
        present = self._actor.score(part, conditioning)["old_log_probs"] if self._adapter.behind else same_weights
        return Rescored(recorded, same_weights, present)

    def _metrics(self, scored: Rescored, dimensions: int) -> dict[str, float]:
        gap = (scored.same_weights.double() - scored.rollout.double()).abs()
        stale = (scored.present.double() - scored.same_weights.double()).abs()
        own = [gap.sum(), stale.sum(), torch.tensor(float(gap.numel())), gap.max() if len(gap) else torch.zeros(())]
        every = self._gather(torch.stack([value.double() for value in own])[None])
        gap_sum, stale_sum, count = every[:, :3].sum(0).tolist()
        values = {
            "engine_gap_abs_mean": gap_sum / count,
            "engine_gap_abs_max": float(every[:, 3].max()),
            "staleness_abs_mean": stale_sum / count,
            "version_lag": float(self._adapter.behind),
            "probe_forwards": count * (2 if self._adapter.behind else 1),
        }
        if self._rollout.algo.sde_type != "cps":  # its log-prob leaves out 1/(2 std^2), so it is not in nats
            values["engine_gap_nats"] = values["engine_gap_abs_mean"] * dimensions
        return {f"{_PREFIX}/{name}": value for name, value in values.items()}

    def _warn(self, metrics: dict[str, float], step: int) -> None:
        limit, gap = self._rollout.probe.warn_gap, metrics[f"{_PREFIX}/engine_gap_abs_mean"]
        largest = metrics[f"{_PREFIX}/engine_gap_abs_max"]
        if limit is None or gap <= limit or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"step {step + 1}: {_PREFIX}/engine_gap_abs_mean is {gap:.3g} (largest {largest:.3g}), above "
            f"actor_rollout_ref.rollout.probe.warn_gap={limit:g}: "
            "with equal weights the rollout engine and the actor disagree. Give both one precision "
            "(actor_rollout_ref.rollout.dtype, quantization) and one attention kernel, or keep "
            "diffusion_loss.clip_ratio well above the gap and correct it with algorithm.rollout_correction",
            stacklevel=3,
        )
