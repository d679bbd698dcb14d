"""The section ``reward`` of a configuration: weights and options of rewards. Importing this loads no reward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.dtypes import DTYPES
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rewards.custom import DEFAULT_NAME, OwnFunction, of_entry
from flowgrpo_rc.rewards.http_client import HTTPOptions, check_url, own_fields_first
from flowgrpo_rc.rewards.judge.config import JudgeConfig
from flowgrpo_rc.rewards.ocr import OCRConfig
from flowgrpo_rc.rewards.registry import DEFAULT_REWARD, REWARDS, check_name
from flowgrpo_rc.rewards.remote.protocols import FORMATS, PROTOCOLS
from flowgrpo_rc.section import (
    Check,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Problems,
    Read,
    Section,
    complaints,
    convert,
    one_of,
    plain,
    read_mapping,
)

REWARD_NAMES = REWARDS.keys()
"""The names of the built-in rewards, as ``reward.functions`` takes them."""
Device = Annotated[
    str, Check(lambda name: re.fullmatch(r"auto|cpu|cuda(:\d+)?", name), "give auto, cpu, cuda or cuda:N")
]
Weights = Annotated[Any, Read(read_mapping("weights by name, e.g. reward.functions.ocr=1"))]
Functions = Annotated[Any, Read(read_mapping("functions by name, e.g. {mine: {path: mine.py}}"))]
REFUSED_ARGUMENTS = {
    "--api-key": "which would stand in config.yaml; the server listens on this machine alone",
    "--host": "since the server must listen on 127.0.0.1, where the run asks it",
    "--port": "since the run gives the server a free one, where it asks it",
    "--served-model-name": "since the run asks for the model by reward.reward_model.model_path",
}
"""Arguments of ``vllm serve`` that cannot be among ``extra_args``, and why."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class CustomRewardConfig(Section):
    """A reward function of the user's own, loaded from a Python file."""

    section = "reward.custom_reward_function"

    path: str | None = None
    """Path of the Python file that defines the function; null where there is no such function."""
    name: str = DEFAULT_NAME
    """Name of the function in that file, and of its metric ``reward/<name>``. It is called as
    ``fn(images, prompts, metadata)`` for a batch, or where it has a parameter ``solution_image`` as verl-omni's
    ``fn(data_source, solution_image, ground_truth, extra_info)`` for one image; it may be ``async``, an object with
    ``__call__``, or a class of such objects that is made without arguments."""
    weight: float = 1.0
    """Weight of the function in the sum of rewards. 0 turns the function off."""
    reward_kwargs: Annotated[Any, Read(read_mapping("a mapping from parameter names to values, e.g. {scale: 2.0}"))] = (
        field(default_factory=dict)
    )
    """Further keyword arguments of every call of the function, by name."""

    def problems(self) -> Iterator[str]:
        """A function that is not there, or whose metric would have a name that is taken."""
        if self.path is None:
            return
        yield from complaints(self.function.check, within=self.section)
        yield from complaints(check_name, "name", self.name)
        if self.name in REWARD_NAMES:
            yield f"name: {self.name!r} is the name of a built-in reward; rename your function"

    @property
    def function(self) -> OwnFunction:
        """The function that the section names; only where ``path`` is given."""
        return OwnFunction(
            section=self.section,
            path=str(self.path),
            name=self.name,
            kwargs=self.reward_kwargs,
            kwargs_field=f"{self.section}.reward_kwargs",
        )


