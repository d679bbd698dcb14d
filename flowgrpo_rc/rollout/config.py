"""How images are sampled: engine, schedule, SDE window, validation. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from flowgrpo_rc.checks import choice, fit_fields, non_negative, positive
from flowgrpo_rc.dtypes import DTYPES
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rollout.engines import ENGINES
from flowgrpo_rc.rollout.placement import (
    IN_TRAINER,
    JOINED,
    PLACEMENTS,
    EngineTimeouts,
    ProcessConfig,
    RayConfig,
    device_groups,
)
from flowgrpo_rc.sde.types import SDE_TYPES
from flowgrpo_rc.sde.window import SDEWindow

QUANTIZATIONS = ("fp8",)
"""How the ``diffusers`` engine may round its weights."""
_HERE = "actor_rollout_ref.rollout"


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutAlgoConfig:
    """The section ``rollout.algo``: the stochastic steps."""

    noise_level: float = 0.7
    """``eta`` of the SDE step; 0 would leave nothing to learn from."""

    sde_type: str = "sde"
    """Kind of the stochastic step: ``sde`` (Flow-GRPO), ``cps`` or ``dance_sde``."""

    sde_window_size: int | None = None
    """How many contiguous steps are stochastic and trained. Null takes every step of the range."""

    sde_window_range: list[int] | None = None
    """``[first, stop)`` of the steps that the window may lie in. Null takes the whole schedule."""

    sample_strategy: str = "random"
    """Where the window lies: ``random`` draws a place for every prompt, ``progressive`` slides it through the range."""

    iters_per_group: int = 1
    """With ``sample_strategy=progressive``, how many batches the window stays before it moves on by its own size."""

    sde_window_seed: int | None = None
    """With ``sample_strategy=random``, a seed from which one place for the whole batch is drawn at every step, as
    verl-omni's MixGRPO does. Null draws a place for every prompt, from the rollouts' seed."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.algo", self)
        non_negative(f"{_HERE}.algo.noise_level", self.noise_level)
        non_negative(f"{_HERE}.algo.sde_window_seed", self.sde_window_seed, optional=True)
        choice(f"{_HERE}.algo.sample_strategy", self.sample_strategy, ("random", "progressive"))
        positive(f"{_HERE}.algo.iters_per_group", self.iters_per_group)
        choice(f"{_HERE}.algo.sde_type", self.sde_type, list(SDE_TYPES))
        positive(f"{_HERE}.algo.sde_window_size", self.sde_window_size, optional=True)
        if self.sde_window_range is not None and len(self.sde_window_range) != 2:
            raise ValueError(
                f"{_HERE}.algo.sde_window_range: got {list(self.sde_window_range)}; give two numbers, [first, stop]"
            )
        largest = SDE_TYPES[self.sde_type].largest_noise_level
        if largest is not None and self.noise_level > largest:
            raise ValueError(
                f"{_HERE}.algo.noise_level: got {self.noise_level}; sde_type={self.sde_type} takes a level between 0 "
                f"and {largest:g}"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class PipelineConfig:
    """The section ``rollout.pipeline``: what a plain diffusers call would be given."""

    height: int = 512
    """Height of the images in pixels."""

    width: int = 512
    """Width of the images in pixels."""

    num_inference_steps: int = 10
    """How many denoising steps an image takes."""

    true_cfg_scale: float = 1.0
    """Scale of classifier-free guidance. Above 1 every step runs the model twice. Stable Diffusion 3's own pipeline
    calls this ``guidance_scale``."""

    guidance_scale: float | None = None
    """Guidance that guidance-distilled models take as an input. Null for all other models."""

    max_sequence_length: int = 512
    """Prompts are cut to this many embeddings (of T5 with Stable Diffusion 3, which pads to them)."""

    reference_area: int | None = None
    """Pixels that each reference image is scaled to, with its own aspect ratio, before the VAE encodes it. Null scales
    as the pipeline's own call does, most often to about 1024 * 1024; fewer pixels cost less at every step."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.pipeline", self)
        for name in ("height", "width", "num_inference_steps", "max_sequence_length", "true_cfg_scale"):
            positive(f"{_HERE}.pipeline.{name}", getattr(self, name))
        non_negative(f"{_HERE}.pipeline.guidance_scale", self.guidance_scale, optional=True)
        positive(f"{_HERE}.pipeline.reference_area", self.reference_area, optional=True)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValPipelineConfig:
    """The section ``rollout.val_kwargs.pipeline``: where validation samples otherwise than training does."""

    height: int | None = None
    """Height of validation images in pixels. Null takes the training value."""

    width: int | None = None
    """Width of validation images in pixels. Null takes the training value."""

    num_inference_steps: int | None = None
    """How many denoising steps a validation image takes. Null takes the training value."""

    true_cfg_scale: float | None = None
    """Scale of classifier-free guidance in validation. Null takes the training value."""

    guidance_scale: float | None = None
    """Guidance that guidance-distilled models take as an input in validation. Null takes the training value."""

    max_sequence_length: int | None = None
    """How many embeddings prompts are cut to in validation. Null takes the training value."""

    reference_area: int | None = None
    """Pixels that each reference image of a validation prompt is scaled to. Null takes the training value."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.val_kwargs.pipeline", self)
        sizes = ("height", "width", "num_inference_steps", "max_sequence_length", "reference_area")
        for name in (*sizes, "true_cfg_scale"):
            positive(f"{_HERE}.val_kwargs.pipeline.{name}", getattr(self, name), optional=True)
        non_negative(f"{_HERE}.val_kwargs.pipeline.guidance_scale", self.guidance_scale, optional=True)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValAlgoConfig:
    """The section ``rollout.val_kwargs.algo``: the noise of validation, of which there is none."""

    noise_level: float = 0.0
    """Must be 0: validation samples the deterministic ODE."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.val_kwargs.algo", self)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValConfig:
    """The section ``rollout.val_kwargs``: how validation samples."""

    n: int = 1
    """How many images are drawn for every validation prompt."""

    seed: int = 42
    """Seed of the validation noise, the same at every validation."""

    pipeline: ValPipelineConfig = field(default_factory=ValPipelineConfig)
    algo: ValAlgoConfig = field(default_factory=ValAlgoConfig)

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.val_kwargs", self)
        positive(f"{_HERE}.val_kwargs.n", self.n)
        non_negative(f"{_HERE}.val_kwargs.seed", self.seed)
        if self.algo.noise_level != 0:
            raise ValueError(
                f"{_HERE}.val_kwargs.algo.noise_level: got {self.algo.noise_level}; validation samples the "
                "deterministic ODE, so it must be 0"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class ProbeConfig:
    """The section ``rollout.probe``: recorded steps that the actor rescores, to tell engine gap from staleness."""

    images: int = 4
    """How many images of a batch are rescored, over all processes, with all their steps. 0 switches the probe off."""

    warn_gap: float | None = None
    """Warn, once a run, when ``rollout_sync/engine_gap_per_dimension`` exceeds this. Null never warns."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.probe", self)
        non_negative(f"{_HERE}.probe.images", self.images)
        positive(f"{_HERE}.probe.warn_gap", self.warn_gap, optional=True)


