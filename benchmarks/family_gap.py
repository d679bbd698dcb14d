"""The cost of rounding alone for each model family: ``flowgrpo-rc probe`` on the tiny pipelines of the tests.

    python benchmarks/family_gap.py                        # bfloat16, fp8, and what of it is the timestep's
    python benchmarks/family_gap.py --engine vllm_omni     # with the Python of `make vllm`: bfloat16 through vllm-omni
    python benchmarks/family_gap.py --only qwen_image_edit # likewise, for Qwen-Image-Edit, which needs torchvision
    python benchmarks/family_gap.py --report               # writes the table of docs/families.md; runs nothing
    python benchmarks/family_gap.py --round-timestep -m flowgrpo_rc.cli.main probe <arguments>

The actor computes in float32 and bypass mode is judged at a clip of 1e-3. The pipelines have random weights and one or
two blocks, so that the figures compare families and ways of rounding; a released model has its own. Some families
round the timestep, and a guidance scale that is embedded, before they embed them. ``--round-timestep`` runs a command
whose engine rounds these to bfloat16 and nothing else, so that this part of the gap is seen alone; what is left without
it is measured with ``model.timestep_dtype=rollout``. Resumable: what the results hold is not run again.
"""

import argparse
import copy
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe
from training_runs import COMMAND, write_table

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path.insert(0, str(TESTS))
RESULTS = HERE / "results" / "family_gap.jsonl"
PAGE = HERE.parent / "docs" / "families.md"
TIMESTEP = "timestep"
"""A rollout in float32 but for its timesteps."""
SAME_TIMESTEP = "bfloat16 same timestep"
"""A rollout in bfloat16, whose timesteps the actor embeds too."""
ROLLOUT = "actor_rollout_ref.rollout"
AS_ROLLOUT = "actor_rollout_ref.model.timestep_dtype=rollout"
PRECISIONS = {
    "bfloat16": [f"{ROLLOUT}.dtype=bfloat16"],
    SAME_TIMESTEP: [f"{ROLLOUT}.dtype=bfloat16", AS_ROLLOUT],
    "fp8": [f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.quantization=fp8_emulated"],
    TIMESTEP: [f"{ROLLOUT}.dtype=float32"],
}
UNAVAILABLE = ("rollout.name=vllm_omni draws", "needs torchvision")
"""Of refusals that leave a cell empty: another engine or environment has it."""
COLUMNS = {
    "bfloat16": "bfloat16",
    SAME_TIMESTEP: "bfloat16, same timestep",
    TIMESTEP: "timestep alone",
    "fp8": "fp8",
    "vllm_omni bfloat16": "vllm-omni, bfloat16",
    f"vllm_omni {SAME_TIMESTEP}": "vllm-omni, same timestep",
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("diffusers", "vllm_omni"), default="diffusers")
    parser.add_argument("--only", default="", help="families whose name holds this text")
    parser.add_argument("--report", action="store_true", help="write the table; runs nothing")
    arguments = parser.parse_args()
    if not arguments.report:
        measure(arguments.engine, arguments.only)
    write_table(PAGE, RESULTS, table(read()))


def read() -> dict[tuple[str, str], dict[str, Any]]:
    """The results, by family and way of rounding."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {(row["family"], row["rounding"]): row for row in map(json.loads, lines)}


def measure(engine: str, only: str) -> None:
    """Probe what the results lack, and add it to them."""
    from tiny_families import TINY

    found = read()
    commit = describe()["commit"]
    for family in (name for name in TINY if only in name):
        told_rounded = rounds(family)
        roundings = {k: v for k, v in PRECISIONS.items() if told_rounded or k not in (TIMESTEP, SAME_TIMESTEP)}
        if engine == "vllm_omni":
            own = ("bfloat16", SAME_TIMESTEP)
            roundings = {f"{engine} {k}": [*v, f"{ROLLOUT}.name={engine}"] for k, v in roundings.items() if k in own}
        for rounding, overrides in roundings.items():
            if (family, rounding) in found:
                continue
            probe_json = probe(family, rounding, overrides)
            if probe_json is None:
                continue
            row = {"family": family, "rounding": rounding, **kept(probe_json), "commit": commit}
            found[family, rounding] = row
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                family,
                rounding,
                f"{row['gap']:.2e}",
                f"drift {row['drift']:.4f}",
                row["clip"] or "decoupled",
                flush=True,
            )


def rounds(family: str) -> bool:
    """True if a transformer of the family in bfloat16 embeds other timesteps than one in float32."""
    import torch
    from tiny_families import TINY

    from flowgrpo_rc.models import Conditioning, load_model
    from flowgrpo_rc.models.prompts import pad

    with tempfile.TemporaryDirectory() as folder:
        TINY[family].build().save_pretrained(folder)
        model = load_model(folder)
    timesteps = torch.full((1,), 501.0)
    cond = Conditioning(pad([model.blank_prompt()]), None, 1.0, None, model.smallest_image, model.smallest_image)
    told, _ = model.as_embedded(timesteps, cond, torch.bfloat16)
    return not torch.equal(told, timesteps)


def probe(family: str, rounding: str, overrides: list[str]) -> dict[str, Any] | None:
    """The ``probe.json`` of a family's tiny pipeline; None where it cannot be drawn in this environment."""
    from tiny_families import TINY, run_overrides

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        TINY[family].build().save_pretrained(folder / "model")
        program = [*COMMAND, "probe"]
        if rounding == TIMESTEP:
            program = [str(Path(__file__)), "--round-timestep", *program]
        own = [
            one
            for one in run_overrides(family, str(folder / "model"), folder / "data")
            if not one.startswith(f"{ROLLOUT}.dtype")
        ]
        done = subprocess.run(
            [
                *(sys.executable, *program, "--config-name", "tiny_qwen_image_ocr", "--out", str(folder / "out")),
                *own,
                *overrides,
                "actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-3",
                "algorithm.rollout_correction.bypass_mode=true",
                "reward.functions.ocr=0",
                f"reward.custom_reward_function.path={TESTS / 'brightness_reward.py'}",
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "FLOWGRPO_RC_CACHE": str(folder / "cache")},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        if done.returncode == 2 and any(reason in done.stderr for reason in UNAVAILABLE):
            return None
        if done.returncode not in (0, 3, 4):
            raise RuntimeError(f"{family}, {rounding}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return json.loads((folder / "out" / "probe.json").read_text())


def kept(found: dict[str, Any]) -> dict[str, Any]:
    """The part of a ``probe.json`` that the results keep."""
    drift = next((one["value"] for one in found["advice"]["judged"] if one["what"] == "drift"), 0.0)
    overall = found["overall"]
    return {
        "gap": overall["abs_mean"],
        "nats": overall["nats"],
        "outside": overall["clipped"],
        "drift": drift,
        "verdict": found["advice"]["verdict"],
        "clip": found["advice"]["clip_ratio"] if found["advice"]["mode"] == "bypass" else None,
        "images": found["images"],
    }


def table(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    """A row a family, and for each way of rounding the mean absolute log ratio, the drift and the clip that follows."""
    lines = [f"| tiny pipeline | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in dict.fromkeys(name for name, _ in found):
        cells = [cell(found.get((family, rounding))) for rounding in COLUMNS]
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: dict[str, Any] | None) -> str:
    """``gap; drift; clip``, or nothing."""
    if row is None:
        return ""
    clip = "decoupled" if row["clip"] is None else f"{row['clip']:g}"
    return f"{row['gap']:.1e}; {row['drift']:.4f}; {clip}"


def run_with_rounded_timesteps(program: list[str]) -> None:
    """Run ``program``, whose rollouts embed timesteps and guidance scale as in bfloat16."""
    import torch

    from flowgrpo_rc.rollout import diffusers_engine

    own_sampler = diffusers_engine.RequestSampler

    def sampler(model: Any, *arguments: Any) -> Any:
        rounding = copy.copy(model)

        def velocity(transformer: Any, latents: Any, timesteps: Any, conditioning: Any) -> Any:
            told = model.as_embedded(timesteps, conditioning, torch.bfloat16)
            return model.velocity(transformer, latents, *told)

        rounding.velocity = velocity
        return own_sampler(rounding, *arguments)

    diffusers_engine.RequestSampler = sampler
    sys.argv = program[1:] if program[0] == "-m" else program
    runpy.run_module(program[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--round-timestep"]:
        run_with_rounded_timesteps(sys.argv[2:])
    else:
        main()
