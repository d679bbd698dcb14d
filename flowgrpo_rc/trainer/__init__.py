"""The training run: configuration, loop, validation, checkpoints, and what people look at.

Floor 7: may import every floor but the command line's. Names load on first use; the configuration needs no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.run_folder import RunFolder as RunFolder
    from flowgrpo_rc.trainer.checkpoint import CheckpointError as CheckpointError
    from flowgrpo_rc.trainer.checkpoint import CheckpointStore as CheckpointStore
    from flowgrpo_rc.trainer.config import FlowGRPOConfig as FlowGRPOConfig
    from flowgrpo_rc.trainer.logging import NonFiniteMetricError as NonFiniteMetricError
    from flowgrpo_rc.trainer.policy import Drawn as Drawn
    from flowgrpo_rc.trainer.policy import ImagePolicy as ImagePolicy
    from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer as FlowGRPOTrainer

__getattr__, __dir__ = lazy_names(__name__)
