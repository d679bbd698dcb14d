"""The command ``flowgrpo-rc plan``: memory and time of a configuration, before anything is loaded."""

import argparse
import math
from contextlib import suppress
from typing import Any

from flowgrpo_rc.cli.arguments import add_command, add_configuration
from flowgrpo_rc.cli.errors import NEGATIVE
from flowgrpo_rc.planner.machines import TRIED, Gpus, read_gpus


def add_plan(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "plan",
        "compute how much memory and time a configuration needs on GPUs",
        f"From configuration files alone: no weights are read and no GPU is needed. Exit code: 0 it fits, "
        f"{NEGATIVE} it does not (without a list: none of the sizes that are tried), 2 refused.",
    )
    add_configuration(command)
    command.add_argument(
        "--gpus",
        nargs="?",
        metavar="LIST",
        help="how many GPUs of how many GB, e.g. 4x80, or several: 4x80,8x24; without it 1, 2, 4 and 8 of 24, 48, 80 "
        "and 141 GB are tried",
    )
    command.add_argument(
        "--reward-seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="seconds that the rewards of a batch take after its images are drawn; GPUs that take turns idle then, "
        "which counts in the comparison with engines one batch ahead",
    )
    command.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Plan and print; returns the exit code."""
    # An override behind a bare --gpus is no list of GPUs.
    if arguments.gpus is not None and "=" in arguments.gpus:
        arguments.overrides.append(arguments.gpus)
        arguments.gpus = None
    chosen = read_gpus(arguments.gpus) if arguments.gpus is not None else []
    from flowgrpo_rc.cli.compose import compose

    config = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    # Refused before the plan is made, which takes seconds for a large model.
    for gpus in chosen:
        _check_processes(config, gpus.count)
    from flowgrpo_rc.planner.memory import MemoryPlan
    from flowgrpo_rc.planner.text import describe, table
    from flowgrpo_rc.trainer.memory import planned_run

    plan = MemoryPlan(planned_run(config))
    tried = chosen or [Gpus(count, size) for count, size in TRIED if _divides(config, count)]
    fitting = [gpus for gpus in tried if plan.settled(gpus).fits(gpus)]
    described = []
    for gpus in chosen:
        trainers = [count for count in range(1, gpus.count) if _divides(config, count)]
        described.append(describe(plan, gpus, trainers, arguments.reward_seconds))
    print("\n\n".join(described) if chosen else table(plan, tried))
    return 0 if fitting and (not chosen or len(fitting) == len(chosen)) else NEGATIVE


def _check_processes(config: Any, count: int) -> None:
    """Raise ``ValueError`` if ``train`` would refuse so many processes of one machine."""
    from flowgrpo_rc.models.sharding import check_division

    config.check_processes(count)
    check_division(config.actor_rollout_ref.actor.fsdp_config, count, count)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text}; give seconds, 0 or more")


def _divides(config: Any, count: int) -> bool:
    """True if so many processes can share the run's mini-batches and weights."""
    try:
        _check_processes(config, count)
    except ValueError:
        return False
    return True
