"""Prompts with reference images of noise."""

import io


def pictures(sizes, count):
    """``count`` prompts' images ``(width, height)``, all different."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    return [
        [Image.fromarray(generator.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes] for _ in range(count)
    ]


def as_reference(image, source="here"):
    """A PIL image as a prompt's reference, in memory."""
    from flowgrpo_rc.prompt import ReferenceImage, content_digest

    file = io.BytesIO()
    image.save(file, format="PNG")
    return ReferenceImage(content_digest(file.getvalue()), *image.size, source, content=file.getvalue())


def asked(sizes, texts, area=None):
    """Texts, each with images of these sizes, which are scaled to ``area`` pixels."""
    from flowgrpo_rc.prompt import Prompt

    rows = zip(texts, pictures(sizes, len(texts)), strict=True)
    return [Prompt(text, tuple(map(as_reference, images)), area if images else None) for text, images in rows]
