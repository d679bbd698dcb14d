"""``flowgrpo-rc plan``: verdicts, exit codes, and what is refused before anything is built."""

import pytest

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.planner.memory import MemoryPlan
from flowgrpo_rc.trainer import memory as planned  # noqa: F401  (it names the class that is replaced below)

MODEL = "actor_rollout_ref.model"
DEMO = (
    "plan",
    "--config-name=tiny_qwen_image_ocr",
    f"{MODEL}.dtype=bfloat16",
    f"{MODEL}.enable_gradient_checkpointing=true",
    f"{MODEL}.target_modules=[to_q]",
)


@pytest.fixture(scope="module", autouse=True)
def same_plan():
    """A plan of the same run is made once for all tests: it remembers what it has measured."""
    made = []

    def plan_of(run):
        found = next((plan for plan in made if plan.run == run), None)
        if found is None:
            found = MemoryPlan(run)
            made.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowgrpo_rc.planner.memory.MemoryPlan", plan_of)
        yield


@pytest.fixture
def plan(capsys):
    def run(*arguments):
        code = main([*DEMO, *arguments])
        said = capsys.readouterr()
        return code, said.out, [line for line in said.err.splitlines() if line.startswith("error: ")]

    return run


@pytest.mark.slow
def test_what_fits_and_what_does_not_with_a_remedy_and_an_exit_code(plan):
    code, said, errors = plan("--gpus", "1x24,2x2")
    assert (code, errors) == (3, [])
    fits, no = said.split("\n\nasset:tiny_qwen_image: ")
    assert "transformer of 2,474,336 parameters (4 QwenImageTransformerBlock), bfloat16" in fits
    assert "Verdict: fits 1 x 24 GB: 3." in fits
    assert "Largest micro-batch that fits: ppo_micro_batch_rows=96" in fits
    assert "Time of a step as configured, 40% of RTX 4090's" in fits
    assert "after the changes" not in fits
    assert "What to change" not in fits
    assert "Verdict: does NOT fit 2 x 2 GB" in no
    assert no.count("Time of a step as configured, ") == no.count("Time of a step after the changes, ") == 1
    assert "No micro-batch fits, not even one row" in no
    assert "  actor_rollout_ref.actor.ppo_micro_batch_rows=1: 3." in no
    assert "Still too much: take more GPUs, or larger ones" in no


@pytest.mark.slow
def test_gpus_that_could_be_split_are_compared_with_taking_turns(plan):
    code, said, errors = plan("--gpus", "2x24", "--reward-seconds", "0.5")
    assert (code, errors) == (0, [])
    assert said.count("Verdict") == said.count("Turns or split: ") == 1
    assert "(rewards of 0.5 s counted)" in said
    code, said, errors = plan("--gpus", "1x24")
    assert (code, errors, said.count("Verdict"), said.count("Turns or split")) == (0, [], 1, 0)
    for wrong in ("-1", "inf", "soon"):
        with pytest.raises(SystemExit, match="2"):
            plan("--gpus", "2x24", "--reward-seconds", wrong)


@pytest.mark.slow
def test_without_a_list_a_table_is_printed(plan):
    code, said, _ = plan("--gpus", "data.train_batch_size=8")  # an override behind a bare --gpus is one
    assert code == 0
    header, *rows = said.splitlines()[-6:-2]
    assert header.split() == ["GPUs", "needs", "24", "GB", "48", "GB", "80", "GB", "141", "GB"]
    # A mini-batch of 4 prompts is not for 8 processes.
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert all(row.count("fits") == 4 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "many"), "--gpus: got 'many'; give how many of how many GB, e.g. 4x80"),
        (("--gpus", "3x80"), "ppo_mini_batch_size: got 4 prompts for 3 processes"),
        (("--gpus", "1x80", "actor_rollout_ref.model.path=no/such"), "no/such is no folder of a pipeline here"),
        (
            ("--gpus", "1x80", "actor_rollout_ref.actor.fsdp_config.shard=true"),
            "fsdp_config.shard: got true with one process",
        ),
        (
            ("--gpus", "4x80", "actor_rollout_ref.actor.fsdp_config={shard:true,fsdp_size:3}"),
            "fsdp_config.fsdp_size: got 3, which does not divide the 4 processes",
        ),
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
