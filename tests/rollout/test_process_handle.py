"""The diffusers engine in a process of its own: the bits of the engine beside the actor, also after a loss."""

import os
import signal
import threading

import pytest
import torch
from rollout_cases import assert_same_bits, request_for
from test_engine_alone import MODEL, adapter_of
from tests_support import alive

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout import EngineLostError, RolloutConfig, RolloutError, RolloutPool, build_engine
from flowgrpo_rc.rollout.base import RolloutHandle
from flowgrpo_rc.rollout.build import digest_rule
from flowgrpo_rc.rollout.config import ProcessConfig
from flowgrpo_rc.rollout.process import ProcessHandle

pytestmark = pytest.mark.process
TIMEOUTS = ProcessConfig(start_timeout_s=300.0, silence_timeout_s=20.0)
ROLLOUT = RolloutConfig(dtype="bfloat16", micro_batch_size=2, process=TIMEOUTS)


@pytest.fixture(scope="module")
def started():
    """One engine for all tests that leave it as it was, or start it anew."""
    handle = ProcessHandle(ROLLOUT, MODEL, "cpu", 3)
    handle.start()
    yield handle
    handle.close()


@pytest.fixture
def beside(tiny_model):
    """The engine beside an actor, at version 1, and the adapter that it holds."""
    engine = build_engine(ROLLOUT, tiny_model, MODEL, "cpu")
    state = adapter_of(tiny_model)
    engine.sync(state, 1)
    return engine, state


def test_a_process_draws_the_bits_of_the_engine_beside_the_actor(started, beside, tiny_model):
    engine, state = beside
    assert isinstance(started, RolloutHandle)
    assert started.name == "process 3 (cpu)"
    assert started.sync(state, 1) == digest_rule(ROLLOUT, MODEL)(state) == engine.digest_of(state)
    for request in (request_for(tiny_model, cfg=4.0), request_for(tiny_model, cfg=4.0, window=0)):
        assert_same_bits(started.generate(request), engine.generate(request))


def test_what_it_answers_with_an_error_leaves_it_running(started, beside, tiny_model):
    _, state = beside
    pid = started.pid
    with pytest.raises(AdapterMismatchError, match="does not bind"):
        started.sync(dict(list(state.items())[1:]), 2)
    broken = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
    started.sync(broken, 2)
    with pytest.raises(RolloutError, match=r"non-finite latents for 2 images"):
        started.generate(request_for(tiny_model, cfg=4.0))
    assert started.pid == pid


def answer_and_sync(pool, pending, state):
    answer = pending.result()
    pool.sync(state, 2)  # waits for every engine
    return answer


def test_a_pool_of_processes_is_the_engine_beside_the_actor(beside, tiny_model):
    """One of them is killed in the midst: the other draws its rows, and it comes back."""
    engine, state = beside
    handles = [ProcessHandle(ROLLOUT, MODEL, "cpu", i) for i in range(2)]
    rule = digest_rule(ROLLOUT, MODEL)
    pool = RolloutPool(handles, digest_of=rule, dtype=torch.bfloat16, micro_batch_size=ROLLOUT.micro_batch_size)
    try:
        assert pool.sync(state, 1) == engine.digest_of(state)
        request = request_for(tiny_model, cfg=4.0)
        expected = engine.generate(request)
        assert_same_bits(pool.generate(request), expected)
        first = handles[0].pid
        os.kill(first, signal.SIGSTOP)
        pending = pool.submit(request)
        threading.Timer(1.0, os.kill, (first, signal.SIGKILL)).start()
        says = r"rollout engine process 0 \(cpu\) is started anew: its process \d+ died of signal 9"
        with pytest.warns(UserWarning, match=says):
            answer = answer_and_sync(pool, pending, state)
        assert_same_bits(answer, expected)
        assert handles[0].pid != first
    finally:
        pool.close()
    assert not any(alive(handle.pid) for handle in handles)


def test_a_wrong_folder_ends_in_one_line_and_is_final(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handle = ProcessHandle(ROLLOUT, ModelConfig(path=str(tmp_path)), "cpu", 1)
    says = (
        r"^its process \d+ ended with code 1 while starting; log: .*, which ends: "
        r".*model.path: .* holds no model_index.json"
    )
    with pytest.raises(RolloutError, match=says) as caught:
        handle.start()
    assert not isinstance(caught.value, EngineLostError)
    assert "\n" not in str(caught.value)
