"""The built wheel: what it ships, and that it runs the demo without the checkout."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
from tests_support import run_process

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


def build(folder):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    made = run_process(*command)
    assert made.returncode == 0, made.stderr
    return next(folder.glob("flowgrpo_rc-*.whl"))


def test_wheel_ships_configs_model_and_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "flowgrpo_rc/py.typed",
        "flowgrpo_rc/configs/flowgrpo_trainer.yaml",
        "flowgrpo_rc/configs/tiny_qwen_image_ocr.yaml",
        "flowgrpo_rc/assets/tiny_qwen_image/model_index.json",
        "flowgrpo_rc/assets/tiny_qwen_image/transformer/diffusion_pytorch_model.safetensors",
        "flowgrpo_rc/assets/tiny_ocr/train.txt",
        "flowgrpo_rc/assets/tiny_clip/model.safetensors",
    ):
        assert name in names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "examples/"))]
    assert not [n for n in names if n.endswith((".c", ".h", ".so"))]
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 10e6


@pytest.mark.slow
def test_installed_wheel_runs_the_demo(wheel, tmp_path):
    """Installed into a folder of its own, ahead of the checkout; the working directory is elsewhere."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    made = run_process(*install)
    assert made.returncode == 0, made.stderr
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = "import flowgrpo_rc; print(flowgrpo_rc.__file__)"
    done = run_process(sys.executable, "-c", where, env=environment, cwd=tmp_path)
    assert str(site) in done.stdout
    settings = ("trainer.total_training_steps=1", "actor_rollout_ref.rollout.val_kwargs.n=1")
    demo = [sys.executable, "-m", "flowgrpo_rc.cli.main", "demo", *settings]
    done = run_process(*demo, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "outputs" / "flowgrpo_rc" / "tiny_qwen_image_ocr" / "samples" / "before_after.png").is_file()
