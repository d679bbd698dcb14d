"""Values as other trainers spell them: of keys that they share with this package, and of those that moved here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo_rc import dtypes
from flowgrpo_rc.loss import objectives
from flowgrpo_rc.trainer.config import LOGGERS

A, R, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
"""The sections of actor, rollout and model, as the tables shorten them."""

DROP = object()
"""The value that leaves a key out."""

DTYPES: Mapping[Any, str] = {
    **{spelling: name for name, dtype in dtypes.DTYPES.items() for spelling in dtype.spellings},
    **{name: name for name in dtypes.DTYPES},
}
"""Spellings of a precision, to the one here."""
AUTOCAST: Mapping[Any, str] = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "no", None, False), "no"),
    True: "bf16",
}
"""Precision of an engine's forward, to ``trainer.mixed_precision``."""


def _algorithm(objective: objectives.Objective) -> Mapping[str, Any]:
    """The keys here that make up verl-omni's algorithm of an objective's name."""
    loss = {} if objective.name == objectives.DEFAULT else {f"{A}.diffusion_loss.loss_mode": objective.name}
    return loss if objective.sde_type is None else {**loss, f"{R}.algo.sde_type": objective.sde_type}


ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    objectives.DEFAULT: {},
    "mix_grpo": {f"{R}.algo.sample_strategy": "progressive"},
    **{name: _algorithm(objective) for name, objective in objectives.OBJECTIVES.items()},
}
"""``actor_rollout_ref.model.algorithm`` of verl-omni, and the keys that make it up here."""
MAY_DIFFER = (f"{R}.algo.sample_strategy",)
"""Keys of those that verl-omni lets stand beside any algorithm, so that a value of its own wins."""

MULTI_PLACEHOLDER = ("pkg://verl_omni.reward_loop.reward_manager.multi", "_multi_reward_placeholder")
"""Path and name of the function that verl-omni's scripts with several rewards give, which is never called."""

SPELLINGS: Mapping[str, tuple[Mapping[Any, Any], str]] = {
    f"{M}.dtype": (DTYPES, ""),
    f"{M}.lora_dtype": ({**DTYPES, None: "float32"}, ""),
    f"{M}.lora_rank": ({None: 0}, ""),  # full-parameter training, which is refused with its reason
    f"{R}.dtype": (DTYPES, ""),
    "trainer.mixed_precision": (AUTOCAST, ""),
    "data.train_max_samples": ({-1: None}, "all"),
    "data.val_max_samples": ({-1: None}, "all"),
    "data.seed": ({None: DROP}, "any order will do, so it is the default's"),
    "trainer.total_training_steps": ({-1: None}, "total_epochs decides"),
    "trainer.max_actor_ckpt_to_keep": ({-1: None, 0: None}, "all"),
    f"{A}.optim.lr_warmup_steps": ({-1: 0, None: 0}, "lr_warmup_steps_ratio decides"),
    "reward.custom_reward_function.path": ({MULTI_PLACEHOLDER[0]: DROP}, "reward.reward_functions are the rewards"),
    "reward.custom_reward_function.name": ({MULTI_PLACEHOLDER[1]: DROP}, "reward.reward_functions are the rewards"),
    "trainer.device": ({"cuda": "auto"}, "an accelerator if there is one"),
    "trainer.resume_mode": ({"enable": "auto"}, "from the latest checkpoint if there is one"),
    "trainer.logger": ({name: [name] for name in LOGGERS}, ""),
    "algorithm.adv_estimator": (
        dict.fromkeys(ALGORITHMS.keys() - {objectives.DEFAULT}, objectives.DEFAULT),
        "the advantage is the same in all of them",
    ),
}
"""Values of keys that exist here too, as other trainers spell them, with what they mean."""

VERL_OMNI_SCORERS: Mapping[str, str] = {
    "jpeg_compressibility": "jpeg_compressibility",
    "pickscore_reward": "pickscore",
    "genrm_ocr": "judge",
    "unified_reward": "judge",
}
"""Files of verl-omni's ``verl_omni/utils/reward_score``, and the built-in rewards that score alike."""
JUDGE_QUESTIONS: Mapping[str, str] = {"genrm_ocr": "ocr", "unified_reward": "unified_reward_2"}
"""Those of them that ask a model, and the judge's question that does the same."""
NO_SCORER = (
    "verl-omni's file is not there, and no built-in reward scores as it does; give the path of a copy, a function of "
    "your own, or where text is read reward.functions.ocr=1, which compares in the same way what an OCR engine reads"
)
"""Why a file of verl-omni's that is none of these is refused."""

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
