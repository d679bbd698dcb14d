"""The configuration of the prompt writer. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from flowgrpo_rc.actor.config import DiffusionLossConfig, OptimizerConfig, read_correction
from flowgrpo_rc.dtypes import DTYPES, EMULATED
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.loss.aggregation import AGGREGATIONS
from flowgrpo_rc.rollout.config import IN_TRAINER, JOINED, EngineTimeouts, device_groups
from flowgrpo_rc.section import (
    Check,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    PositiveInt,
    Read,
    Section,
    complaints,
    one_of,
    read_mapping,
)

_HERE = "algorithm.prompt_writer"
LEARNS = ("both", "writer", "images")
TRANSFORMERS = "transformers"
VLLM = "vllm"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Widths that vllm's buffers of an adapter can have."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class TokenLossConfig(Section):
    """The section ``prompt_writer.actor.token_loss``: PPO on tokens."""

    section = f"{_HERE}.actor.token_loss"

    clip_ratio: PositiveFloat = 0.2
    """Half width of the clip band, the range around 1 in which ``pi_theta/pi_old`` of a token earns a gradient."""
    clip_ratio_low: PositiveFloat | None = None
    """Half width of the clip band below 1; null takes ``clip_ratio``."""
    clip_ratio_high: PositiveFloat | None = None
    """Half width of the clip band above 1; null takes ``clip_ratio``."""
    clip_ratio_c: Annotated[float, Check(lambda bound: bound > 1, "give a number above 1")] | None = 3.0
    """The loss is at most ``-A * clip_ratio_c`` if the advantage ``A`` is negative. Null sets no such bound."""
    loss_agg_mode: Annotated[str, one_of(AGGREGATIONS)] = "token-mean"
    """Aggregation of the losses of tokens, one of ``loss.aggregation.AGGREGATIONS``."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of ``seq-mean-token-sum-norm``."""

    def problems(self) -> Iterator[str]:
        """A divisor that would be the longest rewrite of a batch on one process."""
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            yield "loss_scale_factor: got null with loss_agg_mode=seq-mean-token-sum-norm; give a number, e.g. 128"


