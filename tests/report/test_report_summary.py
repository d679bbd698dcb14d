"""``summary.png``, ``plots/`` and the closing table: drawn from the same panels as the page."""

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rows import folder, rows, settings

from flowgrpo_rc.report import build_page, check_health, read_run
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.panels import logged_panels
from flowgrpo_rc.report.summary import closing_table, key_numbers, stack_pictures, write_plots

BYPASS = "algorithm__rollout_correction__bypass_mode"
DPPO = {"actor_rollout_ref__actor__diffusion_loss__loss_mode": "flow_dppo"}


def numbers(made, config=None):
    """``{name: (first, last)}``."""
    return {n.name: (n.first, n.last) for n in key_numbers(History(made, config or settings()))}


def table_of(history, capsys):
    Console(width=100).print(closing_table(history, title="Run x"))
    return capsys.readouterr().out


def test_first_and_last_are_means_of_up_to_ten_steps_and_of_one_validation():
    made = rows(30, reward__mean=lambda step: step / 10, **{"val__reward/mean": lambda step: step})
    found = numbers(made)
    assert found["training reward"] == pytest.approx((0.55, 2.55))
    assert found["held-out reward"] == (1, 30)
    assert numbers(made[:7])["training reward"] == pytest.approx((0.15, 0.65))
    assert numbers(made[:1])["training reward"] == pytest.approx((0.1, 0.1))


def test_what_is_no_longer_logged_is_no_key_number():
    made = rows(40)
    for row in made[20:]:
        del row["actor/ppo_kl"]
    assert "KL from the old policy" in numbers(made[:20])
    assert "KL from the old policy" not in numbers(made)


def test_the_gap_is_the_one_that_training_meets():
    """In bypass mode the one before an update; else the one that is corrected."""
    made = rows(
        12, **{"actor__log_ratio_abs_mean_first": 3e-4, "actor__ratio_deviation_first": 2e-3}
    )  # the corrected ones are 2e-4 and 1e-3
    bypass, decoupled = (numbers(made, settings(**{BYPASS: mode})) for mode in (True, False))
    assert (bypass["gap"], bypass["largest gap"]) == ((3e-4, 3e-4), (2e-3, 2e-3))
    assert (decoupled["gap"], decoupled["largest gap"]) == ((2e-4, 2e-4), (1e-3, 1e-3))


def test_the_table_and_the_page_show_the_same_numbers(tmp_path, capsys):
    run = read_run(folder(tmp_path / "run", rows(30, actor__pg_clipfrac_first=lambda step: step / 100)))
    shown = table_of(run.history, capsys)
    page = build_page(run, check_health(run.rows, run.config))
    assert "Run x" in shown
    assert "clipped before learning" in shown
    for text in ("5.5%", "25.5%"):
        assert text in shown
    assert "<dt>clipped before learning</dt><dd>5.5% → 25.5%</dd>" in page
    for number in key_numbers(run.history):
        assert number.name in shown
        assert f"<dt>{number.name}</dt>" in page


@pytest.mark.parametrize("count", [1, 30])
def test_plots_are_pictures_with_something_in_them(tmp_path, count):
    history = History(rows(count), settings())
    written = write_plots(history, tmp_path)
    names = ["reward.png", "clip_fraction.png", "log_prob_gap.png", "rejected_fraction.png", "overview.png"]
    assert [path.name for path in written] == names
    for path in written:
        pixels = np.asarray(Image.open(path).convert("L"))
        assert pixels.min() < 100
        assert pixels.max() == 255
    one, all_of_them = (Image.open(tmp_path / name).size for name in ("reward.png", "overview.png"))
    assert all_of_them == (2 * one[0], 2 * one[1])
    assert not list(tmp_path.glob("*.writing"))


def test_what_the_objective_does_not_limit_is_not_drawn(tmp_path):
    history = History(rows(5), settings(**DPPO))
    assert "clip_fraction.png" not in [path.name for path in write_plots(history, tmp_path)]
    assert "Clipped samples" not in [panel.title for panel in logged_panels(history)]


def test_pictures_are_stacked_in_the_middle(tmp_path):
    for name, width, colour in (("wide", 40, "red"), ("narrow", 20, "blue")):
        Image.new("RGB", (width, 10), colour).save(tmp_path / f"{name}.png")
    stack_pictures(tmp_path / "both.png", [tmp_path / "wide.png", tmp_path / "narrow.png"])
    both = Image.open(tmp_path / "both.png")
    assert both.size == (40, 20)
    colours = [both.getpixel((x, y)) for x, y in ((0, 0), (0, 15), (10, 15), (29, 15), (30, 15))]
    red, white, blue = (255, 0, 0), (255, 255, 255), (0, 0, 255)
    assert colours == [red, white, blue, blue, white]


def test_the_closing_table_names_its_means(capsys):
    said = table_of(History(rows(30, **{"val__reward/mean": lambda step: step}), settings()), capsys)
    assert "training reward, mean of 10 steps" in said
    assert "held-out reward " in said
