"""Several reward functions as one: a weighted sum, with every function's answer checked before it is used."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.answer import PARTS, AnswerError, RewardError, Scores, brief_repr, read_answer
from flowgrpo_rc.rewards.config import RewardConfig
from flowgrpo_rc.rewards.custom import OwnFunction, load_reward, loaded_apart
from flowgrpo_rc.rewards.forms import adapt
from flowgrpo_rc.rewards.registry import Places, Rows, check_name, load_builtin
from flowgrpo_rc.rewards.remote.client import RemoteReward
from flowgrpo_rc.rewards.reward_model.server import RewardModelServer, start_server
from flowgrpo_rc.rewards.scoring import CallQueue
from flowgrpo_rc.rewards.user_code import UserCode

RewardFunction = Callable[..., Any]
"""``fn(images, prompts, metadata)`` -> N scores, or ``(N scores, info dict)``; images (N, H, W, 3) uint8 RGB. Or
verl-omni's, for one image; see ``forms.py``."""


@dataclass(kw_only=True, slots=True)
class RewardResult:
    """The rewards of N images."""

    total: np.ndarray
    """(N,) float32: the weighted sum."""
    parts: dict[str, np.ndarray]
    """Function name -> (N,) float32, before weighting."""
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Function name -> its report beside the scores: lists of N entries by name."""

    @property
    def inner_parts(self) -> dict[str, np.ndarray]:
        """``<function>/<part>`` -> (N,) float64: the components of the functions' scores, where they report them."""
        return {
            f"{name}/{key.removeprefix(PARTS)}": np.asarray(values, np.float64)
            for name, info in self.info.items()
            for key, values in info.items()
            if key.startswith(PARTS)
        }

    @property
    def reader(self) -> str | None:
        """The first function that gave captions, ``info["text"]``; None when none did."""
        return next((name for name, info in self.info.items() if "text" in info), None)

    @property
    def texts(self) -> list[str] | None:
        """The captions that ``reader`` gave."""
        return None if self.reader is None else self.info[self.reader]["text"]


