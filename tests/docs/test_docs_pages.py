"""The pages of the documentation do what they say: their blocks run, and print what they show."""

import contextlib
import dataclasses
import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from doc_page import DOCS, assert_shown, blocks, cells, run_blocks, run_page
from matplotlib import pyplot

from flowgrpo_rc import FlowGRPOConfig, diffusion_loss
from flowgrpo_rc.correction import plan
from flowgrpo_rc.correction.numerics.rejection import QUANTITIES
from flowgrpo_rc.correction.options.explanation import STATISTICS
from flowgrpo_rc.correction.plan import WEIGHT_MODES
from flowgrpo_rc.loss import OBJECTIVES
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.report import health
from flowgrpo_rc.rewards.registry import REWARDS
from flowgrpo_rc.rollout.engines import ENGINES

ROOT = DOCS.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


@pytest.mark.run
def test_quickstart(tmp_path, monkeypatch):
    scope = run_page("quickstart.md", tmp_path, monkeypatch, digits=False)
    scope["trainer"].folder.close()
    assert (tmp_path / "outputs/first_run/report.html").is_file()
    held_out = [row["val/reward/brightness"] for row in scope["run"].rows if "val/reward/brightness" in row]
    assert held_out[-1] > held_out[0] + 0.02
    assert 0.1 < scope["gap"].value < 0.5
    before, after = drawn_as_trained(scope)
    assert after.mean() > before.mean() + 5


def drawn_as_trained(scope):
    """A page's pictures before and after, (N, H, W, 3) each, once their settings are those of its run."""
    settings = scope["run"].config["actor_rollout_ref"]["rollout"]["pipeline"]
    assert scope["pipe"].scheduler.num_inference_steps == settings["num_inference_steps"]
    assert f"true_cfg_scale={settings['true_cfg_scale']}" in cells(NOTEBOOK)[-1].text
    before = np.stack(scope["before"]).astype(float)
    after = np.stack(scope["after"]).astype(float)
    assert before.shape == after.shape == (len(scope["prompts"]), settings["height"], settings["width"], 3)
    return before, after


@pytest.mark.run
def test_the_notebook(tmp_path, monkeypatch):
    """Held-out rewards rise, and ``evaluate`` finds those of the run's first and last validation again."""
    pyplot.switch_backend("agg")
    scope = run_blocks(cells(NOTEBOOK), "notebook", tmp_path, monkeypatch)
    held_out = [row["val/reward/mean"] for row in scope["run"].rows if "val/reward/mean" in row]
    assert len(held_out) == 6
    assert held_out[-1] > held_out[0] + 0.03
    training, validation = (line.get_ydata() for line in scope["axes"].lines)
    assert len(training) == 25
    assert list(validation) == held_out
    table = json.loads((tmp_path / "outputs/tour_evaluation/evaluation.json").read_text())["table"]
    means = {row["model"]: row["mean"] for row in table if row["score"] == "mean"}
    assert means == {"base": held_out[0], "lora": held_out[-1]}
    assert set(scope["prompts"]) <= set((ROOT / "assets/tiny_ocr/test.txt").read_text().splitlines())
    assert np.abs(np.subtract(*drawn_as_trained(scope))).mean((1, 2, 3)).min() > 2  # every picture changed
    pyplot.close(scope["figure"])


