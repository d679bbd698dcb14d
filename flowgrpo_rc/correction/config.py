"""`RolloutCorrectionConfig`: which policies, weights and rejection a run uses. Needs no torch.

The keys are verl's, so that its configurations work unchanged; other dialects are translated in `dialects`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.correction import dialects
from flowgrpo_rc.correction.presets import PRESET_NAMES, Presets
from flowgrpo_rc.correction.thresholds import (
    IS_LEVELS,
    CorrectionPlan,
    make_plan,
    parse_is_threshold,
    parse_number,
)

if TYPE_CHECKING:
    from typing_extensions import Self

LOSS_TYPES = ("ppo_clip", "reinforce")
REJECTION_NORMALIZATIONS = ("all", "kept")


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig(Presets):
    """Rollout correction, validated at construction. Ratios are train over rollout.

    Raises:
        TypeError: a value of the wrong type, such as a bool threshold.
        ValueError: an unknown option, or thresholds that are missing, not positive, NaN or out of order.
    """

    rollout_is: str | None = "sequence"
    """Level of the importance weights: "token", "sequence", "geometric", or None for no weights."""
    rollout_is_threshold: str | float | int = 2.0
    """A number truncates weights at it (TIS); "lower_upper" zeroes weights outside the band (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch, across data-parallel ranks."""
    rollout_rs: str | None = None
    """Comma-separated rejection criteria (`thresholds.RS_OPTIONS`), all of which must pass; None for none."""
    rollout_rs_threshold: str | float | int | None = None
    """One entry for all criteria or one for each: "lower_upper" of the ratio for k1, an upper bound for k2, k3."""
    bypass_mode: bool = False
    """Take pi_rollout as pi_old and skip the pass that recomputes pi_old."""
    loss_type: str = "ppo_clip"
    """Loss in bypass mode: "ppo_clip" or "reinforce"."""
    rollout_token_veto_threshold: float | int | None = None
    """Reject a row if one of its ratios is below this; None for no veto."""
    rollout_is_mode: str | None = None
    """What happens to weights outside the bounds: "truncate", "zero", "clip", "mask"; None: by the threshold."""
    rejection_normalization: str = "all"
    """Denominator of the diffusion loss under rejection: "all" elements, or the "kept" ones."""

    def __post_init__(self) -> None:
        self._check_types()
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
            parse_is_threshold(self.rollout_is_threshold, self.rollout_is_mode)
        if self.rollout_token_veto_threshold is not None:
            veto = parse_number(self.rollout_token_veto_threshold, "rollout_token_veto_threshold")
            self.rollout_token_veto_threshold = veto
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

    @classmethod
    def from_dict(cls, mapping: "Mapping[str, Any] | RolloutCorrectionConfig | None") -> "Self":
        """Builds a configuration from canonical keys, `preset: NAME`, or another dialect (one warning each).

        `None` means no correction, metrics only (`disabled`). Keys beside `preset` override it.

        Raises:
            ValueError: an unknown key (the message lists the nearest known ones) or preset, contradicting keys.
        """
        if mapping is None:
            return cls.disabled()
        if isinstance(mapping, cls):
            return mapping
        values = {str(k): v for k, v in dict(mapping).items()}  # pyright: ignore[reportArgumentType, reportCallIssue]
        preset = values.pop("preset", None)
        canonical = dialects.to_canonical(values, known=tuple(cls.__dataclass_fields__))
        if preset is None:
            return cls(**canonical)
        return cls._of_preset(preset, canonical)

    @classmethod
    def from_slime_yaml(cls, path: str | Path) -> "Self":
        """Reads slime's YAML file of `use_tis`, `tis_mode`, ... keys.

        Raises:
            ImportError: PyYAML is missing.
            ValueError: the file does not hold a mapping, or as `from_dict`.
        """
        try:
            import yaml
        except ImportError as error:
            raise ImportError("Reading a YAML file needs PyYAML: pip install pyyaml") from error
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: expected a mapping of keys, found {type(content).__name__}.")
        return cls.from_dict(dialects.slime_file_keys(content))

    @classmethod
    def _of_preset(cls, preset: object, overrides: dict[str, Any]) -> "Self":
        if preset not in PRESET_NAMES:
            near = dialects.nearest(str(preset), PRESET_NAMES)
            raise ValueError(f"Unknown preset {preset!r}; nearest: {near}. All: {', '.join(PRESET_NAMES)}.")
        base = getattr(cls, str(preset))().to_dict()
        return cls(**{**base, **overrides})

    def _check_types(self) -> None:
        for name in ("rollout_is_batch_normalize", "bypass_mode"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.rollout_is is not None and self.rollout_is not in IS_LEVELS:
            raise ValueError(f"rollout_is must be one of {IS_LEVELS} or null, got {self.rollout_is!r}.")
