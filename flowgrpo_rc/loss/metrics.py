"""Loss metrics as sums on the device: added over micro-batches and ranks, sent to the host once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_rc.loss.policy import SAFETY_BOUND, PolicyInputs, PolicyLimits, PolicyTerms, kept

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
        policy: PolicyInputs,
        terms: PolicyTerms,
        limits: PolicyLimits,
        *,
        loss_sum: Tensor,
        denominator: Tensor,
        kl_sum: Tensor,
        valid: Tensor | None = None,
    ) -> "LossMetrics":
        """From what one micro-batch's objective was given and what it returned.

        Args:
            loss_sum, denominator, kl_sum: of the micro-batch, reduced.
            valid: the elements that count (``None``: all of them); what is not kept has a log ratio of 0.
        """
        # Not clamped, so that one which is NaN or infinite shows; all but its mean size are of the clamped one.
        log_ratio = kept(policy.log_prob - policy.old_log_prob, policy.keep)
        ratio = torch.exp(terms.log_ratio)
        high = ratio > 1 + limits.clip_high
        low = ratio < 1 - limits.clip_low
        dual = torch.zeros_like(high)
        dual_clip = limits.dual_clip if terms.left_out is None else None
        if dual_clip is not None:
            dual = (ratio > dual_clip) & (policy.advantages < 0)
        # Outside the clip band a step that leads further out has no gradient; one that leads back keeps it.
        inert = terms.left_out
        if inert is None:
            inert = (high & (policy.advantages > 0)) | (low & (policy.advantages < 0)) | dual
        valid = torch.ones_like(high) if valid is None else valid
        columns = [
            loss_sum,
            denominator,
            valid.sum(),
            (valid if policy.keep is None else policy.keep).sum(),
            -torch.clamp(log_ratio, -SAFETY_BOUND, SAFETY_BOUND).sum(),
            log_ratio.abs().sum(),
            torch.where(valid, ratio, 0.0).sum(),
            high.sum(),
            low.sum(),
            inert.sum(),
            dual.sum(),
            kl_sum,
        ]
        return cls(
            # In float64, where counts stay exact and sums of many small losses keep their digits.
            torch.stack([column.detach().double() for column in columns]),
            torch.where(valid, ratio, torch.inf).min(),
            torch.where(valid, ratio, -torch.inf).max(),
            dual_clip is not None,
        )

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
        operations = torch.distributed.ReduceOp
        sums = self.sums.clone()
        # The smallest is minus the largest of the negatives, so that one collective finds both.
        extremes = torch.stack([-self.ratio_min, self.ratio_max])
        torch.distributed.all_reduce(sums, operations.SUM, group=group)  # type: ignore[arg-type]
        torch.distributed.all_reduce(extremes, operations.MAX, group=group)  # type: ignore[arg-type]
        return LossMetrics(sums, -extremes[0], extremes[1], self.dual_clip)

    @property
    def denominator(self) -> Tensor:
        """What the loss sum is to be divided by, on the device."""
        return self.sums[_SUMS.index("denominator")]

    def kept_and_denominator(self) -> tuple[float, float]:
        """How many elements rejection kept, and what the loss sum is to be divided by."""
        total = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        return total["kept"], total["denominator"]

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
        mean, least, most = (total["ratio"] / n, *host[-2:]) if total["elements"] else (1.0, 1.0, 1.0)
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
            "actor/ratio_min": least,
            "actor/ratio_max": most,
            "actor/kl_loss": total["kl_loss"] / denominator,
        }
