"""A prompt writer and the image model, together and alone: the demo's model, several seeds, a second OCR engine.

    python benchmarks/prompt_writer.py --jobs 2 --seeds 1,2,3    # runs what is missing, then prints a table
    python benchmarks/prompt_writer.py --report                  # writes table and figure of docs/prompt_writer.md

Requests are numbers in words. The tiny writer writes four prompts for each of eight requests, and each is drawn three
times, for 60 batches. ``joint`` trains both sides, ``writer`` and ``images`` one of them, and ``shuffled`` both from
rewards that are dealt to the wrong images. The writer samples in bfloat16 and learns in float32, with token weights.
Held-out reward has a rewrite of its own for each image. Final adapters then rewrite and draw the held-out requests in
transformers and diffusers. Resumable, as ``training_runs.py`` says.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cheap_rollouts import FULL
from clean_objectives import SHUFFLED
from learning import COMMON, ROLLOUT, plot_curves
from machine import describe
from second_ocr import second_ocr
from training_runs import (
    HERE,
    Overrides,
    Study,
    by_seed,
    load,
    read_results,
    run_missing,
    study_arguments,
    write_results,
    write_table,
)

RESULTS = HERE / "results" / "prompt_writer.jsonl"
PAGE = HERE.parent / "docs" / "prompt_writer.md"
PLOT = HERE.parent / "docs" / "images" / "prompt_writer.png"
STEPS = 60
EACH = 12
WRITER = "algorithm.prompt_writer"
TINY = "asset:tiny_writer"
BASE: Overrides = FULL | {
    "data.train_files": "asset:tiny_requests/train.jsonl",
    "data.val_files": "asset:tiny_requests/test.jsonl",
    f"{ROLLOUT}.n": 3,
    f"{WRITER}.path": TINY,
    f"{WRITER}.rewrites": 4,
    f"{WRITER}.lora_rank": 8,
    f"{WRITER}.lora_alpha": 16,
    f"{WRITER}.max_new_tokens": 40,
    f"{WRITER}.actor.optim.lr": 2e-3,
    f"{WRITER}.actor.rollout_correction.rollout_is": "token",
    f"{WRITER}.actor.rollout_correction.rollout_is_threshold": 2.0,
}
SETTINGS: dict[str, Overrides] = {
    "joint": BASE,
    "writer": BASE | {f"{WRITER}.learns": "writer"},
    "images": BASE | {f"{WRITER}.learns": "images"},
    "shuffled": BASE | SHUFFLED,
}
SHOWN = {
    "joint": ("both", "#08519c"),
    "writer": ("the writer alone", "#f4a582"),
    "images": ("the image model alone", "#4d4d4d"),
    "shuffled": ("both, rewards dealt to the wrong images", "#c51b8a"),
}
"""Settings of the figure, with their labels and colours."""
UNTRAINED = "untrained"
HEADER = (
    "| what learns | held out after 20, 40, 60 batches, by seed | right rewrites | read right (own OCR / tesseract) |"
    "\n|---|---|---|---|"
)


def study() -> Study:
    return Study(SETTINGS, COMMON | {"trainer.test_freq": 5}, RESULTS, STEPS, lambda folder: {"drawn": drawn(folder)})


def requests() -> list[dict[str, str]]:
    """The held-out requests, ``EACH`` times."""
    from flowgrpo_rc.paths import resolve_asset

    lines = Path(resolve_asset("asset:tiny_requests/test.jsonl")).read_text().splitlines()
    return [json.loads(line) for line in lines] * EACH


def drawn(folder: Path | None) -> dict[str, Any]:
    """Share of right rewrites of a run's writer, and both engines' readings of what its image model draws of them;
    ``None``: of neither's training."""
    asked = requests()
    writer = None if folder is None or not (folder / "writer").is_dir() else folder / "writer"
    texts = rewrites(writer, [row["prompt"] for row in asked])
    targets = [row["ocr_target"] for row in asked]
    right = fmean(text == f'the text "{target}"' for text, target in zip(texts, targets, strict=True))
    lora = None if folder is None or not (folder / "lora").is_dir() else folder / "lora"
    read = second_ocr(lora, targets, written=texts)
    return {"right": right, "examples": texts[:20]} | read


def rewrites(adapter: Path | None, asked: Sequence[str]) -> list[str]:
    """A rewrite of each request at temperature 1, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flowgrpo_rc.paths import resolve_asset

    folder = resolve_asset(TINY)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        network.load_adapter(str(adapter))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    torch.manual_seed(0)
    for request in asked:
        message = [{"role": "user", "content": request}]
        given = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = network.generate(**given, do_sample=True, top_k=0, max_new_tokens=40)
        texts.append(tokenizer.decode(written[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return texts


def main() -> int:
    arguments = study_arguments(__doc__, SETTINGS)
    if not arguments.report:
        if not load([UNTRAINED], RESULTS):
            row = {"setting": UNTRAINED, "seed": 0, "overrides": [], "drawn": drawn(None), "machine": describe()}
            write_results(RESULTS, [*read_results(RESULTS), row])
        failed = run_missing(study(), arguments.only, arguments.seeds, arguments.jobs)
        print(table(load([UNTRAINED, *SETTINGS], RESULTS)))
        return 1 if failed else 0
    runs = load([UNTRAINED, *SETTINGS], RESULTS)
    write_table(PAGE, RESULTS, table(runs))
    plot_curves(runs, {name: how for name, how in SHOWN.items() if name in runs}, PLOT, unit="batches")
    return 0


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each setting."""
    lines = [HEADER]
    for setting, group in runs.items():
        trained = [run for run in group if "held_out" in run]
        read = {name: fmean(run["drawn"][name] for run in group) for name in ("reward_engine_exact", "tesseract_exact")}
        cells = [
            by_seed([run["held_out"][step] for step in ("20", "40", "60")] for run in trained),
            f"{fmean(run['drawn']['right'] for run in group):.2f}",
            f"{read['reward_engine_exact']:.2f} / {read['tesseract_exact']:.2f}",
        ]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
