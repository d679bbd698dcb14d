"""Scores of models side by side: hand-worked differences, intervals that hold what they claim, and what is drawn."""

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo_rc.evaluation.comparison import (
    Row,
    Scored,
    beyond,
    build_page,
    by_prompt,
    compare,
    content,
    draw_grid,
    legend,
    padded_state,
    table,
)
from flowgrpo_rc.models import Conditioning, ModelConfig
from flowgrpo_rc.models.lora import activate, adapter_state, attach_lora, load_adapter_state
from flowgrpo_rc.models.prompts import pad


def scored(name, values, score="mean", images=(), rewards=()):
    return Scored(name, {score: float(np.mean(values))}, {score: list(values)}, list(images), list(rewards))


def test_a_prompt_counts_with_the_mean_of_its_images():
    """Image ``k`` of prompt ``i`` has the number ``2 k + i``."""
    scores = [{"mean": value, "ocr": -value} for value in (1.0, 10.0, 2.0, 30.0, 6.0, 20.0)]
    assert by_prompt(scores, 2) == {"mean": [3.0, 20.0], "ocr": [-3.0, -20.0]}


BASE = scored("base", [0.1, 0.2, 0.3])
ROWS = compare(
    [BASE, scored("first", [0.3, 0.2, 0.7]), scored("second", [0.0, 0.1, 0.1999]), scored("same", BASE.prompts["mean"])]
)


def test_differences_are_paired_and_their_interval_is_students():
    """Differences 0.2, 0, 0.4: mean 0.2, deviation 0.2, and t of 2 degrees is 4.30265; 4.30265 * 0.2 / sqrt(3)."""
    base, first, second, same = ROWS
    assert (base.difference, base.interval, base.verdict) == (None, None, "")
    assert (first.mean, first.difference) == pytest.approx((0.4, 0.2))
    assert first.interval == pytest.approx((0.2 - 0.496828, 0.2 + 0.496828), abs=1e-5)
    assert (first.verdict, second.verdict, same.verdict) == ("", "worse", "")
    assert second.interval[1] < 0
    assert (same.difference, same.interval) == (0.0, (0.0, 0.0))


def test_the_table_as_text():
    assert table(ROWS).splitlines() == [
        "score  model     mean  difference       95 % interval",
        "mean   base    0.2000",
        "       first   0.4000     +0.2000  -0.2968 to +0.6968",
        "       second  0.1000     -0.1000  -0.1002 to -0.0999  worse",
        "       same    0.2000     +0.0000  +0.0000 to +0.0000",
    ]


