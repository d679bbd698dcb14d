"""Loss metrics as sums on the device: added over micro-batches and ranks, sent to the host once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from flowgrpo_rc.loss.policy import SAFETY_BOUND

_SUMS = (
    "loss",
    "denominator",
    "elements",
    "kept",
    "ppo_kl",
    "abs_log_ratio",
    "ratio",
    "clipped_high",
    "clipped_low",
    "inert",
    "dual_clipped",
    "kl_loss",
)


@dataclass
class LossMetrics:
    """Sums and extremes of one or many micro-batches; ``+`` merges them exactly."""

    sums: Tensor
    """``(12,)`` float64, in the order of ``_SUMS``."""
    ratio_min: Tensor
    ratio_max: Tensor
    dual_clip: bool = False
    """Whether the objective clips dually (token path), and so has a share of such elements to report."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        *,
        loss_sum: Tensor,
        denominator: Tensor,
        keep: Tensor | None,
        log_ratio: Tensor,
        objective_log_ratio: Tensor | None = None,
        masked: Tensor | None = None,
        advantages: Tensor,
        clip_low: float | Tensor,
        clip_high: float | Tensor,
        dual_clip: float | None = None,
        kl_sum: Tensor,
        valid: Tensor | None = None,
    ) -> "LossMetrics":
        """From one micro-batch's tensors; ``advantages`` broadcasts over ``log_ratio``.

        ``objective_log_ratio`` is the log ratio that the objective clips, where that is another one (grpo_guard);
        ``masked`` what the objective leaves out itself, instead of clipping (flow_dppo). ``valid`` are the elements
        that count (``None``: all of them); the log ratios of the others must be 0. ``log_ratio`` is not clamped, so
        that one which is NaN or infinite shows; all but its mean size are of the clamped one, as the loss is.
        """
        bounded = torch.clamp(log_ratio, -SAFETY_BOUND, SAFETY_BOUND)
        ratio = torch.exp(bounded if objective_log_ratio is None else objective_log_ratio)
        high, low, dual = ratio > 1 + clip_high, ratio < 1 - clip_low, torch.zeros_like(ratio, dtype=torch.bool)
        if dual_clip is not None:
            dual = (ratio > dual_clip) & (advantages < 0)
        inert = (high & (advantages > 0)) | (low & (advantages < 0)) | dual if masked is None else masked
        valid = torch.ones_like(dual) if valid is None else valid
        columns = [
            loss_sum,
            denominator,
            valid.sum(),
            (valid if keep is None else keep).sum(),
            -bounded.sum(),
            log_ratio.abs().sum(),
            torch.where(valid, ratio, 0.0).sum(),
            high.sum(),
            low.sum(),
            inert.sum(),
            dual.sum(),
            kl_sum,
        ]
        return cls(
            torch.stack([c.detach().double() for c in columns]),
            torch.where(valid, ratio, torch.inf).min(),
            torch.where(valid, ratio, -torch.inf).max(),
            dual_clip is not None,
        )

    @classmethod
    def merge(cls, parts: "Sequence[LossMetrics]") -> "LossMetrics":
        """Those of all micro-batches together; there must be one."""
        return reduce(add, parts)

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        return LossMetrics(
            self.sums + other.sums,
            torch.minimum(self.ratio_min, other.ratio_min),
            torch.maximum(self.ratio_max, other.ratio_max),
            self.dual_clip,
        )

    def all_reduce(self, group: object | None = None) -> "LossMetrics":
        """Merged over the ranks of ``group`` (the default group when ``None``); itself without one."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        ops, dist = torch.distributed.ReduceOp, torch.distributed
        sums = self.sums.clone()
        extremes = torch.stack([-self.ratio_min, self.ratio_max])
        dist.all_reduce(sums, ops.SUM, group=group)  # type: ignore[arg-type]
        dist.all_reduce(extremes, ops.MAX, group=group)  # type: ignore[arg-type]
        return LossMetrics(sums, -extremes[0], extremes[1], self.dual_clip)

    @property
    def denominator(self) -> Tensor:
        """What the loss sum is to be divided by, on the device."""
        return self.sums[_SUMS.index("denominator")]

    def kept_and_denominator(self) -> tuple[float, float]:
        """How many elements rejection kept, and what the loss sum is to be divided by."""
        _, denominator, _, kept = self.sums[:4].tolist()
        return kept, denominator

    def compute(self) -> dict[str, float]:
        """``actor/...`` metrics as floats, with one device-to-host transfer.

        ``pg_loss`` is the policy loss over its denominator; ``kept_fraction`` the share of elements that rejection
        kept (all other means run over all elements, a rejected one counting as ratio 1); ``ppo_kl`` the mean of
        ``log pi_old - log pi_theta``;
        ``pg_clipfrac`` the share of ratios outside the clip band (``_higher``, ``_lower``: on which side);
        ``pg_clipfrac_inert`` the share whose gradient clipping removes; ``ratio_*`` and ``log_ratio_abs_mean`` are of
        ``pi_theta/pi_old``. On the token path the elements are the valid tokens, and ``pg_clipfrac_dual`` is the share
        that the dual clip bounds (verl's ``pg_clipfrac_lower``). Without a valid element every ratio is 1.
        """
        host = torch.cat([self.sums, torch.stack([self.ratio_min, self.ratio_max]).double()]).tolist()
        total = dict(zip(_SUMS, host, strict=False))
        n = max(total["elements"], 1.0)
        mean, smallest, largest = (total["ratio"] / n, *host[-2:]) if total["elements"] else (1.0, 1.0, 1.0)
        dual = {"actor/pg_clipfrac_dual": total["dual_clipped"] / n} if self.dual_clip else {}
        denominator = total["denominator"] if total["denominator"] > 0 else 1.0
        return {
            "actor/pg_loss": total["loss"] / denominator,
            "actor/kept_fraction": total["kept"] / n,
            "actor/ppo_kl": total["ppo_kl"] / n,
            "actor/pg_clipfrac": (total["clipped_high"] + total["clipped_low"]) / n,
            "actor/pg_clipfrac_higher": total["clipped_high"] / n,
            "actor/pg_clipfrac_lower": total["clipped_low"] / n,
            "actor/pg_clipfrac_inert": total["inert"] / n,
            **dual,
            "actor/log_ratio_abs_mean": total["abs_log_ratio"] / n,
            "actor/ratio_mean": mean,
            "actor/ratio_min": smallest,
            "actor/ratio_max": largest,
            "actor/kl_loss": total["kl_loss"] / denominator,
        }
