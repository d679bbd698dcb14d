"""Is a tokenizer whole? Libraries build one without its vocabulary, and every prompt then gives the same tokens."""

from typing import Any

from flowgrpo_rc.models.parts import PipelineFiles

PROBES = ("a", "the cat", "1 2 3")
"""Texts that any vocabulary has tokens for, all different."""


def check_tokenizer(files: PipelineFiles, name: str, tokenizer: Any, encoder: Any) -> None:
    """The loaded tokenizer of a pipeline tells texts apart, with tokens that its text encoder has.

    Args:
        files: the pipeline's, for messages.
        name: the part's.
        tokenizer: loaded by transformers.
        encoder: the text encoder that reads its tokens; None where the pipeline has none.

    Raises:
        UnsupportedModelError: its vocabulary is missing or is that of another model.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise files.damaged(f"{name} is a {type(tokenizer).__name__}, which is no tokenizer")
    unknown = getattr(tokenizer, "unk_token_id", None)
    tokens = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in PROBES]
    if not all(tokens) or len(set(tokens)) < len(PROBES) or any(unknown in row for row in tokens):
        names = sorted({*getattr(tokenizer, "vocab_files_names", {}).values()})
        raise files.damaged(
            f"{name} has a vocabulary of {len(tokenizer)} tokens and cannot tell texts apart; are its files "
            f"there and whole? It reads {', '.join(names)}",
        )
    if encoder is None:
        return
    rows = encoder.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise files.damaged(
            f"{name} has tokens up to {largest}, its text encoder only {rows}; it is that of another model"
        )
