"""A rollout whose engine's process dies, hangs or is refused an adapter, and the process when the trainer dies."""

import os
import signal
import threading
from dataclasses import replace

import pytest
from torch.testing import assert_close

pytest.importorskip("vllm")

from engine_pair import TIMEOUTS, random_adapter, request_for, zero_adapter
from tests_support import alive
from tolerances import LATENT

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import RolloutError, RolloutSyncError
from flowgrpo_rc.rollout.process import EngineProcess
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pair(qwen_image_pair):
    """At version 4 of a random adapter; a fault test leaves a working engine or starts one anew."""
    qwen_image_pair.sync(random_adapter(qwen_image_pair), 4)
    return qwen_image_pair


def test_killed_in_the_middle_of_a_rollout(pair):
    """It comes back with the adapter it had, at its version, and the rollout is the one that was asked for."""
    request = request_for(pair.model, steps=100)
    expected = pair.vllm.generate(request)
    first, restarts = pair.vllm.pid, pair.vllm.restarts
    threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()
    with pytest.warns(UserWarning, match=rf"process {first} died of signal 9 while sampling; log: .*starting it anew"):
        result = pair.vllm.generate(request)
    assert (pair.vllm.restarts, alive(first)) == (restarts + 1, False)
    assert_close(result.batch["next_latents"], expected.batch["next_latents"], atol=LATENT, rtol=0)
    check_rollout(request, result, pair.model, HeldAdapter(4, expected.echo.adapter_digest), "float32")


def test_vllm_omni_refuses_what_does_not_bind(pair):
    """Past the trainer's own check, straight at the engine's process; the adapter before stays in use."""
    good = random_adapter(pair)
    digest = pair.sync(good, 4)
    module = next(n for n in good if "to_out.0.lora_A" in n).removesuffix(".lora_A.default.weight")
    renamed = {n.replace(module, module.replace("to_out.0", "to_nowhere")): t for n, t in good.items()}
    lacking = {n: t for n, t in good.items() if n != f"{module}.lora_B.default.weight"}
    narrow = {n: t[:-1] if "to_q.lora_B" in n else t for n, t in good.items()}
    for state, says in (
        (renamed, "binding is incomplete|reach no layer"),
        (lacking, "does not bind: .*to_out.0.lora_B.default.weight is missing|does not load"),
    ):
        with pytest.raises(AdapterMismatchError, match=says):
            pair.vllm._handle.call("sync", state, 6)
        result = pair.vllm.generate(request_for(pair.model))
        assert (result.echo.adapter_version, result.echo.adapter_digest) == (4, digest)
    try:
        held = pair.vllm._handle.call("sync", narrow, 6)
    except AdapterMismatchError:
        held = digest
    assert held != pair.vllm.digest_of(narrow)
    pair.sync(good, 4)


def test_a_stale_adapter_left_in_place_is_found_out(pair):
    """The version lies, the digest does not."""
    stale, newest = random_adapter(pair), zero_adapter(pair)
    pair.sync(stale, 4)
    request = request_for(pair.model)
    result = pair.vllm.generate(request)
    with pytest.raises(RolloutSyncError, match="adapter version 4: digest of the engine's weights"):
        check_rollout(request, result, pair.model, HeldAdapter(4, pair.vllm.digest_of(newest)), "float32")


def test_model_that_cannot_be_loaded_ends_in_one_line(pair, tmp_path):
    handle = pair.vllm._handle
    make, config, lora, *rest = handle._target
    lora = replace(lora, path=str(tmp_path))
    broken = EngineProcess("broken", make, config, lora, *rest, environment=handle._environment, timeouts=TIMEOUTS)
    with pytest.raises(RolloutError, match="ended with code 1 while starting; log: .*, which ends: ") as caught:
        broken.start()
    assert "\n" not in str(caught.value)
