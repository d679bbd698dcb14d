"""The two forms of a reward function, ``BatchReward`` and ``PerImageReward``.

The signature, read before anything is loaded, decides which form a function has; either may be ``async``.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.answer import AnswerError, brief_repr
from flowgrpo_rc.rewards.user_code import gather

BATCH = ("images", "prompts", "metadata")
"""The arguments of our form, in order."""
IMAGE = "solution_image"
"""The argument that only verl-omni's form has."""
COLUMNS = {"data_source": "data_source", "ground_truth": "reward_model.ground_truth", "extra_info": "extra_info"}
"""The other arguments of verl-omni's form -> the column of the prompt file that holds each."""
FORMS = (
    "fn(images, prompts, metadata) for a batch, or fn(data_source, solution_image, ground_truth, extra_info) for one "
    "image"
)
KWARGS_FIELD = "reward.custom_reward_function.reward_kwargs"


def ground_truth(row: Mapping[str, Any]) -> Any:
    """The wanted answer of a row of the prompt file, None where it has none."""
    # verl-omni's data preparation writes this column; a parquet file may hold it as text.
    nested = row.get("reward_model")
    truth = nested.get("ground_truth") if isinstance(nested, Mapping) else None
    return row.get("ground_truth") if truth is None else truth


def accepted(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments among ``known`` that the function declares, or all where it takes any keyword."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in known.items() if takes_any or name in parameters}


def _required(signature: inspect.Signature) -> list[str]:
    """Parameters that can be given by name and have no default."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in signature.parameters.values() if p.kind in by_name and p.default is p.empty]


def _takes(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of this signature can be called with these arguments."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


@dataclass
class BatchReward:
    """Calls ``fn(images, prompts, metadata)`` for a batch; a coroutine that it returns is awaited.

    The three are given by position, or by name where the function declares them in another order, as keywords only, or
    takes some through ``**kwargs``. flow_grpo's scorers have this form; its ``only_strict`` is given as True where it
    has no default.
    """

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    """Further keyword arguments of every call."""
    by_name: bool = False

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        """The function's answer."""
        if self.by_name:
            answer = self.function(images=images, prompts=prompts, metadata=metadata, **self.kwargs)
        else:
            answer = self.function(images, prompts, metadata, **self.kwargs)
        return gather([answer])[0]

    def check_prompts(self, prompts: Sequence[str], **known: Any) -> None:
        """Call the function's ``check_prompts``, if any, with the arguments of ``RewardMix``'s that it declares."""
        check = getattr(self.function, "check_prompts", None)
        if callable(check):
            check(list(prompts), **accepted(check, known))


@dataclass
class PerImageReward(BatchReward):
    """Calls ``fn(data_source=, solution_image=, ground_truth=, extra_info=)`` for every image of a batch: verl-omni's.

    The image is a uint8 torch tensor (3, H, W) in RGB. The others are columns of the prompt file as verl-omni's data
    preparation lays them out: ``data_source``, ``reward_model: {"ground_truth": ...}`` (a column ``ground_truth`` will
    do) and ``extra_info``, to which ``num_turns`` (None) and ``rollout_reward_scores`` ({}) are added as there. Only
    parameters that the function declares are given, unless it takes ``**kwargs``. It returns a number or a dict with
    ``"score"``, whose other entries become ``info``. Coroutines of a batch are awaited concurrently.
    """

    text: str = ""
    """The function's name and parameters, for messages."""

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """The score of every image, and the other entries of the function's answers."""
        import torch

        # All arguments before the first call: a row that lacks a column is an error before anything is scored.
        columns = [
            self._columns(row, f"sample {index}, prompt {brief_repr(prompts[index])},", AnswerError)
            for index, row in enumerate(metadata)
        ]
        # Copies, which the function may write into.
        pixels = [torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))) for image in images]
        # Coroutines of all images are made first and then run together: each may wait for a server.
        calls = zip(pixels, columns, strict=True)
        answers = gather([self.function(**{IMAGE: image, **own, **self.kwargs}) for image, own in calls])
        infos = [dict(answer) if isinstance(answer, Mapping) else {"score": answer} for answer in answers]
        for index, info in enumerate(infos):
            if "score" not in info:
                keys = ", ".join(map(brief_repr, info)) or "none"
                raise AnswerError(
                    f"reward function {self.text} returned for sample {index} a dict without the key 'score' (it "
                    f"has {keys}); return a float, or a dict with 'score'"
                )
        scores = [info.pop("score") for info in infos]
        # Answers may have different keys, as where only wrong images get a remark.
        return scores, {
            key: [info.get(key) for info in infos] for key in dict.fromkeys(key for i in infos for key in i)
        }

    def check_prompts(self, prompts: Sequence[str], **known: Any) -> None:
        """Raise ``ValueError`` for the first row of ``metadata`` that lacks a column which the function needs."""
        for row, source in zip(known["metadata"] or (), known["sources"], strict=False):
            self._columns(row, source, ValueError)
        super().check_prompts(prompts, **known)

    def _columns(self, row: Mapping[str, Any], where: str, error: type[Exception]) -> dict[str, Any]:
        """The arguments that come from a row of the prompt file; raises ``error`` where the row lacks one."""
        found = {"data_source": row.get("data_source"), "ground_truth": ground_truth(row)}
        required = _required(inspect.signature(self.function))
        for name, value in found.items():
            if value is None and name in required:
                raise error(
                    f"{where} has no {COLUMNS[name]}, which the reward function {self.text} needs; add it as a "
                    "column of a .parquet or .jsonl file (a .txt file has none but the prompt), as "
                    "flowgrpo-rc prepare-data writes them"
                )
        # verl-omni always gives the two keys, whether or not the prompt file has the column.
        found["extra_info"] = {**(row.get("extra_info") or {}), "num_turns": None, "rollout_reward_scores": {}}
        if "images" in row:
            found["extra_info"].setdefault("images", row["images"])
        return accepted(self.function, {name: value for name, value in found.items() if value is not None})


