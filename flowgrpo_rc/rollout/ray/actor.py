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
from flowgrpo_rc.threads import limit_spinning

LIFE = "life"
"""The concurrency group that answers while the engine is at work."""
_DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The trainer's process group is not the engine's."""
_PRESET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
Failure = tuple[str, str]
"""An error as it goes back: the name of its class and its text in a line."""


class EngineActor:
    """One engine on one node of the cluster; ``load`` comes before ``sync`` and ``generate``."""

    def __init__(self) -> None:
        # Before torch is imported. A node's daemon may have been started by a trainer that has a process group.
        for name in [name for name in os.environ if name in _DISTRIBUTED or name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        for name, value in _PRESET.items():
            os.environ.setdefault(name, value)
        limit_spinning(os.environ)
        self._host: Any = None

    def where(self) -> tuple[str, int]:
        """The node's name and this process."""
        return socket.gethostname(), os.getpid()

    def alive(self) -> None:
        """A sign of life, whatever the engine computes."""

    def load(self, sections: bytes, device: str) -> Failure | None:
        """Load the model; ``sections`` are a ``RolloutConfig`` and a ``ModelConfig``."""

        def build() -> None:
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
