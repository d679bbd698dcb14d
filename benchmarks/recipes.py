"""Plans of the scripts that docs/recipes.md describes: memory, seconds of a step and hours, on several machines.

    python benchmarks/recipes.py                     # writes results/recipes.json; minutes, no GPU, no network

Settings are those that a script gives its program. Where the package has no configuration files of a model, those of
the model with the same architecture are planned under the other pipeline's class.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
PIPELINES = ROOT / "flowgrpo_rc" / "planner" / "pipelines"
MACHINES = "4x80,8x80,4x48,4x24,1x24"
STAND_INS = {
    "flux1_kontext_lora": ("black-forest-labs/FLUX.1-dev", "FluxKontextPipeline", {}),
    "z_image_lora": ("Tongyi-MAI/Z-Image-Turbo", "ZImagePipeline", {}),
    "qwen_image_edit_plus_lora": (
        "Qwen/Qwen-Image",
        "QwenImageEditPlusPipeline",
        {"processor": ["transformers", "Qwen2VLProcessor"]},
    ),
}
"""Script -> pipeline whose files are taken, the class that the script trains, and entries that it has besides."""
RECIPES = (
    "qwen_image_ocr_lora",
    "sd35_medium_ocr_lora",
    "flux1_dev_lora",
    "flux1_schnell_lora",
    "z_image_lora",
    "z_image_turbo_lora",
    "flux1_kontext_lora",
    "qwen_image_edit_plus_lora",
)


def stand_in(recipe: str, folder: Path) -> str:
    """A folder with the configuration files of the pipeline that stands in."""
    source, name, more = STAND_INS[recipe]
    shutil.copytree(PIPELINES / source, folder)
    for file in folder.rglob("config.json"):
        values = json.loads(file.read_text())
        base = values.pop("_same_as", None)
        shared = json.loads((PIPELINES / base / "config.json").read_text()) if base else {}
        file.write_text(json.dumps(shared | values))
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": name} | more))
    return str(folder)


def settings_of(recipe: str, folder: Path, **environment: str) -> list[str]:
    """The overrides that the script gives to ``train``."""
    said = folder / "arguments"
    program = folder / "torchrun"
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{said}'\n")
    program.chmod(0o755)
    script = ROOT / "examples" / "flowgrpo_trainer" / f"run_{recipe}_rollout_corr.sh"
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "ENGINE": "diffusers", "NUM_GPUS": "4"}
    subprocess.run(["bash", str(script)], env=os.environ | own | environment, check=True, stdout=subprocess.DEVNULL)
    given = said.read_text().removesuffix("\0").split("\0")
    return given[given.index("train") + 1 :]


def plan(settings: list[str]) -> dict[str, dict[str, object]]:
    """Figures by machine, read from what ``flowgrpo-rc plan`` prints."""
    command = [sys.executable, "-m", "flowgrpo_rc.cli.main", "plan", "--gpus", MACHINES, *settings]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    found: dict[str, dict[str, object]] = {}
    for part in text.split("parameters (")[1:]:
        figures = re.search(r"Verdict: (fits|does NOT fit) (\d+) x (\d+) GB: ([\d.]+) of", part)
        seconds = re.search(r"total (\d+) s", part)
        assert figures is not None
        assert seconds is not None
        fits, count, size, gib = figures.groups()
        changes = re.findall(r"^  actor_rollout_ref\.([\w.=]+): ([\d.]+) GiB", part, re.M)
        found[f"{count}x{size}"] = {
            "fits": fits == "fits",
            "gib": float(gib),
            "seconds": int(seconds[1]),
            "changes": [{"setting": setting, "gib": float(then)} for setting, then in changes],
        }
    return found


def main() -> None:
    recipes = {}
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            environment = {"MODEL": stand_in(recipe, folder / "model")} if recipe in STAND_INS else {}
            settings = settings_of(recipe, folder, **environment)
            steps = next(int(s.partition("=")[2]) for s in settings if s.startswith("trainer.total_training_steps="))
            recipes[recipe] = {"steps": steps, "machines": plan(settings)}
        print(recipe, recipes[recipe], flush=True)
    RESULTS.write_text(json.dumps({"machine": describe(), "recipes": recipes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
