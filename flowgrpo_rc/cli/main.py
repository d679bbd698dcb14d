"""``flowgrpo-rc``: train, demo, probe, report, prepare-data, explain-config."""

import argparse
import os
import sys
from collections.abc import Sequence

from flowgrpo_rc import __version__
from flowgrpo_rc.cli.probe import add_probe
from flowgrpo_rc.cli.report import add_report
from flowgrpo_rc.threads import limit_spinning

DEMO_CONFIG = "tiny_qwen_image_ocr"
INTERRUPTED = 130
"""Exit code of a run that a signal ended early, with a checkpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 refused before training, 3 a probe found
    the configuration not safe or a report a problem, 4 a probe could not show it safe, 130 interrupted."""
    if "torch" not in sys.modules:  # with torch its threads are settled, and the process is the caller's own
        limit_spinning(os.environ)
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flowgrpo-rc",
        description="FlowGRPO training of flow-matching image models with rollout correction.",
    )
    parser.add_argument("--version", action="version", version=f"flowgrpo_rc {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    for name, default, text in (
        ("train", "flowgrpo_trainer", "train a LoRA with FlowGRPO"),
        (
            "demo",
            DEMO_CONFIG,
            "train the tiny model that comes with the package (a few minutes on two cores)",
        ),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("--config-name", default=default, help="YAML file, without its ending (%(default)s)")
        command.add_argument("--config-dir", help="folder of your own YAML files; they may build on the shipped ones")
        command.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
        command.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. actor_rollout_ref.rollout.n=8")
        command.set_defaults(run=_train)

    add_probe(commands, "flowgrpo_trainer")
    add_report(commands)

    prepare = commands.add_parser("prepare-data", help="turn a known data set into parquet files")
    prepare.add_argument("dataset", choices=["ocr"], help="ocr: train.txt and test.txt, a prompt a line")
    prepare.add_argument("--input", required=True, help="folder of the data set")
    prepare.add_argument("--output", required=True, help="folder for the parquet files")
    prepare.set_defaults(run=_prepare)

    explain = commands.add_parser("explain-config", help="say in words what a rollout correction does")
    explain.add_argument("settings", nargs="*", help="keys of algorithm.rollout_correction, e.g. bypass_mode=true")
    explain.set_defaults(run=_explain)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.cli.compose import compose, to_yaml

    try:
        config = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    except ValueError as error:
        return _refuse(error)
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    from flowgrpo_rc.actor import NonFiniteUpdateError
    from flowgrpo_rc.correction import NonFiniteLogProbError
    from flowgrpo_rc.rewards import RewardError
    from flowgrpo_rc.rollout import RolloutError
    from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer, NonFiniteMetricError

    try:
        trainer = FlowGRPOTrainer(config)
    except (ValueError, OSError, ImportError, CheckpointError) as error:
        return _refuse(error)
    failed = (CheckpointError, NonFiniteLogProbError, NonFiniteUpdateError, NonFiniteMetricError, RewardError)
    try:
        trainer.fit()
    except (*failed, RolloutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return INTERRUPTED if trainer.interrupted else 0


def _prepare(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.data import prepare_ocr

    try:
        for file in prepare_ocr(arguments.input, arguments.output):
            print(f"{file.path}: {file.num_prompts} prompts ({file.split})")
    except (ValueError, OSError) as error:
        return _refuse(error)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.correction import RolloutCorrectionConfig, explain
    from flowgrpo_rc.correction.quoting import read_value

    try:
        pairs = [setting.partition("=") for setting in arguments.settings]
        wrong = [key for key, equals, _ in pairs if not equals]
        if wrong:
            raise ValueError(f"cannot read {wrong[0]!r}; write key=value")
        result = explain(RolloutCorrectionConfig.from_dict({k: read_value(k, v) for k, _, v in pairs}))
    except (ValueError, TypeError) as error:
        return _refuse(error)
    print(result.text)
    for warning in result.warnings:
        print(f"warning: {warning}")
    return 0


def _refuse(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
