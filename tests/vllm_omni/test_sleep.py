"""When vllm-omni's weights leave the GPU and come back, and what is checked then; a vllm-omni that only notes it."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.rollout import RolloutConfig, RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import VllmOmniConfig
from flowgrpo_rc.rollout.vllm_omni import engine, server
from flowgrpo_rc.rollout.vllm_omni.server import Server

SLEEPING = VllmOmniConfig(sleep=True)
A, B = {"a": torch.zeros(1)}, {"b": torch.zeros(1)}
REQUEST, ANSWER = object.__new__(RolloutRequest), object.__new__(Trajectories)


class NotingOmni:
    """Answers as ``AsyncOmni`` does, and notes what it was asked for."""

    def __init__(self):
        self.calls = []
        self.status = "SUCCESS"
        self.held = (0, "")

    async def sleep(self, level):
        return self._note(f"sleep {level}")

    async def wake_up(self):
        return self._note("wake up")

    async def collective_rpc(self, method, args):
        self.calls.append(method)
        return [self.held]

    def _note(self, call):
        self.calls.append(call)
        return [SimpleNamespace(status=self.status, error_msg="cumem allocator is not available")]


@pytest.fixture
def make_server(monkeypatch):
    memory = iter(range(70, 0, -10))
    monkeypatch.setattr(server, "_bytes_in_use", lambda: next(memory))

    def make(sleeps=True):
        made = object.__new__(Server)
        made.omni = NotingOmni()
        made._loop = asyncio.new_event_loop()
        made._sleeps, made._asleep, made._used = sleeps, False, (0, 0)
        made._state, made._version, made._adapter, made._digest = {}, -1, 0, ""

        async def bind(state):
            made.omni.calls.append(f"sync {next(iter(state))}")
            made.omni.held = (made._adapter + 1, f"digest {next(iter(state))}")
            return made.omni.held

        async def draw(request):
            made.omni.calls.append("generate")
            return ANSWER

        made._bind, made._draw = bind, draw
        return made

    return make


def test_it_sleeps_after_a_rollout_and_wakes_for_the_next_call(make_server):
    """Level 1, from which it wakes; the adapter is read back each time, and memory noted."""
    sleeper = make_server()
    assert sleeper.sync(A, 1) == "digest a"
    assert sleeper.generate(REQUEST) is ANSWER
    assert sleeper.memory() == (70, 60)
    assert sleeper.generate(REQUEST) is ANSWER
    assert sleeper.sync(B, 2) == "digest b"
    assert sleeper.omni.calls == [
        *("sync a", "generate", "sleep 1"),
        *("wake up", "flowgrpo_held", "generate", "sleep 1"),
        *("wake up", "flowgrpo_held", "sync b"),
    ]
    assert sleeper.memory() == (50, 40)


def test_without_sleep_it_stays_awake(make_server):
    sleeper = make_server(sleeps=False)
    sleeper.sync(A, 1)
    sleeper.generate(REQUEST)
    assert sleeper.omni.calls == ["sync a", "generate"]
    assert sleeper.memory() == (0, 0)


def test_an_adapter_that_is_another_after_waking_is_refused(make_server):
    sleeper = make_server()
    sleeper.sync(A, 1)
    sleeper.generate(REQUEST)
    sleeper.omni.held = (1, "of something else")
    with pytest.raises(RolloutError, match="after waking up, .* digest of something els, not digest a;"):
        sleeper.generate(REQUEST)


@pytest.mark.parametrize("what", ["sleep", "wake up"])
def test_vllm_omnis_answer_that_it_could_not_is_an_error(make_server, what):
    sleeper = make_server()
    sleeper.sync(A, 1)
    if what == "wake up":
        sleeper.generate(REQUEST)
    sleeper.omni.status = "ERROR"
    says = f"vllm-omni does not {what} .cumem allocator is not available.; .*vllm_omni.sleep=false"
    with pytest.raises(RolloutError, match=says):
        sleeper.generate(REQUEST)


def test_sleep_is_refused_without_a_gpu_and_takes_no_allocator_that_cannot(tiny_model, monkeypatch):
    """The trainer may use expandable segments; the process of an engine that sleeps is not told of them."""
    monkeypatch.setattr(engine, "check_versions", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    def environment(settings, device="cuda:0"):
        rollout = RolloutConfig(name="vllm_omni", vllm_omni=settings)
        return engine.VllmOmniHandle(rollout, tiny_model, ModelConfig(), [device])._environment

    assert "PYTORCH_CUDA_ALLOC_CONF" in environment(VllmOmniConfig())
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(SLEEPING)
    with pytest.raises(ValueError, match="vllm_omni.sleep: got true on cpu; .* so set it to false"):
        environment(SLEEPING, "cpu")
    for other in ({"name": "diffusers"}, {"name": "vllm_omni", "placement": "process"}):
        with pytest.raises(ValueError, match="rollout.vllm_omni.sleep: got True with name=.*, so set it to false"):
            RolloutConfig(**other, vllm_omni=SLEEPING)
