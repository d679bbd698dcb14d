"""Rollouts in vllm-omni's own engine, in a process of its own.

``engine.py`` runs in the trainer and imports no vllm; ``server.py`` runs in the other process.
``plugin.py`` and ``platform.py`` let vllm-omni run on a machine without an accelerator.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.rollout.vllm_omni.engine import VllmOmniEngine as VllmOmniEngine

__getattr__, __dir__ = lazy_names(__name__)
