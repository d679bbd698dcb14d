"""The page as HTML, and the command that writes it."""

import base64
import io
import json
import math
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from PIL import Image
from rows import COLLAPSING, CONFIG, folder, rows, settings

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.report import build_page, check_health, read_run, write_report

NASTY = '<script>alert("1")</script>&"\''


class Page(HTMLParser):
    """Tags, addresses, pictures and text of a page; complains of tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.images, self.text = [], [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.addresses += [found[key] for key in ("src", "srcset", "href", "action", "data") if key in found]
        if tag == "img":
            self.images.append(found)
        if tag not in ("meta", "link", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page_of(run):
    text = build_page(run, check_health(run.rows, run.config, broken_lines=run.broken_lines))
    return text, Page(text)


@pytest.fixture(scope="module")
def collapsing(tmp_path_factory):
    """A run folder whose settings hold markup."""
    config = settings(actor_rollout_ref__model__path=NASTY, trainer__experiment_name=NASTY)
    return folder(tmp_path_factory.mktemp("runs") / "fp8 & <b>", rows(30, **COLLAPSING, **{NASTY: 1.0}), config)


@pytest.fixture(scope="module")
def text(collapsing):
    """Its page."""
    return page_of(read_run(collapsing))[0]


def test_nothing_is_fetched_and_every_picture_decodes(text):
    page = Page(text)
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses)
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert len(page.images) >= 8
    for image in page.images:
        assert len(image["alt"]) > 20
    for address in page.addresses:
        kind, _, content = address.removeprefix("data:").partition(";base64,")
        if kind == "image/png":
            Image.open(io.BytesIO(base64.b64decode(content, validate=True))).verify()
        elif kind == "image/svg+xml":
            assert ElementTree.fromstring(base64.b64decode(content, validate=True)).tag.endswith("svg")
        else:
            assert address == "data:,"


def test_what_the_run_says_is_text_and_not_markup(text):
    page = Page(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "<script" not in text
    assert page.text.count(NASTY) >= 3  # model, name of a metric, configuration
    assert "fp8 & <b>" in page.text


def test_headings_and_findings_are_all_there(collapsing, text):
    run = read_run(collapsing)
    findings = check_health(run.rows, run.config)
    page = Page(text)
    assert page.tags.count("h1") == 1
    assert {"main", "header", "section", "h2", "h3", "figure", "figcaption", "details", "table"} <= set(page.tags)
    for finding in findings:
        assert finding.measured in page.text
        assert finding.check in page.text
        assert finding.level == "ok" or finding.advice in page.text
    assert "Problem: clipped before anything is learned" in page.text
    assert "Not checked, as this run" in page.text
    assert "step 30 of 30, finished" in page.text
    assert "PPO in bypass mode" in page.text


def test_a_run_that_goes_on_or_was_killed(tmp_path):
    run = read_run(folder(tmp_path / "run", rows(1), tail='{"step": 2, "reward/me'))
    assert (len(run.rows), run.broken_lines) == (1, 1)
    _, page = page_of(run)
    assert "step 1 of 30, running or interrupted" in page.text
    assert "1 line(s) cut off" in page.text


def test_rows_of_another_trainer(tmp_path):
    """No configuration, no steps, tokens, and a NaN as Python writes it."""
    (tmp_path / "verl").mkdir()
    row = {"critic/rewards/mean": 0.5, "rollout_corr/kl": 0.2, "actor/grad_norm": math.nan, "note": "x", "flag": None}
    (tmp_path / "verl" / "metrics.jsonl").write_text((json.dumps(row) + "\n\n") * 3)
    path, findings = write_report(read_run(tmp_path / "verl"))
    assert path.name == "report.html"
    assert {f.check for f in findings if f.level == "problem"} == {"log", "kl"}
    assert "no config.yaml" in Page(path.read_text()).text


def test_settings_that_this_version_refuses_are_quoted(tmp_path):
    config = settings(algorithm__rollout_correction__bypas=True)
    _, page = page_of(read_run(folder(tmp_path / "run", rows(), config)))
    assert "bypas" in page.text


def test_the_probe_s_table(tmp_path):
    root = folder(tmp_path / "run", rows())
    step = {"timestep": 500.0, "abs_mean": 9.1e-4, "abs_q90": 2e-3, "abs_max": 3e-3, "nats": 0.5, "clipped": 0.31}
    advice = {"safe": False, "reasons": [f"31 % are clipped {NASTY}"]}
    probe = {"steps": [step], "overall": {**step, "timestep": None}, "advice": advice}
    (root / "probe.json").write_text(json.dumps(probe))
    _, page = page_of(read_run(root))
    assert "Not safe" in page.text
    assert f"clipped {NASTY}" in page.text
    assert page.text.count("9.1e-4") >= 2
    at = {"value": 0.0253, "interval": {"low": 0.0222, "high": 0.0279}}
    drift = {"timesteps": [{"timestep": 500.0, **at}], "value": 0.0105, "interval": {"low": 0.0097, "high": None}}
    (root / "probe.json").write_text(json.dumps(probe | {"drift": drift}))
    _, page = page_of(read_run(root))
    assert "0.0253 (0.0222 to 0.0279)" in page.text
    assert "0.0105 (0.0097 to )" in page.text


def test_exit_codes(tmp_path, capsys):
    healthy, sick = folder(tmp_path / "ok", rows()), folder(tmp_path / "sick", rows(**COLLAPSING))
    assert main(["report", str(healthy)]) == 0
    assert "Healthy: nothing to do" in capsys.readouterr().out
    assert (healthy / "report.html").is_file()
    assert main(["report", str(sick), "--out", str(tmp_path / "new" / "page.html")]) == 3
    said = capsys.readouterr().out
    assert "problem  clip_first: actor/pg_clipfrac_first is 0.33 over steps 21-30" in said
    assert "page.html" in said
    assert (tmp_path / "new" / "page.html").is_file()
    assert not (sick / "report.html").exists()
    assert main(["report", str(sick), "--out", str(tmp_path)]) == 2


@pytest.mark.process
def test_the_command_needs_no_torch(tmp_path):
    root = folder(tmp_path / "run", rows())
    code = f"from flowgrpo_rc.cli.main import main; assert main(['report', {str(root)!r}]) == 0; import sys; "
    code += "bad = [m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules]; assert not bad, bad"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0


@pytest.mark.run
def test_a_real_run(finished_run, tmp_path):
    root = shutil.copytree(finished_run.root, tmp_path / "run")
    path, findings = write_report(read_run(root))
    page = Page(path.read_text())
    expected = {"log", "clip_first", "gap_vs_clip", "gap_timestep", "engine_gap", "rejected", "guard", "gap_mean"}
    assert {f.check for f in findings} >= expected
    assert len(page.images) >= 8
    assert "PPO in bypass mode" in page.text
    assert CONFIG["actor_rollout_ref"]["model"]["path"] in page.text
