"""Theory of the off-policy gap, as far as the probe measures it (``docs/theory_of_the_gap.md``)."""
