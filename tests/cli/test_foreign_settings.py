"""Settings of other trainers: what acts, what is ignored, what is refused, and that nothing of theirs is unknown."""

import re
import shlex
import warnings
from pathlib import Path

import pytest

from flowgrpo_rc.cli.compose import ConfigError, compose
from flowgrpo_rc.cli.foreign import CORRECTIONS, LAUNCHER_KEYS, algorithms, find, other_defaults, override, rows
from flowgrpo_rc.cli.schema import schema, sections
from flowgrpo_rc.loss.objectives import OBJECTIVES

TINY = "tiny_qwen_image_ocr"
BASE = "flowgrpo_trainer"
A, R, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
KEYS = (Path(__file__).parent / "verl_omni_keys.txt").read_text().split()
"""Keys of verl-omni's image scripts and of its trainer's YAML."""

ROLLOUT_CORRECTION_SCRIPT = (Path(__file__).parent / "verl_omni_rollout_correction.txt").read_text().splitlines()
"""The overrides of verl-omni's rollout-correction script for Qwen-Image, less those of its reward."""

SCORES = "/verl-omni/verl_omni/utils/reward_score"
"""The folder in which verl-omni's scripts look for its scorers; it does not exist."""

REWARD_MODEL = (
    "reward.reward_model.enable=True",
    "reward.reward_model.model_path=Qwen/Qwen3-VL-8B-Instruct",
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.rollout.tensor_model_parallel_size=4",
    "reward.custom_reward_function.path=verl_omni/utils/reward_score/genrm_ocr.py",
    "reward.custom_reward_function.name=compute_score_ocr",
)
"""The others: a model that is served beside training transcribes the images."""


def quietly(*overrides, name=BASE):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compose(name, overrides)


def refused(*overrides, name=BASE):
    with pytest.raises(ConfigError) as caught:
        quietly(*overrides, name=name)
    return str(caught.value)


def said(*overrides, name=BASE):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compose(name, overrides)
    return [str(warning.message) for warning in caught]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------- the table


def test_no_key_of_another_trainer_is_unknown():
    unknown = [
        key
        for key in KEYS
        if key not in schema()
        and key not in sections()
        and key not in LAUNCHER_KEYS
        and not key.startswith((*(f"{section}." for section in CORRECTIONS), "reward.reward_functions."))
        and find(key) is None
    ]
    assert len(KEYS) > 400
    assert unknown == []


def test_every_move_leads_to_a_key_that_exists():
    moves = [row for row in rows().values() if row.to]
    assert {row.action for row in moves} == {"move", "rename"}
    assert len(moves) > 60
    for row in moves:
        assert "*" in row.to or row.to in schema(), row.key


def test_scripts_of_clean_image_objectives_compose():
    """verl-omni's names of DiffusionNFT and of online DPO, with the old policy that is here."""
    clean = ("algorithm.rollout_correction=null", "algorithm.trainer_type=direct_preference", f"{R}.n=4")
    nft = compose(
        "flowgrpo_trainer",
        [
            *clean, f"{M}.algorithm=diffusion_nft", f"{M}.model_type=diffusion_nft_model",
            f"{A}.diffusion_loss.mix_beta=0.1", f"{A}.diffusion_loss.ref_kl_coef=1e-4", "algorithm.adv_mode=binary",
            "algorithm.old_policy_decay_schedule=copy", "algorithm.old_policy_update_interval=1",
        ],
    ).actor_rollout_ref.actor  # fmt: skip
    loss = nft.diffusion_loss
    assert (loss.loss_mode, loss.mix_beta, loss.ref_kl_coef, loss.adv_mode) == ("diffusion_nft", 0.1, 1e-4, "binary")
    assert nft.needs_reference
    dpo = [*clean, f"{A}.diffusion_loss.loss_mode=dpo", "algorithm.paired_preference=true"]
    loss = compose("flowgrpo_trainer", [*dpo, f"{A}.diffusion_loss.dpo_beta=100"]).actor_rollout_ref.actor
    assert (loss.diffusion_loss.loss_mode, loss.diffusion_loss.dpo_beta) == ("dpo", 100.0)
    assert "images are paired with" in refused("algorithm.paired_preference=true")


