"""When vllm-omni's weights leave the GPU and come back, and what is checked then; a vllm-omni that only notes it."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.rollout import RolloutConfig
from flowgrpo_rc.rollout.config import VllmOmniConfig
from flowgrpo_rc.rollout.vllm_omni import server
from flowgrpo_rc.rollout.vllm_omni.handle import VllmOmniHandle
from flowgrpo_rc.rollout.vllm_omni.server import Server

SLEEPING = VllmOmniConfig(sleep=True)


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
        made._pushed, made._adapter, made._digest = None, 0, ""

        async def sync(push):
            made.omni.calls.append(f"sync {push}")
            made._pushed, made._adapter = push, made._adapter + 1
            made.omni.held = (made._adapter, f"digest {push}")
            return f"digest {push}"

        async def generate(request, version):
            made.omni.calls.append(f"generate {request}")
            return f"images of {request}"

        made._sync, made._generate = sync, generate
        return made

    return make


def test_it_sleeps_after_a_rollout_and_wakes_for_the_next_call(make_server):
    """Level 1, from which it wakes; the adapter is read back each time, and memory noted."""
    engine = make_server()
    assert engine.sync("a") == "digest a"
    assert engine.generate("one", 1) == "images of one"
    assert engine.memory() == (70, 60)
    assert engine.generate("two", 1) == "images of two"
    assert engine.sync("b") == "digest b"
    assert engine.omni.calls == [
        *("sync a", "generate one", "sleep 1"),
        *("wake up", "flowgrpo_held", "generate two", "sleep 1"),
        *("wake up", "flowgrpo_held", "sync b"),
    ]
    assert engine.memory() == (50, 40)


def test_without_sleep_it_stays_awake(make_server):
    engine = make_server(sleeps=False)
    engine.sync("a")
    engine.generate("one", 1)
    assert engine.omni.calls == ["sync a", "generate one"]
    assert engine.memory() == (0, 0)


def test_an_adapter_that_is_another_after_waking_is_refused(make_server):
    engine = make_server()
    engine.sync("a")
    engine.generate("one", 1)
    engine.omni.held = (1, "of something else")
    with pytest.raises(RuntimeError, match=r"after waking up, .* digest of something els, not 1 with digest a;"):
        engine.generate("two", 1)


@pytest.mark.parametrize("what", ["sleep", "wake up"])
def test_vllm_omnis_answer_that_it_could_not_is_an_error(make_server, what):
    engine = make_server()
    engine.sync("a")
    if what == "wake up":
        engine.generate("one", 1)
    engine.omni.status = "ERROR"
    says = f"vllm-omni does not {what} .cumem allocator is not available.; .*vllm_omni.sleep=false"
    with pytest.raises(RuntimeError, match=says):
        engine.generate("two", 1)


def test_sleep_is_refused_without_a_gpu_and_where_nothing_would_use_the_room(tiny_model, monkeypatch):
    from flowgrpo_rc.rollout.vllm_omni import handle

    monkeypatch.setattr(handle, "check_versions", lambda: None)
    sleeping = RolloutConfig(name="vllm_omni", vllm_omni=SLEEPING)
    with pytest.raises(ValueError, match="vllm_omni.sleep: got true on cpu; .* so set it to false"):
        VllmOmniHandle(sleeping, tiny_model, ModelConfig(), ["cpu"], SLEEPING)
    for other in ({"name": "diffusers"}, {"name": "vllm_omni", "placement": "process"}):
        with pytest.raises(ValueError, match="rollout.vllm_omni.sleep: got True with name=.*, so set it to false"):
            RolloutConfig(**other, vllm_omni=SLEEPING)


def test_an_allocator_that_could_not_sleep_stays_with_the_trainer(tiny_model, monkeypatch):
    """The trainer may use expandable segments; the engine's process is not told of them."""
    from flowgrpo_rc.rollout.vllm_omni import handle

    monkeypatch.setattr(handle, "check_versions", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    made = []
    for timeouts in (VllmOmniConfig(), SLEEPING):
        rollout = RolloutConfig(name="vllm_omni", vllm_omni=timeouts)
        made.append(VllmOmniHandle(rollout, tiny_model, ModelConfig(), ["cuda:0"], timeouts)._environment)
    awake, asleep = made
    assert "PYTORCH_CUDA_ALLOC_CONF" in awake
    assert "PYTORCH_CUDA_ALLOC_CONF" not in asleep
