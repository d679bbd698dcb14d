"""The meaning of "now", the checks that the settings leave, and rows that are not as they should be."""

import random

import pytest
from rows import COLLAPSING, folder, found, rows, settings

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.report import check_health
from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.health import CHECKS
from flowgrpo_rc.report.history import WINDOW, History
from flowgrpo_rc.report.panels import logged_panels

LOSS = "actor_rollout_ref__actor__diffusion_loss"
AUTO = {f"{LOSS}__clip_ratio": "auto", f"{LOSS}__auto_clip_min": 1e-4}
BYPASS = "algorithm__rollout_correction__bypass_mode"


def without(made, *names, after=0):
    """Rows without metrics from a step on."""
    return [{n: v for n, v in row.items() if n not in names or row["step"] <= after} for row in made]


def test_what_stopped_being_logged_is_not_judged():
    """As after a resume with other settings."""
    made = rows(40, **{"rollout_corr__rollout_rs_masked_fraction": 0.9})
    assert found(made, settings(), "rejected").level == "problem"
    stopped = without(made, "rollout_corr/rollout_rs_masked_fraction", after=30)
    assert found(stopped, settings(), "rejected").metric == "actor/kept_fraction"
    assert found(without(stopped, "actor/kept_fraction"), settings(), "rejected") is None
    assert found(without(made, "rollout_corr/rollout_rs_masked_fraction", after=31), settings(), "rejected") is not None


def test_a_metric_logged_now_and_then_is_judged():
    made = [row if row["step"] % 25 == 0 else without([row], "actor/kept_fraction")[0] for row in rows(110)]
    finding = found(made, settings(), "rejected")
    assert (finding.metric, finding.steps) == ("actor/kept_fraction", (75, 100))


@pytest.mark.parametrize("bad", ["plain", "actor"])
def test_the_guard_switches_names_and_both_count(bad):
    """Decoupled mode logs ``rollout_corr/x``, bypass mode ``actor/rollout_corr/x``: the last rows are now."""
    name = "rollout_corr/logprob_abs_diff_mean"
    made = []
    for row in without(rows(60), name):
        plain = (row["step"] <= 30) == (bad == "actor")
        made.append({**row, (name if plain else f"actor/{name}"): 0.2 if row["step"] > 30 else 1e-4})
    finding = found(made, settings(), "gap_mean")
    assert (finding.level, finding.steps) == ("problem", (51, 60))
    assert finding.metric == (name if bad == "plain" else f"actor/{name}")
    assert len(History(made).series(name)) == 60


def test_the_window_is_in_training_steps():
    made = rows(30, actor__pg_clipfrac_first=lambda step: 0.9 if step <= 20 else 0.0)
    validated = [*made, {"step": 31, "val/reward/mean": 0.5, "timing_s/validate": 1.0}]
    assert found(validated, settings(), "clip_first").steps == (31 - WINDOW, 30)


@pytest.mark.parametrize("count", [4, 11, 51])
def test_a_plateau_of_held_out_rewards_is_no_fall(count):
    """Evaluations that scatter by .1 of a batch's standard deviation, around one value."""
    draw, problems, runs = random.Random(count), 0, 1000
    for _ in range(runs):
        made = [{"step": i, "val/reward/mean": draw.gauss(0.7, 0.035), "reward/std": 0.35} for i in range(count)]
        problems += found(made, settings(), "held_out_fall").level == "problem"
    assert problems < 0.02 * runs


CLIPPING = {"clip_first", "clip_fraction", "clip_inert"}
AT_THE_ENGINE = {"gap_vs_clip", "gap_timestep", "staleness"}


MODES = {"flow_grpo": CLIPPING | AT_THE_ENGINE | {"policy_shift"}, "grpo_guard": CLIPPING, "flow_dppo": set()}


@pytest.mark.parametrize(("mode", "checked"), MODES.items())
def test_loss_modes(mode, checked):
    names = {f.check for f in check_health(rows(), settings(**{f"{LOSS}__loss_mode": mode}))}
    assert names & (CLIPPING | AT_THE_ENGINE | {"policy_shift"}) == checked


