"""The two forms in which a reward function may be written, ``BatchReward`` and ``PerImageReward``.

Which one a function has, synchronous or ``async``, is read off its signature, before anything is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.errors import AnswerError, brief_repr
from flowgrpo_rc.rewards.isolation import coroutines

BATCH = ("images", "prompts", "metadata")
"""The arguments of our form, in order."""

IMAGE = "solution_image"
"""The argument by which verl-omni's form is known."""

COLUMNS = {"data_source": "data_source", "ground_truth": "reward_model.ground_truth", "extra_info": "extra_info"}
"""What verl-omni's form is given besides the image -> the column of the prompt file that holds it."""

FORMS = (
    "fn(images, prompts, metadata) for a batch, or fn(data_source, solution_image, ground_truth, extra_info) for one "
    "image"
)
KWARGS_FIELD = "reward.custom_reward_function.reward_kwargs"


def ground_truth(row: Mapping[str, Any]) -> Any:
    """What an image of this row of the prompt file should show: ``reward_model.ground_truth``, where verl-omni's data
    preparation puts it, or else the column ``ground_truth``; None where there is neither."""
    nested = row.get("reward_model")
    truth = nested.get("ground_truth") if isinstance(nested, Mapping) else None
    return row.get("ground_truth") if truth is None else truth


class Signature:
    """What a reward function declares; as text ``'name'(its, parameters)``, for messages.

    Raises:
        ValueError: Python cannot read it.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward function {name!r} has no signature that Python can read ({error}); wrap it in a function of "
                f"your own, {FORMS}"
            ) from error
        parameters = self._signature.parameters.values()
        self.parameters = [p.name for p in parameters]
        self.takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.required = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
        """Parameters that can be given by name and have no default."""
        self._text = f"{name!r}({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"

    def __str__(self) -> str:
        return self._text

    def refusal(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TypeError | None:
        """Why a call with these arguments would fail; None where it would not."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return error
        return None


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
    by_name: bool

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        """The function's answer."""
        if self.by_name:
            answer = self.function(images=images, prompts=prompts, metadata=metadata, **self.kwargs)
        else:
            answer = self.function(images, prompts, metadata, **self.kwargs)
        return coroutines.gather([answer])[0]


