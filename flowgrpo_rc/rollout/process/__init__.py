"""Engines in processes of their own on this machine.

``parent.py`` is the trainer's hold on one, ``child.py`` the loop that such a process runs, ``protocol.py`` what they
say to each other; all engines share them. ``handle.py`` and ``host_server.py`` are the two sides for an ``EngineHost``.
"""