def adapt(
    function: Callable[..., Any],
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    kwargs_field: str = KWARGS_FIELD,
    offered: Mapping[str, Any] | None = None,
) -> BatchReward:
    """The callable ``function`` as a reward that takes a batch.

    Args:
        name: of the function, for messages.
        kwargs: further keyword arguments of every call.
        kwargs_field: the section of the configuration that holds them.
        offered: arguments that it gets where it declares them.

    Raises:
        ValueError: the signature is of neither form, or does not take ``kwargs``; names the parameters.
    """
    if isinstance(function, BatchReward):
        return function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward function {name!r} has no signature that Python can read ({error}); wrap it in a function of "
            f"your own, {FORMS}"
        ) from error
    declared = list(signature.parameters)
    text = f"{name!r}{signature}"
    for key in kwargs or {}:
        if key in (*BATCH, *COLUMNS, IMAGE):
            raise ValueError(f"{kwargs_field}.{key}: this argument is given by the trainer; remove it")
        if not accepted(function, {key: None}):
            raise ValueError(f"{kwargs_field}.{key}: reward function {text} has no parameter of this name")
    given = {key: value for key, value in (offered or {}).items() if key in declared} | dict(kwargs or {})
    required = _required(signature)
    lacking = [name for name in required if name not in (*BATCH, IMAGE, *COLUMNS, *given, "only_strict")]
    if lacking and (IMAGE in declared or all(name in declared for name in BATCH)):
        too = ", which nothing here supplies" if IMAGE in declared else " too"
        raise ValueError(
            f"reward function {text} needs {', '.join(lacking)}{too}; give it with {kwargs_field}.{lacking[0]}=..., or "
            "give the parameter a default"
        )
    if IMAGE in declared:
        return PerImageReward(function, given, text=text)
    # verl's functions for texts have the same columns; called as a batch function they would fail at the first step.
    foreign = [parameter for parameter in declared if parameter in (*COLUMNS, "solution_str")]
    if foreign:
        raise ValueError(f"reward function {text} takes {', '.join(foreign)} but no {IMAGE}, an image; write {FORMS}")
    if "only_strict" in required:
        given.setdefault("only_strict", True)
    # By name only where the images are spelled out: a function of **kwargs alone need not be a reward.
    if BATCH[0] in declared and _takes(signature, (), {**dict.fromkeys(BATCH), **given}):
        return BatchReward(function, given, by_name=True)
    # Positions are no guide where a known name stands at another one.
    misplaced = [name for position, name in enumerate(declared) if name in BATCH and BATCH.index(name) != position]
    if not misplaced and _takes(signature, BATCH, given):
        return BatchReward(function, given)
    raise ValueError(f"reward function {text} cannot be called as a reward; write {FORMS}")