class PerImageReward:
    """Calls ``fn(data_source=, solution_image=, ground_truth=, extra_info=)`` for every image of a batch: verl-omni's.

    The image is a uint8 torch tensor (3, H, W) in RGB. The others are columns of the prompt file as verl-omni's data
    preparation lays them out: ``data_source``, ``reward_model: {"ground_truth": ...}`` (a column ``ground_truth`` will
    do) and ``extra_info``, to which ``num_turns`` (None) and ``rollout_reward_scores`` ({}) are added as there. Only
    parameters that the function declares are given, unless it takes ``**kwargs``. It returns a number or a dict with
    ``"score"``, whose other entries become ``info``. Coroutines of a batch are awaited side by side.

    Args:
        kwargs: further keyword arguments of every call.
        kwargs_field: the section of the configuration that they are keys of, for messages.

    Raises:
        ValueError: the function needs a parameter that nobody gives it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Signature,
        kwargs: Mapping[str, Any],
        kwargs_field: str = KWARGS_FIELD,
    ) -> None:
        self.function = function
        self._signature = signature
        self._kwargs = dict(kwargs)
        self._takes = [name for name in COLUMNS if signature.takes_any_keyword or name in signature.parameters]
        # extra_info is made where the prompt file has none.
        self._needs = [name for name in signature.required if name in ("data_source", "ground_truth")]
        lacking = [name for name in signature.required if name not in (IMAGE, *COLUMNS, *kwargs)]
        if lacking:
            raise ValueError(
                f"reward function {signature} needs {', '.join(lacking)}, which nothing here supplies; give it with "
                f"{kwargs_field}.{lacking[0]}=..."
            )
        refusal = signature.refusal((), {**dict.fromkeys([IMAGE, *self._takes]), **self._kwargs})
        if refusal is not None:
            raise ValueError(
                f"reward function {signature} does not take its arguments by name ({refusal}); declare {IMAGE} and "
                f"what else it needs of {', '.join(COLUMNS)} as ordinary parameters"
            ) from refusal

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """The score of every image, and the other entries of what the function returned."""
        # All arguments before the first call: a row that lacks a column is an error before anything is scored.
        calls = [
            self._arguments(image, row, f"sample {index}, prompt {brief_repr(prompts[index])},")
            for index, (image, row) in enumerate(zip(images, metadata, strict=True))
        ]
        answers: list[Any] = []
        try:
            for arguments in calls:
                answers.append(self.function(**arguments))
        except BaseException:
            coroutines.close_unawaited(answers)
            raise
        parts = [self._score_and_info(answer, index) for index, answer in enumerate(coroutines.gather(answers))]
        keys = dict.fromkeys(key for _, info in parts for key in info)
        return [score for score, _ in parts], {key: [info.get(key) for _, info in parts] for key in keys}

    def check_prompts(
        self,
        prompts: Sequence[str],
        *,
        image_size: tuple[int, int] | None,
        sources: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Raise ``ValueError`` for the first row of ``metadata`` that lacks a column which the function needs; see
        ``RewardMix.check_prompts``."""
        if metadata is not None:
            for row, source in zip(metadata, sources, strict=True):
                self._columns(row, source, ValueError)

    def _arguments(self, image: np.ndarray, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        import torch

        # A copy, which the function may write into.
        pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return {IMAGE: pixels, **self._columns(row, where, AnswerError), **self._kwargs}

    def _columns(self, row: Mapping[str, Any], where: str, error: type[Exception]) -> dict[str, Any]:
        """What the function takes of one row of the prompt file; raises ``error`` where that is not there."""
        found = {"data_source": row.get("data_source"), "ground_truth": ground_truth(row)}
        for name in self._needs:
            if found[name] is None:
                raise error(
                    f"{where} has no {COLUMNS[name]}, which the reward function {self._signature} needs; add it as a "
                    "column of a .parquet or .jsonl file (a .txt file has none but the prompt), as "
                    "flowgrpo-rc prepare-data writes them"
                )
        extra = row.get("extra_info")
        if extra is not None and not isinstance(extra, Mapping):
            raise error(
                f"{where} has extra_info={brief_repr(extra)}; the reward function {self._signature} expects a mapping "
                "there"
            )
        found["extra_info"] = {**(extra or {}), "num_turns": None, "rollout_reward_scores": {}}
        if "images" in row:
            found["extra_info"].setdefault("images", row["images"])
        return {name: found[name] for name in self._takes if found[name] is not None}

    def _score_and_info(self, answer: Any, index: int) -> tuple[Any, dict[str, Any]]:
        """Score and other entries of one image's answer."""
        if not isinstance(answer, Mapping):
            return answer, {}
        info = dict(answer)
        if "score" not in info:
            keys = ", ".join(map(brief_repr, info)) or "none"
            raise AnswerError(
                f"reward function {self._signature} returned for sample {index} a dict without the key 'score' (it "
                f"has {keys}); return a float, or a dict with 'score'"
            )
        return info.pop("score"), info


def adapt(
    function: Callable[..., Any],
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    kwargs_field: str = KWARGS_FIELD,
    offered: Mapping[str, Any] | None = None,
) -> Any:
    """``function``, which is anything callable, as a reward that is called with a batch and always with ``kwargs``,
    keys of the section ``kwargs_field``, and with what is ``offered`` of the parameters that it declares.

    Raises:
        ValueError: the signature is of neither form, cannot be read, or does not take ``kwargs``; names the
            parameters.
    """
    if isinstance(function, (BatchReward, PerImageReward)):
        return function
    kwargs = dict(kwargs or {})
    signature = Signature(function, name)
    declared = signature.parameters
    kwargs = {key: value for key, value in (offered or {}).items() if key in declared} | kwargs
    for key in kwargs:
        if key in (*BATCH, *COLUMNS, IMAGE):
            raise ValueError(f"{kwargs_field}.{key}: this argument is given by the trainer; remove it")
        if key not in declared and not signature.takes_any_keyword:
            raise ValueError(f"{kwargs_field}.{key}: reward function {signature} has no parameter of this name")
    if IMAGE in declared:
        return PerImageReward(function, signature, kwargs, kwargs_field)
    foreign = [parameter for parameter in declared if parameter in (*COLUMNS, "solution_str")]
    if foreign:
        raise ValueError(
            f"reward function {signature} takes {', '.join(foreign)} but no {IMAGE}, so it is not one for images; "
            f"write {FORMS}"
        )
    if "only_strict" in signature.required:
        kwargs.setdefault("only_strict", True)
    # By name only where the images are spelled out: **kwargs alone says nothing of what the function is for.
    if BATCH[0] in declared and signature.refusal((), {**dict.fromkeys(BATCH), **kwargs}) is None:
        return BatchReward(function, kwargs, by_name=True)
    misplaced = [name for position, name in enumerate(declared) if name in BATCH and BATCH.index(name) != position]
    if not misplaced and signature.refusal(BATCH, kwargs) is None:
        return BatchReward(function, kwargs, by_name=False)
    lacking = [name for name in signature.required if name not in (*BATCH, *kwargs)]
    if lacking and all(name in declared for name in BATCH):
        raise ValueError(
            f"reward function {signature} needs {', '.join(lacking)} too; give it with "
            f"{kwargs_field}.{lacking[0]}=..., or give the parameter a default"
        )
    raise ValueError(f"reward function {signature} cannot be called as a reward; write {FORMS}")
