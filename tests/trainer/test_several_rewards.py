"""Several rewards in a run: their statistics, normalisation within the groups, scorers that only look, and the columns
of the prompt file that all of them get."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests_support import recorded, untimed

from flowgrpo_rc.batch import Key
from flowgrpo_rc.rewards import RewardError, RewardMix, RewardResult
from flowgrpo_rc.rollout import DiffusersEngine
from flowgrpo_rc.trainer import FlowGRPOTrainer, setup
from flowgrpo_rc.trainer.scoring import names_of_all

pytestmark = pytest.mark.run
SCORERS = """
import json, pathlib

import numpy as np

CALLS = pathlib.Path(__file__).with_name("calls.jsonl")


def _note(who, prompts, metadata):
    with CALLS.open("a") as file:
        file.write(json.dumps({"who": who, "prompts": prompts, "metadata": metadata}) + "\\n")


def dark(images, prompts, metadata, scale=1.0):
    _note("dark", prompts, metadata)
    return -scale * images.reshape(len(images), -1).mean(1)


def red(images, prompts, metadata):
    _note("red", prompts, metadata)
    return images[..., 0].reshape(len(images), -1).mean(1)


def compute_score(solution_image, ground_truth, data_source, extra_info):
    _note("looks", ground_truth, [data_source, extra_info["tag"]])
    return len(ground_truth)
