"""What the user writes: the configuration, its presets and dialects, quoting, and an explanation of it. No torch."""
