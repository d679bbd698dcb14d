"""``flowgrpo-rc check-reward``: right rewards pass, and each thing that can be wrong with one is found."""

import re

import numpy as np
import pytest
from fake_judge import FakeJudge
from reward_files import write
from reward_server import serving

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.rewards.check.findings import EXPECTATIONS, PROMPT, QUALITY, REFERENCE, Expectation
from flowgrpo_rc.rewards.check.pictures import colours, numbers, scenes

ORACLE = """
from flowgrpo_rc.rewards.check.pictures import colours, scenes
SEEN = {p.prompt: p.image[::8, ::8].mean((0, 1)) for p in scenes() + colours()}

def closeness(images, prompts):
    wanted = np.stack([SEEN[prompt] for prompt in prompts])
    return np.exp(-np.abs(images[:, ::8, ::8].mean((1, 2)) - wanted).sum(-1))

def f(images, prompts, metadata):
    return {returned}
"""
"""1 for the prompt's own picture, known by its mean colour; less for others."""


RIGHT = Expectation(order=PROMPT, low=0.0, high=1.0)


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """``check(returned)``: exit code and verdicts, by finding, of a function ``f`` that returns this.

    The function is judged as if a built-in reward had the expectation ``expected``.
    """

    def run(returned, *overrides, expected=RIGHT):
        monkeypatch.setattr("flowgrpo_rc.rewards.check.findings.expectation", lambda name, config: expected)
        # A file of its own for every call: one that was loaded before is not read again.
        name = f"mine{len(list(tmp_path.iterdir()))}.py"
        path = write(tmp_path, ORACLE.replace("{returned}", returned), name)
        section = "reward.custom_reward_function"
        code = main(["check-reward", "f", f"{section}.path={path}", f"{section}.name=f", *overrides])
        return code, verdicts(capsys.readouterr().out)

    return run


def verdicts(out):
    return {line[2:16].strip(): line.rpartition(": ")[2] for line in out.splitlines() if line.startswith("  ")}


def failed(result):
    code, found = result
    assert code == (3 if "NOT AS EXPECTED" in found.values() else 0)
    return {name for name, verdict in found.items() if verdict == "NOT AS EXPECTED"}


def test_a_right_reward_passes(check):
    code, found = check("closeness(images, prompts)")
    assert code == 0
    judged = ("order", "neighbours", "twice as large", "red and blue", "range")
    assert [found[name] for name in judged] == ["as expected"] * 5


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [
        # Red and blue swapped: a red umbrella then fits "blue umbrella".
        ("closeness(images[..., ::-1], prompts)", {"red and blue"}),
        # Upside down: the wrong prompts win everywhere.
        ("1 - closeness(images, prompts)", {"order", "twice as large", "red and blue"}),
        # Scores of a batch are handed out in the wrong order, which a batch read backwards shows.
        ("closeness(images, prompts)[np.arange(len(images)) // 2 * 2]", {"neighbours"}),
        # Only the upper left quarter of a large picture is looked at.
        (
            "closeness(images[:, :256, :256] if images.shape[1] < 300 else images[:, :256, :256] * 0, prompts)",
            {"twice as large"},
        ),
        ("closeness(images, prompts) * 100", {"range"}),
    ],
)
def test_what_is_wrong_is_found(check, returned, wrong):
    assert wrong <= failed(check(returned))


@pytest.mark.slow
def test_quality_and_reference_are_orders_too(check):
    plainness = "-np.abs(np.diff(images.astype(float), axis=1)).mean((1, 2, 3))"
    quality = Expectation(order=QUALITY, high=0.0)
    assert failed(check(plainness, expected=quality)) == set()
    assert failed(check(f"-200 - {plainness}", expected=quality)) == {"order", "twice as large"}
    likeness = (
        "[1 - np.abs(i[::s, ::s].astype(float) - r['images'][0]).mean() / 255 "
        "for i, r in zip(images, metadata) for s in [len(i) // 256]]"
    )
    reference = Expectation(order=REFERENCE, low=0.0, high=1.0)
    assert failed(check(likeness, expected=reference)) == set()


@pytest.mark.parametrize("name", ["mine", "clipscore"])
def test_a_function_of_ones_own_is_told_and_not_judged(name, tmp_path, capsys):
    """Not even if a built-in reward has its name."""
    path = write(tmp_path, ORACLE.replace("{returned}", "-closeness(images, prompts)"))
    entry = f"{{path: {path}, name: f}}"
    assert main(["check-reward", name, f"reward.reward_functions.{name}={entry}"]) == 0
    found = verdicts(capsys.readouterr().out)
    assert {found[name] for name in ("order", "neighbours", "twice as large", "red and blue", "range")} == {
        "not judged"
    }


def judge_of(questions, answer):
    """The exit code of ``check-reward judge`` on a judge that answers with ``answer(words, picture)``, where
    ``picture`` is what check draws, found by its image."""
    drawn = {picture.image[::2, ::2].tobytes(): picture for picture in [*numbers(), *scenes(), *colours()]}

    def judge(asked):
        # Twice as large, a picture has every pixel twice; the blank image before the check is none of them.
        step = asked.image.shape[0] // 128
        picture = drawn.get(np.ascontiguousarray(asked.image[::step, ::step]).tobytes())
        return answer(asked.words, picture) if picture else "<Score>0</Score>"

    with FakeJudge(judge) as server:
        return main(["check-reward", "judge", f"reward.judge.base_url={server.url}/v1", f"reward.judge.{questions}"])


