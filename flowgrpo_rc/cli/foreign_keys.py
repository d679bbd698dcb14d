"""Every key of verl-omni, verl, flow_grpo and Flow-Factory that is not a key here, and what becomes of it.

One table, read from the top: the first pattern that fits decides. In a pattern ``*`` stands for one part of a key and
``**`` for any number of parts, none included. The verdict rests on one question, whether the key can change what is
learned:

- ``Ignored``: it cannot, whatever its value. The run goes on, and one warning names all such keys.
- ``Moved``: it can, and a key here does the same. It acts through that key, and a warning shows the new form.
- ``Refused``: it can, and nothing here does the same. With a value in ``harmless``, which asks for what happens here
  anyway, it is ignored.
- ``Renamed``: a key of a program whose configuration is of another form; the refusal shows what to write instead.
- ``Deleted``: it means nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

A, R, M, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))

Tree = Mapping[str, Any]
"""All settings that were given, dotted key to value."""
Harmless = Callable[[Any, Tree], bool]


@dataclass(frozen=True)
class Verdict:
    """What becomes of the keys that fit ``pattern``, and why."""

    pattern: str
    reason: str

    @property
    def regex(self) -> re.Pattern[str]:
        return _regex(self.pattern)


@dataclass(frozen=True)
class Ignored(Verdict):
    """Cannot change what is learned."""


@dataclass(frozen=True)
class Deleted(Verdict):
    """Means nothing here."""


@dataclass(frozen=True)
class Refused(Verdict):
    """Would change what is learned, and nothing here does the same."""

    harmless: tuple[Any, ...] | Harmless = ()

    def is_harmless(self, value: Any, tree: Tree) -> bool:
        """Whether this value asks for what happens here anyway."""
        return self.harmless(value, tree) if callable(self.harmless) else value in self.harmless


@dataclass(frozen=True)
class Moved(Verdict):
    """Acts through another key."""

    target: str = ""
    """The key here; ``{}`` stands for what ``*`` matched."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Spellings of a value that differ; ``DROP`` leaves the key out."""
    only: bool = False
    """Values that are not listed are refused."""

    def target_for(self, key: str) -> str:
        """The key here, for one that fits."""
        found = self.regex.fullmatch(key)
        return self.target.format(*(found.groups() if found else ()))


@dataclass(frozen=True)
class Renamed(Moved):
    """Belongs to a program whose configuration has another form; shown as it is written here, never applied."""


class _Drop:
    """The value that leaves a key out."""

    def __repr__(self) -> str:
        return "DROP"


DROP = _Drop()

DTYPES = {
    **dict.fromkeys(("fp32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "torch.float16"), "float16"),
    **{name: name for name in ("float32", "bfloat16", "float16")},
}
"""Spellings of a precision, to the one here."""
AUTOCAST = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "no", None, False), "no"),
    True: "bf16",
}
"""Precision of an engine's forward, to ``trainer.mixed_precision``."""

SHARDING = "every process holds the frozen model; nothing is sharded or offloaded"
ENGINE = "how the engine lays out memory and batches; it draws the same images"
ATTENTION = "actor and engine use diffusers' default attention, which computes the same function"
PLUMBING = "there are no Ray workers or servers to set up"
PROFILING = "nothing is profiled; a run logs timing_s/... for every stage"
DUMPS = "samples are in the run folder, see trainer.log_val_generations"
CHECKPOINT = "a checkpoint holds adapter, optimizer, random state and data position"
TOKENS = "about text that is generated token by token; images have none"
UNUSED_VALIDATION = "validation samples the deterministic ODE, which has no stochastic steps"
VIDEO = "images have one frame"
TOKENIZERS = "prompts are tokenized by the tokenizers in the pipeline's folder"
FULL_PRECISION_REDUCE = "gradients are summed in the LoRA's own precision"
NO_REWARD_MODEL = (
    "no reward model is served beside training; score with reward.functions.ocr, or call your model's server in a "
    "function of your own: reward.custom_reward_function.path=my_reward.py"
)
ONE_SUM = (
    "rewards are one weighted sum: reward.functions.NAME=WEIGHT and reward.custom_reward_function.{path,name,weight}"
)
NO_OBJECTIVE = "this objective is not implemented; see actor_rollout_ref.actor.diffusion_loss.loss_mode"
ASYNC = "rollout and training take turns; a stale engine is actor_rollout_ref.rollout.adapter_lag=N"
CLASSES = "classes are not chosen by a configuration here"
CRITIC = "GRPO has no critic"
PPO_ADVANTAGES = "the advantage is GRPO's, which has no such term"


IMAGES = ("image", "pil", "np", "pt", None)
"""Names of output types that are images."""


def _off(value: Any, tree: Tree) -> bool:
    """Nothing is asked for."""
    return value in (None, False, 0, "", "null", "disabled") or value == [] or value == {}


def _no_reward_model(value: Any, tree: Tree) -> bool:
    return tree.get("reward.reward_model.enable") is False


def _plain_chat_template(value: Any, tree: Tree) -> bool:
    """Null, or a template that comes to the user's own words."""
    plain = "{%formessageinmessages%}{%ifmessage['role']=='user'%}{{message['content']}}{%endif%}{%endfor%}"
    return value is None or re.sub(r"\s", "", str(value)).strip('"') == plain


