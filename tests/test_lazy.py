"""Public names: each is there, and none is imported before it is asked for."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "flowgrpo_rc"
LAZY = sorted(
    ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    for path in PACKAGE.rglob("__init__.py")
    if "lazy_names(" in path.read_text()
)
LIGHT = ("flowgrpo_rc.models.registry", "flowgrpo_rc.rewards.ocr", "flowgrpo_rc.data.prepare")
"""Modules that load what they need when it is used."""


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_resolves(name):
    package = importlib.import_module(name)
    assert set(dir(package)) == set(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_packages_themselves_load_no_torch():
    assert len(LAZY) > 5
    heavy = {"torch", "diffusers", "transformers", "vllm", "cv2", "rapidocr", "onnxruntime", "rapidfuzz", "pyarrow"}
    code = f"import sys, {', '.join([*LAZY, *LIGHT])}; assert not {heavy!r} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
