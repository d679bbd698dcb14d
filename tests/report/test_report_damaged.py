"""Rows, files and folders that are not as a run leaves them: a page that names the fault, or one line."""

import pytest
from PIL import Image
from rows import CONFIG, folder, found, rows, settings

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.report import NotARunError, check_health, page, read_run
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.page import LONGEST_SIDE, picture_uri


@pytest.fixture
def run(tmp_path):
    """A healthy run of a few steps."""
    return folder(tmp_path / "run", rows(6), settings())


@pytest.fixture
def unfigured(monkeypatch):
    """Pages without figures: drawing them takes most of a report's time."""
    monkeypatch.setattr(page, "figures", lambda history: [])


@pytest.mark.parametrize("value", [None, "x", float("nan")])
def test_a_step_that_is_none_comes_after_the_row_before(value):
    late = rows(4)
    for row in late:
        row["step"] += 100
    late[1]["step"] = value
    assert History(late).steps == [101, 102, 103, 104]


def test_steps_that_repeat_or_go_back_are_named():
    made = rows(6)
    # A validation in a row of its own repeats no step.
    assert found([*made, {"step": 6, "val/reward/mean": 0.5}], CONFIG, "log").level == "ok"
    finding = found(made + made[3:], CONFIG, "log")
    assert finding.level == "watch"
    assert "3 step(s) stand there again or out of order, the first is step 4" in finding.measured
    history = History(made[::-1])
    assert history.steps == [1, 2, 3, 4, 5, 6]
    assert history.rows[0] is made[0]


@pytest.mark.parametrize("value", [None, "x", True, [1]])
def test_values_of_any_kind_are_judged_or_left_out(value):
    made = [dict.fromkeys(row, value) | {"step": row["step"]} for row in rows(15)]
    check_health(made, CONFIG)


@pytest.mark.usefixtures("unfigured")
def test_damaged_lines_among_whole_ones_are_counted(run, capsys):
    with (run / "metrics.jsonl").open("a") as log:
        log.write('3\n{"step": 7, "reward/me')
    assert main(["report", str(run)]) == 0
    assert "2 line(s) cut off or not readable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("", None, "no such folder"),
        ("metrics.jsonl", None, "holds no metrics.jsonl"),
        ("metrics.jsonl", b"", "metrics.jsonl: no complete line in it"),
        ("metrics.jsonl", b"\x00" * 500, "metrics.jsonl: no complete line in it"),
        ("metrics.jsonl", b"[1]\n3\nnull\n", "metrics.jsonl: no complete line in it"),
        ("config.yaml", b"[1, 2]", "config.yaml: expected a mapping, found list; repair or remove it"),
        ("config.yaml", b"", "config.yaml: expected a mapping, found NoneType; repair or remove it"),
        ("config.yaml", b"\xff\xfe", "config.yaml: cannot be read ('utf-8' codec"),
        ("config.yaml", b"a: {b: c", "config.yaml: cannot be read (while parsing"),
    ],
)
def test_what_is_no_run_is_refused_by_name(run, capsys, file, content, message):
    path = run / file if file else run / "missing"
    if content is not None:
        path.write_bytes(content)
    elif file:
        path.unlink()
    root = run if file else path
    with pytest.raises(NotARunError) as refused:
        read_run(root)
    assert message in str(refused.value)
    assert main(["report", str(root)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.usefixtures("unfigured")
@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "expected a mapping"), ("{}", "is not what flowgrpo-rc probe"), ('{"a": [', "Expect")],
)
def test_a_probe_that_is_none_is_left_out(run, content, message):
    (run / "probe.json").write_text(content)
    with pytest.warns(UserWarning, match=f"probe.json was left out: .*{message}"):
        assert main(["report", str(run)]) == 0


@pytest.mark.usefixtures("unfigured")
@pytest.mark.parametrize(
    "content",
    [
        "actor_rollout_ref: {actor: {diffusion_loss: {clip_ratio: [1], loss_mode: [x]}}}",
        "algorithm: {rollout_correction: [1]}",
        "algorithm: {rollout_correction: {bypass_mode: {a: 1}, rollout_is: [1], loss_type: [x]}}",
    ],
)
def test_settings_of_another_kind_count_as_unknown(run, content):
    (run / "config.yaml").write_text(f"trainer: {{total_training_steps: .nan}}\n{content}")
    assert main(["report", str(run)]) in (0, 3)
    assert read_run(run).history.configured_mode is None


def test_a_wide_picture_is_shown_smaller(tmp_path):
    path = tmp_path / "step_1.png"
    Image.new("RGB", (LONGEST_SIDE * 4, 40)).save(path)
    assert len(picture_uri(path)) < 100_000


@pytest.mark.usefixtures("unfigured")
def test_a_page_replaces_an_earlier_page_and_no_record(run, capsys):
    for name in ("metrics.jsonl", "config.yaml"):
        before = (run / name).read_bytes()
        assert main(["report", str(run), "--out", str(run / name)]) == 2
        assert "is there already and is no page of a report" in capsys.readouterr().err
        assert (run / name).read_bytes() == before
    for out in ("x" * 300, str(run / "metrics.jsonl" / "a"), str(run)):
        assert main(["report", str(run), "--out", out]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert main(["report", str(run)]) == main(["report", str(run)]) == 0
    assert not list(run.glob("*.writing"))
