"""The prompt writer's engines in processes: the numbers of one in the trainer's process, also after a kill."""

import os
import pickle
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_writer import REQUESTS, config_of, writer_of

from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout.base import RolloutError, RolloutSyncError
from flowgrpo_rc.rollout.config import Share
from flowgrpo_rc.writer import WriterProcesses
from flowgrpo_rc.writer.engine import write
from flowgrpo_rc.writer.process import _only, check_writer_devices

ROWS = [request for request in REQUESTS for _ in range(3)]


def elsewhere(**engine):
    """A configuration of two engines, in micro-batches of five rows, and bfloat16 unless ``engine`` says more."""
    return config_of(engine={"dtype": "bfloat16", "micro_batch_size": 5, "placement": "process"} | engine)


@pytest.mark.process
def test_two_processes_write_what_one_engine_here_writes():
    """Bit for bit, with the digest of what each holds; one that was killed is started again, once in a call."""
    config = elsewhere(devices=["cpu", "cpu"])
    language, engine, actor = writer_of(config)
    here = write(engine, language.tokens, ROWS, range(len(ROWS)))
    both = WriterProcesses(config, "cpu", Share(0, 1), allow_tf32=False)
    try:
        state = adapter_state(actor.network)
        assert both.sync(state, 3) == both.digest_of(state) == engine.digest_of(state)

        def same():
            found = write(both, language.tokens, ROWS, range(len(ROWS)))
            assert found.texts == here.texts
            assert all(torch.equal(values, here.batch[name]) for name, values in found.batch.items())
            assert torch.equal(found.ended, here.ended)
            assert (found.adapter_version, found.adapter_digest) == (3, here.adapter_digest)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same()
        os.kill(both._handles[1].pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match=r"prompt writer 1 \(cpu\) is started anew: its process .* died of signal"):
            same()
        os.kill(both._handles[0].pid, signal.SIGKILL)
        both._handles[0]._target = ("flowgrpo_rc.writer.process:nothing",)
        with (
            pytest.warns(UserWarning, match="is started anew"),
            pytest.raises(RolloutError, match=r"prompt writer 0 \(cpu\), which was started anew, is lost again"),
        ):
            write(both, language.tokens, ROWS, range(len(ROWS)))
    finally:
        both.close()


def test_what_is_sent_is_as_large_as_its_numbers(monkeypatch):
    """Views of one block, as a GPU's adapter comes to the host, are not pickled with the whole block each."""
    language, engine, actor = writer_of(elsewhere())
    state = adapter_state(actor.network)
    block = torch.cat([value.flatten() for value in state.values()])
    parts = block.split([value.numel() for value in state.values()])
    views = {name: part.view_as(value) for (name, value), part in zip(state.items(), parts, strict=True)}
    both = WriterProcesses.__new__(WriterProcesses)
    sent = []
    both._engine, both._handles, both._threads = elsewhere(dtype="float32").engine, [None], ThreadPoolExecutor(1)
    monkeypatch.setattr(WriterProcesses, "_call", lambda *given: sent.append(pickle.dumps(given[3:])) or "digest")
    both.sync(views, 1)
    assert len(sent[0]) < 4 * block.numel() + 600 * len(views)
    answer = engine.sample([language.tokens.of(request) for request in ROWS], range(len(ROWS)))
    numbers = sum(8 * len(row) + 4 * len(row) for row in answer.tokens)
    assert len(pickle.dumps(answer)) < numbers + 2 * 300 * len(ROWS)


def test_engines_that_hold_different_adapters_are_refused():
    assert _only(["a", "a"]) == "a"
    with pytest.raises(RolloutSyncError, match="engines of the prompt writer hold different adapters: a, b"):
        _only(["a", "b"])


def test_devices_are_dealt_to_the_trainer_processes(monkeypatch):
    started = []
    monkeypatch.setattr(WriterProcesses, "_start", lambda self, handle: started.append(handle.name))
    config = elsewhere(devices=["cpu", "cpu", "cpu"])
    for index, names in enumerate((["prompt writer 0 (cpu)", "prompt writer 2 (cpu)"], ["prompt writer 1 (cpu)"])):
        started.clear()
        WriterProcesses(config, "cpu", Share(index, 2), allow_tf32=False).close()
        assert sorted(started) == names


def test_devices_that_are_not_there_are_refused():
    config = elsewhere(devices=["cuda:97"])
    with pytest.raises(ValueError, match="algorithm.prompt_writer.engine.devices: got cuda:97, but this process sees"):
        check_writer_devices(config, Share(0, 1))
    with pytest.raises(ValueError, match="algorithm.prompt_writer.engine.devices: has 1 engines for the 2 trainer"):
        check_writer_devices(config, Share(1, 2))
