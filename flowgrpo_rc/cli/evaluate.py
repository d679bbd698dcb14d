"""The command ``flowgrpo-rc evaluate``: LoRAs beside their base model, on the same prompts and noise.

Images are drawn and scored as a run's validation does it, by the engine, sampler and rewards of the configuration.
"""

import argparse
import json
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flowgrpo_rc import __version__
from flowgrpo_rc.cli.arguments import BASE_CONFIG, add_command, add_configuration
from flowgrpo_rc.cli.errors import LOADING, NEGATIVE, TRAINING
from flowgrpo_rc.cli.export_lora import lora_folder
from flowgrpo_rc.cli.results import make_folder, write_files

WRITER = "writer"
"""The base image model with the prompts of the run's trained writer, and the run folder's folder of its adapter."""
WRITER_AVERAGE = "writer_ema"
"""The same with the average of the writer's adapter."""
AVERAGE = "lora_ema"
FILES = ("evaluation.json", "grid.png", "evaluation.html")


def add_evaluate(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "evaluate",
        "compare LoRAs with their base model on the same prompts and noise",
        f"Exit code: 0 done, {NEGATIVE} a LoRA is worse than --tolerance allows, 2 refused, 1 failed.",
    )
    add_configuration(command)
    text = "a run folder: its config.yaml is the configuration, and its lora/ and lora_ema/ are evaluated"
    command.add_argument("--run-dir", metavar="RUN_DIR", type=Path, help=text)
    text = "a LoRA: a run folder, or a folder with a LoRA in it, such as a checkpoint; may be repeated"
    command.add_argument("--lora", metavar="NAME=FOLDER", action="append", default=[], help=text)
    text = "a file of prompts, in place of data.val_files; may be repeated"
    command.add_argument("--prompts", metavar="FILE", action="append", default=[], help=text)
    command.add_argument("--images", type=int, help="images of each prompt (actor_rollout_ref.rollout.val_kwargs.n)")
    text = f"exit with {NEGATIVE} if a LoRA's mean difference to the base is below -VALUE; may be repeated"
    command.add_argument("--tolerance", metavar="REWARD=VALUE", action="append", default=[], help=text)
    text = f"folder for {', '.join(FILES)} (%(default)s)"
    command.add_argument("--out", type=Path, default=Path("outputs/evaluation"), help=text)
    command.set_defaults(run=run_command, unfinished="no result was written")


