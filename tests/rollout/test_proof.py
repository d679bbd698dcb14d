"""The echo says what was used, digests tell adapters apart, and each check names what differs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from rollout_cases import random_like, request_for
from torch.testing import assert_close

from flowgrpo_rc.batch import Key
from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.lora import adapter_parameters, adapter_state
from flowgrpo_rc.rollout import DiffusersEngine, RolloutSyncError, diffusers_engine
from flowgrpo_rc.rollout.digest import HeldDigest, adapter_digest
from flowgrpo_rc.rollout.proof import HeldAdapter, check_adapter, check_echo, check_rollout
from flowgrpo_rc.rollout.sampling import RequestSampler
from flowgrpo_rc.rollout.seeds import generator_for, seed_for

STARTS = torch.tensor([0, 0, 2, 2])
SEEDS = [seed_for(7, 0, 0, i) for i in range(4)]


@pytest.fixture
def make_engine(tiny_model):
    def make(dtype=torch.float32, **settings):
        lora = ModelConfig(lora_rank=4, lora_alpha=4)
        settings = {"micro_batch_size": 3, "device": "cpu"} | settings
        engine = DiffusersEngine(tiny_model, lora, dtype=dtype, **settings)
        engine.sync(random_state(engine), 5)
        return engine

    return make


@pytest.fixture
def make_request(tiny_model):
    return partial(request_for, tiny_model, index=(0, 0, 1, 1), starts=STARTS.tolist(), seed=7)


def random_state(engine, scale=0.05):
    return random_like(adapter_state(engine.transformer, engine.adapter), scale)


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_the_echo_is_what_was_asked_for(tiny_model, make_engine, make_request, sde_type, cfg):
    engine, request = make_engine(), make_request(cfg=cfg, sde_type=sde_type)
    trajectories = engine.generate(request)
    echo, schedule = trajectories.echo, tiny_model.schedule(5, 32, 32)
    assert_close(echo.sigmas, schedule.sigmas, rtol=0, atol=0)
    assert_close(echo.timesteps, schedule.timesteps, rtol=0, atol=0)
    assert (echo.request_id, echo.seeds, echo.sde_type) == (request.request_id, tuple(SEEDS), sde_type)
    assert (echo.true_cfg_scale, echo.guidance_scale, echo.window_size) == (cfg, None, 2)
    assert echo.noise_level == pytest.approx(0.7)
    assert echo.window_starts.tolist() == STARTS.tolist()
    assert (echo.dtype, echo.adapter_version) == ("float32", 5)
    assert echo.adapter_digest == adapter_digest(random_state(engine))
    check_rollout(request, trajectories, tiny_model, HeldAdapter(5, echo.adapter_digest), "float32")


def test_the_echo_of_a_deterministic_request_has_no_window(tiny_model, make_engine, make_request):
    engine, request = make_engine(torch.bfloat16), make_request(window_starts=None)
    trajectories = engine.generate(request)
    echo = trajectories.echo
    assert (echo.window_starts, echo.window_size, echo.noise_level) == (None, 0, 0.0)
    adapter = HeldAdapter(5, engine.digest_of(random_state(engine)))
    check_rollout(request, trajectories, tiny_model, adapter, "bfloat16")


def test_the_echo_comes_from_the_loop_and_not_from_the_request(make_engine, make_request, monkeypatch):
    """An engine whose loop runs with other numbers than the request's reports those."""
    engine = make_engine()

    def with_other_numbers(model, transformer, request, device):
        other = replace(request, noise_level=0.5, seeds=SEEDS[::-1], window_starts=STARTS + 1)
        return RequestSampler(model, transformer, other, device)

    monkeypatch.setattr(diffusers_engine, "RequestSampler", with_other_numbers)
    echo = engine.generate(make_request()).echo
    assert (echo.noise_level, echo.seeds, echo.window_starts.tolist()) == (0.5, tuple(SEEDS[::-1]), [1, 1, 3, 3])


