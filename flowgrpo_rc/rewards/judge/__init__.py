"""Reward ``judge``: the score that a vision language model behind a server gives an image.

``config`` holds the section ``reward.judge``, ``parsers`` the ready questions and the scores of answers, and ``reward``
the reward itself.
"""
