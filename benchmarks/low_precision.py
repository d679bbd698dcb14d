"""An actor in bfloat16 with its LoRA's products in float32 or in bfloat16, and a base in 8 or 4 bits.

    python benchmarks/tiny_sd3.py                               # once: the second model
    python benchmarks/low_precision.py --jobs 2 --seeds 1,2,3   # runs what is missing, then prints a table
    python benchmarks/low_precision.py --report                 # writes docs/low_precision.md's table; runs nothing

Settings, batches and learning rate are the gap study's in bypass mode. The LoRA's weights are float32 in all of them.
``float32`` has engine and actor in float32, ``engine_bfloat16`` the engine in bfloat16; ``lora_float32`` and
``lora_bfloat16`` have both in bfloat16, and the LoRA's products as they say; ``int8``, ``fp8`` and ``nf4`` are
``lora_bfloat16`` with such a base (``make quantization`` installs what rounds it). ``engine_int8`` and
``engine_merged`` are ``lora_bfloat16`` with such an engine. The last part of a name is the clip.
Resumable, as ``training_runs.py`` says.
"""

import sys
from statistics import fmean
from typing import Any

from gap_study import BYPASS
from learning import COMMON, LOSS, ROLLOUT
from sd3_ground import MODEL
from training_runs import HERE, Overrides, Study, study_main

from flowgrpo_rc.models.config import BASE_QUANTIZATIONS

RESULTS = HERE / "results" / "low_precision.jsonl"
PAGE = HERE.parent / "docs" / "low_precision.md"
STEPS = 60
ACTOR = "actor_rollout_ref.model"
BFLOAT16: Overrides = {f"{ROLLOUT}.dtype": "bfloat16", f"{ACTOR}.dtype": "bfloat16"}
PRECISIONS: dict[str, Overrides] = {
    "float32": {f"{ROLLOUT}.dtype": "float32"},
    "engine_bfloat16": {f"{ROLLOUT}.dtype": "bfloat16"},
    "lora_float32": BFLOAT16 | {f"{ACTOR}.lora_compute_dtype": "float32"},
    "lora_bfloat16": BFLOAT16,
    **{name: BFLOAT16 | {f"{ACTOR}.quantization": name} for name in BASE_QUANTIZATIONS},
}
ENGINES: dict[str, Overrides] = {
    "engine_int8": BFLOAT16 | {f"{ROLLOUT}.quantization": "int8"},
    "engine_merged": BFLOAT16 | {f"{ROLLOUT}.merge_adapter": True},
}
CLIPS: dict[str, Any] = {"1e-4": 1e-4, "1e-3": 1e-3, "auto": "auto"}
SETTINGS: dict[str, Overrides] = {
    f"{model}_{name}_{clip}": BYPASS | own | settings | {f"{LOSS}.clip_ratio": CLIPS[clip]}
    for model, own in {"demo": {}, "sd3": MODEL}.items()
    for kinds, clips in ((PRECISIONS, ("1e-4", "1e-3")), (ENGINES, ("1e-3", "auto")))
    for clip in clips
    for name, settings in kinds.items()
}
HEADER = (
    "| setting | gap before an update | outside the clip | held out at the end, by seed | mean |\n|---|---|---|---|---|"
)


def main() -> int:
    return study_main(__doc__, Study(SETTINGS, COMMON, RESULTS, STEPS), PAGE, table)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        ends = [run["final_held_out"] for run in group]
        lines.append(
            f"| `{setting}` | {fmean(run['gap'] for run in group):.1e} "
            f"| {fmean(run['clip_fraction'] for run in group):.2f} | {', '.join(f'{end:.2f}' for end in ends)} "
            f"| {fmean(ends):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
