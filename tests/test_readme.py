"""The README's code runs, and the metrics it explains exist."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_library_example_runs():
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "import" in b)
    scope: dict = {}
    exec(block, scope)  # the example itself, as a reader would paste it
    assert scope["log_probs"].grad.abs().sum() > 0
    assert scope["loss_metrics"]["actor/kept_fraction"] == 1.0
    assert "rollout_corr/logprob_abs_diff_mean" in scope["metrics"]


def examples(document):
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / document).read_text(), re.S)


def test_the_micro_batch_example_equals_the_whole_batch():
    import torch

    from flowgrpo_rc import diffusion_loss

    torch.manual_seed(0)
    scope: dict = {}
    exec(examples("training.md")[0], scope)
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


def test_the_token_example_runs():
    scope: dict = {}
    exec(examples("training.md")[1], scope)
    gradient = scope["log_probs"].grad
    assert gradient[scope["mask"]].abs().sum() > 0
    assert gradient[~scope["mask"]].abs().sum() == 0


def test_every_explained_metric_is_logged(finished_run):
    logged = {name for row in finished_run.rows() for name in row}
    table = README.split("| metric | meaning |")[1].split("\n\n")[0]
    names = re.findall(r"`((?:actor|reward|val)/[\w/]+)`", table)
    assert len(names) > 12
    assert [n for n in names if n not in logged] == []
    assert {n.split("/")[1] for n in logged if n.startswith("timing_s/")} >= {"rollout", "update", "step"}


def test_every_named_file_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_documents_name_no_machine():
    """No document, script or test may hold a path of the machine it was written on."""
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|farm)/\w|(?<![\w.])/tmp/[a-z]")
    texts = [p for d in ("docs", "examples", "configs", "benchmarks") for p in (ROOT / d).rglob("*") if p.is_file()]
    for path in [ROOT / "README.md", *texts]:
        if path.suffix in {".md", ".sh", ".py", ".yaml", ".json"}:
            found = pattern.search(path.read_text())
            assert found is None, (path, found)


def test_results_are_json_with_their_machine():
    results = ROOT / "benchmarks" / "results"
    for path in results.glob("*.json"):
        assert "commit" in json.dumps(json.loads(path.read_text())), path
    for path in results.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert "commit" in json.dumps(json.loads(line)), path
