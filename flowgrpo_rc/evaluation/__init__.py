"""A trained LoRA in the hands of other programs."""