class RewardMix:
    """Calls each function once per batch and adds up ``weight * score``.

    Every function gets copies of its own: a read-only array of the images, and lists of prompts and metadata that it
    may change. ``UserCode`` makes the calls and bounds their time.

    Args:
        functions: name -> function, of either form of ``forms.py``; at least one.
        weights: name -> weight, for the same names.
        timeout_s: longest time that one call of a function may take; None for no limit.
        builtin: names of functions that are this package's own.
        server: serves the model that the functions ask; None where nothing has been started.

    Raises:
        ValueError: the two do not fit together, a name is one that the log uses, or a signature is of neither form.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float],
        timeout_s: float | None = None,
        builtin: Collection[str] = (),
        server: RewardModelServer | None = None,
    ) -> None:
        if not functions or functions.keys() != weights.keys():
            got = f"{sorted(functions)} and {sorted(weights)}"
            raise ValueError(f"functions and weights must name the same rewards, at least one: got {got}")
        for name in functions:
            check_name("functions", name)
        self.functions = {name: adapt(function, name) for name, function in functions.items()}
        self.weights = dict(weights)
        self.builtin = frozenset(builtin)
        self.server = server
        """The server of the model that the functions ask; None where nothing has been started."""
        self.streaming = tuple(
            name for name, reward in self.functions.items() if getattr(reward.function, "streams", False) is True
        )
        """The functions that may be called for a part of a batch, in a thread of its own."""
        self.queues = {
            name: CallQueue()
            for name in self.streaming
            # Only this package's own: a user's claim could be wrong, and slow the training down without a word.
            if name in self.builtin and getattr(self.functions[name].function, "computes_elsewhere", False)
        }
        """Those that other processes compute, so that they may be called while the actor learns; and the queue of the
        calls of each, since a validation calls them too."""
        self._code = {
            name: UserCode(f"reward function {name!r}", _file_of(reward.function), timeout_s)
            for name, reward in self.functions.items()
        }

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
    ) -> RewardResult:
        """Score N images.

        Args:
            images: (N, H, W, 3) uint8, RGB.
            prompts: N prompts.
            metadata: N dicts for the functions that read them; by default empty.

        Raises:
            ValueError: the arguments do not fit together.
            RewardError: a function raised, took longer than ``timeout_s``, or returned the wrong number of scores or
                non-finite ones; or the weighted sum is too large for float32.
        """
        prompts = list(prompts)
        metadata = [{} for _ in prompts] if metadata is None else list(metadata)
        # Floats, or channels first, would be scored without an error, and wrongly.
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            kind = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
            raise ValueError(f"images must be a uint8 numpy array (N, H, W, 3) in RGB, got {kind}")
        if not len(images) == len(prompts) == len(metadata):
            counts = f"{len(images)}, {len(prompts)} and {len(metadata)}"
            raise ValueError(f"images, prompts and metadata must be equally many, got {counts}")
        return self.combine({name: self.score(name, images, prompts, metadata) for name in self.functions}, prompts)

    def combine(self, scored: Mapping[str, Scores], prompts: Sequence[str]) -> RewardResult:
        """The weighted sum of the scores of every function; ``RewardError`` where it is too large for float32."""
        total = np.zeros(len(prompts), dtype=np.float64)
        for name, (scores, _) in scored.items():
            # In float64, so that large terms may cancel.
            with np.errstate(all="ignore"):
                total += self.weights[name] * scores.astype(np.float64)
        # Written so that NaN, as of infinity less infinity, counts too.
        large = np.flatnonzero(~(np.abs(total) <= np.finfo(np.float32).max))
        if large.size:
            first = int(large[0])
            terms = [f"{self.weights[name]:g} x {scores[first]:g} ({name})" for name, (scores, _) in scored.items()]
            raise RewardError(
                f"the weighted sum of the rewards is beyond float32's largest number, 3.4e38, for {large.size} of "
                f"{total.size} samples; the first is sample {first}, prompt {brief_repr(prompts[first])}: "
                f"{' + '.join(terms)}. Lower the weights or scale the scores down"
            )
        parts = {name: scores for name, (scores, _) in scored.items()}
        info = {name: info for name, (_, info) in scored.items()}
        return RewardResult(total=total.astype(np.float32), parts=parts, info=info)

    def close(self) -> None:
        """End the worker processes of built-in rewards and the server of the reward model; once is enough."""
        # All of them, even where one fails.
        with ExitStack() as ended:
            if self.server is not None:
                ended.callback(self.server.close)
            for name in self.builtin:
                if close := getattr(self.functions[name].function, "close", None):
                    ended.callback(close)

    def score(
        self, name: str, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Scores:
        """One function's checked scores, (N,) float32, and its info; arguments and errors as for a call of the mix."""
        # A copy that is read-only: torch.from_numpy ignores the flag, and would write into the others' images.
        own = images.copy()
        own.flags.writeable = False
        # Functions pop from the lists and dicts that they get. Row by row, since images of one prompt share theirs and
        # one deep copy of the list would keep that so.
        rows = [copy.deepcopy(row) for row in metadata]
        code = self._code[name]
        answer = code.run(self.functions[name], own, list(prompts), rows, passing=AnswerError)
        return read_answer(name, answer, prompts)

    def networks(self) -> dict[str, list[Any]]:
        """Name -> weights, as torch tensors, of every built-in reward that is a network on this machine."""
        # A user's own object may have a ``weights`` of another meaning.
        found = {name: getattr(self.functions[name].function, "weights", None) for name in self.builtin}
        return {name: weights() for name, weights in found.items() if weights is not None}

    def check_prompts(
        self,
        prompts: Sequence[str],
        *,
        image_size: tuple[int, int] | None = None,
        sources: Places = None,
        metadata: Rows = None,
    ) -> None:
        """Let every function that can refuse prompts do so before training, as ``OCRReward.check_prompts`` does.

        Args:
            prompts: any number of prompts.
            image_size: (height, width) in pixels of the images to come, if known.
            sources: the origin of each prompt, e.g. ``train.txt:3``; by default its index.
            metadata: the prompts' other columns, for the functions that need some; by default not checked.

        Raises:
            ValueError: a function cannot score one of the prompts.
        """
        named = [f"prompt {index}" for index in range(len(prompts))] if sources is None else list(sources)
        known = {"image_size": image_size, "sources": named, "metadata": metadata}
        for name, reward in self.functions.items():
            # Nothing is trained yet, so a fault of the check is a refusal like that of any wrong setting.
            code = replace(self._code[name], error=ValueError)
            code.run(partial(reward.check_prompts, prompts, **known), passing=ValueError)


