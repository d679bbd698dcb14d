"""``flowgrpo-rc check-reward``: have a reward score pictures whose right prompts are known, with its real weights."""

import argparse
import time
from dataclasses import replace
from typing import Any

from flowgrpo_rc.cli.arguments import add_command, add_configuration
from flowgrpo_rc.cli.errors import NEGATIVE
from flowgrpo_rc.rewards import CustomRewardConfig, RewardConfig, RewardModelConfig
from flowgrpo_rc.rewards.check.pictures import SETS


def add_check_reward(commands: Any, default_config: str) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "check-reward",
        "say whether a reward scores as it should, with the weights or the server that it has here",
        f": drawn pictures are scored with right and wrong prompts. Exit code: 0 as expected, or nothing is expected "
        f"of the function; {NEGATIVE} not as expected; 2 refused, or the reward failed.",
    )
    command.add_argument(
        "name", metavar="NAME", help="a built-in reward, a server's name in reward.remote, or the name of your function"
    )
    add_configuration(command, default_config)
    command.add_argument("--pictures", choices=sorted(SETS), help="what is scored (what the reward is made for)")
    command.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Check and print; returns the exit code."""
    from flowgrpo_rc.cli.compose import compose
    from flowgrpo_rc.rewards.answer import RewardError
    from flowgrpo_rc.rewards.check.findings import Check, expectation, memory
    from flowgrpo_rc.rewards.mix import build_reward

    whole = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    config = _alone(arguments.name, whole.reward)
    own = arguments.name in config.own_functions()
    # The columns that a function of the user's own reads are known from the prompt file alone.
    rows = _first_rows(whole.data) if own else []
    # Before the reward is loaded: the difference is the reward's own.
    before = memory()
    start = time.perf_counter()
    reward = build_reward(config)
    loaded_s = time.perf_counter() - start
    try:
        check = Check(reward, expectation(arguments.name, config), arguments.pictures, rows)
        findings = check.run()
    except RewardError as error:
        if not own or rows:
            raise
        remedy = "if it reads columns of the prompt file, give data.train_files: the pictures get its first rows"
        raise RewardError(f"{error}; {remedy}") from error
    finally:
        reward.close()
    print(config.in_words())
    for finding in findings:
        verdict = {True: "as expected", False: "NOT AS EXPECTED", None: "not judged"}[finding.as_expected]
        print(f"  {finding.name:14} {finding.found}: {verdict}")
    first = f"{loaded_s:.3g} s to load, {check.first_call_s:.3g} s for the first {check.batch} images"
    print(f"  {'time':14} {first}, then {check.seconds_per_image:.3g} s an image")
    for where, peak in memory().items():
        print(f"  {'memory':14} {where}: {peak / 2**20:.0f} MiB at most, {before.get(where, 0) / 2**20:.0f} before it")
    return NEGATIVE if any(finding.as_expected is False for finding in findings) else 0


def _first_rows(data: Any) -> list[tuple[str, dict[str, Any]]]:
    """Prompts and other columns of ``data.train_files``, as many as there are pictures; none without files. With
    ``data.preferences`` those of ``data.val_files``, since nothing else is scored."""
    from flowgrpo_rc.data.prompts import read_prompt_files

    records = read_prompt_files(data.val_files if data.preferences else data.train_files, data.prompt_key, 4)
    return [(record.prompt, record.metadata) for record in records]


def _alone(name: str, config: RewardConfig) -> RewardConfig:
    """The configuration with this reward as the only one; a ``ValueError`` if there is no such reward."""
    # A model of ``reward_model`` is started only for a reward that calls it; it may take minutes and a GPU.
    custom = config.custom_reward_function
    # Those that only look in validation are checked as well.
    looking = {n: dict(config.val_functions[n]) for n, function in config.observers().items() if function is not None}
    own = {**looking, **config.reward_functions}
    own_names = {*looking, *config.own_functions()}
    asks_a_model = name == "judge" or name in own_names
    return replace(
        config,
        functions={} if name in own_names else {name: 1.0},
        custom_reward_function=replace(custom, weight=1.0) if name == custom.name else CustomRewardConfig(),
        reward_functions={name: {**own[name], "weight": 1.0}} if name in own else {},
        val_functions={},
        reward_model=config.reward_model if asks_a_model else RewardModelConfig(),
        normalization=None,
    )
