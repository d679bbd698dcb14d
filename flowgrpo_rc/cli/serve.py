"""``flowgrpo-rc serve-reward``: serve a reward function to training runs on this machine or others.

Needs numpy, pillow, uvicorn and starlette, and the imports of the function itself.
"""

import argparse
import ast
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from flowgrpo_rc.cli.arguments import add_command
from flowgrpo_rc.rewards import CustomRewardConfig, RewardConfig, RewardMix, build_reward
from flowgrpo_rc.rewards.forms import PerImageReward
from flowgrpo_rc.rewards.http_client import is_loopback, read_key
from flowgrpo_rc.rewards.registry import REWARDS
from flowgrpo_rc.rewards.remote.protocols import SERVED
from flowgrpo_rc.rewards.remote.server import RewardServer

PORT = 18080


def add_serve(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "serve-reward",
        "answer requests for the scores of a reward function",
        ", until Ctrl-C or SIGTERM. Needs the extra serve and what the function imports. Exit code: 0 ended by a "
        "signal, 2 refused, 1 failed.",
    )
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--path", help="a Python file with a reward function, as in reward.custom_reward_function.path")
    which.add_argument("--reward", choices=sorted(REWARDS), help="a built-in reward")
    command.add_argument("--name", default="compute_score", help="the function in the file of --path (%(default)s)")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (%(default)s: reached from this machine alone; 0.0.0.0: from everywhere)",
    )
    command.add_argument("--port", type=int, default=PORT, help="its port (%(default)s); 0 for a free one")
    command.add_argument("--protocol", choices=sorted(SERVED), default="json", help="what is spoken (%(default)s)")
    command.add_argument("--timeout", type=float, default=3600.0, help="seconds that a request may take (%(default)s)")
    command.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with a key that requests must bring"
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="reward.NAME.KEY=VALUE",
        help="options of the reward of --reward, e.g. reward.pickscore.model_path=/models/x",
    )
    command.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    # Before the reward is loaded, which may take minutes.
    key = read_key("--api-key-env", arguments.api_key_env)
    reward = _reward(arguments)
    try:
        server = RewardServer(reward, SERVED[arguments.protocol], arguments.host, arguments.port, key)
    except (OSError, OverflowError) as error:
        place = f"{arguments.host}:{arguments.port}"
        raise ValueError(f"--host, --port: {place} cannot be listened at ({error}); give another") from error
    # Everybody who reaches the address can use the GPU behind it.
    if key is None and not is_loopback(arguments.host):
        print("warning: anyone who reaches this address can ask; --api-key-env asks for a key", file=sys.stderr)
    source = "" if arguments.path is None else f" ({arguments.path})"
    print(f"Serving {server.name}{source} at {server.url}, protocol {arguments.protocol}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        print(f"Ended after {server.requests} requests with {server.images} images", flush=True)
    return 0


def _reward(arguments: argparse.Namespace) -> RewardMix:
    """The served function, checked and guarded as in a run."""
    try:
        if arguments.reward is not None:
            section = _section(arguments.reward, arguments.overrides)
            functions = {arguments.reward: 1.0}
            return build_reward(RewardConfig(functions=functions, timeout_s=arguments.timeout, **section))
        if arguments.overrides:
            raise ValueError(
                f"{arguments.overrides[0]}: it is an option of a built-in reward; leave it out with --path"
            )
        custom = CustomRewardConfig(path=arguments.path, name=arguments.name)
        reward = build_reward(RewardConfig(custom_reward_function=custom, timeout_s=arguments.timeout))
    except ValueError as error:
        # The error names fields of a run's configuration, and the command's options have their names.
        text = str(error).replace("reward.custom_reward_function.", "--").replace("reward.timeout_s", "--timeout")
        raise ValueError(text) from error
    # Only functions of verl-omni's form take tensors.
    if isinstance(reward.functions[arguments.name], PerImageReward) and find_spec("torch") is None:
        raise ValueError(
            f"--name: {arguments.name!r} takes its image as a torch tensor, and torch is not installed here; install "
            "it, or write fn(images, prompts, metadata), which takes numpy arrays"
        )
    return reward


def _section(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The section of the reward ``name``, by its name; empty where nothing is given."""
    if overrides and name not in [section.name for section in fields(RewardConfig)]:
        raise ValueError(f"{overrides[0]}: the reward {name} has no options; leave it out")
    section: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        owner, _, option = key.rpartition(".")
        if not equals or owner != f"reward.{name}":
            raise ValueError(f"{text}: give the options of --reward {name} as reward.{name}.KEY=VALUE")
        section[option] = _value(value)
    return {name: section} if section else {}


def _value(text: str) -> Any:
    """The value of a Python literal or ``null``; any other text is itself. Hydra may not be installed."""
    if text == "null":
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