@documented_fields
@dataclass(kw_only=True, slots=True)
class WriterActorConfig(Section):
    """The section ``prompt_writer.actor``: how the writer learns. ``token_loss`` reads it."""

    section = f"{_HERE}.actor"

    ppo_micro_batch_size_per_gpu: PositiveInt = 16
    """Rewrites per forward and backward pass on one process."""
    ppo_epochs: PositiveInt = 1
    """Passes over the rewrites of a batch."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient of all LoRA weights."""
    ema_decay: Annotated[float, Check(lambda decay: 0 < decay < 1, "give a number between 0 and 1")] | None = None
    """Moving average of the LoRA weights, as ``actor.ema_decay`` of the image model. Validation writes with it, and the
    run folder gets it as ``writer_ema/``; null: none."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    use_kl_loss: bool = False
    """Add ``kl_loss_coef`` times the k3 estimate of the KL to the model without its adapter."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL in the loss."""
    token_loss: TokenLossConfig = field(default_factory=TokenLossConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout_correction: Annotated[Any, Read(read_correction)] = field(default_factory=dict)
    """Rollout correction of tokens, with the keys of ``algorithm.rollout_correction``; null only measures."""

    def problems(self) -> Iterator[str]:
        """Correction that tokens do not have."""
        if self.rollout_correction.plan().calibrated:
            yield "rollout_correction.rollout_rs_threshold: got auto, which follows the gap of images; give a number"
        if self.rollout_correction.bypass_mode and self.rollout_correction.rollout_is_batch_normalize:
            yield (
                "rollout_correction.rollout_is_batch_normalize: got true with bypass_mode=true, where every "
                "micro-batch makes the weights anew; set it to false, or bypass_mode=false"
            )

    @property
    def diffusion_loss(self) -> DiffusionLossConfig:
        """``token_loss`` under the name by which the losses read it."""
        return DiffusionLossConfig(**asdict(self.token_loss))

    @property
    def kl_loss_type(self) -> str:
        """The losses of tokens have one kind of KL, and do not read this."""
        return "gaussian"


@documented_fields
@dataclass(kw_only=True, slots=True)
class WriterProcessConfig(EngineTimeouts):
    """The section ``prompt_writer.engine.process``: time limits after which an engine's process is ended and started
    again."""

    section = f"{_HERE}.engine.process"


@documented_fields
@dataclass(kw_only=True, slots=True)
class WriterEngineConfig(Section):
    """The section ``prompt_writer.engine``: how rewrites are sampled."""

    section = f"{_HERE}.engine"

    name: Annotated[str, one_of((TRANSFORMERS, VLLM))] = TRANSFORMERS
    """The engine: ``transformers``, or ``vllm`` in processes of its own, which is made for large models."""
    dtype: Annotated[str, one_of(DTYPES)] = "bfloat16"
    """Precision of the engine's model and adapter; log-probs are computed in float32 from its logits."""
    quantization: Annotated[str, one_of((EMULATED,))] | None = None
    """Of ``transformers``: ``fp8_emulated`` rounds the weights of all linear layers but the output layer through fp8
    (e4m3, a scale a row); products and adapter stay in ``dtype``."""
    micro_batch_size: PositiveInt = 32
    """Rewrites that one forward writes."""
    kv_cache_gib: PositiveFloat = 2.0
    """Of ``vllm``: GiB of its cache of keys and values. Rewrites that do not fit wait for the others, and the model
    takes no longer texts than fit."""
    torch_compile: bool = False
    """Of ``vllm``: compile the network, on a GPU into CUDA graphs. A start then takes longer."""
    placement: Annotated[str, one_of((IN_TRAINER, "process"))] = IN_TRAINER
    """Place of the engine: ``trainer`` has it beside the actor, on its device; ``process`` has processes of their own
    on this machine, one for each of ``devices``."""
    devices: list[str] | None = None
    """With ``placement=process``, the device of each engine, e.g. ``[cuda:6,cuda:7]``, which several trainer processes
    of a machine share out. Null is one engine on the trainer's own device."""
    process: WriterProcessConfig = field(default_factory=WriterProcessConfig)

    def problems(self) -> Iterator[str]:
        """An engine that must be elsewhere, and devices that no engine has."""
        if self.name == VLLM and self.placement == IN_TRAINER:
            yield "name: got vllm with placement=trainer; vllm needs a process of its own: set placement=process"
        if self.quantization is not None and self.name == VLLM:
            yield f"quantization: got {self.quantization}, which vllm does not have; clear it, or set name=transformers"
        if self.torch_compile and self.name != VLLM:
            yield f"torch_compile: got true, but {self.name} compiles nothing here; clear it, or set name=vllm"
        if self.devices is None:
            return
        if self.placement == IN_TRAINER:
            yield f"devices: got {self.devices} with placement=trainer; clear it, or set placement=process"
        if JOINED in "".join(self.devices):
            yield f"devices: got {', '.join(self.devices)}; an engine of prompts computes on one device, e.g. cuda:2"
            return
        yield from complaints(device_groups, self.devices, f"{self.section}.devices", within=self.section)


@documented_fields
@dataclass(kw_only=True, slots=True)
class PromptWriterConfig(Section):
    """The section ``algorithm.prompt_writer``: a language model that rewrites requests."""

    section = _HERE

    path: PathText | None = None
    """Folder or hub name of a causal language model in transformers' format, with a chat template. Null: no prompt
    writer."""
    learns: Annotated[str, one_of(LEARNS)] = "both"
    """The side that learns: ``both``, the ``writer`` alone, or the ``images``' LoRA alone."""
    rewrites: PositiveInt = 4
    """Prompts that are written for each request; each is drawn ``rollout.n`` times."""
    max_new_tokens: PositiveInt = 128
    """Tokens of a rewrite at most; a longer one is cut there."""
    prompt_marker: str | None = None
    """The prompt is the text after this one's last place in a rewrite, e.g. ``Revised Prompt:`` after reasoning. A
    rewrite without it counts as empty. Null: the whole rewrite is the prompt."""
    system_prompt: str | None = None
    """Message of the system before the request; null: none."""
    chat_template_kwargs: Annotated[dict[str, Any], Read(read_mapping("options of the chat template"))] = field(
        default_factory=dict
    )
    """Options of the chat template, e.g. ``{enable_thinking: false}``."""
    request_penalty: NonNegativeFloat = 0.0
    """A rewrite's score falls by this times the share of the request's words that it leaves out."""
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    """Precision of the model that learns; its adapter is in float32."""
    lora_rank: PositiveInt = 32
    """Rank of the adapter."""
    lora_alpha: PositiveInt = 64
    """Its update is scaled by ``lora_alpha / lora_rank``."""
    target_modules: list[str] | None = None
    """Linear layers that get the adapter, by the last part of their names; null: all but the output layer."""
    actor: WriterActorConfig = field(default_factory=WriterActorConfig)
    engine: WriterEngineConfig = field(default_factory=WriterEngineConfig)

    def problems(self) -> Iterator[str]:
        """Rewrites that have nothing to be compared with, and a marker that is in every text."""
        if self.prompt_marker == "":
            yield "prompt_marker: got an empty text; give the text before the prompt, or null to take the whole rewrite"
        if self.rewrites == 1 and self.learns != "images":
            yield (
                f"rewrites: got 1 with learns={self.learns}, but rewrites of a request are compared; give 2 or more, "
                "or set learns to images"
            )
        if self.engine.name == VLLM and self.lora_rank > VLLM_RANKS[-1]:
            yield (
                f"lora_rank: got {self.lora_rank}, but vllm's adapters have at most {VLLM_RANKS[-1]}; lower it, or "
                "set engine.name to transformers"
            )

    def in_words(self, requests: int) -> str:
        """The prompt writer of a run whose batches have so many requests."""
        learns = {"both": "learns too", "writer": "learns alone", "images": "does not learn"}[self.learns]
        return (
            f"Prompt writer: {self.path}, which {learns}: {self.rewrites} prompts for each of {requests} requests, in "
            f"{self.engine.dtype}"
            + (f" by {self.engine.name}" if self.engine.name != TRANSFORMERS else "")
            + (", elsewhere" if self.engine.placement != IN_TRAINER else "")
        )

    @property
    def learns_alone(self) -> bool:
        """The image model does not learn."""
        return self.path is not None and self.learns == "writer"

    @property
    def lora_init_weights(self) -> str:
        """Start of the adapter, as ``models.lora.attach_lora`` reads it: the second matrices are 0."""
        return "default"
