"""Batches drawn ahead: every number is that of `adapter_lag`, at whatever pace engines draw, and after a resume."""

import threading

import pytest
from engines_elsewhere import Elsewhere
from tests_support import TORCHRUN, overrides_of, run_process, untimed

from flowgrpo_rc.rollout import EngineLostError, RolloutError
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.run
R = "actor_rollout_ref.rollout"
SETTINGS = (
    "trainer.total_training_steps=5",
    "trainer.test_freq=2",
    "actor_rollout_ref.actor.ema_decay=0.5",
    "actor_rollout_ref.actor.diffusion_loss.clip_ratio=auto",
    f"{R}.micro_batch_size=5",
)
"""Validation, and an average that it is drawn with, come between batches in flight."""
WAIT_S = 60


def trained(rows):
    """The metrics of each step that come from training; a run that ends early validates at its last step."""
    return [{k: v for k, v in row.items() if not k.startswith("val/")} for row in rows]


def run(small_config, name, *overrides):
    return untimed(FlowGRPOTrainer(small_config(*SETTINGS, *overrides, folder=name)).fit().rows())


MODES = {
    "bypass": ("algorithm.rollout_correction.bypass_mode=true",),
    "decoupled": (
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.rollout_is=sequence",
        "actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-3",
        f"{R}.dtype=bfloat16",
    ),
    "clean": (
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=null",
        "algorithm.rollout_correction.rollout_rs_threshold=null",
        "actor_rollout_ref.actor.diffusion_loss.loss_mode=awm",
        "actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-3",
    ),
    "guided": (f"{R}.pipeline.true_cfg_scale=2.0", f"{R}.dtype=float32", f"{R}.algo.init_same_noise=true"),
}


@pytest.mark.parametrize(("mode", "ahead"), [("bypass", 1), ("decoupled", 2), ("clean", 1), ("guided", 1)])
def test_ahead_is_adapter_lag_in_every_number(ahead, mode, small_config, pooled):
    late = run(small_config, "late", *MODES[mode], f"{R}.adapter_lag={ahead}")
    assert [row["rollout/adapter_lag"] for row in late[1:]] == [float(min(i, ahead)) for i in range(5)]
    assert all(len(row) > 80 or mode == "clean" for row in late[1:])
    if mode == "clean":
        # Only images of an older adapter are compared with the actor.
        weights = [row.get("rollout_corr/rollout_is_std") for row in late[1:]]
        assert weights[0] is None
        assert all(weight > 0 for weight in weights[1:])
    assert run(small_config, "here", *MODES[mode], f"{R}.ahead={ahead}") == late
    pooled()
    assert run(small_config, "pool", *MODES[mode], f"{R}.ahead={ahead}") == late


def test_ahead_is_adapter_lag_where_the_guard_changes_the_mode(small_config, pooled):
    """Of an objective that compares means: a batch is asked for in one mode and learned from in another."""
    falling = (
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.guard=fallback",
        "actor_rollout_ref.actor.diffusion_loss.loss_mode=grpo_guard",
        "actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-6",
        f"{R}.dtype=bfloat16",
    )
    late = run(small_config, "late", *falling, f"{R}.adapter_lag=1")
    fallen = [row.get("guard/fallback") for row in late[1:]]
    assert 0 < sum(fallen) < len(fallen)
    pooled()
    assert run(small_config, "ahead", *falling, f"{R}.ahead=1") == late


def test_a_pool_without_ahead_is_the_engine_here(small_config, pooled):
    here = run(small_config, "here")
    pooled(engines=3)
    assert run(small_config, "pool") == here


@pytest.mark.process
def test_two_trainer_processes_share_out_the_engines_of_their_machine(tmp_path):
    """Each has a process of its own draw its half of the images, one batch ahead."""
    elsewhere = (f"{R}.ahead=1", f"{R}.placement=process", f"{R}.devices=[cpu,cpu]")
    found = []
    for name, settings in (("late", (f"{R}.adapter_lag=1",)), ("ahead", elsewhere)):
        command = (*TORCHRUN, "-m", "flowgrpo_rc.cli.main", "demo")
        done = run_process(*command, *overrides_of(tmp_path / name, *settings))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        found.append(untimed(RunFolder(tmp_path / name).rows()))
    assert found[0] == found[1]


