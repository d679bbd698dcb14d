"""Rewards of CLIP and its relatives: PickScore, CLIPScore, HPSv2, the aesthetic score and image similarities.

``config`` holds their sections of the configuration, ``loading`` reads networks from a folder or the hub, ``scorer`` is
the base of all rewards, and ``text_image``, ``aesthetic`` and ``similarity`` are the rewards. The checkpoint of HPSv2
is read by ``hpsv2`` and ``openclip``. Importing this package, or ``config``, loads no torch.
"""
