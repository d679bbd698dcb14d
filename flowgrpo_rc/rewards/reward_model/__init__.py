"""Reward model: a server of a model that rewards ask, started and ended by the run itself."""