@documented_fields
@dataclass(kw_only=True, slots=True)
class VllmOmniConfig(EngineTimeouts):
    """The section ``rollout.vllm_omni``: when the engine's process is given up, ended and started anew, once a call;
    and whether it sleeps."""

    sleep: bool = False
    """With ``placement=trainer``, whether the engine's weights leave the GPU, for page-locked memory of the host, as
    soon as a rollout is drawn, and come back for the next one. The trainer's update then has their room."""

    def __post_init__(self) -> None:
        self.check(f"{_HERE}.vllm_omni")


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The section ``actor_rollout_ref.rollout``: which engine samples, and how."""

    name: str = "diffusers"
    """The engine: ``diffusers`` samples where ``placement`` says, ``vllm_omni`` always in a process of its own, which
    runs vllm-omni."""

    n: int = 16
    """How many images are drawn for every prompt. They are the group that advantages compare."""

    dtype: str = "bfloat16"
    """Precision of the engine's transformer and adapter. Latents and log-probs are float32 in any case."""

    quantization: str | None = None
    """``fp8`` rounds every linear weight matrix of the engine, adapter included, through float8_e4m3fn with one scale
    per output row and computes with the rounded weights in ``dtype``: the gap that fp8 weights make, on any hardware,
    without their speed. Validation samples with them too. The actor's weights stay as they are."""

    rollout_attn_backend: str | None = None
    """How the engine's transformer computes attention. With ``name=diffusers`` one of diffusers' attention backends,
    tried before the model is loaded; with ``vllm_omni`` one of vllm-omni's, which has its own names for them. Null is
    the engine's default. The actor has ``model.attn_backend``; a difference is part of the off-policy gap."""

    micro_batch_size: int = 32
    """How many images one forward of the engine draws."""

    gather_weights: bool = False
    """With ``actor.fsdp_config.shard``, whether the weights are gathered once for a whole rollout, for which the GPU
    must have room beside its slice, instead of once for every forward."""

    log_prob_micro_batch_size_per_gpu: int | None = None
    """Images per forward of the scoring pass, each with its whole SDE window. Null takes micro-batches as the actor's
    update does, by its ``ppo_micro_batch_rows`` or ``ppo_micro_batch_size_per_gpu``."""

    adapter_lag: int = 0
    """Draw with the actor's adapter of this many batches ago, as an asynchronous engine would. At the start and after
    a resume the oldest adapter known is used. Validation always has the newest."""

    ahead: int = 0
    """Ask for the images of a batch so many batches before it is learned from, so that engines elsewhere
    (``placement``) draw while the actor learns. They are drawn with the actor's adapter of that time: every number is
    that of ``adapter_lag`` of as many batches. Engines in the trainer's process take turns with the actor all the
    same."""

    max_staleness: int | None = None
    """The most batches that the adapter which draws may be older than the actor's: ``ahead`` and ``adapter_lag`` above
    it are refused. Null sets no bound."""

    placement: str = IN_TRAINER
    """Where engines run: ``trainer`` has one beside the actor, on its device, and the two take turns; ``process`` has
    processes of their own on this machine, one for each of ``devices``; ``ray`` has actors anywhere in a Ray cluster,
    with the extra ``ray``."""

    devices: list[str] | None = None
    """With ``placement=process``, the device of each engine, e.g. ``[cuda:2,cuda:3]``, which several trainer processes
    of a machine share out; ``cuda:2+cuda:3`` is one ``vllm_omni`` engine on both. Null is one engine on the trainer's
    own device."""

    engines: int = 1
    """With ``placement=ray``, how many engines each trainer process has."""

    seed: int | None = None
    """Seed of the rollouts' noise and window places. Null takes ``trainer.seed``."""

    calculate_log_probs: bool = True
    """Record the engine's log-probs. Rollout correction and bypass mode need them."""

    algo: RolloutAlgoConfig = field(default_factory=RolloutAlgoConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    val_kwargs: ValConfig = field(default_factory=ValConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    vllm_omni: VllmOmniConfig = field(default_factory=VllmOmniConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        fit_fields(_HERE, self)
        choice(f"{_HERE}.name", self.name, list(ENGINES))
        non_negative(f"{_HERE}.seed", self.seed, optional=True)
        choice(f"{_HERE}.dtype", self.dtype, list(DTYPES))
        choice(f"{_HERE}.quantization", self.quantization, (*QUANTIZATIONS, None))
        if self.quantization is not None and not ENGINES[self.name].quantizes:
            able = ", ".join(name for name, entry in ENGINES.items() if entry.quantizes)
            raise ValueError(
                f"{_HERE}.quantization: got {self.quantization}; only the {able} engine rounds its weights, so "
                f"leave it null or set {_HERE}.name={able}"
            )
        choice(
            f"{_HERE}.rollout_attn_backend",
            self.rollout_attn_backend,
            (*ENGINES[self.name].attention_backends, None),
        )
        positive(f"{_HERE}.micro_batch_size", self.micro_batch_size)
        non_negative(f"{_HERE}.adapter_lag", self.adapter_lag)
        non_negative(f"{_HERE}.ahead", self.ahead)
        non_negative(f"{_HERE}.max_staleness", self.max_staleness, optional=True)
        self._check_staleness()
        self._check_placement()
        positive(f"{_HERE}.log_prob_micro_batch_size_per_gpu", self.log_prob_micro_batch_size_per_gpu, optional=True)
        if self.n < 2:
            raise ValueError(f"{_HERE}.n: got {self.n}; GRPO compares images of one prompt, so give at least 2")
        if self.algo.noise_level == 0:
            raise ValueError(
                f"{_HERE}.algo.noise_level: got 0; a deterministic rollout has no log-prob to train on, give e.g. 0.7"
            )
        if not self.calculate_log_probs:
            raise ValueError(
                f"{_HERE}.calculate_log_probs: got False; the rollout/training gap is measured from these log-probs, "
                "so leave it true"
            )
        _ = self.window  # refuses one that does not fit into the schedule

    def _check_staleness(self) -> None:
        """Nothing is asked for that would be older than ``max_staleness``."""
        for name in ("ahead", "adapter_lag"):
            batches = getattr(self, name)
            if self.max_staleness is not None and batches > self.max_staleness:
                raise ValueError(
                    f"{_HERE}.{name}: got {batches}, so that adapters which draw would be {batches} batches older than "
                    f"the actor's; {_HERE}.max_staleness={self.max_staleness} bounds that, so lower {name} or raise it"
                )

    def _check_placement(self) -> None:
        """Settings of a placement are given with that placement alone."""
        choice(f"{_HERE}.placement", self.placement, PLACEMENTS)
        if self.vllm_omni.sleep and (self.name, self.placement) != ("vllm_omni", IN_TRAINER):
            raise ValueError(
                f"{_HERE}.vllm_omni.sleep: got True with name={self.name}, placement={self.placement}; only a "
                "vllm_omni engine that takes turns with the trainer on one GPU has reason to sleep, so set it to false"
            )
        positive(f"{_HERE}.engines", self.engines)
        if self.devices is not None:
            if self.placement != "process":
                raise ValueError(
                    f"{_HERE}.devices: got {self.devices} with placement={self.placement}; only engines in processes "
                    f"of their own are given devices, so set {_HERE}.placement=process or leave devices null"
                )
            joined = [group for group in device_groups(self.devices) if len(group) > 1]
            if joined and self.name != "vllm_omni":
                raise ValueError(
                    f"{_HERE}.devices: got {JOINED.join(joined[0])}; the {self.name} engine computes on one device, so "
                    f"give each engine its own, or set {_HERE}.name=vllm_omni"
                )
        if self.placement == "ray" and self.ray.num_gpus > 1 and self.name != "vllm_omni":
            raise ValueError(
                f"{_HERE}.ray.num_gpus: got {self.ray.num_gpus:g}; the {self.name} engine computes on one device, so "
                f"give it 1, or set {_HERE}.name=vllm_omni"
            )
        if self.engines != 1 and self.placement != "ray":
            raise ValueError(
                f"{_HERE}.engines: got {self.engines} with placement={self.placement}; only Ray finds places for "
                f"engines, so name several in {_HERE}.devices with placement=process, or set placement=ray"
            )
        self._check_timeouts()

    def _check_timeouts(self) -> None:
        """A ``vllm_omni`` engine has a process of its own, which goes by one section's time-outs; on Ray, by both."""
        if self.name != "vllm_omni" or self.placement == "ray":
            return
        read = "process" if self.is_elsewhere else "vllm_omni"
        ignored = "vllm_omni" if self.is_elsewhere else "process"
        for timeout in fields(EngineTimeouts):
            value = getattr(getattr(self, ignored), timeout.name)
            if value not in (timeout.default, getattr(getattr(self, read), timeout.name)):
                raise ValueError(
                    f"{_HERE}.{ignored}.{timeout.name}: got {value:g}; with name={self.name} and placement="
                    f"{self.placement} the engine's process goes by {_HERE}.{read}.{timeout.name}, so set that"
                )

    @property
    def is_elsewhere(self) -> bool:
        """Whether engines have processes of their own that ``placement`` finds a place for."""
        return self.placement != IN_TRAINER

    @property
    def staleness(self) -> int:
        """How many batches the adapter that draws is older than the actor's, once so many have been learned from."""
        return max(self.ahead, self.adapter_lag)

    @property
    def window(self) -> SDEWindow:
        """Where the stochastic steps may lie in the schedule.

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
        own = {f.name: getattr(self.val_kwargs.pipeline, f.name) for f in fields(self.val_kwargs.pipeline)}
        return replace(self.pipeline, **{name: value for name, value in own.items() if value is not None})
