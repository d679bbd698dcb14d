"""Prompt sets: reading them, drawing batches from them, preparing known ones."""

from flowgrpo_rc.data.config import DataConfig as DataConfig
from flowgrpo_rc.data.config import file_list as file_list
from flowgrpo_rc.data.prepare import PreparedFile as PreparedFile
from flowgrpo_rc.data.prepare import prepare_ocr as prepare_ocr
from flowgrpo_rc.data.prompt_sets import PROMPT_SETS as PROMPT_SETS
from flowgrpo_rc.data.prompt_sets import prepare_prompts as prepare_prompts
from flowgrpo_rc.data.prompts import PromptRecord as PromptRecord
from flowgrpo_rc.data.prompts import load_prompts as load_prompts
from flowgrpo_rc.data.sampler import PromptSampler as PromptSampler
