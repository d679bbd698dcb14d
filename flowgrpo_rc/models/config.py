"""The trained model and its LoRA: two sections of the configuration. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from flowgrpo_rc.dtypes import DTYPES, TRAINED_DTYPES
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.models.attention import ATTENTION_BACKENDS
from flowgrpo_rc.section import Check, PathOrEmpty, PathText, PositiveInt, Section, one_of

ALGORITHMS = ("flow_grpo",)
ALL_LINEAR = "all-linear"
"""The value of ``target_modules`` for every linear layer."""
BASE_QUANTIZATIONS = ("int8", "fp8", "nf4")
"""Values of ``quantization``."""
AUTO = "auto"
"""The ``lora_compute_dtype`` that follows ``dtype``, and the recomputation that follows the GPU's memory."""
AS_ROLLOUT = "rollout"
"""The ``timestep_dtype`` that follows ``rollout.dtype``."""
NO_FULL_TRAINING = (
    "a LoRA is what is trained, never all weights: the engine is sent the adapter alone, the KL's reference is the "
    "actor without it, and weights, gradients and AdamW's moments of every parameter would take 16 bytes each in "
    "float32. What comes closest is a LoRA of a high rank on every linear layer: actor_rollout_ref.model.lora_rank=64 "
    "actor_rollout_ref.model.lora_alpha=128 actor_rollout_ref.model.target_modules=all-linear"
)
"""Why full-parameter training is refused, and what to use instead."""
CHECKPOINTING_FROM = 1_000_000_000
"""Parameters above which ``enable_gradient_checkpointing=null`` is on: activations of such a transformer are many times
the LoRA's own memory."""

Rank = Annotated[
    int, Check(lambda rank: rank != 0, NO_FULL_TRAINING), Check(lambda rank: rank > 0, "give a number above 0")
]