"""


@pytest.fixture
def scorers(tmp_path):
    path = tmp_path / "scorers.py"
    path.write_text(SCORERS)
    return path


def several(path, *more):
    """Brightness and two others, one of them with an argument; a third only looks."""
    own = "reward.reward_functions"
    return (
        f"{own}.dark={{path: {path}, name: dark, weight: 0.5, scale: 2.0}}",
        f"{own}.red={{path: {path}, name: red, weight: -0.25}}",
        "reward.val_functions.jpeg_compressibility=true",
        *more,
    )


def test_every_reward_has_its_mean_and_its_deviation(small_config, scorers):
    trainer = FlowGRPOTrainer(small_config(*several(scorers)))
    results = recorded(trainer.run.reward, "combine")
    row = trainer.train_step()
    ((_, result),) = results
    assert list(result.parts) == ["dark", "red", "compute_score"]
    for name, scores in result.parts.items():
        assert row[f"reward/{name}"] == pytest.approx(scores.astype(np.float64).mean())
        assert row[f"reward/std/{name}"] == pytest.approx(scores.astype(np.float64).std())
    # dark is twice the mean pixel with a minus, compute_score the mean pixel over 255
    assert row["reward/std/dark"] == pytest.approx(2 * 255 * row["reward/std/compute_score"], rel=1e-5)
    sums = 0.5 * result.parts["dark"] - 0.25 * result.parts["red"] + result.parts["compute_score"]
    assert row["reward/mean"] == pytest.approx(sums.mean(), rel=1e-5)
    assert "reward/jpeg_compressibility" not in row
    trainer.folder.close()


def test_scorers_that_only_look_are_logged_and_learned_from_nowhere(small_config, scorers):
    runs = {}
    for folder, more in (("plain", ()), ("observed", several(scorers)[2:])):
        config = small_config("trainer.test_freq=1", f"trainer.validation_data_dir={scorers.parent / folder}_images",
                              *more, folder=folder)  # fmt: skip
        runs[folder] = FlowGRPOTrainer(config).fit().rows()
    name = "val/reward/jpeg_compressibility"
    assert [name in row for row in runs["observed"]] == ["val/reward/mean" in row for row in runs["observed"]]
    assert all(row.pop(name) < 0 for row in runs["observed"] if name in row)
    deviations = [
        row.pop("val/reward/std/jpeg_compressibility") for row in runs["observed"] if "val/reward/mean" in row
    ]
    assert min(deviations) > 0
    assert untimed(runs["plain"]) == untimed(runs["observed"])
    lines = (scorers.parent / "observed_images" / "step_00002" / "images.jsonl").read_text().splitlines()
    assert all({"jpeg_compressibility", "compute_score"} == set(json.loads(line)["rewards"]) for line in lines)


@pytest.mark.parametrize("global_std", [True, False])
def test_normalisation_within_the_group_reaches_the_advantages(small_config, scorers, global_std):
    config = small_config(
        *several(scorers), "reward.normalization=group", f"algorithm.global_std={str(global_std).lower()}"
    )
    trainer = FlowGRPOTrainer(config)
    results, updates = recorded(trainer.run.reward, "combine"), recorded(trainer.run.actor, "update")
    row = trainer.train_step()
    trainer.folder.close()
    ((_, result),), (((batch, *_), _),) = results, updates
    group = batch[Key.GROUP].numpy()
    total = np.zeros(len(group))
    for name, weight in {"dark": 0.5, "red": -0.25, "compute_score": 1.0}.items():
        for g in np.unique(group):
            scores = result.parts[name][group == g].astype(np.float64)
            total[group == g] += weight * (scores - scores.mean()) / (scores.std() + 1e-4)
    stds = np.array([total[group == g].std() for g in group])
    expected = total / ((total.std() if global_std else stds) + 1e-4)
    np.testing.assert_allclose(batch[Key.ADVANTAGES].numpy(), expected, atol=1e-5)
    assert row["reward/group_std_mean"] == pytest.approx(stds.mean())
    assert row["reward/mean"] == pytest.approx(result.total.mean())  # of the scores as they are


def test_normalisation_goes_over_all_processes(small_config, scorers):
    """Each of two processes has half of the images; its advantages are its rows of those of the whole batch."""
    trainer = FlowGRPOTrainer(small_config(*several(scorers), "reward.normalization=group"))
    trainer.folder.close()
    draw = np.random.default_rng(0)
    names = ("dark", "red", "compute_score")
    parts = {name: draw.normal(size=16).astype(np.float32) for name in names}
    group = torch.arange(16) // 4
    whole = RewardResult(total=draw.normal(size=16).astype(np.float32), parts=parts)
    trainer._gather = lambda values: gathered.append(values) or values
    gathered = []
    expected, _ = trainer._advantages(whole, {Key.GROUP: group}, None)
    for rank in range(2):
        own = slice(8 * rank, 8 * rank + 8)
        answers = iter(gathered)

        def gather(values, own=own, answers=answers):
            everywhere = next(answers)
            assert torch.equal(everywhere[own], values)
            return everywhere

        trainer._gather = gather
        trainer.accelerator = SimpleNamespace(process_index=rank)
        half = RewardResult(total=whole.total[own], parts={name: scores[own] for name, scores in parts.items()})
        found, _ = trainer._advantages(half, {Key.GROUP: group[own]}, None)
        assert torch.equal(found, expected[own])
    assert expected.abs().min() > 1e-3


def test_processes_agree_on_the_parts_before_their_means_are_taken():
    one, two = ["mean", "f", "f/a", "f/b"], ["mean", "f", "f/b", "f/a"]
    assert names_of_all([one, two]) == one
    for named in ([one, two[:3]], [two[:3], one]):
        with pytest.raises(RewardError, match="^reward function 'f' reported part/a in some processes only"):
            names_of_all(named)


def test_every_scorer_gets_all_columns_of_its_row(small_config, scorers, tmp_path):
    """Ours as metadata, verl-omni's form by name; in training and in validation."""
    prompts = [
        {
            "prompt": f"number {i}",
            "data_source": "numbers",
            "reward_model": {"style": "rule", "ground_truth": "x" * (i + 1)},
            "extra_info": {"index": i, "tag": f"tag {i}"},
            "tags": ["a", "b"],
            "include": [{"class": "cat", "count": 2}],
        }
        for i in range(4)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    trainer = FlowGRPOTrainer(
        small_config(
            *several(scorers), f"data.train_files={file}", f"data.val_files={file}",
            f"reward.val_functions.looks={{path: {scorers}}}", "trainer.total_training_steps=1",
        )
    )  # fmt: skip
    rows = trainer.fit().rows()
    assert rows[-1]["val/reward/looks"] == 2.5  # (1 + 2 + 3 + 4) / 4
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert {call["who"] for call in calls} == {"dark", "red", "looks"}
    columns = {row["prompt"]: {key: value for key, value in row.items() if key != "prompt"} for row in prompts}
    for call in calls:
        if call["who"] == "looks":
            assert call["metadata"] == ["numbers", f"tag {len(call['prompts']) - 1}"]
        else:
            assert call["metadata"] == [columns[prompt] for prompt in call["prompts"]]


class Started:
    """A built-in reward that has something to end, and may refuse prompts."""

    def __init__(self, refuses=False):
        self.refuses = refuses
        self.ended = 0

    def __call__(self, images, prompts, metadata):
        return [0.0 for _ in prompts]

    def check_prompts(self, prompts, **known):
        if self.refuses:
            raise ValueError("refused prompts")

    def close(self):
        self.ended += 1


@pytest.mark.parametrize("what", ["prompts", "observers", "processes", "actor"])
def test_a_run_that_is_refused_ends_its_rewards_and_its_engine(small_config, tmp_path, monkeypatch, what):
    """Their processes hold GPUs, and a program that catches the error goes on."""

    def refuse(*_, **__):
        raise ValueError(f"refused {what}")

    closed = []
    monkeypatch.setattr(DiffusersEngine, "close", lambda engine: closed.append(engine))

    trained, looking = Started(refuses=what == "prompts"), Started()
    monkeypatch.setattr(setup, "build_reward", lambda _: RewardMix({"a": trained}, {"a": 1.0}, builtin=["a"]))
    monkeypatch.setattr(setup, "build_observers", lambda *_: RewardMix({"b": looking}, {"b": 0.0}, builtin=["b"]))
    makes = {"observers": "build_observers", "processes": "make_accelerator", "actor": "DiffusionActor"}
    if what in makes:
        monkeypatch.setattr(setup, makes[what], refuse)
    with pytest.raises(ValueError, match=f"refused {what}"):
        setup.Run(small_config(), str(tmp_path))
    assert (trained.ended, looking.ended) == (1, 0 if what == "observers" else 1)
    assert len(closed) == (what == "actor")
