"""Which way a reward function wants to be called, read off its signature before anything is loaded.

Two forms are known, synchronous or `async`:

* ours, for a batch: `fn(images, prompts, metadata)`. The three are given by position, or by name where the function
  declares them in another order, as keywords only, or takes some through `**kwargs`. flow_grpo's scorers have this
  form; its `only_strict` is given as True where it has no default.
* verl-omni's, for one image: any function with a parameter `solution_image`, see `PerImageReward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowgrpo_rc.rewards import awaiting
from flowgrpo_rc.rewards.per_image import GIVEN, IMAGE, PerImageReward

BATCH = ("images", "prompts", "metadata")
"""Our form's arguments, in order."""

FORMS = (
    "fn(images, prompts, metadata) for a batch, or fn(data_source, solution_image, ground_truth, extra_info) for one "
    "image"
)
KWARGS_FIELD = "reward.custom_reward_function.reward_kwargs"


class BatchReward:
    """A function of our form, with its own keyword arguments and its coroutine, if it returns one, awaited."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], *, by_name: bool) -> None:
        self.function = function
        self._kwargs = dict(kwargs)
        self._by_name = by_name

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        """The function's answer."""
        batch = (images, prompts, metadata)
        if self._by_name:
            answer = self.function(**dict(zip(BATCH, batch, strict=True)), **self._kwargs)
        else:
            answer = self.function(*batch, **self._kwargs)
        return awaiting.gather([answer])[0] if awaiting.is_awaitable(answer) else answer


def adapt(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any] | None = None) -> Any:
    """`function` as a reward that is called with a batch.

    Args:
        function: anything callable: a function, a method, an object with `__call__`, a `functools.partial`.
        name: of the reward, for messages.
        kwargs: further keyword arguments of every call.

    Raises:
        ValueError: the signature is of neither form, cannot be read, or does not take `kwargs`; names the parameters.
    """
    if isinstance(function, (BatchReward, PerImageReward)):
        return function
    kwargs = dict(kwargs or {})
    signature = _signature(function, name)
    declared = signature.parameters
    _check_kwargs(name, declared, kwargs)
    shown = _shown(name, declared)
    if IMAGE in declared:
        return PerImageReward(function, signature, shown, kwargs)
    foreign = [parameter for parameter in declared if parameter in (*GIVEN, "solution_str")]
    if foreign:
        raise ValueError(
            f"reward function {shown} takes {', '.join(foreign)} but no {IMAGE}, so it is not one for images; write "
            f"{FORMS}"
        )
    strict = declared.get("only_strict")
    if strict is not None and strict.default is inspect.Parameter.empty:
        kwargs.setdefault("only_strict", True)
    if _takes_by_name(signature, kwargs):
        return BatchReward(function, kwargs, by_name=True)
    if _takes_by_position(signature, kwargs):
        return BatchReward(function, kwargs, by_name=False)
    lacking = _lacking(declared, kwargs)
    if lacking and all(name in declared for name in BATCH):
        raise ValueError(
            f"reward function {shown} needs {', '.join(lacking)} too; give it with {KWARGS_FIELD}.{lacking[0]}=..., or "
            "give the parameter a default"
        )
    raise ValueError(f"reward function {shown} cannot be called as a reward; write {FORMS}")


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward function {name!r} has no signature that Python can read ({error}); wrap it in a function of "
            f"your own, {FORMS}"
        ) from error


def _shown(name: str, declared: Mapping[str, inspect.Parameter]) -> str:
    """`'name'(its, parameters)`."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in declared.values()]
    return f"{name!r}({', '.join(map(str, bare))})"


def _check_kwargs(name: str, declared: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any]) -> None:
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in declared.values())
    for key in kwargs:
        if key in (*BATCH, *GIVEN, IMAGE):
            raise ValueError(f"{KWARGS_FIELD}.{key}: this argument is given by the trainer; remove it")
        if not open_ended and key not in declared:
            raise ValueError(
                f"{KWARGS_FIELD}.{key}: reward function {_shown(name, declared)} has no parameter of this name"
            )


def _lacking(declared: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any]) -> list[str]:
    """Parameters without a default that are neither the batch's nor given in `kwargs`."""
    named = [p for p in declared.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty and p.name not in (*BATCH, *kwargs)]


def _takes_by_name(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> bool:
    """All three by their names, the images as a parameter that is spelled out, and no other order by position."""
    if BATCH[0] not in signature.parameters:
        return False
    return _binds(signature, (), {**dict.fromkeys(BATCH), **kwargs})


def _takes_by_position(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> bool:
    """Three positions, none of which has the name of another of the three."""
    names = [p for p in signature.parameters if p in BATCH]
    order = list(signature.parameters)
    misplaced = [n for n in names if order.index(n) != BATCH.index(n)]
    return not misplaced and _binds(signature, BATCH, kwargs)


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
