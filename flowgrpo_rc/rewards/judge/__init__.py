"""Reward ``judge``: a vision language model behind a server says what an image is worth.

``config`` holds the section ``reward.judge``, ``questions`` the ready questions, ``chat`` what is sent to a server that
speaks OpenAI's protocol and what comes back, ``parsers`` how an answer becomes a score, and ``reward`` the whole.
"""
