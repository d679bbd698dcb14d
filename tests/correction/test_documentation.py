"""The documentation page against the code: the tests that it names exist, and so do the presets."""

import re
from pathlib import Path

import pytest

from flowgrpo_rc.correction.options.presets import PRESET_NAMES

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


def test_the_presets_and_options_that_the_page_names_exist(page):
    guide = page[page.index("## Which preset when") : page.index("### Configurations of other projects")]
    column = [line.split("|")[2] for line in guide.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    named = {name for cell in column for name in re.findall(r"`(\w+)`", cell)} - {"rollout_rs"}
    assert len(named) > 8
    assert named <= set(PRESET_NAMES), named - set(PRESET_NAMES)
