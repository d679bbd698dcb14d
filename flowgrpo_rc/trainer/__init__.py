"""The training run: configuration, loop, validation, checkpoints, and what people look at.

Floor 7: may import every floor but the command line's. Names load on first use; the configuration needs no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.run_folder import RunFolder
    from flowgrpo_rc.trainer.checkpoint import CheckpointError, CheckpointStore
    from flowgrpo_rc.trainer.config import FlowGRPOConfig
    from flowgrpo_rc.trainer.logging import NonFiniteMetricError
    from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "FlowGRPOConfig",
    "FlowGRPOTrainer",
    "NonFiniteMetricError",
    "RunFolder",
]

_HOMES = {"CheckpointError": "checkpoint", "CheckpointStore": "checkpoint", "FlowGRPOConfig": "config"}
_HOMES |= {"NonFiniteMetricError": "logging", "FlowGRPOTrainer": "trainer"}
_FULL_HOMES = {name: f"{__name__}.{module}" for name, module in _HOMES.items()}
__getattr__, __dir__ = lazy_names(__name__, {**_FULL_HOMES, "RunFolder": "flowgrpo_rc.run_folder"})