def run_command(arguments: argparse.Namespace) -> int:
    """Draw, score, write and print; returns the exit code."""
    folders = _folders(arguments)
    config = _configuration(arguments)
    start = config.actor_rollout_ref.model.lora_adapter_path
    if start and config.algorithm.prompt_writer.learns_alone:
        # The image model of such a run has the LoRA that it started from.
        folders.setdefault("lora", lora_folder(Path(start).expanduser(), average=False))
    config.actor_rollout_ref.model.lora_adapter_path = None
    writers = _writer_folders(arguments, config)
    rewards = {**config.reward.weights(), **config.reward.observers()}
    tolerances = _tolerances(arguments.tolerance, ["mean", *rewards], {**folders, **writers})
    make_folder(arguments.out)
    import numpy as np

    from flowgrpo_rc.evaluation import comparison
    from flowgrpo_rc.evaluation.comparison import BASE, Scored, padded_state
    from flowgrpo_rc.models.lora import adapter_state, load_adapter_state
    from flowgrpo_rc.trainer.setup import Run
    from flowgrpo_rc.trainer.validation import validate

    updates = _updates(folders, config.actor_rollout_ref.model)
    config.trainer.log_val_generations = comparison.SHOWN
    arguments.phase = LOADING
    run = Run(config, str(arguments.out), trains=False)
    arguments.phase = TRAINING
    is_main = run.accelerator.is_main_process
    count = len(run.val_prompts)
    try:
        if run.writer is not None:
            for folder in writers.values():
                # Before images of the base are drawn.
                run.writer.check_base(folder)
        own = adapter_state(run.actor.transformer)
        models = []
        drawn = {BASE: {}} | {name: {} for name in writers} | updates
        for version, (name, update) in enumerate(drawn.items()):
            began = time.perf_counter()
            load_adapter_state(run.actor.transformer, padded_state(update, own))
            run.adapter.push(version)
            if run.writer is not None:
                # The base draws what the untrained writer writes.
                if writers and name != BASE:
                    averages = name in (AVERAGE, WRITER_AVERAGE)
                    run.writer.load(writers.get(WRITER_AVERAGE if averages else WRITER, writers[WRITER]))
                run.writer.push(version)
            found = validate(run, run.generate)
            # The first image of each prompt; a short list of prompts has more images than prompts.
            shown = [one for one in found.shown if one.number < count]
            images = [one.image for one in shown]
            totals = [one.reward for one in shown]
            scores = [
                reward | {f"images/{n}": float(values[i]) for n, values in found.statistics.items()}
                for i, reward in enumerate(found.rewards)
            ]
            prompts = comparison.by_prompt(scores, count) | comparison.diversity(found.thumbnails, count)
            means = {key: float(np.mean(values)) for key, values in prompts.items()}
            # To the digit those of a run's validation.
            means |= {key: found.metrics[f"val/reward/{key}"] for key in found.rewards[0]}
            models.append(Scored(name, means, prompts, images, totals))
            if is_main:
                print(f"{name}: {len(found.rewards)} images in {time.perf_counter() - began:.1f} s", flush=True)
        rows = comparison.compare(models, [name for name, w in config.reward.weights().items() if w < 0])
        worse = comparison.beyond(rows, tolerances)
        if is_main:
            images = config.actor_rollout_ref.rollout.val_kwargs.n
            legend = comparison.legend(count, images)
            print(f"\n{comparison.table(rows)}\n\n{legend}", *worse, sep="\n")
            firsts = [next(iter(record.images), None) for record in run.val_prompts[: comparison.SHOWN]]
            references = [None if first is None else first.open() for first in firsts]
            texts = [record.prompt for record in run.val_prompts]

            def write(folder: Path) -> None:
                grid = folder / FILES[1]
                comparison.draw_grid(grid, texts, models, references)
                facts = _facts(config, folders, updates, tolerances)
                content = comparison.content(models, rows, texts, facts)
                (folder / FILES[0]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                page = comparison.build_page(rows, legend, _settings(config, folders, updates), grid)
                (folder / FILES[2]).write_text(page, encoding="utf-8")

            print("\n".join(write_files(arguments.out, FILES, write, _read)))
        # A launcher ends all processes as soon as one exits with a code other than 0.
        run.accelerator.wait_for_everyone()
        run.accelerator.end_training()
    finally:
        run.close_engines()
        run.end_rewards()
    return NEGATIVE if worse else 0


def _folders(arguments: argparse.Namespace) -> dict[str, Path]:
    """The folder of each LoRA by its name: the run's own, and those of ``--lora``."""
    if arguments.images is not None and arguments.images < 1:
        raise ValueError(f"--images: got {arguments.images}; give 1 or more images a prompt")
    folders = {}
    if (run := arguments.run_dir) is not None:
        if arguments.config_dir is not None or arguments.config_name != BASE_CONFIG:
            raise ValueError("--run-dir: the run's config.yaml is used; leave out --config-name and --config-dir")
        if not (run / "config.yaml").is_file():
            raise ValueError(f"--run-dir: {run} holds no config.yaml; give a run folder, outputs/PROJECT/EXPERIMENT")
        # A prompt writer that learned alone has no LoRA beside it.
        if (run / "lora").is_dir() or not (arguments.lora or (run / WRITER).is_dir()):
            folders["lora"] = lora_folder(run, average=False)
        if (run / AVERAGE).is_dir():
            folders[AVERAGE] = run / AVERAGE
    for text in arguments.lora:
        name, folder = _pair("--lora", text, "NAME=FOLDER")
        if name in ("base", WRITER, WRITER_AVERAGE, *folders):
            raise ValueError(f"--lora: the name {name!r} is taken already; give another")
        folders[name] = lora_folder(Path(folder).expanduser(), average=False)
    return folders


def _writer_folders(arguments: argparse.Namespace, config: Any) -> dict[str, Path]:
    """The adapter of the run's prompt writer and its average, by their names; empty where it has not trained any."""
    from flowgrpo_rc.trainer.writing import WRITER_FILE

    if arguments.run_dir is None or config.algorithm.prompt_writer.path is None:
        return {}
    folders = {name: arguments.run_dir / name for name in (WRITER, WRITER_AVERAGE)}
    return {name: folder for name, folder in folders.items() if (folder / WRITER_FILE).is_file()}


def _pair(option: str, text: str, form: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name.strip() or not value:
        raise ValueError(f"{option}: got {text!r}; write {form}")
    return name.strip(), value


def _tolerances(texts: list[str], known: Collection[str], folders: Mapping[str, Path]) -> dict[str, float]:
    """The tolerance of each reward that is named."""
    found = {}
    for text in texts:
        name, value = _pair("--tolerance", text, "REWARD=VALUE")
        if name not in known:
            raise ValueError(f"--tolerance: no reward {name!r}; there are: {', '.join(known)}")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise ValueError(f"--tolerance: got {text!r}; give a number from 0")
    if found and not folders:
        raise ValueError("--tolerance: there is no LoRA to compare with the base; give --lora or --run-dir")
    return found


def _configuration(arguments: argparse.Namespace) -> Any:
    """The configuration without what training alone needs."""
    from flowgrpo_rc.cli.compose import compose

    if arguments.run_dir is None:
        config = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    else:
        config = compose("config", arguments.overrides, str(arguments.run_dir))
    rollout = config.actor_rollout_ref.rollout
    if arguments.prompts:
        config.data.val_files = arguments.prompts
        # That of the configuration is for its own files.
        if not any(text.startswith("data.val_max_samples=") for text in arguments.overrides):
            config.data.val_max_samples = None
    if arguments.images is not None:
        rollout.val_kwargs.n = arguments.images
    # Each LoRA draws as soon as it is given.
    rollout.ahead = rollout.adapter_lag = 0
    config.trainer.logger = []
    config.trainer.rollout_data_dir = config.trainer.validation_data_dir = None
    return config


def _updates(folders: Mapping[str, Path], model: Any) -> dict[str, Any]:
    """Read the LoRAs, check that they are of the configuration's ``model``, and set its LoRA to one that holds each."""
    from flowgrpo_rc.dtypes import torch_dtype
    from flowgrpo_rc.evaluation.export import check_fit, read_updates
    from flowgrpo_rc.models.lora import AdapterMismatchError, linear_layers
    from flowgrpo_rc.planner.pipeline import FakePipeline

    if not folders:
        return {}
    layers = linear_layers(FakePipeline(model.path, torch_dtype("float32")).transformer)
    updates = {}
    for name, folder in folders.items():
        try:
            updates[name] = read_updates(folder)
            check_fit(updates[name], layers, model.path, "give the configuration of its model")
        except AdapterMismatchError as error:
            raise AdapterMismatchError(f"--lora: {name}: {error}") from error
    model.lora_rank = model.lora_alpha = max(_rank(update) for update in updates.values())
    # Full names, in the transformer's order.
    model.target_modules = [layer for layer in layers if any(layer in update for update in updates.values())]
    return updates


def _rank(update: Mapping[str, Any]) -> int:
    """The largest rank of a LoRA's layers."""
    return max(len(down) for down, _ in update.values())


def _facts(
    config: Any, folders: Mapping[str, Path], updates: Mapping[str, Any], tolerances: Mapping[str, float]
) -> dict[str, Any]:
    """Entries of the JSON file besides the scores."""
    import diffusers
    import torch

    versions = {"flowgrpo_rc": __version__, "torch": torch.__version__, "diffusers": diffusers.__version__}
    loras = {
        name: {"folder": str(folder), "rank": _rank(updates[name]), "layers": len(updates[name])}
        for name, folder in folders.items()
    }
    return {"versions": versions, "loras": loras, "tolerances": tolerances, "config": config.to_dict()}


def _settings(config: Any, folders: Mapping[str, Path], updates: Mapping[str, Any]) -> dict[str, str]:
    """Names and values for the page."""
    rollout = config.actor_rollout_ref.rollout
    pipeline = rollout.validation_pipeline
    guidance = f"true_cfg_scale {pipeline.guidance_in_words}"
    if pipeline.guidance_scale is not None:
        guidance += f", guidance_scale {pipeline.guidance_scale:g}"
    files = config.data.val_files
    return {
        "Model": config.actor_rollout_ref.model.path,
        **{
            name: f"{folder}, rank {_rank(updates[name])}, {len(updates[name])} layers"
            for name, folder in folders.items()
        },
        "Prompts": files if isinstance(files, str) else ", ".join(files),
        "Images": f"{rollout.val_kwargs.n} of each prompt, {pipeline.width} x {pipeline.height}, seed "
        f"{rollout.val_kwargs.seed}",
        "Sampler": f"{pipeline.num_inference_steps} steps, {guidance}, {rollout.name} in {rollout.dtype}",
        "Rewards": config.reward.in_words(),
        "Version": f"flowgrpo_rc {__version__}",
    }


def _read(path: Path) -> Any:
    """An earlier result; None if there is none to read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
