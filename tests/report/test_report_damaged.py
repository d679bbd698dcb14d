"""``flowgrpo-rc report`` on logs, settings and pictures that are damaged: a page that says so, or one line."""

import json
import os
import shutil
import struct
import zlib

import pytest
from PIL import Image
from rows import CONFIG, folder, rows, settings

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.report import NotARunError, check_health, figures, page, read_run, write_report
from flowgrpo_rc.report.figures import LONGEST_SIDE, picture_uri
from flowgrpo_rc.report.history import History


@pytest.fixture
def run(tmp_path):
    """A healthy run of a few steps."""
    return folder(tmp_path / "run", rows(6), settings())


@pytest.fixture
def unfigured(monkeypatch):
    """Pages without figures: drawing them takes most of a report's time."""
    monkeypatch.setattr(page, "figures", lambda history: [])


def edit(run, change):
    """``change(row)`` on every row of the log."""
    log = run / "metrics.jsonl"
    changed = [json.loads(line) for line in log.read_text().splitlines()]
    for row in changed:
        change(row)
    log.write_text("".join(json.dumps(row) + "\n" for row in changed))


def report(run, capsys, *arguments):
    """Exit code, and what was printed and complained of."""
    code = main(["report", str(run), *arguments])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out, printed.err


def log_finding(run_rows):
    """What the check of the log itself says."""
    return next(f for f in check_health(run_rows, CONFIG) if f.check == "log")


# ---------------------------------------------------------------- steps


def without_step(row):
    row.pop("step")


@pytest.mark.usefixtures("unfigured")
def test_rows_without_a_step_are_counted(run, capsys):
    edit(run, without_step)
    code, out, _ = report(run, capsys)
    assert code == 0
    assert "step 6 of 30" in out


@pytest.mark.parametrize("value", [None, "x", "5", [1], {"a": 1}, float("nan"), 10**400, 2**63, 1e300])
def test_a_step_that_is_none_comes_after_the_row_before(value):
    made = rows(4)
    made[2]["step"] = value
    assert History(made).steps == [1, 2, 3, 4]
    late = rows(4)
    for row in late:
        row["step"] += 100
    late[1]["step"] = value
    assert History(late).steps == [101, 102, 103, 104]


def test_steps_that_repeat_or_go_back_are_said():
    made = rows(6)
    assert log_finding(made).level == "ok"
    assert log_finding(made + made[3:]).level == "watch"
    assert "3 step(s) stand there again or out of order, the first is step 4" in log_finding(made + made[3:]).measured
    assert "the first is step 5" in log_finding(made[::-1]).measured
    history = History(made[::-1])
    assert history.steps == [1, 2, 3, 4, 5, 6]
    assert history.rows[0] is made[0]


def test_a_validation_of_its_own_row_repeats_no_step():
    validation = {"step": 6, "val/reward/mean": 0.5}
    assert log_finding([*rows(6), validation]).level == "ok"


# ---------------------------------------------------------------- values and names


@pytest.mark.parametrize("value", [None, "x", True, [1], {"a": 1}, 1e308, -1e308, 10**400, 1e-320, 2**70, ""])
def test_values_of_any_kind_are_judged_or_left_out(value):
    made = [dict.fromkeys(row, value) | {"step": row["step"]} for row in rows(15)]
    check_health(made, CONFIG)


def test_values_too_small_to_compute_with_count_as_zero():
    series = History([{"step": 1, "a": 1e-320}, {"step": 2, "a": -1e-200}, {"step": 3, "a": 1e-100}]).series("a")
    assert series is not None
    assert series.values == (0.0, 0.0, 1e-100)


def test_values_that_cannot_be_drawn_leave_one_figure_out(run, monkeypatch):
    """Denormal values once broke a colour bar; whatever matplotlib raises costs one figure."""
    real = figures.render

    def broken(panel, history):
        if panel.title == "Reward":
            raise RuntimeError("first line\nsecond line")
        return real(panel, history) if panel.title.startswith("Gap") else "data:,"

    monkeypatch.setattr(figures, "render", broken)
    path, _ = write_report(read_run(run))
    text = path.read_text()
    assert "This figure cannot be drawn (RuntimeError: first line)." in text
    assert "second line" not in text
    assert text.count('<img src="data:') >= 5


