"""The command ``flowgrpo-rc``: its subcommands and their exit codes."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flowgrpo_rc import __version__
from flowgrpo_rc.cli.arguments import BASE_CONFIG, add_command, add_configuration
from flowgrpo_rc.cli.check_reward import add_check_reward
from flowgrpo_rc.cli.errors import COMMAND, FAILED, LOADING, NEGATIVE, REFUSED, TRAINING, exit_code, warnings_in_a_line
from flowgrpo_rc.cli.evaluate import add_evaluate
from flowgrpo_rc.cli.export_lora import add_export_lora
from flowgrpo_rc.cli.plan import add_plan
from flowgrpo_rc.cli.probe import add_probe
from flowgrpo_rc.cli.serve import add_serve
from flowgrpo_rc.cli.tune import add_tune
from flowgrpo_rc.threads import limit_spinning
from flowgrpo_rc.trainer.console import surviving_console
from flowgrpo_rc.trainer.interrupt import INTERRUPTED, ending_on_signals

DEMO_CONFIG = "tiny_qwen_image_ocr"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0: done. 1: failed while running. 2: refused before training. 3: a probe found the configuration not safe, a plan
    does not fit, a report found a problem, a reward does not score as expected, or a LoRA is worse than tolerated. 4: a
    probe could not show the configuration safe. 130: ended by a signal.

    An exception becomes a message on standard error and one of these codes. Only argparse exits by itself, after
    ``--help`` and for arguments that it cannot read.
    """
    # Once torch is imported its threads are set, and the process belongs to the caller.
    if "torch" not in sys.modules:
        limit_spinning(os.environ)
    with surviving_console() as (out, _err):
        arguments = _parse(argv)
        arguments.phase = COMMAND
        with warnings_in_a_line():
            try:
                with ending_on_signals():
                    code = arguments.run(arguments)
            # SystemExit too: one of a user's function must not end a run with the code of success.
            except BaseException as error:
                unfinished = getattr(arguments, "unfinished", None)
                return exit_code(error, phase=arguments.phase, unfinished=unfinished)
        # The output is the result of a command that trains nothing, so losing it is a failure. A reader such as head
        # that closes its pipe has lost nothing.
        is_lost = out.failure is not None and not isinstance(out.failure, BrokenPipeError)
        if is_lost and code == 0 and arguments.phase == COMMAND:
            print(f"error: the output could not be written: {out.failure}", file=sys.stderr)
            return FAILED
        return code


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, as those of the commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"error: {message}; see {self.prog} --help\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse; overrides may stand before, between and after options."""
    parser = _parser()
    # argparse takes one group of positional arguments and returns further ones as unknown.
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flowgrpo-rc", description="FlowGRPO training of flow-matching image models with rollout correction."
    )
    parser.add_argument("--version", action="version", version=f"flowgrpo_rc {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = "train the tiny model that comes with the package (a few minutes on two cores)"
    for name, default, text in (("train", BASE_CONFIG, "train a LoRA with FlowGRPO"), ("demo", DEMO_CONFIG, demo)):
        command = add_command(commands, name, text)
        add_configuration(command, default)
        command.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
        command.set_defaults(run=_train)

    encode = add_command(
        commands,
        "encode-prompts",
        "encode the prompts of a configuration ahead, so that its runs load no text encoder",
        "Training, validation and negative prompts; those in the store already are left alone. Exit code: 0 done, 1 "
        "failed, 2 refused.",
    )
    add_configuration(encode)
    encode.set_defaults(run=_encode, unfinished="the store keeps what was written")
    add_probe(commands)
    add_tune(commands)
    add_plan(commands)
    add_check_reward(commands, "flowgrpo_trainer")

    report = add_command(
        commands,
        "report",
        "check a run's health, and write one HTML page about it",
        f"The run may still be going on. Exit code: 0 no problem, {NEGATIVE} a problem found, 2 refused (not a run "
        "folder, or nothing in it yet).",
    )
    report.add_argument("folder", metavar="RUN_DIR", type=Path, help="a run folder: outputs/PROJECT/EXPERIMENT")
    report.add_argument("--out", type=Path, help="the HTML file (RUN_DIR/report.html)")
    report.set_defaults(run=_report)

    add_evaluate(commands)
    add_export_lora(commands)
    add_serve(commands)

    prepare = add_command(commands, "prepare-data", "turn a known data set into prompt files")
    names = ["ocr", "geneval", "geneval2", "drawbench", "partiprompts", "dpg"]
    prepare.add_argument("dataset", choices=names, help="the data set; ocr is flow_grpo's train.txt and test.txt")
    prepare.add_argument("--input", required=True, help="your copy of its repository; for all but ocr also its file")
    prepare.add_argument("--output", required=True, help="folder for the prompt files")
    prepare.set_defaults(run=_prepare)

    explain = add_command(commands, "explain-config", "describe a rollout correction in words")
    text = "keys of algorithm.rollout_correction, e.g. bypass_mode=true; beside a file any Hydra overrides"
    explain.add_argument("overrides", metavar="settings", nargs="*", help=text)
    explain.add_argument("--config-name", help="the correction of this YAML file, as train takes it")
    explain.add_argument("--config-dir", help="folder of your own YAML files")
    explain.set_defaults(run=_explain)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.cli.compose import compose, to_yaml

    config = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    arguments.phase = LOADING
    from flowgrpo_rc.models.parts import require_path

    require_path(config.actor_rollout_ref.model.path)
    # Imports torch and diffusers, for which a refused setting should not wait.
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    trainer = FlowGRPOTrainer(config)
    arguments.phase = TRAINING
    trainer.fit()
    return INTERRUPTED if trainer.interrupted else 0


def _encode(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.cli.compose import compose

    config = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    arguments.phase = LOADING
    from flowgrpo_rc.models.parts import require_path

    require_path(config.actor_rollout_ref.model.path)
    from flowgrpo_rc.models import check_pipeline
    from flowgrpo_rc.trainer.encoding import check_numbers, fill_store, open_checked
    from flowgrpo_rc.trainer.setup import make_accelerator, prompt_sets, read_prompts

    pipeline_class = check_pipeline(config.actor_rollout_ref.model.path)
    sets = prompt_sets(config, *read_prompts(config))
    for one in sets:
        check_numbers(pipeline_class, one.records)
    accelerator = make_accelerator(config)
    loader, store = open_checked(config.actor_rollout_ref.model, sets, accelerator)
    encoding = fill_store(loader.model, store, sets, accelerator)
    if accelerator.is_main_process:
        print(f"{encoding}\nStore: {store}")
    accelerator.end_training()
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.report import read_run, worst, write_report
    from flowgrpo_rc.report.page import headline

    run = read_run(arguments.folder)
    path, findings = write_report(run, arguments.out)
    print(headline(findings, run.history))
    for finding in findings:
        if finding.level != "ok":
            print(f"  {finding.level:8} {finding.check}: {finding.measured} ({finding.band})")
            print(f"           {finding.advice}")
    print(f"Written: {path}")
    return NEGATIVE if worst(findings) == "problem" else 0


def _prepare(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.data import prepare_ocr, prepare_prompts

    for option in ("input", "output"):
        # An unset variable of a shell script would fill the working folder.
        if not getattr(arguments, option):
            raise ValueError(f"--{option}: is empty; give a folder")
    if arguments.dataset == "ocr":
        files = prepare_ocr(arguments.input, arguments.output)
    else:
        files = prepare_prompts(arguments.dataset, arguments.input, arguments.output)
    for file in files:
        print(f"{file.path}: {file.num_prompts} prompts ({file.split})")
    return 0


def _composed(arguments: argparse.Namespace) -> Any:
    """A YAML file under the overrides; an override without a section is a key of the correction."""
    from flowgrpo_rc.cli.compose import compose

    full = [
        text if "." in text.partition("=")[0] else f"algorithm.rollout_correction.{text}"
        for text in arguments.overrides
    ]
    return compose(arguments.config_name or BASE_CONFIG, full, arguments.config_dir)


def _explain(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.correction import RolloutCorrectionConfig
    from flowgrpo_rc.correction.options.explanation import CleanImages, explain
    from flowgrpo_rc.correction.options.quoting import read_value

    # As a run takes them, too: algorithm.rollout_correction.bypass_mode=true.
    short = [re.sub(r"^(algorithm|actor_rollout_ref\.actor)\.rollout_correction\.", "", s) for s in arguments.overrides]
    pairs = [setting.partition("=") for setting in short]
    wrong = [key for key, equals, _ in pairs if not equals]
    if wrong:
        raise ValueError(f"cannot read {wrong[0]!r}; write key=value")
    try:
        if arguments.config_name is None and arguments.config_dir is None:
            result = explain(RolloutCorrectionConfig.from_dict({k: read_value(k, v) for k, _, v in pairs}))
        else:
            config = _composed(arguments)
            objective = config.actor_rollout_ref.actor.diffusion_loss.objective
            clean = CleanImages(objective.needs_old, objective.has_limit, config.algorithm.averages_old_policy)
            result = explain(config.rollout_correction, clean if objective.clean else None)
    except TypeError as error:
        # A value of a wrong type is a refusal here, not a bug.
        raise ValueError(str(error)) from error
    print(result.text)
    for warning in result.warnings:
        print(f"warning: {warning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
