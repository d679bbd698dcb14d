"""The steps after the window: fewer of them, other solvers, and what they leave as it is."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchHeunDiscreteScheduler
from rollout_cases import request_for, rows_of_forwards, tiny_engine
from torch.testing import assert_close

from flowgrpo_rc.batch import Key
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models.lora import adapter_active
from flowgrpo_rc.rollout import RolloutSyncError, sampling
from flowgrpo_rc.rollout.base import joined, rows_of
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.tail import SOLVERS, Course, TailConfig
from flowgrpo_rc.section import convert

RECORDED = (Key.LATENTS, Key.NEXT_LATENTS, Key.ROLLOUT_LOG_PROBS)


@pytest.fixture
def make_engine(tiny_model):
    return partial(tiny_engine, tiny_model)


@pytest.mark.parametrize(
    ("steps", "end", "expected"),
    [
        (None, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (0.5, 2, [0, 1, 2, 4, 6, 8, 10]),
        (0.5, 3, [0, 1, 2, 3, 5, 7, 8, 10]),  # 3.5 steps are 4, at 3 + 7/4, 3 + 14/4 and 3 + 21/4
        (0.4, 5, [0, 1, 2, 3, 4, 5, 8, 10]),
        (1.0, 4, [0, 1, 2, 3, 4, 10]),
        (3.0, 8, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (0.01, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (2.0, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (0.2, 0, [0, 5, 10]),
    ],
)
def test_levels_by_hand(steps, end, expected):
    assert TailConfig(steps=steps).levels(10, end) == expected


def test_shares_are_rounded_up_but_not_for_a_rounding():
    assert 0.07 * 100 > 7
    assert TailConfig(steps=0.07).number(100) == 7
    assert TailConfig(steps=0.071).number(100) == 8


def test_a_multistep_factor_by_hand():
    """log((1-s)/s) at .8, .5 and .2 is -log 4, 0 and log 4, at .9 it is -log 9."""
    course = Course.of([0], 1, [1.0, 0.9, 0.8, 0.5, 0.2, 0.0], TailConfig(solver="dpm++2m"))
    expected = [0, 0, math.log(4) / (2 * math.log(9 / 4)), 0.5, 0]
    assert_close(course.extrapolates[:, 0], torch.tensor(expected))
    # From pure noise the step before is infinitely long.
    assert Course.of([0], 0, [1.0, 0.8, 0.5, 0.0], TailConfig(solver="dpm++2m")).extrapolates.eq(0).all()


def diffusers_scheduler(solver, schedule):
    """diffusers' own solver over the levels of a schedule."""
    if solver == "heun":
        scheduler = FlowMatchHeunDiscreteScheduler()
        scheduler.set_timesteps(len(schedule.timesteps))
        twice = [0, *(i for level in range(1, len(schedule.timesteps)) for i in (level, level))]
        scheduler.timesteps = schedule.timesteps[twice]
        scheduler.sigmas = torch.cat([schedule.sigmas[twice], schedule.sigmas[-1:]])
        scheduler._step_index = 0
        return scheduler
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero", algorithm_type="dpmsolver++"
    )
    scheduler.set_timesteps(len(schedule.timesteps))
    scheduler.timesteps = schedule.timesteps
    scheduler.sigmas = schedule.sigmas
    scheduler._step_index = 0
    return scheduler


@pytest.mark.parametrize("solver", ["heun", "dpm++2m"])
def test_solvers_are_those_of_diffusers(tiny_model, make_engine, solver):
    request = request_for(tiny_model, steps=6, window=0, cfg=2.0, record_clean=True, tail=TailConfig(solver=solver))
    engine = make_engine()
    answer = engine.generate(request)
    check_rollout(request, answer, tiny_model, HeldAdapter(5, answer.echo.adapter_digest), "float32")
    schedule = tiny_model.schedule(6, 32, 32)
    scheduler = diffusers_scheduler(solver, schedule)
    cond = request.conditioning.rows(request.prompt_index, torch.device("cpu"))
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    latents = torch.stack([tiny_model.initial_noise(generator, 32, 32) for generator in generators])
    with torch.no_grad(), adapter_active(engine.transformer, engine.adapter):
        for t in scheduler.timesteps:
            velocity = tiny_model.velocity(engine.transformer, latents, t.expand(6), cond)
            latents = scheduler.step(velocity, t, latents).prev_sample
    found = answer.batch[Key.CLEAN_LATENTS]
    assert_close(found, latents, atol=2e-5, rtol=1e-4)
    euler = engine.generate(replace(request, tail=None)).batch[Key.CLEAN_LATENTS]
    assert (euler - latents).abs().max() > 100 * (found - latents).abs().max()


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_window_is_as_it_was(tiny_model, make_engine, solver):
    """Bit for bit, in a batch of one window, where the steps up to the tail have the same shapes."""
    request = request_for(tiny_model, starts=(1,) * 6, steps=7, cfg=2.0)
    whole = make_engine().generate(request)
    short = make_engine().generate(replace(request, tail=TailConfig(solver=solver, steps=0.5)))
    for name in RECORDED:
        assert torch.equal(whole.batch[name], short.batch[name])
    assert not torch.equal(whole.images, short.images)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shared", [False, True])