def test_who_draws_and_who_learns_from_files(tmp_path):
    """verl-omni's adapter that draws, where that differs from the one here, and its offline DPO."""
    nft = ("algorithm.rollout_correction=null", f"{A}.diffusion_loss.loss_mode=diffusion_nft")
    adapter = f"{R}.rollout_adapter"
    assert adapter in refused(*nft, f"{adapter}=default", "algorithm.old_policy_decay_schedule=linear_to_0_5")
    assert adapter in refused(*nft[:1], f"{A}.diffusion_loss.loss_mode=dpo", f"{adapter}=old")
    compose("flowgrpo_trainer", [*nft, f"{adapter}=old", "algorithm.old_policy_decay_schedule=linear_to_0_5"])
    assert "pairs of data.preferences" in refused("algorithm.sample_source=offline")
    dpo = (*nft[:1], f"{A}.diffusion_loss.loss_mode=dpo", f"{R}.n=2", "data.preferences=pairs.jsonl")
    compose("flowgrpo_trainer", [*dpo, "algorithm.sample_source=offline"])


@pytest.mark.parametrize("value", ["false", "decoupled_token_is", "[rollout_is]"])
def test_an_actors_correction_that_is_no_mapping_is_refused(value):
    """The correction of the file would stay in force."""
    says = refused(f"{A}.rollout_correction={value}")
    assert says.startswith(f"{A}.rollout_correction: got")
    assert says.endswith("give its keys, e.g. {rollout_is: sequence}, or null")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.time_sampling_strategy=discrete_wo_init", "distribution has one of uniform, logit_normal, discrete"),
        ("train.awm_weighting=huber", "awm_weighting has one of Uniform, t, t\\*\\*2"),
        ("train.num_train_timesteps=0", "actor.clean.places=4"),
    ],
)
def test_values_of_flow_factory_that_are_not_here_are_refused(setting, says):
    assert re.search(says, refused(setting))


def test_the_nft_script_of_verl_omni_composes():
    """Its settings of objective, old policy, places and rollout; 10 places of 10 steps are all of them."""
    algorithm = ("timestep_fraction=1.0", "old_policy_decay_schedule=delayed_linear_to_0_999", "sample_source=online")
    algorithm += ("old_policy_update_interval=2", "adv_mode=continuous", "trainer_type=direct_preference")
    rollout = ("calculate_log_probs=False", "rollout_adapter=old", "pipeline.num_inference_steps=10", "n=16")
    settings = [
        "algorithm.rollout_correction=null", *(f"algorithm.{one}" for one in algorithm),
        f"{M}.algorithm=diffusion_nft", f"{M}.model_type=diffusion_nft_model",
        f'{M}.policy_state_adapters=["default","old"]', f"{A}.diffusion_loss.adv_clip_max=5.0",
        f"{A}.diffusion_loss.clip_ratio=1e-5", *(f"{R}.{one}" for one in rollout),
    ]  # fmt: skip
    config = compose("flowgrpo_trainer", settings)
    clean = config.actor_rollout_ref.actor.clean
    assert (clean.places, clean.distribution) == (10, "steps")
    assert [config.algorithm.old_decay(batch) for batch in (1, 80, 81, 300)] == [1.0, 0.0375, 1.0, 0.999]
    half = [one for one in settings if "fraction" not in one] + ["algorithm.timestep_fraction=0.55"]
    assert compose("flowgrpo_trainer", half).actor_rollout_ref.actor.clean.places == 5
    own = compose("flowgrpo_trainer", [*settings, f"{A}.clean.places=3"]).actor_rollout_ref.actor.clean
    assert (own.places, own.distribution) == (3, "steps")
    assert "give a number above 0" in refused(*half[:-1], "algorithm.timestep_fraction=1.5")
    assert "the trained steps are rollout.algo" in refused("algorithm.timestep_fraction=0.5")
    assert "actor.clean.places: got 11 with distribution=steps" in refused(*settings, f"{A}.clean.places=11")
    assert "range: got" in refused(*settings, f"{A}.clean.range=[0.1,1]")
    assert "there is one adapter" in refused(f'{M}.policy_state_adapters=["default","old"]')


def test_the_table_takes_no_key_of_our_own():
    """A pattern without wildcards that is a key here would never be asked; it is a key that has been added since."""
    respelled = {key for key, row in rows().items() if row.action == "respell"}
    assert {key for key in rows() if key in schema()} == respelled
    assert respelled <= schema().keys()
    assert other_defaults().keys() <= schema().keys()


