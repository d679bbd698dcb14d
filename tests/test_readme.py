"""The README's code runs, its commands and links exist; no document names a machine."""

import json
import re
import shlex
from pathlib import Path

import yaml

from flowgrpo_rc import __version__
from flowgrpo_rc.cli.main import _parse, main
from flowgrpo_rc.loss import OBJECTIVES
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_library_example_runs():
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "import" in b)
    scope: dict = {}
    exec(block, scope)  # the example itself, as a reader would paste it
    assert scope["log_probs"].grad.abs().sum() > 0
    assert scope["loss_metrics"]["actor/kept_fraction"] == 1.0
    assert "rollout_corr/logprob_abs_diff_mean" in scope["metrics"]


def test_its_commands_are_ones_that_the_command_line_takes():
    lines = [line.partition(" #")[0] for line in README.splitlines() if line.startswith("flowgrpo-rc ")]
    assert len(lines) == 6
    for line in lines:
        assert callable(_parse(shlex.split(line)[1:]).run), line


def test_its_correction_needs_no_warning(capsys):
    (line,) = [line.partition(" #")[0] for line in README.splitlines() if line.startswith("flowgrpo-rc explain-config")]
    assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    assert "Weighted:  the loss" in said
    assert "warning" not in said


def test_it_stays_short():
    lines = README.splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 120] == []


def test_every_named_file_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README + (ROOT / "CONTRIBUTING.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
    modules = re.findall(r"`(\w+/[\w/]+\.py)`", README)
    assert len(modules) > 4
    assert [module for module in modules if not (ROOT / "flowgrpo_rc" / module).exists()] == []


def test_the_citation_is_of_this_version():
    """The fields that version 1.2.0 of the Citation File Format requires, of the software and of each reference."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__
    assert len(citation["references"]) >= 4
    for work in (citation, *citation["references"]):
        assert {"type", "title", "authors"} <= set(work)
        for author in work["authors"]:
            assert set(author) in ({"name"}, {"family-names", "given-names"}), author


def test_the_changelog_has_this_version():
    headings = re.findall(r"^## \[?([^]\n]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", __version__]


def test_documents_name_no_machine():
    """No document, script or test may hold a path of the machine it was written on."""
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|farm)/\w|(?<![\w.])/tmp/[a-z]")
    texts = [p for d in ("docs", "examples", "configs", "benchmarks") for p in (ROOT / d).rglob("*") if p.is_file()]
    for path in [*ROOT.glob("*.md"), ROOT / "CITATION.cff", *texts]:
        if path.suffix in {".md", ".cff", ".sh", ".py", ".yaml", ".json"}:
            found = pattern.search(path.read_text())
            assert found is None, (path, found)


def test_results_are_json_with_their_machine():
    results = ROOT / "benchmarks" / "results"
    for path in results.glob("*.json"):
        assert "commit" in json.dumps(json.loads(path.read_text())), path
    for path in results.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert "commit" in json.dumps(json.loads(line)), path


def test_the_table_of_models_is_that_of_the_registries():
    """Every family is in one row of the kinds of references that it takes, and vLLM-Omni is named where it draws it."""
    names = {
        "QwenImagePipeline": "Qwen-Image",
        "QwenImageEditPipeline": "Qwen-Image-Edit",
        "QwenImageEditPlusPipeline": "-Edit-Plus",
        "FluxPipeline": "FLUX.1",
        "FluxKontextPipeline": "FLUX.1-Kontext",
        "Flux2Pipeline": "FLUX.2",
        "Flux2KleinPipeline": "FLUX.2",
        "StableDiffusion3Pipeline": "SD3.5",
        "ZImagePipeline": "Z-Image",
        "WanPipeline": "Wan",
        "Lumina2Pipeline": "Lumina 2",
        "CogView4Pipeline": "CogView4",
        "ChromaPipeline": "Chroma",
        "AuraFlowPipeline": "AuraFlow",
        "BriaPipeline": "BRIA",
        "SanaPipeline": "Sana",
    }
    assert set(names) == set(FAMILIES)
    section = README.partition("## Models, objectives, engines")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines() if "diffusers" in row]
    for family, name in names.items():
        kinds = [
            kind for kind, takes in zip(("text", "text and images"), _kinds(FAMILIES[family]), strict=True) if takes
        ]
        for kind in kinds:
            (engines,) = [engines for models, drawn_from, engines in rows if name in models and drawn_from == kind]
            assert ("vLLM-Omni" in engines) == (family in PIPELINES), family
    assert all(title in section for title in ("Flow-GRPO", "DanceGRPO", "GRPO-Guard", "Flow-DPPO", "AWM", "NFT", "DPO"))
    assert len(OBJECTIVES) == 7


def _kinds(family):
    """Two flags: it draws from a text alone, and from a text with images."""
    fewest, most = family.images
    return fewest == 0, most > 0
