"""The first failure among the processes of a launch: who tells it, and how the others end."""

import contextlib
import threading

import pytest
import torch

from flowgrpo_rc.cli.errors import TRAINING, exit_code
from flowgrpo_rc.trainer import peers as module
from flowgrpo_rc.trainer.config import ActorRolloutRefConfig
from flowgrpo_rc.trainer.peers import PeerFailureError, Peers


class EndedError(BaseException):
    """Stands for the end of a process."""


@pytest.fixture
def launch(monkeypatch):
    """``make(rank, host)``: the processes of one launch, with a store that this process keeps."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(rank, host="one", local_rank=None, processes=3, **more):
        local_rank = rank if local_rank is None else local_rank
        where = {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(local_rank)}
        made = Peers(where | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)} | more)
        made._host = host
        return made

    make.store = store
    return make


def test_the_first_failure_is_everybodys(launch):
    first, second, third = launch(1), launch(0), launch(2, "two", 0)
    error = ValueError("the judge is\nout of reach")
    assert first.first(error) is error
    other = second.first(RuntimeError("connection closed by peer"))
    assert isinstance(other, PeerFailureError)
    assert str(other) == "the judge is out of reach"
    assert str(third.first(KeyboardInterrupt())) == "process 1 on one: the judge is out of reach"
    # what the launcher's signal raises in the process that failed hides nothing
    assert first.first(KeyboardInterrupt()) is error
    assert not first.failed_elsewhere
    assert second.failed_elsewhere
    assert third.failed_elsewhere


def test_a_signal_while_the_failure_is_told_hides_nothing(launch, monkeypatch):
    """The launcher may send it as soon as one process has ended."""
    process = launch(1)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    error = ValueError("lost")
    with monkeypatch.context() as patch:
        patch.setattr(process, "_store", type("Store", (), {"compare_set": interrupted})())
        with pytest.raises(KeyboardInterrupt):
            process.first(error)
    assert process.first(KeyboardInterrupt()) is error
    other = launch(0)
    other._look()
    assert other.known.text == "lost"


def test_the_message_is_shown_once_a_machine(launch):
    failed, beside, first_there, second_there = launch(1), launch(0), launch(2, "two", 0), launch(3, "two", 1)
    everyone = (failed, beside, first_there, second_there)
    for process in everyone:
        process.first(ValueError("lost"))
    assert [process.shows() for process in everyone] == [True, False, True, False]
    assert not any(process.shows() for process in everyone)


def test_processes_started_anew_know_nothing_of_the_failure_before(launch):
    launch(0).first(ValueError("lost"))
    again = launch(1, TORCHELASTIC_RESTART_COUNT="1")
    again._look()
    assert again.known is None


def watched(process, monkeypatch, *, returns):
    """Watches while the main thread stands still (or ``returns``); what was called at the end."""
    events = []

    def end(code):
        events.append(code)
        raise EndedError

    monkeypatch.setattr(module.os, "_exit", end)
    monkeypatch.setattr(module, "GRACE_SECONDS", 5.0 if returns else 0.1)
    stop = threading.Event()
    if returns:
        threading.Timer(0.3, stop.set).start()
    with contextlib.suppress(EndedError):
        process.watch(stop, lambda: events.append("released"))
    return events


def test_a_process_that_stands_still_is_ended(launch, monkeypatch, capsys):
    launch(1, "elsewhere").first(ValueError("the judge is out of reach"))
    stuck = launch(0)
    assert watched(stuck, monkeypatch, returns=False) == ["released", 1]
    assert capsys.readouterr().err == "error: process 1 on elsewhere: the judge is out of reach\n"


def test_a_process_that_ends_by_itself_is_left_to(launch, monkeypatch, capsys):
    launch(1).first(ValueError("the judge is out of reach"))
    assert watched(launch(0), monkeypatch, returns=True) == []
    assert watched(launch(2, processes=2), monkeypatch, returns=False) == ["released", 1]
    assert capsys.readouterr().err == ""  # process 1, of this machine, says it


def test_a_process_that_hangs_while_it_fails_is_ended_with_its_message(launch, monkeypatch, capsys):
    failed = launch(0)
    failed.first(ValueError("the disk is full"))
    assert watched(failed, monkeypatch, returns=False) == ["released", 1]
    assert capsys.readouterr().err == "error: the disk is full\n"


def test_the_end_of_the_store_is_a_failure(launch, monkeypatch, capsys):
    """With launchers other than torchrun process 0 keeps it, and may be killed."""
    left = launch(1, local_rank=0)
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    del launch.store
    left._environment = {**left._environment, "MASTER_PORT": "1"}
    left._store = Gone()
    assert watched(left, monkeypatch, returns=False) == ["released", 1]
    assert "process 0, or its launcher, which kept the store at 127.0.0.1:1, has ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4", "has ended without a word"),
        ("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.", "has ended without a word"),
        (
            "[/gloo/transport/tcp/buffer.cc:81] Timed out waiting 600000ms for recv",
            "raise actor_rollout_ref",
        ),
    ],
)
def test_what_gloo_says_of_the_others_is_explained(text, says, capsys):
    assert exit_code(RuntimeError(text), phase=TRAINING) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("value", "says"), [(0, "give a number above 0"), (1e8, "give at most 1e.07 seconds")])
def test_the_time_out_is_checked(value, says):
    assert ActorRolloutRefConfig().nccl_timeout == 600
    with pytest.raises(ValueError, match=f"actor_rollout_ref.nccl_timeout: got .*; {says}"):
        ActorRolloutRefConfig(nccl_timeout=value)


class Gone:
    """A store whose server is no more."""

    def check(self, keys):
        raise RuntimeError("Connection was likely closed")