@pytest.mark.parametrize(
    ("key", "action", "reason"),
    [
        (f"{A}.fsdp_config.optimizer_offload", "ignore", "of sharding there are"),
        (f"{A}.fsdp_config.seed", "move", "seed of the adapter's start"),
        (f"{A}.fsdp_config.qat.enable", "refuse", "not trained quantized"),
        (f"{R}.engine_kwargs.vllm_omni.enforce_eager", "ignore", "lays out memory"),
        (f"{R}.engine_kwargs.vllm_omni.quantization", "refuse", "takes its settings from"),
        (f"{M}.algo.sde_contiguous", "refuse", "contiguous"),
        (f"{M}.algo.noise_level", "move", "what was drawn"),
    ],
)
def test_the_narrowest_pattern_decides(key, action, reason):
    row = find(key)
    assert row.action == action
    assert reason in row.reason


def test_every_objective_is_an_algorithm_of_verl_omni():
    assert set(OBJECTIVES) <= set(algorithms())
    assert algorithms()["dance_grpo"] == {
        f"{A}.diffusion_loss.loss_mode": "dance_grpo",
        f"{R}.algo.sde_type": "dance_sde",
    }


# ---------------------------------------------------------------- verl-omni's script


def test_the_rollout_correction_script_starts():
    config = quietly(*ROLLOUT_CORRECTION_SCRIPT)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.model.dtype == "bfloat16"
    assert (actor.optim.lr, actor.ppo_mini_batch_size, rollout.n) == (3e-4, 16, 16)
    assert (rollout.algo.noise_level, rollout.algo.sde_window_range) == (1.2, [0, 5])
    assert config.rollout_correction.rollout_rs_threshold == "0.5_2.0"
    assert config.reward.num_workers == 1
    assert (config.trainer.total_training_steps, config.trainer.logger) == (300, ["console", "wandb"])


def test_one_warning_lists_what_is_ignored_and_one_what_is_translated():
    ignored, moved, defaults = said(*ROLLOUT_CORRECTION_SCRIPT)
    names = ("optimizer_offload", "agent.num_workers", "load_format", "layered_summon", "tensor_model_parallel_size")
    assert all(name in ignored for name in (*names, "ref.log_prob_micro_batch_size_per_gpu"))
    assert "torchrun --nproc_per_node 4" in ignored
    assert f"{A}.fsdp_config.model_dtype=bfloat16 -> {M}.dtype=bfloat16" in moved
    assert "trainer.mixed_precision=no (there bfloat16" in defaults
    assert "lora_rank" not in defaults


def test_the_reward_model_acts():
    """With it all 56 overrides of the script act: its OCR by a model is the judge's question of that name."""
    assert len(ROLLOUT_CORRECTION_SCRIPT) + len(REWARD_MODEL) == 56
    reward = quietly(*ROLLOUT_CORRECTION_SCRIPT, *REWARD_MODEL).reward
    model = reward.reward_model
    assert (model.enable, model.model_path) == (True, "Qwen/Qwen3-VL-8B-Instruct")
    assert (model.rollout.name, model.rollout.tensor_model_parallel_size) == ("vllm", 4)
    assert reward.weights() == {"judge": 1.0}
    assert [question.parser for question in reward.judge.questions] == ["ocr"]
    assert reward.custom_reward_function.path is None
    moved = said(*ROLLOUT_CORRECTION_SCRIPT, *REWARD_MODEL)[1]
    assert "reward.custom_reward_function -> reward.functions.judge=1.0 'reward.judge.questions=[ocr]'" in moved


def test_settings_of_a_reward_model_that_are_others_here():
    older = quietly("reward_model.enable=true", "reward_model.model.path=x", "reward_model.n_gpus_per_node=8")
    assert (older.reward.reward_model.enable, older.reward.reward_model.model_path) == (True, "x")
    assert "extra_args" in refused("reward.reward_model.rollout.quantization=fp8")
    assert "choose one of vllm" in refused("reward.reward_model.rollout.name=sglang")
    assert "reward.judge.questions is ['yes_no']" in refused(*REWARD_MODEL, "reward.judge.questions=[yes_no]")