def test_the_notebook_is_committed_without_outputs_and_draws_as_the_quickstart():
    whole = json.loads(NOTEBOOK.read_text())
    assert [cell for cell in whole["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    page = next(block.text for block in blocks("quickstart.md") if "load_lora_weights" in block.text)
    of_page = page.partition("\npipe = ")[2].replace("outputs/first_run", "outputs/tour")
    of_notebook = cells(NOTEBOOK)[-1].text.partition("\npipe = ")[2]
    assert of_page + "grid" == of_notebook


@pytest.mark.run
def test_a_training_loop_of_your_own(tmp_path, monkeypatch):
    scope = run_page("howto/library.md", tmp_path, monkeypatch, digits=False)
    assert scope["held_out"].images.shape == (12, 32, 32, 3)
    assert 1e-5 < scope["gap"] < 1e-3
    assert (tmp_path / "my_lora/pytorch_lora_weights.safetensors").is_file()


def test_prompt_files(tmp_path, monkeypatch):
    scope = run_page("prompt_files.md", tmp_path, monkeypatch, only=slice(0, 5))
    assert scope["one"].metadata["reward_model"]["ground_truth"] == "open"


def test_training_in_micro_batches_equals_the_whole_batch(tmp_path, monkeypatch):
    torch.manual_seed(0)
    scope = run_page("training.md", tmp_path, monkeypatch, only=slice(0, 1))
    scale = scope["scale"].detach().requires_grad_()
    loss, metrics = diffusion_loss(scope["config"], {"log_probs": scale * scope["rollout"]}, scope["batch"])
    loss.backward()
    assert abs(float(scale.grad)) > 1e-3
    torch.testing.assert_close(scope["scale"].grad, scale.grad)
    together = scope["metrics"].compute()
    assert 0.2 < metrics["actor/kept_fraction"] < 0.9
    assert 0.1 < metrics["actor/pg_clipfrac"] < 0.9
    for name in ("actor/kept_fraction", "actor/pg_clipfrac", "actor/ppo_kl"):
        assert abs(together[name] - metrics[name]) < 1e-6, name


def test_training_on_tokens_leaves_masked_ones_alone(tmp_path, monkeypatch):
    scope = run_page("training.md", tmp_path, monkeypatch, only=slice(1, 2))
    gradient = scope["log_probs"].grad
    assert gradient[scope["mask"]].abs().sum() > 0
    assert gradient[~scope["mask"]].abs().sum() == 0


def test_output_is_compared_number_by_number():
    shown = "gap 0.22 in 25 checks\n... 1.5e-04"
    assert_shown(shown, "gap 0.22 in 25 checks\nabc\ndef 1.6e-04\n", "page")
    assert_shown("reward 0.84 ...", "reward 0.91 more", "page", digits=False)
    with pytest.raises(AssertionError, match="page shows"):
        assert_shown("reward 0.84", "held-out 0.84", "page", digits=False)
    for printed in ("gap 0.24 in 25 checks\nabc 1.5e-04", "gap 0.22 in 26 checks\nabc 1.5e-04", "gap 0.22"):
        with pytest.raises(AssertionError, match="page shows"):
            assert_shown(shown, printed, "page")


def test_every_test_that_a_page_names_exists():
    """Statements about behaviour name the test that holds them, in brackets."""
    pages = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    files = "\n".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", pages))
    assert len(named) > 80
    assert named - set(re.findall(r"^def (test_\w+)", files, re.M)) == set()


def test_a_file_that_a_page_shows_is_named_before_it():
    """GitHub does not show the titles of code blocks."""
    shown = [
        (page, paragraph, fence[1])
        for page in [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]
        for paragraph, block in pairwise(page.read_text().split("\n\n"))
        if (fence := re.match(r"```\w+ title=\"([^\"]+)\"", block))
    ]
    assert len(shown) > 10
    assert [(page, title) for page, paragraph, title in shown if f"`{title}`" not in paragraph] == []


def test_every_name_of_the_package_is_in_the_reference():
    import flowgrpo_rc

    rows = re.findall(r"^\| \[`(\w+)`\]", (DOCS / "reference" / "package.md").read_text(), re.M)
    assert sorted(rows) == sorted(flowgrpo_rc.__all__)


def test_every_section_of_the_configuration_is_in_the_reference():
    named = set(
        re.findall(r"^::: flowgrpo_rc\.[\w.]*\.(\w+)$", (DOCS / "reference/configuration.md").read_text(), re.M)
    )
    lists_hold = {"RolloutCorrectionConfig", "JudgeQuestion"}
    assert _classes_of(FlowGRPOConfig()) | lists_hold == named


def _classes_of(section):
    """Names of the dataclasses of a section and of those within it."""
    values = [getattr(section, field.name) for field in dataclasses.fields(section)]
    return {type(section).__name__}.union(*[_classes_of(value) for value in values if dataclasses.is_dataclass(value)])


def test_functions_named_as_their_module_are_in_the_reference():
    """The reference's generator takes a room's name that is also a module's for the module."""
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    for room in re.findall(r"^::: flowgrpo_rc\.(\w+)$", pages, re.M):
        package = importlib.import_module(f"flowgrpo_rc.{room}")
        for name in getattr(package, "__all__", ()):
            if (Path(package.__file__).parent / f"{name}.py").is_file():
                assert f"::: flowgrpo_rc.{room}.{name}.{name}" in pages, (room, name)


def test_adding_a_reward(tmp_path, monkeypatch):
    with patch.dict(REWARDS):
        run_page("howto/reward.md", tmp_path, monkeypatch)


def test_reward_servers(tmp_path, monkeypatch):
    run_page("rewards/remote.md", tmp_path, monkeypatch)


def test_adding_a_model_family(tmp_path, monkeypatch):
    monkeypatch.setattr(diffusers, "NegativeImagePipeline", None, raising=False)
    with patch.dict(FAMILIES):
        run_page("howto/model_family.md", tmp_path, monkeypatch)


def test_adding_an_objective(tmp_path, monkeypatch):
    with patch.dict(OBJECTIVES):
        run_page("howto/objective.md", tmp_path, monkeypatch)


def test_adding_an_importance_mode(tmp_path, monkeypatch):
    with patch.dict(WEIGHT_MODES):
        run_page("howto/importance_mode.md", tmp_path, monkeypatch)


def test_adding_a_rejection_option(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "RS_OPTIONS", plan.RS_OPTIONS)
    with patch.dict(QUANTITIES), patch.dict(STATISTICS):
        run_page("howto/rejection_option.md", tmp_path, monkeypatch)


@pytest.mark.run
def test_adding_an_engine(tmp_path, monkeypatch):
    with patch.dict(ENGINES):
        run_page("howto/engine.md", tmp_path, monkeypatch)


@pytest.mark.run
def test_adding_a_metric_with_its_check(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "CHECKS", health.CHECKS)
    scope = run_page("howto/metric.md", tmp_path, monkeypatch)
    scope["trainer"].run.engine.close()
    scope["trainer"].folder.close()


def test_every_name_and_file_that_a_page_mentions_exists():
    """Dotted names and paths of this package, in the text outside of code blocks."""
    root = DOCS.parent
    names, paths = set(), set()
    for page in [*root.glob("*.md"), *DOCS.rglob("*.md")]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        names |= set(re.findall(r"`(flowgrpo_rc(?:\.\w+)+)`", text))
        paths |= set(
            re.findall(r"`((?:flowgrpo_rc|benchmarks|configs|examples|scripts|tests|assets)/[\w./]*\w/?)`", text)
        )
    assert len(names) > 10
    assert len(paths) > 15
    assert sorted(path for path in paths if not (root / path).exists()) == []
    assert sorted(name for name in names if not _resolves(name)) == []


def _resolves(name):
    """True if it is a module, imported or not (the drop-ins need the packages that they replace), or a name in one."""
    with contextlib.suppress(ModuleNotFoundError):  # where the parent is no package
        if importlib.util.find_spec(name) is not None:
            return True
    parent, _, last = name.rpartition(".")
    return _resolves(parent) and hasattr(importlib.import_module(parent), last)