def test_growth_without_the_probe_follows_the_mode():
    def grow(step):
        return 1e-4 if step <= 15 else 3e-4

    for name, bypass in (("actor/log_ratio_abs_mean_first", True), ("rollout_corr/logprob_abs_diff_mean", False)):
        made = without(rows(30, **{name.replace("/", "__"): grow}), "rollout_sync/engine_gap_abs_mean")
        finding = found(made, settings(**{BYPASS: bypass}), "gap_growth")
        assert (finding.level, finding.metric) == ("watch", name)
        assert found(made, settings(**{BYPASS: not bypass}), "gap_growth").level == "ok"
        lagging = settings(**{BYPASS: bypass, "actor_rollout_ref__rollout__adapter_lag": 4})
        assert found(made, lagging, "gap_growth") is None
        assert found(rows(30), lagging, "gap_growth").level == "ok"


def test_the_band_after_a_fall_back_is_the_lowest():
    made = rows(actor__clip_ratio_auto_mean=5e-3)
    assert History(made, settings(**AUTO)).clip_width == pytest.approx(5e-3)
    fled = rows(actor__clip_ratio_auto_mean=5e-3, guard__fallback=1.0)
    assert History(fled, settings(**AUTO)).clip_width == 1e-4


def panel(title, history):
    """The panel of a run; None where the run logged nothing of it."""
    return next((p for p in logged_panels(history) if p.title == title), None)


@pytest.mark.parametrize("title", ["Gap between engine and actor", "Gap by timestep"])
def test_the_band_is_drawn_where_the_gap_fills_it(title):
    from matplotlib.figure import Figure

    for bypass in (True, False):
        history = History(rows(), settings(**{BYPASS: bypass}))
        axes = Figure().subplots()
        panel(title, history).draw(history, axes)
        assert any("clip band" in label for label in axes.get_legend_handles_labels()[1]) == bypass
        assert ("clip band 0.001" in panel("Gap between engine and actor", history).words(history)) == bypass
    assert panel("Gap between engine and actor", History([{"reward/mean": 1.0}], settings())) is None