def test_images_are_those_of_every_image_by_itself(tiny_model, make_engine, solver, shared):
    """Images of different windows in one batch pass by different levels."""
    start_seeds = [1, 1, 2, 2, 3, 3] if shared else None
    tail = TailConfig(solver=solver, steps=0.5)
    request = request_for(tiny_model, starts=(0, 0, 3, 3, 4, 4), steps=8, cfg=2.0, start_seeds=start_seeds, tail=tail)
    together = make_engine().generate(request)
    check_rollout(request, together, tiny_model, HeldAdapter(5, together.echo.adapter_digest), "float32")
    engine = make_engine(1)
    alone = joined(request, [engine.generate(rows_of(request, torch.tensor([i]))) for i in range(6)])
    assert torch.equal(together.echo.moves, alone.echo.moves)
    for name in RECORDED:
        assert_close(together.batch[name], alone.batch[name], atol=2e-5, rtol=1e-4)
    assert (together.images.int() - alone.images.int()).abs().max() <= 1


def rows_of_request(engine, request):
    """Rows of every forward that draws it."""
    return rows_of_forwards(engine.transformer, lambda: engine.generate(request))


QWEN = {"n": 16, "micro_batch_size": 16, "pipeline": {"num_inference_steps": 10}}
QWEN_ALGO = {"sde_window_size": 2, "sde_window_range": [0, 5]}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shared", [False, True])
def test_forwards_are_as_planned(tiny_model, make_engine, solver, shared):
    """Of Qwen-Image's settings, 16 images of a prompt at each place of the window: 47 % with both, by Euler."""
    starts = [start for start in range(4) for _ in range(16)]
    tail = {"solver": solver, "steps": 0.5}
    request = request_for(
        tiny_model,
        ["1", "2", "3", "4"],
        index=starts,
        starts=starts,
        steps=10,
        start_seeds=starts if shared else None,
        tail=TailConfig(**tail),
    )
    config = convert(RolloutConfig, {**QWEN, "algo": {**QWEN_ALGO, "init_same_noise": shared}, "tail": tail})
    counted = sum(rows_of_request(make_engine(16), request)) / 64
    assert counted == pytest.approx(sum(config.forwards_per_image(clean=False)))
    if shared and solver == "euler":
        assert counted == pytest.approx(4.65625)


def test_forwards_of_the_demo():
    """Its micro-batch holds all prompts: 1 and 1 steps in common for 12 images, 1 in the window, 5/3 after it."""
    rollout = "actor_rollout_ref.rollout"
    config = compose("tiny_qwen_image_ocr", [f"{rollout}.algo.init_same_noise=true", f"{rollout}.tail.steps=0.5"])
    forwards = sum(config.actor_rollout_ref.rollout.forwards_per_image(clean=False))
    assert forwards == pytest.approx(1 / 12 + 1 / 12 + 1 + 5 / 3)
    assert forwards < 0.63 * 6


def test_forwards_of_qwen_images_settings_by_hand():
    """Before the window 1.5 steps on average, computed once for 16 images, then 2, the first of them from equal states;
    of 8, 7, 6 and 5 steps after it 4, 4, 3 and 3 are taken."""
    given = {"n": 16, "micro_batch_size": 16, "pipeline": {"num_inference_steps": 10}, "tail": {"steps": 0.5}}
    config = convert(RolloutConfig, {**given, "algo": {**QWEN_ALGO, "init_same_noise": True}})
    assert config.forwards_per_image(clean=False) == (1.5 / 16, 17 / 16, 3.5)
    assert config.forwards_per_image(clean=True) == (0, 0, 5)
    heun = convert(RolloutConfig, {**given, "algo": QWEN_ALGO, "tail": {"solver": "heun"}})
    assert heun.forwards_per_image(clean=False) == (1.5, 2, 12)
    assert heun.forwards_per_image(clean=True) == (0, 0, 19)


