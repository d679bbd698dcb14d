"""A loss and its metrics as sums on the device that add up over micro-batches and ranks, and their means.

``diffusion_loss`` and ``token_loss`` share this module: ``LossInputs`` become sums, and sums become one number.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction import MetricAccumulator, RolloutCorrection
from flowgrpo_rc.loss.inputs import LossInputs, not_finite
from flowgrpo_rc.loss.policy import SAFETY_BOUND, PolicyInputs, PolicyLimits, PolicyTerms, kept
from flowgrpo_rc.messages import level_of_caller
from flowgrpo_rc.transfers import onto

VELOCITY_NORMS = {"velocity_norm": "velocities", "ref_velocity_norm": "ref_velocities"}
"""Metrics of the size of velocities, and the model output that they describe."""


@dataclass
class LossMetrics:
    """Sums and extremes of one or many micro-batches; ``+`` merges them exactly."""

    names: tuple[str, ...]
    """Names of the sums; ``dual_clipped`` is among them if the objective has a dual clip (token path)."""
    sums: Tensor
    """Float64, so that counts stay exact and sums of many small losses keep their digits."""
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
        velocity_squares: Mapping[str, Tensor] | None = None,
        needs_advantage: bool = True,
    ) -> "LossMetrics":
        """Sums of one micro-batch, from its objective's inputs and result, and from its reduced sums.

        Args:
            needs_advantage: an element with an advantage of 0 has no gradient.
            valid: elements that count (``None``: all); rejected ones count with a log ratio of 0.
            velocity_squares: those of ``LossInputs``.
        """
        # Not clamped, so that NaN and infinity show in its mean size; the other sums use the clamped one.
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
        # Outside the clip band, elements that would move further out have no gradient; the others keep theirs.
        inert = (high & (policy.advantages > 0)) | (low & (policy.advantages < 0))
        if terms.left_out is not None:
            inert = terms.left_out
        elif limits.dual_clip is not None:
            dual = (ratio > limits.dual_clip) & (policy.advantages < 0)
            sums["dual_clipped"] = dual.sum()
            inert = inert | dual
        sums["inert"] = inert.sum()
        teaching = (valid if policy.keep is None else policy.keep) & ~inert
        if policy.weights is not None:
            teaching = teaching & (policy.weights != 0)
        if needs_advantage:
            teaching = teaching & (policy.advantages != 0)
        sums["teaching"] = teaching.sum()
        sums |= {name: squares.double().sum() for name, squares in (velocity_squares or {}).items()}
        # Minus the minimum, so that one maximum over micro-batches and ranks merges both.
        extremes = (-torch.where(valid, ratio, torch.inf).min(), torch.where(valid, ratio, -torch.inf).max())
        columns = torch.stack([figure.double() for figure in sums.values()])
        return cls(tuple(sums), columns, torch.stack([end.double() for end in extremes]))

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        # Both have the same names: the micro-batches of an update share objective and mode.
        return LossMetrics(self.names, self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def with_left_out(self, rejected: int, idle: int, *, counts_rejected: bool) -> "LossMetrics":
        """Add elements without gradient that were never computed: rejected ones as ``of`` counts them, and those with
        an advantage of 0 to the denominator alone.

        Args:
            counts_rejected: the loss's denominator counts rejected elements.
        """
        names = (*self.names, "rejected", "idle")
        added = {"denominator": idle + counts_rejected * rejected, "elements": rejected, "ratio": rejected}
        added |= {"rejected": rejected, "idle": idle}
        # A rejected element's ratio is 1.
        ends = [-1.0, 1.0] if rejected else [-math.inf, -math.inf]
        # One copy to the device, which does not wait.
        figures = torch.tensor([*(added.get(name, 0) for name in names), *ends], dtype=self.sums.dtype)
        more = onto(figures, self.sums.device)
        sums = F.pad(self.sums, (0, 2)) + more[:-2]
        return LossMetrics(names, sums, torch.maximum(self.extremes, more[-2:]))

    def all_reduce(self, group: object | None = None) -> "LossMetrics":
        """Merge over the ranks of ``group`` (``None``: the default group); without ``torch.distributed`` itself."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        operations = torch.distributed.ReduceOp
        # all_reduce writes in place, and the caller may still read this rank's own sums.
        sums = self.sums.clone()
        extremes = self.extremes.clone()
        torch.distributed.all_reduce(sums, operations.SUM, group=group)  # type: ignore[arg-type]
        torch.distributed.all_reduce(extremes, operations.MAX, group=group)  # type: ignore[arg-type]
        return LossMetrics(self.names, sums, extremes)

    @property
    def denominator(self) -> Tensor:
        """Divisor of the loss sum, on the device."""
        return self.sums[self.names.index("denominator")]

    @property
    def kept(self) -> float:
        """Number of elements that rejection kept."""
        return float(self.sums[self.names.index("kept")])

    @property
    def teaching_fraction(self) -> float:
        """Share of the elements with a gradient: kept, and by weight, advantage and limit not without one."""
        total = dict(zip(self.names, self.sums.tolist(), strict=True))
        return total["teaching"] / max(total["elements"], 1.0)

    @property
    def loss(self) -> float:
        """The sum of the loss's policy term."""
        return float(self.sums[self.names.index("loss")])

    def compute(self) -> dict[str, float]:
        """``actor/...`` metrics, and ``perf/left_out_fraction``, as floats, with one device-to-host transfer.

        ``pg_loss`` is the policy loss over its denominator; ``kept_fraction`` the share of kept elements (all other
        means run over all elements, a rejected one counting as ratio 1); ``ppo_kl`` the mean of ``log pi_old - log
        pi_theta``; ``pg_clipfrac`` the share of ratios outside the clip band (``_higher``, ``_lower``: above and below
        it); ``pg_clipfrac_inert`` the share whose gradient clipping removes; ``ratio_*`` and ``log_ratio_abs_mean``
        describe ``pi_theta/pi_old``; ``velocity_norm`` and ``ref_velocity_norm``, where velocities were given, are root
        mean squares over the latent dimensions of the kept elements; ``left_out_fraction`` is the share of elements
        that were never computed (``with_left_out``): no mean but ``pg_loss`` covers those with an advantage of 0. On
        the token path the elements are the valid tokens, and ``pg_clipfrac_dual`` is the share that the dual clip
        bounds (verl's ``pg_clipfrac_lower``). Without a valid element every ratio is 1.
        """
        *sums, minus_least, most = torch.cat([self.sums, self.extremes]).tolist()
        total = dict(zip(self.names, sums, strict=True))
        # A rank may have no valid token; its sums are 0 then, and so are its shares.
        n = max(total["elements"], 1.0)
        mean, least, most = (total["ratio"] / n, -minus_least, most) if total["elements"] else (1.0, 1.0, 1.0)
        dual = {"actor/pg_clipfrac_dual": total["dual_clipped"] / n} if "dual_clipped" in total else {}
        denominator = total["denominator"] if total["denominator"] > 0 else 1.0
        at_least_one = max(total["kept"], 1.0)
        left_out = {}
        if "idle" in total:
            everything = max(total["elements"] + total["idle"], 1.0)
            left_out = {"perf/left_out_fraction": (total["rejected"] + total["idle"]) / everything}
        norms = {f"actor/{n}": math.sqrt(total[n] / at_least_one) for n in VELOCITY_NORMS if n in total}
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
            **norms,
            **left_out,
        }


