"""Drop-in for verl 0.9.1's ``verl.trainer.ppo.rollout_corr_helper``.

The same names, signatures and return types, and the same weights, masks and metrics, from one transfer instead of some
seventy. Three conventions of verl's are reproduced only here: the k1 band acts on ``-l`` (so "lower_upper" keeps
``1/upper <= r <= 1/lower``), ``*_k1_fraction_high`` counts small ratios, and rows without a valid element enter the
averages over rows as zeros.

These functions stay finite or raise where verl overflows to inf or passes a NaN on. verl itself is imported only to
build a ``DataProto`` and by ``install``.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.correction.numerics.compute import run_plan
from flowgrpo_rc.correction.numerics.metrics import MetricTable, deviation, least, mean, most, sample_deviation
from flowgrpo_rc.correction.numerics.moments import PREFIX, RolloutCorrection
from flowgrpo_rc.correction.numerics.weights import row_mean, row_sum
from flowgrpo_rc.correction.plan import RS_OPTIONS, SAFETY_BOUND, CorrectionPlan, ThresholdSpec, make_plan

__all__ = [
    "SAFETY_BOUND",
    "SUPPORTED_ROLLOUT_RS_OPTIONS",
    "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
    "apply_bypass_mode",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_rs_metrics",
    "install",
]

SUPPORTED_ROLLOUT_RS_OPTIONS: set[str] = set(RS_OPTIONS)
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS: set[str] = {option for option in RS_OPTIONS if option.startswith("token")}

Metrics = dict[str, float]


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    rollout_is: str | None = None,
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: ThresholdSpec = None,
) -> tuple[Any, Shaped[Tensor, "B T"], Metrics]:
    """``(DataProto with "rollout_is_weights" or None, response mask times keep, metrics)``, as verl.

    Raises:
        ValueError: shapes differ, no element is valid, a valid log-prob is NaN or infinite, a bad option.
        ImportError: with ``rollout_is``, when verl is not installed.
    """
    plan = _plan(rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold)
    result = _run(old_log_prob, rollout_log_prob, response_mask, plan)
    return weights_proto(result.weights), result.mask, result.metrics


def compute_rollout_correction_weights(
    log_ratio: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    rollout_is: str = "token",
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Float[Tensor, "B T"], Metrics]:
    """Importance weights of log ratios (train over rollout), and their metrics without a prefix."""
    plan = _plan(rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    result = _run(log_ratio, torch.zeros_like(log_ratio), response_mask, plan)
    if result.weights is None:
        raise ValueError("rollout_is and rollout_is_threshold must be given.")
    return result.weights, _select(result, "rollout_is_")


def compute_rollout_rejection_mask(
    log_ratio: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: ThresholdSpec = None,
) -> tuple[Shaped[Tensor, "B T"], Metrics]:
    """Mask times keep for log ratios (train over rollout), and the criteria's metrics without a prefix."""
    if not isinstance(rollout_rs, str):
        raise ValueError("rollout_rs must be a string of comma-separated options.")
    plan = _plan(rollout_rs=rollout_rs, rollout_rs_threshold=rollout_rs_threshold)
    # verl returns an empty batch as it is.
    if log_ratio.shape[0] == 0:
        return response_mask, {}
    result = _run(log_ratio, torch.zeros_like(log_ratio), response_mask, plan)
    return result.mask, _select(result, "rollout_rs_")


def compute_offpolicy_metrics(
    old_log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"] | None,
    response_mask: Shaped[Tensor, "B T"],
) -> dict[str, Any]:
    """Diagnostics without a prefix; the training policy's perplexity alone when there are no rollout log-probs."""
    known = old_log_prob if rollout_log_prob is None else rollout_log_prob
    metrics = _select(_run(old_log_prob, known, response_mask, CorrectionPlan()), "")
    # Of one policy only perplexities are defined.
    if rollout_log_prob is not None:
        return metrics
    return {name: metrics[name] for name in ("training_ppl", "training_log_ppl")}


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Float[Tensor, "B T"], rollout_log_prob: Float[Tensor, "B T"], response_mask: Shaped[Tensor, "B T"]
) -> Metrics:
    """Diagnostics of the current policy against the rollout policy, prefixed ``rollout_corr/``."""
    return _run(log_prob, rollout_log_prob, response_mask, CorrectionPlan()).metrics


