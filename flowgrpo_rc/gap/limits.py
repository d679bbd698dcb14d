"""The table of limits: from which value on each figure of the off-policy gap costs, and from which it is not safe.

The probe, the guard and the run's health report judge the same figures, so they read their limits here. Importing this
loads no torch.

A figure has two limits: ``costs``, from where learning is slower, and ``not_safe``, from where runs were lost or most
of a batch is wasted. The probe calls a configuration not safe above the second; the report says to watch a run above
the first, and calls it a problem above the second. One of the two can be set in ``algorithm.rollout_correction``: there
the guard raises an alarm. Its default is read from that section, so that no number stands in two places.
``docs/gap.md`` has the table in words. The drift, which the probe alone measures, has its limits at the end.

Limits of figures that the report alone judges (the growth of the gap, say) stand with their checks in
``flowgrpo_rc.report.checks_gap``.
"""

from dataclasses import dataclass

from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig

CLIP = "clip"
"""Share of the samples in use that the gap alone puts beyond the objective's limit, before anything is learned."""
REJECTED = "rejected"
"""Share of the samples that rejection removes."""
ZEROED = "zeroed"
"""Share of the importance weights in the loss that are 0."""
ENGINE_GAP = "engine_gap"
"""Mean ``|log ratio|`` of actor and engine with equal weights, in nats per latent dimension."""
DRIFT = "drift"
"""What an update would learn from the gap alone, in units of a single step's policy gradient; see
``flowgrpo_rc.gap.drift``."""

GAP_QUANTILE = 0.9
"""The size of a gap is told by this quantile of many samples, which single outliers do not move."""
CLIP_FACTOR = 3.0
"""A clip band or KL threshold that holds the gap is this many times that quantile."""
WIDEST_CLIP = 1e-2
"""A clip band that the probe recommends is not wider: beyond it clipping no longer limits the policy's own movement.
Source: a clip band of 1e-2 matched decoupled mode in every precision (``docs/gap_study.md``)."""


@dataclass(frozen=True, kw_only=True)
class GapLimit:
    """The limits of one figure."""

    costs: float
    """From here on learning suffers."""
    not_safe: float
    """From here on a run is not safe."""
    setting: str
    """Key of ``algorithm.rollout_correction`` that sets one of the two, and with it where the guard raises an alarm."""
    guards_costs: bool = False
    """Whether ``setting`` is for ``costs`` instead of ``not_safe``."""
    source: str
    """Where the numbers come from: the runs of ``docs/learning.md`` and ``docs/gap_study.md``."""

    def alarm(self, correction: RolloutCorrectionConfig) -> float:
        """Above this the guard raises an alarm."""
        return float(getattr(correction, self.setting))

    def not_safe_for(self, correction: RolloutCorrectionConfig) -> float:
        """Above this the probe calls the configuration not safe."""
        return self.not_safe if self.guards_costs else self.alarm(correction)


_DEFAULTS = RolloutCorrectionConfig()

LIMITS: dict[str, GapLimit] = {
    CLIP: GapLimit(
        costs=float(_DEFAULTS.guard_clip_fraction),
        not_safe=0.25,
        setting="guard_clip_fraction",
        # A running job is told early, since widening the clip band costs little then. A probe that refused at the same
        # share would refuse runs that learn.
        guards_costs=True,
        source="at .29 to .33 three of five runs unlearned, at .2 none",
    ),
    REJECTED: GapLimit(
        costs=0.1,
        not_safe=float(_DEFAULTS.guard_rejected_fraction),
        setting="guard_rejected_fraction",
        source="A fifth rejected did not hurt; half is half of the rollouts for nothing",
    ),
    ZEROED: GapLimit(
        costs=0.05,
        not_safe=float(_DEFAULTS.guard_rejected_fraction),
        setting="guard_rejected_fraction",
        source="What is dropped trains nothing",
    ),
    ENGINE_GAP: GapLimit(
        costs=5e-3,
        not_safe=float(_DEFAULTS.guard_engine_gap),
        setting="guard_engine_gap",
        source="bfloat16 gave 2.4e-4, fp8 weights 9e-4; at .05 the engine computes something else",
    ),
}

DRIFT_SAFE = 0.006
"""Below this drift a configuration is safe; from here on learning suffers, and how much depends on the learning rate:
at .0064 a run lost .02 of held-out reward, and one at four times its rate .11 (``docs/gap_study.md``)."""
DRIFT_NOT_SAFE = 0.0075
"""From this drift on a configuration is not safe. Of the settings that both were chosen on, those that lost more than
.08 of held-out reward have .0077 and more, and those that lost less than .03 have .0052 and less
(``docs/gap_study.md``). The drift takes gradients of its own, so that the probe alone measures and judges it."""

CLIP_BESIDE_DRIFT = 0.5
"""Where a drift is known, the share beyond the clip is not safe from here on: more than a quarter of the samples teach
nothing, whatever the others teach. Below it the drift tells more: of two settings with .41 and .45 outside one lost .41
of held-out reward and the other .03, and the drift told which (``docs/gap_study.md``)."""


def clip_not_safe(*, drift_known: bool) -> float:
    """From this share beyond the clip on the probe calls a configuration not safe."""
    return CLIP_BESIDE_DRIFT if drift_known else LIMITS[CLIP].not_safe