class LossSums(NamedTuple):
    """A loss as a sum and its denominator, which add up exactly over micro-batches and ranks.

    ``loss_sum`` carries the gradient. Add the sums (their gradients) and the denominators of one optimizer step, and
    divide once.
    """

    loss_sum: Float[Tensor, ""]
    denominator: Float[Tensor, ""]
    metrics: LossMetrics
    correction: RolloutCorrection | None


def loss_sums(inputs: LossInputs) -> LossSums:
    """The loss before its division, without a host sync."""
    policy = inputs.policy
    scale_factor = inputs.config.diffusion_loss.loss_scale_factor
    terms = inputs.objective(policy, inputs.limits)
    # A mask of ones in place of None, so that every aggregation counts in the same way.
    keep = torch.ones_like(policy.log_prob, dtype=torch.bool) if policy.keep is None else policy.keep
    # Micro-batches divide by nothing here: their denominators add up, and one division comes last.
    denominator = inputs.aggregation.denominator(keep).to(policy.log_prob.dtype)
    policy_sum = inputs.aggregation.loss_sum(terms.loss, keep, scale_factor)
    kl_sum = policy_sum.new_zeros(())
    total = policy_sum
    if inputs.reference_kl is not None:
        kl_sum = inputs.aggregation.loss_sum(inputs.reference_kl, keep, scale_factor)
        total = policy_sum + inputs.kl_coef * kl_sum
    metrics = LossMetrics.of(
        policy,
        terms,
        inputs.limits,
        loss_sum=policy_sum,
        denominator=denominator,
        kl_sum=kl_sum,
        valid=inputs.valid,
        velocity_squares=inputs.velocity_squares,
        needs_advantage=inputs.needs_advantage,
    )
    return LossSums(total, denominator, metrics, inputs.correction)


