"""Sampling of images: engine, placement, schedule, SDE window, validation. Importing this loads no
torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Annotated, Any

from flowgrpo_rc.dtypes import DTYPES
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.cache import CACHES, OF_VLLM_OMNI, CacheConfig
from flowgrpo_rc.rollout.engines import ENGINES, QUANTIZATIONS
from flowgrpo_rc.rollout.scout import ScoutConfig, ScoutEngineConfig
from flowgrpo_rc.rollout.tail import TailConfig
from flowgrpo_rc.sde.types import SDE_TYPES
from flowgrpo_rc.sde.window import SDEWindow, progressive_places
from flowgrpo_rc.section import (
    Check,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    complaints,
    one_of,
)

_HERE = "actor_rollout_ref.rollout"
IN_TRAINER = "trainer"
"""The placement of an engine beside the actor."""
PLACEMENTS = (IN_TRAINER, "process", "ray")
"""Values of ``rollout.placement``."""
SHORTEST_SILENCE = 3.0
"""Seconds. A working process may give no sign of life for a second or two."""
Silence = Annotated[
    PositiveFloat,
    Check(
        lambda seconds: seconds >= SHORTEST_SILENCE,
        f"a process at work may be silent for a second or two, so give at least {SHORTEST_SILENCE:g}",
    ),
]
_DEVICE = re.compile(r"cpu|[a-z]+:\d+")
JOINED = "+"
"""Joins the devices of one engine in an entry of ``rollout.devices``."""


Interval = Annotated[
    list[float],
    Check(
        lambda ends: len(ends) == 2 and 0 <= ends[0] < ends[1] <= 1,
        "give the lowest and the highest noise level between 0 and 1, e.g. [0.2,0.8],",
    ),
]


@dataclass(frozen=True)
class Share:
    """Position among the trainer processes of a machine, which divide its engines among themselves."""

    index: int
    """From 0."""
    count: int
    """Number of trainer processes."""


ALONE = Share(0, 1)
"""One trainer process on its machine."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutAlgoConfig(Section):
    """The section ``rollout.algo``: the stochastic steps."""

    section = f"{_HERE}.algo"

    noise_level: NonNegativeFloat = 0.7
    """``eta`` of the SDE step; 0 would leave nothing to learn from."""
    sde_type: Annotated[str, one_of(SDE_TYPES)] = "sde"
    """Kind of the stochastic step: ``sde`` (Flow-GRPO), ``cps`` or ``dance_sde``."""
    sde_window_size: PositiveInt | None = None
    """Contiguous steps that are stochastic and trained. Null takes every step of the range."""
    sde_window_range: (
        Annotated[list[int], Check(lambda ends: len(ends) == 2, "give two numbers, [first, stop],")] | None
    ) = None
    """``[first, stop)`` of the steps that the window may lie in. Null takes the whole schedule."""
    sample_strategy: Annotated[str, one_of(("random", "progressive"))] = "random"
    """Place of the window: ``random`` draws one for every prompt, ``progressive`` slides it through the range."""
    iters_per_group: PositiveInt = 1
    """With ``sample_strategy=progressive``, how many batches the window stays before it moves on by its own size."""
    sde_window_seed: NonNegativeInt | None = None
    """With ``sample_strategy=random``, a seed from which one place for the whole batch is drawn at every step, as
    verl-omni's MixGRPO does. Null draws a place for every prompt, from the rollouts' seed."""

    init_same_noise: bool = False
    """The images of a prompt start from one noise and differ by the noise of their stochastic steps alone. Every step
    up to the first stochastic one is then computed once for a prompt."""

    def problems(self) -> Iterator[str]:
        """A noise level that the kind of step does not take."""
        largest = SDE_TYPES[self.sde_type].largest_noise_level
        if largest is not None and self.noise_level > largest:
            yield (
                f"noise_level: got {self.noise_level}; sde_type={self.sde_type} takes a level between 0 and {largest:g}"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class PipelineConfig(Section):
    """The section ``rollout.pipeline``: what a plain diffusers call would be given."""

    section = f"{_HERE}.pipeline"

    height: PositiveInt = 512
    """Height of the images in pixels."""
    width: PositiveInt = 512
    """Width of the images in pixels."""
    num_inference_steps: PositiveInt = 10
    """Denoising steps of an image."""
    true_cfg_scale: PositiveFloat = 1.0
    """Scale of classifier-free guidance. Above 1 every step runs the model twice. Stable Diffusion 3's own pipeline
    calls this ``guidance_scale``."""
    guidance_scale: NonNegativeFloat | None = None
    """Guidance that guidance-distilled models take as an input. Null for all other models."""
    guidance_interval: Interval | None = None
    """``[lowest, highest]`` noise level, from 0 (image) to 1 (noise), at which classifier-free guidance acts; elsewhere
    a step runs the model once. Engine and actor keep to it alike, so that it makes no gap. Null guides every step."""
    max_sequence_length: PositiveInt = 512
    """Prompts are cut to this many embeddings (of T5 with Stable Diffusion 3, which pads to them)."""
    reference_area: PositiveInt | None = None
    """Pixels that each reference image is scaled to, with its own aspect ratio, before the VAE encodes it. Null scales
    as the pipeline's own call does, most often to about 1024 * 1024; fewer pixels cost less at every step."""

    def problems(self) -> Iterator[str]:
        """An interval of guidance without guidance."""
        if self.guidance_interval is not None and self.true_cfg_scale <= 1:
            yield (
                f"guidance_interval: got {self.guidance_interval} with true_cfg_scale={self.true_cfg_scale:g}, which "
                "is no guidance; set true_cfg_scale above 1, or leave guidance_interval null"
            )

    @property
    def guidance_in_words(self) -> str:
        """The scale of classifier-free guidance, and where it acts."""
        if self.guidance_interval is None:
            return f"{self.true_cfg_scale:g}"
        low, high = self.guidance_interval
        return f"{self.true_cfg_scale:g} at noise levels from {low:g} to {high:g}"


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValPipelineConfig(Section):
    """The section ``rollout.val_kwargs.pipeline``: where validation samples otherwise than training does."""

    section = f"{_HERE}.val_kwargs.pipeline"

    height: PositiveInt | None = None
    """Height of validation images in pixels. Null takes the training value."""
    width: PositiveInt | None = None
    """Width of validation images in pixels. Null takes the training value."""
    num_inference_steps: PositiveInt | None = None
    """Denoising steps of a validation image. Null takes the training value."""
    true_cfg_scale: PositiveFloat | None = None
    """Scale of classifier-free guidance in validation. Null takes the training value."""
    guidance_scale: NonNegativeFloat | None = None
    """Guidance that guidance-distilled models take as an input in validation. Null takes the training value."""
    guidance_interval: Interval | None = None
    """Noise levels with classifier-free guidance in validation. Null takes the training value; [0,1] guides every
    step."""
    max_sequence_length: PositiveInt | None = None
    """Embeddings to which prompts are cut in validation. Null takes the training value."""
    reference_area: PositiveInt | None = None
    """Pixels that each reference image of a validation prompt is scaled to. Null takes the training value."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValAlgoConfig(Section):
    """The section ``rollout.val_kwargs.algo``: the noise of validation, which must be none."""

    section = f"{_HERE}.val_kwargs.algo"

    noise_level: Annotated[
        float, Check(lambda level: level == 0, "validation samples the deterministic ODE, so it must be 0")
    ] = 0.0
    """Must be 0: validation samples the deterministic ODE."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValConfig(Section):
    """The section ``rollout.val_kwargs``: how validation samples."""

    section = f"{_HERE}.val_kwargs"

    n: PositiveInt = 1
    """Images drawn for every validation prompt."""
    seed: NonNegativeInt = 42
    """Seed of the validation noise, the same at every validation."""
    pipeline: ValPipelineConfig = field(default_factory=ValPipelineConfig)
    algo: ValAlgoConfig = field(default_factory=ValAlgoConfig)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ProbeConfig(Section):
    """The section ``rollout.probe``: recorded steps that the actor rescores, to tell engine gap from staleness."""

    section = f"{_HERE}.probe"

    images: NonNegativeInt = 4
    """Images of a batch that are rescored, over all processes, with all their steps. 0 switches the probe off."""
    warn_gap: PositiveFloat | None = None
    """Warn, once a run, when ``rollout_sync/engine_gap_per_dimension`` exceeds this. Null never warns."""


@dataclass(kw_only=True, slots=True)
class EngineTimeouts(Section):
    """Time limits after which an engine's process is ended and started again."""

    start_timeout_s: PositiveFloat = 900.0
    """Seconds from the start of the process until the model is loaded."""
    request_timeout_s: PositiveFloat = 3600.0
    """Seconds for one request: a rollout with all its images, or with ``placement`` one micro-batch of it."""
    sync_timeout_s: PositiveFloat = 600.0
    """Seconds for taking over one adapter."""
    silence_timeout_s: Silence = 60.0
    """Seconds without a sign of life; a process gives two a second. At least ``SHORTEST_SILENCE``."""
    close_timeout_s: PositiveFloat = 20.0
    """Seconds for a clean end, after which the process is killed."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class ProcessConfig(EngineTimeouts):
    """The section ``rollout.process``: time limits after which an engine elsewhere is ended and started again."""

    section = f"{_HERE}.process"


@documented_fields
@dataclass(kw_only=True, slots=True)
class RayConfig(Section):
    """The section ``rollout.ray``: the cluster of engines with ``placement=ray``."""

    section = f"{_HERE}.ray"

    address: str | None = None
    """Address of a running cluster that this machine belongs to, ``host:port``; ``auto`` finds it. Null joins the
    cluster of the variable ``RAY_ADDRESS``, and without one starts Ray on this machine for the run."""
    num_gpus: NonNegativeFloat = 1.0
    """GPUs that Ray reserves for each engine; 0 for engines on the CPU."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for each engine."""

    def problems(self) -> Iterator[str]:
        """An address that needs Ray's client, and shares of several GPUs."""
        if self.address is not None and self.address.startswith("ray://"):
            yield (
                f"address: got {self.address!r}, Ray's way in from outside; engines are asked from a machine of the "
                "cluster, so run `ray start --address=HEAD:6379` on this one and set it to auto"
            )
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            yield f"num_gpus: got {self.num_gpus:g}; Ray shares single GPUs, so give a number up to 1 or a whole one"


@documented_fields
@dataclass(kw_only=True, slots=True)
class VllmOmniConfig(EngineTimeouts):
    """The section ``rollout.vllm_omni``: when the engine's process is given up, ended and started anew, once a call;
    and whether it sleeps."""

    section = f"{_HERE}.vllm_omni"

    sleep: bool = False
    """With ``placement=trainer``, whether the engine's weights leave the GPU, for page-locked memory of the host, as
    soon as a rollout is drawn, and come back for the next one. The trainer's update then has their room."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutConfig(Section):
    """The section ``actor_rollout_ref.rollout``: which engine samples, and how."""

    section = _HERE

    name: Annotated[str, one_of(ENGINES)] = "diffusers"
    """The engine: ``diffusers`` samples in the place of ``placement``, ``vllm_omni`` always in a process of its own
    that runs vllm-omni."""
    n: Annotated[int, Check(lambda n: n >= 2, "GRPO compares images of one prompt, so give at least 2")] = 16
    """Images that are drawn for every prompt and learned from. They are the group that advantages compare, unless
    ``scout.n`` draws more."""
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    """Precision of the engine's transformer and adapter. Latents and log-probs are float32 in any case."""
    quantization: Annotated[str, one_of(QUANTIZATIONS)] | None = None
    """``fp8`` and ``int8`` round the engine's linear layers with torchao: weights once, activations at every forward,
    and products in 8 bits. ``fp8`` needs a GPU with float8 kernels and is emulated elsewhere. ``fp8_emulated`` rounds
    weights alone, those of the adapter and of layers outside of blocks among them, and multiplies in ``dtype``: the gap
    of fp8 weights on any hardware, without their speed. Validation samples with them too. The actor's weights stay."""
    quantization_skip: list[str] | None = None
    """Linear layers that ``quantization`` leaves as they are, by the part of their names that blocks have in common,
    e.g. ``[img_mlp]``. Null is none with ``fp8_emulated``, the family's list with ``fp8``, and with ``int8`` that list
    and the layers that modulate a block."""
    merge_adapter: bool = False
    """Add each adapter that the engine takes over to its weights, so that a forward costs as much as the base's. The
    adapted layers are then the engine's own, and rounding the sums to ``dtype`` is part of the off-policy gap."""
    torch_compile: bool = False
    """Compile the blocks of the engine's transformer. Without ``model.torch_compile`` the gap gains the compiler's
    rounding. The first images pay for it; a CPU needs a C++ compiler, a GPU triton."""
    rollout_attn_backend: str | None = None
    """The attention of the engine's transformer. With ``name=diffusers`` one of diffusers' attention backends,
    tried before the model is loaded; with ``vllm_omni`` one of vllm-omni's, which has its own names for them. Null is
    the engine's default. The actor has ``model.attn_backend``; a difference is part of the off-policy gap."""
    micro_batch_size: PositiveInt = 32
    """Images that one forward of the engine draws."""
    gather_weights: bool = False
    """With ``actor.fsdp_config.shard``, whether the weights are gathered once for a whole rollout, for which the GPU
    must have room beside its slice, instead of once for every forward."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Images per forward of the scoring pass, each with its whole SDE window. Null takes micro-batches as the actor's
    update does, by its ``ppo_micro_batch_rows`` or ``ppo_micro_batch_size_per_gpu``."""
    adapter_lag: NonNegativeInt = 0
    """Draw with the actor's adapter of this many batches ago, as an asynchronous engine would. At the start and after
    a resume the oldest adapter known is used. Validation always has the newest."""
    ahead: NonNegativeInt = 0
    """Ask for the images of a batch so many batches before it is learned from, so that engines elsewhere
    (``placement``) draw while the actor learns. They are drawn with the actor's adapter of that time: every number is
    that of ``adapter_lag`` of as many batches. Engines in the trainer's process take turns with the actor all the
    same."""
    max_staleness: NonNegativeInt | None = None
    """The most batches that the adapter which draws may be older than the actor's: ``ahead`` and ``adapter_lag`` above
    it are refused. Null sets no bound."""
    placement: Annotated[str, one_of(PLACEMENTS)] = IN_TRAINER
    """Place of the engines: ``trainer`` has one beside the actor, on its device, and the two take turns; ``process``
    has processes of their own on this machine, one for each of ``devices``; ``ray`` has actors anywhere in a Ray
    cluster, with the extra ``ray``."""
    devices: list[str] | None = None
    """With ``placement=process``, the device of each engine, e.g. ``[cuda:2,cuda:3]``, which several trainer processes
    of a machine share out; ``cuda:2+cuda:3`` is one ``vllm_omni`` engine on both. Null is one engine on the trainer's
    own device."""
    engines: PositiveInt = 1
    """With ``placement=ray``, how many engines each trainer process has."""
    seed: NonNegativeInt | None = None
    """Seed of the rollouts' noise and window places. Null takes ``trainer.seed``."""
    # Scripts of verl-omni set this key, so that it exists.
    calculate_log_probs: bool = True
    """Record the engine's log-probs. SDE steps need them; there are none of clean images, whatever is given here."""
    algo: RolloutAlgoConfig = field(default_factory=RolloutAlgoConfig)
    tail: TailConfig = field(default_factory=TailConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scout: ScoutConfig = field(default_factory=ScoutConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    val_kwargs: ValConfig = field(default_factory=ValConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    vllm_omni: VllmOmniConfig = field(default_factory=VllmOmniConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def problems(self) -> Iterator[str]:
        """Combinations of fields that cannot work."""
        engine = ENGINES[self.name]
        is_vllm_omni = self.name == "vllm_omni"
        chosen = f"name={self.name}, placement={self.placement}"
        yield from self._weights_problems()
        if self.has_scouts_engine:
            yield from self._scouts_engine_problems()
        if self.torch_compile and not engine.compiles:
            yield f"torch_compile: got true with name={self.name}, which does not know it; set it to false"
        if self.torch_compile and self.cache.name is not None:
            yield (
                f"torch_compile: got true with cache.name={self.cache.name}, which decides at every block; set one of "
                "them to its default"
            )
        if self.rollout_attn_backend not in (None, *engine.attention_backends):
            backends = ", ".join((*engine.attention_backends, "null"))
            yield f"rollout_attn_backend: got {self.rollout_attn_backend!r}; choose one of {backends}"
        if self.scout.n and self.scout.n <= self.n:
            yield f"scout.n: got {self.scout.n} with n={self.n}; give more, or 0 to learn from every image"
        if self.scout.redraw and self.ahead:
            yield (
                f"scout.redraw: got true with ahead={self.ahead}; images are chosen when their batch is learned from, "
                "by another adapter than drew them. Set ahead to 0, or redraw to false"
            )
        if self.scout.redraw and self.algo.init_same_noise:
            yield (
                "scout.redraw: got true with algo.init_same_noise=true, with which a prompt's scouts would all be one "
                "image; set one of them to false"
            )
        if self.cache.name in CACHES and is_vllm_omni:
            yield (
                f"cache.name: got {self.cache.name} with name=vllm_omni; {' and '.join(CACHES)} are caches of "
                f"diffusers, so set it to null or {', '.join(OF_VLLM_OMNI)}, or {_HERE}.name=diffusers"
            )
        if self.cache.name in OF_VLLM_OMNI and not is_vllm_omni:
            yield (
                f"cache.name: got {self.cache.name} with name={self.name}; it is vllm-omni's, so choose one of "
                f"{', '.join(CACHES)}, or {_HERE}.name=vllm_omni"
            )
        # The section alone takes 0, as validation has it; a run needs steps with a density.
        if self.algo.noise_level == 0:
            yield "algo.noise_level: got 0; a deterministic rollout has no log-prob to train on, give e.g. 0.7"
        # Not their sum: ahead alone already makes adapters as many batches old.
        for name in ("ahead", "adapter_lag"):
            batches = getattr(self, name)
            if self.max_staleness is not None and batches > self.max_staleness:
                yield (
                    f"{name}: got {batches}, so that adapters which draw would be {batches} batches older than the "
                    f"actor's; {_HERE}.max_staleness={self.max_staleness} bounds that, so lower {name} or raise it"
                )
        if self.vllm_omni.sleep and not (is_vllm_omni and self.placement == IN_TRAINER):
            yield (
                f"vllm_omni.sleep: got True with {chosen}; only a vllm_omni engine that takes turns with the trainer "
                "on one GPU has reason to sleep, so set it to false"
            )
        devices = self.devices or []
        if self.devices is not None and self.placement != "process":
            yield f"devices: got {devices} with placement={self.placement}; clear it, or set {_HERE}.placement=process"
        elif self.devices is not None:
            yield from complaints(device_groups, devices, within=_HERE)
        one_device = f"the {self.name} engine computes on one device, so give each engine one"
        if JOINED in "".join(devices) and not is_vllm_omni:
            yield f"devices: got {', '.join(devices)}; {one_device}, or set {_HERE}.name=vllm_omni"
        if self.placement == "ray" and self.ray.num_gpus > 1 and not is_vllm_omni:
            yield f"ray.num_gpus: got {self.ray.num_gpus:g}; {one_device}, or set {_HERE}.name=vllm_omni"
        if self.engines != 1 and self.placement != "ray":
            yield (
                f"engines: got {self.engines} with placement={self.placement}; only Ray finds places for engines, so "
                f"name several in {_HERE}.devices with placement=process, or set placement=ray"
            )
        # A vllm_omni engine goes by one section's time-outs (on Ray by both), and a value that nothing reads would look
        # like a limit that holds.
        read, ignored = ("process", "vllm_omni") if self.is_elsewhere else ("vllm_omni", "process")
        for timeout in fields(EngineTimeouts) if is_vllm_omni and self.placement != "ray" else ():
            value = getattr(getattr(self, ignored), timeout.name)
            if value not in (timeout.default, getattr(getattr(self, read), timeout.name)):
                yield (
                    f"{ignored}.{timeout.name}: got {value:g}; with {chosen} the engine's process goes by "
                    f"{_HERE}.{read}.{timeout.name}, so set that"
                )
        yield from complaints(lambda: self.window, within=_HERE)

    def _weights_problems(self) -> Iterator[str]:
        """Weights of an engine that would ignore the setting, so that images would be compared under a wrong name."""
        engine = ENGINES[self.name]
        if self.quantization is not None and not engine.quantizes:
            able = ", ".join(name for name, entry in ENGINES.items() if entry.quantizes)
            yield (
                f"quantization: got {self.quantization}; only the {able} engine rounds its weights, so leave it null "
                f"or set {_HERE}.name={able}"
            )
        if self.merge_adapter and not engine.quantizes:
            yield f"merge_adapter: got true with name={self.name}, which does not know it; set it to false"
        if self.quantization_skip is not None and self.quantization is None:
            yield f"quantization_skip: got {self.quantization_skip} without a quantization; set it to null"

    def _scouts_engine_problems(self) -> Iterator[str]:
        """A second engine that cannot be, or that has the weights of the first one."""
        given = self.scout.engine.given
        if not ENGINES[self.name].takes_actors_transformer:
            name, value = next(iter(given.items()))
            yield (
                f"scout.engine.{name}: got {value} with name={self.name}, of which a run has one; set it to null, or "
                f"{_HERE}.name=diffusers"
            )
            return
        # The run's own problems are reported once.
        own = list(self._weights_problems())
        yield from (f"scout.engine.{one}" for one in self.of_scouts._weights_problems() if one not in own)
        if all(getattr(self, name) == value for name, value in given.items()):
            name, value = next(iter(given.items()))
            yield f"scout.engine.{name}: got {value}, as the run's engine has it; set it to null, or another value"

    @property
    def has_scouts_engine(self) -> bool:
        """Scouts have an engine of their own."""
        return bool(self.scout.redraw and self.scout.engine.given)

    @property
    def of_scouts(self) -> RolloutConfig:
        """The section as the engine of the scouts has it."""
        # Not ``replace``, which would check the section from within its own check.
        scouts = copy(self)
        scouts.scout = replace(self.scout, engine=ScoutEngineConfig())
        for name, value in self.scout.engine.given.items():
            setattr(scouts, name, value)
        return scouts

    @property
    def drawn(self) -> int:
        """Images that are drawn for every prompt."""
        return self.scout.n or self.n

    @property
    def precision_in_words(self) -> str:
        """Precision of the engine, and what else makes it compute otherwise than the actor."""
        words = [self.dtype]
        if self.quantization is not None:
            words.append(self.quantization)
        if self.merge_adapter:
            words.append("adapter merged")
        if self.torch_compile:
            words.append("compiled")
        return ", ".join(words)

    @property
    def is_elsewhere(self) -> bool:
        """True if engines run outside of the trainer's process by ``placement``."""
        return self.placement != IN_TRAINER

    @property
    def staleness(self) -> int:
        """Batches by which the adapter that draws is older than the actor's, once so many have been learned from."""
        return max(self.ahead, self.adapter_lag)

    def forwards_per_image(self, *, clean: bool) -> tuple[float, float, float]:
        """Transformer forwards of an image before, in and after its window, on average over the window's places.

        Those that images of a prompt have in common count once for every micro-batch of theirs.

        Args:
            clean: the objective learns from clean images, so that there is no window.
        """
        steps = self.pipeline.num_inference_steps
        if clean:
            return 0.0, 0.0, float(self.tail.forwards(steps))
        window = self.window
        # One image of each prompt in each micro-batch computes the steps in common. Prompts and micro-batches cut the
        # images into so many parts, both at once where they coincide.
        n, size = self.drawn, self.micro_batch_size
        share = 1 / n + 1 / size - 1 / math.lcm(n, size) if self.algo.init_same_noise else 1.0
        before = fmean(start * share for start in self.window_places)
        after = fmean(self.tail.forwards(steps - start - window.size) for start in self.window_places)
        return before, window.size - 1 + share, after

    def draws_every_step(self, *, clean: bool) -> bool:
        """Each step is a forward of every image."""
        return math.isclose(sum(self.forwards_per_image(clean=clean)), self.pipeline.num_inference_steps)

    @property
    def scout_steps(self) -> int:
        """Denoising steps of a scout that is only looked at; 0: scouts are learned from."""
        return (self.scout.steps or self.pipeline.num_inference_steps) if self.scout.redraw else 0

    def forwards_in_words(self, *, clean: bool) -> str:
        """E.g. ``10 steps, 4.66 forwards an image (0.09 before its window, 1.06 in it, 3.5 after it)``, or the steps
        alone."""
        steps = f"{self.pipeline.num_inference_steps} steps"
        if self.draws_every_step(clean=clean):
            return steps
        parts = self.forwards_per_image(clean=clean)
        before, within, after = (f"{round(part, 2):g}" for part in parts)
        where = "" if clean else f" ({before} before its window, {within} in it, {after} after it)"
        return f"{steps}, {round(sum(parts), 2):g} forwards an image{where}"

    def forwards_metrics(self, *, clean: bool) -> dict[str, float]:
        """Metrics of a cheaper rollout: forwards an image, with a window also before, in and after it; none where every
        step is a forward of every image. Of scouts, forwards for each image that is drawn again."""
        scouts = {"rollout/forwards_of_scouts": self.drawn * self.scout_steps / self.n} if self.scout.redraw else {}
        if self.draws_every_step(clean=clean):
            return scouts
        parts = self.forwards_per_image(clean=clean)
        metrics = {"rollout/forwards_per_image": sum(parts)}
        if not clean:
            places = (f"rollout/forwards_{place}_window" for place in ("before", "in", "after"))
            metrics |= dict(zip(places, parts, strict=True))
        return metrics | scouts

    @property
    def shares_one_step(self) -> bool:
        """A prompt's images start from one noise, and no window leaves them more than one step in common."""
        return self.algo.init_same_noise and self.window.stop == self.window.size

    def request_fields(self, *, clean: bool) -> dict[str, Any]:
        """Fields of a ``RolloutRequest`` whose images are learned from, except for prompts, seeds and window starts.

        Args:
            clean: the objective learns from clean images, so that there is no window.
        """
        asked = {
            "num_inference_steps": self.pipeline.num_inference_steps,
            "tail": None if self.tail.is_whole else self.tail,
            "cache": None if self.cache.name is None else self.cache,
        }
        if clean:
            return asked | {"window_starts": None, "record_clean": True}
        algo = self.algo
        return asked | {
            "window_size": self.window.size,
            "noise_level": algo.noise_level,
            "sde_type": algo.sde_type,
        }

    @property
    def window_places(self) -> list[int]:
        """Steps with which a window may begin, in order."""
        window = self.window
        if self.algo.sample_strategy == "progressive":
            return progressive_places(window)
        return list(range(window.first, window.stop - window.size + 1))

    @property
    def window(self) -> SDEWindow:
        """Range of the schedule's steps that the stochastic ones may lie in.

        Raises:
            ValueError: the window does not fit; names the field.
        """
        algo = self.algo
        try:
            return SDEWindow.for_schedule(
                self.pipeline.num_inference_steps, algo.sde_window_size, algo.sde_window_range, sde_type=algo.sde_type
            )
        except ValueError as error:
            raise ValueError(f"{_HERE}.algo.{error}") from None

    @property
    def validation_pipeline(self) -> PipelineConfig:
        """The pipeline's settings in validation: its own where they are given, else those of training."""
        # Null takes the training value, so that a change of training reaches validation.
        given = {f.name: getattr(self.val_kwargs.pipeline, f.name) for f in fields(self.val_kwargs.pipeline)}
        own = {name: value for name, value in given.items() if value is not None}
        if own.get("true_cfg_scale", self.pipeline.true_cfg_scale) <= 1:
            # The interval of training is one of guidance, which this validation has none of.
            own.setdefault("guidance_interval", None)
        return replace(self.pipeline, **own)


def device_groups(devices: list[str], field: str = f"{_HERE}.devices") -> list[tuple[str, ...]]:
    """``rollout.devices``, or another ``field`` like it, as the devices of each engine.

    Raises:
        ValueError: an entry names no device, or one is named twice.
    """
    if not devices:
        raise ValueError(f"{field}: got []; name a device for each engine, e.g. [cuda:2,cuda:3], or set it to null")
    # Two engines on one device would each plan with all of its memory; on the CPU they only share time.
    groups = [tuple(entry.split(JOINED)) for entry in devices]
    named = [device for group in groups for device in group]
    for device in named:
        if not _DEVICE.fullmatch(device):
            raise ValueError(
                f"{field}: got {device!r}; a device is cpu or a kind and a number, e.g. cuda:2, and a vllm_omni engine "
                f"on several of them is cuda:2{JOINED}cuda:3"
            )
        if device != "cpu" and named.count(device) > 1:
            raise ValueError(f"{field}: names {device} twice; two engines would share its memory, so give each its own")
    return groups


def shared_weights_problems(model: ModelConfig, rollout: RolloutConfig, reason: str) -> Iterator[str]:
    """Settings of an engine that rule out the actor's own weights; ``reason`` says why it must have these."""
    same = {"quantization": None, "merge_adapter": False, "torch_compile": False, "dtype": model.dtype}
    # An engine elsewhere has a transformer of its own, whose attention is its own too.
    if not rollout.is_elsewhere:
        same["rollout_attn_backend"] = model.attn_backend
    found = {f"rollout.{name}": (getattr(rollout, name), value) for name, value in same.items()}
    if rollout.has_scouts_engine:
        of_scouts = rollout.scout.engine.given.items()
        found |= {f"rollout.scout.engine.{name}": (got, same[name]) for name, got in of_scouts if name in same}
    for name, (got, value) in found.items():
        if got != value:
            wanted = {None: "null", False: "false"}.get(value, value)
            yield (
                f"{name}: got {'true' if got is True else got}; {reason}, so set it to {wanted}, as the actor has it, "
                "or sample with another engine"
            )


def rounded_base_problems(model: ModelConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Settings of an engine that rule out the actor's rounded weights."""
    if model.quantization is not None and ENGINES[rollout.name].takes_actors_transformer:
        # A second form of the weights would need the unrounded ones.
        setting = f"with model.quantization={model.quantization}"
        reason = f"{setting} the {rollout.name} engine samples with the actor's rounded weights"
        yield from shared_weights_problems(model, rollout, reason)