@documented_fields
@dataclass(kw_only=True, slots=True)
class ScorerConfig(Section):
    """The network of a reward: ``pickscore``, ``clipscore``, ``clip_cosine``, ``clip_similarity``, ``dino_similarity``
    and ``siglip_similarity`` each have a section of this form."""

    model_path: PathText | None = None
    """Folder or hub name of the network in transformers' format. Null is the reward's published weights, which are
    downloaded from the hub. ``asset:tiny_clip`` is the tiny CLIP of this package."""
    processor_path: PathText | None = None
    """Folder or hub name of the image processor and the tokenizer. Null is ``model_path``, or the published ones if
    that is null too."""
    device: Device = "auto"
    """Device of the network: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for this process's GPU, or else the CPU."""
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    """Precision of the network. In bfloat16 cosines are rounded to steps that can be as large as the differences
    between the images of a prompt."""
    micro_batch_size: PositiveInt = 32
    """Number of images, and of prompts, that go through the network together."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class HPSv2Config(ScorerConfig):
    """The network of the reward ``hpsv2``. Its ``model_path`` may also be a checkpoint in OpenCLIP's format, or a
    folder or hub repository that holds one."""

    version: Annotated[str, one_of(("2.0", "2.1"))] = "2.1"
    """Version of the published checkpoint to take from a folder or the hub: ``2.0`` or ``2.1``."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class AestheticConfig(ScorerConfig):
    """The networks of the reward ``aesthetic``: a CLIP, and linear layers on its embedding of an image."""

    head_path: PathText | None = None
    """File of the linear layers, as torch saved them: ``sac+logos+ava1-l14-linearMSE.pth`` of the repository
    ``christophschuhmann/improved-aesthetic-predictor``, which fits ``openai/clip-vit-large-patch14``."""


@documented_fields
@own_fields_first
@dataclass(kw_only=True, slots=True)
class RemoteConfig(HTTPOptions):
    """One reward server. Its section's name is a name of your choice, which ``reward.functions`` gives a weight."""

    url: str | None = None
    """Address that batches of images are posted to, e.g. ``http://127.0.0.1:18080``."""
    protocol: Annotated[str, one_of(PROTOCOLS)] = "json"
    """Protocol of the server: ``json`` (``flowgrpo-rc serve-reward``), ``verl_omni`` (a service of verl-omni's
    ``http_scorer_client``) or ``flow_grpo`` (its servers for GenEval, DeQA and UnifiedReward). The last two answer with
    pickles, which are read as plain data: nothing that one names is loaded."""
    batch_size: PositiveInt = 64
    """Largest number of images in one request."""
    max_concurrent: PositiveInt = 2
    """Most requests that are under way at once. For a server that scores one at a time two are enough: the second is
    sent and decoded meanwhile."""
    timeout_s: PositiveFloat = 120.0
    """Longest time in seconds of one try, with the time in the server's queue."""
    deadline_s: PositiveFloat = 1800.0
    """Longest time in seconds of all requests for a batch together, with every pause."""
    image_format: Annotated[str, one_of(FORMATS)] | None = None
    """File format of the images: ``png``, which keeps every pixel, or ``jpeg``, which is smaller. null is the format of
    the protocol's own clients: ``png`` for ``json``, ``jpeg`` for the others."""
    streams: bool = False
    """Send images while the next ones are drawn, and with ``rollout.ahead`` while the actor learns, one micro-batch of
    the rollout at a time (see ``reward.overlap``). The server must then score each image by itself, whichever others
    come with it; false sends all images of a process together."""
    columns: list[str] | None = None
    """Names of the prompt file's columns that are sent beside the prompts; null for all, which the server's protocol
    must be able to carry."""

    def problems(self) -> Iterator[str]:
        """An address or a key's name that cannot be used."""
        if self.url is None:
            yield "url: is not given; give the server's address, e.g. http://127.0.0.1:18080"
        else:
            yield from complaints(check_url, "url", self.url)
        yield from HTTPOptions.problems(self)