@pytest.mark.parametrize("value", [1e-320, 1e149, -1e149])
def test_figures_of_extreme_values(value):
    made = [dict.fromkeys(row, value) | {"step": row["step"]} for row in rows(3)]
    for figure in figures.figures(History(made, CONFIG)):
        assert figure.uri, figure.caption


@pytest.mark.parametrize("name", ["reward/\ud800", "reward/\0", "reward/\n", "reward/\x1b[31m", "reward/\u202e"])
def test_names_that_cannot_be_shown_are_escaped(run, name):
    edit(run, lambda row: row.update({name: 1.0, f"{name}2": 2.0}))
    read = read_run(run)
    shown = [n for n in read.rows[0] if n.startswith("reward/\\")]
    assert len(shown) == 2
    assert all(n.isprintable() for n in read.rows[0])
    reward = figures.panels_of(read.history)[0]
    assert figures.render(reward, read.history)


@pytest.mark.usefixtures("unfigured")
def test_endless_names_are_left_out_and_counted(run, capsys):
    edit(run, lambda row: row.update({"x" * 200_000: 1.0, "y" * 201: 1.0, "z" * 200: 1.0}))
    code, out, _ = report(run, capsys)
    assert code == 0
    assert "2 metrics whose names are longer than 200 characters were left out." in out
    assert "z" * 200 in read_run(run).rows[0]


# ---------------------------------------------------------------- metrics.jsonl


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_a_log_that_is_no_file(run, capsys, kind):
    log = run / "metrics.jsonl"
    log.unlink()
    make = {"folder": log.mkdir, "pipe": lambda: os.mkfifo(log), "link to nothing": lambda: log.symlink_to("gone")}
    make[kind]()
    code, _, error = report(run, capsys)
    assert code == 2
    assert "not a run folder, its metrics.jsonl is no file" in error


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"\x00" * 500, b"[1]\n3\nnull\n", b"\xff\xfe{\x00}\x00", b"[" * 100_000, b'{"a": ' + b"1" * 5000],
)
def test_a_log_without_a_row(run, capsys, content):
    (run / "metrics.jsonl").write_bytes(content)
    code, _, error = report(run, capsys)
    assert code == 2
    assert "metrics.jsonl: no complete line in it" in error


def test_a_log_that_may_not_be_read(run, capsys, monkeypatch):
    from flowgrpo_rc.report import run as module

    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "read_rows", deny)
    code, _, error = report(run, capsys)
    assert code == 2
    assert "metrics.jsonl: cannot be read (Permission denied); repair or remove it" in error


@pytest.mark.usefixtures("unfigured")
def test_damaged_lines_among_whole_ones_are_counted(run, capsys):
    with (run / "metrics.jsonl").open("a") as log:
        log.write("[" * 100_000 + "\n" + '{"step": 7, "a": ' + "1" * 5000 + "}\n" + "3\n")
    code, out, _ = report(run, capsys)
    assert code == 0
    assert "3 line(s) cut off or not readable" in out


# ---------------------------------------------------------------- config.yaml

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
BROKEN_YAML = {
    "a list": (b"[1, 2]", "expected a mapping, found list"),
    "a text": (b"hello", "expected a mapping, found str"),
    "empty": (b"", "expected a mapping, found NoneType"),
    "not UTF-8": (b"\xff\xfe", "cannot be read ('utf-8' codec"),
    "nested lists": (b"[" * 20_000, "it nests too deeply"),
    "nested mappings": (b"{a: " * 2000 + b"1" + b"}" * 2000, "it nests too deeply"),
    "nested by indentation": ("".join(" " * i + "a:\n" for i in range(1500)).encode(), "it nests too deeply"),
    "deeper than settings go": (b"{a: " * 150 + b"1" + b"}" * 150, "it nests too deeply"),
    "holding itself": (b"&a {b: *a}", "it nests too deeply"),
    "aliases of aliases": (BOMB.encode(), "it stands for more than 100000 values"),
    "a Python object": (b"a: !!python/object:os.system {}", "could not determine a constructor"),
    "a date that is none": (b"a: 2026-13-45", "month must be in 1..12"),
    "an integer of 5,000 digits": (b"a: " + b"1" * 5000, "Exceeds the limit"),
    "a tab": (b"a:\n\t- b", "cannot be read"),
    "cut off": (b"a: {b: c", "cannot be read"),
    "two documents": (b"a: 1\n---\nb: 2", "expected a single document"),
    "a NUL": (b"a: \x00", "unacceptable character"),
    "larger than any": (b"a: 1\n" + b"#" * 5_000_001, "larger than 5000000 bytes"),
}


