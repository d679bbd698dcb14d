"""Folders of small pipelines without weights: configuration files alone, as plans read them."""

import json
from pathlib import Path

from flowgrpo_rc.paths import shipped
from flowgrpo_rc.planner.pipeline import SHIPPED

QWEN = {
    "num_layers": 6,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "axes_dims_rope": [8, 12, 12],
    "joint_attention_dim": 64,
    "in_channels": 32,
    "out_channels": 8,
}
SD3 = {
    "num_layers": 6,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "caption_projection_dim": 64,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 32,
    "sample_size": 32,
    "dual_attention_layers": [0, 1, 2],
}
FLUX = {
    "num_layers": 3,
    "num_single_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "axes_dims_rope": [8, 12, 12],
    "joint_attention_dim": 128,
    "pooled_projection_dim": 64,
}
PLAIN = {"recompute": False, "reference": False, "detached": False, "accumulates": False}
"""Arguments of an update that does nothing more than learn."""
KL_VAE = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
TINY_VAE = shipped("assets") / "tiny_qwen_image" / "vae" / "config.json"
_SOURCES = {
    "qwen": ("Qwen/Qwen-Image", QWEN),
    "sd3": ("stabilityai/stable-diffusion-3.5-medium", SD3),
    "flux": ("black-forest-labs/FLUX.1-dev", FLUX),
}


def write(folder, family, **changes):
    """A pipeline of ``family`` in ``folder``: the shipped one, cut down, with ``changes`` to its transformer."""
    name, small = _SOURCES[family]
    for file in (SHIPPED / name).rglob("*.json"):
        part = file.parent.name
        content = json.loads(file.read_text())
        if part == "transformer":
            content |= small | changes
        elif part.startswith("text_encoder"):
            continue
        elif part == "vae":  # at full size it is slow, fake or not
            content |= json.loads(TINY_VAE.read_text()) if family == "qwen" else KL_VAE
        elif file.name == "model_index.json":
            content = {key: value for key, value in content.items() if not key.startswith("text_encoder")}
        target = Path(folder) / file.relative_to(SHIPPED / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content))
    return str(folder)


def changed(run, **settings):
    """The run with other settings of ``actor_rollout_ref``, ``__`` for a dot."""
    return run.with_settings({f"actor_rollout_ref.{name.replace('__', '.')}": v for name, v in settings.items()})


DEPTHS = {"num_layers", "num_single_layers", "num_mmdit_layers", "num_single_dit_layers", "n_layers"}
"""Under these names transformers have their numbers of blocks."""


def write_tiny(folder, pipe, *, deeper=False):
    """The configuration files of a pipeline's transformer and VAE; ``deeper``: with five blocks of every kind."""
    pipe.save_config(folder)
    index_file = Path(folder) / "model_index.json"
    index = json.loads(index_file.read_text())
    index_file.write_text(json.dumps({k: v for k, v in index.items() if not k.startswith("text_encoder")}))
    for part in ("transformer", "vae"):
        getattr(pipe, part).save_config(Path(folder) / part)
    if deeper:
        file = Path(folder) / "transformer" / "config.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | dict.fromkeys(DEPTHS & content.keys(), 5)))
    return str(folder)
