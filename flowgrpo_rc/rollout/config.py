"""How images are sampled: engine, schedule, SDE window, validation. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from flowgrpo_rc.checks import choice, fit_fields, non_negative, positive
from flowgrpo_rc.field_docs import documented_fields

ENGINES = ("diffusers", "vllm_omni")
SDE_TYPES = ("sde", "cps", "dance_sde")
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("fp8",)
SHORTEST_SILENCE = 3.0
_HERE = "actor_rollout_ref.rollout"


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutAlgoConfig:
    """The section ``rollout.algo``: the stochastic steps."""

    noise_level: float = 0.7
    """``eta`` of the SDE step; 0 would leave nothing to learn from."""

    sde_type: str = "sde"
    """``sde`` (Flow-GRPO), ``cps`` or ``dance_sde``."""

    sde_window_size: int | None = None
    """How many contiguous steps are stochastic and trained; null: every step of the range."""

    sde_window_range: list[int] | None = None
    """``[first, stop)`` of the steps the window may lie in, drawn once per prompt; null: the whole schedule."""

    sample_strategy: str = "random"
    """Where the window lies: ``random``, anew for every prompt, or ``progressive``, sliding through the range."""

    iters_per_group: int = 1
    """``progressive``: batches at each place, before the window moves on by its own size."""

    sde_window_seed: int | None = None
    """``random``: one place for the whole batch, drawn from this seed and the step, as verl-omni's MixGRPO has it;
    null: a place for every prompt, from the rollouts' seed."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.algo", self)
        non_negative(f"{_HERE}.algo.noise_level", self.noise_level)
        non_negative(f"{_HERE}.algo.sde_window_seed", self.sde_window_seed, optional=True)
        choice(f"{_HERE}.algo.sample_strategy", self.sample_strategy, ("random", "progressive"))
        positive(f"{_HERE}.algo.iters_per_group", self.iters_per_group)
        choice(f"{_HERE}.algo.sde_type", self.sde_type, SDE_TYPES)
        positive(f"{_HERE}.algo.sde_window_size", self.sde_window_size, optional=True)
        if self.sde_window_range is not None and len(self.sde_window_range) != 2:
            raise ValueError(
                f"{_HERE}.algo.sde_window_range: got {list(self.sde_window_range)}; give two numbers, [first, stop]"
            )
        if self.sde_type == "cps" and self.noise_level > 1:
            raise ValueError(
                f"{_HERE}.algo.noise_level: got {self.noise_level}; sde_type=cps takes a level between 0 and 1"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class PipelineConfig:
    """The section ``rollout.pipeline``: what a plain diffusers call would be given."""

    height: int = 512
    """Pixels."""

    width: int = 512
    """Pixels."""

    num_inference_steps: int = 10
    """Denoising steps."""

    true_cfg_scale: float = 1.0
    """Classifier-free guidance; above 1 every step runs the model twice. Stable Diffusion 3's own pipeline calls this
    ``guidance_scale``."""

    guidance_scale: float | None = None
    """Guidance embedding of guidance-distilled models; null for all others."""

    max_sequence_length: int = 512
    """Prompts are cut to this many embeddings (of T5 with Stable Diffusion 3, which pads to them)."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.pipeline", self)
        for name in ("height", "width", "num_inference_steps", "max_sequence_length", "true_cfg_scale"):
            positive(f"{_HERE}.pipeline.{name}", getattr(self, name))
        non_negative(f"{_HERE}.pipeline.guidance_scale", self.guidance_scale, optional=True)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValPipelineConfig:
    """The section ``rollout.val_kwargs.pipeline``; null takes the training value."""

    height: int | None = None
    """Pixels in validation."""

    width: int | None = None
    """Pixels in validation."""

    num_inference_steps: int | None = None
    """Denoising steps in validation."""

    true_cfg_scale: float | None = None
    """Classifier-free guidance in validation."""

    guidance_scale: float | None = None
    """Guidance embedding in validation."""

    max_sequence_length: int | None = None
    """Prompts are cut to this many embeddings in validation."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.val_kwargs.pipeline", self)
        for name in ("height", "width", "num_inference_steps", "true_cfg_scale", "max_sequence_length"):
            positive(f"{_HERE}.val_kwargs.pipeline.{name}", getattr(self, name), optional=True)
        non_negative(f"{_HERE}.val_kwargs.pipeline.guidance_scale", self.guidance_scale, optional=True)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValAlgoConfig:
    """The section ``rollout.val_kwargs.algo``."""

    noise_level: float = 0.0
    """0: deterministic ODE sampling."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.val_kwargs.algo", self)


@documented_fields
@dataclass(kw_only=True, slots=True)
class ValConfig:
    """The section ``rollout.val_kwargs``."""

    n: int = 1
    """Images per validation prompt."""

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
    """The section ``rollout.probe``: stored steps that the actor rescores, to tell engine gap from staleness."""

    images: int = 4
    """Images a batch, over all prompts and processes, with all their stochastic steps; 0 switches the probe off."""

    warn_gap: float | None = None
    """Warn, once a run, when ``rollout_sync/engine_gap_per_dimension`` exceeds this; null: never."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.probe", self)
        non_negative(f"{_HERE}.probe.images", self.images)
        positive(f"{_HERE}.probe.warn_gap", self.warn_gap, optional=True)