def drawn(title, made, *config):
    """The panel's sentence, and ``{label: y values}`` of its lines."""
    from matplotlib.figure import Figure

    history, axes = History(made, *(config or [settings()])), Figure().subplots()
    found = panel(title, history)
    found.draw(history, axes)
    return found.words(history), {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


@pytest.mark.parametrize(
    ("title", "values", "reference"),
    [
        ("KL of rollout from training", {"kl": -2e-4, "k3_kl": 3e-8}, [0, 0]),
        ("Effective sample size", {"rollout_is_eff_sample_size": 0.95}, [0.3, 0.3]),
        ("Samples that teach nothing", {"rollout_is_veto_fraction": 0.02}, [0.1, 0.1]),
    ],
)
@pytest.mark.parametrize("prefix", ["", "actor/"])
def test_divergences_are_drawn_against_their_reference(title, values, reference, prefix):
    says, lines = drawn(title, [{f"{prefix}rollout_corr/{name}": v for name, v in values.items()}] * 5)
    for value in values.values():
        assert [value] * 5 in lines.values()
        assert number(value) in says
    assert reference in lines.values()
    assert panel(title, History([{"reward/mean": 1.0}])) is None


def test_by_timestep_sizes_are_drawn_and_neither_nats_nor_a_signed_mean():
    metrics = {"engine_gap_abs_mean": 2e-4, "engine_gap_mean": -1e-4, "engine_gap_nats": 0.1, "engine_kl_nats": 0.02}
    made = [{f"rollout_sync/{name}/ts_{t}": v * t for name, v in metrics.items() for t in (1, 2)}] * 12
    says, lines = drawn("Gap by timestep", made)
    assert {name: values for name, values in lines.items() if "band" not in name} == {
        "engine_gap_abs_mean": pytest.approx([4e-4, 2e-4])
    }
    assert says == "rollout_sync/engine_gap_abs_mean over the last 10 steps: 4e-4 at 2, 2e-4 at 1"


@pytest.mark.parametrize("value", ["NaN", "-Infinity", None, float("nan")])
def test_not_finite_in_any_spelling(value):
    made = rows(5)
    made[2]["reward/mean"] = value
    finding = found(made, settings(), "log")
    assert (finding.level, finding.metric) == ("problem", "reward/mean")
    assert found([{**row, "note": "inf", "flag": None} for row in rows(5)], settings(), "log").level == "ok"


def test_an_unfinished_run_is_healthy_so_far(tmp_path, capsys):
    root = folder(tmp_path / "run", rows(12), settings(trainer__total_training_steps=600))
    assert main(["report", str(root)]) == 0
    judged = check_health(rows(12), settings(trainer__total_training_steps=600))
    counts = f"{len(judged)} checks, {len(CHECKS) - len(judged)} had nothing to measure yet"
    assert f"Healthy so far, step 12 of 600: {counts}\n" in capsys.readouterr().out
    # Less than a window and its standard errors need: the same checks, and no verdict.
    early = folder(tmp_path / "early", rows(11), settings(trainer__total_training_steps=11))
    assert main(["report", str(early)]) == 0
    judged = check_health(rows(11), settings(trainer__total_training_steps=11))
    said = capsys.readouterr().out
    assert said.startswith(f"Too early to judge, step 11 of 11: {len(judged)} checks healthy so far, ")
    page = (early / "report.html").read_text()
    assert "<title>early: too early to judge</title>" in page
    assert f"{len(judged)} checks with their limits, {len(CHECKS) - len(judged)} with nothing to measure" in page
    assert 'class="verdict ok"' not in page
    # A problem is one at any step.
    sick = folder(tmp_path / "sick", rows(2, **COLLAPSING))
    assert main(["report", str(sick)]) == 3
    assert capsys.readouterr().out.startswith("Problem: ")
    first = folder(tmp_path / "first", [{"step": 0, "val/reward/mean": 0.5}])
    assert main(["report", str(first)]) == 0
    assert "Nothing to judge yet" in capsys.readouterr().out


def test_a_reward_s_parts_are_drawn_and_named():
    both = {"reward/ocr": 0.25, "reward/jpeg_compressibility": -3.0, "reward/zero_std_fraction": 0.1}
    for given, names in ((both, ["ocr", "jpeg_compressibility"]), ({"reward/ocr": 0.25}, [])):
        says, lines = drawn("Reward", rows(20, **given))
        assert [label for label in lines if label in ("ocr", "jpeg_compressibility", "zero_std_fraction")] == names
        assert [name for name in ("ocr from 0.25", "jpeg_compressibility from -3") if name in says] == [
            f"{name} from {text}" for name, text in zip(names, ("0.25", "-3"), strict=False)
        ]


def test_scorers_that_only_look_have_a_panel():
    made = rows(20, **{"reward/ocr": 0.25, "val__reward/ocr": lambda step: 0.5, "val__reward/jpeg": lambda step: -3.0})
    title = "Scorers that only look"
    says, lines = drawn(title, made)
    assert list(lines) == ["jpeg"]
    assert "jpeg from -3" in says
    assert panel(title, History(rows(20, **{"reward/ocr": 0.25, "val__reward/ocr": lambda step: 0.5}))) is None
    assert panel(title, History([{"step": 0, "val/reward/ocr": 0.5}])) is None


@pytest.mark.parametrize("count", [40, 5_000])
def test_a_smoothed_line_ends_in_the_mean_of_its_last_window(count):
    history = History(rows(count, reward__mean=lambda step: float(step)), settings())
    panel = logged_panels(history)[0]
    smooth = next(series for line, series in panel.logged(history) if line.smooth)
    window = max(10, count // 40)
    assert smooth.values[-1] == pytest.approx(count - (window - 1) / 2)
    assert (smooth.values[0], smooth.span) == (1.0, (1, count))
