"""Rewards of CLIP and its relatives: PickScore, CLIPScore, HPSv2, the aesthetic score and image similarities.

Importing this package, or ``config``, loads no torch.
"""
