"""Peak resident memory of a run's process: the tiny model, and one of 200 million parameters.

    python benchmarks/run_memory.py                       # this checkout
    python benchmarks/run_memory.py --checkout FOLDER     # another one, to compare with

Each run trains two batches in a process of its own. The first encodes its prompts; the second has them from the first,
where the checkout keeps them. The larger model is the tiny Qwen-Image with a random transformer of 230 million and a
random text encoder of 198 million parameters, saved in float32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = (
    "data.train_batch_size=2",
    "data.train_max_samples=8",
    "data.val_files=null",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.micro_batch_size=4",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
    "trainer.logger=[]",
    "trainer.resume_mode=disable",
)
MIB = 2**20


def save_large(folder: Path) -> None:
    """The tiny Qwen-Image with a large random transformer and text encoder."""
    import torch
    from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    pipe = QwenImagePipeline.from_pretrained(str(ROOT / "assets" / "tiny_qwen_image"))
    config = pipe.text_encoder.config
    text = config.text_config
    text.hidden_size = 1024
    text.intermediate_size = 4096
    text.num_hidden_layers = 13
    text.num_attention_heads = 8
    text.num_key_value_heads = 2
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [16, 24, 24]}
    config.vision_config.out_hidden_size = 1024
    pipe.text_encoder = Qwen2_5_VLForConditionalGeneration(config)
    pipe.transformer = QwenImageTransformer2DModel.from_config(
        dict(pipe.transformer.config)
        | {
            "num_layers": 6,
            "num_attention_heads": 16,
            "attention_head_dim": 64,
            "joint_attention_dim": 1024,
            "axes_dims_rope": (16, 24, 24),
        }
    )
    for name in ("transformer", "text_encoder"):
        print(f"{name}: {sum(p.numel() for p in getattr(pipe, name).parameters()):,} parameters", flush=True)
    pipe.save_pretrained(folder)


def peak(checkout: Path, model: str, folder: Path, rollout_dtype: str) -> float:
    """MiB that one run's process has held at most."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "FLOWGRPO_RC_CACHE": str(folder / "cache"),
    }
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.dtype={rollout_dtype}",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    # In between stands a process of its own, since the peak of a process's children is that of all it has had.
    measured = "import json, resource, subprocess, sys; subprocess.run(json.loads(sys.argv[1]), check=True); "
    measured += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    command = [sys.executable, "-W", "ignore", "-m", "flowgrpo_rc.cli.main", "demo", *OVERRIDES, *overrides]
    done = subprocess.run(
        [sys.executable, "-c", measured, json.dumps(command)],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    unit = 1 if sys.platform == "darwin" else 1024
    return int(done.stdout.split()[-1]) * unit / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose package runs (%(default)s)")
    checkout = parser.parse_args().checkout.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_large(folder / "large")
        for label, model in (("tiny", "asset:tiny_qwen_image"), ("200 M", str(folder / "large"))):
            for dtype in ("float32", "bfloat16"):
                place = folder / f"{label}_{dtype}"
                first, second = (peak(checkout, model, place, dtype) for _ in range(2))
                print(f"{label}, rollouts in {dtype}: {first:.0f} MiB, with prompts encoded {second:.0f}", flush=True)


if __name__ == "__main__":
    main()
