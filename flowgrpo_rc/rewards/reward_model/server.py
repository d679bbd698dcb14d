"""Start a server for the reward model, once for all processes of a run on a machine, and end it."""

import os
import shutil
import socket
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

from flowgrpo_rc.messages import printable
from flowgrpo_rc.processes import ChildProcess, without_process_group
from flowgrpo_rc.rewards.config import RewardConfig, RewardModelConfig
from flowgrpo_rc.rewards.http_client import HTTPOptions, Request, ServerError, send_all
from flowgrpo_rc.rewards.registry import REWARDS

SECTION = "reward.reward_model"
POLL_S = 0.5
"""Seconds between two requests that find out if the server answers."""
PROGRESS_S = 60.0
"""Seconds between two lines about a server that does not answer yet; a model may be downloaded for half an hour."""
LOG_LINES = 8
"""Last lines of the server's output in a message."""
LOG_CHARACTERS = 1500
"""Last characters of these lines in a message."""


class RewardModelServer:
    """``vllm serve`` as configured, on a port of the loopback address.

    The constructor starts the process and returns at once; ``wait`` waits until the server answers. The server ends
    with ``close``, with the object, and with this process, however that ends. Of several processes of a run on one
    machine the first starts the server, and the others use it.

    Raises:
        ValueError: ``vllm`` is not installed, its port is taken, or a configured GPU is not there.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        self.model = str(config.model_path)
        self._process: ChildProcess | None = None
        port = 0
        if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")) != "1":
            # All processes of an attempt of a launcher derive the same one; other launches have others.
            launch, attempt = (int(os.environ.get(k, "0")) for k in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
            port = 10_000 + (launch * 7919 + attempt) % 20_000
            if port == launch:
                port += 1
        # Without a launcher the only process is the first.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            port = self._start(port)
        self.address = f"127.0.0.1:{port}"
        """``host:port``."""

    @property
    def base_url(self) -> str:
        """The address as OpenAI's clients take it."""
        return f"http://{self.address}/v1"

    @property
    def offered(self) -> dict[str, str]:
        """Arguments about the server for reward functions of verl-omni's form, by parameter."""
        return {"reward_router_address": self.address, "model_name": self.model}

    def wait(self) -> None:
        """Return as soon as the server answers.

        Raises:
            ValueError: the server has ended, or does not answer within ``start_timeout_s``; with the end of its output.
        """
        ends_at = time.monotonic() + self.config.start_timeout_s
        reported_at = time.monotonic()
        options = HTTPOptions(tries=1, timeout_s=5.0, deadline_s=10.0)
        while True:
            # First, so that a server that answered at once costs no pause.
            with suppress(ServerError):
                send_all([Request(f"http://{self.address}/health")], options, SECTION)
                return
            if self._process is not None and self._process.exit_code is not None:
                raise self._failure(f"ended with exit code {self._process.exit_code} before it answered")
            if time.monotonic() > ends_at:
                limit = f"{SECTION}.start_timeout_s={self.config.start_timeout_s:g} s"
                raise self._failure(f"did not answer within {limit}")
            if self._process is not None and time.monotonic() > reported_at + PROGRESS_S:
                reported_at = time.monotonic()
                print(f"Reward model: vllm serve is starting: {_end_of(self._process, 1)}", file=sys.stderr)
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the server, if this process started it. Further calls do nothing."""
        if self._process is not None:
            self._finalizer()

    def _start(self, port: int) -> int:
        """Start the server on this port, or on a free one for 0, and return it."""
        # The one beside this Python too: a virtual environment that is not activated is not on the PATH.
        places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        program = shutil.which("vllm", path=os.pathsep.join(places))
        if program is None:
            raise ValueError(
                f"{SECTION}.enable: true, but there is no program vllm on the PATH; install vllm here or in an "
                "environment of its own whose vllm is on the PATH, or give the address of a server that runs: "
                "reward.judge.base_url"
            )
        # Another program may take the port before vllm does; vllm then ends, and its log shows why.
        try:
            with socket.create_server(("127.0.0.1", port)) as probe:
                port = probe.getsockname()[1]
        except OSError as error:
            remedy = "start the run again, with another MASTER_PORT"
            raise ValueError(f"{SECTION}: the port {port} cannot be had ({error}); {remedy}") from error
        command = [program, *self.config.arguments(port)]
        print(f"Reward model: starting vllm serve {self.model} on port {port}", file=sys.stderr)
        self._process = ChildProcess(
            "flowgrpo_rc.processes:run_command", command, environment=_environment(self.config.devices)
        )
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid(), self.model)
        return port

    def _failure(self, reason: str) -> ValueError:
        text = f"{SECTION}: vllm serve {self.model} {reason}"
        if self._process is None:
            return ValueError(f"{text}; the first process of the run on this machine has its output")
        self._process.end()
        # The message has the log already.
        self._finalizer.detach()
        return ValueError(f"{text}; the end of its log: {_end_of(self._process, LOG_LINES) or 'it is empty'}")


def start_server(config: RewardConfig) -> RewardModelServer | None:
    """Start the server of ``config.reward_model``, where that is enabled.

    Raises:
        ValueError: no reward of the run asks a model, or the judge has a server already.
    """
    if not config.reward_model.enable:
        return None
    # A function of the user's own may ask the model, under any name; of the built-in rewards the judge alone does.
    own = [*config.own_functions(), *(name for name, function in config.observers().items() if function)]
    names = [*config.weights(), *config.observers()]
    if all(name in REWARDS and name != "judge" and name not in own for name in names):
        judge = "reward.functions.judge=1 reward.judge.questions=[yes_no]"
        raise ValueError(f"{SECTION}.enable: true, but no reward asks a model; leave it out, or give {judge}")
    if config.judge.base_url is not None:
        url = config.judge.base_url
        raise ValueError(f"reward.judge.base_url: got {url}, but {SECTION}.enable=true starts a server; leave one out")
    return RewardModelServer(config.reward_model)


def _end_of(process: ChildProcess, count: int) -> str:
    """The last lines of a process's output, in one line."""
    lines = [printable(line) for line in process.output().splitlines() if line.strip()]
    return " | ".join(lines[-count:])[-LOG_CHARACTERS:]


def _environment(devices: list[int] | None) -> dict[str, str]:
    """The server's environment variables: ours without the launcher's, with the configured GPUs."""
    own = without_process_group(os.environ)
    if devices is None:
        return own
    seen = own.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else [name.strip() for name in seen.split(",") if name.strip()]
    if names is not None and max(devices) >= len(names):
        raise ValueError(
            f"{SECTION}.devices: got {devices}, but the run sees {len(names)} GPUs (CUDA_VISIBLE_DEVICES={seen}); give "
            f"numbers below {len(names)}"
        )
    # The variable may hold names of GPUs (UUIDs), so that indices are looked up in it.
    own["CUDA_VISIBLE_DEVICES"] = ",".join(str(n) if names is None else names[n] for n in devices)
    return own


def _end(process: ChildProcess, owner: int, model: str) -> None:
    """End the server's process group. A server that has ended by itself leaves a log with the reason."""
    if os.getpid() != owner:
        # In a fork's child, whose parent still needs the server.
        return
    if process.exit_code is not None:
        log = process.save_output("flowgrpo_rc-reward-model-")
        print(f"{SECTION}: vllm serve {model} {process.how_it_ended()}; {log}", file=sys.stderr)
    process.end()
