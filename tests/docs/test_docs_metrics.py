"""docs/metrics.md against the code: every metric that is logged has a row, and every row a metric that is logged."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doc_page import DOCS
from tests_support import SMALL_RUN

from flowgrpo_rc import DiffusionActorConfig, DiffusionLossConfig, token_loss
from flowgrpo_rc.correction import RolloutCorrectionConfig, compute_rollout_correction
from flowgrpo_rc.correction.plan import RS_OPTIONS
from flowgrpo_rc.evaluation.image_statistics import SPREADS, STATISTICS
from flowgrpo_rc.rollout import RolloutPool
from flowgrpo_rc.rollout.pool import EngineWork
from flowgrpo_rc.rollout.vllm_omni import VllmOmniEngine
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.timer import Timeline, peak_memory, speed

STAGES = "rollout|probe|reward|score|correct|advantage|update|replay|writer|sync|validate|save|log"
PLACEHOLDERS = {
    "t": r"[\d.e+-]+",
    "age": r"\d+",
    "reward": r"(?!(?:mean|std|max|min|group_std_mean|zero_std_fraction)(?:$|/))\w+",
    "part": r"\w+",
    "option": "|".join(RS_OPTIONS),
    "stage": STAGES,
    "figure": "clip|rejected|zeroed|engine_gap",
    "statistic": "|".join((*STATISTICS, *SPREADS)),
}


@pytest.fixture(scope="module")
def documented():
    """Row name -> pattern of the metrics that it stands for."""
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "metrics.md").read_text(), re.M)
    assert len(rows) == len(set(rows)), sorted(name for name in rows if rows.count(name) > 1)
    return {row: _pattern(row) for row in rows}


def _pattern(row):
    parts = re.split(r"\{(\w+)\}", row)
    text = "".join(re.escape(part) if i % 2 == 0 else f"(?:{PLACEHOLDERS[part]})" for i, part in enumerate(parts))
    text = text.replace(r"\[", "(?:").replace(r"\]", ")?")  # logged with and without
    if row.startswith("rollout_corr/"):
        text = f"(?:actor/|writer/)?{text}"
    # The prompt writer's update has the names of the image model's.
    return re.compile(re.sub(r"^actor/", "(?:actor|writer)/", text))


@pytest.fixture(scope="module")
def logged(finished_run, tmp_path_factory):
    """Names of the metrics of a bypass run, of a run with other options, and of the functions that users call."""
    names = {name for row in finished_run.rows() for name in row}
    assert any(name.startswith("actor/rollout_corr/") for name in names)
    names |= _names_of_a_run_with_other_options(tmp_path_factory.mktemp("other"))
    names |= _names_of_a_prompt_writer(tmp_path_factory.mktemp("writer"))
    names |= _names_of_the_loss_of_tokens() | _names_of_the_correction() | _names_on_a_gpu() | _names_of_engines()
    return names | _names_of_an_averaged_old_policy()


def _names_of_a_run_with_other_options(folder):
    """Calibrated bands, an engine with an old adapter and a short tail, scouts, a replay buffer, and a reward that says
    what it is made of."""
    from flowgrpo_rc import FlowGRPOTrainer, compose

    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(images, prompts, metadata):\n"
        "    red = images[..., 0].mean((1, 2)) / 255\n"
        "    return red, {'part/red': red}\n"
    )
    overrides = (
        "actor_rollout_ref.actor.diffusion_loss.clip_ratio=auto",
        "algorithm.rollout_correction.rollout_rs_threshold=auto",
        "actor_rollout_ref.rollout.adapter_lag=1",
        "actor_rollout_ref.rollout.tail.steps=0.5",
        "actor_rollout_ref.rollout.scout.n=6",
        "actor_rollout_ref.rollout.scout.redraw=true",
        "algorithm.replay.batches=1",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={folder / 'run'}",
    )
    own = f"reward.custom_reward_function.path={reward}"
    settings = [own if "reward_function.path" in setting else setting for setting in SMALL_RUN]
    trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", [*settings, *overrides]))
    try:
        return {*trainer.train_step(), *trainer.train_step(), *trainer._validate()}
    finally:
        trainer.run.engine.close()
        trainer.folder.close()


def _names_of_a_prompt_writer(folder):
    from flowgrpo_rc import FlowGRPOTrainer, compose

    overrides = ("algorithm.prompt_writer.path=asset:tiny_writer", f"trainer.default_local_dir={folder / 'run'}")
    trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", [*SMALL_RUN, *overrides]))
    try:
        names = {name for name in trainer.train_step() if name.startswith("writer/")}
        assert any(name.startswith("writer/rollout_corr/") for name in names)
        return names
    finally:
        trainer.run.close_engines()
        trainer.folder.close()


def _names_of_the_loss_of_tokens():
    config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(clip_ratio=0.2), rollout_correction=None)
    old = -torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    data = {"old_log_probs": old, "response_mask": torch.ones(4, 3), "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5])}
    return set(token_loss(config, {"log_probs": old + 0.01}, data)[1])


def _names_of_the_correction():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 4, generator=generator)
    train = rollout + 0.1 * torch.randn(6, 4, generator=generator)
    names = set()
    for mode in ("zero", "mask"):
        config = RolloutCorrectionConfig(
            rollout_is="token",
            rollout_is_threshold="0.6_1.9",
            rollout_is_mode=mode,
            rollout_is_batch_normalize=True,
            rollout_rs=",".join(RS_OPTIONS),
            rollout_rs_threshold=",".join("0.6_1.9" if "k1" in option else "0.4" for option in RS_OPTIONS),
            rollout_token_veto_threshold=0.3,
        )
        names |= set(compute_rollout_correction(train, rollout, torch.ones(6, 4), config=config).metrics)
    return names


def _names_on_a_gpu():
    times = {"timing_s/rollout": 1.0, "timing_s/update": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("max_memory_allocated", "max_memory_reserved"):
            patch.setattr(torch.cuda, name, lambda device: 0)
        engine = object.__new__(VllmOmniEngine)
        engine._sleeps, engine._used = True, (0, 0)
        names = {*peak_memory(torch.device("cuda")), *engine.memory_metrics()}
        return names | set(speed(times, 1, 1, seconds_at_peak=1.0))


def _names_of_engines():
    pool: Any = object.__new__(RolloutPool)
    pool.take_account = lambda: [EngineWork("a", [], None, False)]
    return set(Timeline(pool, SimpleNamespace(process_index=0, num_processes=1)).take([])[1])


def _names_of_an_averaged_old_policy():
    sync: Any = object.__new__(AdapterSync)
    sync._lag, sync._old, sync._old_decay = 0, SimpleNamespace(version=1), lambda version: 0.5
    return set(sync.metrics())


@pytest.mark.run
def test_every_logged_metric_is_documented(documented, logged):
    assert len(logged) > 150
    assert sorted(name for name in logged if not any(p.fullmatch(name) for p in documented.values())) == []


def test_every_documented_metric_is_logged(documented, logged):
    assert len(documented) > 90
    assert sorted(row for row, p in documented.items() if not any(p.fullmatch(name) for name in logged)) == []


def test_a_metric_has_one_row(documented, logged):
    for name in logged:
        assert len([row for row, p in documented.items() if p.fullmatch(name)]) == 1, name