def metrics_of_update(mini_steps: Sequence[LossMetrics]) -> dict[str, float]:
    """Means over all mini-steps of an update, as ``LossMetrics.compute`` names them, and ``..._first`` from the first
    alone, before anything was learned."""
    first = mini_steps[0].compute()
    total = reduce(add, mini_steps)
    metrics = total.compute()
    metrics["actor/teaching_fraction"] = total.teaching_fraction
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_inert"):
        # A rejected element counts as a ratio of 1; divide by the kept share to get the clipped share of the rest.
        metrics[f"{name}_first"] = first[name] / (first["actor/kept_fraction"] or 1.0)
    metrics["actor/log_ratio_abs_mean_first"] = first["actor/log_ratio_abs_mean"]
    metrics["actor/ratio_deviation_first"] = max(abs(first["actor/ratio_max"] - 1), abs(first["actor/ratio_min"] - 1))
    return metrics


def mean_loss(
    inputs: LossInputs, dp_group: object | None, model_output: object, data: object
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """``(loss, metrics)`` of ``diffusion_loss`` and ``token_loss``, which document them.

    Args:
        model_output, data: the source of ``inputs``, to name the tensors that are not finite.
    """
    sums = loss_sums(inputs)
    reported = sums.metrics
    denominator = sums.denominator
    correction = {} if sums.correction is None else sums.correction.metrics
    # Collectives only on request: a caller that averages gradients itself must not be made to wait here.
    if dp_group is not None:
        reported = reported.all_reduce(dp_group)
        # DDP's average divides by the number of ranks once more, so divide by the mean denominator here.
        ranks = torch.distributed.get_world_size(dp_group)  # type: ignore[arg-type]
        denominator = (reported.denominator / ranks).to(denominator.dtype)
        if inputs.config.rollout_correction.bypass_mode:
            # A rank without a valid token has no correction, but must take part in the collective.
            everywhere = MetricAccumulator()
            if sums.correction is not None:
                everywhere.add(sums.correction)
            correction = everywhere.compute(dp_group)
    # If nothing is kept the sum is 0 and still has its graph: loss and gradients are 0 on every rank.
    loss = sums.loss_sum / torch.where(denominator > 0, denominator, 1.0)
    metrics = reported.compute()
    metrics["actor/loss"] = metrics["actor/pg_loss"] + inputs.kl_coef * metrics["actor/kl_loss"]
    # The loss clamps log ratios, so it may be finite although they are not.
    for name in ("actor/loss", "actor/log_ratio_abs_mean"):
        if not math.isfinite(metrics[name]):
            raise ValueError(f"{name} is {metrics[name]}; {not_finite(model_output=model_output, data=data)}")
    if metrics["actor/kept_fraction"] == 0:
        warnings.warn(
            "rollout correction rejected every element of this batch: loss and gradients are 0",
            stacklevel=level_of_caller(),
        )
    return loss, metrics | {f"actor/{name}": value for name, value in correction.items()}
