"""Reward model: a server of a model that rewards ask, started and ended by the run itself.

``config`` holds the section ``reward.reward_model``, ``server`` starts and ends ``vllm serve``, and ``sharing`` passes
its address to the other processes of the run on a machine.
"""