def test_a_scorer_of_verl_omnis_that_is_there_is_used_as_it_is(tmp_path):
    file = tmp_path / "verl_omni/utils/reward_score/genrm_ocr.py"
    file.parent.mkdir(parents=True)
    file.write_text("def compute_score_ocr(solution_image, reward_router_address, model_name): ...\n")
    reward = quietly(*REWARD_MODEL, f"reward.custom_reward_function.path={file}").reward
    assert reward.weights() == {"compute_score_ocr": 1.0}


# ---------------------------------------------------------------- what acts


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ([f"{A}.fsdp_config.model_dtype=fp32"], [f"{M}.dtype=float32"]),
        ([f"{M}.dtype=fp16"], [f"{M}.dtype=float16"]),
        ([f"{M}.lora_dtype=null"], [f"{M}.lora_dtype=float32"]),
        *(([f"{A}.optim.name={name}"], [f"{A}.optim.name=adamw"]) for name in ("AdamW", "torch.optim", "null")),
        ([f"{A}.optim.name=AdamW8bit"], [f"{A}.optim.name=adamw_8bit"]),
        (["+train.use_8bit_adam=true"], [f"{A}.optim.name=adamw_8bit"]),
        (["+allow_tf32=true"], [f"{M}.allow_tf32=true"]),
        ([f"{A}.fsdp_config.mixed_precision.param_dtype=bf16"], ["trainer.mixed_precision=bf16"]),
        ([f"{A}.fsdp_config={{model_dtype: bf16, optimizer_offload: true}}"], [f"{M}.dtype=bfloat16"]),
        ([f"{A}.clip_ratio=0.01", f"{A}.clip_ratio_high=0.02"], [
            f"{A}.diffusion_loss.clip_ratio=0.01", f"{A}.diffusion_loss.clip_ratio_high=0.02"
        ]),
        ([f"{M}.algorithm=flow_dppo"], [f"{A}.diffusion_loss.loss_mode=flow_dppo"]),
        ([f"{M}.algorithm=mix_grpo", f"{R}.algo.sample_strategy=random"], [f"{R}.algo.sample_strategy=random"]),
        ([f"{M}.algorithm=flow_grpo", f"{A}.diffusion_loss.loss_mode=grpo_guard"],
         [f"{A}.diffusion_loss.loss_mode=grpo_guard"]),
        (["algorithm.adv_estimator=mix_grpo"], []),
        ([f"{A}.rollout_correction.rollout_is=token"], ["algorithm.rollout_correction.rollout_is=token"]),
        ([f"{A}.rollout_correction=null"], ["algorithm.rollout_correction=null"]),  # the file's gives way
        ([f"{A}.rollout_correction={{}}", "algorithm.rollout_correction.guard=off"],
         ["algorithm.rollout_correction.guard=off"]),
        ([f"{A}.fsdp_config.model_dtype=null"], [f"{M}.dtype=float32"]),
        ([f"{M}.algo.noise_level=0.9"], [f"{R}.algo.noise_level=0.9"]),
        ([f"{M}.pipeline.height=64"], [f"{R}.pipeline.height=64"]),  # the file's own height gives way
        ([f"{A}.optim.lr_scheduler_type=constant", f"{A}.optim.lr_warmup_steps=7"],
         [f"{A}.optim.lr_scheduler_type=constant_with_warmup", f"{A}.optim.lr_warmup_steps=7"]),
        ([f"{A}.optim.lr_scheduler_type=constant", f"{A}.optim.lr_warmup_steps=-1",
          f"{A}.optim.lr_warmup_steps_ratio=0.1"],
         [f"{A}.optim.lr_scheduler_type=constant_with_warmup", f"{A}.optim.lr_warmup_steps_ratio=0.1"]),
        ([f"{A}.optim.lr_warmup_steps=null"], []),
        *(([f"{A}.use_kl_loss=true", f"{A}.kl_loss_type={kind}"], [f"{A}.use_kl_loss=true"])
          for kind in ("kl", "low_var_kl", "null")),
        (["trainer.total_training_steps=-1"], ["trainer.total_training_steps=null"]),
        (["trainer.resume_mode=enable"], ["trainer.resume_mode=auto"]),
        (["trainer.logger=console"], ["trainer.logger=[console]"]),
        (["data.seed=null"], []),
        (["+reward.reward_functions.ocr.weight=0.5"], ["reward.functions.ocr=0.5"]),
        ([f"+reward.reward_functions.jpeg.path={SCORES}/jpeg_compressibility.py",
          "+reward.reward_functions.jpeg.name=compute_score", "+reward.reward_functions.jpeg.weight=0.5"],
         ["reward.functions.jpeg_compressibility=0.5"]),
        (["reward.custom_reward_function.path=verl_omni/utils/reward_score/jpeg_compressibility.py",
          "reward.custom_reward_function.name=compute_score"], ["reward.functions.jpeg_compressibility=1.0"]),
        (["reward_fn={ocr: 0.5, jpeg_compressibility: 1}"],
         ["reward.functions.ocr=0.5", "reward.functions.jpeg_compressibility=1"]),
    ],
)  # fmt: skip
def test_a_setting_in_their_form_configures_what_ours_does(there, here):
    assert quietly(*there, name=TINY).to_dict() == quietly(*here, name=TINY).to_dict()


