"""The table of objectives: one record per ``loss_mode``.

Configuration, loss, actor, probe, guard and report look an objective up here instead of comparing names. A new
objective is a record in ``OBJECTIVES`` and its function. Options of its own are fields of ``DiffusionLossConfig`` that
the record lists in ``options``.

Every objective limits how far an update may move the policy: it compares a *measure* of the distance between the old
and the current policy with a *limit*. In bypass mode the rollout engine is the old policy. The same measure of the
off-policy gap then gives the share of a batch that lies beyond the limit before anything is learned.

Nothing here imports torch: functions of tensors use only their operators and methods.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

Measure: TypeAlias = Callable[[Any, Any, Any], Any]
"""Maps log ratio, KL per latent dimension and standard deviation of each step to the value that the limit bounds."""


@runtime_checkable
class LossOptions(Protocol):
    """The fields of ``DiffusionLossConfig`` that limits and losses read, besides a threshold's own ``key``."""

    loss_mode: str
    clip_ratio: float | str
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    auto_clip_min: float
    auto_clip_max: float
    clip_ratio_c: float | None
    adv_clip_max: float
    awm_weighting: str
    ref_kl_coef: float
    loss_agg_mode: str
    loss_scale_factor: float | None


def log_ratio(log_ratio: Any, kl: Any, step_std: Any) -> Any:
    """The log ratio itself."""
    return log_ratio


def normalised_log_ratio(log_ratio: Any, kl: Any, step_std: Any) -> Any:
    """``(log_ratio + kl) * step_std``: removes the timestep's bias and scale.

    Source: GRPO-Guard, arXiv 2510.22319.
    """
    return (log_ratio + kl) * step_std.to(log_ratio)


def kl_per_dimension(log_ratio: Any, kl: Any, step_std: Any) -> Any:
    """The KL divergence of the two policies' steps, per latent dimension."""
    return kl


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The limit on an objective's measure, and the words for it.

    ``ClipBand`` and ``Threshold`` add how it is set and when it is exceeded.
    """

    key: str
    """Field of ``DiffusionLossConfig`` that sets it."""
    name: str
    """The bounded region, as in "outside the clip band"."""
    edge: str
    """Its end, as in "beyond the KL threshold"."""
    share_metric: str
    """Metric of an update's first mini-step from which the share of samples beyond the limit is read."""
    share_per_metric: int = 1
    """Factor of that metric: 2 where the objective leaves out the half of those samples that would move
    further away, and the metric counts only what is left out."""

    def share_beyond(self, metric: float) -> float:
        """Share of samples beyond the limit, from the value of ``share_metric``."""
        return min(self.share_per_metric * metric, 1.0)


@dataclass(frozen=True, kw_only=True)
class ClipBand(Limit):
    """A band around a ratio of 1, which may be calibrated (``auto``) or have two widths."""

    def sides(self, options: LossOptions, widths: Any = None) -> tuple[Any, Any]:
        """Half widths below and above a ratio of 1: numbers, or with ``clip_ratio=auto`` the batch's ``widths``.

        Raises:
            ValueError: ``auto`` without ``widths``.
        """
        width: Any = options.clip_ratio
        if width == "auto":
            # Widths per element come with the batch, from the calibration of each timestep.
            if widths is None:
                raise ValueError(
                    "data lacks 'clip_widths', which clip_ratio=auto reads; add it, or give clip_ratio a number"
                )
            width = widths
        low = width if options.clip_ratio_low is None else options.clip_ratio_low
        high = width if options.clip_ratio_high is None else options.clip_ratio_high
        return low, high

    def exceeded(self, measured: Any, options: LossOptions, widths: Any = None) -> Any:
        """True for log ratios that lie outside, in the shape of ``measured``."""
        low, high = self.sides(options, widths)
        ratio = measured.exp()
        return (ratio < 1 - low) | (ratio > 1 + high)

    def ends(self, options: LossOptions, widths: Any = None) -> list[float]:
        """Half widths below and above 1; with ``auto`` the narrowest and widest of ``widths``, or their bounds."""
        if widths is not None:
            return [float(widths.min()), float(widths.max())]
        if options.clip_ratio == "auto":
            return [options.auto_clip_min, options.auto_clip_max]
        return list(self.sides(options))

    def setting(self, options: LossOptions) -> str:
        """The limit as the configuration writes it."""
        if options.clip_ratio == "auto":
            return f"{self.key}=auto ({options.auto_clip_min:g} to {options.auto_clip_max:g})"
        low, high = self.sides(options)
        return f"{self.key}={low:g}" if low == high else f"{self.key}_low={low:g} and {self.key}_high={high:g}"


@dataclass(frozen=True, kw_only=True)
class Threshold(Limit):
    """One number, the field ``key`` of the options, at which what is measured lies beyond the limit."""

    def value(self, options: object) -> float:
        """The configured number."""
        return float(getattr(options, self.key))

    def exceeded(self, measured: Any, options: LossOptions, widths: Any = None) -> Any:
        """True for samples that have reached the threshold, in the shape of ``measured``."""
        return measured >= self.value(options)

    def ends(self, options: LossOptions, widths: Any = None) -> list[float]:
        """The threshold alone."""
        return [self.value(options)]

    def setting(self, options: LossOptions) -> str:
        """The limit as the configuration writes it."""
        return f"{self.key}={self.value(options):g}"


