"""Helpers that tests import by name."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tolerances import of_metric

from flowgrpo_rc.run_folder import TIMING_PREFIXES, RunFolder

ADAPTER = "pytorch_lora_weights.safetensors"
BRIGHTNESS = Path(__file__).parent / "brightness_reward.py"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "flowgrpo_trainer"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
"""Two processes of the module or script that follows."""

SMALL_RUN = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.pipeline.num_inference_steps=4",
    "actor_rollout_ref.rollout.algo.sde_window_range=[0,3]",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "data.val_max_samples=4",
    "reward.functions.ocr=0",
    f"reward.custom_reward_function.path={BRIGHTNESS}",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
)
"""Overrides that make the demo a run of a second or two."""


def last_of_each(*overrides):
    """Overrides without those that a later one replaces: the command line warns about them."""
    settings = {override.split("=", 1)[0]: override for override in overrides}
    return list(settings.values())


TIMEOUT = 600
"""Seconds for a process that a test starts: it must end by itself, also where fifteen others want the processor."""


def untimed(rows):
    """Rows of ``metrics.jsonl`` without what no two runs have in common: times and speeds."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMING_PREFIXES)} for row in rows]


def rows_of(folder):
    """The untimed rows of a run folder's ``metrics.jsonl``."""
    return untimed(RunFolder(Path(folder)).rows())


def assert_close_rows(found, expected, dimensions=512):
    """Rows of a run with other kernels; ``dimensions`` are those of a latent."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            bound = of_metric(name, other, dimensions=dimensions, pixels=3072, steps=2)
            assert one[name] == pytest.approx(value, rel=0, abs=bound), name


def adapter_of(folder, name="lora"):
    """The tensors of the adapter that a run has left in its folder."""
    return load_file(Path(folder) / name / ADAPTER)


def same(one, other):
    """True if two mappings hold the same tensors under the same names."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def before_step(trainer, step, do):
    """Have ``do()`` called when the trainer has made so many steps and begins another."""
    train_step = trainer.train_step

    def watched():
        if trainer.step == step:
            do()
        return train_step()

    trainer.train_step = watched


def recorded(owner, name):
    """Have the calls of a method noted; gives the list of their arguments and results."""
    method, calls = getattr(owner, name), []

    def noting(*arguments, **more):
        result = method(*arguments, **more)
        calls.append((arguments, result))
        return result

    setattr(owner, name, noting)
    return calls


def power_cut():
    raise ConnectionError("power cut")


def overrides_of(folder, *overrides):
    """The overrides of ``small_config`` for a command line, with the run folder at ``folder``."""
    return [*SMALL_RUN, f"trainer.default_local_dir={folder}", *overrides]


def run_process(*command, timeout=TIMEOUT, **settings):
    """``subprocess.run`` with its output as text; on a time-out or an interrupt nothing it has started stays behind.

    A launcher such as ``torchrun`` or a shell has children in process groups of their own, which do not end with it.
    """
    command = [str(part) for part in command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            for pid in [*descendants(process.pid), process.pid]:
                end(pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def trainer_of(folder, *overrides):
    """A small run's trainer, which leaves the process group to the next one."""
    from flowgrpo_rc.cli.compose import compose
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", overrides_of(folder, *overrides)))
    trainer.accelerator.end_training = lambda: None
    return trainer


def arguments_of(script, tmp_path, program, **environment):
    """The script's arguments between ``program`` and ``flowgrpo_rc.cli.main train``, and its overrides.

    None is given twice.
    """
    said = tmp_path / "arguments"
    fake = tmp_path / "bin" / program
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\nfor given; do printf '%s\\0' \"$given\"; done > '{said}'\n")
    fake.chmod(0o755)
    path = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(EXAMPLES / script)], env=os.environ | path | environment, check=True)
    before, command, given = said.read_text().removesuffix("\0").partition("\0flowgrpo_rc.cli.main\0train\0")
    assert command
    settings = [override.split("=")[0] for override in given.split("\0")]
    assert len(set(settings)) == len(settings)
    return before.split("\0"), given.split("\0")


def given_by(script, folder, *arguments):
    """The command and the overrides that an example's script gives ``flowgrpo-rc``, by a program in its place that
    writes its arguments down."""
    (folder / "flowgrpo-rc").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "flowgrpo-rc").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OUTPUTS": str(folder)}
    return run_process("bash", script, *arguments, env=environment).stdout.splitlines()


def run_side_by_side(*commands):
    """Run commands at the same time, each of which must end well; nothing of them stays behind."""
    running = [
        subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, output
    finally:
        for process in running:
            process.kill()
            process.wait()


def built_twice(script, folder, *arguments, weights):
    """Build a model by its example's script, twice at the same time; both must give the same so many files of weights.

    Returns the folder of the first, which is in its ``model``.
    """
    first, second = folders = [folder / name for name in ("first", "second")]
    run_side_by_side(*([sys.executable, script, "--output", one / "model", *arguments] for one in folders))
    files = [file.relative_to(first) for file in first.rglob("*.safetensors")]
    assert len(files) == weights
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    assert "Not measured." in (first / "model" / "README.md").read_text(encoding="utf-8")
    return first


def descendants(pid):
    """Processes that this one has started, and theirs, by ``/proc``; none where there is no such folder."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def alive(pid):
    """True if a process is at work, and no zombie that waits for its parent to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end(pid):
    """Kill one process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def resident_bytes(parameters):
    """Bytes of these parameters, divided or whole, that this process holds between two calls."""
    from torch.distributed.tensor import DTensor

    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(done, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert done()
