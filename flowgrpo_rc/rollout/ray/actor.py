"""What runs on a Ray cluster: an actor around an ``EngineHost``. Importing this loads neither torch nor Ray.

Everything goes in and out as bytes that were pickled here or by the trainer, so that what stands between them, Ray and
``ray.driver``, need not know what they are.
"""

import os
import pickle
import socket
import traceback
from typing import Any

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rollout.process.environment import without_process_group
from flowgrpo_rc.threads import limit_spinning

LIFE = "life"
"""The concurrency group that answers while the engine is at work."""
Failure = tuple[str, str]
"""An error as it goes back: the name of its class and its text in a line."""


class EngineActor:
    """One engine on one node of the cluster; ``load`` comes before ``sync`` and ``generate``."""

    def __init__(self) -> None:
        self._host: Any = None

    def where(self) -> tuple[str, int]:
        """The node's name and this process."""
        return socket.gethostname(), os.getpid()

    def alive(self) -> None:
        """A sign of life, whatever the engine computes."""

    def load(self, sections: bytes, device: str, threads: int | None) -> Failure | None:
        """Load the model; ``sections`` are a ``RolloutConfig`` and a ``ModelConfig``.

        ``threads`` are those of a computation on the host; ``None``: as Ray has set them, by ``num_cpus``.
        """

        def build() -> None:
            # Before torch is imported. A node's daemon may have been started by a trainer that has a process group.
            for name in os.environ.keys() - without_process_group(os.environ).keys():
                del os.environ[name]
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = str(threads)
            limit_spinning(os.environ)

            from flowgrpo_rc.rollout.host import EngineHost

            rollout, model = pickle.loads(sections)
            self._host = EngineHost(rollout, model, device)

        return _attempt(build)[0]

    def sync(self, state: bytes, version: int) -> tuple[Failure | None, str]:
        """``EngineHost.sync``."""
        return _attempt(lambda: self._host.sync(pickle.loads(state), version))

    def generate(self, request: bytes) -> tuple[Failure | None, bytes]:
        """``EngineHost.generate``, a request to ``Trajectories``."""
        failure, answer = _attempt(lambda: self._host.generate(pickle.loads(request)))
        return failure, b"" if failure else pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


def _attempt(do: Any) -> tuple[Failure | None, Any]:
    """What ``do`` returns, or what went wrong in it; the whole of that is in the actor's log."""
    try:
        return None, do()
    except Exception as error:
        traceback.print_exc()
        return (type(error).__name__, one_line(error, 1000)), None
