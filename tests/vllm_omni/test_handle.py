"""vllm-omni as an engine elsewhere: as a handle of a pool, and below an ``build_engine_alone``."""

import os
import signal

import pytest
import torch

pytest.importorskip("vllm")

from engine_pair import TIMEOUTS, random_adapter, request_for
from tests_support import alive, descendants, wait_until
from torch.testing import assert_close

from flowgrpo_rc.rollout import EngineLostError, RolloutConfig, RolloutPool
from flowgrpo_rc.rollout.base import RolloutHandle
from flowgrpo_rc.rollout.build import digest_rule
from flowgrpo_rc.rollout.config import ALONE, ProcessConfig
from flowgrpo_rc.rollout.process import ProcessHandle, process_handles

ROLLOUT = RolloutConfig(
    name="vllm_omni",
    dtype="float32",
    micro_batch_size=4,
    vllm_omni=TIMEOUTS,
    process=ProcessConfig(start_timeout_s=600.0, silence_timeout_s=30.0),
)

pytestmark = pytest.mark.process


@pytest.fixture
def case(qwen_image_pair):
    """Model section, adapter and its digest, a request, and what the diffusers engine draws for it."""
    pair = qwen_image_pair
    state = random_adapter(pair, 3)
    pair.diffusers.sync(state, 1)
    request = request_for(pair.model)
    return pair.lora, state, digest_rule(ROLLOUT, pair.lora)(state), request, pair.diffusers.generate(request)


def assert_same_images(one, other):
    """As between the two engines: vllm-omni's transformer rounds its scaled adapter in another place."""
    assert_close(one.batch["next_latents"], other.batch["next_latents"], atol=1e-4, rtol=0)
    assert one.echo.seeds == other.echo.seeds


def test_a_pool_of_one_loses_it_and_has_it_again(qwen_image_pair, case):
    """A handle never starts anew by itself: the pool does, and gives it the adapter again."""
    lora, state, digest, request, expected = case
    (handle,) = process_handles(ROLLOUT, lora, "cpu", ALONE, qwen_image_pair.model)
    assert isinstance(handle, RolloutHandle)
    assert handle.name == "vllm_omni 0 (cpu)"
    pool = RolloutPool([handle], digest_of=digest_rule(ROLLOUT, lora), dtype=torch.float32, micro_batch_size=4)
    try:
        assert pool.sync(state, 1) == digest
        assert_same_images(pool.generate(request), expected)
        first = handle.pid
        os.kill(first, signal.SIGKILL)
        with pytest.warns(UserWarning, match=rf"vllm_omni 0 \(cpu\) is started anew: its process {first} died of sig"):
            again = pool.generate(request)
        assert_same_images(again, expected)
    finally:
        pool.close()
    assert not alive(handle.pid)


def test_an_engine_alone_has_vllm_omni_below_it_and_takes_it_along(case):
    """As an actor on another machine runs it: no weights of its own, the same digest, no orphan when it is killed."""
    lora, state, digest, request, expected = case
    handle = ProcessHandle(ROLLOUT, lora, "cpu")
    try:
        handle.start()
        assert handle.sync(state, 1) == digest
        assert_same_images(handle.generate(request), expected)
        below = descendants(handle.pid)
        assert below
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError):
            handle.generate(request)
        wait_until(lambda: not any(map(alive, below)))
    finally:
        handle.close()
