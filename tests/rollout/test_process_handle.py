"""The diffusers engine in a process of its own: the bits of the engine beside the actor, also after a loss."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_host import MODEL, adapter_of, assert_same_bits, request_for
from test_process import is_running, later
from tests_support import TIMEOUT, end, wait_until

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout import EngineLostError, RolloutConfig, RolloutError, RolloutPool, build_engine
from flowgrpo_rc.rollout.base import RolloutHandle
from flowgrpo_rc.rollout.engines import ENGINES, EngineEntry
from flowgrpo_rc.rollout.host import digest_rule
from flowgrpo_rc.rollout.placement import ProcessConfig
from flowgrpo_rc.rollout.process.handle import ProcessHandle

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
    for request in (request_for(tiny_model), request_for(tiny_model, window=0)):
        assert_same_bits(started.generate(request), engine.generate(request))


@pytest.mark.slow
def test_fp8_weights_draw_the_same_bits_too(tiny_model):
    rollout = RolloutConfig(dtype="bfloat16", micro_batch_size=4, quantization="fp8", process=TIMEOUTS)
    engine = build_engine(rollout, tiny_model, MODEL, "cpu")
    state = adapter_of(tiny_model)
    handle = ProcessHandle(rollout, MODEL, "cpu")
    handle.start()
    assert handle.sync(state, 1) == engine.sync(state, 1)
    request = request_for(tiny_model)
    assert_same_bits(handle.generate(request), engine.generate(request))
    handle.close()


def lose(handle, doing, state, request):
    """End its process while or before it does something; returns what that raised."""
    pid = handle.pid
    if doing == "between":
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
    else:
        # Stopped first, so that it is in the midst of the call for certain.
        os.kill(pid, signal.SIGSTOP)
        later(0.3, os.kill, pid, signal.SIGKILL)
    with pytest.raises(EngineLostError, match=f"its process {pid} died of signal 9 (before|while) ") as caught:
        handle.sync(state, 2) if doing == "syncing" else handle.generate(request)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["drawing", "syncing", "between"])
def test_lost_and_started_anew_it_needs_the_adapter_again(started, beside, tiny_model, doing):
    engine, state = beside
    request = request_for(tiny_model)
    started.sync(state, 1)
    lose(started, doing, state, request)
    started.start()
    with pytest.raises(RolloutError, match=r"has no adapter yet: call sync\(\) before generate") as no:
        started.generate(request)
    assert not isinstance(no.value, EngineLostError)
    started.sync(state, 1)
    assert_same_bits(started.generate(request), engine.generate(request))


def test_what_it_answers_with_an_error_leaves_it_running(started, beside, tiny_model):
    _, state = beside
    pid = started.pid
    with pytest.raises(AdapterMismatchError, match="does not bind"):
        started.sync(dict(list(state.items())[1:]), 2)
    broken = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
    started.sync(broken, 2)
    with pytest.raises(RolloutError, match=r"non-finite latents for 2 images"):
        started.generate(request_for(tiny_model))
    assert started.pid == pid


def both_hold(pool, pending, state):
    """The answer, once every engine holds the next adapter."""
    answer = pending.result()
    pool.sync(state, 2)
    return answer


@pytest.mark.slow
def test_a_pool_of_processes_is_the_engine_beside_the_actor(beside, tiny_model):
    """One of them is killed in the midst: the other draws its rows, and it comes back."""
    engine, state = beside
    handles = [ProcessHandle(ROLLOUT, MODEL, "cpu", i) for i in range(2)]
    rule = digest_rule(ROLLOUT, MODEL)
    pool = RolloutPool(handles, digest_of=rule, dtype=torch.bfloat16, micro_batch_size=ROLLOUT.micro_batch_size)
    try:
        assert pool.sync(state, 1) == engine.digest_of(state)
        request = request_for(tiny_model)
        expected = engine.generate(request)
        assert_same_bits(pool.generate(request), expected)
        first = handles[0].pid
        os.kill(first, signal.SIGSTOP)
        pending = pool.submit(request)
        later(1.0, os.kill, first, signal.SIGKILL)
        says = r"rollout engine process 0 \(cpu\) is started anew: its process \d+ died of signal 9"
        with pytest.warns(UserWarning, match=says):
            answer = both_hold(pool, pending, state)
        assert_same_bits(answer, expected)
        assert handles[0].pid != first
    finally:
        pool.close()
    assert not any(is_running(handle.pid) for handle in handles)


@pytest.mark.slow
def test_close_from_another_thread_ends_a_rollout(beside, tiny_model):
    _, state = beside
    handle = ProcessHandle(ROLLOUT, MODEL, "cpu")
    handle.start()
    handle.sync(state, 1)
    os.kill(handle.pid, signal.SIGSTOP)  # it would draw for ever
    closing = later(0.3, handle.close)
    began = time.monotonic()
    with pytest.raises(EngineLostError, match="was closed (before|while) sampling"):
        handle.generate(request_for(tiny_model))
    closing.join()
    assert time.monotonic() - began < TIMEOUTS.silence_timeout_s
    assert not is_running(handle.pid)


@pytest.mark.slow
def test_a_wrong_folder_ends_in_one_line_and_is_final(tmp_path):
    handle = ProcessHandle(ROLLOUT, ModelConfig(path=str(tmp_path)), "cpu", 1)
    says = (
        r"^its process \d+ ended with code 1 while starting; log: .*, which ends: "
        r".*model.path: .* holds no model_index.json"
    )
    with pytest.raises(RolloutError, match=says) as caught:
        handle.start()
    assert not isinstance(caught.value, EngineLostError)
    assert "\n" not in str(caught.value)
    handle._process.log.unlink()


def test_what_cannot_run_elsewhere_is_refused_before_anything_is_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="rollout.devices: got cuda:1, but this process sees cuda:0"):
        ProcessHandle(ROLLOUT, MODEL, "cuda:1")
    monkeypatch.setitem(ENGINES, "dark", EngineEntry("nowhere:Dark"))
    with pytest.raises(ValueError, match="rollout.name: got dark, which has no digest_rule"):
        ProcessHandle(RolloutConfig(name="dark"), MODEL, "cpu")


TRAINER = """
import sys, time
from test_process_handle import MODEL, ROLLOUT, ProcessHandle
handle = ProcessHandle(ROLLOUT, MODEL, "cpu")
handle.start()
print(handle.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_no_orphan_when_the_trainer_is_killed():
    """With -9, which leaves it no time to close anything."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    command = [sys.executable, "-c", TRAINER]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    assert trainer.stdout is not None
    try:
        engine = int(trainer.stdout.readline())
        assert is_running(engine)
    finally:
        end(trainer.pid)
        trainer.wait(TIMEOUT)
    wait_until(lambda: not is_running(engine), 15)


def test_engines_start_side_by_side():
    """``start`` waits for its own process alone, so that a pool's threads start all at once."""
    handles = [ProcessHandle(ROLLOUT, MODEL, "cpu", i) for i in range(2)]
    losses = []

    def start(handle):
        try:
            handle.start()
        except EngineLostError as error:
            losses.append(str(error))

    threads = [threading.Thread(target=start, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(is_running(handle.pid) for handle in handles))
    assert all(thread.is_alive() for thread in threads)  # both are loading
    for handle in handles:
        handle.close()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(losses) == 2
    assert all(re.search(r"was closed (before|while) starting$", loss) for loss in losses)
