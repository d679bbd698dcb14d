"""Rewards in whole runs: exit codes, the line at the start, the log's keys, verl-omni's form, servers and resumes."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_files import function, write
from reward_server import serving
from safetensors.torch import load_file, save_file
from stub_server import Reply, StubServer
from tests_support import SMALL_RUN, rows_of, untimed

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rewards import STATISTICS
from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer

pytestmark = pytest.mark.run
TINY = (
    *(o for o in SMALL_RUN if not o.startswith("reward.")),
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "data.val_files=null",
)
BRIGHTNESS = "return images.mean((1, 2, 3)) / 255"


def demo(folder: Path, reward: Path | None, *overrides: str) -> int:
    """The demo's exit code, one step of it, with the reward `f` of that file."""
    section = "reward.custom_reward_function"
    own = () if reward is None else (f"{section}.path={reward}", f"{section}.name=f")
    return main(["demo", *TINY, f"trainer.default_local_dir={folder / 'run'}", *own, *overrides])


def the_error(capsys: pytest.CaptureFixture) -> str:
    """The one line that reports an error; other libraries' notes aside."""
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sys.exit(0)", "raised SystemExit"),
        ("images[0] = 0", "raised ValueError"),
        ("time.sleep(600)", "did not return within reward.timeout_s=0.5 s; it was"),
    ],
)
def test_a_reward_that_fails_ends_the_command_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture, line: str, told: str
) -> None:
    assert demo(tmp_path, write(tmp_path, function(line)), "reward.timeout_s=0.5") == 1
    error = the_error(capsys)
    assert error.startswith(f"error: reward function 'f' {told}")
    assert "mine.py:5, in f" in error


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("sys.exit(0)", "mine.py raised SystemExit: 0 at"),
        ("def f(images, prompts): return [1.0] * len(prompts)", "'f'(images, prompts) cannot be called as a reward"),
        (
            "def f(data_source, solution_image, ground_truth, extra_info): return 1.0",
            "train.txt:1 has no data_source, which the reward function 'f'(",
        ),
    ],
)
def test_what_can_be_seen_before_training_ends_it_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    monkeypatch.setattr("flowgrpo_rc.trainer.setup.open_checked", lambda *a, **k: pytest.fail("the model was loaded"))
    assert demo(tmp_path, write(tmp_path, source)) == 2
    assert told in the_error(capsys)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return [metadata[0]['target']] * len(images)", r"raised KeyError: 'target' at .*mine\.py:5, in f"),
        ("return [float('nan')] * len(images)", r"returned 2 non-finite of 2 scores; the first is nan for sample 0"),
        ("return images.mean((2, 3))", r"returned scores of shape \(2, 32\), expected \(2,\): one float per image"),
        ("return [1.0]", r"returned scores of shape \(1,\), expected \(2,\): one float per image"),
    ],
)
def test_a_function_that_fails_on_trial_ends_the_command_before_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    monkeypatch.setattr("flowgrpo_rc.trainer.setup.open_checked", lambda *a, **k: pytest.fail("the model was loaded"))
    assert demo(tmp_path, write(tmp_path, function(body))) == 1
    where = r"it was tried before the model is loaded, on two images of noise with the row .*train\.txt:1"
    remedy = "mend it, flowgrpo-rc check-reward f tries it alone"
    assert re.fullmatch(rf"error: reward function 'f' {told}.*; {where}; {remedy}", the_error(capsys))


STATEFUL = """
np.random.seed(3)
own = np.random.default_rng(3)
calls = 0

def f(images, prompts, metadata):
    global calls
    calls += 1
    return images.mean((1, 2, 3)) / 255 + calls + own.random(len(images)) + np.random.random(len(images))
"""


def test_the_trial_changes_nothing_that_a_function_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter, a generator of its own and the global one, which the file seeds."""
    for name in ("tried", "untried"):
        (tmp_path / name).mkdir()
        if name == "untried":
            monkeypatch.setattr("flowgrpo_rc.trainer.setup.try_own", lambda *a, **k: None)
        assert demo(tmp_path / name, write(tmp_path / name, STATEFUL)) == 0
    assert untimed(rows_of(tmp_path / "tried" / "run")) == untimed(rows_of(tmp_path / "untried" / "run"))


def test_the_log_has_the_known_statistics_and_one_key_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The first lines show the sum in force."""
    path = write(tmp_path, function(BRIGHTNESS))
    assert demo(tmp_path, path, "reward.functions.jpeg_compressibility=0.5") == 0
    logged = {key.removeprefix("reward/") for key in rows_of(tmp_path / "run")[-1] if key.startswith("reward/")}
    names = ("jpeg_compressibility", "f")
    assert logged == {*STATISTICS, *names, *(f"std/{name}" for name in names)}
    said = "".join(capsys.readouterr().out.split())
    assert f"Reward:0.5xjpeg_compressibility+1xf({path})" in said


