"""Reward ``judge``: the score that a vision language model behind a server gives an image.

``config`` holds the section ``reward.judge``, ``questions`` the ready questions, ``wording`` their placeholders,
``chat`` requests and answers of OpenAI's protocol, ``parsers`` the scores of answers, and ``reward`` the reward itself.
"""
