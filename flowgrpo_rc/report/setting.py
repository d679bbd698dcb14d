"""The kind of run, in words: headline, progress, and the settings that matter for the gap."""

from collections.abc import Sequence

from flowgrpo_rc.report.finding import OK, WATCH, Finding, number, worst
from flowgrpo_rc.report.history import LOSS, ROLLOUT, History, finite


def headline(findings: Sequence[Finding], history: History) -> str:
    """The verdict in a few words."""
    level = worst(findings)
    count = sum(f.level == level for f in findings)
    if level == OK and not history.trained:
        return "Nothing to judge yet"
    # A healthy beginning is no healthy run.
    if level == OK and unfinished(history):
        return f"Healthy so far, {progress(history).partition(',')[0]}"
    if level == OK:
        return f"Healthy: nothing to do in {count} {'check' if count == 1 else 'checks'}"
    if level == WATCH:
        return f"Watch: {count} of {len(findings)} checks left the healthy range"
    first = next(f for f in findings if f.level == level)
    more = f" and {count - 1} more" if count > 1 else ""
    return f"Problem: {first.title.lower()}{more}"


def unfinished(history: History) -> bool:
    """Return true if more steps are configured than logged."""
    total = finite(history.setting("trainer.total_training_steps"))
    return total is not None and history.steps[-1] < total


def progress(history: History) -> str:
    """``step 8 of 30, running or interrupted``."""
    last = history.steps[-1]
    total = finite(history.setting("trainer.total_training_steps"))
    if total is None:
        return f"step {last}"
    return f"step {last} of {total:.0f}" + (", running or interrupted" if unfinished(history) else ", finished")


def settings(history: History) -> list[tuple[str, str]]:
    """Names and values: engine, actor, batch, correction. Empty without a configuration."""
    if history.config is None:
        return []
    quantized = history.setting(f"{ROLLOUT}.quantization")
    lag = history.staleness
    mode = history.setting(f"{LOSS}.loss_mode", "")
    engine = f"{history.setting(f'{ROLLOUT}.name')} in {history.setting(f'{ROLLOUT}.dtype')}"
    engine += f", {quantized}-rounded weights" if quantized else ""
    engine += f", adapter {lag} batches old" if lag else ""
    actor = f"{history.setting('actor_rollout_ref.model.dtype')}, {mode}, {_limit(history)}"
    if history.setting("actor_rollout_ref.actor.detach_unconditional", False) is True:
        actor += ", no gradient through the unconditional half"
    return [
        ("Model", f"{history.setting('actor_rollout_ref.model.path')}"),
        ("Engine", engine),
        ("Actor", actor),
        ("Batch", _batch(history)),
        *_correction(history),
    ]


def _limit(history: History) -> str:
    """The objective's limit with its number."""
    limit = history.mode.objective.limit
    if not history.mode.objective.clips:
        return f"{limit.key} {history.setting(f'{LOSS}.{limit.key}')}"
    width = history.clip_width
    if history.setting(f"{LOSS}.clip_ratio") == "auto":
        return f"clip_ratio auto, now {number(width)}" if width else "clip_ratio auto"
    return f"clip_ratio {number(width)}" if width else "no clip_ratio"


def _batch(history: History) -> str:
    prompts = history.setting("data.train_batch_size")
    images = history.setting(f"{ROLLOUT}.n")
    mini = history.setting("actor_rollout_ref.actor.ppo_mini_batch_size")
    window = history.setting(f"{ROLLOUT}.algo.sde_window_size")
    steps = history.setting(f"{ROLLOUT}.pipeline.num_inference_steps")
    sde = history.setting(f"{ROLLOUT}.algo.sde_type")
    return f"{prompts} prompts x {images} images, mini-batches of {mini} prompts; {window} of {steps} steps are {sde}"


def _correction(history: History) -> list[tuple[str, str]]:
    """``explain`` of the rollout correction, one pair per line; a refused section is quoted."""
    from flowgrpo_rc.correction import explain

    mode = history.configured_mode
    if mode is None:
        return [("Correction", f"{history.setting('algorithm.rollout_correction')}, which this version refuses")]
    lines = explain(mode.rollout_correction).text.splitlines()
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