def remote_scorers(value: Any) -> dict[str, RemoteConfig]:
    """The servers by name that the section ``reward.remote`` holds, as mappings or as ``RemoteConfig``."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"got {show(value)}; give servers by name, e.g. reward.remote.geneval.url=http://...")
    servers: dict[str, RemoteConfig] = {}
    found: list[str] = []
    for name, entry in (value or {}).items():
        try:
            servers[str(name)] = convert(RemoteConfig, entry)
        except Problems as error:
            found += [f"{name}.{message}" for message in error.found]
        except ValueError as error:
            found.append(f"{name}: {error}")
    if found:
        raise Problems(found)
    return servers


@documented_fields
@dataclass(kw_only=True, slots=True)
class RewardModelRolloutConfig(Section):
    """Options of ``vllm serve`` for the reward model; the names are verl-omni's."""

    section = "reward.reward_model.rollout"

    name: Annotated[str, one_of(("vllm",))] = "vllm"
    """The program that serves; ``vllm`` is the one there is. It must be on the ``PATH``, or beside the Python that
    trains."""
    tensor_model_parallel_size: PositiveInt = 1
    """GPUs over which each layer is divided."""
    data_parallel_size: PositiveInt = 1
    """Copies of the model that answer side by side, each on as many GPUs as the other sizes say."""
    dtype: Annotated[str, one_of(("auto", "bfloat16", "float16", "float32"))] = "auto"
    """Precision of the weights: ``auto`` as the model's files say, ``bfloat16``, ``float16`` or ``float32``."""
    gpu_memory_utilization: Annotated[
        float, Check(lambda share: 0 < share <= 1, "give a share of the GPU's memory above 0 and at most 1")
    ] = 0.5
    """Share of each GPU's memory that the server takes, and keeps while the run trains."""
    max_model_len: PositiveInt | None = None
    """Longest question with its image and answer, in tokens; null for the model's own limit."""
    max_num_seqs: PositiveInt | None = None
    """Answers that are worked on at once; null for vllm's default."""
    enforce_eager: bool = True
    """Start the server without compiling the model. A compiled model starts later and answers faster."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class RewardModelConfig(Section):
    """A reward model that the run serves itself, for the reward ``judge`` and for functions that ask a model."""

    section = "reward.reward_model"

    enable: bool = False
    """Start a server with ``vllm serve``, and end it with the run. The reward ``judge`` uses it, and a function of the
    user's own gets its address as ``reward_router_address`` (``host:port``) and the model's name as ``model_name``, if
    it has such parameters."""
    model_path: str | None = None
    """The model: a name on the hub or a local folder, as ``vllm serve`` takes it."""
    devices: (
        Annotated[list[int], Check(lambda gpus: gpus and min(gpus) >= 0, "give numbers of GPUs from 0, e.g. [3],")]
        | None
    ) = None
    """GPUs of the server, as indices into those that the run sees; null for all of them. Name such as the run does not
    train on, or leave room beside the training with ``rollout.gpu_memory_utilization``."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments of ``vllm serve``, e.g. ``[--trust-remote-code]``. ``--host``, ``--port``,
    ``--served-model-name`` and ``--api-key`` are refused, since the run sets the address and the model's name."""
    start_timeout_s: PositiveFloat = 1800.0
    """Longest time in seconds that the server may take to start, with the download of the model."""
    rollout: RewardModelRolloutConfig = field(default_factory=RewardModelRolloutConfig)
    """Options of ``vllm serve``."""

    def problems(self) -> Iterator[str]:
        """A server without a model, and arguments that the run gives itself."""
        # A model path without enable is fine: scripts switch the server off with one key.
        if self.enable and not (self.model_path and self.model_path.strip()):
            yield "model_path: null, but reward.reward_model.enable=true; name one, e.g. Qwen/Qwen3-VL-8B-Instruct"
        # vllm accepts underscores in place of hyphens.
        given = {argument.partition("=")[0].replace("_", "-") for argument in self.extra_args}
        for name, reason in REFUSED_ARGUMENTS.items():
            if name in given:
                yield f"extra_args: leave {name} out, {reason}"

    def arguments(self, port: int) -> list[str]:
        """The arguments of ``vllm``."""
        rollout = self.rollout
        given = {
            "--host": "127.0.0.1",
            "--port": port,
            "--served-model-name": self.model_path,
            "--tensor-parallel-size": rollout.tensor_model_parallel_size,
            "--data-parallel-size": rollout.data_parallel_size,
            "--dtype": rollout.dtype,
            "--gpu-memory-utilization": rollout.gpu_memory_utilization,
            "--max-model-len": rollout.max_model_len,
            "--max-num-seqs": rollout.max_num_seqs,
        }
        flags = [text for name, value in given.items() if value is not None for text in (name, str(value))]
        eager = ["--enforce-eager"] if rollout.enforce_eager else []
        return ["serve", str(self.model_path), *flags, *eager, *self.extra_args]


