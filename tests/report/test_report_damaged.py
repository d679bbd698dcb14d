"""Rows, files and folders that are not as a run leaves them: a page that names the fault, or one line."""

import pytest
from PIL import Image
from rows import CONFIG, folder, rows, settings

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.report import check_health, page, read_run, write_report
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


def log_finding(run_rows):
    """The finding on the log itself."""
    return next(f for f in check_health(run_rows, CONFIG) if f.check == "log")


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("value", [None, "x", float("nan"), 2**63, 1e300])
def test_a_step_that_is_none_comes_after_the_row_before(value):
    late = rows(4)
    for row in late:
        row["step"] += 100
    late[1]["step"] = value
    assert History(late).steps == [101, 102, 103, 104]


def test_steps_that_repeat_or_go_back_are_named():
    made = rows(6)
    assert log_finding(made).level == "ok"
    assert log_finding(made + made[3:]).level == "watch"
    assert "3 step(s) stand there again or out of order, the first is step 4" in log_finding(made + made[3:]).measured
    history = History(made[::-1])
    assert history.steps == [1, 2, 3, 4, 5, 6]
    assert history.rows[0] is made[0]


def test_a_validation_of_its_own_row_repeats_no_step():
    validation = {"step": 6, "val/reward/mean": 0.5}
    assert log_finding([*rows(6), validation]).level == "ok"


@pytest.mark.parametrize("value", [None, "x", True, [1], 1e308, 1e-320])
def test_values_of_any_kind_are_judged_or_left_out(value):
    made = [dict.fromkeys(row, value) | {"step": row["step"]} for row in rows(15)]
    check_health(made, CONFIG)


def test_values_too_small_to_compute_with_count_as_zero():
    series = History([{"step": 1, "a": 1e-320}, {"step": 2, "a": -1e-200}, {"step": 3, "a": 1e-100}]).series("a")
    assert series is not None
    assert series.values == (0.0, 0.0, 1e-100)


def test_a_figure_that_cannot_be_drawn_is_left_out(run, monkeypatch):
    def broken(panel, history):
        if panel.title == "Reward":
            raise RuntimeError("first line\nsecond line")
        return "data:,"

    monkeypatch.setattr(page, "render", broken)
    path, _ = write_report(read_run(run))
    text = path.read_text()
    assert "This figure cannot be drawn (RuntimeError: first line second line)." in text
    assert text.count('<img src="data:') >= 5


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00" * 500, b"[1]\n3\nnull\n"])
def test_a_log_without_a_row(run, capsys, content):
    (run / "metrics.jsonl").write_bytes(content)
    assert main(["report", str(run)]) == 2
    assert "metrics.jsonl: no complete line in it" in capsys.readouterr().err


@pytest.mark.usefixtures("unfigured")
def test_damaged_lines_among_whole_ones_are_counted(run, capsys):
    with (run / "metrics.jsonl").open("a") as log:
        log.write('3\n{"step": 7, "reward/me')
    assert main(["report", str(run)]) == 0
    assert "2 line(s) cut off or not readable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "expected a mapping, found list"),
        (b"", "expected a mapping, found NoneType"),
        (b"\xff\xfe", "cannot be read ('utf-8' codec"),
        (b"a: {b: c", "cannot be read"),
    ],
)
def test_a_configuration_that_is_none(run, capsys, content, message):
    (run / "config.yaml").write_bytes(content)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{run / 'config.yaml'}: {message}" in error
    assert "repair or remove it" in error


@pytest.mark.usefixtures("unfigured")
@pytest.mark.parametrize(
    "content",
    [
        "trainer: {total_training_steps: .nan}",
        "actor_rollout_ref: {actor: {diffusion_loss: {clip_ratio: [1], loss_mode: [x]}}}",
        "algorithm: {rollout_correction: [1]}",
        "algorithm: {rollout_correction: {bypass_mode: {a: 1}, rollout_is: [1], loss_type: [x]}}",
    ],
)
def test_settings_of_another_kind_count_as_unknown(run, content):
    (run / "config.yaml").write_text(content)
    assert main(["report", str(run)]) in (0, 3)
    assert read_run(run).history.configured_mode is None or "trainer" in content


def test_a_wide_picture_is_shown_smaller_and_a_damaged_one_named(tmp_path):
    path = tmp_path / "step_1.png"
    Image.new("RGB", (LONGEST_SIDE * 4, 40)).save(path)
    uri = picture_uri(path)
    assert uri is not None
    assert len(uri) < 100_000
    Image.effect_noise((300, 300), 50).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    assert picture_uri(path) is None
    assert picture_uri(tmp_path / "gone.png") is None


@pytest.mark.usefixtures("unfigured")
@pytest.mark.parametrize(
    ("content", "message"), [("[]", "not what flowgrpo-rc probe writes"), ('{"steps": [', "Expecting value")]
)
def test_a_probe_that_is_none_is_left_out(run, capsys, content, message):
    (run / "probe.json").write_text(content)
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert "probe.json was left out: " in out
    assert message in out
    assert "probe.json was left out" in (run / "report.html").read_text()


# ---------------------------------------------------------------- --out


@pytest.mark.usefixtures("unfigured")
def test_a_page_replaces_an_earlier_page_and_no_record(run, capsys):
    for name in ("metrics.jsonl", "config.yaml"):
        before = (run / name).read_bytes()
        assert main(["report", str(run), "--out", str(run / name)]) == 2
        assert "is there already and is no page of a report" in capsys.readouterr().err
        assert (run / name).read_bytes() == before
    assert main(["report", str(run)]) == main(["report", str(run)]) == 0


def test_where_no_page_can_be_written(run, capsys):
    for out in ("x" * 300, str(run / "metrics.jsonl" / "a"), str(run)):
        assert main(["report", str(run), "--out", out]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert not list(run.glob("*.writing"))
