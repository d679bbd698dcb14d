"""The full-size scripts, each run for a step with a tiny model of the family in place of its own, or composed.

Every setting of the real script stays; what is substituted comes on top, as a user's own overrides do.
"""

import json
import os
import subprocess

import pytest
from PIL import Image
from tests_support import EXAMPLES, arguments_of, given_by
from tiny_families import TINY

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.rollout.build import check_placement
from flowgrpo_rc.rollout.config import Share

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
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("TRAIN", "VAL")}
    choices = {
        "MODEL": str(tmp_path / "model"),
        "OUTPUTS": str(tmp_path / "out"),
        "NUM_GPUS": "1",
        "ENGINE": "diffusers",
    }
    script = f"run_{name.removesuffix('_base')}_lora_rollout_corr.sh"
    _, given = arguments_of(script, tmp_path, "python", **files, **choices, **environment)
    height, width = family.sizes[0]
    sizes = [f"{ROLLOUT}.pipeline.height={height}", f"{ROLLOUT}.pipeline.width={width}"]
    sizes.append(f"{ROLLOUT}.pipeline.max_sequence_length={family.length}")
    if name == "flux2_dev":
        sizes.append("actor_rollout_ref.actor.fsdp_config.shard=False")  # which takes several processes
    if family.reference_area is not None:
        sizes.append(f"{ROLLOUT}.pipeline.reference_area={family.reference_area}")
    assert main(["train", *given, *SMALL, *sizes]) == 0
    run = tmp_path / "out" / "flow_grpo" / f"{name}_lora_rollout_corr"
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert step["reward/group_std_mean"] > 0
    assert step["actor/grad_norm"] > 0


def test_the_full_size_script_puts_its_engines_on_the_cluster(tmp_path):
    choices = {"ENGINE": "diffusers", "NUM_GPUS": "4", "ENGINES": "2", "ADDRESS": "node0:6379", "MODEL": "folder"}
    launch, overrides = arguments_of("run_qwen_image_ray.sh", tmp_path, "torchrun", **choices)
    assert launch[:3] == ["--standalone", "--nproc_per_node", "4"]
    rollout = compose("flowgrpo_trainer", overrides).actor_rollout_ref.rollout
    assert (rollout.placement, rollout.engines, rollout.ahead) == ("ray", 2, 1)
    assert (rollout.ray.address, rollout.ray.num_gpus) == ("node0:6379", 1.0)
    check_placement(rollout, Share(3, 4))


def test_the_tiny_script_has_two_engines_on_ray(tmp_path):
    command, *overrides = given_by(EXAMPLES / "run_tiny_qwen_image_ray.sh", tmp_path, "trainer.total_training_steps=2")
    assert command == "demo"
    config = compose("tiny_qwen_image_ocr", overrides)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.placement, rollout.engines, rollout.ahead, rollout.ray.num_gpus) == ("ray", 2, 1, 0.0)
    assert config.trainer.total_training_steps == 2
    check_placement(rollout, Share(0, 1))


@pytest.mark.parametrize(
    ("command", "program", "words"),
    [
        ("plan --gpus 4x80", "python", ["plan", "--gpus", "4x80"]),
        ("probe", "torchrun", ["probe"]),
        ("train", "torchrun", ["train"]),
    ],
)
def test_a_script_gives_its_settings_to_another_command(command, program, words, tmp_path):
    """A plan is one process, also where the run would be four."""
    write_arguments = tmp_path / program
    said = tmp_path / "said"
    write_arguments.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {said}\n')
    write_arguments.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ENGINE": "diffusers", "MODEL": "folder"}
    environment |= {"COMMAND": command, "NUM_GPUS": "4"}
    script = EXAMPLES / "run_flux1_dev_lora_rollout_corr.sh"
    subprocess.run(["bash", str(script), "trainer.seed=7"], env=os.environ | environment, check=True)
    _, _, given = said.read_text().removesuffix("\0").partition("flowgrpo_rc.cli.main\0")
    given = given.split("\0")
    assert given[: len(words)] == words
    assert given[-1] == "trainer.seed=7"
    assert "actor_rollout_ref.model.path=folder" in given
