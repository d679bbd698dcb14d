"""A check of a reward with the weights or the server that it has on this machine; ``flowgrpo-rc check-reward``.

``pictures`` draws images whose right prompts are known, ``expectations`` has the right behaviour of each built-in
reward, and ``findings`` scores the pictures and compares.
"""
