"""One run a folder: who comes second is told who came first; the kernel gives the lock back."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from flowgrpo_rc import run_lock
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.run_lock import RunFolderInUseError, RunLock, starts_as_main

HOLD = """
import sys, time
from pathlib import Path
from flowgrpo_rc.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of ``tmp_path / "run"``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_second_start_is_told_folder_host_and_process(tmp_path, holder):
    with pytest.raises(RunFolderInUseError, match=rf"run folder .*run is in use by process {holder.pid} on host \S+;"):
        RunFolder.open(str(tmp_path / "run"), fresh=False)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    beside = RunFolder.open(str(tmp_path / "run"), fresh=True)
    assert beside.root.name == "run-2"
    third = RunFolder.open(str(tmp_path / "run"), fresh=True)
    assert third.root.name == "run-3"


def test_a_killed_holder_blocks_nobody(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    lock = RunLock(tmp_path / "run")
    assert f"process {os.getpid()} on host" in lock.path.read_text()
    lock.release()
    assert not lock.path.exists()


def test_the_same_process_is_refused_too(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(RunFolderInUseError, match=f"process {os.getpid()}"):
        RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()


def test_what_nobody_refers_to_is_released(tmp_path):
    lock = RunLock(tmp_path)
    lock.circle = lock
    del lock
    RunLock(tmp_path).release()


def test_children_do_not_inherit_it(tmp_path):
    """A child that outlives its parent would keep the folder locked."""
    lock = RunLock(tmp_path)
    assert not os.get_inheritable(lock._descriptor)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock._descriptor is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RunFolderInUseError):
        RunLock(tmp_path)
    lock.release()


def test_a_refused_run_leaves_no_folder(tmp_path):
    RunFolder.open(str(tmp_path / "a" / "b" / "run"), fresh=False).abandon()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    folder = RunFolder.open(str(tmp_path / "a" / "b"), fresh=False)
    (tmp_path / "a" / "b" / "mine.txt").touch()
    folder.abandon()
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["mine.txt"]


def test_a_lock_file_that_is_removed_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """The last holder removes its file between opening and locking it: that lock would guard nothing."""
    flock, calls = run_lock.fcntl.flock, []

    def removed_first(descriptor, how):
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(how)
        return flock(descriptor, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", removed_first)
    lock = RunLock(tmp_path)
    assert len(calls) == 2
    with pytest.raises(RunFolderInUseError):
        RunLock(tmp_path)
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, code):
    def flock(descriptor, how):
        raise OSError(code, "no locks here")

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    assert RunLock(tmp_path).problem == "no locks here"
    monkeypatch.setattr(run_lock, "fcntl", None)
    assert RunLock(tmp_path).problem == "this system has no flock"


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_an_empty_folder_name_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="trainer.default_local_dir: got .*give a path"):
        RunFolder.open(text, fresh=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0b", "cannot hold a NUL character"),
        ("file/run", "cannot be a run folder .*is not a folder"),
        ("file", "cannot be a run folder .*is not a folder"),
        ("x" * 300, "cannot be a run folder .*File name too long"),
        ("~nobody-of-this-name/run", "give the whole path"),
    ],
)
def test_a_name_that_can_be_no_folder_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"trainer.default_local_dir: .*{message}"):
        RunFolder.open(name, fresh=False)


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder.open("~/runs/a", fresh=False, lock=False).root == tmp_path / "runs" / "a"


@pytest.mark.parametrize(
    ("name", "size"), [("RANK", "WORLD_SIZE"), ("RANK", "LOCAL_RANK"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
)
def test_only_the_first_process_locks(monkeypatch, name, size):
    for other in (*run_lock._RANKS, *run_lock._SIZES, "LOCAL_RANK"):
        monkeypatch.delenv(other, raising=False)
    assert starts_as_main()
    monkeypatch.setenv(name, "1")
    assert starts_as_main(), "a number that a launcher left behind"
    monkeypatch.setenv(size, "2")
    assert not starts_as_main()
    monkeypatch.setenv(name, "0")
    assert starts_as_main()


@pytest.mark.parametrize("length", [254, 300])
def test_a_fresh_folder_whose_name_has_no_room_for_a_number_is_refused(tmp_path, length):
    """``NAME`` or ``NAME-2`` is longer than a name may be."""
    path = tmp_path / ("x" * length)
    if length < 255:
        (path / "lora").mkdir(parents=True)
        (path / "lora" / "adapter").touch()
    with pytest.raises(ValueError, match="trainer.default_local_dir: .*File name too long"):
        RunFolder.open(str(path), fresh=True)


def test_a_fresh_folder_beside_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "here" / "metrics.jsonl").write_text("{}")
    for start, name in (("here", "."), ("here/below", "..")):
        monkeypatch.chdir(tmp_path / start)
        assert RunFolder.open(name, fresh=True).root == tmp_path / "here-2"