@documented_fields
@dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """The section ``actor_rollout_ref.model``."""

    section = "actor_rollout_ref.model"

    path: PathOrEmpty = ""
    """Folder or hub name of a diffusers pipeline. ``asset:tiny_qwen_image`` is the tiny model of this package."""
    algorithm: Annotated[str, one_of(ALGORITHMS)] = "flow_grpo"
    """The RL algorithm; one of ``ALGORITHMS``."""
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    """Precision of the frozen weights in the actor."""
    quantization: Annotated[str, one_of(BASE_QUANTIZATIONS)] | None = None
    """Hold the linear layers of the frozen transformer's blocks in 8 or 4 bits: ``int8`` or ``fp8`` with a scale a row
    (torchao), ``nf4`` with a scale for 64 weights (bitsandbytes). Layers compute in ``dtype``, which must be bfloat16.
    The engine ``diffusers`` has the same weights."""
    timestep_dtype: Annotated[str, one_of((AS_ROLLOUT,))] | None = None
    """Rounding of the actor's timestep, and of a guidance scale, before it embeds them. null: as its own
    precision does. ``rollout``: as ``rollout.dtype`` does in the engine, so that both embed the same numbers and this
    part of the off-policy gap is gone. It acts where the engine computes in a lower precision than the actor, in
    families that round them."""
    lora_dtype: Annotated[str, one_of(TRAINED_DTYPES)] = "float32"
    """Precision of the LoRA weights, their gradients and their optimizer's moments."""
    lora_compute_dtype: Annotated[str, one_of((AUTO, *TRAINED_DTYPES))] = AUTO
    """Precision of the LoRA's products in the actor. auto: that of the frozen weights, and float32 over float16. An
    engine in the same precision then multiplies the same numbers. The LoRA's weights and the sums of their gradients
    stay in ``lora_dtype``."""
    lora_rank: Rank = 16
    """Rank of the LoRA matrices."""
    lora_alpha: PositiveInt = 32
    """Numerator of the LoRA's scale: the update is multiplied by ``lora_alpha / lora_rank``."""
    lora_init_weights: Annotated[str, one_of(("gaussian", "default"))] = "gaussian"
    """Start of the first LoRA matrix: ``gaussian`` or ``default`` (Kaiming). The second starts at 0 in both."""
    target_modules: Any = None
    """Names of the modules that get a LoRA. ``all-linear`` stands for every linear layer, null for the model family's
    attention layers."""
    lora_adapter_path: PathText | None = None
    """Folder of a LoRA in diffusers' format to start from. Its rank and targets must be the ones given here, and its
    alpha too unless it equals the rank, as in a run's ``lora/``; such a LoRA is converted to the alpha given here."""
    enable_gradient_checkpointing: bool | Annotated[str, one_of((AUTO,))] | None = None
    """Recompute activations in the backward pass: less memory, about a third more compute, the same numbers. null turns
    it on for transformers above ``CHECKPOINTING_FROM`` parameters; ``auto`` where the run's plan does not fit the GPU
    without it, and as null where there is no GPU or no plan."""
    allow_tf32: bool = False
    """Multiply float32 numbers on a GPU in TF32, which has 10 bits after the point: faster VAEs, rewards and float32
    models, and another rounding. It holds for the actor and the engine ``diffusers``."""
    torch_compile: bool = False
    """Compile the actor's transformer blocks. Without ``rollout.torch_compile`` the off-policy gap gains the compiler's
    rounding. The first batch pays for it; a CPU needs a C++ compiler, a GPU triton."""
    batch_guidance: bool = True
    """Compute the conditional and the unconditional half of classifier-free guidance in one call of the transformer, in
    engine and actor alike. It is faster wherever calls, not multiplications, take the time. False makes two calls with
    half the rows each, equal to rounding: for a device without memory for twice ``rollout.micro_batch_size`` rows, or
    for prompts much longer than the negative ones, which one call pads to their length."""
    prompt_length_multiple: PositiveInt = 1
    """Pad the prompts of a batch to a multiple of so many embeddings, so that a run has few shapes; blocks are compiled
    and a GPU chooses kernels for each. It holds for families that mask padding, and numbers change by rounding."""
    prompt_store: PathText | None = None
    """Folder for the embeddings of prompts, which are made once for all runs and processes; the text encoder is loaded
    only for prompts that are missing there. null is a folder for each text encoder in
    ``~/.cache/flowgrpo_rc/prompts`` (``$FLOWGRPO_RC_CACHE/prompts``). ``flowgrpo-rc encode-prompts`` fills it ahead."""
    attn_backend: Annotated[str, one_of(ATTENTION_BACKENDS)] | None = None
    """Attention of the actor's transformer: one of diffusers' attention backends, tried before the model is
    loaded. Null is diffusers' default, torch's ``scaled_dot_product_attention``. The engine has
    ``rollout.rollout_attn_backend``; where the two differ, the off-policy gap gains their rounding."""

    def problems(self) -> Iterator[str]:
        """Target modules that name no layers; what a quantised base cannot have."""
        if self.quantization is not None:
            if self.dtype != "bfloat16":
                yield (
                    f"quantization: got {self.quantization} with dtype={self.dtype}; rounded layers compute in "
                    "bfloat16, so set dtype=bfloat16"
                )
            if self.torch_compile:
                yield (
                    f"torch_compile: got true with quantization={self.quantization}, whose layers are not compiled; "
                    "set one of them to its default"
                )
        targets = self.target_modules
        if targets is None:
            return
        names = targets if isinstance(targets, list) else [targets]
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            yield (
                f"target_modules: got {targets!r}; give a non-empty list of module names such as [to_q,to_k], "
                "'all-linear' or null"
            )
        # peft would take another spelling for the ending of a layer's name and match nothing.
        elif names != [ALL_LINEAR] and ALL_LINEAR in [name.strip().lower().replace("_", "-") for name in names]:
            remedy = f"write {ALL_LINEAR} alone and in this spelling for all linear layers"
            yield f"target_modules: got {targets!r}; {remedy}"
        # Hydra takes a,b without brackets as text.
        elif "," in names[0]:
            yield f"target_modules: got {targets!r}; several names are a list: [{names[0].replace(' ', '')}]"

    @property
    def lora_computes_in(self) -> str:
        """Precision of the LoRA's products in the actor."""
        if self.lora_compute_dtype != AUTO:
            return self.lora_compute_dtype
        # Gradients underflow in float16.
        return self.dtype if self.dtype in TRAINED_DTYPES else "float32"

    def checkpoints_gradients(self, parameters: int) -> bool:
        """A transformer of so many parameters recomputes its activations."""
        # A small model has room for its activations, and recomputing costs a third of an update.
        if self.enable_gradient_checkpointing in (None, AUTO):
            return parameters > CHECKPOINTING_FROM
        return bool(self.enable_gradient_checkpointing)


FSDP_FIELD = "actor_rollout_ref.actor.fsdp_config"
"""The section of ``FSDPConfig``."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class FSDPConfig(Section):
    """The section ``actor_rollout_ref.actor.fsdp_config``: sharding of the frozen weights over processes."""

    section = FSDP_FIELD

    shard: bool = False
    """Shard the transformer's frozen weights: each process keeps a slice and gathers a block to compute it. Every
    process holds the whole LoRA. The numbers equal those of a run without sharding."""
    fsdp_size: Annotated[int, Check(lambda size: size == -1 or size > 0, "give a number above 0")] = -1
    """With ``shard``, how many processes of a node share one copy of the weights; -1: all of the node."""
    param_offload: bool = False
    """With ``shard``, whether the slices lie in the host's memory. Every block then crosses to the GPU at every
    forward. Without ``shard`` nothing is offloaded."""
    reshard_after_forward: bool = True
    """With ``shard``, whether a block's gathered weights are given up after its forward. ``false`` keeps the whole
    transformer gathered from the first forward until a backward pass has used it."""

    def processes_to_a_copy(self, on_node: int) -> int:
        """Processes that share one copy of the weights, with ``on_node`` of them on this node."""
        return on_node if self.fsdp_size == -1 else self.fsdp_size
