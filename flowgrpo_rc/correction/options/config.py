"""``RolloutCorrectionConfig``: which policies, weights and rejection a run uses. Needs no torch.

The keys are verl's, so that its configurations work unchanged; ``dialects`` translates those of other projects.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.checks import choice, show
from flowgrpo_rc.correction.options import dialects
from flowgrpo_rc.correction.options.presets import PRESET_NAMES, Presets
from flowgrpo_rc.correction.options.quoting import refuse_unquoted_bands
from flowgrpo_rc.correction.plan import CorrectionPlan, make_plan, parse_number, plain_threshold
from flowgrpo_rc.field_docs import documented_fields

if TYPE_CHECKING:
    from typing_extensions import Self

_CHOICES = {
    "loss_type": ("ppo_clip", "reinforce"),
    "rejection_normalization": ("all", "kept"),
    "guard": ("warn", "fallback", "off"),
}
_SWITCHES = ("rollout_is_batch_normalize", "bypass_mode")
_BANDS = ("rollout_is_threshold", "rollout_rs_threshold")
_VETO = "rollout_token_veto_threshold"
_SHARES = ("guard_clip_fraction", "guard_rejected_fraction", "rollout_rs_auto_share")
_NUMBERS = (_VETO, "guard_engine_gap", "rollout_rs_auto_min", "rollout_rs_auto_max", *_SHARES)
_COUNTS = ("guard_patience", "guard_return_after")
_PLANNED = tuple(inspect.signature(make_plan).parameters)
SMALLEST_AUTO_SHARE = 1e-4
"""``rollout_rs_auto_share`` needs about its reciprocal of measured images, times three."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig(Presets):
    """Rollout correction, validated at construction. Ratios are train over rollout.

    Without arguments nothing is corrected; the presets switch it on. Keywords of other dialects are translated as
    ``from_dict`` translates them.

    Raises:
        TypeError: a value of the wrong type, such as a bool threshold.
        ValueError: an unknown option, or thresholds that are missing, not positive, NaN or out of order.
    """

    rollout_is: str | None = None
    """Level of the importance weights: ``token``, ``sequence``, ``geometric``, or null for no weights."""
    rollout_is_threshold: str | float | int | None = 2.0
    """Bounds of the importance weights. A number truncates weights at it (TIS); ``lower_upper`` zeroes weights outside
    of the two (IcePop). Null is allowed where ``rollout_is`` is null."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch, across data-parallel ranks."""
    rollout_rs: str | None = None
    """Comma-separated rejection criteria (``plan.RS_OPTIONS``); every one must pass. Null for none."""
    rollout_rs_threshold: str | float | int | None = None
    """Bounds of the rejection criteria, one entry for all of them or one for each: ``lower_upper`` of the ratio for k1,
    an upper bound for k2 and k3. ``auto``, for one seq_ criterion, is the bound that ``rollout_rs_auto_share`` of the
    images pass for their measured gap alone."""
    rollout_rs_auto_share: str | float | int = 0.01
    """With ``rollout_rs_threshold=auto``: the share of images that the gap alone rejects, once enough are measured."""
    rollout_rs_auto_min: str | float | int = 1e-3
    """With ``rollout_rs_threshold=auto``: the smallest bound allowed, as |log ratio| of every step of a row."""
    rollout_rs_auto_max: str | float | int = 0.1
    """With ``rollout_rs_threshold=auto``: the largest bound allowed, as |log ratio| of every step of a row."""
    bypass_mode: bool = False
    """Take pi_rollout as pi_old and skip the pass that recomputes pi_old."""
    loss_type: str = "ppo_clip"
    """Loss in bypass mode: ``ppo_clip`` or ``reinforce``."""
    rollout_token_veto_threshold: str | float | int | None = None
    """Reject a row if one of its ratios is below this; null for no veto."""
    rollout_is_mode: str | None = None
    """Treatment of weights outside the bounds: ``truncate``, ``zero``, ``clip`` or ``mask``; null leaves it to the
    form of ``rollout_is_threshold``."""
    rejection_normalization: str = "all"
    """Denominator of the diffusion loss under rejection: ``all`` elements, or the ``kept`` ones."""
    guard: str | bool = "warn"
    """Reaction of a training run when a limit of the guard is passed for ``guard_patience`` updates in a row: ``warn``;
    ``fallback``, which leaves bypass mode for decoupled mode and returns when that has long been safe; or ``off``."""
    guard_clip_fraction: str | float | int = 0.1
    """The guard's limit of the share of samples outside the clip band before anything of a batch is learned."""
    guard_rejected_fraction: str | float | int = 0.5
    """The guard's limit of the share of samples that are rejected, and of importance weights that are 0 in the loss."""
    guard_engine_gap: str | float | int = 0.05
    """The guard's limit of actor and engine's mean |log ratio| with equal weights, in nats per latent dimension."""
    guard_patience: int = 3
    """Updates in a row that must pass a limit before the guard acts."""
    guard_return_after: int = 50
    """With ``guard=fallback``: updates in a row that the probe must call safe (half of each limit) before bypass mode
    is tried again; doubled with every return."""

    def __post_init__(self) -> None:
        # YAML reads a bare off as false.
        if self.guard is False:
            self.guard = "off"
        for name, options in _CHOICES.items():
            choice(name, getattr(self, name), options)
        # Without bypass mode the loss would silently be PPO.
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type='reinforce' needs bypass_mode=True: it has no proximal policy pi_old.")
        if self.guard == "fallback" and self.loss_type == "reinforce":
            raise ValueError(
                "guard='fallback' with loss_type='reinforce': decoupled mode has no such loss to fall back to. Set "
                "guard='warn', or loss_type='ppo_clip'."
            )
        self._check_ranges()
        # Parsing the plan checks every threshold.
        if self.plan().calibrated and self.rollout_is_batch_normalize:
            raise ValueError(
                "rollout_is_batch_normalize=True with rollout_rs_threshold='auto': rows of different timesteps are "
                "corrected apart then, and have no common mean. Set one of the two otherwise."
            )

    @property
    def corrects(self) -> bool:
        """True if there are weights or a rejection, not metrics alone."""
        return self.rollout_is is not None or self.plan().can_reject

    def plan(self) -> CorrectionPlan:
        """The parsed form that the computation uses."""
        return make_plan(**{name: getattr(self, name) for name in _PLANNED})

    def to_dict(self) -> dict[str, Any]:
        """The canonical keys; ``from_dict`` of it is an equal configuration."""
        return asdict(self)

    @property
    def weights_act(self) -> bool:
        """Importance weights enter the loss. In bypass mode with PPO they do not: its ratio is the weight already."""
        return not (self.bypass_mode and self.loss_type == "ppo_clip")

    @classmethod
    def from_dict(cls, mapping: "Mapping[str, Any] | RolloutCorrectionConfig | None") -> "Self":
        """Builds a configuration from canonical keys, ``preset: NAME``, or another dialect (one warning each).

        ``None`` means no correction, metrics only (``disabled``). Beside ``preset`` only canonical keys are taken, and
        override it.

        Raises:
            TypeError: a switch or a threshold of the wrong type.
            ValueError: an unknown key (the message lists the nearest known ones) or preset, contradicting keys, or
                another dialect's key beside a preset.
        """
        if mapping is None:
            return cls.disabled()
        if isinstance(mapping, cls):
            return mapping
        if not isinstance(mapping, Mapping):
            raise ValueError(
                f"rollout_correction must be a mapping of keys, or null, got {show(mapping)}; a preset is chosen by "
                "the key preset."
            )
        # OmegaConf's keys may be of other types.
        canonical, warning = cls._canonical({str(key): value for key, value in mapping.items()})
        config = cls(**canonical)
        # After the checks: an error needs no translation beside it.
        if warning:
            warnings.warn(warning, stacklevel=2)
        return config

    @classmethod
    def from_slime_yaml(cls, path: str | Path) -> "Self":
        """Reads slime's YAML file of ``use_tis``, ``tis_mode``, ... keys.

        Raises:
            ValueError: the file does not hold a mapping, a threshold like 0.5_5 has no quotes, or as ``from_dict``.
        """
        import yaml

        # Before parsing, which would turn 0.5_5 into 0.55.
        refuse_unquoted_bands(Path(path))
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: expected a mapping of keys, found {type(content).__name__}.")
        return cls.from_dict(content)

    @classmethod
    def _canonical(cls, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Every field's value, from keys of any dialect, and a warning about their translation."""
        defaults = {field.name: field.default for field in fields(cls)}
        preset = values.get("preset")
        named = dialects.named_keys({key: value for key, value in values.items() if key != "preset"}, defaults)
        if preset is None:
            return dialects.translate(named, defaults)
        if preset not in PRESET_NAMES:
            near = dialects.nearest(str(preset), PRESET_NAMES)
            raise ValueError(f"Unknown preset {preset!r}; nearest: {near}. All: {', '.join(PRESET_NAMES)}.")
        dialects.refuse_beside_preset(named, preset)
        return {**getattr(cls, preset)().to_dict(), **named}, ""

    def _check_ranges(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of updates, 1 or more, got {value!r}.")
        # parse_number has checked that they are positive.
        for name in _SHARES:
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} must be a share between 0 and 1, got {getattr(self, name)!r}.")
        if float(self.rollout_rs_auto_share) < SMALLEST_AUTO_SHARE:
            raise ValueError(
                f"rollout_rs_auto_share must be at least {SMALLEST_AUTO_SHARE:g}, got {self.rollout_rs_auto_share!r}: "
                "its quantile is taken over 3 / share images."
            )
        low = float(self.rollout_rs_auto_min)
        high = float(self.rollout_rs_auto_max)
        if not low <= high < math.inf:
            raise ValueError(f"rollout_rs_auto_max must be at least rollout_rs_auto_min={low:g}, got {high!r}.")


def _of_plain_types(keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords with Python's own numbers, since a resolved configuration is written as YAML; refuses other types."""
    plain = dict(keywords)
    for name, value in keywords.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false, got {show(value)}.")
        if name in _BANDS:
            plain[name] = plain_threshold(value, name)
        elif name in _NUMBERS and (name != _VETO or value is not None):
            plain[name] = parse_number(value, name)
    return plain


def _translating(init: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` for keywords of any dialect: users know another project's class of the same name."""

    @functools.wraps(init)
    def translated(self: RolloutCorrectionConfig, /, *args: Any, **keywords: Any) -> None:
        known = self.__dataclass_fields__
        warning = ""
        # Canonical keywords need no translation, and dataclasses.replace passes all of them at every call.
        if dialects.is_legacy_level(keywords.get("rollout_rs")) or not known.keys() >= keywords.keys():
            for key in keywords:
                if not dialects.is_known(key, known):
                    near = dialects.nearest(key, dialects.known_keys(known))
                    raise TypeError(
                        f"{type(self).__name__} has no {key!r}; nearest known: {near}. For another project's section "
                        "there is from_dict."
                    )
            keywords, warning = self._canonical(keywords)
        # Before __init__, whose annotations exclude numpy's numbers.
        init(self, *args, **_of_plain_types(keywords))
        if warning:
            warnings.warn(warning, stacklevel=2)

    return translated


RolloutCorrectionConfig.__init__ = _translating(RolloutCorrectionConfig.__init__)
