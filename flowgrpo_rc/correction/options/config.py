"""`RolloutCorrectionConfig`: which policies, weights and rejection a run uses. Needs no torch.

The keys are verl's, so that its configurations work unchanged; other dialects are translated in `dialects`.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.correction.options import dialects
from flowgrpo_rc.correction.options.overrides import override
from flowgrpo_rc.correction.options.presets import PRESET_NAMES, Presets
from flowgrpo_rc.correction.options.quoting import refuse_unquoted_bands
from flowgrpo_rc.correction.plan import (
    IS_LEVELS,
    CorrectionPlan,
    check_unused_rs_threshold,
    make_plan,
    parse_is_threshold,
    parse_number,
    plain_threshold,
    shown,
)
from flowgrpo_rc.field_docs import documented_fields

if TYPE_CHECKING:
    from typing_extensions import Self

LOSS_TYPES = ("ppo_clip", "reinforce")
GUARDS = ("warn", "fallback", "off")
_SHARES = ("guard_clip_fraction", "guard_rejected_fraction", "rollout_rs_auto_share")
_BANDS = ("rollout_is_threshold", "rollout_rs_threshold")
_NUMBERS = (
    *("rollout_token_veto_threshold", "guard_engine_gap", "rollout_rs_auto_min", "rollout_rs_auto_max"),
    *_SHARES,
)
SMALLEST_AUTO_SHARE = 1e-4
REJECTION_NORMALIZATIONS = ("all", "kept")


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig(Presets):
    """Rollout correction, validated at construction. Ratios are train over rollout.

    Without arguments nothing is corrected; the presets switch it on. Keywords of other dialects are translated as
    `from_dict` translates them.

    Raises:
        TypeError: a value of the wrong type, such as a bool threshold.
        ValueError: an unknown option, or thresholds that are missing, not positive, NaN or out of order.
    """

    rollout_is: str | None = None
    """Level of the importance weights: "token", "sequence", "geometric", or None for no weights."""
    rollout_is_threshold: str | float | int | None = 2.0
    """A number truncates weights at it (TIS); "lower_upper" zeroes weights outside the band (IcePop). None is allowed
    where `rollout_is` is None."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch, across data-parallel ranks."""
    rollout_rs: str | None = None
    """Comma-separated rejection criteria (`thresholds.RS_OPTIONS`), all of which must pass; None for none."""
    rollout_rs_threshold: str | float | int | None = None
    """One entry for all criteria or one for each: "lower_upper" of the ratio for k1, an upper bound for k2, k3. "auto",
    for one seq_ criterion: the bound that `rollout_rs_auto_share` of the images pass for their measured gap alone."""
    rollout_rs_auto_share: str | float | int = 0.01
    """`auto`: the share of images that the gap alone rejects, once enough have been measured."""
    rollout_rs_auto_min: str | float | int = 1e-3
    """`auto`: the bound is at least that of a row with this |log ratio| at every step, however small the gap,"""
    rollout_rs_auto_max: str | float | int = 0.1
    """and at most that of a row with this one, however large."""
    bypass_mode: bool = False
    """Take pi_rollout as pi_old and skip the pass that recomputes pi_old."""
    loss_type: str = "ppo_clip"
    """Loss in bypass mode: "ppo_clip" or "reinforce"."""
    rollout_token_veto_threshold: str | float | int | None = None
    """Reject a row if one of its ratios is below this; None for no veto."""
    rollout_is_mode: str | None = None
    """What happens to weights outside the bounds: "truncate", "zero", "clip", "mask"; None: by the threshold."""
    rejection_normalization: str = "all"
    """Denominator of the diffusion loss under rejection: "all" elements, or the "kept" ones."""
    guard: str | bool = "warn"
    """Of a training run: "warn" when a limit below is passed for `guard_patience` updates in a row; "fallback" leaves
    bypass mode for decoupled mode then, and comes back when it has been safe for long; or "off"."""
    guard_clip_fraction: str | float | int = 0.1
    """Limit of the share of samples outside the clip band in a batch's first mini-step, before anything is learned;"""
    guard_rejected_fraction: str | float | int = 0.5
    """of the share of samples that rejection removed, and of importance weights that are 0 in the loss;"""
    guard_engine_gap: str | float | int = 0.05
    """of the mean |log ratio| of actor and engine with equal weights, in nats per latent dimension."""
    guard_patience: int = 3
    """Updates in a row that must pass a limit."""
    guard_return_after: int = 50
    """`fallback`: updates in a row that the probe must call safe (half of each limit) before bypass mode is tried
    again; doubled with every return."""

    def __post_init__(self) -> None:
        self._check_level()
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {self.loss_type!r}.")
        if self.rejection_normalization not in REJECTION_NORMALIZATIONS:
            raise ValueError(
                f"rejection_normalization must be one of {REJECTION_NORMALIZATIONS}, "
                f"got {self.rejection_normalization!r}."
            )
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type='reinforce' needs bypass_mode=True: it has no proximal policy pi_old.")
        if self.rollout_is is None:
            unset = self.rollout_is_threshold is None
            parse_is_threshold(2.0 if unset else self.rollout_is_threshold, self.rollout_is_mode)
        if self.rollout_rs is None:
            check_unused_rs_threshold(self.rollout_rs_threshold)
        self._check_ranges()
        self.plan()

    def plan(self) -> CorrectionPlan:
        """The parsed form that the computation uses."""
        return make_plan(
            rollout_is=self.rollout_is,
            rollout_is_threshold=self.rollout_is_threshold,
            rollout_is_batch_normalize=self.rollout_is_batch_normalize,
            rollout_is_mode=self.rollout_is_mode,
            rollout_rs=self.rollout_rs,
            rollout_rs_threshold=self.rollout_rs_threshold,
            rollout_token_veto_threshold=self.rollout_token_veto_threshold,
        )

    def to_dict(self) -> dict[str, Any]:
        """The canonical keys; `from_dict` of it is an equal configuration."""
        return asdict(self)

    @property
    def rejection_knob(self) -> str:
        """The key that rejects less when it is widened; without a criterion it is the weights' mask mode."""
        if self.rollout_rs is None:
            return "rollout_is_threshold"
        return "rollout_rs_auto_max" if self.rollout_rs_threshold == "auto" else "rollout_rs_threshold"

    @property
    def weights_act(self) -> bool:
        """Whether importance weights enter the loss; in bypass mode with PPO its ratio is one itself."""
        return not (self.bypass_mode and self.loss_type == "ppo_clip")

    @classmethod
    def from_dict(cls, mapping: "Mapping[str, Any] | RolloutCorrectionConfig | None") -> "Self":
        """Builds a configuration from canonical keys, `preset: NAME`, or another dialect (one warning each).

        `None` means no correction, metrics only (`disabled`). Keys beside `preset` override it, in every dialect, and
        each half of a band by itself: beside the preset `seq_is_rs`, whose band is `0.5_2.0`, a lone number
        `rollout_rs_threshold: 3.0` is the upper half and gives `0.5_3.0` (without a preset it is the band `1/3_3`),
        `rollout_rs_threshold_lower: 0.1` gives `0.1_2.0`, and `rollout_rs_threshold: "0.3_4.0"` is the whole band.

        Raises:
            TypeError: a switch or a threshold of the wrong type.
            ValueError: an unknown key (the message lists the nearest known ones) or preset, contradicting keys, or one
                that cannot act beside the preset.
        """
        if mapping is None:
            return cls.disabled()
        if isinstance(mapping, cls):
            return mapping
        try:
            values = {str(k): v for k, v in dict(mapping).items()}  # pyright: ignore[reportArgumentType, reportCallIssue]
        except (TypeError, ValueError):
            raise ValueError(
                f"rollout_correction must be a mapping of keys, or null, got {shown(mapping)}; a preset is chosen by "
                "the key preset."
            ) from None
        canonical, warning = cls._canonical(values)
        config = cls(**canonical)
        if warning:
            warnings.warn(warning, stacklevel=2)
        return config

    @classmethod
    def from_slime_yaml(cls, path: str | Path) -> "Self":
        """Reads slime's YAML file of `use_tis`, `tis_mode`, ... keys.

        Raises:
            ImportError: PyYAML is missing.
            ValueError: the file does not hold a mapping, a threshold like 0.5_5 has no quotes, or as `from_dict`.
        """
        try:
            import yaml
        except ImportError as error:
            raise ImportError("Reading a YAML file needs PyYAML: pip install pyyaml") from error
        refuse_unquoted_bands(Path(path))
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: expected a mapping of keys, found {type(content).__name__}.")
        return cls.from_dict(content)

    @classmethod
    def _canonical(cls, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The fields that keys of any dialect come to, and what to say of their translation."""
        known = cls.__dataclass_fields__
        preset = values.get("preset")
        named = dialects.named_keys({k: v for k, v in values.items() if k != "preset"}, known)
        if preset is None:
            translation = dialects.to_canonical(named)
            return translation.canonical, translation.warning(translation.canonical) if translation.keys else ""
        if preset not in PRESET_NAMES:
            near = dialects.nearest(str(preset), PRESET_NAMES)
            raise ValueError(f"Unknown preset {preset!r}; nearest: {near}. All: {', '.join(PRESET_NAMES)}.")
        base = getattr(cls, str(preset))().to_dict()
        translation = override(named, base, str(preset))
        canonical = {**base, **translation.canonical}
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        form = {k: v for k, v in canonical.items() if v != defaults[k] or k in translation.canonical}
        return canonical, translation.warning(form) if translation.keys else ""

    def _check_ranges(self) -> None:
        if self.guard is False:
            self.guard = "off"  # as YAML reads a bare off
        if self.guard not in GUARDS:
            raise ValueError(f"guard must be one of {GUARDS}, got {self.guard!r}.")
        if self.guard == "fallback" and self.bypass_mode and self.loss_type == "reinforce":
            raise ValueError(
                "guard='fallback' with loss_type='reinforce': decoupled mode has no such loss to fall back to. Set "
                "guard='warn', or loss_type='ppo_clip'."
            )
        for name in ("guard_patience", "guard_return_after"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of updates, 1 or more, got {value!r}.")
        for name in _NUMBERS:
            if name != "rollout_token_veto_threshold" or getattr(self, name) is not None:
                setattr(self, name, parse_number(getattr(self, name), name))
        for name in _SHARES:
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} must be a share between 0 and 1, got {getattr(self, name)!r}.")
        if self.rollout_rs_auto_share < SMALLEST_AUTO_SHARE:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(
                f"rollout_rs_auto_share must be at least {SMALLEST_AUTO_SHARE:g}, got {self.rollout_rs_auto_share!r}: "
                "its quantile is taken over 3 / share images."
            )
        low, high = float(self.rollout_rs_auto_min), float(self.rollout_rs_auto_max)
        if not low <= high < math.inf:
            raise ValueError(f"rollout_rs_auto_max must be at least rollout_rs_auto_min={low:g}, got {high!r}.")
        if self.plan().calibrated and self.rollout_is_batch_normalize:
            raise ValueError(
                "rollout_is_batch_normalize=True with rollout_rs_threshold='auto': rows of different timesteps are "
                "corrected apart then, and have no common mean. Set one of the two otherwise."
            )

    def _check_level(self) -> None:
        if self.rollout_is is not None and self.rollout_is not in IS_LEVELS:
            raise ValueError(f"rollout_is must be one of {IS_LEVELS} or null, got {self.rollout_is!r}.")


def _of_plain_types(keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords with thresholds as Python's own numbers or text; refuses other types there, and in switches."""
    for name in ("rollout_is_batch_normalize", "bypass_mode"):
        if name in keywords and not isinstance(keywords[name], bool):
            raise TypeError(f"{name} must be true or false, got {shown(keywords[name])}.")
    bands = {key: plain_threshold(keywords[key], key) for key in _BANDS if key in keywords}
    numbers = {key: plain_threshold(keywords[key], key, band=False) for key in _NUMBERS if key in keywords}
    return {**keywords, **bands, **numbers}


def _translating(init: Callable[..., None]) -> Callable[..., None]:
    """`__init__` for keywords of any dialect, which those who know another project's class pass."""

    @functools.wraps(init)
    def translated(self: RolloutCorrectionConfig, /, *args: Any, **keywords: Any) -> None:
        known = self.__dataclass_fields__
        warning = ""
        if dialects.is_legacy_level(keywords.get("rollout_rs")) or not known.keys() >= keywords.keys():
            unknown = [key for key in keywords if not dialects.is_known(key, known)]
            if unknown:
                near = dialects.nearest(unknown[0], dialects.known_keys(known))
                raise TypeError(
                    f"{type(self).__name__} has no {unknown[0]!r}; nearest known: {near}. For another project's "
                    "section there is from_dict."
                )
            keywords, warning = self._canonical(keywords)
        init(self, *args, **_of_plain_types(keywords))
        if warning:
            warnings.warn(warning, stacklevel=2)

    return translated


RolloutCorrectionConfig.__init__ = _translating(RolloutCorrectionConfig.__init__)
