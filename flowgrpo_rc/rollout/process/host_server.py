"""A process around an ``EngineHost``: ``python -m flowgrpo_rc.rollout.process.host_server FD``.

Its settings are the arguments of the host.
"""

from flowgrpo_rc.rollout.host import EngineHost
from flowgrpo_rc.rollout.process.child import serve

if __name__ == "__main__":
    serve(lambda settings: EngineHost(*settings))
