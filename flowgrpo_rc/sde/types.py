"""The kinds of stochastic step by name. The configuration checks against this table, and loading it loads no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SDEType:
    """One kind of stochastic step and the settings that it allows."""

    step: str
    """``module:function`` that computes the mean and the standard deviation of one step."""
    log_prob_is_density: bool = True
    """``log_prob`` is the Gaussian log-density, so that log ratios have the scale of densities."""
    last_step_is_stochastic: bool = True
    """The step that ends at noise level 0 still draws noise and can be trained."""
    largest_noise_level: float | None = None
    """The largest ``noise_level`` for which the step is defined; ``None``: no limit."""


SDE_TYPES: dict[str, SDEType] = {
    "sde": SDEType("flowgrpo_rc.sde.transitions:flow_sde_step"),
    "cps": SDEType(
        "flowgrpo_rc.sde.transitions:coefficients_preserving_step",
        log_prob_is_density=False,
        last_step_is_stochastic=False,
        largest_noise_level=1.0,
    ),
    "dance_sde": SDEType("flowgrpo_rc.sde.transitions:dance_sde_step"),
}


def sde_type_named(name: str) -> SDEType:
    """The row of ``SDE_TYPES``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in SDE_TYPES:
        raise ValueError(f"sde_type={name!r} is unknown; choose one of {', '.join(SDE_TYPES)}")
    return SDE_TYPES[name]
