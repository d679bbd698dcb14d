"""One run per folder: the second start names the first, and the kernel releases the lock."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from filelock import UnixFileLock

from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.run_lock import RunFolderInUseError, RunLock
from flowgrpo_rc.trainer import launch

HOLD = """
import sys, time
from pathlib import Path
from flowgrpo_rc.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_a_second_start_names_the_first_and_a_killed_holder_blocks_nobody(tmp_path):
    run = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(
            RunFolderInUseError, match=rf"run folder .*run is in use by process {holder.pid} on host \S+; .*Wait for"
        ):
            RunFolder.open(str(run), fresh=False)
        assert [p.name for p in run.iterdir()] == [".lock"]
        assert RunFolder.open(str(run), fresh=True).root.name == "run-2"
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    lock = RunLock(run)
    assert f"process {os.getpid()} on host" in lock.path.read_text()
    lock.release()
    assert not lock.path.exists()


def test_the_same_process_is_refused_too_while_it_refers_to_the_lock(tmp_path):
    first = RunLock(tmp_path)
    first.circle = first
    with pytest.raises(RunFolderInUseError, match=f"process {os.getpid()}"):
        RunLock(tmp_path)
    del first
    RunLock(tmp_path).release()


def test_a_forked_child_does_not_keep_it(tmp_path):
    """A child that outlives its parent (a reward's pool) would keep the folder locked."""
    lock = RunLock(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    try:
        lock.release()
        RunLock(tmp_path).release()
    finally:
        os.close(write)
        os.close(read)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_refused_run_leaves_no_folder(tmp_path):
    RunFolder.open(str(tmp_path / "a" / "b" / "run"), fresh=False).abandon()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    folder = RunFolder.open(str(tmp_path / "a" / "b"), fresh=False)
    (tmp_path / "a" / "b" / "mine.txt").touch()
    folder.abandon()
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["mine.txt"]


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    def acquire(self):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(UnixFileLock, "_acquire", acquire)
    assert RunLock(tmp_path).problem == "no locks here"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "give a path"),
        ("file/run", "cannot be a run folder"),
        ("file", "cannot be a run folder"),
        ("x" * 300, "cannot be a run folder .*File name too long"),
        ("~nobody-of-this-name/run", "give the whole path"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_name_that_can_be_no_folder_is_refused(tmp_path, monkeypatch, name, message, fresh):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"trainer.default_local_dir: .*{message}"):
        RunFolder.open(name, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "size"), [("RANK", "WORLD_SIZE"), ("RANK", "LOCAL_RANK"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
)
def test_only_the_first_process_of_a_launch_locks(monkeypatch, name, size):
    for other in (*launch._RANKS, *launch._SIZES, "LOCAL_RANK"):
        monkeypatch.delenv(other, raising=False)
    assert launch.rank() == 0
    monkeypatch.setenv(name, "1")
    assert launch.rank() == 0, "a number that a launcher left behind"
    monkeypatch.setenv(size, "2")
    assert launch.rank() == 1


def test_a_fresh_folder_is_beside_the_used_one(tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "here" / "metrics.jsonl").write_text("{}")
    for start, name in (("here", "."), ("here/below", "..")):
        monkeypatch.chdir(tmp_path / start)
        assert RunFolder.open(name, fresh=True).root == tmp_path / "here-2"
