"""GenEval for ``flowgrpo-rc serve-reward``, started in a clone of yifan123/reward-server; see ../README.md."""

from PIL import Image
from reward_server.gen_eval import load_geneval

compute_geneval = load_geneval()


def geneval(images, prompts, metadata):
    """The share of its requirements that each image meets; beside it whether it meets all, over all and by tag."""
    rows = [{"prompt": prompt, **row} for prompt, row in zip(prompts, metadata, strict=True)]
    pictures = [Image.fromarray(image) for image in images]
    scores, _, strict, _, strict_by_tag = compute_geneval(pictures, rows, only_strict=True)
    by_tag = {f"{tag}_strict_accuracy": values for tag, values in strict_by_tag.items()}
    return scores, {"strict_accuracy": strict, **by_tag}
