"""Prompt sets of benchmarks: rows as their scorers read them, and the refusals."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from flowgrpo_rc.cli.main import _parse, main
from flowgrpo_rc.data import PROMPT_SETS, load_prompts, prepare_prompts
from flowgrpo_rc.rewards.remote.protocols import PROTOCOLS, Request

GENEVAL: list[dict[str, Any]] = [
    {
        "tag": "position",
        "include": [{"class": "pan", "count": 1}, {"class": "owl", "count": 1, "position": ["left of", 0]}],
        "prompt": "an owl left of a pan",
    },
    {
        "tag": "counting",
        "include": [{"class": "pan", "count": 2}],
        "exclude": [{"class": "pan", "count": 3}],
        "prompt": "two pans",
    },
]
GENEVAL2 = {
    "prompt": "two red owls",
    "atom_count": 3,
    "vqa_list": [["How many owls are there?", "two"], ["Are the owls red?", "Yes"]],
    "skills": ["count", "attribute"],
}
DPG = (
    "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,question_natural_language\n"
    'pan7,"An owl, asleep\nin a pan",,1,0,entity,whole,entity - whole (owl),Is there an owl?\n'
    'pan7,"An owl, asleep\nin a pan",,2,"1, 3",relation,spatial,"relation - spatial (owl, pan, in)",Is it in the pan?\n'
    "8,A kite,,1,0,entity,whole,entity - whole (kite),Is there a kite?\n"
)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CASES = {
    "geneval": ("geneval/prompts/evaluation_metadata.jsonl", lines(*GENEVAL), GENEVAL),
    "geneval2": ("GenEval2/geneval2_data.jsonl", lines(GENEVAL2), [GENEVAL2]),
    "drawbench": (
        "DrawBench - sheet.csv",
        '\ufeffPrompts,Category\r\n"A ""wet"" owl, asleep",Colors\r\nA kite.,Misc\r\n',
        [{"prompt": 'A "wet" owl, asleep', "category": "Colors"}, {"prompt": "A kite.", "category": "Misc"}],
    ),
    "partiprompts": (
        "parti/PartiPrompts.tsv",
        'Prompt\tCategory\tChallenge\tNote\n"O W L" on a wall \tArts\tBasic\t\na kite, red\tArts\tFine\tours\n',
        [
            {"prompt": '"O W L" on a wall', "category": "Arts", "challenge": "Basic", "note": ""},
            {"prompt": "a kite, red", "category": "Arts", "challenge": "Fine", "note": "ours"},
        ],
    ),
    "dpg": (
        "ELLA/dpg_bench/dpg_bench.csv",
        DPG,
        [
            {
                "prompt": "An owl, asleep\nin a pan",
                "item_id": "pan7",
                "questions": [
                    {
                        "proposition_id": 1,
                        "dependency": [0],
                        "category_broad": "entity",
                        "category_detailed": "whole",
                        "tuple": "entity - whole (owl)",
                        "question_natural_language": "Is there an owl?",
                    },
                    {
                        "proposition_id": 2,
                        "dependency": [1, 3],
                        "category_broad": "relation",
                        "category_detailed": "spatial",
                        "tuple": "relation - spatial (owl, pan, in)",
                        "question_natural_language": "Is it in the pan?",
                    },
                ],
            },
            {
                "prompt": "A kite",
                "item_id": "8",
                "questions": [
                    {
                        "proposition_id": 1,
                        "dependency": [0],
                        "category_broad": "entity",
                        "category_detailed": "whole",
                        "tuple": "entity - whole (kite)",
                        "question_natural_language": "Is there a kite?",
                    }
                ],
            },
        ],
    ),
}
"""Prompt set -> the file's place in a folder, its text, and the rows expected."""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("name", CASES)
def test_rows_of_each_set(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    place, text, expected = CASES[name]
    file = write(tmp_path / "in" / place, text)
    for source in (tmp_path / "in", file):
        assert main(["prepare-data", name, "--input", str(source), "--output", str(tmp_path / "out")]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/out/test.jsonl: {len(expected)} prompts (test)\n"
        records = load_prompts(tmp_path / "out" / "test.jsonl")
        assert [{"prompt": one.prompt, **one.metadata} for one in records] == expected
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["test.jsonl"]


def test_every_set_has_its_case() -> None:
    assert list(CASES) == list(PROMPT_SETS)


def test_flow_grpos_copy_of_geneval_has_two_splits_and_its_server_gets_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "geneval" / "train_metadata.jsonl", lines(GENEVAL[0]))
    write(tmp_path / "geneval" / "test_metadata.jsonl", lines(*GENEVAL))
    written = prepare_prompts("geneval", tmp_path, tmp_path / "out")
    assert sorted((file.split, file.path.name, file.num_prompts) for file in written) == [
        ("test", "test.jsonl", 2),
        ("train", "train.jsonl", 1),
    ]
    records = load_prompts(tmp_path / "out" / "test.jsonl")
    request = Request(
        files=[b"", b""], prompts=[one.prompt for one in records], metadata=[one.metadata for one in records]
    )
    # No keys of other rows: GenEval's scorer checks a colour or a position wherever the key is there.
    assert pickle.loads(PROTOCOLS["flow_grpo"].write_request(request))["meta_datas"] == GENEVAL
    assert json.loads(PROTOCOLS["json"].write_request(request))["metadata"] == [one.metadata for one in records]


REFUSED = {
    "missing": ("geneval", None, "in does not exist; geneval is JSON lines with prompt, tag and include: prompts/eval"),
    "empty": ("geneval2", "", "given holds no prompts; geneval2 is JSON lines"),
    "only a header": ("partiprompts", "Prompt\tCategory\tChallenge\tNote\n", "given holds no prompts; partiprompts is"),
    "DrawBench for GenEval": ("geneval", "Prompts,Category\nan owl,Misc\n", r"given:1 is not JSON .*; geneval is JSON"),
    "GenEval for DrawBench": ("drawbench", lines(*GENEVAL), r"given:2 has \d+ cells, and the header \d+; drawbench is"),
    "GenEval for GenEval2": ("geneval2", lines(*GENEVAL), "given:1 has no 'atom_count'; it has tag, include, prompt; "),
    "a page": (
        "dpg",
        "\n<!DOCTYPE html>\n<html>",
        "given:1 begins an HTML page; download the raw file; dpg is a table",
    ),
    "a line that is no JSON": ("geneval", lines(GENEVAL[0]) + "\n{'a': 1}\n", "given:3 is not JSON"),
    "a list": ("geneval", "[1]\n", "given:1 is a JSON list"),
    "a type": ("geneval", lines({**GENEVAL[0], "include": "owl"}), "given:1: include is a str, not a list; geneval is"),
    "a column": (
        "partiprompts",
        "Prompt\tCategory\nowl\tArts\n",
        "given:2 has no 'challenge'; it has prompt, category",
    ),
    "no column": ("drawbench", "an owl\na kite\n", "given:2 has no 'prompt'; it has an owl; drawbench is a table"),
    "cells": (
        "drawbench",
        "Prompts,Category\nan owl, asleep,Misc\n",
        "given:2 has 3 cells, and the header 2; drawbench",
    ),
    "quotes": ("drawbench", 'Prompts,Category\n"an owl,Misc\n', "given:2 cannot be read as a table"),
    "a number": ("dpg", DPG.replace('"1, 3"', "one"), r"given:4: dependency is 'one', where a number is expected; dpg"),
    "a blank prompt": ("drawbench", "Prompts,Category\n ,Misc\n", "given:2: 'prompt' is blank"),
    "LFS": ("dpg", "version https://git-lfs.github.com/spec/v1\n", "given is a Git LFS pointer, .*; dpg is a table"),
    "UTF-16": (
        "drawbench",
        "\ufeffPrompts".encode("utf-16-le"),
        r"given is not UTF-8 text but UTF-16; save it as UTF-8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    name, content, says = REFUSED[case]
    file = tmp_path / ("in" if content is None else "given")
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["prepare-data", name, "--input", str(file), "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line), line
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_file_or_with_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no drawbench\*\.csv or drawbench\*\.tsv; drawbench is a table with"):
        prepare_prompts("drawbench", tmp_path, tmp_path / "out")
    for folder in ("geneval", "geneval_unseen_objects"):
        write(tmp_path / folder / "test_metadata.jsonl", lines(*GENEVAL))
    with pytest.raises(ValueError, match=r"holds .*geneval/test_.* and .*unseen.*; give one of them; geneval is"):
        prepare_prompts("geneval", tmp_path, tmp_path / "out")


def test_the_command_takes_every_set():
    for name in PROMPT_SETS:
        assert _parse(["prepare-data", name, "--input", "a", "--output", "b"]).dataset == name
