"""The files of examples/clusters: what can be checked of them without Docker, Slurm, Ray or Kubernetes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from tests_support import ADAPTER, BRIGHTNESS, free_port, rows_of, wait_until

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
SLURM = ("train.slurm", "ray.slurm")


def instructions_of(text):
    """The instructions of a Dockerfile, as (name, the rest in one line)."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole if line)]


@pytest.fixture(scope="module")
def dockerfile():
    return instructions_of((CLUSTERS / "Dockerfile").read_text())


def test_the_dockerfile_has_known_instructions_in_order(dockerfile):
    names = [name for name, _ in dockerfile]
    assert set(names) == {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY"}
    assert names.index("FROM") == 1  # one ARG before it names the base
    assert names.count("FROM") == 1
    assert dockerfile[1] == ("FROM", "${BASE}")


def test_the_dockerfiles_commands_parse_and_leave_no_package_lists(dockerfile):
    commands = [rest for name, rest in dockerfile if name == "RUN"]
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True)
        assert ("apt-get install" in command) == command.endswith("&& rm -rf /var/lib/apt/lists/*")
        assert ("pip install" in command) == ("--no-cache-dir" in command)
    assert len(commands) == 3
    for name, rest in dockerfile:
        if name == "WORKDIR":
            assert Path(rest).is_absolute()
        elif name == "ENV":
            assert all(re.fullmatch(r"\w+=\S+", pair) for pair in rest.split())


def test_what_the_dockerfile_copies_exists(dockerfile):
    copied = [source for name, rest in dockerfile if name == "COPY" for source in rest.split()[:-1]]
    assert len(copied) == 8
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_wheel_is_built_from_what_is_copied(dockerfile):
    project = (ROOT / "pyproject.toml").read_text()  # tomllib is not in Python 3.10
    copied = {source for name, rest in dockerfile if name == "COPY" for source in rest.split()[:-1]}
    included = project.partition("wheel.force-include]\n")[2].partition("\n\n")[0]
    needed = {*re.findall(r'^"(\w+)" =', included, re.M), "flowgrpo_rc", "README.md", "LICENSE", "pyproject.toml"}
    assert len(needed) == 6
    assert needed <= copied
    assert 'packages = ["flowgrpo_rc"]\n' in project
    assert 'readme = "README.md"\n' in project
    assert 'license-files = ["LICENSE"]\n' in project


def test_it_installs_as_the_makefile_does(dockerfile):
    """With the Makefile's constraints, and extras that exist."""
    pip = next(rest for name, rest in dockerfile if name == "RUN" and "pip" in rest)
    install, check = pip.split(" && ")
    assert install == 'python -m pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"'
    assert check.startswith("flowgrpo-rc train --config-name tiny_qwen_image_ocr --print-config")
    assert "pip install --quiet --constraint constraints.txt" in (ROOT / "Makefile").read_text()
    default = next(rest for name, rest in dockerfile if name == "ARG" and rest.startswith("EXTRAS="))
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert set(default.partition("=")[2].split(",")) < set(extras)


@pytest.mark.parametrize("name", SLURM)
def test_the_slurm_scripts_parse(name):
    subprocess.run(["bash", "-n", str(CLUSTERS / name)], check=True)
    directives = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (CLUSTERS / name).read_text(), re.M)
    settings = dict(directives)
    assert len(directives) == len(settings) == len(re.findall("^#SBATCH", (CLUSTERS / name).read_text(), re.M))
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time", "requeue", "open-mode", "signal"} <= set(settings)
    assert re.fullmatch(r"B:USR1@\d+", settings["signal"])
    grace = int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", (CLUSTERS / name).read_text())[1])
    assert 0 < int(settings["signal"].partition("@")[2]) - grace <= 60


JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "backoffLimit": int,
        "podFailurePolicy": {"rules": [{"action": str, "onPodConditions": [{"type": str}]}]},
        "template": {
            "spec": {
                "restartPolicy": str,
                "terminationGracePeriodSeconds": int,
                "containers": [
                    {
                        "name": str,
                        "image": str,
                        "command": [str],
                        "env": [{"name": str, "value": str}],
                        "resources": {"limits": {"nvidia.com/gpu": int, "memory": str, "cpu": str}},
                        "volumeMounts": [{"name": str, "mountPath": str}],
                    }
                ],
                "volumes": [
                    {
                        "name": str,
                        "persistentVolumeClaim": {"claimName": str},
                        "emptyDir": {"medium": str, "sizeLimit": str},
                    }
                ],
            }
        },
    },
}
"""Fields of batch/v1's Job that the file may have, with their types; a list has entries of one kind."""


