"""Drop-in for verl-omni's ``verl_omni.trainer.diffusion.rollout_correction``, installed by being imported.

    actor_rollout_ref.model.external_lib=flowgrpo_rc.integrations.verl_omni

switches a running cluster's workers over: importing this module replaces the functions of verl-omni's module,
wherever verl-omni has them, and the helper of verl that its diffusion loss calls in bypass mode. The import raises an
error without verl-omni.

Unlike the verl drop-in, the k1 band is the documented one: ``"lower_upper"`` keeps ``lower <= r <= upper``, with
``r`` train over rollout. Rejection also leaves a ``rollout_keep`` in the batch, and every metric of this library is
reported, the gap per timestep included.

The section ``algorithm.rollout_correction`` takes every key of this library and of the dialects that it translates. In
bypass mode verl-omni's loss hands on verl's own keys alone, so that the others act in decoupled mode. Of keys that
cannot act inside verl-omni at all (``rejection_normalization``, the guard's, ...) there is one warning.
"""

import importlib
import warnings
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc import batch as trajectory
from flowgrpo_rc.batch import Key, optional
from flowgrpo_rc.correction.numerics.compute import compute_offpolicy_metrics, run_plan
from flowgrpo_rc.correction.options import dialects
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.integrations.verl import OPTIONS, Replacement, plan_of_options, weights_proto

__all__ = [
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "compute_rollout_corr_metrics_from_batch",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_rejection_mask",
    "install",
    "installed",
    "rollout_correction_enabled",
]

_HOME = "verl_omni.trainer.diffusion.rollout_correction"
_LOSSES = "verl_omni.workers.utils.losses"
_HELPER = "compute_rollout_correction_and_rejection_mask"
_WITHOUT_EFFECT = ("rejection_normalization", "guard", "rollout_rs_auto")
"""Starts of keys of this library that its own loss and trainer act on, and verl-omni's do not."""
_AS_THERE = {"rejection_normalization": "all", "guard": "off"}
"""Values of those that ask for what verl-omni does anyway."""
_OMNI = {"bypass_mode": False, "loss_type": "ppo_clip", **OPTIONS}
"""The section as verl-omni's YAML has it."""
_ASK_FOR_BYPASS = (
    "preset",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
    "use_rollout_logprobs",
)
"""Keys besides ``bypass_mode`` that may ask for bypass mode."""
_warned: set[str] = set()
"""Keys without effect that were warned about."""


def rollout_correction_enabled(rollout_corr_config: Any) -> bool:
    """A configuration sets weights or rejection, the veto included, in any dialect."""
    if rollout_corr_config is None:
        return False
    with warnings.catch_warnings():
        # apply_rollout_correction_to_diffusion_batch gives the same warnings.
        warnings.simplefilter("ignore")
        try:
            return _corrects(RolloutCorrectionConfig.from_dict(_known(rollout_corr_config)))
        except (TypeError, ValueError):
            # The same function raises the error, where verl-omni expects it.
            return True


def apply_bypass_mode_to_diffusion_batch(batch: Any) -> None:
    """Sets ``old_log_probs`` to ``rollout_log_probs``; ValueError when the batch has none, or no tensors at all."""
    trajectory.apply_bypass_mode_to_diffusion_batch(_tensors(batch))


def apply_rollout_correction_to_diffusion_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    """Decoupled mode: adds ``rollout_is_weights`` (weight times keep) and ``rollout_keep``; returns batch and metrics.

    Without weights and rejection the batch stays as it is, as in verl-omni, and the metrics are diagnostics.

    Raises:
        ValueError: a bad configuration, or a batch without ``old_log_probs`` and ``rollout_log_probs``, both
            ``(B, W)``.

    Warns:
        UserWarning: once of each key that has no effect here.
    """
    config = _read(rollout_corr_config)
    tensors = _tensors(batch)
    before = set(tensors.keys())
    _, metrics = trajectory.apply_rollout_correction_to_diffusion_batch(tensors, config)
    # As in verl-omni, whose loss would otherwise multiply by ones.
    if not _corrects(config):
        for key in {Key.ROLLOUT_IS_WEIGHTS, Key.ROLLOUT_KEEP} - before:
            del tensors[key]
    return batch, metrics


def _corrects(config: RolloutCorrectionConfig) -> bool:
    return config.rollout_is is not None or config.plan().can_reject


def _tensors(batch: Any) -> Any:
    """The mapping in ``batch.batch``; an empty one for None."""
    return {} if batch.batch is None else batch.batch


