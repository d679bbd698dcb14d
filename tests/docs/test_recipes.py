"""The tables of docs/recipes.md and docs/weights.md: figures of the plans, and limits of the report."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from flowgrpo_rc.planner.pipeline import FakePipeline, parameters_of
from flowgrpo_rc.report.checks_gap import GAP_LIMITS
from flowgrpo_rc.report.checks_learning import LEARNING_LIMITS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
PLANS = json.loads((ROOT / "benchmarks" / "results" / "recipes.json").read_text())["recipes"]


def table(page, name):
    """Cells of the rows of a table between its two comments, code quotes taken off."""
    text = page.partition(f"<!-- table of {name} -->\n")[2].partition("<!-- end of the table -->")[0]
    rows = [row for row in text.splitlines() if row.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_hours_and_memory_are_those_of_the_plans():
    words = {True: "yes", False: "with changes"}
    rows = table(PAGE, "recipes.json")
    assert [row[0] for row in rows] == list(PLANS)
    for recipe, *cells in rows:
        plan = PLANS[recipe]
        four, eight = plan["machines"]["4x80"], plan["machines"]["8x80"]
        hours = [f"{machine['seconds'] * plan['steps'] / 3600:.1f}" for machine in (four, eight)]
        fits = [words[plan["machines"][name]["fits"]] for name in ("4x48", "4x24")]
        assert cells == [str(four["gib"]), str(plan["steps"]), str(four["seconds"]), *hours, *fits], recipe


def test_settings_for_one_small_gpu_are_those_of_the_plans():
    rows = table((ROOT / "docs" / "low_precision.md").read_text(), "recipes.json")
    fitting = {}
    for recipe, plan in PLANS.items():
        alone = plan["machines"]["1x24"]
        steps = [{"setting": "none", "gib": alone["gib"]}, *alone["changes"]]
        if steps[-1]["gib"] <= 21.6:
            names = [change["setting"] for change in steps[1:]] or ["none"]
            fitting[recipe] = ["` `".join(names), str(steps[-1]["gib"]), f"{alone['seconds']:,}"]
    assert {recipe: cells for recipe, *cells in rows} == fitting
    assert {"qwen_image_ocr_lora", "sd35_medium_ocr_lora", "flux1_dev_lora", "z_image_lora"} <= fitting.keys()


def test_the_smaller_machine_is_that_of_the_plan():
    machines = PLANS["qwen_image_ocr_lora"]["machines"]
    changes = machines["4x24"]["changes"]
    assert [f"actor_rollout_ref.{change['setting']}" in PAGE for change in changes] == [True] * 4
    figures = [change["gib"] for change in changes]
    text = "bring 58.8 GiB down to {}, {} and {}, which fits 48 GB cards; the fourth to {}, for".format(*figures)
    assert text in " ".join(PAGE.split())
    assert f"{machines['4x48']['seconds']} s on four L40S and {machines['4x24']['seconds']:,} s" in PAGE


@pytest.mark.slow
def test_the_flagship_is_still_planned_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import recipes

    try:
        monkeypatch.setattr(recipes, "MACHINES", "4x80")
        found = recipes.plan(recipes.settings_of("qwen_image_ocr_lora", tmp_path))
    finally:
        sys.modules.pop("recipes")
    assert found["4x80"] == PLANS["qwen_image_ocr_lora"]["machines"]["4x80"]


def test_the_six_metrics_have_the_reports_limits():
    rows = table(PAGE, "limits")
    limits = {**LEARNING_LIMITS, **GAP_LIMITS}
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert len(rows) == 6
    for metric, healthy, problem, _, check in rows:
        assert f"| `{metric}` |" in documented
        both = limits[check]
        expected = both[0] if isinstance(both, tuple) else both  # SDE steps, tokens
        found = [float(re.search(r"[\d.]+", cell)[0]) for cell in (healthy, problem)]
        assert found == [expected.high, expected.problem_high], check


SIZES = table((ROOT / "docs" / "weights.md").read_text(), "weights")


@pytest.mark.slow
@pytest.mark.parametrize("row", SIZES, ids=[row[0] for row in SIZES])
def test_sizes_of_weights_are_those_of_the_architectures(row):
    """Two bytes a parameter, in GB."""
    pipeline = FakePipeline(row[0], torch.bfloat16)
    for cell, networks in zip(row[1:], ([pipeline.transformer], pipeline.text_encoders, [pipeline.vae]), strict=False):
        assert float(cell) == round(2 * sum(map(parameters_of, networks)) / 1e9, 1)
