"""Rewards of CLIP and its relatives: PickScore, CLIPScore, HPSv2, the aesthetic score and image similarities.

``config`` holds their sections of the configuration, ``loading`` reads networks from a folder or the hub, ``encoders``
turn images and prompts into vectors of length 1, and ``text_image``, ``aesthetic`` and ``similarity`` make scores of
these. ``openclip`` renames the weights of HPSv2. Importing this package, or ``config``, loads no torch.
"""