def test_a_warm_up_ratio_counts_optimizer_steps():
    optim = quietly(f"{A}.optim.lr_warmup_steps_ratio=0.1", name=TINY).actor_rollout_ref.actor.optim
    assert (optim.lr_scheduler_type, optim.warm_up(299), optim.warm_up(5)) == ("linear", 29, 0)
    both = quietly(f"{A}.optim.lr_warmup_steps=4", f"{A}.optim.lr_warmup_steps_ratio=0.1", name=TINY)
    assert both.actor_rollout_ref.actor.optim.warm_up(299) == 4


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([f"{A}.fsdp_config.model_dtype=bf16", f"{M}.dtype=float32"], ["fsdp_config.model_dtype: got 'bf16'", "leave"]),
        ([f"{A}.rollout_correction.guard=warn", "algorithm.rollout_correction.guard=off"], ["guard: got 'warn', but"]),
        ([f"{A}.rollout_correction=null", "algorithm.rollout_correction.rollout_is=token"],
         ["rollout_correction: got null, which is no correction, but algorithm.rollout_correction is {", "leave one"]),
        ([f"{M}.pipeline.height=64", f"{R}.pipeline.height=32"], ["model.pipeline.height: got 64"]),
        ([f"{M}.algorithm=flow_dppo", f"{A}.diffusion_loss.loss_mode=grpo_guard"], ["got flow_dppo", "'grpo_guard'"]),
        (["+reward.reward_functions.ocr.weight=0.5", "reward.functions.ocr=1"],
         ["reward_functions.ocr: got the weight 0.5, but reward.functions is {ocr: 1}", "leave one out"]),
        (["reward_fn={ocr: 1}", "reward.functions.ocr=2"],
         ["reward_fn: got {ocr: 1}, but reward.functions is {ocr: 2}"]),
        ([f"+reward.reward_functions.{name}.path={SCORES}/jpeg_compressibility.py" for name in ("a", "b")],
         ["reward_functions.b: it is the built-in reward jpeg_compressibility here, and so is", "reward_functions.a",
          "the sum of their weights"]),
        (["reward.custom_reward_function.path=verl_omni/utils/reward_score/pickscore_reward.py",
          "+reward.reward_functions.pickscore.weight=1"], ["pickscore", "the sum of their weights"]),
        ([f"+reward.reward_functions.{name}.path={SCORES}/{name}.py" for name in ("genrm_ocr", "unified_reward")],
         ["unified_reward: it is the judge's question unified_reward_2", "questions is ['ocr']; write all questions"]),
        (["+reward.reward_functions.ocr.device=cuda"], ["the built-in reward ocr takes none of device"]),
        (["reward.custom_reward_function.path=verl_omni/utils/reward_score/hpsv3_reward.py"],
         ["reward.custom_reward_function={path:verl_omni/", "verl-omni's file is not there", "reward.functions.ocr=1"]),
        ([f"{A}.fsdp_config.model_dtype=int4"], ["fsdp_config.model_dtype: got 'int4'; choose one of fp32"]),
    ],
)  # fmt: skip
def test_two_values_for_one_setting_are_refused(overrides, parts):
    message = refused(*overrides, name=TINY)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_the_same_value_given_twice_is_no_conflict():
    quietly(f"{A}.fsdp_config.model_dtype=bf16", f"{M}.dtype=bfloat16", name=TINY)
    quietly(f"{A}.fsdp_config.model_dtype=bf16", f"{M}.dtype=bf16", name=TINY)
    quietly("+reward.reward_functions.ocr.weight=1", "reward.functions.ocr=1", name=TINY)


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("setting", "world", "local", "says"),
    [
        ("trainer.n_gpus_per_node=8", "4", "4", "the launcher started 4 processes on this machine.*nproc_per_node 8"),
        ("trainer.nnodes=2", "4", "4", "the launcher started 1 machines.*--nnodes 2"),
        ("trainer.n_gpus_per_node=many", "4", "4", "got 'many'; give a whole number above 0"),
    ],
)
def test_numbers_of_processes_must_agree_with_the_launcher(setting, world, local, says, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert re.search(says, refused(setting, name=TINY))


def test_numbers_of_processes_that_agree_are_ignored(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    (warning,) = said("trainer.n_gpus_per_node=4", "trainer.nnodes=2", name=TINY)
    assert "the launcher started 4 processes" in warning
    assert "the launcher started 2 machines" in warning


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (f"{M}.algorithm=layer_dpo", "cannot work here: .* there are flow_grpo, mix_grpo"),
        (f"{A}.shuffle=True", "cannot work here: mini-batches are whole prompt groups"),
        (f"{A}.optim.optimizer=AdamW8bit", "cannot work here: the optimizer is torch's AdamW"),
        (f"{A}.optim.min_lr_ratio=0.1", "cannot work here"),
        (f"{R}.pipeline.num_frames=81", "cannot work here: images have one frame"),
        (f"{R}.nnodes=1", "cannot work here: .*placement=ray"),
        (f"+{R}.engine_kwargs.vllm_omni.quantization=fp8", "cannot work here: the engine takes its settings"),
        (f"{M}.custom_chat_template=hello", "cannot work here: prompts are given to the pipeline as they are"),
        (f"{M}.tokenizer_path=/elsewhere", "cannot work here: prompts are tokenized"),
        (f"{M}.lora_rank=0", "lora_rank: got 0; a LoRA is what is trained, never all weights: .*all-linear"),
        ("reward.reward_manager.module.path=mine.py", "cannot work here: rewards are one weighted sum"),
        ("reward.reward_model.devicez=[1]", "unknown .*reward_model.devicez; nearest: reward.reward_model.devices"),
        ("reward.reward_model.rollout.temperature=0.7", "cannot work here: .*reward.judge.{temperature,"),
        ("critic.optim.lr=1e-5", "has no meaning here: GRPO has no critic; delete it"),
        ("trainer._target_=os.system", "trainer._target_ has no meaning here: classes are not chosen"),
        ("trainer={_target_: os.system, seed: 3}", "trainer._target_ has no meaning here"),
        ("algorithm.rollout_correction={_target_: verl.X}", "algorithm.rollout_correction._target_ has no meaning"),
        ("hydra.run.dir=x", "hydra.run.dir has no meaning here: .*trainer.default_local_dir; delete it"),
        ("+trainer.defaults=[a]", "trainer.defaults has no meaning here: a defaults list stands at the head"),
        ("sample.num_steps=10", f"write {R}.pipeline.num_inference_steps=10 instead"),
        ("config.sample.num_steps=10", f"write {R}.pipeline.num_inference_steps=10 instead"),
        ("sample.sde_window_range=[0,5]", f"write '{R}.algo.sde_window_range=\\[0,5\\]' instead"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why_in_a_line(setting, says):
    message = refused(setting)
    assert re.search(says, message), message
    assert "\n" not in message


@pytest.mark.parametrize(
    "setting",
    [
        f"{A}.shuffle=False", f"{A}.optim.min_lr_ratio=0.0", "algorithm.trainer_type=policy_gradient",
        f"{A}.diffusion_loss.mix_beta=0.5", f"{A}.optim.total_training_steps=-1",
        f"{M}.extra_tokenizers={{clip: {{path: tokenizer, max_length: 77}}}}", 
        f"{R}.engine_kwargs={{vllm_omni: {{}}}}", "actor_rollout_ref.ref=null", f"{R}.multi_turn={{enable: false}}",
        f"~{A}.fsdp_config.optimizer_offload", f"{M}.override_config={{}}",
        "reward.reward_manager.module.path=pkg://verl_omni.reward_loop.reward_manager",
        f"{A}.optim.use_precision_aware_optimizer=false",
    ],
)  # fmt: skip
def test_values_that_ask_for_what_happens_anyway_are_ignored(setting):
    assert quietly(setting, name=TINY).to_dict() == quietly(name=TINY).to_dict()


def test_all_refusals_are_told_together_and_grouped():
    message = refused(
        "critic.optim.lr=1e-5", "trainer.sead=3", "sample.num_steps=10", f"{R}.algo.sde_window_range=[0,null]",
        "trainer.seed=many", f"{R}.n=1", f"{A}.shuffle=True", "reward.functions.x=big", "trainer.logger=[mlflow]",
        "nonsense", "data.train_files=a,b", "algorithm.rollout_correction.bypass_mode=yes", name=TINY,
    )  # fmt: skip
    lines = message.splitlines()
    assert lines[0] == "the configuration has 12 settings that cannot be used"
    groups = [line.strip().rstrip(":") for line in lines if re.match(r"  \S", line)]
    assert groups == ["delete; they mean nothing here", "write instead", "cannot work here", "unknown", "wrong value"]
    for part in (
        "critic.optim.lr: GRPO has no critic",
        f"{R}.pipeline.num_inference_steps=10  for sample.num_steps=10",
        "trainer.sead; nearest: trainer.seed",
        "sde_window_range: got [0, null]; give a list of whole numbers",
        "trainer.seed: got 'many'",
        f"{R}.n: got 1; GRPO compares",
        "reward.functions: 'x' is not a known reward",
        "algorithm.rollout_correction.bypass_mode must be true or false",
        "trainer.logger: got 'mlflow'",
        "cannot read the override 'nonsense'",
        "data.train_files: got 'a,b', which is a sweep",
    ):
        assert part in message


def test_a_refusal_that_follows_from_another_is_not_told():
    message = refused(f"{R}.pipeline.num_inference_steps=many", f"{R}.algo.sde_window_range=[0,20]")
    assert message.startswith(f"{R}.pipeline.num_inference_steps: got 'many'")
    assert "\n" not in message


def test_a_pasted_override_is_read_back():
    for value in ([0, 5], {"a": 1}, "it's, a [b]", "x=y", "", None, True, 1e-4, "http://host:80/a", "a b", "null"):
        (text,) = shlex.split(override("trainer.experiment_name", value))
        from hydra.core.override_parser.overrides_parser import OverridesParser

        assert OverridesParser.create().parse_override(text).value() == value


# ---------------------------------------------------------------- the page


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from_verl_omni.md").read_text()


def table(heading):
    """Rows of the table under a heading: the cells, and of each what stands in backquotes."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert rows
    return [[cell.strip() for cell in row] for row in rows]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.slow
def test_pairs_of_the_page_configure_the_same_run():
    for there, here in table("What acts through another key"):
        assert quietly(*quoted(there), name=TINY).to_dict() == quietly(*quoted(here), name=TINY).to_dict(), there


@pytest.mark.slow
def test_keys_that_the_page_calls_ignored_are():
    for keys, _ in table("What is ignored"):
        for key in quoted(keys):
            (warning,) = said(f"{key}=3", name=TINY)
            assert key in warning
            assert "cannot change what is learned" in warning


def test_defaults_of_the_page_are_those_of_the_code():
    rows = {quoted(key)[0]: (here, there) for key, here, there in table("Defaults that differ")}
    assert list(rows) == list(other_defaults())
    config = quietly().to_dict()
    for key, (here, there) in rows.items():
        value = config
        for part in key.split("."):
            value = value[part]
        assert (here, there) == ("null" if value is None else str(value), str(other_defaults()[key]))


@pytest.mark.parametrize("heading", ["Rewards", "What cannot run here"])
def test_what_the_page_says_cannot_run_is_refused(heading):
    for there, _ in table(heading):
        assert quoted(there)[0].partition("=")[0] in refused(*quoted(there))


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["Coming from flow_grpo", "Coming from Flow-Factory"])
def test_names_of_other_programs_are_refused_with_what_the_page_says(heading):
    for there, here in table(heading):
        assert find(quoted(there)[0].partition("=")[0]).action == "rename"
        assert f"write {quoted(here)[0]} instead" in refused(*quoted(there))
        quietly(*quoted(here))
