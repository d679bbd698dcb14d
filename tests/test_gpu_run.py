"""``scripts/gpu_run.sh`` runs each part whatever the others do, and writes which have failed."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tests_support import run_process

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_run.sh"
PARTS = {
    "tests": ["facts", "gpu_tests", "demo", "correction", "step_time"],
    "scale": ["plan", "scale_qwen", "scale_sd35"],
}


def run(tmp_path, what, python, **settings):
    """Exit status of a run whose Python is the shell script ``python``, and those of its parts."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    settings |= {"PY": str(fake), "OUT": str(out), "CASES": "qwen:1 sd35:2"}
    done = run_process("bash", SCRIPT, what, env=os.environ | settings)
    rows = map(json.loads, (out / "parts.jsonl").read_text().splitlines())
    found = [(row["part"], row["exit"]) for row in rows]
    # The plan is made beside the others.
    return done.returncode, found if what == "tests" else sorted(found)


@pytest.mark.parametrize("what", PARTS)
def test_a_part_that_fails_ends_no_other(tmp_path, what):
    """Whichever it is, and also if all do."""
    assert run(tmp_path, what, "exit 0") == (0, [(name, 0) for name in PARTS[what]])
    assert run(tmp_path, what, "exit 3") == (1, [(name, 3) for name in PARTS[what]])
    failing = {"facts": "gpu_facts", "gpu_tests": "-m pytest", "scale_qwen": "--case qwen"}
    for name in failing.keys() & set(PARTS[what]):
        found = run(tmp_path, what, f'case "$*" in *"{failing[name]}"*) exit 7 ;; esac')
        assert found == (1, [(one, 7 * (one == name)) for one in PARTS[what]])


def test_a_part_that_hangs_is_ended(tmp_path):
    code, parts = run(tmp_path, "tests", 'case "$*" in *"-m pytest"*) sleep 60 ;; esac', TESTS_S="1")
    assert code == 1
    assert parts == [(name, 124 * (name == "gpu_tests")) for name in PARTS["tests"]]
