"""The house: which package may import which. An arrow that runs up the floors fails here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "flowgrpo_rc"
BASE = {
    "lazy",
    "paths",
    "prompt",
    "reference_files",
    "checks",
    "section",
    "dtypes",
    "field_docs",
    "messages",
    "processes",
    "quiet",
    "threads",
    "run_folder",
    "run_lock",
    "transfers",
}

ALLOWED = {
    "correction": BASE,
    "sde": BASE,
    "loss": {"correction", "sde", "batch", *BASE},
    "batch": {"correction", "sde"},
    "models": BASE,
    "actor": {"correction", "sde", "loss", "batch", "models", *BASE},
    "rollout": {"correction", "sde", "loss", "batch", "models", *BASE},
    "rewards": BASE,
    "data": {"rewards", *BASE},
    "integrations": {"correction", "sde", "loss", "batch"},
}
ALLOWED["writer"] = {"correction", "loss", "batch", "models", "actor", "rollout", *BASE}
ALLOWED["gap"] = {"correction", "sde", "loss", "batch", "models", "actor", "rollout", *BASE}
ALLOWED["replay"] = {"batch", "actor", "rollout", *BASE}
ALLOWED["planner"] = {"sde", "batch", "models", "actor", "rollout", "writer", *BASE}
ALLOWED["evaluation"] = {"models", "gap", "rewards", *BASE}
ALLOWED["report"] = {"correction", "sde", "loss", "actor", "gap", "rewards", *BASE}
ALLOWED["trainer"] = {*ALLOWED, *BASE} - {"integrations"}
ALLOWED["cli"] = {*ALLOWED, *BASE} - {"integrations"}

TORCH_ONLY = {"torch", "numpy", "jaxtyping", "yaml", "typing_extensions"}


def imports_of(path):
    """Full names of everything a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module)
            if node.module == "flowgrpo_rc":
                yield from (f"flowgrpo_rc.{alias.name}" for alias in node.names)


def files_of(floor):
    single = PACKAGE / f"{floor}.py"
    return [single] if single.is_file() else sorted((PACKAGE / floor).rglob("*.py"))


@pytest.mark.parametrize("floor", sorted(ALLOWED))
def test_imports_run_down_the_floors(floor):
    assert files_of(floor)
    own = {floor, "__version__"}
    for path in files_of(floor):
        rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("flowgrpo_rc.")}
        assert rooms <= ALLOWED[floor] | own, f"{path.name} imports {sorted(rooms - ALLOWED[floor] - own)}"


def test_the_report_takes_limits_and_remedies_alone_from_the_gap():
    """Those need no torch; measurements do."""
    for path in files_of("report"):
        taken = {name for name in imports_of(path) if name.startswith("flowgrpo_rc.gap")}
        assert taken <= {"flowgrpo_rc.gap.safety"}, f"{path.name} imports {taken}"


def test_the_evaluation_takes_intervals_alone_from_the_gap():
    for path in files_of("evaluation"):
        taken = {name for name in imports_of(path) if name.startswith("flowgrpo_rc.gap")}
        assert taken <= {"flowgrpo_rc.gap.intervals"}, f"{path.name} imports {taken}"


def test_the_writer_takes_nothing_of_the_image_side():
    """The optimizer of an adapter, and its digest, are for any network."""
    for path in files_of("writer"):
        taken = {name for name in imports_of(path) if name.startswith(("flowgrpo_rc.actor", "flowgrpo_rc.rollout"))}
        known = {"flowgrpo_rc.actor.config", "flowgrpo_rc.actor.optimizer", "flowgrpo_rc.rollout.digest"}
        # How engines are placed, started and lost.
        known |= {f"flowgrpo_rc.rollout.{module}" for module in ("config", "process", "base")}
        assert taken <= known, f"{path.name} imports {taken}"


def test_research_is_fenced_off():
    """Only the probe and its command's result measure what ``gap.research`` has; training imports nothing of it."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "research" and path.name != "probe.py":
            taken = [name for name in imports_of(path) if name.startswith("flowgrpo_rc.gap.research")]
            assert not taken or path.name == "safety.py", f"{path.name} imports {taken}"


@pytest.mark.parametrize("floor", ["correction", "sde"])
def test_first_floor_needs_torch_alone(floor):
    for path in files_of(floor):
        foreign = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"flowgrpo_rc"}
        assert foreign <= TORCH_ONLY, f"{path.name} imports {sorted(foreign - TORCH_ONLY)}"


def test_the_report_needs_no_torch():
    code = (
        "import pkgutil, sys, flowgrpo_rc.report as room\n"
        "for module in pkgutil.iter_modules(room.__path__): __import__(f'{room.__name__}.{module.name}')\n"
        "found = {'torch', 'diffusers', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_imports_the_integrations():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "integrations":
            assert not any(name.startswith("flowgrpo_rc.integrations") for name in imports_of(path)), path
