"""Every key of verl-omni, verl, flow_grpo and Flow-Factory that is not a key here, and what becomes of it.

One table; of the patterns that fit a key the narrowest decides (``verdicts.rank``). The verdict rests on one question,
whether the key can change what is learned:

- ``Ignored``: it cannot, whatever its value. The run goes on, and one warning names all such keys.
- ``Moved``: it can, and a key here does the same. It acts through that key, and a warning shows the new form.
- ``Refused``: it can, and nothing here does the same. With a value that asks for what happens here anyway, its
  ``harmless`` ones, it is ignored.
- ``Renamed``: a key of a program whose configuration is of another form; the refusal shows what to write instead.
- ``Deleted``: it means nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from flowgrpo_rc.cli.spellings import AUTOCAST, DTYPES, A, M, R
from flowgrpo_rc.cli.verdicts import DROP, Deleted, Ignored, Moved, Refused, Renamed, Tree, Verdict, fit, rank
from flowgrpo_rc.models.config import ALL_LINEAR
from flowgrpo_rc.models.registry import FAMILIES

P = f"{R}.pipeline"
V = f"{R}.val_kwargs"

LAUNCHER_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes")
"""Held against the numbers of processes and machines that the launcher started."""

_ASYNC = "rollout and training take turns; a stale engine is actor_rollout_ref.rollout.adapter_lag=N"
_CONTIGUOUS = "the stochastic steps are one contiguous window"
_CRITIC = "GRPO has no critic"
_NO_OBJECTIVE = "this objective is not implemented; see actor_rollout_ref.actor.diffusion_loss.loss_mode"
_NO_REWARD_MODEL = (
    "no reward model is served beside training; score with reward.functions.ocr, or call your model's server in a "
    "function of your own: reward.custom_reward_function.path=my_reward.py"
)
_ONE_IMAGE = "a prompt is answered by one image"
_ONE_SUM = (
    "rewards are one weighted sum: reward.functions.NAME=WEIGHT and reward.custom_reward_function.{path,name,weight}"
)
_OPTIMIZER = "the optimizer is torch's AdamW"
_PPO_ADVANTAGES = "the advantage is GRPO's, which has no such term"
_SCORES_WHAT_WAS_DRAWN = "the actor scores what was drawn"
_TOKENIZERS = "prompts are tokenized by the tokenizers in the pipeline's folder"
_VIDEO = "images have one frame"


def _off(value: Any, tree: Tree) -> bool:
    """Nothing is asked for."""
    return value in (None, False, 0, "", "null", "disabled") or value == [] or value == {}


def _reward_model_is_off(value: Any, tree: Tree) -> bool:
    return tree.get("reward.reward_model.enable", tree.get("reward_model.enable")) is False


def _other_objective(value: Any, tree: Tree) -> bool:
    """The setting belongs to an objective that is not asked for."""
    return tree.get(f"{A}.diffusion_loss.loss_mode", "flow_grpo") not in ("diffusion_nft", "dpo", "awm")


def _own_reward_manager(value: Any, tree: Tree) -> bool:
    return value is None or str(value).startswith("pkg://verl_omni.")


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
    length = tree.get(f"{P}.max_sequence_length", 512)
    parts = value.values() if isinstance(value, Mapping) else [None]
    return all(
        isinstance(part, Mapping)
        and str(part.get("path", "")).startswith("tokenizer")
        and part.get("max_length") in (None, 77, length)
        for part in parts
    )


_DELETED = (
    Deleted(
        "classes are not chosen by a configuration here",
        """_target_ _recursive_ _convert_ _partial_
        **._target_ **._recursive_ **._convert_ **._partial_ **._args_""",
    ),
    Deleted(
        "a defaults list stands at the head of a YAML file; name the file with --config-name", "defaults **.defaults"
    ),
    Deleted(
        "Hydra only composes the configuration here; YAML files of your own are found with --config-dir, and the run "
        "folder is trainer.default_local_dir",
        "hydra.**",
    ),
    Deleted(_CRITIC, "critic.**"),
    Deleted(
        "it belongs to the training of language models",
        f"""{A}: omni_loss.** trainer_type use_rollout_log_probs
        {M}: hf_config_name model_stage max_audio_tokens max_image_tokens max_video_tokens
        data: continuous_token.** mm_configs.** mm_processor_kwargs.** pad_mode max_length audio_key function_tool_path
        data: balance_max_samples_by_modality""",
    ),
    Deleted(
        "it belongs to a backend that trains language models",
        f"{A}: veomni.** torchtitan.** automodel.** mindspeed.**",
    ),
    Deleted("a rollout's settings are actor_rollout_ref.rollout here", "rollout.**"),
    Deleted("a model's settings are actor_rollout_ref.model here", "model.**"),
)

_IGNORED = (
    Ignored("there is one: data parallelism by accelerate", f"{A}.strategy"),
    Ignored(
        "every process holds the frozen model; nothing is sharded or offloaded",
        f"""{A}: fsdp_config.** veomni_config.** megatron.** ulysses_sequence_parallel_size
        {R}.layered_summon
        {M}: fsdp_layer_prefixes use_shm enable_activation_offload""",
    ),
    Ignored(
        "how the engine lays out memory and batches; it draws the same images",
        f"""{R}: tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size
        {R}: gpu_memory_utilization free_cache_engine enforce_eager cudagraph_capture_sizes max_num_seqs
        {R}: max_num_batched_tokens max_model_len step_execution scheduling_policy enable_chunked_prefill
        {R}: enable_prefix_caching enable_sleep_mode
        {R}.engine_kwargs.*: max_num_seqs request_batch_max_wait_ms mm_processor_cache_gb gpu_memory_utilization
        {R}.engine_kwargs.*: enforce_eager max_model_len *parallel_size""",
    ),
    Ignored(
        "actor and engine use diffusers' default attention, which computes the same function",
        f"{R}.rollout_attn_backend {M}.attn_backend {M}.override_config.attn_implementation",
    ),
    Ignored(
        "there are no Ray workers or servers to set up",
        f"""{R}: agent.** mode n_gpus_per_node prometheus.** trace.** skip_tokenizer_init checkpoint_engine.**
        {R}: router_config_path disable_log_stats multi_stage_wake_up update_weights_*
        trainer: ray_wait_register_center_timeout ray_master_port_range use_v1 balance_batch use_legacy_worker_impl
        ray_kwargs.** ray_init.** transfer_queue.** actor_rollout_ref.nccl_timeout""",
    ),
    Ignored(
        "nothing is profiled; a run logs timing_s/... for every stage",
        f"""{A}.profiler.** {R}.profiler.** global_profiler.**
        trainer: profile_steps worker_nsight_options.** controller_nsight_options.** npu_profile.**""",
    ),
    Ignored(
        "samples are in the run folder, see trainer.log_val_generations",
        """trainer: rollout_data_dir validation_data_dir video_fps rollout_data_save_freq rollout_data_max_samples
        trainer: validation_data_max_samples""",
    ),
    Ignored("a checkpoint holds adapter, optimizer, random state and data position", f"{A}.checkpoint.**"),
    Ignored(
        "checkpoints stay in the run folder",
        """trainer: default_hdfs_dir del_local_ckpt_after_load esi_redundant_time max_critic_ckpt_to_keep
        trainer: checkpoint_callback_class""",
    ),
    Ignored(
        "about text that is generated token by token; images have none",
        f"""{A}: use_dynamic_bsz ppo_max_token_len_per_gpu ppo_infer_* calculate_entropy entropy_* pad_to_length
        {A}: calculate_sum_pi_squared use_prefix_grouper use_remove_padding use_fused_kernels freeze_vision_tower
        {A}: router_replay.**
        {R}: log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu temperature top_k top_p repetition_penalty
        {R}: max_new_tokens do_sample llm_calculate_log_probs logprobs_mode response_length ignore_eos mtp.**
        {R}: enable_rollout_routing_replay moe_load_balance_metrics_interval over_sample_rate
        {V}: temperature top_k top_p do_sample
        {M}: mtp.** use_remove_padding use_fused_kernels use_liger fused_kernel_options.** tiled_mlp.**
        {M}: hf_config_path load_tokenizer
        data: max_response_length apply_chat_template_kwargs.** video_key""",
    ),
    Ignored(
        "validation samples the deterministic ODE, which has no stochastic steps",
        f"""{V}.algo: sde_type sde_window_size sde_window_range sde_contiguous sample_strategy iters_per_group
        {V}.algo: sde_window_seed""",
    ),
    Ignored(
        "loading prompts takes one process and no tokenizer",
        """data: dataloader_num_workers filter_overlong_prompts_workers use_shm val_batch_size tokenizer gen_batch_size
        data: return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs image_patch_size
        data: tool_config_path""",
    ),
    Ignored(_VIDEO, " ".join(f"{p}.frame_rate {p}.video_flow_shift" for p in (P, f"{V}.pipeline", f"{M}.pipeline"))),
    Ignored("mini-batches are not shuffled, so there is nothing to seed", f"{A}.data_loader_seed"),
    Ignored("it follows actor_rollout_ref.rollout.n", f"{A}.rollout_n"),
    Ignored("used with use_distill_loss alone", f"{A}: distill_loss_mode distill_loss_coef"),
    Ignored("the schedule is as long as the run", f"{A}.optim.total_training_steps"),
    Ignored("the same AdamW in one kernel", f"{A}.optim.fused"),
    Ignored(
        "the reference is the actor with its adapter switched off; see actor.use_kl_loss", "actor_rollout_ref.ref.**"
    ),
    Ignored("it compiles the entropy of tokens; for the transformer see model.torch_compile", f"{A}.use_torch_compile"),
    Ignored("the engine copies the actor's weights", f"{R}.load_format"),
    Ignored(
        "prompts are as long as pipeline.max_sequence_length allows", f"{R}: prompt_length max_prompt_embed_length"
    ),
    Ignored(_ONE_IMAGE, f"{R}.multi_turn.**"),
    Ignored("there is no prefill to take apart", f"{R}.disaggregation.**"),
    Ignored("an image's noise depends on seed, step and index alone", f"{R}.full_determinism"),
    Ignored("no code of a model's own is run", f"{M}.trust_remote_code data.trust_remote_code"),
    Ignored("rollout and training share the device", "actor_rollout_ref.hybrid_engine"),
    Ignored("used with use_kl_in_reward alone", "algorithm: kl_ctrl.** kl_penalty"),
    Ignored("used with distillation.enabled alone", "distillation.**"),
    Ignored("prompts are cut at actor_rollout_ref.rollout.pipeline.max_sequence_length", "data.max_prompt_length"),
    Ignored("every reward sees every prompt, with all columns of its row", "data.reward_fn_key"),
    Ignored(
        "rewards run in the training process; for ocr see reward.ocr.num_threads",
        "reward.num_workers reward.sandbox_fusion.** sandbox_fusion.**",
    ),
    Ignored(_ONE_SUM, "reward.reward_manager.**"),
    Ignored("used with trainer.v1.trainer_mode=separate_async alone", "trainer.v1.**"),
    Ignored("every rollout is drawn anew", "skip.**"),
)

_MOVED = (
    Moved(
        "precision of the frozen weights",
        f"{A}.fsdp_config.model_dtype -> {M}.dtype",
        {**DTYPES, None: "float32"},
        True,
    ),
    Moved("precision of the frozen weights", f"{A}.veomni_config.model_dtype -> {M}.dtype", DTYPES, True),
    Moved(
        "precision of the actor's forward",
        f"""{A}.fsdp_config.dtype -> trainer.mixed_precision
        {A}.fsdp_config.mixed_precision.param_dtype -> trainer.mixed_precision
        {A}.veomni_config.mixed_precision_param_dtype -> trainer.mixed_precision""",
        AUTOCAST,
        True,
    ),
    Moved("autocast", f"{A}.veomni_config.mixed_precision -> trainer.mixed_precision", AUTOCAST, True),
    Moved("seed of the adapter's start", f"{A}.fsdp_config.seed -> trainer.seed"),
    Moved(
        "divisor of token losses",
        f"{A}.loss_scale_factor -> {A}.diffusion_loss.loss_scale_factor",
        {None: DROP},
    ),
    Moved("largest norm of the gradient", f"{A}.optim.clip_grad -> {A}.grad_clip"),
    Moved("learning-rate schedule", f"{A}.optim.warmup_style -> {A}.optim.lr_scheduler_type", {None: DROP}),
    Moved(
        "the clip is the loss's",
        f"""{A}.clip_ratio* -> {A}.diffusion_loss.clip_ratio*
        {A}.loss_agg_mode -> {A}.diffusion_loss.loss_agg_mode""",
        {None: DROP},
    ),
    Moved(_SCORES_WHAT_WAS_DRAWN, f"{M}.pipeline.guidance_scale -> {P}.guidance_scale"),
    Moved(_SCORES_WHAT_WAS_DRAWN, f"{M}.pipeline.* -> {P}.*\n{M}.algo.* -> {R}.algo.*", {None: DROP}),
    Moved("LoRA", f"{M}.lora.rank -> {M}.lora_rank\n{M}.lora.alpha -> {M}.lora_alpha"),
    Moved("it is a part of reward", "custom_reward_function.* -> reward.custom_reward_function.*"),
)

_REFUSED = (
    Refused(
        "gradients are summed in the LoRA's own precision",
        f"""{A}.fsdp_config.mixed_precision: reduce_dtype buffer_dtype
        {A}.veomni_config: mixed_precision_reduce_dtype mixed_precision_output_dtype""",
        (None, "fp32", "float32"),
    ),
    Refused("weights are not trained quantized", f"{A}.fsdp_config.qat.** {A}.qat.** {R}.qat.**", _off),
    Refused("quantized sampling is actor_rollout_ref.rollout.quantization=fp8", f"{R}.quantization_config_file", _off),
    Refused(
        "mini-batches are whole prompt groups in the batch's (already random) order", f"{A}.shuffle", (False, None)
    ),
    Refused("there is no teacher to distil from", f"{A}.use_distill_loss distillation.enabled", _off),
    Refused(
        _NO_OBJECTIVE,
        f"{A}.diffusion_loss: mix_beta ref_kl_coef adaptive_weight_min dpo_beta",
        _other_objective,
    ),
    Refused(_NO_OBJECTIVE, f"{A}.policy_loss.** algorithm.paired_preference", _off),
    Refused(
        _NO_OBJECTIVE,
        f"{A}.policy_loss.loss_mode {M}.model_type algorithm.trainer_type train.trainer_type",
        ("vanilla", "diffusion_model", "policy_gradient", "grpo", None),
    ),
    Refused("an objective for tokens that is not implemented", f"{A}: tau_pos tau_neg"),
    Refused(
        "a setting of DiffusionNFT, which is not implemented",
        "algorithm: old_policy_decay_schedule old_policy_decay old_policy_update_interval adv_mode",
        (None, "copy", 1, "continuous"),
    ),
    Refused(
        "flow_dppo's KL is that of the two Gaussians, so it is divided by their variance",
        f"{A}.diffusion_loss.add_kl_coefficient",
        (True, None),
    ),
    Refused(
        _OPTIMIZER,
        f"""{A}.optim: name muon_* use_precision_aware_optimizer main_*_dtype exp_avg*_dtype master_weights
        {A}.optim: use_layer_wise_distributed_optimizer store_param_remainders optimizer optimizer_impl""",
        ("AdamW", "adamw", "torch.optim", False, None, "fp32", "float32"),
    ),
    Refused(_OPTIMIZER, "train.use_8bit_adam", _off),
    Refused("AdamW's settings are keys of actor.optim", f"{A}.optim.override_optimizer_config", _off),
    Refused("the schedules of lr_scheduler_type run down to 0", f"{A}.optim: min_lr_ratio lr_min lr_start", (0, None)),
    Refused("cosine is half a period, to 0 at the end", f"{A}.optim.num_cycles", (0.5, None)),
    Refused("a schedule spans the whole run", f"{A}.optim.lr_decay_ratio", (1, None)),
    Refused("the first step of a schedule is number 0", f"{A}.optim.zero_indexed_step", (True, None)),
    Refused(
        "the schedules of lr_scheduler_type run from the first optimizer step to 0",
        f"""{A}.optim: lr_decay_steps lr_decay_style lr_warmup_init lr_wsd_* min_lr weight_decay_incr_style decay_type
        {A}.optim: use_checkpoint_opt_param_scheduler min_lr_factor""",
        (None, 0, False, "constant", "exponential"),
    ),
    Refused("the noise of an SDE step is fixed, so its entropy has no gradient", f"{A}.entropy_coeff", _off),
    Refused("use_kl_loss is the exact KL of two Gaussians", f"{A}.kl_loss_type", ("low_var_kl", "kl", None)),
    Refused(
        "batches are counted for one process: write ppo_micro_batch_size_per_gpu and log_prob_micro_batch_size_per_gpu",
        f"{A}.ppo_micro_batch_size {R}.log_prob_micro_batch_size",
        (None,),
    ),
    Refused(_ASYNC, f"{R}.nnodes trainer.v1.trainer_mode", (0, "sync", None)),
    Refused(_ASYNC, "async_training.**", _off),
    Refused("the engine takes its settings from actor_rollout_ref.rollout", f"{R}.engine_kwargs.**", _off),
    Refused("images are drawn with the adapter that is trained", f"{R}.rollout_adapter", ("default", None)),
    Refused("this package brings its own engine code; no module is loaded", f"{R}.external_lib", _off),
    Refused(_ONE_IMAGE, f"{R}.multi_turn.enable", _off),
    Refused("there is no prefill to take apart", f"{R}.disaggregation.enabled", _off),
    Refused(_CONTIGUOUS, f"{R}.algo.sde_contiguous {M}.algo.sde_contiguous", (True, None)),
    Refused(
        "rewards see images, not latents",
        f"{P}.output_type {V}.pipeline.output_type {M}.pipeline.output_type",
        ("image", "pil", "np", "pt", None),
    ),
    Refused(_VIDEO, f"{P}.num_frames {V}.pipeline.num_frames {M}.pipeline.num_frames", (1, None)),
    Refused(
        "give pixels: pipeline.height and pipeline.width",
        f"{P}.aspect_ratio {V}.pipeline.aspect_ratio {M}.pipeline.aspect_ratio",
        (None,),
    ),
    Refused("the LoRA is lora_rank, lora_alpha and target_modules", f"{M}.lora.**", _off),
    Refused("name the layers in target_modules", f"{M}: exclude_modules target_parameters", _off),
    Refused("there is one adapter", f"{M}.policy_state_adapters", (["default"], None)),
    Refused(_TOKENIZERS, f"{M}.tokenizer_path", _in_the_pipeline),
    Refused(_TOKENIZERS, f"{M}.extra_tokenizers", _pipeline_tokenizers),
    Refused(
        "prompts are given to the pipeline as they are; put the template's words into the prompt file",
        f"{M}.custom_chat_template",
        _plain_chat_template,
    ),
    Refused(
        f"a model's own index says what it is; families: {', '.join(FAMILIES)}",
        f"{M}: architecture config_path",
        (None, *FAMILIES),
    ),
    Refused("the transformer is in transformer/", f"{M}.transformer_subfolder", ("transformer", None)),
    Refused(
        "no module of another trainer is loaded; a reward of your own is reward.custom_reward_function",
        f"{M}.external_lib",
        _off,
    ),
    Refused("the model is what its folder's config.json files say", f"{M}.override_config.**", _off),
    Refused("training samples its own images", "algorithm.sample_source", ("online", None)),
    Refused(
        "the trained steps are rollout.algo.sde_window_range and sde_window_size",
        "algorithm.timestep_fraction",
        (1, None),
    ),
    Refused("a KL penalty is part of the loss: actor.use_kl_loss=true", "algorithm.use_kl_in_reward", _off),
    Refused(_PPO_ADVANTAGES, "algorithm: gamma lam", (1, None)),
    Refused(_PPO_ADVANTAGES, "algorithm: use_pf_ppo pf_ppo.** filter_groups.** optimal_* gdpo_*", _off),
    Refused(_CRITIC, "trainer.critic_warmup", _off),
    Refused("prompts are cut at their end", "data.truncation", ("error", "right", None)),
    Refused("leave the long prompts out of the file", "data.filter_overlong_prompts", _off),
    Refused("models here draw from text alone", "data.image_key", ("images", None)),
    Refused("validation draws the same prompts in the file's order", "data.validation_shuffle", _off),
    Refused(
        "prompts come from a .txt, .jsonl or .parquet file: data.train_files",
        "data: custom_cls.** datagen.** sampler.** train_sampler.** val_sampler.**",
        _off,
    ),
    Refused(_NO_REWARD_MODEL, "reward.reward_model.enable reward_model.enable", _off),
    Refused(_NO_REWARD_MODEL, "reward.reward_model.** reward_model.**", _reward_model_is_off),
    Refused(_ONE_SUM, "reward.reward_functions.**", _off),
    Refused(_ONE_SUM, "reward.aggregation", ("weighted_sum", None)),
    Refused(_ONE_SUM, "reward.reward_manager.name", ("VisualRewardManager", "VisualRewardLoopManager", "naive", None)),
    Refused(_ONE_SUM, "reward.reward_manager.module.path", _own_reward_manager),
    Refused("to judge a setting without training, use flowgrpo-rc probe", "trainer.val_only", _off),
    Refused("every rollout is drawn anew", "skip: *.enable enable", _off),
)

_FLOW_GRPO = "Flow-GRPO's file is Python"
_FLOW_FACTORY = "Flow-Factory's file has another form"
_OTHER_PROGRAMS = (
    Renamed(
        _FLOW_GRPO,
        f"""pretrained.model -> {M}.path
        sample.num_steps -> {P}.num_inference_steps
        sample.eval_num_steps -> {V}.pipeline.num_inference_steps
        sample.guidance_scale -> {P}.true_cfg_scale
        sample.num_image_per_prompt -> {R}.n
        sample.train_batch_size -> {R}.micro_batch_size
        sample.global_std -> algorithm.global_std
        sample.noise_level -> {R}.algo.noise_level
        sample.sde_type -> {R}.algo.sde_type
        sample.sde_window_range -> {R}.algo.sde_window_range
        train.batch_size -> {A}.ppo_micro_batch_size_per_gpu
        train.adam_weight_decay -> {A}.optim.weight_decay
        train.adam_epsilon -> {A}.optim.eps
        train.learning_rate -> {A}.optim.lr
        train.max_grad_norm -> {A}.grad_clip
        train.num_inner_epochs -> {A}.ppo_epochs
        train.adv_clip_max -> {A}.diffusion_loss.adv_clip_max
        train.clip_range -> {A}.diffusion_loss.clip_ratio
        train.lora_path -> {M}.lora_adapter_path
        save_freq -> trainer.save_freq
        eval_freq -> trainer.test_freq
        seed -> trainer.seed
        run_name -> trainer.experiment_name
        save_dir -> trainer.default_local_dir
        num_epochs -> trainer.total_training_steps
        num_checkpoint_limit -> trainer.max_actor_ckpt_to_keep""",
    ),
    Renamed(_FLOW_GRPO, f"sample.sde_window_size -> {R}.algo.sde_window_size", {0: None}),
    Renamed(_FLOW_GRPO, "mixed_precision -> trainer.mixed_precision", {"fp16": "bf16"}),
    Deleted(
        "it does not change what is learned",
        """allow_tf32 logdir pretrained.revision sample.test_batch_size prompt_fn_kwargs.**
        data: preprocessing_batch_size force_reprocess cache_dir sampler_type
        model: model_type resume_type attn_backend
        log.save_model_only train.ref_param_device train.ema_device eval.per_device_batch_size
        launcher config_file num_processes main_process_port""",
    ),
    Refused(f"{A}.use_kl_loss=true with {A}.kl_loss_coef for its weight", "train: beta kl_beta", _off),
    Refused(f"{A}.ema_decay=0.987 is the average after every update", "train.ema", _off),
    Refused(f"one decay rate of {A}.optim.betas=[0.9,0.999]", "train: adam_beta1 adam_beta2"),
    Refused(f"the actor scores with the guidance that drew: {P}.true_cfg_scale", "train.cfg", (True,)),
    Refused(f"the trained steps are {R}.algo.sde_window_range", "train.timestep_fraction", (1,)),
    Refused(
        "batches are counted in prompts over all processes: data.train_batch_size and actor.ppo_mini_batch_size",
        """sample.num_batches_per_epoch
        train: gradient_accumulation_steps gradient_step_per_epoch unique_sample_num_per_epoch""",
    ),
    Refused("every image starts from noise of its own", "sample.same_latent", _off),
    Refused(f"the KL is part of the loss: {A}.use_kl_loss=true", "sample.kl_reward", _off),
    Refused(f"{P}.height and {P}.width", "resolution train.resolution"),
    Refused("the prompt files are data.train_files and data.val_files", "dataset prompt_fn data.dataset_dir"),
    Refused("a weight for each reward: reward.functions.ocr=1.0", "reward_fn"),
    Refused("a LoRA is what is trained", "use_lora model.finetune_type", (True, "lora")),
    Refused("advantages are compared within a prompt's images", "per_prompt_stat_tracking", (True,)),
    Refused(f"{V}.pipeline.height and .width", "eval.resolution"),
    Refused("use_kl_loss is the KL of the two Gaussians, of their means", "train.kl_type", ("x-based",)),
    Refused(_ONE_SUM, "train.advantage_aggregation", ("sum",)),
    Refused(_ONE_SUM, "rewards.** eval_rewards.**"),
    Refused(f"a range: {R}.algo.sde_window_range=[first,stop]", "scheduler.sde_steps"),
    Refused(f"trainer.resume_from_path, or {M}.lora_adapter_path for a LoRA", "model.resume_path", _off),
    Refused("the average is taken after every optimizer step", "train.ema_update_interval", (1,)),
    Refused(
        "a setting of flow_grpo or Flow-Factory without a counterpart; see flowgrpo-rc train --print-config",
        "sample.** train.** scheduler.** eval.** log.** pretrained.**",
    ),
    Renamed(
        _FLOW_FACTORY,
        f"""model.model_name_or_path -> {M}.path
        model.lora_rank -> {M}.lora_rank
        model.lora_alpha -> {M}.lora_alpha
        log.project -> trainer.project_name
        log.run_name -> trainer.experiment_name
        log.save_dir -> trainer.default_local_dir
        train.adv_clip_range -> {A}.diffusion_loss.adv_clip_max
        train.num_inference_steps -> {P}.num_inference_steps
        train.guidance_scale -> {P}.true_cfg_scale
        train.per_device_batch_size -> {A}.ppo_micro_batch_size_per_gpu
        train.group_size -> {R}.n
        train.global_std -> algorithm.global_std
        train.adam_betas -> {A}.optim.betas
        train.enable_gradient_checkpointing -> {M}.enable_gradient_checkpointing
        train.seed -> trainer.seed
        train.max_epochs -> trainer.total_training_steps
        scheduler.noise_level -> {R}.algo.noise_level
        scheduler.num_sde_steps -> {R}.algo.sde_window_size
        scheduler.seed -> {R}.algo.sde_window_seed
        eval.num_inference_steps -> {V}.pipeline.num_inference_steps
        eval.guidance_scale -> {V}.pipeline.true_cfg_scale
        eval.seed -> {V}.seed
        data.max_dataset_size -> data.train_max_samples""",
    ),
    Renamed(_FLOW_FACTORY, f"model.target_modules -> {M}.target_modules", {"default": None, "all": ALL_LINEAR}),
    Renamed(_FLOW_FACTORY, "log.logging_backend -> trainer.logger", {"none": ["console"]}),
    Renamed(_FLOW_FACTORY, "log.save_freq -> trainer.save_freq\neval.eval_freq -> trainer.test_freq", {0: -1}),
    Renamed(_FLOW_FACTORY, f"train.ema_decay -> {A}.ema_decay", {0: None}),
    Renamed(
        _FLOW_FACTORY,
        f"scheduler.dynamics_type -> {R}.algo.sde_type",
        {"Flow-SDE": "sde", "Dance-SDE": "dance_sde", "CPS": "cps"},
    ),
)


TABLE: tuple[Verdict, ...] = (*_DELETED, *_IGNORED, *_MOVED, *_REFUSED, *_OTHER_PROGRAMS)


def find(key: str) -> Verdict | None:
    """What the table says of a key that is none here."""
    found = _find(key)
    return None if found is None else found[1]


def has_pattern_of_its_own(key: str) -> bool:
    """Whether the table has this very key, not only a section that it lies in."""
    found = _find(key)
    return found is not None and "**" not in found[0]


def _find(key: str) -> tuple[str, Verdict] | None:
    """The narrowest pattern that fits, and its verdict."""
    return next(((pattern, verdict) for pattern, verdict in _ranked() if fit(pattern, key)), None)


@cache
def _ranked() -> list[tuple[str, Verdict]]:
    rows = [(pattern, verdict) for verdict in TABLE for pattern in verdict.patterns]
    return sorted(rows, key=lambda row: rank(row[0]))