def misfits(value, schema, where="job"):
    """Places where ``value`` has a field that the schema lacks, or one of another type."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [where]
        unknown = [f"{where}.{key}" for key in value if key not in schema]
        return unknown + [
            m for key in value if key in schema for m in misfits(value[key], schema[key], f"{where}.{key}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [where]
        return [m for i, entry in enumerate(value) for m in misfits(entry, schema[0], f"{where}[{i}]")]
    return [] if type(value) is schema else [where]


def test_the_kubernetes_job_has_the_fields_of_a_job():
    job = yaml.safe_load((CLUSTERS / "job.yaml").read_text())
    assert misfits(job, JOB) == []
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy takes no other
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert int(environment["NUM_GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (ROOT / container["command"][1]).is_file()


def test_the_schema_finds_a_misspelt_field():
    job = yaml.safe_load((CLUSTERS / "job.yaml").read_text())
    job["spec"]["template"]["spec"]["containers"][0]["env"][0] = {"name": "NUM_GPUS", "value": 8}
    job["spec"]["backofLimit"] = 3
    found = misfits(job, JOB)
    assert found == ["job.spec.backofLimit", "job.spec.template.spec.containers[0].env[0].value"]


FAKES = {
    "scontrol": 'if [ "$1" = show ]; then printf "%s\\n" $HOSTS; else echo "$@" >> "$FAKES/scontrol.log"; fi',
    "srun": """
        echo "$*" >> "$FAKES/srun.log"
        while [[ $1 == --* ]]; do shift; done
        if [[ $* == *flowgrpo_trainer* ]]; then echo $$ > "$FAKES/pid"; fi
        exec "$@" """,
    "scancel": 'echo "$@" >> "$FAKES/scancel.log"; kill -TERM "$(cat "$FAKES/pid")"',
    "ray": 'echo "$CUDA_VISIBLE_DEVICES $*" >> "$FAKES/ray.log"',
}
"""Stand-ins for the programs of a cluster: one node, and a step is a process on it."""


@pytest.fixture
def cluster(tmp_path):
    """Environment in which the Slurm scripts run here; logs are in ``tmp_path``."""
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "FAKES": str(tmp_path), "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node0"}
    return os.environ | own | {"ENGINE": "diffusers", "OUTPUTS": str(tmp_path / "out"), "RAY_WAIT": "0.5"}


@pytest.mark.process
def test_the_slurm_job_saves_before_its_time_is_up_and_is_queued_again(cluster, tmp_path):
    """Two processes of the flagship's script with the tiny model; then the job again, to its end."""
    (tmp_path / "prompts.txt").write_text('the text "10"\nthe text "23"\n')
    prompts = str(tmp_path / "prompts.txt")
    own = {"HOSTS": "127.0.0.1", "SLURM_NNODES": "1", "GPUS": "2", "PORT": str(free_port())}
    files = {"MODEL": "asset:tiny_qwen_image", "TRAIN": prompts, "VAL": prompts}
    environment = cluster | own | files | {"REWARD": f"reward.custom_reward_function.path={BRIGHTNESS}"}
    small = [
        "data.train_batch_size=2",
        "data.val_max_samples=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.pipeline.height=32",
        "actor_rollout_ref.rollout.pipeline.width=32",
        "actor_rollout_ref.rollout.pipeline.max_sequence_length=16",
        "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=2",
        "trainer.logger=[console]",
        "trainer.device=cpu",
    ]
    folder = tmp_path / "out" / "flow_grpo" / "qwen_image_ocr_lora_rollout_corr"

    def start(steps, log):
        command = ["bash", str(CLUSTERS / "train.slurm"), *small, f"trainer.total_training_steps={steps}"]
        with log.open("w") as out:
            return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def trained():
        rows = folder / "metrics.jsonl"
        return rows.exists() and len(rows.read_text().splitlines()) > 2

    job = start(500, tmp_path / "first.log")
    wait_until(lambda: trained() or job.poll() is not None, seconds=300)
    assert job.poll() is None, (tmp_path / "first.log").read_text()[-3000:]
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=300) == 0, (tmp_path / "first.log").read_text()[-3000:]
    assert (tmp_path / "scancel.log").read_text() == "--signal=TERM 77\n"
    assert (tmp_path / "scontrol.log").read_text() == "requeue 77\n"
    saved = int((folder / "checkpoints" / "latest").read_text().removeprefix("step_"))
    steps = [row["step"] for row in rows_of(folder)]
    assert steps[-1] == saved < 500

    assert start(saved + 1, tmp_path / "second.log").wait(timeout=300) == 0
    assert [row["step"] for row in rows_of(folder)] == list(range(saved + 2))
    assert (tmp_path / "scontrol.log").read_text() == "requeue 77\n"


