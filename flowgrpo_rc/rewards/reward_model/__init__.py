"""A reward model that the run serves itself: ``vllm serve`` in a process of its own, which ends with the run.

``config`` holds the section ``reward.reward_model`` (verl-omni's names), ``server`` starts the process and waits until
it answers, ``keeper`` is the program that ends it, whatever becomes of the run, and ``sharing`` tells several processes
of a run on one machine where the one server is.
"""
