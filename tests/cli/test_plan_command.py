"""``flowgrpo-rc plan``: verdicts, exit codes, and what is refused before anything is built."""

import pytest

from flowgrpo_rc.cli.main import main

DEMO = ("plan", "--config-name", "tiny_qwen_image_ocr")


@pytest.fixture
def plan(capsys):
    def run(*arguments):
        code = main([*DEMO, *arguments])
        said = capsys.readouterr()
        return code, said.out, [line for line in said.err.splitlines() if line.startswith("error: ")]

    return run


def test_a_plan_of_one_machine(plan):
    code, said, errors = plan("--gpus", "1x24")
    assert (code, errors) == (0, [])
    assert "transformer of 2,474,336 parameters (4 QwenImageTransformerBlock), float32" in said
    assert "engine's own copy of the transformer" in said  # bfloat16 beside float32
    assert "Verdict: fits 1 x 24 GB: 4." in said
    assert "Largest micro-batch that fits: ppo_micro_batch_rows=96" in said
    assert "Time of a step, 40% of RTX 4090's" in said


def test_what_does_not_fit_is_told_with_a_remedy_and_an_exit_code(plan):
    code, said, _ = plan("--gpus", "1x24,2x2")
    assert code == 3
    assert "Verdict: fits 1 x 24 GB" in said
    assert "Verdict: does NOT fit 2 x 2 GB" in said
    assert "No micro-batch fits, not even one row" in said
    assert "Still too much: take more GPUs, or larger ones" in said


def test_without_a_list_a_table_is_printed(plan):
    code, said, _ = plan("--gpus", "data.train_batch_size=16")  # an override behind a bare --gpus is one
    assert code == 0
    header, *rows = said.splitlines()[-6:-2]
    assert header.split() == ["GPUs", "needs", "24", "GB", "48", "GB", "80", "GB", "141", "GB"]
    # A mini-batch of 4 prompts is not for 8 processes.
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert all(row.count("fits") == 4 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "many"), "--gpus: got 'many'; give how many of how many GB, e.g. 4x80"),
        (("--gpus", "3x80"), "ppo_mini_batch_size: got 4 prompts for 3 processes"),
        (("--gpus", "1x80", "actor_rollout_ref.model.path=no/such"), "no/such is no folder of a pipeline here"),
        (("actor_rollout_ref.rollout.n=1",), "actor_rollout_ref.rollout.n: got 1"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_built(plan, monkeypatch, arguments, says):
    monkeypatch.setattr("flowgrpo_rc.planner.pipeline.FakePipeline._network", _never)
    code, said, errors = plan(*arguments)
    assert (code, said, len(errors)) == (2, "", 1)
    assert says in errors[0]


def _never(*_):
    raise AssertionError("a network is built")
