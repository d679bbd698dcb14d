"""Loss metrics as sums on the device: added over micro-batches and ranks, sent to the host once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_rc.loss.policy import SAFETY_BOUND, PolicyInputs, PolicyLimits, PolicyTerms, kept


@dataclass
class LossMetrics:
    """Sums and extremes of one or many micro-batches; ``+`` merges them exactly."""

    names: tuple[str, ...]
    """Of the sums; ``dual_clipped`` is among them where the objective clips dually (token path)."""
    sums: Tensor
    """Float64, where counts stay exact and sums of many small losses keep their digits."""
    extremes: Tensor
    """``(2,)`` float64: minus the smallest ratio and the largest, so that a maximum merges both."""

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
        valid = torch.ones_like(high) if valid is None else valid
        sums = {
            "loss": loss_sum,
            "denominator": denominator,
            "kl_loss": kl_sum,
            "elements": valid.sum(),
            "kept": (valid if policy.keep is None else policy.keep).sum(),
            "ppo_kl": -torch.clamp(log_ratio, -SAFETY_BOUND, SAFETY_BOUND).sum(),
            "abs_log_ratio": log_ratio.abs().sum(),
            "ratio": torch.where(valid, ratio, 0.0).sum(),
            "clipped_high": high.sum(),
            "clipped_low": low.sum(),
        }
        # Outside the clip band a step that leads further out has no gradient; one that leads back keeps it.
        inert = (high & (policy.advantages > 0)) | (low & (policy.advantages < 0))
        if terms.left_out is not None:
            inert = terms.left_out
        elif limits.dual_clip is not None:
            dual = (ratio > limits.dual_clip) & (policy.advantages < 0)
            sums["dual_clipped"] = dual.sum()
            inert = inert | dual
        sums["inert"] = inert.sum()
        extremes = (-torch.where(valid, ratio, torch.inf).min(), torch.where(valid, ratio, -torch.inf).max())
        return cls(tuple(sums), _on_device(sums.values()), _on_device(extremes))

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        return LossMetrics(self.names, self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def all_reduce(self, group: object | None = None) -> "LossMetrics":
        """Merged over the ranks of ``group`` (the default group when ``None``); itself without one."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        operations = torch.distributed.ReduceOp
        sums = self.sums.clone()
        extremes = self.extremes.clone()
        torch.distributed.all_reduce(sums, operations.SUM, group=group)  # type: ignore[arg-type]
        torch.distributed.all_reduce(extremes, operations.MAX, group=group)  # type: ignore[arg-type]
        return LossMetrics(self.names, sums, extremes)

    @property
    def denominator(self) -> Tensor:
        """What the loss sum is to be divided by, on the device."""
        return self.sums[self.names.index("denominator")]

    def kept_and_denominator(self) -> tuple[float, float]:
        """How many elements rejection kept, and what the loss sum is to be divided by."""
        total = dict(zip(self.names, self.sums.tolist(), strict=True))
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
        *sums, minus_least, most = torch.cat([self.sums, self.extremes]).tolist()
        total = dict(zip(self.names, sums, strict=True))
        n = max(total["elements"], 1.0)
        ratio = (total["ratio"] / n, -minus_least, most) if total["elements"] else (1.0, 1.0, 1.0)
        dual = {"actor/pg_clipfrac_dual": total["dual_clipped"] / n} if "dual_clipped" in total else {}
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
            **dict(zip(("actor/ratio_mean", "actor/ratio_min", "actor/ratio_max"), ratio, strict=True)),
            "actor/kl_loss": total["kl_loss"] / denominator,
        }


def _on_device(figures: Iterable[Tensor]) -> Tensor:
    """Scalars as one tensor, in float64."""
    return torch.stack([figure.detach().double() for figure in figures])
