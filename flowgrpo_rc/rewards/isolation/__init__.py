"""Isolation: a user's own code, called so that nothing it does ends, hangs or changes the run without a word.

Reward functions run in the trainer's process, on its main thread, because they use its GPU, its signals and its event
loop. ``user_code`` makes the call and reports its faults, ``watch`` ends it at a deadline and keeps Ctrl-C and exits
from getting lost, ``process_state`` sets back what it changed, and ``coroutines`` awaits it where it is asynchronous.
"""
