"""vllm-omni as an engine elsewhere: as a handle of a pool, and below an ``build_engine_alone``."""

import os
import signal

import pytest
import torch

pytest.importorskip("vllm")

from engine_pair import TIMEOUTS, adapter_like, request_for
from tests_support import alive, descendants, wait_until
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout import DiffusersEngine, EngineLostError, RolloutConfig, RolloutPool
from flowgrpo_rc.rollout.base import RolloutHandle
from flowgrpo_rc.rollout.build import digest_rule
from flowgrpo_rc.rollout.config import ALONE, ProcessConfig
from flowgrpo_rc.rollout.process import ProcessHandle, process_handles

LORA = ModelConfig(path="asset:tiny_qwen_image", lora_rank=4, lora_alpha=6)
ROLLOUT = RolloutConfig(
    name="vllm_omni",
    dtype="float32",
    micro_batch_size=4,
    vllm_omni=TIMEOUTS,
    process=ProcessConfig(start_timeout_s=600.0, silence_timeout_s=30.0),
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(LORA.path)


@pytest.fixture(scope="module")
def engine(model):
    """The diffusers engine with a random adapter, which is returned too."""
    engine = DiffusersEngine(model, LORA, dtype=torch.float32, micro_batch_size=4, device="cpu")
    state = adapter_like(adapter_state(engine.transformer, engine.adapter), 3)
    engine.sync(state, 1)
    return engine, state


def assert_same_images(one, other):
    """As between the two engines: vllm-omni's transformer rounds its scaled adapter in another place."""
    assert_close(one.batch["next_latents"], other.batch["next_latents"], atol=1e-4, rtol=0)
    assert one.echo.seeds == other.echo.seeds


def test_a_pool_of_one_loses_it_and_has_it_again(model, engine):
    """A handle never starts anew by itself: the pool does, and gives it the adapter again."""
    beside, state = engine
    rule = digest_rule(ROLLOUT, LORA)
    (handle,) = process_handles(ROLLOUT, LORA, "cpu", ALONE, model)
    assert isinstance(handle, RolloutHandle)
    assert handle.name == "vllm_omni 0 (cpu)"
    pool = RolloutPool([handle], digest_of=rule, dtype=torch.float32, micro_batch_size=4)
    try:
        assert pool.sync(state, 1) == rule(state)
        request = request_for(model)
        expected = beside.generate(request)
        assert_same_images(pool.generate(request), expected)
        first = handle.pid
        os.kill(first, signal.SIGKILL)
        with pytest.warns(UserWarning, match=rf"vllm_omni 0 \(cpu\) is started anew: its process {first} died of sig"):
            again = pool.generate(request)
        assert_same_images(again, expected)
    finally:
        pool.close()
    assert not alive(handle.pid)


def test_an_engine_alone_has_vllm_omni_below_it_and_takes_it_along(model, engine):
    """As an actor on another machine runs it: no weights of its own, the same digest, no orphan when it is killed."""
    beside, state = engine
    handle = ProcessHandle(ROLLOUT, LORA, "cpu")
    try:
        handle.start()
        assert handle.sync(state, 1) == digest_rule(ROLLOUT, LORA)(state)
        request = request_for(model)
        assert_same_images(handle.generate(request), beside.generate(request))
        below = descendants(handle.pid)
        assert below
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError):
            handle.generate(request)
        wait_until(lambda: not any(map(alive, below)))
    finally:
        handle.close()
