"""The check on whether trainer and engines elsewhere wait for each other."""

from flowgrpo_rc.report.check import Check, Measurement, span_words
from flowgrpo_rc.report.finding import HealthyRange
from flowgrpo_rc.report.history import History

ENOUGH = 4
"""Steps that it takes: in the first one, nothing has been drawn ahead yet."""
AHEAD = "actor_rollout_ref.rollout.ahead"


def waiting(history: History) -> Measurement | None:
    """The larger of the shares of the time that engines were idle and that the trainer waited for images."""
    busy = history.recent("perf/engines_busy")
    waits = history.recent("perf/trainer_waits")
    if busy is None or waits is None or len(busy) < ENOUGH:
        return None
    idle = 1 - busy.mean
    says = f"engines were idle {idle:.0%} of the time, the trainer waited for images {waits.mean:.0%} of it, "
    says += span_words(busy.span)
    if waits.mean > idle:
        advice = "Give the engines more GPUs (rollout.devices, rollout.engines), or draw in a lower rollout.dtype."
        return Measurement(waits.mean, waits.metric, waits.span, says, _turns(history) or advice)
    return Measurement(idle, busy.metric, busy.span, says, _turns(history) or _rewards(history))


def _rewards(history: History) -> str | None:
    """What to do where it is the rewards that keep the trainer from the images; None where it is not."""
    reward = history.recent("timing_s/reward")
    update = history.recent("timing_s/update")
    if reward is None or update is None or reward.mean <= update.mean:
        return None
    return (
        f"The trainer waits for rewards ({reward.mean:.3g} s a step) longer than it learns ({update.mean:.3g} s): have "
        "a server score them while it learns (reward.remote with streams=true), or make the server faster."
    )


def _turns(history: History) -> str | None:
    """What to do where trainer and engines take turns; None where they do not."""
    if history.setting(AHEAD, 0):
        return None
    return "Set rollout.ahead=1: the engines draw a batch while the trainer learns from the one before."


WAITING_CHECK = Check(
    name="waiting",
    title="Trainer and engines waiting for each other",
    measure=waiting,
    sde=HealthyRange(high=0.5),
    reason="No split of a few GPUs is even; where one side is idle for half of the time, a GPU of it does more on the "
    "other side.",
    advice="Give the trainer some of the engines' GPUs; flowgrpo-rc plan --gpus says which split is fastest.",
)