@pytest.mark.parametrize("kind", BROKEN_YAML)
def test_a_configuration_that_is_none(run, capsys, kind):
    content, says = BROKEN_YAML[kind]
    (run / "config.yaml").write_bytes(content)
    code, _, error = report(run, capsys)
    assert code == 2
    assert error.count("\n") == 1
    assert f"{run / 'config.yaml'}: " in error
    assert says in error
    assert "repair or remove it" in error


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_a_configuration_that_is_no_file(run, capsys, kind):
    file = run / "config.yaml"
    file.unlink()
    make = {"folder": file.mkdir, "pipe": lambda: os.mkfifo(file), "link to nothing": lambda: file.symlink_to("gone")}
    make[kind]()
    code, _, error = report(run, capsys)
    assert code == 2
    assert "config.yaml: is no file; repair or remove it" in error


@pytest.mark.usefixtures("unfigured")
@pytest.mark.parametrize(
    "content",
    [
        "actor_rollout_ref: 3\ntrainer: [1]\nalgorithm: x",
        "trainer: {total_training_steps: true}",
        "trainer: {total_training_steps: .nan}",
        'trainer: {total_training_steps: "10"}',
        "trainer: {total_training_steps: " + "9" * 400 + "}",
        "actor_rollout_ref: {actor: {diffusion_loss: {clip_ratio: [1], clip_ratio_low: {a: 1}, loss_mode: [x]}}}",
        "actor_rollout_ref: {actor: {diffusion_loss: {clip_ratio: " + "9" * 400 + ", clip_ratio_low: -1}}}",
        "algorithm: {rollout_correction: [1]}",
        "algorithm: {rollout_correction: {rollout_rs: [[1]], 3: 4}}",
        "algorithm: {rollout_correction: {bypass_mode: {a: 1}, rollout_is: [1], loss_type: [x]}}",
        "algorithm: {rollout_correction: {rollout_is_mode: {a: 1}}}",
        "1: 2\nnull: 3\n2026-01-01: 4",
        'a: "\\0"\nactor_rollout_ref: {model: {path: "\\uD800"}}',
    ],
)
def test_settings_of_another_kind_are_no_traceback(run, capsys, content):
    (run / "config.yaml").write_text(content)
    code, out, _ = report(run, capsys)
    assert code in (0, 3)
    assert "Written:" in out


# ---------------------------------------------------------------- pictures


