"""The command line: imports, exit codes, messages, scripts, and consoles that fail."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from tests_support import overrides_of, run_process

from flowgrpo_rc import trainer
from flowgrpo_rc.cli import main as module
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.correction import NonFiniteLogProbError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "flowgrpo_trainer"


def run(*command, cwd, **environment):
    bin_folder = str(Path(sys.executable).parent)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}:{os.environ['PATH']}"} | environment
    return run_process(*command, cwd=cwd, env=env)


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "from flowgrpo_rc.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from flowgrpo_rc.cli.compose import compose; compose('tiny_qwen_image_ocr'); import sys; "
        "assert 'torch' not in sys.modules",
        "from flowgrpo_rc import diffusion_loss, RolloutCorrectionConfig, DiffusionActorConfig, group_advantages",
        "from flowgrpo_rc.cli.main import main; import sys; assert [main([name]) for name in ('train', 'probe', "
        "'encode-prompts')] == [2] * 3; assert 'torch' not in sys.modules",
    ],
)
def test_imports_stay_light(code, tmp_path):
    heavy = ("diffusers", "transformers", "vllm", "peft", "accelerate", "rapidocr", "cv2")
    check = f"\nimport sys; bad = [m for m in {heavy!r} if m in sys.modules]; assert not bad, bad"
    done = run(sys.executable, "-c", code + check, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "given.txt"),
        ("\n\n", "given.txt"),
        ('the text "42"\na cat on a mat\n' + 'the text "7"\n' * 8, "given.txt:2: .*a cat on a mat"),
        ('the text "42"\nthe text "43"\n', "train_batch_size: got 8, but the data set holds 2 prompts"),
    ],
)
def test_bad_data_is_refused_before_the_model(tmp_path, capsys, content, says):
    file = tmp_path / "given.txt"
    if content is not None:
        file.write_text(content)
    assert main(["demo", f"trainer.default_local_dir={tmp_path / 'run'}", f"data.train_files={file}"]) == 2
    said = capsys.readouterr()
    assert re.search(says, said.err.strip().splitlines()[-1])
    assert "Traceback" not in said.err
    assert "Run folder" not in said.out


def test_prepare_data_and_explain_config(tmp_path, capsys):
    (tmp_path / "train.txt").write_text('a sign that says "stop"\n')
    (tmp_path / "test.txt").write_text('a sign that says "go"\n')
    assert main(["prepare-data", "ocr", "--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "train.parquet").is_file()
    assert main(["prepare-data", "ocr", "--input", str(tmp_path), "--output", ""]) == 2
    assert "--output: is empty; give a folder" in capsys.readouterr().err
    assert main(["explain-config", "bypass_mode=true", "rollout_is=sequence"]) == 0
    said = capsys.readouterr().out
    assert "bypass" in said.lower()
    prefixes = ("algorithm.rollout_correction", "actor_rollout_ref.actor.rollout_correction")
    assert main(["explain-config", f"{prefixes[0]}.bypass_mode=true", f"{prefixes[1]}.rollout_is=sequence"]) == 0
    assert capsys.readouterr().out == said
    (tmp_path / "mine.yaml").write_text("defaults: [tiny_qwen_image_ocr, _self_]\ndata: {seed: 7}\n")
    shipped = ["bypass_mode=true", "rollout_is=sequence", "rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.5_2.0"]
    assert main(["explain-config", *shipped]) == 0
    said = capsys.readouterr().out
    for where in (["tiny_qwen_image_ocr"], ["mine", "--config-dir", str(tmp_path)]):
        assert main(["explain-config", "--config-name", *where]) == 0
        assert capsys.readouterr().out == said
    band = ["rollout_rs_threshold=0.99_1.02", "actor_rollout_ref.rollout.n=4"]
    assert main(["explain-config", "--config-name", "tiny_qwen_image_ocr", *band]) == 0
    assert "outside [0.99, 1.02] (seq_mean_k1)" in capsys.readouterr().out
    assert main(["explain-config", "--config-name", "no_such"]) == 2
    assert "no file no_such.yaml" in capsys.readouterr().err
    assert main(["explain-config", "bypas_mode=true"]) == 2
    assert "bypass_mode" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_script(tmp_path):
    script = EXAMPLES / "run_tiny_qwen_image_ocr_lora_rollout_corr.sh"
    done = run(
        "bash",
        script,
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        cwd=tmp_path,
        OUTPUTS=str(tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # transformers has a line about packages that no part here uses.
    assert "torchvision" not in done.stderr + done.stdout
    root = tmp_path / "out" / "flowgrpo_rc" / "tiny_qwen_image_ocr"
    assert (root / "samples" / "before_after.png").is_file()
    assert "before_after.png" in done.stdout


class Unknown(Exception):
    """One that nothing here knows."""


OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
LESS_MEMORY = "; lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
FORESEEN = [
    (ValueError("trainer.seed: got -1"), 2, "error: trainer.seed: got -1"),
    (ImportError("no\nwandb"), 2, "error: no wandb"),
    (OSError(errno.ENOSPC, "No space left on device", "run"), 2, "error: [Errno 28] No space left on device: 'run'"),
    (trainer.CheckpointError("step_3 is damaged"), 2, "error: step_3 is damaged"),
    (NonFiniteLogProbError(torch.tensor([[torch.nan]]), torch.zeros(1, 1), None), 2, "error: "),
    (NonFiniteLogProbError(torch.zeros(1, 1), torch.zeros(1, 1), None), 2, "error: Log-probs are too large"),
    (MemoryError(), 1, f"error: out of memory (MemoryError){LESS_MEMORY}"),
    (RuntimeError(OUT_OF_MEMORY), 1, "error: out of memory ([enforce fail"),
    (torch.OutOfMemoryError("CUDA\nTried"), 1, f"error: out of memory (CUDA Tried){LESS_MEMORY}"),
    (RuntimeError("[gloo] Connection closed by peer"), 1, "error: another process of this launch has failed"),
    (KeyboardInterrupt(), 130, "interrupted before training began; nothing was trained"),
]
UNFORESEEN = [Unknown("it\nbroke"), KeyError("colour"), SystemExit(0), GeneratorExit()]


@pytest.fixture
def training(monkeypatch, capsys):
    """``training(error, loads=)``: exit code and standard error of a run that raises while loading, or in its loop."""

    def run(error, *, loads=True):
        class Trainer:
            def __init__(self, config):
                if not loads:
                    raise error

            def fit(self):
                raise error

        monkeypatch.setattr(trainer, "FlowGRPOTrainer", Trainer)
        code = main(["train", "--config-name", "tiny_qwen_image_ocr"])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(("error", "code", "message"), FORESEEN, ids=lambda value: type(value).__name__)
def test_a_foreseen_error_is_a_line_and_a_code(training, monkeypatch, error, code, message):
    got, shown = training(error, loads=False)
    assert (got, shown.count("\n")) == (code, 1)
    assert shown.startswith(message)
    monkeypatch.setenv("FLOWGRPO_RC_DEBUG", "1")
    assert "Traceback" in training(error, loads=False)[1]


@pytest.mark.parametrize("error", [error for error, code, _ in FORESEEN if code == 2], ids=lambda e: type(e).__name__)
def test_the_same_error_in_the_loop_is_a_failure(training, error):
    code, shown = training(error)
    assert code == 1
    # A ValueError of the settings comes before the loop, so one within is a bug.
    assert ("Traceback" in shown) is (type(error) in (ValueError, ImportError))


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
def test_an_unforeseen_error_shows_its_traceback_after_a_line(training, error, loads):
    code, shown = training(error, loads=loads)
    assert code == 1
    assert shown.startswith(f"error: unexpected {type(error).__name__}: ")
    assert shown.splitlines()[1].startswith("Traceback")


class Refusing(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"), [(BrokenPipeError(32, "Broken pipe"), 0), (OSError(28, "No space left"), 1)]
)
def test_output_that_is_lost_is_an_error_unless_the_reader_has_seen_enough(monkeypatch, capsys, error, code):
    monkeypatch.setattr(sys, "stdout", Refusing(error))
    assert main(["explain-config", "bypass_mode=true"]) == code
    assert ("error: the output could not be written: [Errno 28]" in capsys.readouterr().err) is (code == 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train", "interrupted before training began; nothing was trained\n"),
        ("probe", "interrupted: no result was written\n"),
    ],
)
def test_a_signal_while_loading_is_a_line(monkeypatch, capsys, tmp_path, number, command, said):
    class Trainer:
        def __init__(self, config):
            os.kill(os.getpid(), number)
            time.sleep(10)

    monkeypatch.setattr(trainer, "FlowGRPOTrainer", Trainer)
    before = signal.getsignal(number)
    monkeypatch.chdir(tmp_path)
    assert main([command, "--config-name", "tiny_qwen_image_ocr"]) == 130
    assert capsys.readouterr().err == said
    assert signal.getsignal(number) == before


@pytest.mark.slow
def test_head_ends_its_reading_and_not_the_run(tmp_path):
    """``flowgrpo-rc demo | head -1``: ten seconds, for the interpreter's own last flush needs a process."""
    command = [sys.executable, "-m", "flowgrpo_rc.cli.main", "demo", *overrides_of(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"Run folder")
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(200) == 0, said
    assert said.count("a part of the output could not be written ([Errno 32] Broken pipe)") == 1
    assert "Traceback" not in said
    assert "BrokenPipeError" not in said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_overrides_stand_before_between_and_after_options():
    arguments = module._parse(["probe", "a=1", "--images", "8", "b=2", "--out", "folder", "c=3"])
    assert (arguments.overrides, arguments.images, str(arguments.out)) == (["a=1", "b=2", "c=3"], 8, "folder")


def test_help_lists_the_commands_and_the_version_is_shown(capsys):
    for arguments in (["--version"], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in ("train", "demo", "encode-prompts", "probe", "plan", "report", "prepare-data", "explain-config"):
        assert command in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the following arguments are required: COMMAND; see flowgrpo-rc --help"),
        (["train", "a=1", "--sead", "3"], "unrecognized arguments: --sead 3; see flowgrpo-rc --help"),
        (["explain-config", "a=1", "--b"], "unrecognized arguments: --b; see flowgrpo-rc --help"),
        (["report"], "the following arguments are required: RUN_DIR; see flowgrpo-rc report --help"),
        (["probe", "--images", "many"], "argument --images: invalid int value: 'many'"),
        (["trian"], "argument COMMAND: invalid choice: 'trian'"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused_in_a_line(argv, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith(f"error: {says}")
    assert error.count("\n") == 1


def test_a_warning_is_a_line(capsys, monkeypatch):
    """One that is given in a function of the package, as the command's own warnings are."""

    def warns(_arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = print_to_stderr
            warnings.warn("first\nsecond", stacklevel=1)
        return 0

    monkeypatch.setattr(module, "_explain", warns)
    assert main(["explain-config"]) == 0
    assert capsys.readouterr().err == "warning: first second\n"
    monkeypatch.setenv("FLOWGRPO_RC_DEBUG", "1")
    assert main(["explain-config"]) == 0
    assert "UserWarning: first" in capsys.readouterr().err


def print_to_stderr(message, category, filename, lineno, file=None, line=None):
    """Warnings as Python shows them; pytest would collect them."""
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


@pytest.mark.parametrize("value", ["[a", "!!python/object:x y", "*x"])
def test_explain_config_refuses_what_it_cannot_read_in_a_line(value, capsys):
    assert main(["explain-config", f"rollout_is={value}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: rollout_is: got ")
    assert error.count("\n") == 1
    assert len(error) < 250