def test_a_judge_that_reads_texts_is_shown_texts(capsys):
    """A judge that transcribes what stands in an image, and one with a question about the text."""
    assert judge_of("questions=[ocr]", lambda words, picture: picture.metadata["ground_truth"]) == 0
    found = verdicts(capsys.readouterr().out)
    assert [found[name] for name in ("order", "twice as large")] == ["as expected"] * 2
    assert "red and blue" not in found
    question = "questions=[{parser: score, question: 'Does it say {target}?'}]"

    def says(words, picture):
        right = f"Does it say {picture.metadata['ground_truth']}?"
        return f"<Score>{5 * (words == right)}</Score>"

    assert judge_of(question, says) == 0


def test_a_judge_of_edits_is_shown_references(capsys):
    """One to whom an edit is right when nothing changes; another picture's reference is wrong."""

    def judge(asked):
        (reference,) = asked.references
        step = asked.image.shape[0] // reference.shape[0]
        return f"<Score>{5 * np.array_equal(asked.image[::step, ::step], reference)}</Score>"

    questions = "questions=[{parser: score, references: true, question: 'Is the second the first?'}]"
    with FakeJudge(judge) as server:
        url = f"{server.url}/v1"
        assert main(["check-reward", "judge", f"reward.judge.base_url={url}", f"reward.judge.{questions}"]) == 0
    out = capsys.readouterr().out
    assert "own reference above another's" in out
    assert [verdicts(out)[name] for name in ("order", "twice as large")] == ["as expected"] * 2


def test_a_server_is_checked_like_a_function(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(EXPECTATIONS, "far", Expectation(order=PROMPT, low=0.0, high=1.0))
    with serving(write(tmp_path, ORACLE.replace("{returned}", "closeness(images, prompts)"))) as server:
        assert main(["check-reward", "far", f"reward.remote.far.url={server.url}"]) == 0
        # Grey first; 16 pairs twice, four alone, 16 large ones and four of the umbrellas.
        assert (server.requests, server.images) == (1 + 2 + 4 + 1 + 1, 1 + 32 + 4 + 16 + 4)
    assert capsys.readouterr().out.startswith(f"1 x far ({server.url})\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "reward.functions: 'nothing' is not a known reward"),
        (
            ["far", "reward.remote.far.url=http://127.0.0.1:9", "reward.remote.far.tries=1"],
            "reward.remote.far.url: the",
        ),
        (["ocr", "--pictures=scenes"], "prompt 0: 'a picture of a stop sign' has no text in double quotes"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_a_line(capsys, arguments, message):
    assert main(["check-reward", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {message}")
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.parametrize("name", ["ocr", "jpeg_compressibility"])
def test_the_built_in_rewards_that_run_here_pass(name, capsys):
    assert main(["check-reward", name]) == 0
    out = capsys.readouterr().out
    assert verdicts(out)["order"] == "as expected"
    assert re.search(r"  time +\S+ s to load, \S+ s for the first 16 images, then \S+ s an image\n", out)
    assert re.search(r"  memory +the process: \d+ MiB at most, \d+ before it\n", out)


def test_one_of_several_functions_is_checked_alone(tmp_path, capsys):
    """The others, scorers that only look and a normalisation are left out."""
    path = write(tmp_path, ORACLE.replace("{returned}", "closeness(images, prompts)"))
    entry = f"{{path: {path}, name: f, weight: 0.25}}"
    others = ["reward.functions.ocr=1", "reward.val_functions.jpeg_compressibility=true", "reward.normalization=group"]
    assert main(["check-reward", "mine", f"reward.reward_functions.mine={entry}", *others]) == 0
    assert capsys.readouterr().out.startswith(f"1 x mine ({path})\n")


def test_a_scorer_that_only_looks_is_checked_too(tmp_path, capsys):
    path = write(tmp_path, ORACLE.replace("{returned}", "closeness(images, prompts)"))
    assert main(["check-reward", "looker", f"reward.val_functions.looker={{path: {path}, name: f}}"]) == 0
    assert capsys.readouterr().out.startswith(f"1 x looker ({path})\n")


def test_a_function_of_ones_own_gets_the_first_rows_of_the_prompt_file(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "prompt {i}", "target": {i}}}\n' for i in range(6)))
    body = "return [row['target'] + 10 * (prompt == f\"prompt {row['target']}\") for prompt, row in zip(p, metadata)]"
    path = write(tmp_path, f"def f(images, p, metadata):\n    {body}\n")
    command = [
        *("check-reward", "f", f"reward.custom_reward_function.path={path}", "reward.custom_reward_function.name=f"),
    ]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "KeyError" in said
    assert "give data.train_files: the pictures get its first rows" in said.strip().splitlines()[-1]
    assert main([*command, f"data.train_files={prompts}"]) == 0
    # Four pictures, and the two colours.
    assert "range          10 to 13: not judged" in capsys.readouterr().out
    prompts.write_text('{"prompt": "prompt 7", "target": 7}\n')
    assert main([*command, f"data.train_files={prompts}"]) == 0
    assert "range          17 to 17: not judged" in capsys.readouterr().out
