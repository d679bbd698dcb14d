"""``flowgrpo-rc probe``: its exit codes, its files, and what it says of what it is given."""

import errno
import json
import math
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.cli import probe as command
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.trainer.setup import Run

RC = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.diffusion_loss"
ROLLOUT = "actor_rollout_ref.rollout"
BYPASS = f"{RC}.bypass_mode=true"
CLIP = f"{LOSS}.clip_ratio"
WITHOUT_OCR = ("reward.functions.ocr=0", "reward.functions.jpeg_compressibility=1")


@pytest.fixture
def probe(tmp_path, capsys):
    """``probe(*arguments)``: exit code, standard output and the lines of standard error."""

    def call(*arguments, out=tmp_path / "out"):
        capsys.readouterr()
        common = ("probe", "--config-name", "tiny_qwen_image_ocr", "--out", str(out))
        code = main([*common, *arguments, BYPASS, *WITHOUT_OCR])
        said = capsys.readouterr()
        return code, said.out, said.err.splitlines()

    return call


@pytest.mark.run
def test_the_command_gates_on_its_exit_code(probe, tmp_path):
    code, said, _ = probe("--images", "8", f"{CLIP}=0.01")
    assert code == 0
    assert "Verdict: SAFE (" in said
    assert "No change needed" in said
    assert "0% of the samples lie outside clip_ratio=0.01 before anything is learned (0.0% to" in said
    code, said, _ = probe("--images", "4", f"{CLIP}=0.00001")
    assert code == 3
    assert "Verdict: NOT SAFE (" in said
    assert "Recommended: bypass mode, clip_ratio=" in said
    assert "clip_ratio=1e-05 before anything is learned" in said
    saved = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert saved["advice"]["safe"] is False
    assert saved["advice"]["verdict"] == "not safe"
    assert saved["advice"]["clip_ratio"] == saved["advice"]["limit"] > 1e-5
    assert saved["advice"]["kl_mask_threshold"] is None
    assert saved["overall"]["clipped"] > 0.5
    assert (tmp_path / "out" / "probe.png").stat().st_size > 10_000
    code, said, _ = probe("--images", "8", f"{CLIP}=auto")
    assert code == 0
    assert "clip band auto, 1 +- " in said
    assert "No change needed: bypass mode, clip_ratio=auto; a rejection band" in said


@pytest.mark.run
def test_a_prompt_writer_is_judged_beside_the_images(probe, tmp_path):
    """The worse of both verdicts is the exit code."""
    writer = "algorithm.prompt_writer"
    settings = (f"{writer}.path=asset:tiny_writer", f"{writer}.actor.rollout_correction.bypass_mode=true")
    images = ("--images", "8", "--max-images", "16", f"{CLIP}=0.01")
    code, said, _ = probe(*images, *settings)
    assert code == 0
    assert "Prompt writer: engine in bfloat16, actor in float32; bypass; 16 rewrites, " in said
    assert "Verdict on tokens: SAFE (" in said
    code, said, _ = probe(*images, *settings, f"{writer}.actor.token_loss.clip_ratio=1e-6")
    assert code == 3
    assert "Verdict: SAFE (" in said
    assert "Verdict on tokens: NOT SAFE (outside clip_ratio=1e-06: " in said
    # A writer that does not learn cannot be unsafe.
    assert probe(*images, *settings, f"{writer}.actor.token_loss.clip_ratio=1e-6", f"{writer}.learns=images")[0] == 0
    saved = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert saved["advice"]["verdict"] == "safe"
    assert saved["tokens"]["verdict"] == "not safe"
    assert 1e-5 < saved["tokens"]["gap"]["abs_mean"] < 1e-2


