"""The command ``flowgrpo-rc encode-prompts``: encode the prompts of a configuration ahead of its runs."""

import argparse
from typing import Any

from flowgrpo_rc.cli.arguments import add_command, add_configuration
from flowgrpo_rc.cli.errors import LOADING


def add_encode(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "encode-prompts",
        "encode the prompts of a configuration ahead, so that its runs load no text encoder",
        "Training, validation and negative prompts; those in the store already are left alone. Exit code: 0 done, 1 "
        "failed, 2 refused.",
    )
    add_configuration(command)
    command.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Encode the prompts that the store lacks and print a summary; returns the exit code."""
    from flowgrpo_rc.cli.compose import compose

    config = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    arguments.phase = LOADING
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
    return 0
