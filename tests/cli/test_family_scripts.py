"""The full-size scripts of the families, each run for a step with a tiny model of the family in place of its own.

Every setting of the real script stays; what is substituted comes on top, as a user's own overrides do.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from tiny_families import TINY

from flowgrpo_rc.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "flowgrpo_trainer"
ROLLOUT = "actor_rollout_ref.rollout"
SMALL = (
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.probe.images=0",
    f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps=2",
    f"{ROLLOUT}.val_kwargs.pipeline.height=null",
    f"{ROLLOUT}.val_kwargs.pipeline.width=null",
    *(f"reward.{name}.model_path=asset:tiny_clip" for name in ("pickscore", "clip_cosine", "clip_similarity")),
    "trainer.total_training_steps=1",
    "trainer.logger=[console]",
    "trainer.device=cpu",
)
SCRIPTS = {
    "flux1_dev": ("flux_dev", {}),
    "flux1_schnell": ("flux_schnell", {}),
    "flux1_kontext": ("flux_kontext", {}),
    "flux2_dev": ("flux2_dev", {}),
    "flux2_klein": ("flux2_klein", {}),
    "flux2_klein_base": ("flux2_klein", {"BASE": "1"}),
    "z_image": ("z_image", {}),
    "z_image_turbo": ("z_image", {}),
    "qwen_image_edit_plus": ("qwen_image_edit_plus", {}),
}
"""Name of the script's run -> the tiny family, and the variables that it takes besides."""


def arguments_of(name, tmp_path, model, environment):
    """What the script hands to ``flowgrpo-rc``."""
    said = tmp_path / "arguments.json"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nfor given; do printf '%s\\0' \"$given\"; done > '{said}'\n")
    python.chmod(0o755)
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("TRAIN", "VAL")}
    choices = {"MODEL": model, "OUTPUTS": str(tmp_path / "out"), "NUM_GPUS": "1", "ENGINE": "diffusers"}
    path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    script = EXAMPLES / f"run_{name.removesuffix('_base')}_lora_rollout_corr.sh"
    subprocess.run(["bash", str(script)], env=os.environ | path | files | choices | environment, check=True)
    module, *given = said.read_text().removesuffix("\0").split("\0")[1:]
    assert module == "flowgrpo_rc.cli.main"
    return given


def write_prompts(tmp_path, images):
    if images:
        Image.new("RGB", images[0], (90, 90, 90)).save(tmp_path / "grey.png")
    rows = [{"prompt": f"a sign that says {n}"} | ({"images": "grey.png"} if images else {}) for n in range(2)]
    for split in ("TRAIN", "VAL"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:given more than once")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_family(name, tmp_path):
    tiny, environment = SCRIPTS[name]
    family = TINY[tiny]
    family.before_loading()
    family.build().save_pretrained(tmp_path / "model")
    write_prompts(tmp_path, family.images)
    command, *given = arguments_of(name, tmp_path, str(tmp_path / "model"), environment)
    settings = [override.split("=")[0] for override in given]
    assert len(set(settings)) == len(settings)
    height, width = family.sizes[0]
    sizes = [f"{ROLLOUT}.pipeline.height={height}", f"{ROLLOUT}.pipeline.width={width}"]
    sizes.append(f"{ROLLOUT}.pipeline.max_sequence_length={family.length}")
    if name == "flux2_dev":
        sizes.append("actor_rollout_ref.actor.fsdp_config.shard=False")  # which takes several processes
    if family.reference_area is not None:
        sizes.append(f"{ROLLOUT}.pipeline.reference_area={family.reference_area}")
    assert main([command, *given, *SMALL, *sizes]) == 0
    run = tmp_path / "out" / "flow_grpo" / f"{name}_lora_rollout_corr"
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert step["reward/group_std_mean"] > 0
    assert step["actor/grad_norm"] > 0