def _in_the_pipeline(value: Any, tree: Tree) -> bool:
    """Null, or a path that is or lies in the model's own folder."""
    model = str(tree.get(f"{M}.path", ""))
    return value is None or (bool(model) and (str(value) == model or str(value).startswith(f"{model}/")))


def _pipeline_tokenizers(value: Any, tree: Tree) -> bool:
    """Those that lie in the pipeline, CLIP at its 77 tokens and T5 at the length that is asked for."""
    if value is None:
        return True
    length = tree.get(f"{R}.pipeline.max_sequence_length", 512)
    parts = value.values() if isinstance(value, Mapping) else [None]
    return all(
        isinstance(part, Mapping)
        and str(part.get("path", "")).startswith("tokenizer")
        and part.get("max_length") in (None, 77, length)
        for part in parts
    )


def _same_as_training(key: str, default: Any) -> Harmless:
    return lambda value, tree: value == tree.get(key, default)


def _every(kind: type[Verdict], reason: str, *patterns: str, **more: Any) -> list[Verdict]:
    return [kind(pattern, reason, **more) for pattern in patterns]


def _under(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


_HYDRA = [
    *_every(Deleted, CLASSES, *(f"**.{name}" for name in ("_target_", "_recursive_", "_convert_", "_partial_"))),
    *_every(Deleted, CLASSES, "_target_", "_recursive_", "_convert_", "_partial_", "**._args_"),
    Deleted("**.defaults", "a defaults list stands at the head of a YAML file; name the file with --config-name"),
    Deleted("defaults", "a defaults list stands at the head of a YAML file; name the file with --config-name"),
    Deleted(
        "hydra.**",
        "Hydra only composes the configuration here; YAML files of your own are found with --config-dir, and the run "
        "folder is trainer.default_local_dir",
    ),
]

_VERL_OMNI_ACTOR = [
    Moved(
        f"{A}.fsdp_config.model_dtype",
        "precision of the frozen weights",
        f"{M}.dtype",
        DTYPES | {None: "float32"},
        True,
    ),
    Moved(f"{A}.veomni_config.model_dtype", "precision of the frozen weights", f"{M}.dtype", DTYPES, True),
    Moved(f"{A}.fsdp_config.dtype", "precision of the actor's forward", "trainer.mixed_precision", AUTOCAST, True),
    Moved(
        f"{A}.fsdp_config.mixed_precision.param_dtype",
        "precision of the actor's forward",
        "trainer.mixed_precision",
        AUTOCAST,
        True,
    ),
    Moved(f"{A}.veomni_config.mixed_precision", "autocast", "trainer.mixed_precision", AUTOCAST, True),
    Moved(
        f"{A}.veomni_config.mixed_precision_param_dtype",
        "precision of the actor's forward",
        "trainer.mixed_precision",
        AUTOCAST,
        True,
    ),
    *_every(
        Refused,
        FULL_PRECISION_REDUCE,
        *_under(f"{A}.fsdp_config.mixed_precision", "reduce_dtype", "buffer_dtype"),
        *_under(f"{A}.veomni_config", "mixed_precision_reduce_dtype", "mixed_precision_output_dtype"),
        harmless=(None, "fp32", "float32"),
    ),
    Refused(f"{A}.fsdp_config.qat.**", "weights are not trained quantized", harmless=_off),
    Moved(f"{A}.fsdp_config.seed", "seed of the adapter's start", "trainer.seed"),
    Ignored(f"{A}.fsdp_config.**", SHARDING),
    Ignored(f"{A}.veomni_config.**", SHARDING),
    Ignored(f"{A}.megatron.**", SHARDING),
    Ignored(f"{A}.strategy", "there is one: data parallelism by accelerate"),
    Ignored(f"{A}.ulysses_sequence_parallel_size", SHARDING),
    Refused(
        f"{A}.shuffle",
        "mini-batches are whole prompt groups in the batch's (already random) order",
        harmless=(False, None),
    ),
    Ignored(f"{A}.data_loader_seed", "mini-batches are not shuffled, so there is nothing to seed"),
    Ignored(f"{A}.checkpoint.**", CHECKPOINT),
    Ignored(f"{A}.profiler.**", PROFILING),
    Ignored(f"{A}.rollout_n", "it follows actor_rollout_ref.rollout.n"),
    Moved(f"{A}.loss_scale_factor", "divisor of token losses", f"{A}.diffusion_loss.loss_scale_factor", {None: DROP}),
    Refused(f"{A}.use_distill_loss", "there is no teacher to distil from", harmless=_off),
    *_every(Ignored, "used with use_distill_loss alone", f"{A}.distill_loss_mode", f"{A}.distill_loss_coef"),
    *_every(
        Refused,
        NO_OBJECTIVE,
        *_under(f"{A}.diffusion_loss", "mix_beta", "ref_kl_coef", "adaptive_weight_min", "dpo_beta"),
        harmless=lambda value, tree: (
            tree.get(f"{A}.diffusion_loss.loss_mode", "flow_grpo") not in ("diffusion_nft", "dpo", "awm")
        ),
    ),
    Refused(
        f"{A}.diffusion_loss.add_kl_coefficient",
        "flow_dppo's KL is that of the two Gaussians, so it is divided by their variance",
        harmless=(True, None),
    ),
    Moved(f"{A}.optim.clip_grad", "largest norm of the gradient", f"{A}.grad_clip"),
    Moved(f"{A}.optim.warmup_style", "learning-rate schedule", f"{A}.optim.lr_scheduler_type", {None: DROP}),
    Ignored(f"{A}.optim.total_training_steps", "the schedule is as long as the run"),
    Refused(
        f"{A}.optim.optimizer",
        "the optimizer is torch's AdamW",
        harmless=("AdamW", "adamw", None),
    ),
    Refused(f"{A}.optim.optimizer_impl", "the optimizer is torch's AdamW", harmless=("torch.optim", None)),
    Refused(f"{A}.optim.override_optimizer_config", "AdamW's settings are keys of actor.optim", harmless=_off),
    *_every(
        Refused,
        "the schedules of lr_scheduler_type run down to 0",
        *_under(f"{A}.optim", "min_lr_ratio", "lr_min", "lr_start"),
        harmless=(0, None),
    ),
    Refused(f"{A}.optim.num_cycles", "cosine is half a period, to 0 at the end", harmless=(0.5, None)),
    Refused(f"{A}.optim.lr_decay_ratio", "a schedule spans the whole run", harmless=(1, None)),
    Refused(f"{A}.optim.zero_indexed_step", "the first step of a schedule is number 0", harmless=(True, None)),
    Ignored(f"{A}.optim.fused", "the same AdamW in one kernel"),
    Ignored(f"{REF}.**", "the reference is the actor with its adapter switched off; see actor.use_kl_loss"),
]

_VERL_ACTOR = [
    *(
        Moved(f"{A}.{name}", "the clip is the loss's", f"{A}.diffusion_loss.{name}", {None: DROP})
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")
    ),
    Refused(f"{A}.policy_loss.loss_mode", NO_OBJECTIVE, harmless=("vanilla", None)),
    Refused(f"{A}.policy_loss.**", NO_OBJECTIVE, harmless=_off),
    Refused(f"{A}.entropy_coeff", "the noise of an SDE step is fixed, so its entropy has no gradient", harmless=_off),
    Refused(f"{A}.kl_loss_type", "use_kl_loss is the exact KL of two Gaussians", harmless=("low_var_kl", "kl", None)),
    *_every(
        Refused,
        "batches are counted for one process: write ppo_micro_batch_size_per_gpu and log_prob_micro_batch_size_per_gpu",
        f"{A}.ppo_micro_batch_size",
        f"{R}.log_prob_micro_batch_size",
        harmless=(None,),
    ),
    *_every(Refused, "an objective for tokens that is not implemented", f"{A}.tau_pos", f"{A}.tau_neg"),
    *_every(Refused, "weights are not trained quantized", f"{A}.qat.**", harmless=_off),
    *_every(
        Ignored,
        TOKENS,
        *_under(A, "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_infer_*", "calculate_entropy"),
        *_under(A, "entropy_*", "calculate_sum_pi_squared", "use_prefix_grouper", "pad_to_length"),
        *_under(A, "use_remove_padding", "use_fused_kernels", "freeze_vision_tower", "router_replay.**"),
        *_under(R, "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    ),
    Ignored(f"{A}.use_torch_compile", "it compiles the entropy of tokens; for the transformer see model.torch_compile"),
]

_ROLLOUT = [
    *_every(
        Ignored,
        PLUMBING,
        *_under(R, "agent.**", "mode", "n_gpus_per_node", "prometheus.**", "trace.**", "skip_tokenizer_init"),
        *_under(
            R,
            "checkpoint_engine.**",
            "router_config_path",
            "disable_log_stats",
            "multi_stage_wake_up",
            "update_weights_*",
        ),
    ),
    Refused(f"{R}.nnodes", ASYNC, harmless=(0, None)),
    Ignored(f"{R}.load_format", "the engine copies the actor's weights"),
    Ignored(f"{R}.layered_summon", SHARDING),
    *_every(
        Ignored,
        ENGINE,
        *_under(R, "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size", "enforce_eager"),
        *_under(R, "pipeline_model_parallel_size", "gpu_memory_utilization", "free_cache_engine", "max_num_seqs"),
        *_under(R, "cudagraph_capture_sizes", "max_num_batched_tokens", "max_model_len", "step_execution"),
        *_under(R, "enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy", "enable_sleep_mode"),
        *_under(f"{R}.engine_kwargs.*", "max_num_seqs", "request_batch_max_wait_ms", "mm_processor_cache_gb"),
        *_under(f"{R}.engine_kwargs.*", "gpu_memory_utilization", "enforce_eager", "max_model_len", "*parallel_size"),
    ),
    Refused(f"{R}.engine_kwargs.**", "the engine takes its settings from actor_rollout_ref.rollout", harmless=_off),
    Ignored(f"{R}.rollout_attn_backend", ATTENTION),
    *_every(
        Ignored,
        "prompts are as long as pipeline.max_sequence_length allows",
        f"{R}.prompt_length",
        f"{R}.max_prompt_embed_length",
    ),
    Refused(f"{R}.rollout_adapter", "images are drawn with the adapter that is trained", harmless=("default", None)),
    *_every(
        Refused, "this package brings its own engine code; no module is loaded", f"{R}.external_lib", harmless=_off
    ),
    *_every(
        Ignored,
        TOKENS,
        *_under(R, "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "do_sample"),
        *_under(R, "llm_calculate_log_probs", "logprobs_mode", "response_length", "ignore_eos", "mtp.**"),
        *_under(R, "enable_rollout_routing_replay", "moe_load_balance_metrics_interval", "over_sample_rate"),
        *_under(f"{R}.val_kwargs", "temperature", "top_k", "top_p", "do_sample"),
    ),
    Refused(f"{R}.multi_turn.enable", "a prompt is answered by one image", harmless=_off),
    Ignored(f"{R}.multi_turn.**", "a prompt is answered by one image"),
    Refused(f"{R}.disaggregation.enabled", "there is no prefill to take apart", harmless=_off),
    Ignored(f"{R}.disaggregation.**", "there is no prefill to take apart"),
    Ignored(f"{R}.profiler.**", PROFILING),
    Ignored(f"{R}.full_determinism", "an image's noise depends on seed, step and index alone"),
    Refused(
        f"{R}.algo.sde_contiguous",
        "the stochastic steps are one contiguous window",
        harmless=(True, None),
    ),
    *_every(
        Ignored,
        UNUSED_VALIDATION,
        *_under(f"{R}.val_kwargs.algo", "sde_type", "sde_window_size", "sde_window_range", "sde_contiguous"),
        *_under(f"{R}.val_kwargs.algo", "sample_strategy", "iters_per_group", "sde_window_seed"),
    ),
    *(
        verdict
        for pipeline in (f"{R}.pipeline", f"{R}.val_kwargs.pipeline", f"{M}.pipeline")
        for verdict in (
            Refused(f"{pipeline}.output_type", "rewards see images, not latents", harmless=IMAGES),
            Refused(f"{pipeline}.num_frames", VIDEO, harmless=(1, None)),
            Ignored(f"{pipeline}.frame_rate", VIDEO),
            Ignored(f"{pipeline}.video_flow_shift", VIDEO),
            Refused(f"{pipeline}.aspect_ratio", "give pixels: pipeline.height and pipeline.width", harmless=(None,)),
        )
    ),
]

_MODEL = [
    *(
        Moved(f"{M}.pipeline.{name}", "the actor scores what was drawn", f"{R}.pipeline.{name}", {None: DROP})
        for name in ("height", "width", "num_inference_steps", "true_cfg_scale", "max_sequence_length")
    ),
    Moved(f"{M}.pipeline.guidance_scale", "the actor scores what was drawn", f"{R}.pipeline.guidance_scale"),
    Refused(f"{M}.algo.sde_contiguous", "the stochastic steps are one contiguous window", harmless=(True, None)),
    Moved(f"{M}.algo.*", "the actor scores what was drawn", f"{R}.algo.{{}}", {None: DROP}),
    Moved(f"{M}.lora.rank", "LoRA", f"{M}.lora_rank"),
    Moved(f"{M}.lora.alpha", "LoRA", f"{M}.lora_alpha"),
    Refused(f"{M}.lora.**", "the LoRA is lora_rank, lora_alpha and target_modules", harmless=_off),
    Ignored(f"{M}.attn_backend", ATTENTION),
    *_every(Refused, TOKENIZERS, f"{M}.tokenizer_path", harmless=_in_the_pipeline),
    Refused(f"{M}.extra_tokenizers", TOKENIZERS, harmless=_pipeline_tokenizers),
    Refused(
        f"{M}.custom_chat_template",
        "prompts are given to the pipeline as they are; put the template's words into the prompt file",
        harmless=_plain_chat_template,
    ),
    *_every(
        Refused,
        "a model's own index says what it is; families: QwenImagePipeline, StableDiffusion3Pipeline",
        f"{M}.architecture",
        f"{M}.config_path",
        harmless=(None, "QwenImagePipeline", "StableDiffusion3Pipeline"),
    ),
    Refused(f"{M}.transformer_subfolder", "the transformer is in transformer/", harmless=("transformer", None)),
    Refused(
        f"{M}.external_lib",
        "no module of another trainer is loaded; a reward of your own is reward.custom_reward_function",
        harmless=_off,
    ),
    *_every(
        Refused,
        "name the layers in target_modules",
        f"{M}.exclude_modules",
        f"{M}.target_parameters",
        harmless=_off,
    ),
    Refused(f"{M}.policy_state_adapters", "there is one adapter", harmless=(["default"], None)),
    Refused(f"{M}.model_type", NO_OBJECTIVE, harmless=("diffusion_model", None)),
    *_every(Ignored, "no code of a model's own is run", f"{M}.trust_remote_code", "data.trust_remote_code"),
    *_every(Ignored, SHARDING, *_under(M, "fsdp_layer_prefixes", "use_shm", "enable_activation_offload")),
    *_every(
        Ignored,
        TOKENS,
        *_under(M, "mtp.**", "use_remove_padding", "use_fused_kernels", "use_liger", "fused_kernel_options.**"),
        *_under(M, "tiled_mlp.**", "hf_config_path", "load_tokenizer"),
    ),
    Ignored(f"{M}.override_config.attn_implementation", ATTENTION),
    Refused(f"{M}.override_config.**", "the model is what its folder's config.json files say", harmless=_off),
    Ignored("actor_rollout_ref.hybrid_engine", "rollout and training share the device"),
    Ignored("actor_rollout_ref.nccl_timeout", PLUMBING),
]

_ALGORITHM = [
    Refused("algorithm.trainer_type", NO_OBJECTIVE, harmless=("policy_gradient", None)),
    Refused("algorithm.sample_source", "training samples its own images", harmless=("online", None)),
    Refused("algorithm.paired_preference", NO_OBJECTIVE, harmless=_off),
    *_every(
        Refused,
        "a setting of DiffusionNFT, which is not implemented",
        *_under("algorithm", "old_policy_decay_schedule", "old_policy_decay", "old_policy_update_interval", "adv_mode"),
        harmless=(None, "copy", 1, "continuous"),
    ),
    Refused(
        "algorithm.timestep_fraction",
        "the trained steps are rollout.algo.sde_window_range and sde_window_size",
        harmless=(1, None),
    ),
    Refused("algorithm.use_kl_in_reward", "a KL penalty is part of the loss: actor.use_kl_loss=true", harmless=_off),
    *_every(Ignored, "used with use_kl_in_reward alone", "algorithm.kl_ctrl.**", "algorithm.kl_penalty"),
    *_every(Refused, PPO_ADVANTAGES, "algorithm.gamma", "algorithm.lam", harmless=(1, None)),
    *_every(
        Refused,
        PPO_ADVANTAGES,
        *_under("algorithm", "use_pf_ppo", "pf_ppo.**", "filter_groups.**", "optimal_*", "gdpo_*"),
        harmless=_off,
    ),
    Deleted("critic.**", CRITIC),
    Refused("distillation.enabled", "there is no teacher to distil from", harmless=_off),
    Ignored("distillation.**", "used with distillation.enabled alone"),
]

_DATA = [
    *_every(
        Ignored,
        "prompts are cut at actor_rollout_ref.rollout.pipeline.max_sequence_length",
        "data.max_prompt_length",
    ),
    Refused("data.truncation", "prompts are cut at their end", harmless=("error", "right", None)),
    Refused("data.filter_overlong_prompts", "leave the long prompts out of the file", harmless=_off),
    *_every(
        Ignored,
        "loading prompts takes one process and no tokenizer",
        *_under("data", "dataloader_num_workers", "filter_overlong_prompts_workers", "use_shm", "val_batch_size"),
        *_under("data", "tokenizer", "return_raw_input_ids", "return_raw_chat", "return_full_prompt", "gen_batch_size"),
        *_under("data", "return_multi_modal_inputs", "image_patch_size", "tool_config_path"),
    ),
    *_every(Ignored, TOKENS, "data.max_response_length", "data.apply_chat_template_kwargs.**", "data.video_key"),
    Ignored("data.reward_fn_key", "every reward sees every prompt, with all columns of its row"),
    Refused("data.image_key", "models here draw from text alone", harmless=("images", None)),
    Refused("data.validation_shuffle", "validation draws the same prompts in the file's order", harmless=_off),
    *_every(
        Refused,
        "prompts come from a .txt, .jsonl or .parquet file: data.train_files",
        *("data.custom_cls.**", "data.datagen.**", "data.sampler.**"),
        harmless=_off,
    ),
]

_REWARD = [
    Refused("reward.reward_model.enable", NO_REWARD_MODEL, harmless=_off),
    Refused("reward.reward_model.**", NO_REWARD_MODEL, harmless=_no_reward_model),
    Refused("reward_model.enable", NO_REWARD_MODEL, harmless=_off),
    Refused(
        "reward_model.**",
        NO_REWARD_MODEL,
        harmless=lambda value, tree: tree.get("reward_model.enable") is False,
    ),
    Ignored("reward.num_workers", "rewards run in the training process; for ocr see reward.ocr.num_threads"),
    Refused("reward.reward_functions.**", ONE_SUM, harmless=_off),
    Refused("reward.aggregation", ONE_SUM, harmless=("weighted_sum", None)),
    Refused(
        "reward.reward_manager.name",
        ONE_SUM,
        harmless=("VisualRewardManager", "VisualRewardLoopManager", "naive", None),
    ),
    Refused(
        "reward.reward_manager.module.path",
        ONE_SUM,
        harmless=lambda value, tree: value is None or str(value).startswith("pkg://verl_omni."),
    ),
    Ignored("reward.reward_manager.**", ONE_SUM),
    Ignored("reward.sandbox_fusion.**", "rewards run in the training process"),
    Ignored("sandbox_fusion.**", "rewards run in the training process"),
    Moved("custom_reward_function.path", "it is a part of reward", "reward.custom_reward_function.path"),
    Moved("custom_reward_function.name", "it is a part of reward", "reward.custom_reward_function.name"),
    Moved(
        "custom_reward_function.reward_kwargs", "it is a part of reward", "reward.custom_reward_function.reward_kwargs"
    ),
]

_TRAINER = [
    Refused("trainer.val_only", "to judge a setting without training, use flowgrpo-rc probe", harmless=_off),
    *_every(
        Ignored,
        DUMPS,
        *_under("trainer", "rollout_data_dir", "validation_data_dir", "video_fps", "rollout_data_save_freq"),
        *_under("trainer", "rollout_data_max_samples", "validation_data_max_samples"),
    ),
    *_every(
        Ignored,
        "checkpoints stay in the run folder",
        *_under("trainer", "default_hdfs_dir", "del_local_ckpt_after_load", "esi_redundant_time"),
        *_under("trainer", "max_critic_ckpt_to_keep", "checkpoint_callback_class"),
    ),
    *_every(
        Ignored,
        PLUMBING,
        *_under("trainer", "ray_wait_register_center_timeout", "ray_master_port_range", "use_v1", "balance_batch"),
        *("ray_kwargs.**", "ray_init.**", "transfer_queue.**", "trainer.use_legacy_worker_impl"),
    ),
    Refused("trainer.v1.trainer_mode", ASYNC, harmless=("sync", None)),
    Ignored("trainer.v1.**", "used with trainer.v1.trainer_mode=separate_async alone"),
    *_every(Ignored, PROFILING, "global_profiler.**", "trainer.profile_steps", "trainer.worker_nsight_options.**"),
    *_every(Ignored, PROFILING, "trainer.controller_nsight_options.**", "trainer.npu_profile.**"),
    *_every(Refused, "every rollout is drawn anew", "skip.*.enable", "skip.enable", harmless=_off),
    Ignored("skip.**", "every rollout is drawn anew"),
    Refused("trainer.critic_warmup", CRITIC, harmless=_off),
]

LAUNCHER_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes")
"""Held against what the launcher started; see ``launcher``."""

_P = "actor_rollout_ref.rollout.pipeline"
_G = "Flow-GRPO's file is Python"
_F = "Flow-Factory's file has another form"
_BATCH = "batches are counted in prompts over all processes: data.train_batch_size and actor.ppo_mini_batch_size"
_MICRO = "images a forward on one process"


def _renamed(reason: str, names: Mapping[str, str | tuple[str, Mapping[Any, Any]]]) -> list[Verdict]:
    made: list[Verdict] = []
    for pattern, target in names.items():
        key, values = (target, {}) if isinstance(target, str) else target
        made.append(Renamed(pattern, reason, key, values))
    return made


_FLOW_GRPO = [
    *_renamed(
        _G,
        {
            "pretrained.model": f"{M}.path",
            "sample.num_steps": f"{_P}.num_inference_steps",
            "sample.eval_num_steps": f"{R}.val_kwargs.pipeline.num_inference_steps",
            "sample.guidance_scale": f"{_P}.true_cfg_scale",
            "sample.num_image_per_prompt": f"{R}.n",
            "sample.train_batch_size": f"{R}.micro_batch_size",
            "sample.global_std": "algorithm.global_std",
            "sample.noise_level": f"{R}.algo.noise_level",
            "sample.sde_type": f"{R}.algo.sde_type",
            "sample.sde_window_size": (f"{R}.algo.sde_window_size", {0: None}),
            "sample.sde_window_range": f"{R}.algo.sde_window_range",
            "train.batch_size": f"{A}.ppo_micro_batch_size_per_gpu",
            "train.adam_weight_decay": f"{A}.optim.weight_decay",
            "train.adam_epsilon": f"{A}.optim.eps",
            "train.learning_rate": f"{A}.optim.lr",
            "train.max_grad_norm": f"{A}.grad_clip",
            "train.num_inner_epochs": f"{A}.ppo_epochs",
            "train.adv_clip_max": f"{A}.diffusion_loss.adv_clip_max",
            "train.clip_range": f"{A}.diffusion_loss.clip_ratio",
            "train.lora_path": f"{M}.lora_adapter_path",
            "save_freq": "trainer.save_freq",
            "eval_freq": "trainer.test_freq",
            "seed": "trainer.seed",
            "run_name": "trainer.experiment_name",
            "save_dir": "trainer.default_local_dir",
            "num_epochs": "trainer.total_training_steps",
            "num_checkpoint_limit": "trainer.max_actor_ckpt_to_keep",
            "mixed_precision": ("trainer.mixed_precision", {"fp16": "bf16"}),
        },
    ),
    Refused("train.beta", f"{A}.use_kl_loss=true with {A}.kl_loss_coef for its weight", harmless=_off),
    Refused("train.ema", f"{A}.ema_decay=0.987 is the average after every update", harmless=_off),
    *_every(Refused, f"one decay rate of {A}.optim.betas=[0.9,0.999]", "train.adam_beta1", "train.adam_beta2"),
    Refused("train.cfg", f"the actor scores with the guidance that drew: {_P}.true_cfg_scale", harmless=(True,)),
    Refused("train.timestep_fraction", f"the trained steps are {R}.algo.sde_window_range", harmless=(1,)),
    Refused("train.use_8bit_adam", "the optimizer is torch's AdamW", harmless=_off),
    *_every(Refused, _BATCH, "sample.num_batches_per_epoch", "train.gradient_accumulation_steps"),
    *_every(Refused, _BATCH, "train.gradient_step_per_epoch", "train.unique_sample_num_per_epoch"),
    Refused("sample.same_latent", "every image starts from noise of its own", harmless=_off),
    Refused("sample.kl_reward", f"the KL is part of the loss: {A}.use_kl_loss=true", harmless=_off),
    Refused("resolution", f"{_P}.height and {_P}.width"),
    Refused("dataset", "the prompt files are data.train_files and data.val_files"),
    Refused("reward_fn", "a weight for each reward: reward.functions.ocr=1.0"),
    Refused("prompt_fn", "the prompt files are data.train_files and data.val_files"),
    Refused("use_lora", "a LoRA is what is trained", harmless=(True,)),
    Refused("per_prompt_stat_tracking", "advantages are compared within a prompt's images", harmless=(True,)),
    *_every(Deleted, "it does not change what is learned", "allow_tf32", "logdir", "pretrained.revision"),
    *_every(Deleted, "it does not change what is learned", "sample.test_batch_size", "prompt_fn_kwargs.**"),
]

_FLOW_FACTORY = [
    *_renamed(
        _F,
        {
            "model.model_name_or_path": f"{M}.path",
            "model.lora_rank": f"{M}.lora_rank",
            "model.lora_alpha": f"{M}.lora_alpha",
            "model.target_modules": (f"{M}.target_modules", {"default": None, "all": "all-linear"}),
            "log.project": "trainer.project_name",
            "log.run_name": "trainer.experiment_name",
            "log.logging_backend": ("trainer.logger", {"none": ["console"]}),
            "log.save_dir": "trainer.default_local_dir",
            "log.save_freq": ("trainer.save_freq", {0: -1}),
            "train.adv_clip_range": f"{A}.diffusion_loss.adv_clip_max",
            "train.num_inference_steps": f"{_P}.num_inference_steps",
            "train.guidance_scale": f"{_P}.true_cfg_scale",
            "train.per_device_batch_size": f"{A}.ppo_micro_batch_size_per_gpu",
            "train.group_size": f"{R}.n",
            "train.global_std": "algorithm.global_std",
            "train.adam_betas": f"{A}.optim.betas",
            "train.enable_gradient_checkpointing": f"{M}.enable_gradient_checkpointing",
            "train.seed": "trainer.seed",
            "train.ema_decay": (f"{A}.ema_decay", {0: None}),
            "train.max_epochs": "trainer.total_training_steps",
            "scheduler.dynamics_type": (
                f"{R}.algo.sde_type",
                {"Flow-SDE": "sde", "Dance-SDE": "dance_sde", "CPS": "cps"},
            ),
            "scheduler.noise_level": f"{R}.algo.noise_level",
            "scheduler.num_sde_steps": f"{R}.algo.sde_window_size",
            "scheduler.seed": f"{R}.algo.sde_window_seed",
            "eval.num_inference_steps": f"{R}.val_kwargs.pipeline.num_inference_steps",
            "eval.guidance_scale": f"{R}.val_kwargs.pipeline.true_cfg_scale",
            "eval.eval_freq": ("trainer.test_freq", {0: -1}),
            "eval.seed": f"{R}.val_kwargs.seed",
            "data.max_dataset_size": "data.train_max_samples",
        },
    ),
    Refused("train.resolution", f"{_P}.height and {_P}.width"),
    Refused("eval.resolution", f"{R}.val_kwargs.pipeline.height and .width"),
    Refused("train.trainer_type", NO_OBJECTIVE, harmless=("grpo",)),
    Refused("train.kl_beta", f"{A}.use_kl_loss=true with {A}.kl_loss_coef for its weight", harmless=_off),
    Refused("train.kl_type", "use_kl_loss is the KL of the two Gaussians, of their means", harmless=("x-based",)),
    Refused("train.advantage_aggregation", ONE_SUM, harmless=("sum",)),
    Refused("scheduler.sde_steps", f"a range: {R}.algo.sde_window_range=[first,stop]"),
    Refused("data.dataset_dir", "the prompt files are data.train_files and data.val_files"),
    *_every(Refused, ONE_SUM, "rewards.**", "eval_rewards.**"),
    Refused("model.finetune_type", "a LoRA is what is trained", harmless=("lora",)),
    Refused("model.resume_path", f"trainer.resume_from_path, or {M}.lora_adapter_path for a LoRA", harmless=_off),
    Refused("train.ema_update_interval", "the average is taken after every optimizer step", harmless=(1,)),
    *_every(
        Deleted,
        "it does not change what is learned",
        *_under("data", "preprocessing_batch_size", "force_reprocess", "cache_dir", "sampler_type"),
        *_under("model", "model_type", "resume_type", "attn_backend"),
        *("log.save_model_only", "train.ref_param_device", "train.ema_device", "eval.per_device_batch_size"),
        *("launcher", "config_file", "num_processes", "main_process_port"),
    ),
]

_LANGUAGE_MODELS = [
    *_every(
        Deleted,
        "it belongs to the training of language models",
        *_under(A, "omni_loss.**", "trainer_type", "use_rollout_log_probs"),
        *_under(M, "hf_config_name", "model_stage", "max_audio_tokens", "max_image_tokens", "max_video_tokens"),
        *_under("data", "continuous_token.**", "mm_configs.**", "mm_processor_kwargs.**", "pad_mode", "max_length"),
        *_under("data", "audio_key", "function_tool_path", "balance_max_samples_by_modality"),
    ),
    *_every(
        Deleted,
        "it belongs to a backend that trains language models",
        *_under(A, "veomni.**", "torchtitan.**", "automodel.**", "mindspeed.**"),
    ),
    *_every(
        Refused,
        "the optimizer is torch's AdamW",
        *_under(f"{A}.optim", "name", "muon_*", "use_precision_aware_optimizer", "main_*_dtype", "exp_avg*_dtype"),
        *_under(f"{A}.optim", "use_layer_wise_distributed_optimizer", "master_weights", "store_param_remainders"),
        harmless=("AdamW", "adamw", False, None, "fp32", "float32"),
    ),
    *_every(
        Refused,
        "the schedules of lr_scheduler_type run from the first optimizer step to 0",
        *_under(f"{A}.optim", "lr_decay_steps", "lr_decay_style", "lr_warmup_init", "lr_wsd_*", "min_lr"),
        *_under(f"{A}.optim", "weight_decay_incr_style", "use_checkpoint_opt_param_scheduler"),
        *_under(f"{A}.optim", "decay_type", "min_lr_factor"),
        harmless=(None, 0, False, "constant", "exponential"),
    ),
    *_every(Refused, "weights are not trained quantized", f"{R}.qat.**", harmless=_off),
    *_every(
        Refused,
        "quantized sampling is actor_rollout_ref.rollout.quantization=fp8",
        f"{R}.quantization_config_file",
        harmless=_off,
    ),
    *_every(
        Refused,
        "prompts come from a .txt, .jsonl or .parquet file: data.train_files",
        *("data.train_sampler.**", "data.val_sampler.**"),
        harmless=_off,
    ),
    Refused("async_training.**", ASYNC, harmless=_off),
    Deleted("rollout.**", "a rollout's settings are actor_rollout_ref.rollout here"),
]

_CATCH_ALL = [
    *_every(
        Refused,
        "a setting of flow_grpo or Flow-Factory without a counterpart; see flowgrpo-rc train --print-config",
        *("sample.**", "train.**", "scheduler.**", "eval.**", "log.**", "pretrained.**"),
    ),
    Deleted("model.**", "a model's settings are actor_rollout_ref.model here"),
]

TABLE: tuple[Verdict, ...] = (
    *_HYDRA,
    *_VERL_OMNI_ACTOR,
    *_VERL_ACTOR,
    *_ROLLOUT,
    *_MODEL,
    *_ALGORITHM,
    *_DATA,
    *_REWARD,
    *_TRAINER,
    *_LANGUAGE_MODELS,
    *_FLOW_GRPO,
    *_FLOW_FACTORY,
    *_CATCH_ALL,
)

SPELLINGS: Mapping[str, tuple[Mapping[Any, Any], str]] = {
    f"{M}.dtype": (DTYPES, ""),
    f"{M}.lora_dtype": (DTYPES | {None: "float32"}, ""),
    f"{R}.dtype": (DTYPES, ""),
    "trainer.mixed_precision": ({**AUTOCAST, "bf16": "bf16"}, ""),
    "data.train_max_samples": ({-1: None}, "all"),
    "data.val_max_samples": ({-1: None}, "all"),
    "data.seed": ({None: DROP}, "any order will do, so it is the default's"),
    "trainer.total_training_steps": ({-1: None}, "total_epochs decides"),
    "trainer.max_actor_ckpt_to_keep": ({-1: None, 0: None}, "all"),
    f"{A}.optim.lr_warmup_steps": ({-1: 0, None: 0}, "lr_warmup_steps_ratio decides"),
    "trainer.device": ({"cuda": "auto"}, "an accelerator if there is one"),
    "trainer.resume_mode": ({"enable": "auto"}, "from the latest checkpoint if there is one"),
    "trainer.logger": ({name: [name] for name in ("console", "tensorboard", "wandb")}, ""),
    "algorithm.adv_estimator": (
        dict.fromkeys(("dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo"), "flow_grpo"),
        "the advantage is the same in all of them",
    ),
}
"""Values of keys that exist here too, as other trainers spell them, with what they mean."""

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "flow_grpo": {},
    "mix_grpo": {f"{R}.algo.sample_strategy": "progressive"},
    "grpo_guard": {f"{A}.diffusion_loss.loss_mode": "grpo_guard"},
    "flow_dppo": {f"{A}.diffusion_loss.loss_mode": "flow_dppo"},
    "dance_grpo": {f"{A}.diffusion_loss.loss_mode": "dance_grpo", f"{R}.algo.sde_type": "dance_sde"},
}
"""``actor_rollout_ref.model.algorithm`` of verl-omni, and the keys that make it up here."""
MAY_DIFFER = (f"{R}.algo.sample_strategy",)
"""Keys of those that verl-omni lets stand beside any algorithm, so that a value of its own wins."""

OTHER_DEFAULTS: Mapping[str, Any] = {
    f"{M}.lora_rank": "0: all weights are trained",
    f"{M}.lora_alpha": 64,
    f"{M}.target_modules": "all-linear",
    f"{A}.optim.lr": 1e-6,
    f"{A}.optim.weight_decay": 0.01,
    f"{A}.ppo_mini_batch_size": 256,
    f"{R}.n": 1,
    f"{R}.algo.noise_level": 1.0,
    f"{R}.algo.sde_window_range": "[0,5] with sde_window_size, all steps but the last without",
    f"{R}.val_kwargs.pipeline.num_inference_steps": 50,
    "data.train_batch_size": 1024,
    "trainer.mixed_precision": "bfloat16 (actor.fsdp_config.dtype)",
    "trainer.total_epochs": 30,
}
"""Settings that change what is learned and whose default in verl-omni is another one: its default there."""


def find(key: str) -> Verdict | None:
    """What the table says of a key that is none here."""
    name = key.removeprefix("config.")  # flow_grpo's flags
    return next((verdict for verdict in TABLE if verdict.regex.fullmatch(name)), None)


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    """``a.**`` is ``a`` and all below it, ``**.a`` an ``a`` below anything, ``*`` within a part one part's text."""
    parts = []
    for i, part in enumerate(pattern.split(".")):
        if part == "**":
            parts.append(r"(?:[^.]+\.)*[^.]+" if i == 0 else r"(?:\.[^.]+)*")
        else:
            separator = r"\." if i else ""
            parts.append(separator + re.escape(part).replace(r"\*", r"([^.]*)"))
    return re.compile("".join(parts))
