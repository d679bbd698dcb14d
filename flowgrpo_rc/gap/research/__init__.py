"""Theory of the off-policy gap, as far as the probe measures it.

``log_ratio_distribution`` has the distribution of a step's log ratio, ``drift`` the gradient that the gap alone
produces, ``count_sketch`` the compression that makes drifts of single timesteps affordable. The theory is explained in
``docs/theory_of_the_gap.md``. Training imports nothing from here; only the probe does.
"""
