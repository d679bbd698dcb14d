"""The worked examples of reward servers: what can be told of them without their packages and weights."""

import ast
import py_compile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flowgrpo_rc.rewards.forms import BATCH

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "reward_servers"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/my_reward.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_file_compiles_and_defines_the_function_that_the_readme_serves(name, tmp_path):
    source = FOLDER / name / "my_reward.py"
    py_compile.compile(str(source), cfile=str(tmp_path / "compiled.pyc"), doraise=True)
    functions = {n.name: n for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef)}
    assert list(functions) == [name]
    arguments = functions[name].args
    assert tuple(a.arg for a in arguments.args) == BATCH
    assert not any([arguments.defaults, arguments.kwonlyargs, arguments.vararg, arguments.kwarg])


@pytest.mark.parametrize("name", NAMES)
def test_the_requirements_can_be_read_and_fit_the_server(name):
    """They pin numpy and pillow to what this package takes, and name every package that the file imports."""
    lines = (FOLDER / name / "requirements.txt").read_text().splitlines()
    listed = {r.name.lower(): r for r in map(Requirement, (line for line in lines if line and line[0] not in "#-"))}
    assert listed["numpy"].specifier.contains("1.26.0")
    assert listed["pillow"].specifier.contains("10.4.0")
    tree = ast.parse((FOLDER / name / "my_reward.py").read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module).split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    packages = {"PIL": "pillow", "ImageReward": "image-reward", "reward_server": None}
    assert {packages.get(module, module) for module in imported} - {None} <= set(listed)
