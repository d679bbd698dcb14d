"""The command ``flowgrpo-rc probe``: measure the gap before training and judge the configured mode.

Its results are ``probe.json`` and ``probe.png``; the result of another probe is kept under a number.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from flowgrpo_rc.cli.arguments import add_command, add_configuration
from flowgrpo_rc.cli.errors import LOADING, NEGATIVE, TRAINING
from flowgrpo_rc.cli.results import make_folder, write_files
from flowgrpo_rc.gap.intervals import MOST_IMAGES
from flowgrpo_rc.gap.safety import DRIFT_NOT_SAFE, DRIFT_SAFE, VERDICTS, clip_not_safe
from flowgrpo_rc.loss.objectives import OBJECTIVES, Objective

NOT_SHOWN_SAFE = 4
"""Exit code of a probe that cannot show that the configuration is safe."""
MAX_FACTOR = 8
"""Default of ``--max-images``, in multiples of ``--images``."""
RESULT = "probe.json"
PICTURE = "probe.png"
_COLOURS = {"safe": "#2f855a", "not shown safe": "#b7791f", "not safe": "#c53030"}
_LIMIT = {"color": "#c53030", "linewidth": 1}


def add_probe(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "probe",
        "measure the rollout/training gap before training and judge if bypass mode is safe",
        f"Exit code: 0 safe, {NEGATIVE} not safe, {NOT_SHOWN_SAFE} not shown safe, 2 refused, 1 failed.",
    )
    add_configuration(command)
    command.add_argument(
        "--images", type=int, default=16, help="images at every place of the SDE window, to start with (%(default)s)"
    )
    command.add_argument(
        "--max-images",
        type=int,
        help="images to end with at most, if fewer leave open on which side of its limit a share is "
        f"({MAX_FACTOR} times --images); give --images again to stop there",
    )
    command.add_argument("--out", type=Path, default=Path("outputs/probe"), help="folder for probe.json and probe.png")
    command.set_defaults(run=run_command, unfinished="no result was written")


def run_command(arguments: argparse.Namespace) -> int:
    """Measure, write and print; returns the exit code."""
    from flowgrpo_rc.cli.compose import compose_without_run

    with tempfile.TemporaryDirectory() as folder:
        config = compose_without_run(arguments, folder)
        loss = config.actor_rollout_ref.actor.diffusion_loss
        if loss.objective.clean:
            raise ValueError(
                f"actor_rollout_ref.actor.diffusion_loss.loss_mode: got {loss.loss_mode}, which reads no log-probs of "
                "the engine, so that there is no gap to probe; train, or probe with loss_mode=flow_grpo"
            )
        from flowgrpo_rc.models.parts import require_path

        require_path(config.actor_rollout_ref.model.path)
        from flowgrpo_rc.gap.probe import run_probe
        from flowgrpo_rc.trainer import FlowGRPOTrainer

        images, most = _image_counts(arguments)
        make_folder(arguments.out)
        arguments.phase = LOADING
        trainer = FlowGRPOTrainer(config)
        arguments.phase = TRAINING
        try:
            trainer.run.end_rewards()  # a probe scores nothing
            run = trainer.run
            # First: the probe of images takes optimizer steps.
            tokens = None if run.writer is None else run.writer.measure_gap(run.train_prompts, most)
            result = run_probe(trainer.probed_run(), images, most)
            if trainer.accelerator.is_main_process:
                print(report(result))
                if tokens is not None:
                    print(report_of_tokens(tokens, config.algorithm.prompt_writer))
                print("\n".join(write_result(arguments.out, result, tokens)))
            # A launcher ends all processes as soon as one exits with a code other than 0.
            trainer.accelerator.wait_for_everyone()
            trainer.accelerator.end_training()
        finally:
            trainer.run.close_engines()
    writer = config.algorithm.prompt_writer
    # Of the sides that learn.
    verdicts = [] if writer.learns_alone else [result.advice.verdict]
    if tokens is not None and writer.learns != "images":
        verdicts.append(tokens.decisive.verdict)
    worst = max(verdicts, key=VERDICTS.index)
    return {"safe": 0, "not safe": NEGATIVE, "not shown safe": NOT_SHOWN_SAFE}[worst]


def _image_counts(arguments: argparse.Namespace) -> tuple[int, int]:
    """Numbers of images at every place of the window: to start with, and to end with at most."""
    # Checked before the model loads.
    images = arguments.images
    most = min(MAX_FACTOR * images, MOST_IMAGES) if arguments.max_images is None else arguments.max_images
    if not 2 <= images <= MOST_IMAGES:
        raise ValueError(f"--images: got {images}; give 2 to {MOST_IMAGES} images a window place")
    if not images <= most <= MOST_IMAGES:
        raise ValueError(f"--max-images: got {most}; give a number from --images, {images}, to {MOST_IMAGES}")
    return images, most


def report(result: Any) -> str:
    """The table and the verdict as text."""
    setting = result.setting
    advice = result.advice
    objective = OBJECTIVES[setting["loss_mode"]]
    mode = f"bypass, {setting['loss_type']}" if setting["bypass_mode"] else "decoupled"
    quantized = f", {setting['quantization']} weights" if setting["quantization"] else ""
    lines = [
        f"Engine {setting['engine']} in {setting['rollout_dtype']}{quantized}; actor in {setting['actor_dtype']}; "
        f"{setting['sde_type']}, {setting['latent_dimensions']} latent dimensions; {mode}, "
        f"{_limit_words(setting, objective)}; {setting['images']} images",
        "",
        f"{'timestep':>9} {'n':>4} {'mean l':>10} {'mean |l|':>9} {'90 %':>9} {'largest':>9} "
        f"{'nats':>7} {'KL nats':>8} {'clipped':>8} {'interval':>12}",
    ]
    for step in (*result.steps, result.overall):
        name = "all" if step.timestep is None else f"{step.timestep:.1f}"
        ends = f"{step.clipped_interval.low:.0%} to {step.clipped_interval.high:.0%}"
        lines.append(
            f"{name:>9} {step.count:4d} {step.mean:10.1e} {step.abs_mean:9.1e} {step.abs_q90:9.1e} {step.abs_max:9.1e} "
            f"{step.nats:7.3f} {step.kl_nats:8.3f} {step.clipped:8.0%} {ends:>12}"
        )
    legend = (
        f"l = log pi_actor - log pi_engine, same weights; clipped: {objective.beyond} before any learning; interval: "
        "where that share lies with 95 % confidence, images being independent"
    )
    if result.drift is not None:
        legend += "\ndrift: what a step teaches whatever is rewarded, in gradients of one step of the window"
        # More columns of the table, whose head is line 2.
        lines[2] += f" {'drift':>7} {'interval':>16}"
        for row, one in enumerate((*result.drift.timesteps, result.drift), start=3):
            lines[row] += f" {one.value:7.4f} {f'{one.interval.low:.4f} to {one.interval.high:.4f}':>16}"
    lines += [
        "",
        legend,
        f"Verdict: {advice.verdict.upper()} ({advice.because})",
        *(f"  - {reason}" for reason in advice.reasons),
        f"{_recommended(result)}; a rejection band that only outliers leave: rollout_rs=seq_mean_k1 "
        f"rollout_rs_threshold={advice.rejection_band}",
    ]
    if result.saved is not None:
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in result.seconds.items())
        lines.append(
            f"Bypass mode leaves out decoupled mode's scoring pass: {result.saved:.0%} of rollout, score and update "
            f"here (of the first images: {seconds})"
        )
    return "\n".join(lines)


def report_of_tokens(found: Any, config: Any) -> str:
    """The table and the verdict on a prompt writer as text."""
    gap = found.gap
    correction = config.actor.rollout_correction
    ends = gap.clipped_interval
    return "\n".join(
        [
            "",
            f"Prompt writer: engine in {config.engine.dtype}, actor in {config.dtype}; "
            f"{'bypass' if correction.bypass_mode else 'decoupled'}; {gap.images} rewrites, {gap.count} tokens",
            "",
            f"{'mean l':>10} {'mean |l|':>9} {'90 %':>9} {'largest':>9} {'KL nats':>8} {'clipped':>8} {'interval':>12} "
            f"{'rejected':>9} {'ESS of rewrites':>16}",
            f"{gap.mean:10.1e} {gap.abs_mean:9.1e} {gap.abs_q90:9.1e} {gap.abs_max:9.1e} {gap.kl_nats:8.1e} "
            f"{gap.clipped:8.0%} {f'{ends.low:.0%} to {ends.high:.0%}':>12} {gap.rejected:9.0%} "
            f"{found.effective_sample_size:16.3f}",
            "",
            "l = log pi_actor - log pi_engine of a token in nats, same weights; ESS: effective sample size of the "
            "weights of whole rewrites, as a share",
            f"Verdict on tokens: {found.decisive.verdict.upper()} ({found.decisive})",
        ]
    )


def _limit_words(setting: dict[str, Any], objective: Objective) -> str:
    """The objective's limit with its numbers."""
    ends = setting["clip_band"]
    if not objective.clips:
        return f"{objective.limit.edge} {ends[0]:g}"
    low, high = ends
    if setting["clip_ratio"] == "auto":
        return f"clip band auto, 1 +- {low:.2g} to {high:.2g}"
    return "clip band " + (f"1 +- {low:g}" if low == high else f"1 - {low:g} to 1 + {high:g}")