def test_the_interval_holds_the_difference_as_often_as_it_claims():
    """Normal differences around 0.3; the base's own spread is large, and pairing takes it out."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 50, (4000, 6))
    apart = rng.normal(0.3, 1, (4000, 6))
    found = [compare([scored("base", one), scored("lora", one + d)])[1] for one, d in zip(base, apart, strict=True)]
    held = np.mean([row.interval[0] <= 0.3 <= row.interval[1] for row in found])
    above = np.mean([row.interval[0] > 0.3 for row in found])
    assert held == pytest.approx(0.95, abs=0.012)
    assert above == pytest.approx(0.025, abs=0.008)


def test_one_prompt_has_no_interval():
    row = compare([scored("base", [0.5]), scored("lora", [0.25])])[1]
    assert (row.difference, row.interval, row.verdict) == (-0.25, None, "")
    assert "One prompt gives no interval" in legend(1, 4)
    assert "Student's t" in legend(2, 4)


def test_a_tolerance_bounds_the_mean_difference_from_below():
    rows = [Row("ocr", "base", 0.5), Row("ocr", "a", 0.375, -0.125, (-0.2, 0.1)), Row("mean", "a", 0.0, -9.0)]
    assert beyond(rows, {"ocr": 0.125}) == beyond(rows, {}) == []
    assert beyond(rows, {"ocr": 0.12}) == ["a is worse than the base by 0.125 in ocr; --tolerance is 0.12"]
    assert len(beyond(rows, {"ocr": 0.0, "mean": 8.9})) == 2
    assert beyond([Row("ocr", "a", 0.6, 0.1)], {"ocr": 0.0}) == []


def test_of_a_penalty_less_is_better():
    models = [scored("base", [0.5, 0.7, 0.6], "ocr"), scored("lora", [0.75, 0.94, 0.86], "ocr")]
    (more, less) = (compare(pair, ["ocr"])[1] for pair in (models, models[::-1]))
    assert (more.verdict, less.verdict) == ("worse", "better")
    assert beyond([more], {"ocr": 0.2}) == ["lora is worse than the base by 0.25 in ocr; --tolerance is 0.2"]
    assert beyond([more], {"ocr": 0.3}) == beyond([less], {"ocr": 0.0}) == []


def test_a_lower_rank_and_fewer_layers_change_nothing_but_zeros(tiny_model):
    """The transformer's answer with a LoRA of rank 3 on a few layers, plainly loaded and padded to rank 5 on all."""
    net = tiny_model.transformer
    cond = Conditioning(pad([tiny_model.blank_prompt()]), None, 1.0, None, 32, 32)
    latents = torch.randn(1, *tiny_model.latent_shape(32, 32), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(0)
    updates = {}
    answers = []
    for name, rank, targets in (("plain", 3, ["transformer_blocks.0.attn.to_q", "to_v"]), ("wide", 5, "all-linear")):
        config = ModelConfig(lora_rank=rank, lora_alpha=rank, target_modules=targets)
        attach_lora(net, tiny_model, config, dtype=torch.float32, adapter=name)
        activate(net, name)
        own = adapter_state(net, name)
        if not updates:
            for key, tensor in own.items():
                layer = key.partition(".lora_")[0]
                updates[layer] = (*updates.get(layer, ()), 0.1 * torch.randn(tensor.shape, generator=generator))
        assert (len(own) > 2 * len(updates)) == (name == "wide")
        for given in (updates, {}):
            load_adapter_state(net, padded_state(given, own), name)
            with torch.no_grad():
                answers.append(tiny_model.velocity(net, latents, torch.full((1,), 500.0), cond))
    plain, base, padded, padded_base = answers
    assert torch.equal(base, padded_base)
    assert (plain - base).abs().max() > 1e-2
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)


def test_the_result_has_every_value_of_every_prompt():
    second = {"ocr": [1.0, 0.0], "mean": [0.5, 0.0]}
    models = [Scored("base", {}, {"ocr": [0.0, 1.0], "mean": [0.0, 0.5]}, [], []), Scored("x", {}, second, [], [])]
    found = content(models, [Row("ocr", "base", 0.5)], ["one", "two"], {"note": 1})
    assert found["note"] == 1
    assert found["table"] == [{"score": "ocr", "model": "base", "mean": 0.5, "difference": None, "interval": None}]
    assert found["prompts"][1] == {
        "prompt": "two",
        "scores": {"base": {"ocr": 1.0, "mean": 0.5}, "x": {"ocr": 0.0, "mean": 0.0}},
    }


def test_the_grid_has_a_column_for_each_model_and_the_page_escapes(tmp_path):
    colours = {"base": (200, 10, 10), "lora <b>": (10, 200, 10)}
    models = [
        scored(name, [0.5, 0.25], images=[np.full((32, 64, 3), colour, np.uint8)] * 2, rewards=[0.5, 0.25])
        for name, colour in colours.items()
    ]
    references = [Image.new("RGB", (8, 8), (10, 10, 200)), None]
    prompts = ["a prompt of many words " * 20, "Ein <i>kurzer</i>", "not shown"]
    for given, columns in ((references, 3), ([None, None], 2)):
        draw_grid(tmp_path / "grid.png", prompts, models, given)
        picture = Image.open(tmp_path / "grid.png")
        # A cell is 128 x 64 behind a column of 200 for the prompts; gaps of 12, lines of 17.
        assert picture.size == (2 * 12 + 200 + columns * 140, 17 + 24 + 2 * (64 + 17 + 12))
        across = [picture.getpixel((224 + i * 140 + 64, 41 + 32)) for i in range(columns)]
        assert across == [(10, 10, 200)][: columns - 2] + list(colours.values())
    page = build_page(compare(models), "<u>", {"Model": "<script>"}, tmp_path / "grid.png")
    assert "lora &lt;b&gt;" in page
    assert not {"<b>", "<u>", "<script>"} & set(page.replace("<b", "\n<b").split())
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page
