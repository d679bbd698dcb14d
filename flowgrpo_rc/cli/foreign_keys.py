"""The table of ``foreign_keys.yaml``: every key of another trainer that is not a key here, and what becomes of it.

Of the patterns that fit a key the narrowest decides (``verdicts.rank``). Beside the file's entries stand here those
that depend on the code: keys whose values have spellings of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from flowgrpo_rc.cli.spellings import AUTOCAST, DTYPES, A, M, R
from flowgrpo_rc.cli.verdicts import DROP, Deleted, Ignored, Moved, Refused, Renamed, Tree, Verdict, fit, rank
from flowgrpo_rc.models.config import ALL_LINEAR
from flowgrpo_rc.models.registry import FAMILIES

LAUNCHER_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes")
"""Held against the numbers of processes and machines that the launcher started."""


def off(value: Any, tree: Tree) -> bool:
    """Nothing is asked for."""
    return value in (None, False, 0, "", "null", "disabled") or value == [] or value == {}


def reward_model_is_off(value: Any, tree: Tree) -> bool:
    return tree.get("reward.reward_model.enable", tree.get("reward_model.enable")) is False


def other_objective(value: Any, tree: Tree) -> bool:
    """The setting belongs to an objective that is not asked for."""
    return tree.get(f"{A}.diffusion_loss.loss_mode", "flow_grpo") not in ("diffusion_nft", "dpo", "awm")


def own_reward_manager(value: Any, tree: Tree) -> bool:
    return value is None or str(value).startswith("pkg://verl_omni.")


def plain_chat_template(value: Any, tree: Tree) -> bool:
    """Null, or a template that comes to the user's own words."""
    plain = "{%formessageinmessages%}{%ifmessage['role']=='user'%}{{message['content']}}{%endif%}{%endfor%}"
    return value is None or re.sub(r"\s", "", str(value)).strip('"') == plain


def in_the_pipeline(value: Any, tree: Tree) -> bool:
    """Null, or a path that is or lies in the model's own folder."""
    model = str(tree.get(f"{M}.path", ""))
    return value is None or (bool(model) and (str(value) == model or str(value).startswith(f"{model}/")))


def pipeline_tokenizers(value: Any, tree: Tree) -> bool:
    """Those that lie in the pipeline, CLIP at its 77 tokens and T5 at the length that is asked for."""
    if value is None:
        return True
    length = tree.get(f"{R}.pipeline.max_sequence_length", 512)
    parts = value.values() if isinstance(value, Mapping) else [None]
    return all(
        isinstance(part, Mapping)
        and str(part.get("path", "")).startswith("tokenizer")
        and part.get("max_length") in (None, 77, length)
        for part in parts
    )


_CONDITIONS = {
    f"@{condition.__name__}": condition
    for condition in (
        off,
        reward_model_is_off,
        other_objective,
        own_reward_manager,
        plain_chat_template,
        in_the_pipeline,
        pipeline_tokenizers,
    )
}
"""Whether a value asks for what happens here anyway; the file names them with an ``@``."""
_KINDS = {"deleted": Deleted, "ignored": Ignored, "moved": Moved, "renamed": Renamed}
_FLOW_FACTORY = "Flow-Factory's file has another form"


def _entries_of_the_file() -> Iterator[Verdict]:
    import yaml

    text = resources.files("flowgrpo_rc.cli").joinpath("foreign_keys.yaml").read_text(encoding="utf-8")
    for kind, reasons in yaml.safe_load(text).items():
        for reason, lines in reasons.items():
            for line in lines.splitlines():
                keys, _, values = line.partition(" = ")
                if kind != "refused":
                    yield _KINDS[kind](reason, keys)
                elif values.startswith("@"):
                    yield Refused(reason, keys, _CONDITIONS[values])
                else:
                    yield Refused(reason, keys, tuple(yaml.safe_load(value) for value in values.split()))


TABLE: tuple[Verdict, ...] = (
    *_entries_of_the_file(),
    Refused(
        f"a model's own index says what it is; families: {', '.join(FAMILIES)}",
        "M: architecture config_path",
        (None, *FAMILIES),
    ),
    Moved(
        "precision of the frozen weights",
        "A.fsdp_config.model_dtype -> M.dtype",
        {**DTYPES, None: "float32"},
        True,
    ),
    Moved("precision of the frozen weights", "A.veomni_config.model_dtype -> M.dtype", DTYPES, True),
    Moved(
        "precision of the actor's forward",
        """A.fsdp_config.dtype -> trainer.mixed_precision
        A.fsdp_config.mixed_precision.param_dtype -> trainer.mixed_precision
        A.veomni_config.mixed_precision_param_dtype -> trainer.mixed_precision""",
        AUTOCAST,
        True,
    ),
    Moved("autocast", "A.veomni_config.mixed_precision -> trainer.mixed_precision", AUTOCAST, True),
    Moved("divisor of token losses", "A.loss_scale_factor -> A.diffusion_loss.loss_scale_factor", {None: DROP}),
    Moved("learning-rate schedule", "A.optim.warmup_style -> A.optim.lr_scheduler_type", {None: DROP}),
    Moved(
        "the clip is the loss's",
        """A.clip_ratio* -> A.diffusion_loss.clip_ratio*
        A.loss_agg_mode -> A.diffusion_loss.loss_agg_mode""",
        {None: DROP},
    ),
    Moved("the actor scores what was drawn", "M.pipeline.* -> P.*\nM.algo.* -> R.algo.*", {None: DROP}),
    Renamed("Flow-GRPO's file is Python", "sample.sde_window_size -> R.algo.sde_window_size", {0: None}),
    Renamed("Flow-GRPO's file is Python", "mixed_precision -> trainer.mixed_precision", {"fp16": "bf16"}),
    Renamed(_FLOW_FACTORY, "model.target_modules -> M.target_modules", {"default": None, "all": ALL_LINEAR}),
    Renamed(_FLOW_FACTORY, "log.logging_backend -> trainer.logger", {"none": ["console"]}),
    Renamed(_FLOW_FACTORY, "log.save_freq -> trainer.save_freq\neval.eval_freq -> trainer.test_freq", {0: -1}),
    Renamed(_FLOW_FACTORY, "train.ema_decay -> A.ema_decay", {0: None}),
    Renamed(
        _FLOW_FACTORY,
        "scheduler.dynamics_type -> R.algo.sde_type",
        {"Flow-SDE": "sde", "Dance-SDE": "dance_sde", "CPS": "cps"},
    ),
)


def find(key: str) -> Verdict | None:
    """What the table says of a key that is none here."""
    found = _find(key)
    return None if found is None else found[1]


def has_pattern_of_its_own(key: str) -> bool:
    """Whether the table has this very key, not only a section that it lies in."""
    found = _find(key)
    return found is not None and "**" not in found[0]


def _find(key: str) -> tuple[str, Verdict] | None:
    """The narrowest pattern that fits, and its verdict."""
    return next(((pattern, verdict) for pattern, verdict in _ranked() if fit(pattern, key)), None)


@cache
def _ranked() -> list[tuple[str, Verdict]]:
    rows = [(pattern, verdict) for verdict in TABLE for pattern in verdict.patterns]
    return sorted(rows, key=lambda row: rank(row[0]))
