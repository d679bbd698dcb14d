"""What the commands that take a configuration are told it by."""

import argparse


def add_configuration(command: argparse.ArgumentParser, default_config: str) -> None:
    """Adds the YAML file, its folder and the overrides on top of it."""
    command.add_argument("--config-name", default=default_config, help="YAML file, without its ending (%(default)s)")
    command.add_argument("--config-dir", help="folder of your own YAML files; they may build on the shipped ones")
    command.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. actor_rollout_ref.rollout.n=8")