def test_verl_omnis_form_trains_on_a_file_with_its_columns(tmp_path: Path) -> None:
    """From the layout that verl-omni's data preparation, and ours, write."""
    lines = "".join(f'the text "{number}"\n' for number in range(10, 18))
    (tmp_path / "train.txt").write_text(lines)
    assert main(["prepare-data", "ocr", "--input", str(tmp_path), "--output", str(tmp_path / "data")]) == 0
    source = """
    async def f(data_source, solution_image, ground_truth, extra_info=None, **kwargs):
        assert data_source == "flow_grpo/ocr" and extra_info["split"] == "train"
        score = float(solution_image.float().mean() / 255)
        return {"score": score, "target": float(ground_truth)}
    """
    train = f"data.train_files={tmp_path / 'data' / 'train.parquet'}"
    assert demo(tmp_path, write(tmp_path, source), train) == 0
    row = rows_of(tmp_path / "run")[-1]
    assert 0 < row["reward/f"] < 1
    assert row["reward/mean"] == row["reward/f"]


# ---------------------------------------------------------------------- servers


def test_a_run_with_a_server_equals_one_with_the_function(tmp_path: Path) -> None:
    path = write(tmp_path, function(f"{BRIGHTNESS}, {{'text': prompts}}"))
    assert demo(tmp_path / "local", path) == 0
    with serving(path) as server:
        far = [f"reward.remote.f.url={server.url}", "reward.remote.f.batch_size=3", "reward.functions={f: 1.0}"]
        assert demo(tmp_path / "remote", None, *far) == 0
        assert server.requests > 1
    assert "reward/f" in rows_of(tmp_path / "local" / "run")[-1]
    assert rows_of(tmp_path / "remote" / "run") == rows_of(tmp_path / "local" / "run")


def test_a_server_that_ends_during_training_ends_the_run_with_1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The grey images before training are answered, and nothing after them."""

    def answer(call: Any) -> Reply:
        images = call.json()["images"]
        return Reply({"scores": [0.5]}) if len(images) == 1 else Reply(b"CUDA error", status=500)

    with StubServer(answer) as server:
        far = [f"reward.remote.far.url={server.url}", "reward.remote.far.tries=2", "reward.functions={far: 1.0}"]
        assert demo(tmp_path, None, *far) == 1
    error = the_error(capsys)
    assert error.startswith(f"error: {server.url}: reward.remote.far, images 0 to ")
    assert error.endswith("answers 500: CUDA error (tried 2 times)")


# ---------------------------------------------------------------------- resumes with scorers of CLIP

SCORERS = ("pickscore", "clip_cosine", "hpsv2")
REWARDS = tuple(
    override
    for name in SCORERS
    for override in (f"reward.functions.{name}=1", f"reward.{name}.model_path=asset:tiny_clip")
)
NO_CUSTOM = "reward.custom_reward_function.path=null"


def test_a_resume_repeats_the_run_with_every_local_scorer(small_config: Callable[..., Any]) -> None:
    """Two steps in one go, and one, then one more."""
    auto = (*REWARDS, NO_CUSTOM, "trainer.resume_mode=auto", "trainer.save_freq=1", "data.val_files=null")
    whole = FlowGRPOTrainer(small_config(*auto, folder="whole")).fit()
    parts = small_config(*auto, folder="parts")
    first = FlowGRPOTrainer(parts)
    own = first.train_step

    def end_after_one() -> Any:
        if first.step == 1:
            raise ConnectionError("power cut")
        return own()

    first.train_step = end_after_one
    with pytest.raises(ConnectionError):
        first.fit()
    second = FlowGRPOTrainer(parts)
    assert second.step == 1
    found = untimed(second.fit().rows())
    assert found == untimed(whole.rows())
    adapters = [
        load_file(folder / "lora" / "pytorch_lora_weights.safetensors") for folder in (whole.root, second.folder.root)
    ]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
    assert {f"reward/{name}" for name in SCORERS} <= found[-1].keys()
    # PickScore is exp(logit_scale) / 26 of the cosine, and so is its mean.
    scale = load_file(Path(resolve_asset("asset:tiny_clip")) / "model.safetensors")["logit_scale"].exp().item()
    assert found[-1]["reward/pickscore"] == pytest.approx(found[-1]["reward/clip_cosine"] * scale / 26, rel=1e-5)
    # At the network's own size nothing is resized, and the two preprocessings are one.
    assert found[-1]["reward/hpsv2"] == pytest.approx(found[-1]["reward/clip_cosine"], abs=1e-5)


def test_a_scorer_with_other_weights_is_not_resumed_with(small_config: Callable[..., Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_asset("asset:tiny_clip"), tmp_path / "clip"))
    settings = (
        *("reward.functions.clip_cosine=1", f"reward.clip_cosine.model_path={folder}", NO_CUSTOM),
        *("trainer.resume_mode=auto", "trainer.save_freq=1", "data.val_files=null"),
    )
    FlowGRPOTrainer(small_config(*settings, "trainer.total_training_steps=1")).fit()
    tensors = load_file(folder / "model.safetensors")
    tensors["visual_projection.weight"] *= 1.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"step_1 was trained with other weights or another dtype of the reward 'clip_cosine' .*clip_cosine's set",
    ):
        FlowGRPOTrainer(small_config(*settings))
    # Other rewards are another setting, which a run may go on with.
    others = ("reward.functions.clip_cosine=0", "reward.functions.jpeg_compressibility=1")
    assert FlowGRPOTrainer(small_config(*settings, *others)).step == 1