def test_streams_are_what_they_were():
    """Numbers of the first release: runs stay reproducible."""
    assert seed_for(42, 0, 3, 5) == generator_for(42, 0, 3, 5).initial_seed()
    assert [seed_for(42, 0, 0, 0), seed_for(42, 2, 0, 1), seed_for(7, 1, 3, 5)] == [
        5732826375231505755,
        6948478952321341394,
        3822847795928555233,
    ]


# ---------------------------------------------------------------------- digests


def test_digests_are_equal_for_equal_bits_alone():
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(())}
    digest = adapter_digest(state)
    assert len(digest) == 64
    assert digest == adapter_digest({"b": torch.ones(()), "a": torch.arange(6.0).view(2, 3)})
    assert digest == adapter_digest({"b": state["b"], "a": state["a"].T.contiguous().T})  # strides do not count
    others = [
        {"a": state["a"]},
        {"a": state["a"], "c": state["b"]},
        {"a": state["a"].view(3, 2), "b": state["b"]},
        {"a": state["a"].view(torch.int32), "b": state["b"]},
        {"a": torch.nextafter(state["a"], torch.tensor(9.0)), "b": state["b"]},
        {"a": state["a"].half(), "b": state["b"]},
        {"a": torch.where(state["a"] == 0, -0.0, state["a"]), "b": state["b"]},
        {"a": torch.where(state["a"] == 0, torch.nan, state["a"]), "b": state["b"]},
    ]
    digests = [adapter_digest(other) for other in others]
    assert len({digest, *digests}) == 1 + len(others)


def test_a_digest_that_is_kept_notices_every_bit():
    """Weights that change in place, also to another zero or another NaN, take another shape, and change back."""
    held = HeldDigest()
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(())}
    first = held(state)
    assert first == held(state) == adapter_digest(state)
    changes = [-0.0, torch.nan, torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)[0], 1e-45]
    digests = [first]
    for value in changes:
        state["a"][0, 0] = value
        digests.append(held(state))
        assert digests[-1] == held(state) == adapter_digest(state)
    state["a"][0, 0] = 0.0
    assert held(state) == first
    state["a"] = state["a"].view(3, 2)
    digests.append(held(state))
    assert digests[-1] == adapter_digest(state)
    assert len(set(digests)) == len(changes) + 2


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_holds_what_its_digest_foretells(make_engine, dtype, quantization):
    """From the actor's tensors alone, whatever the engine holds, and without touching them."""
    engine = make_engine(dtype, quantization=quantization)
    state = random_state(engine, scale=1.0)
    sent = {name: tensor.clone() for name, tensor in state.items()}
    held, expected = engine.digest_of(random_state(engine)), engine.digest_of(state)
    assert expected != held
    assert (expected == adapter_digest(state)) is (dtype == torch.float32 and quantization is None)
    assert engine.sync(state, 6) == expected
    assert all(torch.equal(state[n], sent[n]) for n in sent)
    name = next(iter(state))
    adapter_parameters(engine.transformer, engine.adapter)[name].data[0, 0] += 1
    assert engine._held_digest() != expected
    assert engine.digest_of(state) == expected


def test_another_version_or_digest_is_refused():
    expected = HeldAdapter(3, "a" * 64)
    check_adapter(expected, 3, "a" * 64)
    with pytest.raises(RolloutSyncError, match="sampled with adapter version 2, expected 3; the last sync did not"):
        check_adapter(expected, 2, "a" * 64)
    with pytest.raises(RolloutSyncError, match=r"version 3: digest .* got b{16}, expected a{16}; .*stale adapter"):
        check_adapter(expected, 3, "b" * 64)


# ---------------------------------------------------------------------- echo and trajectories, one by one


