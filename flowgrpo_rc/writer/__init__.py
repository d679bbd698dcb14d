"""The prompt writer: a language model that rewrites requests into prompts, and learns from the images drawn for them.

Floor 4: imports ``correction/``, ``loss/``, ``batch``, ``models/lora``, the actor's optimizer, and of ``rollout/`` the
digest of an adapter and engines in processes. Names load on first use; the configuration classes need no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.writer.actor import WriterActor as WriterActor
    from flowgrpo_rc.writer.config import PromptWriterConfig as PromptWriterConfig
    from flowgrpo_rc.writer.engine import WriterEngine as WriterEngine
    from flowgrpo_rc.writer.engine import Written as Written
    from flowgrpo_rc.writer.language import LanguageModel as LanguageModel
    from flowgrpo_rc.writer.process import WriterProcesses as WriterProcesses

__getattr__, __dir__ = lazy_names(__name__)
