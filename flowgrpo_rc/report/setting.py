"""The kind of run, in words: headline, progress, and the settings that matter for the gap."""

from collections.abc import Sequence
from typing import Any

from flowgrpo_rc.report.finding import PROBLEM, WATCH, Finding, number, worst
from flowgrpo_rc.report.history import LOSS, ROLLOUT, History, finite

UNFINISHED = "running or interrupted"


def headline(findings: Sequence[Finding], history: History) -> str:
    """The verdict in a few words; the worst findings come first."""
    level = worst(findings)
    count = sum(f.level == level for f in findings)
    reached, _, state = progress(history).partition(", ")
    if level == PROBLEM:
        more = f" and {count - 1} more" if count > 1 else ""
        return f"Problem: {findings[0].title.lower()}{more}"
    if level == WATCH:
        return f"Watch: {count} of {len(findings)} checks left the healthy range"
    if not history.trained:
        return "Nothing to judge yet"
    # A healthy beginning is no healthy run.
    if state == UNFINISHED:
        return f"Healthy so far, {reached}"
    return f"Healthy: nothing to do in {count} {'check' if count == 1 else 'checks'}"


def progress(history: History) -> str:
    """``step 8 of 30, running or interrupted``."""
    last = history.steps[-1]
    total = finite(history.setting("trainer.total_training_steps"))
    if total is None:
        return f"step {last}"
    return f"step {last} of {total:.0f}, {UNFINISHED if last < total else 'finished'}"


def settings(history: History) -> list[tuple[str, str]]:
    """Names and values: engine, actor, batch, correction. Empty without a configuration."""
    if history.config is None:
        return []

    def rollout(key: str) -> Any:
        return history.setting(f"{ROLLOUT}.{key}")

    engine = f"{rollout('name')} in {rollout('dtype')}"
    if quantized := rollout("quantization"):
        engine += f", {quantized}-rounded weights"
    if history.staleness:
        engine += f", adapter {history.staleness} batches old"
    mode = history.setting(f"{LOSS}.loss_mode", "")
    actor = f"{history.setting('actor_rollout_ref.model.dtype')}, {mode}, {_limit(history)}"
    if history.setting("actor_rollout_ref.actor.detach_unconditional", False) is True:
        actor += ", no gradient through the unconditional half"
    prompts = history.setting("data.train_batch_size")
    mini = history.setting("actor_rollout_ref.actor.ppo_mini_batch_size")
    batch = f"{prompts} prompts x {rollout('n')} images, mini-batches of {mini} prompts; "
    batch += f"{rollout('algo.sde_window_size')} of {rollout('pipeline.num_inference_steps')} steps are "
    batch += f"{rollout('algo.sde_type')}"
    model = f"{history.setting('actor_rollout_ref.model.path')}"
    return [("Model", model), ("Engine", engine), ("Actor", actor), ("Batch", batch), *_correction(history)]


def _limit(history: History) -> str:
    """The objective's limit with its number."""
    limit = history.mode.objective.limit
    if not history.mode.objective.clips:
        return f"{limit.key} {history.setting(f'{LOSS}.{limit.key}')}"
    width = history.clip_width
    if history.setting(f"{LOSS}.clip_ratio") == "auto":
        return f"clip_ratio auto, now {number(width)}" if width else "clip_ratio auto"
    return f"clip_ratio {number(width)}" if width else "no clip_ratio"


def _correction(history: History) -> list[tuple[str, str]]:
    """``explain`` of the rollout correction, one pair per line; a refused section is quoted."""
    from flowgrpo_rc.correction import explain

    mode = history.configured_mode
    if mode is None:
        return [("Correction", f"{history.setting('algorithm.rollout_correction')}, which this version refuses")]
    lines = explain(mode.rollout_correction).text.splitlines()
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