def shifted(sigmas, shift=3.0):
    """The schedule of a scheduler with another ``shift``."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


ECHO_FAULTS = {
    "another request": ({"request_id": "x"}, "request id: got x, expected .*by id, not by order"),
    "own seeds": ({"seeds": (1, 2, 3, 4)}, r"seeds: got \[1, 2, 3, 4\], expected .*streams of its own"),
    "seeds in another order": (
        {"seeds": (SEEDS[0], SEEDS[2], SEEDS[1], SEEDS[3])},
        rf"seeds: got \[{SEEDS[0]}, {SEEDS[2]}, .*, expected \[{SEEDS[0]}, {SEEDS[1]}, .*by id, not by order",
    ),
    "sigmas": ({"sigmas": shifted(torch.linspace(1, 0, 6))}, r"sigmas: step 1: got 0\.923\d+, expected 0\.8; .*shift"),
    "steps": ({"sigmas": torch.ones(7), "timesteps": torch.ones(6)}, r"shape of sigmas: got \(7,\), expected \(6,\)"),
    "guidance": ({"true_cfg_scale": 1.0}, "true_cfg_scale: got 1, expected 3; the engine ignored"),
    "noise level": ({"noise_level": 0.69}, "noise_level: got 0.69, expected 0.7"),
    "sde type": ({"sde_type": "cps"}, "sde_type: got cps, expected sde"),
    "window": ({"window_starts": STARTS + 1}, r"window_starts: got \[1, 1, 3, 3\], expected \[0, 0, 2, 2\]"),
    "window size": ({"window_size": 3}, "window_size: got 3, expected 2"),
    "not a number": ({"noise_level": float("nan")}, "noise_level: got nan"),
}


@pytest.mark.parametrize("name", ECHO_FAULTS)
def test_an_echo_that_differs_is_named_in_one_line(tiny_model, make_engine, make_request, name):
    request, schedule = make_request(cfg=3.0), tiny_model.schedule(5, 32, 32)
    echo = make_engine().generate(request).echo
    check_echo(request, schedule, echo)
    changes, message = ECHO_FAULTS[name]
    with pytest.raises(RolloutSyncError, match=message) as error:
        check_echo(request, schedule, replace(echo, **changes))
    assert "\n" not in str(error.value)


def test_schedules_may_differ_by_a_float32_rounding_and_no_more(tiny_model, make_engine, make_request):
    request, schedule = make_request(), tiny_model.schedule(5, 32, 32)
    echo = make_engine().generate(request).echo
    with pytest.raises(RolloutSyncError, match="sigmas: step 0: got 1.00001, expected 1; "):
        check_echo(request, schedule, replace(echo, sigmas=echo.sigmas + 1e-5 * (torch.arange(6) == 0)))
    check_echo(request, schedule, replace(echo, sigmas=echo.sigmas * (1 + 1e-7), noise_level=0.7 * (1 + 1e-7)))


def set_rows(name, change):
    """A fault that changes one tensor of the batch."""

    def fault(trajectories):
        trajectories.batch[name] = change(trajectories.batch[name].clone())
        return trajectories

    return fault


def put(value, *place):
    def change(tensor):
        tensor[place] = value
        return tensor

    return change


def without(name):
    return lambda t: replace(t, batch=t.batch.exclude(name))


BATCH_FAULTS = {
    "rows of prompts swapped": (lambda t: replace(t, batch=t.batch[[0, 2, 1, 3]]), "prompt_index: got .*by id"),
    "rows of one prompt swapped": (
        lambda t: replace(t, batch=t.batch[[1, 0, 2, 3]]),
        f"starting noise: row 0 does not start from the noise of its seed {SEEDS[0]}",
    ),
    "nothing recorded": (lambda t: replace(t, batch=None), "recorded steps: got none, expected 2 an image"),
    "too little recorded": (without("next_sigmas"), "recorded steps: got no next_sigmas, expected them all"),
    "no means": (without("rollout_means"), "recorded steps: got no rollout_means"),
    "too few images": (lambda t: replace(t, images=t.images[:3]), r"shape of images: got \(3, 32, 32, 3\), expected"),
    "too few steps": (
        set_rows("rollout_log_probs", lambda v: v[:, :1]),
        r"shape of rollout_log_probs: got \(4, 1\), expected \(4, 2\)",
    ),
    "sigmas of the step after": (
        set_rows("sigmas", lambda v: v * 0.9),
        "recorded sigmas: row 0, step 0 of its window: got 0.9, expected 1; .*or record the step after",
    ),
    "next sigmas": (set_rows("next_sigmas", put(0.0, 2, 1)), "recorded next_sigmas: row 2, step 1 of its window"),
    "bfloat16 latents": (
        set_rows("latents", lambda v: v.bfloat16()),
        "dtype of latents: got bfloat16, expected float32; the engine stores in its compute dtype",
    ),
    "latents through bfloat16": (
        set_rows("next_latents", lambda v: v.bfloat16().float()),
        "next_latents: precision of row 0: got values rounded to bfloat16, expected float32",
    ),
    "one image's latents through float16": (
        set_rows("latents", lambda v: torch.where(torch.arange(4)[:, None, None, None] == 3, v.half().float(), v)),
        "latents: precision of row 3: got values rounded to float16",
    ),
    "NaN latents": (
        set_rows("next_latents", put(torch.nan, 1, 0, 3)),
        r"next_latents: not finite for 1 of 4 images \(rows \[1\]\), expected finite .*try .*dtype=float32",
    ),
    "NaN sigma": (set_rows("sigmas", put(torch.nan, 0, 0)), "recorded sigmas: row 0, step 0 of its window: got nan"),
}


@pytest.mark.parametrize("name", BATCH_FAULTS)
def test_trajectories_that_differ_are_named_in_one_line(tiny_model, make_engine, make_request, name):
    engine, request = make_engine(), make_request(record_means=True)
    trajectories = engine.generate(request)
    adapter = HeldAdapter(5, engine.digest_of(random_state(engine)))
    check_rollout(request, trajectories, tiny_model, adapter, "float32")
    fault, message = BATCH_FAULTS[name]
    with pytest.raises(RolloutSyncError, match=message) as error:
        check_rollout(request, fault(trajectories), tiny_model, adapter, "float32")
    assert "\n" not in str(error.value)


def test_clean_latents_are_those_of_the_images_and_proved(tiny_model, make_engine, make_request):
    engine = make_engine()
    request = replace(make_request(), window_starts=None, window_size=0, noise_level=0.0, record_clean=True)
    trajectories = engine.generate(request)
    held = HeldAdapter(5, trajectories.echo.adapter_digest)
    batch = trajectories.batch
    assert set(batch.keys()) == {Key.CLEAN_LATENTS, Key.PROMPT_INDEX}
    assert torch.equal(tiny_model.decode(batch[Key.CLEAN_LATENTS], 32, 32), trajectories.images)
    check_rollout(request, trajectories, tiny_model, held, "float32")
    assert engine.generate(replace(request, record_clean=False)).batch is None

    def refused(batch):
        with pytest.raises(RolloutSyncError) as caught:
            check_rollout(request, replace(trajectories, batch=batch), tiny_model, held, "float32")
        return str(caught.value)

    assert "clean images: got no clean_latents, prompt_index" in refused(None)
    assert "clean images: got no clean_latents" in refused(batch.exclude(Key.CLEAN_LATENTS))
    broken = batch.clone()
    broken[Key.CLEAN_LATENTS][2, 0, 0] = torch.nan
    assert "clean_latents: not finite for 1 of 4 images (rows [2])" in refused(broken)
    assert "dtype of clean_latents: got bfloat16" in refused(
        batch.exclude(Key.CLEAN_LATENTS).set(Key.CLEAN_LATENTS, batch[Key.CLEAN_LATENTS].bfloat16())
    )
    swapped = batch.clone()
    swapped[Key.PROMPT_INDEX] = swapped[Key.PROMPT_INDEX].flip(0)
    assert "prompt_index: got [1, 1, 0, 0]" in refused(swapped)