def test_engines_draw_while_the_actor_learns(small_config, pooled, monkeypatch):
    """An update waits until an engine has begun the batch after it: one that takes turns would wait for ever."""
    begun = {}
    steps = {}

    class Watched(Elsewhere):
        def generate(self, request):
            batch = request.request_id.partition("/")[0]
            begun.setdefault(batch, threading.Event()).set()
            return super().generate(request)

    pooled(Watched)
    trainer = FlowGRPOTrainer(small_config(*SETTINGS, f"{R}.ahead=1", "trainer.test_freq=-1"))
    ask = trainer.rollouts.request

    def noted(step):
        made = ask(step)
        steps[step] = made.request.request_id
        begun.setdefault(made.request.request_id, threading.Event())
        return made

    trainer.rollouts.request = noted
    update = trainer.run.actor.update
    overlapped = []

    def waiting(*arguments, **more):
        following = steps.get(trainer.step + 1)
        if following is not None:
            overlapped.append(begun[following].wait(WAIT_S))
        return update(*arguments, **more)

    monkeypatch.setattr(trainer.run.actor, "update", waiting)
    trainer.fit()
    assert overlapped == [True] * 4
    assert sorted(steps) == list(range(5)), "a batch was asked for that the run does not have"


def test_an_engine_lost_in_the_midst_changes_no_number(small_config, pooled):
    late = run(small_config, "late", f"{R}.adapter_lag=1")

    class Dying(Elsewhere):
        deaths = 0

        def generate(self, request):
            if len(self.drawn) % 3 == 2 and Dying.deaths < 3:
                Dying.deaths += 1
                self.drawn.append(None)
                raise EngineLostError("killed")
            return super().generate(request)

        def sync(self, state, version):
            if version == 3 and Dying.deaths < 5:
                Dying.deaths = 5
                raise EngineLostError("killed while it took an adapter")
            return super().sync(state, version)

    pooled(Dying)
    with pytest.warns(UserWarning, match="is started anew: killed"):
        assert run(small_config, "pool", f"{R}.ahead=1") == late
    assert Dying.deaths == 5


def test_without_engines_the_run_ends_in_one_line_and_keeps_its_checkpoint(small_config, pooled):
    class Mortal(Elsewhere):
        starts = 0

        def start(self):
            Mortal.starts += 1
            if Mortal.starts > 2:
                raise EngineLostError("no route to host")
            super().start()

        def generate(self, request):
            if self.engine.adapter_version >= 2:
                raise EngineLostError("no route to host")
            return super().generate(request)

    pooled(Mortal)
    trainer = FlowGRPOTrainer(small_config(*SETTINGS, f"{R}.ahead=1", "trainer.save_freq=1", "trainer.test_freq=-1"))
    with (
        pytest.warns(UserWarning, match="given up"),
        pytest.raises(RolloutError, match="no rollout engine is left of 2"),
    ):
        trainer.fit()
    assert (trainer.folder.checkpoints / "latest").read_text() in ("step_2", "step_3")
    assert not any(thread.name.startswith("rollout") and thread.is_alive() for thread in threading.enumerate())


@pytest.mark.parametrize(("settings", "stops"), [(f"{R}.adapter_lag=2", (1, 3)), (f"{R}.ahead=2", (1, 3))])
def test_a_resume_repeats_the_undisturbed_run(stops, settings, small_config, pooled):
    """Batches in flight at the checkpoint are drawn again with the adapters of that time, from the same prompts."""
    if "ahead" in settings:
        pooled()
    constant = "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"
    whole = run(small_config, "whole", settings, constant)
    parts = (*SETTINGS, settings, constant, "trainer.resume_mode=auto", "trainer.save_freq=1")
    for stop in stops:
        trainer = FlowGRPOTrainer(small_config(*parts, f"trainer.total_training_steps={stop}", folder="parts"))
        trainer.fit()
    again = FlowGRPOTrainer(small_config(*parts, folder="parts"))
    assert again.step == stops[-1]
    assert trained(untimed(again.fit().rows())) == trained(whole)