@documented_fields
@dataclass(kw_only=True, slots=True)
class RewardConfig(Section):
    """The rewards of a run: a weighted sum of built-in functions and of the user's own."""

    section = "reward"

    functions: Weights = field(default_factory=dict)
    """Weights of the built-in rewards and of the servers in ``remote``, by name. Weight 0 turns a reward off: it is
    neither loaded nor computed. Without a reward here or a function of the user's own, ``ocr`` counts alone, with
    weight 1."""
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """The user's own function. It counts alone, unless ``functions`` or ``reward_functions`` name others beside it."""
    reward_functions: Functions = field(default_factory=dict)
    """Several functions of the user's own, as verl-omni names them: name -> ``{path, name, weight, ...}``. The metrics
    have the name on the left; ``path`` is the Python file, ``name`` the function in it (``compute_score`` where it is
    not given), ``weight`` its weight in the sum (1), and every further key an argument of each call. ``required`` is
    taken and changes nothing: a function that fails ends the run."""
    val_functions: Functions = field(default_factory=dict)
    """Scorers that only look: they score the images of every validation, as ``val/reward/<name>``, and count nowhere.
    Name -> true for a built-in reward, or ``{path, name, ...}`` for a function of the user's own; false turns one off.
    A reward that climbs while a scorer that it is not trained on falls is being gamed."""
    normalization: Annotated[str, one_of(("group",))] | None = None
    """The way from several rewards to one advantage. null: the weighted sum of the scores. ``group``: every reward is
    normalised within its prompt's group, less its mean and divided by its standard deviation there, before it is
    weighted; see ``normalised_sum``. The logged rewards are the scores in either case."""
    ocr: OCRConfig = field(default_factory=OCRConfig)
    """Options of the reward ``ocr``."""
    pickscore: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``pickscore``."""
    clipscore: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``clipscore``, flow_grpo's."""
    clip_cosine: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``clip_cosine``."""
    hpsv2: HPSv2Config = field(default_factory=HPSv2Config)
    """Options of the reward ``hpsv2``."""
    aesthetic: AestheticConfig = field(default_factory=AestheticConfig)
    """Options of the reward ``aesthetic``."""
    clip_similarity: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``clip_similarity``."""
    dino_similarity: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``dino_similarity``."""
    siglip_similarity: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``siglip_similarity``."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Options of the reward ``judge``."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A model that the run serves itself, for the judge and for functions that ask one."""
    num_workers: NonNegativeInt = 0
    """Worker processes of each training process for the built-in rewards that read images on the processor (``ocr``),
    which share a batch. 0 stands for none: then they are called in the training process itself."""
    overlap: bool = True
    """Score a rollout's micro-batch in a background thread while the next ones are drawn, with functions that have
    ``streams = True`` (``judge``, ``ocr``, ...); with ``rollout.ahead``, those that other processes compute score while
    the actor learns. The scores are the same either way, since such functions are always called for one micro-batch of
    ``rollout.micro_batch_size``. All others are called in the main thread when all images are drawn."""
    remote: Annotated[Any, Read(remote_scorers)] = field(default_factory=dict)
    """Reward servers, by names of your choice that ``functions`` gives weights: name -> the keys of ``RemoteConfig``;
    ``url`` must be given. Example: ``reward.remote.deqa.url=http://127.0.0.1:18080 reward.functions.deqa=1``.
    A server without a weight is not called."""
    timeout_s: PositiveFloat | None = 3600.0
    """Longest time in seconds that one call of a reward function, or its import, may take; null for no limit.
    A function that takes longer ends the run with file and line of what it was doing."""

    def problems(self) -> Iterator[str]:
        """Rewards that are not known, have one name, or do not count."""
        known = [*REWARD_NAMES, *self.remote]
        unknown = f"is not a known reward; known are {', '.join(known)}, and a function of your own"
        custom = None if self.custom_reward_function.path is None else self.custom_reward_function.name
        found: list[str] = []

        def weigh(where: str, weight: Any) -> float:
            # Text that spells a number is one, as in YAML without a decimal point.
            try:
                return convert(float, weight)
            except ValueError:
                got = plain(weight)
                found.append(f"{where}: got {got!r}; a weight must be a finite number (0 turns the reward off)")
                return 0.0

        # Every reward has a metric of its name, so that no two may share one.
        for name in self.remote:
            found += complaints(check_name, f"remote.{name}", name, [*REWARD_NAMES, custom])
        for name, weight in self.functions.items():
            if name in known:
                self.functions[name] = weigh(f"functions.{name}", weight)
            else:
                place = f"goes into reward.custom_reward_function, a server into reward.remote.{name}"
                found.append(f"functions: {name!r} {unknown} {place}")
        # A built-in reward with weight 0 has no metric, so its name is free.
        taken = [*self.remote, *(name for name, weight in self.functions.items() if weight), custom]
        for name, entry in self.reward_functions.items():
            where = f"reward_functions.{name}"
            found += complaints(check_name, where, name, taken)
            if isinstance(entry, Mapping):
                self.reward_functions[name] = {**entry, "weight": weigh(f"{where}.weight", entry.get("weight", 1.0))}
                found += complaints(of_entry, f"reward.{where}", entry, within=self.section)
            else:
                found.append(f"{where}: got {show(entry)}; give its keys, {{path, name, weight}}")
        yield from found
        # The rules below add up weights.
        if found:
            return
        weights = self.weights()
        if not weights:
            yield (
                f"functions: got {self.functions} and no custom function, so every weight is 0 and there is nothing to "
                "train on; give one reward a weight, e.g. reward.functions.ocr=1"
            )
        for name, entry in self.val_functions.items():
            where = f"val_functions.{name}"
            yield from complaints(check_name, where, name)
            # Its validation scores are logged under the same name.
            if name in weights:
                yield f"{where}: {name!r} is a reward of the training, which validation scores too; leave it out here"
            if isinstance(entry, Mapping) and "path" in entry:
                yield from complaints(of_entry, f"reward.{where}", entry, within=self.section)
            # An empty mapping, as true, is a built-in reward without options.
            elif entry not in (True, False, None, {}):
                yield f"{where}: got {show(entry)}; give true, or {{path, name}} of a function of your own"
            elif name not in known:
                place = f"is reward.{where}={{path: my_reward.py, name: {DEFAULT_NAME}}}"
                yield f"val_functions: {name!r} {unknown} {place}"

    def weights(self) -> dict[str, float]:
        """Name -> weight of every reward that is on, the user's own function last."""
        weights = {name: float(weight) for name, weight in self.functions.items() if weight != 0}
        weights |= {name: entry["weight"] for name, entry in self.reward_functions.items() if entry["weight"] != 0}
        custom = self.custom_reward_function
        if custom.path is not None and custom.weight != 0:
            weights[custom.name] = float(custom.weight)
        # ``functions.ocr=0`` alone is a mistake and no wish for the default.
        if not weights and DEFAULT_REWARD not in self.functions:
            return {DEFAULT_REWARD: 1.0}
        return weights

    def own_functions(self) -> dict[str, OwnFunction]:
        """The user's own functions by the names of their metrics, those with weight 0 too."""
        section = "reward.reward_functions"
        own = {name: of_entry(f"{section}.{name}", entry) for name, entry in self.reward_functions.items()}
        custom = self.custom_reward_function
        return own if custom.path is None else {**own, custom.name: custom.function}

    def observers(self) -> dict[str, OwnFunction | None]:
        """The scorers that only look, by name: a function of the user's own, or None for a built-in reward."""
        on = {name: entry for name, entry in self.val_functions.items() if entry not in (False, None)}
        section = "reward.val_functions"
        return {
            name: of_entry(f"{section}.{name}", entry) if isinstance(entry, Mapping) and entry else None
            for name, entry in on.items()
        }

    def in_words(self) -> str:
        """The rewards that are on: ``0.5 x ocr + 2 x compute_score (my_reward.py)``."""
        own = self.own_functions()
        more = {name: f" ({function.path})" for name, function in own.items()}
        more |= {name: f" ({server.url})" for name, server in self.remote.items()}
        if self.judge.model is not None:
            more["judge"] = f" ({self.judge.model})"
        total = " + ".join(f"{weight:g} x {name}{more.get(name, '')}" for name, weight in self.weights().items())
        if self.normalization is not None:
            total += f", each normalised within its {self.normalization}"
        looking = ", ".join(self.observers())
        return f"{total}; in validation {looking} only look" if looking else total

    def validate(self) -> None:
        """Raise ``ValueError`` with field, value and remedy for fields that were changed since construction."""
        self.check(self.section)
