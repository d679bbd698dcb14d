"""An object in a child process, which does as the test wants: ``RemoteObject("remote_fake:Fake", ...)``."""

import os
import signal
import subprocess
import sys
import threading
import time


class AdapterMismatchError(ValueError):
    """Recognised by its name, as the real one, whose module would load torch here."""


class Fake:
    """``at_start`` is what it does when it is made: nothing, ``fail``, ``die`` or ``hang``."""

    def __init__(self, at_start=None):
        if at_start == "fail":
            print("loading", flush=True)
            raise ValueError("there is no such\nmodel")
        if at_start == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if at_start == "hang":
            time.sleep(600)

    def generate(self, what, *arguments):
        """Answers with its argument, later or not at all."""
        if what == "echo":
            return arguments[0]
        if what == "large":
            return b"x" * arguments[0]
        if what == "sleep":
            time.sleep(arguments[0])
        if what == "compute":  # holds the interpreter, as compiled code may
            return sum(range(10**12))
        if what == "stop":
            threading.Timer(arguments[0], os.kill, (os.getpid(), signal.SIGSTOP)).start()
            time.sleep(600)
        if what == "start":
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
        if what == "end":
            os._exit(arguments[0])
        if what == "print":
            print(arguments[0], flush=True)
        if what == "found":
            handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
            return dict(os.environ), sys.path, os.getsid(0) == os.getpid(), "torch" in sys.modules, handlers
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
        """Ends late where ``deaf`` is set."""
        if os.environ.get("DEAF"):
            time.sleep(600)
