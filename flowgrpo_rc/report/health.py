"""The health check: run every check that the rows allow, worst finding first."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo_rc.report.check import Check
from flowgrpo_rc.report.checks_correction import CORRECTION_CHECKS
from flowgrpo_rc.report.checks_gap import GAP_CHECKS
from flowgrpo_rc.report.checks_images import HACKING_CHECKS
from flowgrpo_rc.report.checks_learning import LEARNING_CHECKS, LOG_CHECK
from flowgrpo_rc.report.checks_writer import WRITER_CHECKS
from flowgrpo_rc.report.finding import LEVELS, Finding
from flowgrpo_rc.report.history import History

# Causes before effects: among findings of one level, the first is the one to begin with.
CHECKS: tuple[Check, ...] = (
    LOG_CHECK,
    *GAP_CHECKS,
    *CORRECTION_CHECKS,
    *LEARNING_CHECKS,
    *HACKING_CHECKS,
    *WRITER_CHECKS,
)


def check_health(
    rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None, *, broken_lines: int = 0
) -> list[Finding]:
    """Compare a run's metrics with their healthy ranges.

    Args:
        rows: metrics by name, one mapping per step, as in ``metrics.jsonl``; ``step`` counts from 1 if it is missing.
            Rows of other trainers are checked as far as they use verl's names.
        config: the resolved configuration (``config.yaml``) as nested mappings. Without it, checks that compare with
            the clip band are left out, and log-probs count as those of tokens unless there are ``rollout_sync/`` or
            per-timestep metrics.
        broken_lines: lines of the log that could not be read.

    Returns:
        A finding for every check that has something to measure, problems first.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("rows: got none; give at least one step's metrics")
    history = History(rows, config, broken_lines)
    found = [finding for check in CHECKS if (finding := check.run(history)) is not None]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))