@documented_fields
@dataclass(kw_only=True, slots=True)
class VllmOmniConfig:
    """The section ``rollout.vllm_omni``: when ``name=vllm_omni`` gives its process up. A process that was given up is
    ended and started anew once for every call."""

    start_timeout_s: float = 900.0
    """Seconds from its start until the model is loaded."""

    request_timeout_s: float = 3600.0
    """Seconds for one rollout, all its images."""

    sync_timeout_s: float = 600.0
    """Seconds for one adapter."""

    silence_timeout_s: float = 60.0
    """Seconds without a sign of life, of which there are two a second; at least ``SHORTEST_SILENCE``."""

    close_timeout_s: float = 20.0
    """Seconds for a clean end, before it is killed."""

    def __post_init__(self) -> None:
        fit_fields(f"{_HERE}.vllm_omni", self)
        for name in ("start", "request", "sync", "silence", "close"):
            positive(f"{_HERE}.vllm_omni.{name}_timeout_s", getattr(self, f"{name}_timeout_s"))
        if self.silence_timeout_s < SHORTEST_SILENCE:
            raise ValueError(
                f"{_HERE}.vllm_omni.silence_timeout_s: got {self.silence_timeout_s}; a process at work may be silent "
                f"for a second or two, so give at least {SHORTEST_SILENCE:g}"
            )


@documented_fields
@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The section ``actor_rollout_ref.rollout``."""

    name: str = "diffusers"
    """The engine: ``diffusers`` samples in this process, ``vllm_omni`` in one of its own that runs vllm-omni."""

    n: int = 16
    """Images per prompt: the group that advantages compare."""

    dtype: str = "bfloat16"
    """Precision of the engine's transformer and adapter. Latents and log-probs are float32 all the same."""

    quantization: str | None = None
    """``fp8`` rounds every linear weight matrix of the engine, adapter included, through float8_e4m3fn with one scale
    per output row and computes with the rounded weights in ``dtype``: the gap that fp8 weights make, on any hardware,
    without their speed. Validation samples with them too. The actor's weights stay as they are."""

    micro_batch_size: int = 32
    """Images per engine forward."""

    log_prob_micro_batch_size_per_gpu: int | None = None
    """Images per forward of the scoring pass; null takes the actor's ``ppo_micro_batch_size_per_gpu``."""

    adapter_lag: int = 0
    """Draw with the actor's adapter of this many batches ago, as an asynchronous engine would. At the start and after
    a resume it is the oldest adapter known. Validation always has the newest."""

    seed: int | None = None
    """Seed of the rollouts' noise and window places; null takes ``trainer.seed``."""

    calculate_log_probs: bool = True
    """Record the engine's log-probs. Rollout correction and bypass mode need them."""

    algo: RolloutAlgoConfig = field(default_factory=RolloutAlgoConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    val_kwargs: ValConfig = field(default_factory=ValConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    vllm_omni: VllmOmniConfig = field(default_factory=VllmOmniConfig)

    def __post_init__(self) -> None:
        fit_fields(_HERE, self)
        choice(f"{_HERE}.name", self.name, ENGINES)
        non_negative(f"{_HERE}.seed", self.seed, optional=True)
        choice(f"{_HERE}.dtype", self.dtype, DTYPES)
        choice(f"{_HERE}.quantization", self.quantization, (*QUANTIZATIONS, None))
        if self.name == "vllm_omni" and self.quantization is not None:
            raise ValueError(
                f"{_HERE}.quantization: got {self.quantization}; only the diffusers engine rounds its weights, so "
                f"leave it null or set {_HERE}.name=diffusers"
            )
        positive(f"{_HERE}.micro_batch_size", self.micro_batch_size)
        non_negative(f"{_HERE}.adapter_lag", self.adapter_lag)
        positive(
            f"{_HERE}.log_prob_micro_batch_size_per_gpu",
            self.log_prob_micro_batch_size_per_gpu,
            optional=True,
        )
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
        self._check_window()

    @property
    def validation_pipeline(self) -> PipelineConfig:
        """The pipeline's settings in validation: its own where they are given, else those of training."""
        own = {f.name: getattr(self.val_kwargs.pipeline, f.name) for f in fields(self.val_kwargs.pipeline)}
        return replace(self.pipeline, **{name: value for name, value in own.items() if value is not None})

    def _check_window(self) -> None:
        steps, algo = self.pipeline.num_inference_steps, self.algo
        usable = steps - 1 if algo.sde_type == "cps" else steps
        first, stop = algo.sde_window_range or (0, usable)
        if not 0 <= first < stop <= usable:
            raise ValueError(
                f"{_HERE}.algo.sde_window_range: got [{first}, {stop}]; with num_inference_steps={steps} and "
                f"sde_type={algo.sde_type} it must lie in [0, {usable}]"
            )
        if (algo.sde_window_size or 1) > stop - first:
            raise ValueError(
                f"{_HERE}.algo.sde_window_size: got {algo.sde_window_size}; the range [{first}, {stop}] holds "
                f"{stop - first} steps"
            )
