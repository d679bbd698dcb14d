"""Prompt sets: reading them, drawing batches from them, preparing known ones."""

from flowgrpo_rc.data.config import DataConfig, file_list
from flowgrpo_rc.data.prepare import PreparedFile, prepare_ocr
from flowgrpo_rc.data.prompts import PromptRecord, load_prompts
from flowgrpo_rc.data.sampler import PromptSampler

__all__ = [
    "DataConfig",
    "PreparedFile",
    "PromptRecord",
    "PromptSampler",
    "file_list",
    "load_prompts",
    "prepare_ocr",
]
