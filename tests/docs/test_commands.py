"""Every command of the pages below: composed as its program would, or checked against the files that it names.

Nothing here trains, downloads or needs a GPU. Scripts are run with programs in the place of torchrun and python that
write down what they were given; the overrides are then composed.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from doc_page import DOCS, blocks

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.cli.main import _parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "../README.md",
    "../CONTRIBUTING.md",
    "recipes.md",
    "troubleshooting.md",
    "reward_hacking.md",
    "clusters.md",
    "weights.md",
    "editing.md",
    "clean_images.md",
    "cheap_rollouts.md",
    "replay.md",
    "prompt_writer.md",
    "low_precision.md",
    "families.md",
    "coming_from_verl_omni.md",
    "gap.md",
    "gap_study.md",
    "prompts.md",
    "prompt_files.md",
    "report.md",
    "rollouts_elsewhere.md",
    "vllm_omni.md",
    "rewards/clip.md",
    "rewards/judge.md",
    "rewards/remote.md",
    "howto/evaluate.md",
    "howto/export.md",
    "howto/sharding.md",
)
"""``test_docs_pages.py`` runs those of the quickstart and of the other how-tos."""
HARDWARE = ("docker", "kubectl", "hf", "git", "mkdir", "cp", "pip", "export", "ray", "vllm")
HARDWARE += ("make", "python", "ruff", "pyright")
"""Programs whose effect needs a daemon, a cluster, a network or minutes: their arguments are checked."""


def commands_of(page):
    """Commands of the page's ``bash`` and ``sh`` blocks, without comments, each in one line."""
    text = "\n".join(block.text for block in blocks(page) if block.language in ("bash", "sh"))
    lines = [re.sub(r"(?:^|\s+)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    return [part for line in lines if line for part in line.replace(".venv/bin/", "").split(" && ")]


ALL = [(page, line) for page in PAGES for line in commands_of(page)]


def split(line):
    """Variables that are set before the command, and the command's words."""
    words = shlex.split(line)
    count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


@pytest.fixture
def given(tmp_path):
    """``given(variables, words)``: the command and arguments that a script passes on to ``flowgrpo-rc``."""

    def of(variables, words):
        said = tmp_path / "arguments"
        for program in ("torchrun", "python", "flowgrpo-rc"):
            fake = tmp_path / program
            fake.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$0\" \"$@\" > '{said}'\n")
            fake.chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        own = os.environ | {"ENGINE": "diffusers"} | variables | {"PATH": path}
        subprocess.run(words, env=own, cwd=ROOT, check=True, capture_output=True)
        arguments = said.read_text().removesuffix("\0").split("\0")
        program = "flowgrpo_rc.cli.main" if "flowgrpo_rc.cli.main" in arguments else str(tmp_path / "flowgrpo-rc")
        return arguments[arguments.index(program) + 1 :]

    return of


def check_program(words):
    """The parsed command; its settings compose. ``...`` on a page stands for settings of the reader's own."""
    arguments = _parse([word for word in words if word != "..."])
    assert callable(arguments.run)
    if getattr(arguments, "config_name", None):
        compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    return arguments


def check_hardware(words, given):
    program, rest = words[0], words[1:]
    if program == "docker" and rest[0] == "build":
        assert (ROOT / rest[rest.index("-f") + 1]).is_file()
        assert rest[-1] == "."
        settings = {rest[i + 1].split("=")[0] for i, word in enumerate(rest) if word == "--build-arg"}
        assert settings <= set(re.findall(r"^ARG (\w+)=", (ROOT / "examples/clusters/Dockerfile").read_text(), re.M))
    elif program == "docker":
        assert rest[:2] == ["run", "--rm"]
        check_program(rest[rest.index("flowgrpo-rc") + 1 :])
    elif program == "kubectl":
        assert rest[:2] == ["apply", "-f"]
        assert (ROOT / rest[2]).is_file()
    elif program in ("ruff", "pyright"):
        assert f'"{program}' in (ROOT / "pyproject.toml").read_text()
    elif program == "python" and rest[:2] == ["-m", "pytest"]:
        assert (ROOT / rest[-1]).is_dir()
    elif program == "python":
        script = (ROOT / rest[0]).read_text()
        assert [word for word in rest if word.startswith("--") and f'"{word}"' not in script] == []
    elif program == "make":
        assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text()
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
        known = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
        assert rest[0] == "install"
        assert [extra for names in extras for extra in names.split(",") if extra not in known] == []
    elif program == "hf":
        assert rest[0] == "download"
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", rest[1])
        assert "--local-dir" in rest


@pytest.mark.filterwarnings(
    "ignore:given more than once", "ignore:ignored, since|settings in another trainer's form|not given, and with"
)
@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{page}-{i}" for i, (page, _) in enumerate(ALL)])
def test_a_command_of_a_page(page, line, given):
    variables, words = split(line)
    if words[0] == "bash":
        check_program(given(variables, words))
    elif words[0] == "flowgrpo-rc":
        check_program(words[1:])
    elif words[0] == "torchrun":
        check_program(words[words.index("flowgrpo_rc.cli.main") + 1 :])
    elif words[0] == "sbatch":
        script = next(i for i, word in enumerate(words) if word.endswith(".slurm"))
        assert (ROOT / words[script]).is_file()
        name = variables.pop("SCRIPT", "run_qwen_image_ocr_lora_rollout_corr.sh")
        check_program(given(variables, ["bash", f"examples/flowgrpo_trainer/{name}", *words[script + 1 :]]))
    else:
        assert words[0] in HARDWARE, f"{page}: {line}"
        check_hardware(words, given)


def test_every_page_with_commands_is_checked():
    pages = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")} - {"quickstart.md", "howto/reward.md"}
    assert {page for page in pages if commands_of(page)} <= set(PAGES)


def test_folders_that_weights_are_downloaded_to_are_those_that_are_used():
    """A later command names no folder under models/ that no earlier one makes."""
    lines = commands_of("weights.md")
    made = {words[words.index("--local-dir") + 1] for _, words in map(split, lines) if words[0] == "hf"}
    used = set(re.findall(r"models/[\w.-]+", "\n".join(line for line in lines if not line.startswith("hf "))))
    assert len(made) == 9
    assert used <= made
