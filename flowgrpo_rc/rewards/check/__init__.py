"""Check: whether a reward, with the weights or the server that it has on this machine, scores as it should.

``pictures`` draws images whose right prompts are known, ``expectations`` says what each built-in reward should make of
them, and ``findings`` scores them and compares. ``flowgrpo-rc check-reward`` prints the outcome.
"""