def _recommended(result: Any) -> str:
    """The recommended mode and limit, beside the configured ones where these are safe."""
    setting = result.setting
    advice = result.advice
    words = f"{advice.mode} mode"
    # Compared as ``advise`` has compared them: a limit is recommended wider than the configured one, or as it is.
    same = advice.limit in (None, "auto", min(setting["clip_band"]))
    if advice.limit_key is not None:
        words += f", {advice.limit_key}={advice.limit if advice.limit == 'auto' else format(advice.limit, 'g')}"
        if setting["clip_sides"] and OBJECTIVES[setting["loss_mode"]].clips:
            words += " with clip_ratio_low=null clip_ratio_high=null"
    if not advice.safe:
        return f"Recommended: {words}"
    if (advice.mode == "bypass") != setting["bypass_mode"]:
        return f"No change needed; {words} would do too"
    return f"No change needed: {words}" if same else f"No change needed; more headroom with {words}"


def write_result(root: Path, result: Any, tokens: Any = None) -> list[str]:
    """Write both files, with the gap of a prompt writer's ``tokens``; returns lines to print. A different earlier
    result is kept under a free number.

    Raises:
        OSError: the disk is full, or the folder is gone; earlier files stay as they are.
    """

    def write(folder: Path) -> None:
        content = result.to_dict() | ({} if tokens is None else {"tokens": tokens.to_dict()})
        (folder / RESULT).write_text(json.dumps(_finite(content), indent=1) + "\n", encoding="utf-8")
        draw(result, folder / PICTURE)

    return write_files(root, (RESULT, PICTURE), write, _measured)


