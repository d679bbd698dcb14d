"""Prompts with reference images of noise."""

import hashlib
import io


def pictures(sizes, count):
    """``count`` prompts' images ``(width, height)``, all different."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    return [
        [Image.fromarray(generator.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes] for _ in range(count)
    ]


def asked(sizes, texts, area=None):
    """Texts, each with images of these sizes, which are scaled to ``area`` pixels."""
    from flowgrpo_rc.prompt import Prompt, ReferenceImage

    prompts = []
    for text, images in zip(texts, pictures(sizes, len(texts)), strict=True):
        references = []
        for image in images:
            file = io.BytesIO()
            image.save(file, format="PNG")
            content = file.getvalue()
            digest = hashlib.sha256(content).hexdigest()
            references.append(ReferenceImage(digest, *image.size, "here", content=content))
        prompts.append(Prompt(text, tuple(references), area if references else None))
    return prompts