def _read(section: Any) -> RolloutCorrectionConfig:
    """verl-omni's section; warns once of each key without effect."""
    for key in (str(key) for key in section):
        if not key.startswith("_") and not dialects.is_known(key, RolloutCorrectionConfig.__dataclass_fields__):
            near = dialects.nearest(key, dialects.known_keys(RolloutCorrectionConfig.__dataclass_fields__))
            _say_once(key, section[key], f"{__name__} does not know it; nearest known: {near}")
    values = _known(section)
    config = RolloutCorrectionConfig.from_dict(values)
    for key, value in values.items():
        if key.startswith(_WITHOUT_EFFECT) and value != _AS_THERE.get(key):
            _say_once(key, value, "verl-omni's own loss and trainer act, and know nothing of it")
    if config.bypass_mode and values.get("bypass_mode") is None:
        asks = next((key for key in values if key in _ASK_FOR_BYPASS), "bypass_mode")
        _say_once(
            asks, values.get(asks), "verl-omni reads the mode from bypass_mode alone; write bypass_mode=true beside it"
        )
    return config


def _known(section: Any) -> dict[str, Any]:
    """The section's keys that ``from_dict`` understands, as the user set them.

    Hydra's own keys (``_target_``) mean nothing, nor does empty text. Unknown keys are left out: a later verl-omni may
    have some of its own there. verl-omni's YAML spells out its defaults, which would override a preset and contradict
    another dialect: beside those, a key at its default counts as not set.
    """
    fields = RolloutCorrectionConfig.__dataclass_fields__
    values = {str(key): section[key] for key in section if dialects.is_known(str(key), fields)}
    # Hydra users switch an option off by empty text or false.
    values.update({key: None for key in ("rollout_is", "rollout_rs") if values.get(key) in ("", False)})
    if any(key not in fields and values[key] is not None for key in values) or dialects.is_legacy_level(
        values.get("rollout_rs")
    ):
        values = {key: value for key, value in values.items() if key not in _OMNI or _OMNI[key] != value}
    return values


def _say_once(key: str, value: Any, because: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"algorithm.rollout_correction.{key}={value!r} has no effect inside verl-omni: {because}", stacklevel=4
        )


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    timesteps: Shaped[Tensor, "..."] | None = None,
) -> dict[str, float]:
    """Diagnostics of the current policy against the rollout policy, prefixed ``rollout_corr/``. ``timesteps`` of
    another shape than the log-probs are left out, as in verl-omni."""
    # verl-omni passes all steps of a rollout, also where only a window was trained.
    aligned = timesteps is not None and timesteps.shape == log_prob.shape
    return compute_offpolicy_metrics(log_prob, rollout_log_prob, timesteps=timesteps if aligned else None)


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *options: Any,
    **named: Any,
) -> tuple[Any, Tensor, dict[str, float]]:
    """verl's helper and its options, as verl-omni's diffusion loss calls it, with the documented k1 band."""
    result = run_plan(old_log_prob, rollout_log_prob, response_mask, plan=plan_of_options(*options, **named))
    return weights_proto(result.weights), result.mask, result.metrics


def compute_rollout_corr_metrics_from_batch(batch: Any, *, bypass_mode: bool) -> dict[str, float]:
    """The diagnostics of a batch with both log-probs; empty in bypass mode, or where one of them is missing."""
    data = _tensors(batch)
    old = optional(data, Key.OLD_LOG_PROBS)
    rollout = optional(data, Key.ROLLOUT_LOG_PROBS)
    if bypass_mode or old is None or rollout is None:
        return {}
    return compute_rollout_corr_metrics_from_logprobs(old, rollout, optional(data, "all_timesteps"))


def install() -> Replacement:
    """Puts these functions in the place of verl-omni's, as importing this module has done; a second time does nothing.

    Needed only after ``installed.undo()``, and where an import alone would look like an oversight.

    Returns:
        ``installed``: what was replaced; its ``undo()`` restores verl-omni's functions.

    Raises:
        ImportError: verl-omni is not installed.
    """
    try:
        home = importlib.import_module(_HOME)
    except ImportError as error:
        raise ImportError(f"This drop-in replaces functions of verl-omni, which cannot be imported: {error}") from error
    names = [name for name in __all__ if name.startswith(("rollout_", "apply_", "compute_rollout_corr_metrics"))]
    if not hasattr(home, "compute_rollout_corr_metrics_from_batch"):  # verl-omni's first release of the feature
        names.remove("compute_rollout_corr_metrics_from_batch")
    installed.apply(home, {name: globals()[name] for name in names}, package="verl_omni")
    # Its loss imports verl's helper by name, so that replacing verl's would not reach it.
    losses = importlib.import_module(_LOSSES)
    if hasattr(losses, _HELPER):
        installed.apply(losses, {_HELPER: compute_rollout_correction_and_rejection_mask}, package="verl_omni")
    return installed


installed = Replacement()
"""The replaced functions; ``installed.undo()`` restores verl-omni's."""
install()
