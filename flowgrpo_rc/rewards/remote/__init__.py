"""Remote: rewards scored by another process, on this machine or another.

A scorer whose packages do not fit beside the trainer's runs in an environment of its own. ``server`` answers for any
reward function there, and needs numpy, pillow and uvicorn alone; ``client`` asks it, or a server of flow_grpo or
verl-omni, from the training run. Both speak the ``protocols``; ``images`` and ``pickles`` are parts of those.
"""
