"""What a worker process of ``workers.py`` runs: one built-in reward, called over standard input and output.

Messages are pickles, from and to the process that has started this one. It ends with its input, and soon after its
parent, which may have been killed while a child of it still holds the input open.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from typing import Any

from flowgrpo_rc.rewards.errors import exception_text
from flowgrpo_rc.rewards.registry import load_builtin

LOOK_S = 2.0
"""Seconds between two looks at whether the parent is there."""


def main() -> None:
    """Answer calls until the input ends."""
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    questions = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a library prints must not get among the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    reward: Any = None
    while True:
        try:
            method, args, kwargs = pickle.load(questions)
        except EOFError:
            return
        value = problem = None
        try:
            if method == "load":
                reward = load_builtin(*args)
            else:
                value = getattr(reward, method)(*args, **kwargs)
        except Exception as error:
            problem = type(error).__name__, exception_text(error)
        pickle.dump((value, problem), answers)
        answers.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
