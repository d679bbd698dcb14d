"""Theory of the off-policy gap, as far as the probe measures it; training imports nothing from here.

``log_ratio_distribution`` has the distribution of a step's log ratio, ``drift`` the gradient that the gap alone
produces. The theory is explained in ``docs/theory_of_the_gap.md``.
"""
