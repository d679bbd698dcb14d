"""Starts a server for the reward model, waits until it answers, and ends it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo_rc.messages import printable
from flowgrpo_rc.rewards.http_client import Request, ServerError, send_all
from flowgrpo_rc.rewards.http_options import HTTPOptions
from flowgrpo_rc.rewards.registry import REWARDS
from flowgrpo_rc.rewards.reward_model import sharing
from flowgrpo_rc.rewards.reward_model.config import SECTION, RewardModelConfig

if TYPE_CHECKING:
    from flowgrpo_rc.rewards.config import RewardConfig
    from flowgrpo_rc.rewards.judge.config import JudgeConfig

KEEPER = Path(__file__).with_name("keeper.py")
POLL_S = 0.5
"""Seconds between two questions whether the server answers."""
LOG_LINES = 8
"""Last lines of the server's log that a message repeats."""
LOG_CHARACTERS = 1500
"""And so many of their last characters at most."""
END_S = 15.0
"""Seconds that the server gets to end; its keeper gives it ten."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a launcher tells processes of a run apart; the server is none of them."""


class RewardModelServer:
    """``vllm serve`` as the configuration says, on a free port of the loopback address.

    Making it starts the process and returns at once; ``wait`` waits until the server answers. It ends with ``close``,
    when the object goes, at the end of the program, and when the process is killed. Of several processes of a run on
    one machine the first starts the server, and the others find it.

    Raises:
        ValueError: ``vllm`` is not installed, or a GPU that is asked for is not there.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        self.model = str(config.model_path)
        self.log: Path | None = None
        """What the server writes; None in a process that has not started it."""
        self._process: subprocess.Popen[bytes] | None = None
        if sharing.is_first():
            self.address = self._start()
            """``host:port``."""
        else:
            self.address = sharing.wait_for(config.start_timeout_s)

    @property
    def base_url(self) -> str:
        """The address as OpenAI's clients take it."""
        return f"http://{self.address}/v1"

    @property
    def offered(self) -> dict[str, str]:
        """What a reward function of verl-omni's gets to know of the server, by parameter."""
        return {"reward_router_address": self.address, "model_name": self.model}

    def wait(self) -> None:
        """Return as soon as the server answers.

        Raises:
            ValueError: it has ended, or does not answer within ``start_timeout_s``; with the end of its log.
        """
        ends_at = time.monotonic() + self.config.start_timeout_s
        options = HTTPOptions(tries=1, timeout_s=5.0, deadline_s=10.0)
        while True:
            with suppress(ServerError):
                send_all([Request(f"http://{self.address}/health")], options, SECTION)
                return
            if self._process is not None and self._process.poll() is not None:
                raise self._failure(f"ended with exit code {self._process.returncode} before it answered")
            if time.monotonic() > ends_at:
                raise self._failure(
                    f"did not answer within {SECTION}.start_timeout_s={self.config.start_timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the server, if this process started it; once is enough."""
        if self._process is not None:
            self._finalizer()

    def _start(self) -> str:
        command = [_program(), *self.config.arguments(port := _free_port())]
        descriptor, name = tempfile.mkstemp(prefix="flowgrpo_rc-reward-model-", suffix=".log")
        self.log = Path(name)
        print(f"Reward model: starting vllm serve {self.model} on port {port}; its log: {name}", file=sys.stderr)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(KEEPER), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.config.devices),
                start_new_session=True,  # Ctrl-C in the terminal is the run's, which may still want scores
            )
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid(), self.log, self.model)
        address = f"127.0.0.1:{port}"
        if sharing.has_peers():
            sharing.tell(address)
        return address

    def _failure(self, what: str) -> ValueError:
        """With what the server said last, before its log may be removed."""
        told = f"{SECTION}: vllm serve {self.model} {what}"
        if self.log is None:
            return ValueError(f"{told}; the first process of the run on this machine has its log")
        lines = [printable(line) for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        said = " | ".join(lines[-LOG_LINES:])[-LOG_CHARACTERS:]
        self.close()
        return ValueError(f"{told}; the end of its log: {said or 'it is empty'}")


@contextmanager
def serving(config: RewardConfig) -> Iterator[RewardModelServer | None]:
    """While rewards are built: the server of ``config.reward_model``, which the judge is told to ask; None where none
    is wanted. It is ended where building fails, and otherwise left to its owner.

    Raises:
        ValueError: no reward of the run asks a model, or the judge has a server already.
    """
    if not config.reward_model.enable:
        yield None
        return
    own = [*config.own_functions(), *(name for name, function in config.observers().items() if function)]
    names = [*config.weights(), *config.observers()]
    if all(name in REWARDS and name != "judge" and name not in own for name in names):
        raise ValueError(
            f"{SECTION}.enable: true, but no reward asks a model; give the judge a weight (reward.functions.judge=1 "
            "reward.judge.questions=[yes_no]), or leave it out"
        )
    if config.judge.base_url is not None:
        raise ValueError(
            f"reward.judge.base_url: got {config.judge.base_url}, but {SECTION}.enable=true starts a server for the "
            "judge; leave one of them out"
        )
    server = RewardModelServer(config.reward_model)
    try:
        with asking(config.judge, server):
            yield server
    except BaseException:
        server.close()
        raise


@contextmanager
def asking(judge: JudgeConfig, server: RewardModelServer | None) -> Iterator[None]:
    """While rewards are built: the judge has the server's address. Not afterwards, since ``config.yaml`` would keep
    it, and the next run's server has another one."""
    if server is None:
        yield
        return
    judge.base_url = server.base_url
    try:
        yield
    finally:
        judge.base_url = None


def _program() -> str:
    """The program ``vllm``: the first on the ``PATH``, or else the one beside this Python."""
    places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    found = shutil.which("vllm", path=os.pathsep.join(places))
    if found is None:
        raise ValueError(
            f"{SECTION}.enable: true, but there is no program vllm on the PATH; install vllm here or in an environment "
            "of its own whose vllm is on the PATH, or give the address of a server that runs: reward.judge.base_url"
        )
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(devices: list[int] | None) -> dict[str, str]:
    """The server's environment variables: ours without the launcher's, with the GPUs that it may use."""
    own = {k: v for k, v in os.environ.items() if k not in _LAUNCHERS and not k.startswith("TORCHELASTIC_")}
    if devices is None:
        return own
    seen = own.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else [name.strip() for name in seen.split(",") if name.strip()]
    if names is not None and max(devices) >= len(names):
        raise ValueError(
            f"{SECTION}.devices: got {devices}, but the run sees {len(names)} GPUs (CUDA_VISIBLE_DEVICES={seen}); give "
            f"numbers below {len(names)}"
        )
    own["CUDA_VISIBLE_DEVICES"] = ",".join(str(n) if names is None else names[n] for n in devices)
    return own


def _end(process: subprocess.Popen[bytes], owner: int, log: Path, model: str) -> None:
    """End the server and remove its log. Of a server that has ended by itself the log stays, since it says why."""
    if os.getpid() != owner:
        return  # in a fork's child, whose parent still needs the server
    died = process.poll() is not None
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if died:
        print(f"{SECTION}: vllm serve {model} ended with code {process.returncode}; its log: {log}", file=sys.stderr)
    else:
        log.unlink(missing_ok=True)
    sharing.forget()
