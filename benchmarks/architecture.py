"""The picture of a training step in the README: its parts, and what passes between them.

python benchmarks/architecture.py                # writes docs/images/architecture.png
"""

from pathlib import Path

PLOT = Path(__file__).resolve().parent.parent / "docs" / "images" / "architecture.png"
BOXES = {
    "prompts": (0.0, 2.0, "Prompts\nencoded once", "data, models"),
    "engine": (2.6, 2.0, "Rollout engine\ndiffusers or vLLM-Omni", "rollout"),
    "rewards": (5.2, 3.0, "Rewards\nOCR, CLIP, judge, server, own", "rewards"),
    "gap": (5.2, 1.0, "Gap\nprobe, guard, calibration", "gap"),
    "correction": (7.9, 1.0, "Rollout correction\nweights, rejection, clip", "correction"),
    "advantages": (7.9, 3.0, "Advantages\nwithin each group", "loss"),
    "actor": (10.5, 2.0, "Actor\nLoRA update", "actor, loss"),
}
"""Name -> centre, text, and folders of the package."""
ARROWS = (
    ("prompts", "engine"),
    ("engine", "rewards"),
    ("engine", "gap"),
    ("rewards", "advantages"),
    ("gap", "correction"),
    ("advantages", "actor"),
    ("correction", "actor"),
)
LABELS = {
    "images": (3.6, 2.75),
    "SDE steps,\nlog-probs": (3.55, 1.2),
    "scores": (6.55, 3.12),
    "log ratios": (6.55, 1.12),
    "new LoRA, and the proof that the engine holds it": (6.5, 0.12),
}
"""Text -> where it stands, without a box."""
WIDTH, HEIGHT = 2.0, 0.9
BLUE = "#08519c"


def main() -> None:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    figure, axes = plt.subplots(figsize=(11, 3.6), layout="constrained")
    for x, y, text, folders in BOXES.values():
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0.05", fc="#eef3f9", ec=BLUE))
        title, rest = text.split("\n")
        axes.text(x, y + 0.17, title, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(x, y - 0.12, rest, ha="center", va="center", fontsize=7)
        axes.text(x, y - 0.34, folders, ha="center", va="center", fontsize=7, family="monospace", color=BLUE)
    line = {"color": "0.35", "linewidth": 1.3}
    for source, target in ARROWS:
        (x0, y0), (x1, y1) = BOXES[source][:2], BOXES[target][:2]
        ends = {"xytext": (x0 + WIDTH / 2 + 0.05, y0), "xy": (x1 - WIDTH / 2 - 0.05, y1)}
        axes.annotate("", **ends, arrowprops={"arrowstyle": "-|>", **line})
    for text, place in LABELS.items():
        axes.text(*place, text, ha="center", va="center", fontsize=7.5)
    (last, bottom), first = BOXES["actor"][:2], BOXES["engine"][0]
    bottom -= HEIGHT / 2 + 0.05
    axes.plot([last, last, first], [bottom, 0, 0], **line)
    axes.annotate("", xytext=(first, 0), xy=(first, bottom), arrowprops={"arrowstyle": "-|>", **line})
    axes.set(xlim=(-1.2, 11.7), ylim=(-0.1, 3.6))
    axes.axis("off")
    figure.savefig(PLOT, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