@pytest.mark.parametrize(
    ("verdict", "mode", "bypass_mode", "limit", "says"),
    [
        ("safe", "bypass", True, 0.01, "No change needed: bypass mode, clip_ratio=0.01"),
        ("safe", "bypass", True, "auto", "No change needed: bypass mode, clip_ratio=auto"),
        ("safe", "bypass", True, 0.05, "No change needed; more headroom with bypass mode, clip_ratio=0.05"),
        ("safe", "bypass", False, 0.05, "No change needed; bypass mode, clip_ratio=0.05 would do too"),
        ("not shown safe", "bypass", True, 0.05, "Recommended: bypass mode, clip_ratio=0.05"),
        ("not safe", "decoupled", True, 0.01, "Recommended: decoupled mode, clip_ratio=0.01"),
    ],
)
def test_a_safe_setting_needs_no_change(verdict, mode, bypass_mode, limit, says):
    advice = SimpleNamespace(safe=verdict == "safe", mode=mode, limit_key="clip_ratio", limit=limit)
    setting = {"clip_band": (0.01, 0.02), "clip_sides": False, "loss_mode": "flow_grpo", "bypass_mode": bypass_mode}
    assert command._recommended(SimpleNamespace(advice=advice, setting=setting)) == says


FP8_WINDOW_4 = (f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.algo.sde_window_size=4", f"{CLIP}=1e-3")


@pytest.mark.run
def test_a_collapsing_setting_is_not_called_safe(probe, tmp_path):
    """Of 64 samples fewer lie outside the band than the limit allows; of the truth, a third. The run unlearned.

    The drift shows it with those 16 images, and the share is expected over the noise that they might have had.
    """
    code, said, _ = probe("--max-images", "16", *FP8_WINDOW_4)
    saved = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert code == 3
    assert "Verdict: NOT SAFE (drift: " in said
    assert saved["images"] == 16
    assert saved["overall"]["count"] == 64
    assert 0.26 < saved["overall"]["clipped"] < 0.36
    assert saved["confidence"] == pytest.approx(0.95)
    assert saved["advice"]["safe"] is False
    assert saved["advice"]["verdict"] == "not safe"
    assert {step["clipped_interval"]["high"] > step["clipped"] for step in saved["steps"]} == {True}
    judged = {one["what"]: one for one in saved["advice"]["judged"]}
    assert judged["drift"]["limit"] == 0.0075
    assert judged["drift"]["low"] > 0.0075
    # The drift tells what these samples teach, so that their number alone is not too much.
    assert judged["outside clip_ratio=0.001"]["limit"] == 0.5
    assert judged["outside clip_ratio=0.001"]["verdict"] == "safe"
    assert judged["rejected"]["verdict"] == "safe"


@pytest.mark.run
def test_the_table_shows_the_intervals(probe, tmp_path):
    _, said, _ = probe("--images", "8", "--max-images", "8", f"{CLIP}=2e-4")
    saved = json.loads((tmp_path / "out" / "probe.json").read_text())
    table = [line for line in said.splitlines() if line[:9].strip().replace(".", "").isdigit() or " all " in line]
    shown, drifts = [*saved["steps"], saved["overall"]], [*saved["drift"]["timesteps"], saved["drift"]]
    assert [one["timestep"] for one in drifts[:-1]] == [step["timestep"] for step in shown[:-1]]
    for line, step, drift in zip(table, shown, drifts, strict=True):
        low, high = (f"{step['clipped_interval'][end]:.0%}" for end in ("low", "high"))
        ends = [f"{drift['interval'][end]:.4f}" for end in ("low", "high")]
        drift_cells = [f"{drift['value']:.4f}", ends[0], "to", ends[1]]
        assert line.split()[8:] == [f"{step['clipped']:.0%}", low, "to", high, *drift_cells]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--images", "1"), "--images: got 1; give 2 to 4096"),
        (("--max-images", "8"), "--max-images: got 8; give a number from --images, 16, to 4096"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_one_line(probe, tmp_path, monkeypatch, arguments, says):
    """Before the model is loaded, and before a folder is made."""
    monkeypatch.setattr("flowgrpo_rc.trainer.FlowGRPOTrainer.__init__", _never)
    code, out, errors = probe(*arguments)
    assert (code, out, len(errors)) == (2, "", 1)
    assert says in errors[0]
    assert not (tmp_path / "out").exists()


def _never(*_):
    raise AssertionError("the model is loaded")


def test_an_out_that_cannot_be_written_is_refused_before_anything_is_measured(probe, tmp_path, monkeypatch):
    """Tried with a file, as its owner, or root, is not bound by the folder's mode."""

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("flowgrpo_rc.trainer.FlowGRPOTrainer.__init__", _never)
    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    code, _, errors = probe()
    assert code == 2
    assert errors == [f"error: --out: cannot write to {tmp_path / 'out'} (Permission denied); give another folder"]


@pytest.mark.run
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_log_prob_that_is_not_finite_ends_in_one_line(probe, tmp_path, monkeypatch, bad):
    rescore = DiffusionActor.rescore

    def one_is_bad(self, *arguments):
        scored = rescore(self, *arguments)
        scored["log_probs"][0, 0] = bad
        return scored

    monkeypatch.setattr(DiffusionActor, "rescore", one_is_bad)
    code, out, errors = probe("--images", "2")
    assert (code, out) == (1, "")
    assert [line for line in errors if line.startswith("error: ")] == [errors[-1]]
    assert "1 of 12 steps that the engine sampled a NaN or infinite log-prob; check" in errors[-1]
    assert not list((tmp_path / "out").iterdir())


def result(clip, seconds=1.0):
    """The part of a probe's result that ``write_result`` reads."""
    values = {"setting": {"clip_ratio": clip}, "seconds": {"rollout": seconds}, "saved": seconds / 10}
    return SimpleNamespace(to_dict=lambda: values)


def test_a_result_that_says_something_else_is_kept(tmp_path, monkeypatch):
    """Of another setting, or not readable at all; one that differs in its timings alone is replaced."""
    monkeypatch.setattr(command, "draw", lambda _, path: path.write_text("picture"))
    write = partial(command.write_result, tmp_path)
    assert write(result(1e-3)) == [f"Written: {tmp_path / 'probe.json'}, {tmp_path / 'probe.png'}"]
    assert len(write(result(1e-3, seconds=2.0))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probe.json", "probe.png"]
    said = write(result(1e-4))
    assert said[0] == (
        f"The earlier result there says something else; kept as {tmp_path / 'probe.1.json'}, {tmp_path / 'probe.1.png'}"
    )
    assert json.loads((tmp_path / "probe.1.json").read_text())["seconds"] == {"rollout": 2.0}
    assert json.loads((tmp_path / "probe.json").read_text())["setting"] == {"clip_ratio": 1e-4}
    (tmp_path / "probe.json").write_text("not a probe")
    (tmp_path / "probe.png").unlink()
    assert write(result(1e-4))[0].endswith(f"kept as {tmp_path / 'probe.2.json'}")
    assert (tmp_path / "probe.2.json").read_text() == "not a probe"
    (tmp_path / "probe.json").unlink()  # a picture alone is somebody's too
    assert write(result(1e-4))[0].endswith(f"kept as {tmp_path / 'probe.3.png'}")


def test_a_full_disk_leaves_the_earlier_result(tmp_path, monkeypatch):
    def full(_, path):
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    write = partial(command.write_result, tmp_path)
    monkeypatch.setattr(command, "draw", lambda _, path: path.write_text("whole"))
    write(result(1e-3))
    before = (tmp_path / "probe.json").read_bytes()
    monkeypatch.setattr(command, "draw", full)
    with pytest.raises(OSError, match="No space"):
        write(result(1e-4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probe.json", "probe.png"]
    assert ((tmp_path / "probe.json").read_bytes(), (tmp_path / "probe.png").read_text()) == (before, "whole")


@pytest.mark.run
def test_rewards_are_ended_before_anything_is_measured(probe, monkeypatch):
    """A probe scores nothing, and the server of a reward model holds memory of the GPUs."""
    events = []

    def measure(*_):
        events.append("measured")
        raise RuntimeError("stop here")

    monkeypatch.setattr(Run, "end_rewards", lambda run: events.append("ended"))
    monkeypatch.setattr("flowgrpo_rc.gap.probe.run_probe", measure)
    assert probe("--images", "2")[0] == 1
    assert events == ["ended", "measured"]


def test_an_end_that_is_infinite_is_null_in_the_result():
    """JSON has no infinity."""
    content = {"interval": {"low": -math.inf, "high": 2.0}, "steps": [(math.nan, 1, "inf", None)]}
    assert command._finite(content) == {"interval": {"low": None, "high": 2.0}, "steps": [[None, 1, "inf", None]]}
