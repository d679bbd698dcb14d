"""A check of a reward with the weights or the server that it has on this machine; ``flowgrpo-rc check-reward``.

``pictures`` draws images whose right prompts are known; ``findings`` scores them and compares the scores with the right
behaviour of each built-in reward.
"""