def build_reward(config: RewardConfig | None = None) -> RewardMix:
    """The reward of a run.

    Raises:
        ValueError: the configuration is wrong; names the field, its value and what to do.
        ImportError: an engine's extra is not installed.
    """
    config = RewardConfig() if config is None else config
    config.validate()
    own = config.own_functions()
    weights = config.weights()
    server = start_server(config)
    try:
        mix = _built({name: own.get(name) for name in weights}, weights, config, server)
    except BaseException:
        if server is not None:
            server.close()
        raise
    mix.server = server
    return mix


def build_observers(config: RewardConfig, server: RewardModelServer | None = None) -> RewardMix | None:
    """The scorers of ``reward.val_functions``, with weight 0; None where there are none. Errors as ``build_reward``.

    Args:
        server: that of the reward model, where the rewards of the training have started one.
    """
    named = config.observers()
    return _built(named, dict.fromkeys(named, 0.0), config, server) if named else None


def try_own(
    config: RewardConfig,
    names: Collection[str],
    prompt: str,
    metadata: dict[str, Any],
    *,
    source: str,
    image_size: tuple[int, int],
) -> None:
    """Score two images of noise with the user's own functions among ``names``, to find their faults before training.

    Files are executed anew for it, so that what they keep between calls is as without the trial; one that cannot be
    executed twice is not tried.

    Args:
        prompt, metadata: of one row of a prompt file.
        source: the row's place, e.g. ``train.txt:3``.
        image_size: (height, width) in pixels.

    Raises:
        RewardError: as a call of the mix.
    """
    own = {**config.observers(), **config.own_functions()}
    functions = {name: own[name] for name in names if own.get(name) is not None}
    if not functions:
        return
    # Two that differ: one hides a score for the whole batch, and a function may divide by the scores' deviation.
    images = np.random.default_rng(0).integers(0, 256, (2, *image_size, 3), dtype=np.uint8)
    with loaded_apart():
        try:
            mix = _built(functions, dict.fromkeys(functions, 1.0), config, None)
        except ValueError:
            return
        for name in functions:
            try:
                mix.score(name, images, [prompt] * 2, [metadata] * 2)
            except RewardError as error:
                raise RewardError(
                    f"{error}; it was tried before the model is loaded, on two images of noise with the row {source}; "
                    f"mend it, flowgrpo-rc check-reward {name} tries it alone"
                ) from error


def _built(
    named: Mapping[str, OwnFunction | None],
    weights: Mapping[str, float],
    config: RewardConfig,
    server: RewardModelServer | None,
) -> RewardMix:
    """The rewards of these names as a mix; those without a function are this package's own or a server's."""
    offered = {} if server is None else server.offered
    # The user's own functions first: their faults show before an engine takes its time to load.
    own = {name: load_reward(function, config.timeout_s, offered) for name, function in named.items() if function}
    # The server loads its model while the user's functions load.
    if server is not None:
        server.wait()
    functions = {name: own[name] if name in own else _builtin(name, config, server) for name in named}
    return RewardMix(functions, weights, config.timeout_s, builtin=functions.keys() - own.keys())


def _builtin(name: str, config: RewardConfig, server: RewardModelServer | None) -> Any:
    if name in config.remote:
        return RemoteReward(name, config.remote[name])
    options = getattr(config, name, None)
    if name != "judge" or server is None:
        return load_builtin(name, options, config.num_workers)
    # A copy, since config.yaml would record the address, and the next run's server has another one.
    judge = load_builtin(name, replace(config.judge, base_url=server.base_url))
    config.judge.model = judge.config.model
    return judge


def _file_of(function: RewardFunction) -> str | None:
    """The file of the function, if it has one."""
    function = inspect.unwrap(function)
    # Messages point at the user's file, and not at functools.
    while isinstance(function, partial):
        function = function.func
    # Of an object: the file of its class.
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    return None if code is None else code.co_filename
