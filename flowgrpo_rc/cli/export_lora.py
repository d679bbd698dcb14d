"""The command ``flowgrpo-rc export-lora``: a trained LoRA for other programs."""

import argparse
from pathlib import Path
from typing import Any

from flowgrpo_rc.cli.arguments import add_command
from flowgrpo_rc.dtypes import DTYPES, torch_dtype


def add_export_lora(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    command = add_command(
        commands,
        "export-lora",
        "write a trained LoRA for other programs",
        "Without --out it lies beside the LoRA's folder, such as RUN/lora_comfyui.safetensors, and must be new. A file "
        "that --out names is replaced. Exit code: 0 done, 2 refused.",
    )
    command.add_argument("lora", metavar="RUN_OR_FOLDER", type=Path, help="a run folder, or one with a LoRA in it")
    text = "merged: the transformer with the LoRA in its weights; others: a file with the names of these programs"
    command.add_argument("--format", required=True, choices=["diffusers", "comfyui", "kohya", "merged"], help=text)
    command.add_argument("--dtype", choices=DTYPES, help="precision of the weights (as they are stored)")
    command.add_argument("--out", type=Path, help="the file; of merged the folder, which must be new")
    command.add_argument(
        "--average", action="store_true", help="the run's moving average, lora_ema/, in place of lora/"
    )
    command.add_argument("--model", metavar="PATH", help="the LoRA's model: a folder or hub name (the run's)")
    command.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Write the file or folder and print its name; returns the exit code."""
    from flowgrpo_rc.run_folder import temporary_folder, write_whole

    form = arguments.format
    folder = lora_folder(arguments.lora.resolve(), arguments.average)
    out = arguments.out or Path(f"{folder}_{form}{'' if form == 'merged' else '.safetensors'}")
    if out.exists() and (arguments.out is None or form == "merged" or out.is_dir()):
        raise ValueError(f"{out} is there already; move it away, or name another with --out")
    from flowgrpo_rc.evaluation.export import check_fit, diffusers_file, merge, read_updates, renamed_file
    from flowgrpo_rc.models.load import pipeline_files
    from flowgrpo_rc.models.lora import linear_layers
    from flowgrpo_rc.planner.pipeline import FakePipeline

    updates = read_updates(folder)
    dtype = torch_dtype(arguments.dtype) if arguments.dtype else None
    content = diffusers_file(updates, dtype) if form == "diffusers" else None
    if content is None:
        path = arguments.model or _model_of(folder)
        pipeline = FakePipeline(path, torch_dtype("float32"))
        layers = linear_layers(pipeline.transformer)
        check_fit(updates, layers, path, "name its own with --model")
        if form == "merged":
            with temporary_folder(out) as temporary:
                merge(updates, dtype, pipeline_files(path), temporary)
                temporary.rename(out)
        else:
            content = renamed_file(updates, dtype, form, pipeline.class_name, layers)
    if content is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, lambda temporary: temporary.write_bytes(content))
    print(f"Written: {out} ({len(updates)} layers)")
    return 0


def lora_folder(path: Path, average: bool) -> Path:
    """The folder of the LoRA: of a run its final one, or its average."""
    from flowgrpo_rc.run_folder import RunFolder

    run = RunFolder(path)
    if not average and not run.config.exists():
        return path
    folder = run.lora_ema if average else run.lora
    if not folder.is_dir():
        remedy = "train with actor.ema_decay for one" if average else "give one of its checkpoints, checkpoints/step_N"
        raise ValueError(f"{path} holds no {folder.name}/; {remedy}")
    return folder


def _model_of(folder: Path) -> str:
    """Path of the model in the configuration of the run that the LoRA's folder belongs to."""
    from omegaconf import OmegaConf

    from flowgrpo_rc.run_folder import RunFolder

    for parent in list(folder.parents)[:2]:
        config = RunFolder(parent).config
        if config.is_file():
            return str(OmegaConf.select(OmegaConf.load(config), "actor_rollout_ref.model.path"))
    raise ValueError(f"{folder} belongs to no run with a config.yaml; name the LoRA's model with --model")