def compute_rollout_correction_and_add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, Metrics]:
    """Replaces ``response_mask`` in a ``DataProto``, adds ``rollout_is_weights`` if there are weights."""
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch.batch[Key.OLD_LOG_PROBS],
        batch.batch[Key.ROLLOUT_LOG_PROBS],
        batch.batch[Key.RESPONSE_MASK],
        **{name: rollout_corr_config.get(name, default) for name, default in OPTIONS.items()},
    )
    batch.batch[Key.RESPONSE_MASK] = mask
    return (batch if weights is None else batch.union(weights)), metrics


@torch.no_grad()
def compute_is_metrics(
    rollout_is_weights: Float[Tensor, "..."],
    raw_rollout_is_weights: Float[Tensor, "..."],
    log_ratio_for_metrics: Float[Tensor, "..."],
    response_mask: Shaped[Tensor, "..."],
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """Metrics of importance weights, without a prefix.

    Args:
        rollout_is_weights: as applied, 0 where masked.
        raw_rollout_is_weights: before their bounds, 0 where masked.
        log_ratio_for_metrics: unclamped log ratios: of elements for "token", of rows for "sequence".
        response_mask: non-zero where an element is valid.
        rollout_is: "sequence", or else "token".
        rollout_is_threshold, rollout_is_threshold_lower: the bounds; None: 1 / the upper one.

    Raises:
        ValueError: no element is valid.
    """
    valid = _valid(response_mask)
    upper = rollout_is_threshold
    lower = 1.0 / upper if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    weights = rollout_is_weights.double().reshape(valid.shape)
    raw = raw_rollout_is_weights.double().reshape(valid.shape)
    bounded = weights.clamp(min=0.0, max=upper)
    count = row_sum(valid)
    table = MetricTable(valid, count, torch.ones_like(valid[:, 0]))
    table.elements("mean", mean, _masked(weights, valid))
    table.elements("std", deviation, _masked(bounded, valid), _masked(bounded.square(), valid))
    if rollout_is == "sequence":
        ratios = log_ratio_for_metrics.flatten()
        table.rows("ratio_fraction_high", mean, ratios > math.log(upper))
        table.rows("ratio_fraction_low", mean, ratios < math.log(lower))
        table.rows("min", least, ratios.double().clamp(max=SAFETY_BOUND).exp())
        table.rows("max", most, ratios.double().clamp(max=SAFETY_BOUND).exp())
    else:
        table.elements("ratio_fraction_high", mean, (raw > upper) & valid)
        table.elements("ratio_fraction_low", mean, (raw < lower) & valid)
        table.elements("min", least, weights)
        table.elements("max", most, weights)
    if rollout_is_weights.dim() > 1:
        judged = row_mean(_masked(raw, valid), count)
        _add_rows(table, row_mean(_masked(weights, valid), count), judged, lower, upper, centre=1.0)
    figures = table.figures(table.totals().tolist())
    count, total, squares = figures["std"].numbers
    mean_square = squares / count
    # verl adds 1e-8 to the mean weight.
    size = (total / count + 1e-8) ** 2 / mean_square if mean_square > 0 else 0.0
    metrics = {name: figure.value for name, figure in figures.items()} | {"eff_sample_size": size}
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


@torch.no_grad()
def compute_rs_metrics(
    option_name: str,
    rs_statistic: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    seq_valid_mask: Bool[Tensor, " B"],
    *,
    level: str,
    per_sequence_values: Float[Tensor, "..."] | None,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float,
    apply_lower_threshold: bool,
) -> dict[str, float]:
    """Metrics of one rejection criterion's statistic, without a prefix.

    Args:
        option_name: names the metrics: ``rollout_rs_{option_name}_...``.
        rs_statistic: of every element; a row's own at each of its elements.
        response_mask: non-zero where an element is valid.
        seq_valid_mask: rows that count.
        level: "sequence" takes extremes and fractions over rows, "token" over elements.
        per_sequence_values: the rows' statistic, ``(B,)`` or ``(B, 1)``; None: the rows' means.
        rollout_rs_threshold, rollout_rs_threshold_lower: bounds of the statistic, which for k1 are logarithms.
        apply_lower_threshold: whether there is a lower bound.

    Raises:
        ValueError: no element is valid.
    """
    valid = _valid(response_mask)
    upper = rollout_rs_threshold
    lower = rollout_rs_threshold_lower if apply_lower_threshold else -math.inf
    statistic = _masked(rs_statistic.double(), valid)
    inside = _masked(statistic.clamp(min=lower if apply_lower_threshold else 0.0, max=upper), valid)
    count = row_sum(valid)
    rows = row_mean(statistic, count) if per_sequence_values is None else per_sequence_values.flatten().double()
    table = MetricTable(valid, count, seq_valid_mask)
    table.elements("mean", mean, statistic)
    table.elements("std", deviation, inside, inside.square())
    of_units = table.rows if level == "sequence" else table.elements
    units = rows if level == "sequence" else statistic
    counted = seq_valid_mask if level == "sequence" else valid
    of_units("max", most, units)
    of_units("min", least, units)
    of_units("fraction_high", mean, (units > upper) & counted)
    of_units("fraction_low", mean, (units < lower) & counted)
    _add_rows(table, rows, rows, lower, upper, centre=0.0)
    metrics = {name: figure.value for name, figure in table.figures(table.totals().tolist()).items()}
    if not apply_lower_threshold:
        del metrics["seq_fraction_low"]
    return {f"rollout_rs_{option_name}_{name}": value for name, value in metrics.items()}


def _add_rows(table: MetricTable, rows: Tensor, judged: Tensor, lower: float, upper: float, *, centre: float) -> None:
    """Metrics of rows; ``judged`` is held against the bounds."""
    table.rows("seq_mean", mean, rows)
    table.rows("seq_std", sample_deviation, rows, rows.square())
    table.rows("seq_max", most, rows)
    table.rows("seq_min", least, rows)
    table.rows("seq_max_deviation", most, (rows - centre).abs())
    table.rows("seq_fraction_high", mean, judged > upper)
    table.rows("seq_fraction_low", mean, judged < lower)


def _valid(mask: Tensor) -> Bool[Tensor, "B T"]:
    valid = mask.reshape(len(mask), -1) != 0
    if not valid.any():
        raise ValueError("response_mask has no valid element: there is nothing to measure.")
    return valid


def _masked(values: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return values.masked_fill(~valid, 0.0)


def apply_bypass_mode(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """Sets ``old_log_probs`` to ``rollout_log_probs``, and the policy loss to verl's bypass loss.

    Raises:
        ValueError: the batch has no ``rollout_log_probs``.
    """
    from omegaconf import open_dict

    # The same tensor, as in verl: nobody writes into it.
    if Key.ROLLOUT_LOG_PROBS not in batch.batch:
        raise ValueError(
            "bypass_mode needs rollout_log_probs in the batch: set actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    batch.batch[Key.OLD_LOG_PROBS] = batch.batch[Key.ROLLOUT_LOG_PROBS]
    with open_dict(policy_loss_config):
        policy_loss_config["rollout_correction"] = rollout_corr_config
        policy_loss_config["loss_mode"] = "bypass_mode"


class Replacement:
    """Functions of one module, replaced; ``undo`` puts the originals back."""

    def __init__(self) -> None:
        self._places: list[tuple[ModuleType, str, Any]] = []

    @property
    def places(self) -> tuple[str, ...]:
        """Every replaced function, as ``module.name``."""
        return tuple(f"{module.__name__}.{name}" for module, name, _ in self._places)

    def apply(self, home: ModuleType, functions: Mapping[str, Callable[..., Any]], package: str) -> None:
        """Replaces ``functions`` in ``home``, and in every loaded module of ``package`` that holds the originals.

        Raises:
            AttributeError: ``home`` has no function of that name, so it is another version than expected.
        """
        # Replacing half of the functions would mix two conventions in silence.
        missing = [name for name in functions if not hasattr(home, name)]
        if missing:
            raise AttributeError(f"{home.__name__} has no {', '.join(missing)}: an unexpected version.")
        # Modules that imported a function by name hold the original, and would go on calling it.
        originals = {name: getattr(home, name) for name in functions}
        loaded = [m for name, m in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
        for module in [home, *(m for m in loaded if isinstance(m, ModuleType))]:
            for name, original in originals.items():
                if vars(module).get(name) is original and original is not functions[name]:
                    self._places.append((module, name, original))
                    setattr(module, name, functions[name])

    def undo(self) -> None:
        """Restores what ``apply`` replaced."""
        while self._places:
            module, name, original = self._places.pop()
            setattr(module, name, original)


def install() -> Replacement:
    """Puts these functions in the place of verl's, also where verl imported them by name before.

    Returns:
        What was replaced; its ``undo()`` restores verl's functions.

    Raises:
        ImportError: verl is not installed.
    """
    try:
        from verl.trainer.ppo import rollout_corr_helper
    except ImportError as error:
        raise ImportError(f"install() replaces functions of verl 0.9.1, which cannot be imported: {error}") from error
    replacement = Replacement()
    functions = {name: globals()[name] for name in __all__ if name.startswith(("compute_", "apply_"))}
    replacement.apply(rollout_corr_helper, functions, package="verl")
    return replacement


def plan_of_options(
    rollout_is: str | None = None,
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: ThresholdSpec = None,
) -> CorrectionPlan:
    """The plan of verl's options: no weights without a threshold; k1 bands act on ``r``, as documented."""
    # verl does not look at a threshold that has nothing to act on.
    return make_plan(
        None if rollout_is_threshold is None else rollout_is,
        None if rollout_is is None else rollout_is_threshold,
        rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=None if rollout_rs is None else rollout_rs_threshold,
    )


OPTIONS = {name: option.default for name, option in inspect.signature(plan_of_options).parameters.items()}
"""verl's options of weights and rejection, and their defaults."""


def _plan(*options: Any, **named: Any) -> CorrectionPlan:
    """verl's reading of the options of ``plan_of_options``: no ``geometric``, mirrored k1 bands."""
    plan = plan_of_options(*options, **named)
    # An extension of ours, which verl's users must not get by a typo.
    if plan.importance is not None and plan.importance.level == "geometric":
        raise ValueError("verl has the levels 'token' and 'sequence' for rollout_is, got 'geometric'.")
    if any(c.statistic == "k1" and c.lower == -math.inf for c in plan.criteria):
        raise ValueError("verl has no k1 band without a lower bound: give a positive one.")
    mirrored = [
        replace(c, lower=-c.upper, upper=-c.lower, mirrored=True) if c.statistic == "k1" else c for c in plan.criteria
    ]
    return replace(plan, criteria=tuple(mirrored))


def _run(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, plan: CorrectionPlan) -> RolloutCorrection:
    """Runs a plan in verl's conventions; its effective sample size has 1e-8 added to the mean weight."""
    result = run_plan(log_prob, rollout_log_prob, mask, plan=replace(plan, counts_empty_rows=True))
    mean = result.metrics.get(f"{PREFIX}rollout_is_mean", 0.0)
    # verl adds 1e-8 to the mean weight.
    if mean > 0.0:
        result.metrics[f"{PREFIX}rollout_is_eff_sample_size"] *= (1.0 + 1e-8 / mean) ** 2
    return result


def _select(result: RolloutCorrection, start: str) -> Metrics:
    metrics = {name.removeprefix(PREFIX): value for name, value in result.metrics.items()}
    return {name: value for name, value in metrics.items() if name.startswith(start)}


def weights_proto(weights: Tensor | None) -> Any:
    """Weights in verl's ``DataProto``; None where there are none.

    Raises:
        ImportError: verl is not installed.
    """
    if weights is None:
        return None
    try:
        from verl.protocol import DataProto
    except ImportError as error:
        raise ImportError(f"The weights are returned in verl's DataProto, and verl is missing: {error}") from error
    return DataProto.from_dict(tensors={Key.ROLLOUT_IS_WEIGHTS: weights})
