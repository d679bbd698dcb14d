"""Rewards that another process computes, on this machine or another.

A scorer whose packages do not fit beside the trainer's runs in an environment of its own. ``server`` serves any reward
function there, and needs numpy, pillow, uvicorn and starlette alone. ``client`` is the reward of a training run that
uses such a server, or one of flow_grpo's or verl-omni's. Both use the ``protocols`` and ``pickles``.
"""