@pytest.mark.process
def test_a_job_that_fails_is_not_queued_again(cluster, tmp_path):
    own = {"HOSTS": "127.0.0.1", "SLURM_NNODES": "1", "GPUS": "1", "PORT": str(free_port()), "MODEL": "no_such_folder"}
    done = subprocess.run(["bash", str(CLUSTERS / "train.slurm")], env=cluster | own, cwd=ROOT, capture_output=True)
    assert done.returncode not in (0, 130)
    assert not (tmp_path / "scontrol.log").exists()


def test_the_ray_job_starts_ray_on_every_node_and_then_the_trainer(cluster, tmp_path):
    """Two nodes of 8 GPUs: four for the trainer, three engines for each of its processes."""
    said = tmp_path / "arguments"
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n')
    (tmp_path / "torchrun").chmod(0o755)
    own = {"HOSTS": "node0 node1", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    subprocess.run(["bash", str(CLUSTERS / "ray.slurm"), "trainer.seed=7"], env=cluster | own, cwd=ROOT, check=True)
    steps = (tmp_path / "srun.log").read_text().splitlines()
    assert [line.split()[3] for line in steps] == ["--nodelist=node0", "--nodelist=node1", "--nodelist=node0"]
    head, worker = sorted((tmp_path / "ray.log").read_text().splitlines(), key=lambda line: "address" in line)
    assert head == "4,5,6,7 start --head --block --port 6379"
    assert worker.split()[-4:] == ["start", "--block", "--address", "node0:6379"]
    given = said.read_text().splitlines()
    assert given[:3] == ["--standalone", "--nproc_per_node", "4"]
    assert "actor_rollout_ref.rollout.engines=3" in given
    assert "actor_rollout_ref.rollout.ray.address=node0:6379" in given
    assert given[-1] == "trainer.seed=7"


@pytest.mark.run
def test_a_checkpoint_has_the_bytes_that_the_page_says(finished_run):
    """4 bytes a parameter for the LoRA, 8 for the moments, and little else."""
    folder = finished_run.root / "checkpoints" / "step_2"
    with safe_open(folder / ADAPTER, framework="pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  # no mapping
    total = sum(file.stat().st_size for file in folder.iterdir())
    assert 0 < total - 12 * parameters < 100_000


def test_the_table_of_checkpoints_is_arithmetic():
    """Parameters x (12 bytes, or 16 with an average), and the saves of the script."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    rows = re.findall(r"^\| `(run_\w+\.sh)` \| ([\d,]+) \| ([\d.]+) \| (\d+) of (\d+) \| (\d+) \|$", page, re.M)
    assert len(rows) == 4
    shared = (ROOT / "examples/flowgrpo_trainer/lora_rollout_corr.sh").read_text()
    for script, parameters, one, every, steps, whole in rows:
        text = (ROOT / "examples" / "flowgrpo_trainer" / script).read_text()
        text = text if "save_freq" in text else shared
        size = int(parameters.replace(",", "")) * (16 if "ema_decay" in text else 12) / 1e9
        assert f"trainer.save_freq={every} " in text
        assert f"trainer.total_training_steps={steps} " in text
        assert round(size, 1) == float(one), script
        assert round(size * int(steps) / int(every)) == int(whole), script


def test_every_file_is_on_the_page():
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert [file.name for file in CLUSTERS.iterdir() if f"examples/clusters/{file.name}" not in page] == []
