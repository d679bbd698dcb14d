"""Importing the data and reward packages stays cheap: engines and file formats load when they are used."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "diffusers", "transformers", "cv2", "rapidocr", "onnxruntime", "rapidfuzz", "pyarrow")


@pytest.mark.process
def test_imports_pull_in_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import flowgrpo_rc.rewards, flowgrpo_rc.rewards.ocr, flowgrpo_rc.data, flowgrpo_rc.data.prepare\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
