"""Metrics rows and run folders made by hand."""

import copy
import json

import yaml
from PIL import Image

from flowgrpo_rc.report import check_health

CONFIG = {
    "algorithm": {"rollout_correction": {"bypass_mode": True, "rollout_is": None}},
    "data": {"train_batch_size": 8},
    "actor_rollout_ref": {
        "model": {"path": "asset:tiny_qwen_image", "dtype": "float32"},
        "actor": {"diffusion_loss": {"loss_mode": "flow_grpo", "clip_ratio": 1e-3, "clip_ratio_low": None}},
        "rollout": {
            "name": "diffusers",
            "dtype": "bfloat16",
            "quantization": None,
            "adapter_lag": 0,
            "n": 12,
            "algo": {"sde_type": "sde", "sde_window_size": 2},
            "pipeline": {"num_inference_steps": 6},
        },
    },
    "trainer": {"total_training_steps": 30, "mixed_precision": "no"},
}
"""Bypass mode on SDE steps, clip 1e-3."""

HEALTHY = {
    "reward/mean": 0.7,
    "reward/std": 0.35,
    "reward/zero_std_fraction": 0.1,
    "actor/pg_clipfrac_first": 0.01,
    "actor/pg_clipfrac": 0.02,
    "actor/pg_clipfrac_inert": 0.01,
    "actor/log_ratio_abs_mean_first": 2e-4,
    "actor/kept_fraction": 0.98,
    "actor/grad_norm": 0.02,
    "actor/ppo_kl": 3e-5,
    "rollout_sync/engine_gap_abs_mean": 2e-4,
    "rollout_sync/engine_gap_abs_mean/ts_1000": 1e-4,
    "rollout_sync/engine_gap_abs_mean/ts_500": 4e-4,
    "rollout_sync/staleness_abs_mean": 0.0,
    "rollout_corr/logprob_abs_diff_mean": 2e-4,
    "rollout_corr/logprob_abs_diff_max": 1e-3,
    "rollout_corr/rollout_is_mean": 1.0,
    "rollout_corr/rollout_is_min": 0.999,
    "rollout_corr/rollout_is_max": 1.001,
    "rollout_corr/rollout_is_eff_sample_size": 0.99,
    "timing_s/rollout": 1.0,
    "timing_s/step": 2.0,
}


def rows(count=30, **changes):
    """``count`` healthy rows; each change is a value or a function of the step, with ``__`` for ``/``."""
    made = []
    for step in range(1, count + 1):
        row = {"step": step, **HEALTHY}
        for name, value in changes.items():
            row[name.replace("__", "/")] = value(step) if callable(value) else value
        made.append(row)
    return made


def settings(**changes):
    """``CONFIG`` with dotted settings changed, ``__`` for a dot."""
    made = copy.deepcopy(CONFIG)
    for name, value in changes.items():
        *path, last = name.split("__")
        node = made
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return made


def folder(root, made, config=CONFIG, tail=""):
    """A run folder of these rows, with two sample grids."""
    (root / "samples").mkdir(parents=True)
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made) + tail)
    if config is not None:
        (root / "config.yaml").write_text(yaml.safe_dump(config))
    for step, colour in ((0, "white"), (made[-1]["step"], "orange")):
        Image.new("RGB", (1256, 200), colour).save(root / "samples" / f"step_{step:05d}.png")
    return root


def found(made, config, check):
    """The finding of one check; None if it was left out."""
    return next((f for f in check_health(made, config) if f.check == check), None)


COLLAPSING = {
    "actor__pg_clipfrac_first": 0.33,
    "actor__log_ratio_abs_mean_first": 9e-4,
    "rollout_sync__engine_gap_abs_mean/ts_500": 1.6e-3,
    "reward__mean": lambda step: 0.65 - 0.004 * step,
    "val__reward/mean": lambda step: 0.65 - 0.004 * step,
}
"""Changes that make ``rows`` those of fp8 rollouts under too narrow a clip."""