def test_metrics_of_forwards():
    given = {"n": 16, "micro_batch_size": 16, "pipeline": {"num_inference_steps": 10}, "algo": QWEN_ALGO}
    assert convert(RolloutConfig, given).forwards_metrics(clean=False) == {}
    metrics = convert(RolloutConfig, {**given, "tail": {"steps": 0.5}}).forwards_metrics(clean=False)
    assert metrics.pop("rollout/forwards_per_image") == 7
    assert {f"rollout/forwards_{place}_window" for place in ("before", "in", "after")} == set(metrics)
    assert sorted(metrics.values()) == [1.5, 2, 3.5]
    clean = convert(RolloutConfig, {**given, "tail": {"steps": 4}}).forwards_metrics(clean=True)
    assert clean == {"rollout/forwards_per_image": 4}


def test_windows_that_leave_nothing_in_common(recwarn):
    shared = "actor_rollout_ref.rollout.algo.init_same_noise=true"
    with pytest.warns(UserWarning, match="init_same_noise: got true with windows that all begin with the first step"):
        compose("tiny_qwen_image_ocr", [shared, "actor_rollout_ref.rollout.algo.sde_window_range=[0,2]"])
    recwarn.clear()
    compose("tiny_qwen_image_ocr", [shared])
    assert not recwarn


def test_another_tail_than_asked_for_is_refused(tiny_model, make_engine):
    engine = make_engine()
    request = request_for(tiny_model, steps=7, tail=TailConfig(solver="heun", steps=0.5))
    answer = engine.generate(request)
    held = HeldAdapter(5, answer.echo.adapter_digest)
    check_rollout(request, answer, tiny_model, held, "float32")
    plain = engine.generate(replace(request, tail=None, request_id=request.request_id))
    with pytest.raises(RolloutSyncError, match=r"tail solver: got None, expected heun; .*rollout\.tail"):
        check_rollout(request, plain, tiny_model, held, "float32")
    with pytest.raises(RolloutSyncError, match="tail solver: got heun, expected None"):
        check_rollout(replace(request, tail=None), answer, tiny_model, held, "float32")
    moves = answer.echo.moves.clone()
    moves[3, 5] = ~moves[3, 5]
    wrong = replace(answer, echo=replace(answer.echo, moves=moves))
    with pytest.raises(RolloutSyncError, match="steps taken for row 3: got"):
        check_rollout(request, wrong, tiny_model, held, "float32")
    unknown = replace(answer, echo=replace(answer.echo, moves=None))
    with pytest.raises(RolloutSyncError, match="steps taken: got None, expected some"):
        check_rollout(request, unknown, tiny_model, held, "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"tail\.steps: got 0\.0; give a number above 0"),
        ({"steps": -0.5}, r"tail\.steps: got -0\.5"),
        ({"steps": 2.5}, r"tail\.steps: got 2\.5; give a whole number of steps, or below 1 a share"),
        ({"solver": "huen"}, r"tail\.solver: got 'huen'; choose one of euler, heun, dpm\+\+2m"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        convert(RolloutConfig, {"tail": settings})


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_sharded_transformer_is_called_equally_often(tiny_model, make_engine, solver, monkeypatch):
    """Whatever the windows are, since other processes wait in every call; the images are the same."""
    tail = TailConfig(solver=solver, steps=0.5)
    requests = [
        request_for(tiny_model, starts=(start,) * 6, steps=8, cfg=2.0, tail=tail, seed=1) for start in (0, 3, 6)
    ]
    plain = [make_engine().generate(request) for request in requests]
    assert len({len(rows_of_request(make_engine(), request)) for request in requests}) > 1
    monkeypatch.setattr(sampling, "is_sharded", lambda transformer: True)
    counts = {len(rows_of_request(make_engine(), request)) for request in requests}
    assert counts == {2 * 8 - 1 if solver == "heun" else 8}
    for request, expected in zip(requests, plain, strict=True):
        found = make_engine().generate(request)
        assert torch.equal(found.images, expected.images)
        assert torch.equal(found.batch[Key.ROLLOUT_LOG_PROBS], expected.batch[Key.ROLLOUT_LOG_PROBS])
