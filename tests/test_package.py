"""The built wheel: what it ships, and that it runs the demo without the checkout."""

import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from tests_support import run_process

from flowgrpo_rc.correction.numerics import native

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = "flowgrpo_rc/correction/numerics/native/_native"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


def build(folder, source=ROOT, **environment):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder]
    command.append(source)
    environment = os.environ | environment
    made = run_process(*command, env=environment)
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
    ):
        assert name in names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "examples/"))]
    assert not [n for n in names if n.endswith((".c", ".h"))]
    assert wheel.stat().st_size < 10e6


@pytest.mark.skipif(not native.is_built(), reason="needs a C compiler")
def test_wheel_ships_the_extension_where_there_is_a_compiler(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert [n for n in names if n.startswith(EXTENSION)] == [f"{EXTENSION}{suffix}"]
    assert not wheel.name.endswith("-none-any.whl")


@pytest.mark.slow
def test_wheel_is_built_without_a_compiler(tmp_path):
    source = tmp_path / "source"
    for name in ("flowgrpo_rc", "configs", "assets"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = build(tmp_path, source, CC="no-such-compiler", CXX="no-such-compiler")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [n for n in zipfile.ZipFile(built).namelist() if n.startswith(EXTENSION)]


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
