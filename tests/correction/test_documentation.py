"""The documentation page against the code: the tests that it names exist, and so do the metrics and presets."""

import re
from pathlib import Path

import pytest
import reference

from flowgrpo_rc.correction import RolloutCorrectionConfig, compute_rollout_correction
from flowgrpo_rc.correction.options.presets import PRESET_NAMES
from flowgrpo_rc.correction.plan import RS_OPTIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rollout_correction.md"


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists(page):
    named = set(re.findall(r"`(test_\w+)`", page))
    files = [p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py")]
    there = set(re.findall(r"^def (test_\w+)", "\n".join(files), re.MULTILINE))
    assert len(named) > 40
    assert named <= there, sorted(named - there)


def test_every_metric_has_its_row(page):
    """A name in full, or `a_b`, `_c` side by side for `a_b` and `a_c`."""
    known = set()
    for line in page.splitlines():
        base = None
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if line.startswith("|") else line):
            known.add(name)
            if name.startswith("_") and base is not None:
                known.add(base.rpartition("_")[0] + name)
            else:
                base = name
    p, q, mask = reference.random_case(0)
    for threshold, mode in (("0.6_1.9", "zero"), ("0.6_1.9", "mask")):
        config = RolloutCorrectionConfig(
            rollout_is="token",
            rollout_is_threshold=threshold,
            rollout_is_mode=mode,
            rollout_is_batch_normalize=True,
            rollout_rs=",".join(RS_OPTIONS),
            rollout_rs_threshold=",".join("0.6_1.9" if "k1" in o else "0.4" for o in RS_OPTIONS),
            rollout_token_veto_threshold=0.3,
        )
        for name in compute_rollout_correction(p, q, mask, config=config).metrics:
            short = name.removeprefix("rollout_corr/")
            option = re.match(rf"rollout_rs_({'|'.join(RS_OPTIONS)})_", short)
            assert (short[option.end() :] if option else short) in known, short


def test_the_presets_and_options_that_the_page_names_exist(page):
    guide = page[page.index("## Which preset when") : page.index("### Configurations of other projects")]
    column = [line.split("|")[2] for line in guide.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    named = {name for cell in column for name in re.findall(r"`(\w+)`", cell)} - {"rollout_rs"}
    assert len(named) > 8
    assert named <= set(PRESET_NAMES), named - set(PRESET_NAMES)
