"""Options as users write them: configuration, presets, dialects, quoting, and an explanation. Imports no torch."""
