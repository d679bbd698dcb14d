"""An engine's process without an engine: ``python -m fake_server FD``, with this folder on the path."""

import os
import signal
import subprocess
import sys
import threading
import time

from flowgrpo_rc.rollout.process.child import serve


class AdapterMismatchError(ValueError):
    """Told by its name, as the real one is, whose module would load torch here."""


class Fake:
    """Does as it is told. Its settings are what it does at its start: nothing, ``fail``, ``die`` or ``hang``."""

    def __init__(self, settings):
        if settings == "fail":
            print("loading", flush=True)
            raise ValueError("there is no such\nmodel")
        if settings == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if settings == "hang":
            time.sleep(600)

    def generate(self, what, *arguments):
        """Answers with what it was asked, later or not at all."""
        if what == "echo":
            return arguments[0]
        if what == "large":
            return b"x" * arguments[0]
        if what == "sleep":
            time.sleep(arguments[0])
        if what == "stop":
            threading.Timer(arguments[0], os.kill, (os.getpid(), signal.SIGSTOP)).start()
            time.sleep(600)
        if what == "start":
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
        if what == "end":
            os._exit(arguments[0])
        if what == "environment":
            return dict(os.environ), os.getsid(0) == os.getpid(), "torch" in sys.modules
        if what == "wrong":
            raise RuntimeError("cannot\ndraw")
        return None

    def sync(self, state, version=0):
        """Refuses what is no mapping."""
        if state == "slow":
            time.sleep(600)
        if not isinstance(state, dict):
            raise AdapterMismatchError("does not bind")
        return f"digest {version}"

    def close(self):
        """Says so in the log."""
        print("closed", flush=True)


if __name__ == "__main__":
    serve(Fake)