ADV_MODES: dict[str, Callable[[Any], Any]] = {
    "continuous": lambda advantages: advantages,
    "positive_only": lambda advantages: advantages.clamp(min=0),
    "negative_only": lambda advantages: advantages.clamp(max=0),
    "one_only": lambda advantages: (advantages > 0).to(advantages),
    "binary": lambda advantages: advantages.sign(),
}
"""Maps a clamped advantage to the one that ``diffusion_nft`` uses, by the name of ``adv_mode``."""
AWM_POWERS = {"none": 0, "t": 1, "t2": 2}
"""Power of ``t`` that weighs a matching error, by the name of ``awm_weighting``."""
CLIP_BAND = ClipBand(key="clip_ratio", name="clip band", edge="clip band", share_metric="actor/pg_clipfrac_first")
KL_TRUST_REGION = Threshold(
    key="kl_mask_threshold",
    name="trust region",
    edge="KL threshold",
    share_metric="actor/pg_clipfrac_inert_first",
    share_per_metric=2,
)


def averages_old_policy(schedule: Any, decay: Any, interval: Any) -> bool:
    """These values of ``algorithm.old_policy_decay_schedule``, ``old_policy_decay`` and ``old_policy_update_interval``,
    checked or not, make the old policy another one than the actor before the batch; ``None`` was not given."""
    return interval not in (None, 1) or (schedule not in (None, "copy") if decay is None else bool(decay))


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One value of ``actor.diffusion_loss.loss_mode``."""

    name: str
    function: str
    """``package.module:function``, called with ``PolicyInputs`` and ``PolicyLimits`` and returning ``PolicyTerms``."""
    options: tuple[str, ...] = ()
    """Fields of ``DiffusionLossConfig`` that the function takes as keyword arguments."""
    limit: ClipBand | Threshold = CLIP_BAND
    """The distance that an update may move the policy."""
    measure: Measure = log_ratio
    """The value that the limit bounds."""
    needs_old_means: bool = False
    """The function reads ``PolicyInputs.shift``: transition means of the old policy (in bypass mode the rollout
    engine's) and of the current one. Tokens have none."""
    needs_sigmas: bool = False
    """The function reads ``TransitionShift.dt``: the noise levels around each step."""
    clean: bool = False
    """Its elements are noised clean images, not recorded SDE steps; the means of its policies are their velocities."""
    needs_reference: bool = False
    """The function reads ``Matching.ref_velocity``."""
    paired: bool = False
    """It compares two images of a group, the best and the worst, at the same noise."""
    has_limit: bool = True
    """``limit`` acts in its loss; without, it only describes the ratio in the metrics."""
    sde_type: str | None = None
    """The only ``rollout.algo.sde_type`` that it is meant for; ``None``: any."""

    @property
    def needs_old(self) -> bool:
        """True if its loss compares the current policy with the old one."""
        return self.has_limit or self.needs_old_means

    @property
    def scales_with_advantage(self) -> bool:
        """True if an image with an advantage of 0 has no gradient: its loss is a ratio times the advantage."""
        return self.has_limit

    @property
    def clips(self) -> bool:
        """True if it clips a ratio."""
        return self.has_limit and isinstance(self.limit, ClipBand)

    @property
    def clips_plain_ratio(self) -> bool:
        """True if it clips ``pi_theta/pi_old`` itself.

        Only then does the log-prob gap compare with the clip band, and only then is ``clip_ratio=auto``, which is
        calibrated on that gap, allowed.
        """
        return self.clips and self.measure is log_ratio

    @property
    def beyond(self) -> str:
        """The words for a sample that exceeds the limit: ``outside the clip band``."""
        whose = f" of {self.name}'s own ratio" if self.clips and not self.clips_plain_ratio else ""
        return f"{'outside' if self.clips else 'beyond'} the {self.limit.edge}{whose}"

    def load(self) -> Callable[..., Any]:
        """The function, imported now."""
        return pkgutil.resolve_name(self.function)


DEFAULT = "flow_grpo"
"""The default ``loss_mode``."""

OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective(name="flow_grpo", function="flowgrpo_rc.loss.policy:flow_grpo"),
        Objective(name="dance_grpo", function="flowgrpo_rc.loss.policy:flow_grpo", sde_type="dance_sde"),
        Objective(
            name="grpo_guard",
            function="flowgrpo_rc.loss.policy:grpo_guard",
            measure=normalised_log_ratio,
            needs_old_means=True,
            needs_sigmas=True,
        ),
        Objective(
            name="flow_dppo",
            function="flowgrpo_rc.loss.policy:flow_dppo",
            limit=KL_TRUST_REGION,
            measure=kl_per_dimension,
            needs_old_means=True,
        ),
        Objective(name="awm", function="flowgrpo_rc.loss.policy:flow_grpo", clean=True),
        Objective(
            name="diffusion_nft",
            function="flowgrpo_rc.loss.clean_images:diffusion_nft",
            options=("mix_beta", "adaptive_weight_min", "adv_mode", "adv_clip_max"),
            needs_old_means=True,
            clean=True,
            has_limit=False,
        ),
        Objective(
            name="dpo",
            function="flowgrpo_rc.loss.clean_images:dpo",
            options=("dpo_beta",),
            clean=True,
            needs_reference=True,
            paired=True,
            has_limit=False,
        ),
    )
}
"""Every objective by its name; ``DiffusionLossConfig.loss_mode`` is validated against it."""
