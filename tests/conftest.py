"""Fixtures: the tiny model, small runs of it, and a reward that needs no engine."""

import atexit
import gc
import hashlib
import importlib
import os
import shutil
import signal
import tempfile
from functools import cache
from pathlib import Path

# Before torch is imported: one thread a process, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "ATEN_CPU_CAPABILITY" in os.environ:
    # Code that torch.compile has cached for one kind of vectors does not compile with another.
    kept = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))

import pytest
import torch
from filelock import FileLock
from PIL import Image
from tests_support import SMALL_RUN, last_of_each

# Embeddings of prompts go to a folder that begins empty, here and in the processes that tests start.
os.environ["FLOWGRPO_RC_CACHE"] = tempfile.mkdtemp(prefix="flowgrpo_rc_tests_")
atexit.register(shutil.rmtree, os.environ["FLOWGRPO_RC_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _own_signal_handlers():
    """Give the tests and their child processes the usual signals, also under ``nohup`` or behind ``&``.

    A child inherits an ignored signal but not a handler. SIGHUP therefore gets one that does nothing: the tests outlive
    their terminal, and their children still end with SIGHUP.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def _few_threads():
    """Each core has a worker of pytest already; more threads only slow each other down."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def plots_stay_blank():
    """Write one pixel for a plot of a run, which takes as long to draw as a small run to train. Gives what draws it."""
    from matplotlib.figure import Figure

    draw = Figure.savefig

    def blank(figure, file, **settings):
        if settings.get("format") == "png":  # a run's
            Image.new("RGB", (1, 1)).save(file, "PNG")
        else:
            draw(figure, file, **settings)

    Figure.savefig = blank
    yield draw
    Figure.savefig = draw


@pytest.fixture
def tiny_model():
    """The shipped tiny Qwen-Image model, freshly loaded in float32."""
    from flowgrpo_rc.models import load_model

    return load_model("asset:tiny_qwen_image")


@pytest.fixture(scope="session")
def folder_of_family(tmp_path_factory):
    """``folder_of_family(name)``: a family's tiny model on the disk, saved once per worker; leave it unchanged."""
    from tiny_families import TINY

    root = tmp_path_factory.mktemp("families")

    @cache
    def folder(name):
        TINY[name].build().save_pretrained(root / name)
        return str(root / name)

    return folder


@pytest.fixture(scope="session")
def tiny_sd3_path(folder_of_family):
    """A random Stable Diffusion 3 in a folder, as a user has one."""
    return folder_of_family("stable_diffusion_3")


@pytest.fixture
def tiny_sd3_model(tiny_sd3_path):
    """It, freshly loaded in float32."""
    from flowgrpo_rc.models import load_model

    model = load_model(tiny_sd3_path)
    model.pipe.set_progress_bar_config(disable=True)
    return model


@pytest.fixture(scope="session")
def qwen_image_pair():
    """Both rollout engines around the tiny Qwen-Image, float32, in the environment of ``make vllm``; sync first."""
    from engine_pair import make_pair

    pair = make_pair()
    yield pair
    pair.vllm.close()


@pytest.fixture(scope="session")
def _old_objects():
    """Each run frees its text encoders by a full collection, which would look at every module's objects again."""
    importlib.import_module("flowgrpo_rc.trainer")
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_config(tmp_path, _old_objects):
    """``make(*overrides)``: the demo's configuration cut down to a second or two, its run folder in ``tmp_path``."""
    from flowgrpo_rc.cli.compose import compose

    def make(*overrides, folder="run"):
        where = f"trainer.default_local_dir={tmp_path / folder}"
        return compose("tiny_qwen_image_ocr", last_of_each(*SMALL_RUN, where, *overrides))

    return make


@pytest.fixture
def pooled(monkeypatch):
    """``use(kind, engines)``: runs draw with pools of such engines; gives the handles of the last one."""
    from engines_elsewhere import Elsewhere, pool_of

    from flowgrpo_rc.trainer import setup

    handles = []

    def use(kind=Elsewhere, engines=2):
        def build(config, model, lora, device, *_):
            handles[:] = [kind(config, lora, f"engine {i}") for i in range(engines)]
            return pool_of(handles, config, lora)

        monkeypatch.setattr(setup, "build_engine", build)
        return handles

    return use


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """``train(*overrides)``: the ``RunFolder`` of a finished small run, to be read and never written.

    Equal overrides are trained once for all tests of all workers.
    """
    from flowgrpo_rc.cli.compose import compose
    from flowgrpo_rc.run_folder import RunFolder
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def train(*overrides):
        key = hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:16]
        folder = shared / "trained" / key
        done = folder / "done"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                torch.set_num_threads(1)
                where = f"trainer.default_local_dir={folder / 'run'}"
                FlowGRPOTrainer(compose("tiny_qwen_image_ocr", last_of_each(*SMALL_RUN, where, *overrides))).fit()
                done.touch()
        return RunFolder(folder / "run")

    return train


@pytest.fixture(scope="session")
def finished_run(trained_run):
    """The folder of one such run, with a validation and a checkpoint at each of its two steps."""
    return trained_run("trainer.save_freq=1", "trainer.test_freq=1")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ray_environment():
    """Variables of a process that starts or joins Ray: nothing of it in the user's home, and none of it killed because
    other tests take memory."""
    own = {
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return os.environ | own
