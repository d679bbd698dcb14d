"""The command ``flowgrpo-rc tune``: try cheaper samplers on a few groups, and print the cheapest that is shown safe."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowgrpo_rc.cli.arguments import add_command, add_configuration
from flowgrpo_rc.cli.errors import LOADING, TRAINING
from flowgrpo_rc.cli.results import make_folder, write_files

RESULT = "tune.json"


def add_tune(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "tune",
        "try cheaper rollouts before training, and print the cheapest settings that are shown safe",
        "Exit code: 0 done, 1 failed, 2 refused.",
    )
    add_configuration(command)
    command.add_argument(
        "--budget", type=int, help="images to draw, over all samplers (as many as give each of them 8 prompts)"
    )
    command.add_argument("--out", type=Path, default=Path("outputs/tune"), help="folder for tune.json (%(default)s)")
    command.set_defaults(run=run_command, unfinished="no result was written")


def run_command(arguments: argparse.Namespace) -> int:
    """Try, write and print; returns the exit code."""
    from flowgrpo_rc.cli.compose import compose_without_run
    from flowgrpo_rc.trainer.launch import has_peers

    if has_peers():
        raise ValueError("tune compares samplers in one process; start it without torchrun")
    with tempfile.TemporaryDirectory() as folder:
        config = compose_without_run(arguments, folder)
        if config.data.preferences:
            raise ValueError("data.preferences: got files, whose images are drawn already; leave it out")
        from flowgrpo_rc.models.parts import require_path

        require_path(config.actor_rollout_ref.model.path)
        from flowgrpo_rc.trainer import FlowGRPOTrainer
        from flowgrpo_rc.trainer.tune import cheapest, samplers, tune

        parts = config.actor_rollout_ref
        count = len(list(samplers(parts.rollout, clean=not config.records_steps)))
        groups = prompts_of_budget(arguments.budget, count, parts.rollout.n)
        make_folder(arguments.out)
        arguments.phase = LOADING
        trainer = FlowGRPOTrainer(config)
        arguments.phase = TRAINING
        try:
            found = tune(trainer, groups)
            best = cheapest(found)
            print(report(found, best, groups * parts.rollout.n))
            result = {"images": groups * parts.rollout.n, "tried": [asdict(one) for one in found]}
            result["cheapest"] = best.settings

            def write(root: Path) -> None:
                (root / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

            print("\n".join(write_files(arguments.out, (RESULT,), write, _measured)))
        finally:
            trainer.run.end_rewards()
            trainer.run.close_engines()
    return 0


def prompts_of_budget(budget: int | None, count: int, n: int) -> int:
    """Prompts for each of ``count`` samplers with ``n`` images a prompt.

    Raises:
        ValueError: the budget gives a sampler fewer than two prompts, from which no interval follows.
    """
    from flowgrpo_rc.trainer.tune import GROUPS

    if budget is None:
        return GROUPS
    # One prompt's images warm up.
    groups = (budget - n) // (count * n)
    if groups < 2:
        raise ValueError(
            f"--budget: got {budget}; {count} samplers with two prompts of {n} images (actor_rollout_ref.rollout.n), "
            f"and one prompt to warm up, need {(2 * count + 1) * n}"
        )
    return groups


def report(found: Sequence[Any], best: Any, images: int) -> str:
    """The table, and the cheapest settings."""
    lines = [
        f"{images} images for each sampler, with the same prompts, windows and noise; an interval holds the mean with "
        "95 % confidence, prompts being independent",
        "",
        f"{'forwards':>8} {'s/image':>8} {'reward':>8} {'shift':>8} {'interval':>18} {'spread':>7} {'gap':>8}"
        "  settings",
    ]
    for one in found:
        gap = "" if one.gap is None else f"{one.gap:.1e}"
        interval = "" if one is found[0] else f"{one.low:+.3f} to {one.high:+.3f}"
        shift = "" if one is found[0] else f"{one.shift:+.3f}"
        names = " ".join(setting.removeprefix("actor_rollout_ref.rollout.") for setting in one.settings)
        lines.append(
            f"{one.forwards:8.2f} {one.seconds:8.3f} {one.reward:8.3f} {shift:>8} {interval:>18} {one.spread:7.3f} "
            f"{gap:>8}  {names}"
        )
        lines += [f"{'':8} not taken: {objection}" for objection in one.objections]
    pasted = " ".join(best.settings)
    if best is found[0]:
        says = "Nothing cheaper is shown safe: keep the full sampler, or give a larger --budget"
        return "\n".join([*lines, "", says, pasted])
    saved = f"{1 - best.forwards / found[0].forwards:.0%} fewer forwards"
    if best.cached:
        saved += f", {1 - best.seconds / found[0].seconds:.0%} less time"
    return "\n".join([*lines, "", f"Cheapest that is shown safe, {saved}:", pasted])


def _measured(path: Path) -> Any:
    """A result without its seconds, which differ from one call to the next; ``None`` if there is none to read."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        for one in result["tried"]:
            del one["seconds"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return result