def png_header(path, width, height):
    """The beginning of a picture of any size, and no pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"")
    chunks = [
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in ((b"IHDR", head), (b"IDAT", data))
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@pytest.mark.parametrize("side", [8000, 20_000, 100_000, 2**31 - 1])
def test_a_picture_too_large_to_open(tmp_path, side):
    path = tmp_path / "step_1.png"
    png_header(path, side, side)
    uri, says = picture_uri(path)
    assert uri is None
    assert "is too large to show" in says


def test_a_wide_picture_is_shown_smaller(tmp_path):
    path = tmp_path / "step_1.png"
    Image.new("RGB", (20_000, 40)).save(path)
    uri, says = picture_uri(path)
    assert uri is not None
    assert says == ""
    assert len(uri) < 100_000
    small = Image.new("RGB", (LONGEST_SIDE, 8))
    small.save(path)
    shown, _ = picture_uri(path)
    assert shown is not None


@pytest.mark.usefixtures("unfigured")
def test_a_page_with_a_picture_of_20000_pixels(run, capsys):
    shutil.rmtree(run / "samples", ignore_errors=True)
    (run / "samples").mkdir()
    png_header(run / "samples" / "step_000001.png", 20_000, 20_000)
    code, _, _ = report(run, capsys)
    assert code == 0
    text = (run / "report.html").read_text()
    assert "step_000001.png is too large to show" in text
    assert len(text) < 100_000


def cut_picture(path):
    Image.effect_noise((300, 300), 50).save(path)
    path.write_bytes(path.read_bytes()[:5000])


def flipped_picture(path):
    Image.effect_noise((300, 300), 50).save(path)
    content = bytearray(path.read_bytes())
    content[2000] ^= 255
    path.write_bytes(content)


BROKEN_PICTURES = {
    "cut off": cut_picture,
    "a flipped bit": flipped_picture,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("x"),
    "SVG": lambda path: path.write_text('<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'),
    "header alone": lambda path: png_header(path, 10, 10),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("gone"),
}


@pytest.mark.parametrize("kind", BROKEN_PICTURES)
def test_a_picture_that_is_none(tmp_path, kind):
    path = tmp_path / "step_1.png"
    BROKEN_PICTURES[kind](path)
    assert picture_uri(path) == (None, "cannot be read; it may be being written")


def test_a_picture_of_another_format_becomes_png(tmp_path):
    path = tmp_path / "step_1.png"
    Image.new("RGB", (60, 60)).save(path, format="JPEG")
    uri, _ = picture_uri(path)
    assert uri is not None
    assert uri.startswith("data:image/png;base64,iVBOR")


# ---------------------------------------------------------------- probe.json, folders, --out


@pytest.mark.usefixtures("unfigured")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "nests too deeply"),
        ("[]", "not what flowgrpo-rc probe writes"),
        ('{"steps": ' + "1" * 5000, "Exceeds"),
    ],
)
def test_a_probe_that_is_none_is_left_out(run, capsys, content, says):
    (run / "probe.json").write_text(content)
    code, out, _ = report(run, capsys)
    assert code == 0
    assert "probe.json was left out: " in out
    assert says in out


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "gone"])
def test_a_folder_that_cannot_be(capsys, name):
    code, _, error = report(name, capsys)
    assert code == 2
    assert "no such folder; give a run folder" in error
    assert "\0" not in error


@pytest.mark.usefixtures("unfigured")
def test_where_no_page_can_be_written(run, capsys):
    for out, says in (
        ("a\0", "NUL"),
        ("x" * 300, "too long"),
        (str(run / "metrics.jsonl" / "a"), ""),
        (str(run), "folder"),
    ):
        code, _, error = report(run, capsys, "--out", out)
        assert code == 2
        assert says in error
    assert not list(run.glob("*.writing"))


@pytest.mark.usefixtures("unfigured")
def test_a_folder_whose_name_is_no_text(run, capsys):
    other = run.parent / os.fsdecode(b"run\xff")
    try:
        shutil.copytree(run, other)
    except OSError:
        pytest.skip("this file system takes no such name")
    code, out, _ = report(other, capsys)
    assert code == 0
    assert "Written: " in out
    assert "\\udcff" in out


def test_refusals_are_of_one_class(run):
    (run / "config.yaml").write_bytes(b"[" * 20_000)
    with pytest.raises(NotARunError, match="it nests too deeply"):
        read_run(run)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_a_page_never_replaces_a_record(run, capsys, name):
    before = (run / name).read_bytes()
    code, _, error = report(run, capsys, "--out", str(run / name))
    assert code == 2
    assert f"{name}: is there already and is no page of a report; give another name" in error
    assert (run / name).read_bytes() == before


def test_a_page_never_replaces_a_pipe_but_an_earlier_page(run, capsys, unfigured):
    os.mkfifo(run / "pipe.html")
    assert report(run, capsys, "--out", str(run / "pipe.html"))[0] == 2
    (run / "empty.html").touch()
    for _ in range(2):
        assert report(run, capsys, "--out", str(run / "empty.html"))[0] == 0


@pytest.mark.parametrize("value", ["!!int ''", "!!bool x", "!!timestamp x"])
def test_a_setting_that_is_not_what_its_tag_says(run, capsys, value):
    (run / "config.yaml").write_text(f"a: {value}\n")
    code, _, error = report(run, capsys)
    assert code == 2
    assert "config.yaml: cannot be read" in error