def _finite(value: Any) -> Any:
    """``null`` in the place of an end of an interval that is infinite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measured(path: Path) -> Any:
    """A result without the timings, which differ from one call to the next; None if there is none to read."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8")), "seconds": None, "saved": None}
    except (OSError, ValueError, TypeError):
        return None


def draw(result: Any, path: Path) -> None:
    """The gap against the clip band, the share clipped and the drift with their intervals and limits, by timestep."""
    from matplotlib.figure import Figure

    steps = result.steps
    drift = result.drift
    verdict = result.advice.verdict
    names = [f"{step.timestep:.0f}" for step in steps]
    panels = 2 if drift is None else 3
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    left, right, *third = figure.subplots(1, panels)
    for values, label, style in (
        ([s.abs_max for s in steps], "largest", ":"),
        ([s.abs_q90 for s in steps], "90 %", "--"),
        ([s.abs_mean for s in steps], "mean", "-"),
    ):
        left.plot(names, [max(value, 1e-9) for value in values], style, marker="o", color="#2b6cb0", label=label)
    if OBJECTIVES[result.setting["loss_mode"]].clips_plain_ratio:
        # Other objectives compare another quantity than the log ratio drawn here with their limit.
        for width, style in zip(sorted(set(result.setting["clip_band"])), ("-", "--"), strict=False):
            left.axhline(width, linestyle=style, label=f"clip band {width:.3g}", **_LIMIT)
    left.set(yscale="log", xlabel="timestep, from noise to image", ylabel="|log pi_actor - log pi_engine|")
    left.set_title("Gap with equal weights")
    left.legend()
    _bars(right, names, [(step.clipped, step.clipped_interval) for step in (*steps, result.overall)])
    # Only bypass mode's PPO has a limit of that share.
    if result.setting["bypass_mode"] and result.setting["loss_type"] == "ppo_clip":
        limit = clip_not_safe(drift_known=drift is not None)
        right.axhline(limit, label=f"limit for all together, {limit:.0%}", **_LIMIT)
        right.legend()
    right.set(ylim=(0, 1), ylabel="share of samples, 95 % interval")
    right.set_title("Left out before anything is learned")
    if drift is not None:
        (axes,) = third
        _bars(axes, names, [(one.value, one.interval) for one in (*drift.timesteps, drift)])
        axes.axhline(DRIFT_NOT_SAFE, label=f"not safe above {DRIFT_NOT_SAFE:g}", **_LIMIT)
        axes.axhline(DRIFT_SAFE, label=f"safe below {DRIFT_SAFE:g}", **_LIMIT | {"color": "#2f855a"})
        # The noisiest timesteps have the lowest bars and are on the left.
        axes.legend(title="all together", loc="upper left")
        axes.set(ylabel="gradients of one step, 95 % interval")
        axes.set_title("Drift: learned whatever is rewarded")
    figure.suptitle(f"{verdict.capitalize()}: {result.advice.because}", color=_COLOURS[verdict], fontsize=10, wrap=True)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, names: list[str], shown: list[Any]) -> None:
    """Values with their intervals, by timestep and for all together."""
    values = [value for value, _ in shown]
    below = [max(value - interval.low, 0.0) for value, interval in shown]
    above = [max(interval.high - value, 0.0) for value, interval in shown]
    colours = ["#2b6cb0"] * len(names) + ["#4a5568"]
    axes.bar([*names, "all"], values, yerr=[below, above], color=colours, ecolor="#1a202c", capsize=4)
    axes.set(xlabel="timestep, from noise to image")
