"""Whether the reference images of a run's prompts are what its model takes; told before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.digests import short_digest
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.rollout.config import PipelineConfig

NAMED = 5
"""How many rows a message names at most."""


def check_numbers(pipeline_class: str, records: Sequence[PromptRecord]) -> None:
    """Every prompt has as many reference images as pipelines of this class take.

    Raises:
        ValueError: some have more or fewer; names their rows.
    """
    fewest, most = FAMILIES[pipeline_class].images
    wrong = [record for record in records if not fewest <= len(record.images) <= most]
    if not wrong:
        return
    rows = _rows([record.source for record in wrong])
    if most == 0:
        raise ValueError(
            f"{rows}: a {pipeline_class} takes no reference images; leave out the column 'images', or give it another "
            "name if rewards alone read it"
        )
    takes = f"takes {most}" if fewest == most else f"takes {fewest} to {most}"
    raise ValueError(
        f"{rows}: {_counted(len(wrong[0].images))} in the column 'images'; a {pipeline_class} {takes}; give each "
        "prompt as many"
    )


def check_grids(
    model: DiffusionModel, records: Sequence[PromptRecord], pipeline: PipelineConfig, section: str = "pipeline"
) -> None:
    """The reference images of all prompts make the same grids of tokens, so that any of them can be in one batch.

    Args:
        section: of ``actor_rollout_ref.rollout``, which gives ``pipeline``.

    Raises:
        ValueError: they do not, or an image cannot be scaled to the area that is asked for; names the rows.
    """
    if not model.takes_images:
        return
    area = pipeline.reference_area
    sources: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for record in records:
        grids = tuple(model.reference_grid(image, area) for image in record.images)
        sources.setdefault(grids, []).append(record.source)
    if len(sources) < 2:
        return
    most = max(sources, key=lambda grids: len(sources[grids]))
    others = {grids: rows for grids, rows in sources.items() if grids != most}
    first = next(iter(others))
    raise ValueError(
        f"{_rows([row for rows in others.values() for row in rows])}: the reference images make {_in_words(first)}, "
        f"those of the other prompts {_in_words(most)} (actor_rollout_ref.rollout.{section}.reference_area="
        f"{area or 'null'}); crop or pad them to the same aspect ratio and give every prompt as many"
    )


def references_digest(records: Sequence[PromptRecord]) -> str:
    """What tells the references of these prompts from others; empty where there are none."""
    if not any(record.images for record in records):
        return ""
    said = [" ".join(image.digest for image in record.images) for record in records]
    return short_digest("\n".join(said).encode())


def _rows(sources: Sequence[str]) -> str:
    named = ", ".join(sources[:NAMED])
    return named if len(sources) <= NAMED else f"{named} and {len(sources) - NAMED} more rows"


def _counted(count: int) -> str:
    return f"{count or 'no'} reference image{'' if count == 1 else 's'}"


def _in_words(grids: tuple[tuple[int, int], ...]) -> str:
    """Rows x columns of each image."""
    return ", ".join(f"{rows} x {columns} tokens" for rows, columns in grids) or "no tokens"
