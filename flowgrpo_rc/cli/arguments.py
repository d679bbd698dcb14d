"""Parts of the parser that several commands share."""

import argparse
from typing import Any

BASE_CONFIG = "flowgrpo_trainer"
"""The YAML file below every run."""


def add_command(commands: Any, name: str, text: str, more: str = "") -> argparse.ArgumentParser:
    """Add a command; its ``--help`` shows ``text`` as a sentence, and ``more`` behind it or as its continuation."""
    end = more if more[:1] in (",", ":") else f". {more}".strip()
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}{end}")


def add_configuration(command: argparse.ArgumentParser, default_config: str = BASE_CONFIG) -> None:
    """Add the YAML file, its folder and the overrides on top of it."""
    command.add_argument("--config-name", default=default_config, help="YAML file, without its ending (%(default)s)")
    command.add_argument("--config-dir", help="folder of your own YAML files; they may build on the shipped ones")
    command.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. actor_rollout_ref.rollout.n=8")
