"""``flowgrpo-rc probe``: measure the gap before training and say whether the configured mode survives it."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NOT_SAFE = 3
"""Exit code of a probe that finds the configuration not safe."""


def add_probe(commands: Any, default_config: str) -> None:
    """Adds the command to the parser's ``commands``."""
    text = "measure the rollout/training gap before training and say whether bypass mode is safe"
    command = commands.add_parser(
        "probe",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Exit code: 0 safe, {NOT_SAFE} not safe, 2 refused, 1 failed.",
    )
    command.add_argument("--config-name", default=default_config, help="YAML file, without its ending (%(default)s)")
    command.add_argument("--config-dir", help="folder of your own YAML files; they may build on the shipped ones")
    command.add_argument("--images", type=int, default=16, help="images at every place of the SDE window (%(default)s)")
    command.add_argument("--out", type=Path, default=Path("outputs/probe"), help="folder for probe.json and probe.png")
    command.add_argument("overrides", nargs="*", help="Hydra overrides, as for train")
    command.set_defaults(run=run_probe)


def run_probe(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; returns the exit code."""
    import tempfile

    from flowgrpo_rc.cli.compose import compose

    refused: tuple[type[Exception], ...] = (ValueError, OSError, ImportError)
    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"trainer.default_local_dir={folder}/run", "trainer.logger=[console]"]
        try:
            config = compose(arguments.config_name, [*arguments.overrides, *quiet], arguments.config_dir)
            if config.trainer.resume_mode == "auto":
                config.trainer.resume_mode = "disable"
            from flowgrpo_rc.rollout import RolloutError
            from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer
            from flowgrpo_rc.trainer.preflight import check_preflight, run_preflight

            refused = (*refused, CheckpointError)
            check_preflight(arguments.images)
            arguments.out.mkdir(parents=True, exist_ok=True)
            trainer = FlowGRPOTrainer(config)
        except refused as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        try:
            result = run_preflight(trainer, arguments.images)
        except RolloutError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            trainer.run.engine.close()
    print(report(result))
    (arguments.out / "probe.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    _draw(result, arguments.out / "probe.png")
    print(f"Written: {arguments.out / 'probe.json'}, {arguments.out / 'probe.png'}")
    return 0 if result.advice.safe else NOT_SAFE


def report(result: Any) -> str:
    """The table and the verdict, as text."""
    setting, advice = result.setting, result.advice
    mode = f"bypass, {setting['loss_type']}" if setting["bypass_mode"] else "decoupled"
    clip = ""
    if advice.kl_mask_threshold is not None:
        clip = f", kl_mask_threshold={advice.kl_mask_threshold:g}"
    elif advice.clip_ratio is not None:
        clip = f", clip_ratio={advice.clip_ratio if advice.clip_ratio == 'auto' else format(advice.clip_ratio, 'g')}"
        clip += " with clip_ratio_low=null clip_ratio_high=null" if setting["clip_sides"] else ""
    quantized = f", {setting['quantization']} weights" if setting["quantization"] else ""
    lines = [
        f"Engine {setting['engine']} in {setting['rollout_dtype']}{quantized}; actor in {setting['actor_dtype']}; "
        f"{setting['sde_type']}, {setting['latent_dimensions']} latent dimensions; {mode}, "
        f"{_band(setting)}; {setting['images']} images",
        "",
        f"{'timestep':>9} {'n':>4} {'mean l':>10} {'mean |l|':>9} {'90 %':>9} {'largest':>9} "
        f"{'nats':>7} {'KL nats':>8} {'clipped':>8}",
    ]
    for step in (*result.steps, result.overall):
        name = "all" if step.timestep is None else f"{step.timestep:.1f}"
        lines.append(
            f"{name:>9} {step.count:4d} {step.mean:10.1e} {step.abs_mean:9.1e} {step.abs_q90:9.1e} {step.abs_max:9.1e} "
            f"{step.nats:7.3f} {step.kl_nats:8.3f} {step.clipped:8.0%}"
        )
    lines += [
        "",
        f"l = log pi_actor - log pi_engine, same weights; clipped: {_clipped(setting)} before any learning",
        f"Verdict: {'SAFE' if advice.safe else 'NOT SAFE'}",
        *(f"  - {reason}" for reason in advice.reasons),
        f"Recommended: {advice.mode} mode{clip}; a band that only outliers leave: "
        f"rollout_rs=seq_mean_k1 rollout_rs_threshold={advice.rejection_band}",
    ]
    if result.saved is not None:
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in result.seconds.items())
        lines.append(
            f"Bypass mode leaves out decoupled mode's scoring pass: {result.saved:.0%} of rollout, score and update "
            f"here (of these images: {seconds})"
        )
    return "\n".join(lines)


def _band(setting: dict[str, Any]) -> str:
    band = setting["clip_band"]
    if len(band) == 1:
        return f"KL threshold {band[0]:g}"
    if setting["clip_ratio"] == "auto":
        return f"clip band auto, 1 +- {band[0]:.2g} to {band[1]:.2g}"
    return "clip band " + (f"1 +- {band[0]:g}" if band[0] == band[1] else f"1 - {band[0]:g} to 1 + {band[1]:g}")


def _clipped(setting: dict[str, Any]) -> str:
    own = {"grpo_guard": "outside the clip band of grpo_guard's own ratio", "flow_dppo": "beyond the KL threshold"}
    return own.get(setting["loss_mode"], "outside the clip band")


def _draw(result: Any, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    from flowgrpo_rc.actor.config import MEAN_MODES

    steps, band = result.steps, result.setting["clip_band"]
    names = [f"{step.timestep:.0f}" for step in steps]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for values, label, style in (
        ([s.abs_max for s in steps], "largest", ":"),
        ([s.abs_q90 for s in steps], "90 %", "--"),
        ([s.abs_mean for s in steps], "mean", "-"),
    ):
        left.plot(names, [max(value, 1e-9) for value in values], style, marker="o", color="#2b6cb0", label=label)
    comparable = result.setting["loss_mode"] not in MEAN_MODES  # which hold something else against it
    for width, style in zip(sorted(set(band)) if comparable else (), ("-", "--"), strict=False):
        left.axhline(width, color="#c53030", linewidth=1, linestyle=style, label=f"clip band {width:.3g}")
    left.set(yscale="log", xlabel="timestep, from noise to image", ylabel="|log pi_actor - log pi_engine|")
    left.set_title("Gap with equal weights")
    left.legend()
    right.bar(names, [step.clipped for step in steps], color="#2b6cb0")
    right.set(ylim=(0, 1), xlabel="timestep, from noise to image", ylabel="share of samples")
    right.set_title("Left out before anything is learned")
    figure.suptitle("Safe" if result.advice.safe else "Not safe", color="#2f855a" if result.advice.safe else "#c53030")
    figure.savefig(path, dpi=120)
    plt.close(figure)
