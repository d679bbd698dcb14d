"""``flowgrpo-rc encode-prompts``: put the prompts of a configuration through the text encoder, ahead of its runs."""

import argparse
from typing import Any

from flowgrpo_rc.cli.arguments import add_configuration
from flowgrpo_rc.cli.errors import LOADING


def add_encode(commands: Any, default_config: str) -> None:
    """Adds the command to the parser's ``commands``."""
    text = "encode the prompts of a configuration ahead, so that its runs load no text encoder"
    command = commands.add_parser(
        "encode-prompts",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Training, validation and negative prompts; those in the store "
        "already are left alone. Exit code: 0 done, 1 failed, 2 refused.",
    )
    add_configuration(command, default_config)
    command.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Encodes what the store lacks and says what was done; returns the exit code."""
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
