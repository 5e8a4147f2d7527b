"""The sbatch script: it holds the run, says what it was told, gives words unharmed to the command, and writes no secret.

The last part runs the script itself, with small stand-ins for Slurm's commands, Ray and the driver.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rlpost.cluster.layout import ROLE_LABEL, refused_label
from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.jobs.needs import ROLLOUT_GROUP, TRAINER_GROUP, job_needs
from rlpost.jobs.slurm import check, path_warnings, render, template
from rlpost.jobs.slurm_settings import SlurmSettings, seconds_of
from rlpost.types import ConfigError

MULTINODE = ["config=grpo_qwen_multinode"]
TINY = ["config=grpo_tiny"]


@functools.cache
def loaded(*words: str) -> RunConfig:
    return load_config(words).config


def config_of(words: list[str]) -> RunConfig:
    return loaded(*words)


def settings_with(**values: Any) -> SlurmSettings:
    return SlurmSettings(**{"working_directory": "/shared/rlpost", "gpus_per_node": 8, **values})


def rendered(words: list[str] = MULTINODE, **values: Any) -> str:
    return render(config_of(words), words, settings_with(**values))


def directives(text: str) -> list[list[str]]:
    """The options of each component of the job."""
    components: list[list[str]] = [[]]
    for line in re.findall(r"(?m)^#SBATCH (.*)$", text):
        if line == "hetjob":
            components.append([])
        else:
            components[-1].append(line)
    return components


def part(text: str, name: str) -> str:
    return text.partition(f"# >>> {name}\n")[2].partition(f"# <<< {name}\n")[0]


def array(text: str, name: str, environment: dict[str, str] | None = None) -> list[str]:
    """What bash makes of one array of the script's settings."""
    script = f'{part(text, "settings")}\nprintf "%s\\0" "${{{name}[@]}}"'
    done = subprocess.run(
        ["bash", "-euc", script],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", **(environment or {})},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"exclusive": False},
    {"separate_roles": True, "rollout_partition": "l40s", "rollout_gpus_per_node": 4},
    {"container": "nvcr.io/x:1", "container_mounts": ["/data:/data:ro"]},
    {"container": "/images/rlpost.sif", "container_runtime": "apptainer"},
    {"preflight": False, "signal_s": 0, "requeue": False, "export": ["HOME", "HF_TOKEN"]},
]


@pytest.mark.parametrize("values", VARIANTS)
def test_the_script_parses(values: dict[str, Any]) -> None:
    done = subprocess.run(["bash", "-n"], input=rendered(**values), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_template_is_what_the_multinode_config_gives() -> None:
    """So the file that is read and used by hand cannot fall behind."""
    assert template() == rendered(signal_s=1800)


def test_nodes_carry_the_label_that_placement_looks_for() -> None:
    assert f"--labels={ROLE_LABEL}=" in template()
    assert {refused_label("trainer"), refused_label("engine")} == {TRAINER_GROUP, ROLLOUT_GROUP}


def test_slurm_reads_every_directive() -> None:
    """Slurm stops looking at the first line that is neither a comment nor empty."""
    for text in (rendered(), rendered(separate_roles=True)):
        before, _, after = text.partition("\n# <<< header\n")
        assert all(not line or line.startswith("#") for line in before.splitlines())
        assert "#SBATCH --nodes" in before and "\n#SBATCH" not in after


@pytest.mark.parametrize(("words", "nodes"), [([], 4), (["training.ranks=64", "engine.count=32"], 16)])
def test_the_multinode_config_gets_4_and_16_nodes(words: list[str], nodes: int) -> None:
    options = directives(rendered([*MULTINODE, *words]))[0]
    assert f"--nodes={nodes}" in options and "--gpus-per-node=8" in options and "--ntasks-per-node=1" in options


SHOWN: dict[str, tuple[dict[str, Any], str]] = {
    "working_directory": ({"working_directory": "/lustre/me"}, "#SBATCH --chdir=/lustre/me"),
    "log_directory": ({"log_directory": "/lustre/logs"}, "#SBATCH --output=/lustre/logs/%x-%j.log"),
    "job_name": ({"job_name": "night"}, "#SBATCH --job-name=night"),
    "partition": ({"partition": "h100"}, "#SBATCH --partition=h100"),
    "account": ({"account": "team"}, "#SBATCH --account=team"),
    "qos": ({"qos": "high"}, "#SBATCH --qos=high"),
    "constraint": ({"constraint": "ib&h100"}, "#SBATCH --constraint=ib&h100"),
    "time_limit": ({"time_limit": "2-12"}, "#SBATCH --time=2-12"),
    "gpus_per_node": ({"gpus_per_node": 16}, "#SBATCH --gpus-per-node=16"),
    "cpus_per_node": ({"cpus_per_node": 96}, "#SBATCH --cpus-per-task=96"),
    "memory_gib": ({"memory_gib": 900}, "#SBATCH --mem=900G"),
    "nodes": ({"nodes": 6}, "#SBATCH --nodes=6"),
    "exclusive": ({"exclusive": False}, "\nSHARED_NODES=1\n"),
    "separate_roles": ({"separate_roles": True}, "#SBATCH hetjob"),
    "rollout_partition": ({"separate_roles": True, "rollout_partition": "l40s"}, "#SBATCH --partition=l40s"),
    "rollout_constraint": ({"separate_roles": True, "rollout_constraint": "big"}, "#SBATCH --constraint=big"),
    "rollout_gpus_per_node": ({"separate_roles": True, "rollout_gpus_per_node": 4}, "\nGROUP_GPUS=(8 4)\n"),
    "signal_s": ({"signal_s": 333}, "#SBATCH --signal=B:TERM@333"),
    "requeue": ({"requeue": False}, "#SBATCH --no-requeue"),
    "max_requeues": ({"max_requeues": 3}, "\nMAX_REQUEUES=3\n"),
    "export": ({"export": ["HOME", "HF_TOKEN"]}, "#SBATCH --export=HOME,HF_TOKEN"),
    "setup": (
        {"setup": ["module load cuda/13", "source /venv/bin/activate"]},
        "module load cuda/13\nsource /venv/bin/activate\n",
    ),
    "container": (
        {"container": "nvcr.io/x:1"},
        "CONTAINER=(--container-image=nvcr.io/x:1 --container-mounts=/shared/rlpost:/shared/rlpost ",
    ),
    "container_runtime": (
        {"container": "/x.sif", "container_runtime": "apptainer"},
        "INSIDE=(apptainer exec --nv --bind /shared/rlpost:/shared/rlpost --pwd /shared/rlpost /x.sif)",
    ),
    "container_mounts": (
        {"container": "x", "container_mounts": ["/data:/d"]},
        "--container-mounts=/shared/rlpost:/shared/rlpost,/data:/d ",
    ),
    "interface": ({"interface": "ib0"}, "\nINTERFACE=ib0\n"),
    "join_timeout_s": ({"join_timeout_s": 77}, "\nJOIN_TIMEOUT_S=77\n"),
    "preflight": ({"preflight": False}, "\nPREFLIGHT=()\n"),
    "extra": ({"extra": ["--reservation=maintenance"]}, "#SBATCH --reservation=maintenance\n"),
}


OF_LAUNCH = ("elsewhere",)
"""Says what is checked before the job is made (test_launch.py), and nothing about the job."""


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SlurmSettings) if field.name not in OF_LAUNCH])
def test_every_setting_has_its_effect(name: str) -> None:
    values, line = SHOWN[name]
    assert line in rendered(**values)
    assert line not in rendered()


def test_the_components_of_a_heterogeneous_job_are_the_groups_of_the_run() -> None:
    text = rendered(separate_roles=True, partition="h100", rollout_partition="l40s", rollout_gpus_per_node=4)
    trainers, rollouts = directives(text)
    needs = {group.role: group for group in job_needs(config_of(MULTINODE), gpus_per_node=8, separate_roles=True).groups}
    smaller = {group.role: group for group in job_needs(config_of(MULTINODE), gpus_per_node=4, separate_roles=True).groups}
    assert {"--partition=h100", f"--nodes={needs[TRAINER_GROUP].nodes}", "--gpus-per-node=8"} <= set(trainers)
    assert {"--partition=l40s", f"--nodes={smaller[ROLLOUT_GROUP].nodes}", "--gpus-per-node=4"} <= set(rollouts)
    assert array(text, "GROUP_ROLES") == [TRAINER_GROUP, ROLLOUT_GROUP]
    assert array(text, "GROUP_NODES") == [str(needs[TRAINER_GROUP].nodes), str(smaller[ROLLOUT_GROUP].nodes)]
    assert [option for option in rollouts if option.startswith(("--signal", "--output", "--job-name", "--time"))] == []


def test_shared_nodes_are_asked_only_for_what_is_needed() -> None:
    words = [*MULTINODE, "training.ranks=4", "engine.count=1"]
    assert "--gpus-per-node=6" in directives(rendered(words, exclusive=False))[0]
    assert {"--gpus-per-node=8", "--exclusive"} <= set(directives(rendered(words))[0])


def test_larger_rollout_nodes_hold_larger_engines() -> None:
    words = [*MULTINODE, "engine.tensor_parallel=8", "engine.count=2", "training.ranks=16"]
    text = rendered(words, separate_roles=True, gpus_per_node=4, rollout_gpus_per_node=8)
    assert "\nGROUP_NODES=(4 2)\n" in text and "\nGROUP_GPUS=(4 8)\n" in text


def test_given_nodes_that_are_shared_are_asked_only_for_their_part() -> None:
    words = [*MULTINODE, "training.ranks=4", "engine.count=2"]
    assert {"--nodes=2", "--gpus-per-node=4"} <= set(directives(rendered(words, exclusive=False, nodes=2))[0])


def test_a_job_without_names_to_export_says_that_it_gets_all() -> None:
    """sbatch's default, which SBATCH_EXPORT of a site may change."""
    assert "--export=ALL" in directives(rendered())[0]


def test_words_reach_the_command_as_they_were_given() -> None:
    nasty = ['name=it\'s "a" $HOME `id` \\1 \\n', "data.train=/data/with space/*.jsonl"]
    command = array(rendered([*TINY, *nasty], gpus_per_node=0), "COMMAND")
    assert command[:6] == ["python", "-m", "rlpost.train", *TINY, *nasty]


def test_a_requeued_job_resumes_its_own_run() -> None:
    first, again = (array(rendered(), "COMMAND", {"SLURM_RESTART_COUNT": count}) for count in ("0", "1"))
    assert first == again
    assert "resume=auto" in first and first[-1] == "run_dir=/shared/rlpost/runs/grpo-qwen-multinode-7"


def test_a_run_directory_of_the_user_stays() -> None:
    command = array(rendered([*MULTINODE, "run_dir=/shared/mine"]), "COMMAND")
    assert [word for word in command if word.startswith("run_dir=")] == ["run_dir=/shared/mine"]


def test_no_value_of_a_secret_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    text = rendered(export=["HF_TOKEN"], setup=["export WANDB_API_KEY=$(cat ~/.wandb)"])
    assert "--export=HF_TOKEN" in text and "verysecret" not in text


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    ([], {"export": ["HF_TOKEN=hf_abc"]}, r"export has a value for HF_TOKEN.*give the name alone: export=\[HF_TOKEN\]"),
    ([], {"setup": ["export HF_TOKEN=hf_abc"]}, r"sets HF_TOKEN.*export=\[HF_TOKEN\]"),
    ([], {"extra": ["--comment=API_KEY=abc"]}, r"sets API_KEY"),
    ([], {"setup": ["pip install --index-url https://me:hunter2@host/simple x"]}, r"holds a key, or a URL with a password"),
    (["environment.options.api_key=abc"], {}, r"environment.options.api_key reads like a secret.*export=\[NAME\]"),
    ([], {"time_limit": "10", "signal_s": 600}, r"signal_s=600 is not before the end.*time_limit=10 \(600 s\).*lower signal_s"),
    ([], {"signal_s": 70000, "time_limit": "3-0"}, r"sbatch takes at most 65535"),
    ([], {"time_limit": "tomorrow"}, r"time_limit is 'tomorrow', expected MINUTES"),
    ([], {"extra": ["--ntasks=64"]}, r"--ntasks=64, but the job has one task a node"),
    ([], {"extra": ["--array=0-3"]}, r"one task a node"),
    ([], {"extra": ["-N 8"]}, r"set nodes instead"),
    ([], {"extra": ["nice"]}, r"expected an option of sbatch"),
    (["run_dir=runs/mine"], {}, r"run_dir is 'runs/mine', expected an absolute path.*run_dir=/"),
    (["resume=runs/mine"], {}, r"resume is 'runs/mine', expected an absolute path"),
    ([], {"working_directory": "."}, r"working_directory is '.', expected an absolute path"),
    ([], {"log_directory": "/logs/100%"}, r"Slurm replaces what follows a %"),
    ([], {"gpus_per_node": None}, r"gpus_per_node is not given"),
    ([], {"partition": "a\n#SBATCH --uid=0"}, r"partition is .*without spaces"),
    ([], {"job_name": "a b"}, r"job_name is 'a b'"),
    ([], {"rollout_partition": "l40s"}, r"set separate_roles=true"),
    ([], {"separate_roles": True, "nodes": 8}, r"leave nodes out"),
    ([], {"container_mounts": ["/data"]}, r"without a container"),
    ([], {"extra": ["--wait"]}, r"extra has --wait, with which sbatch would wait.*--follow"),
    ([], {"extra": ["-W"]}, r"extra has -W, with which"),
    ([], {"interface": "ib0;id"}, r"interface is 'ib0;id', expected the name of a network interface"),
    ([], {"exclusive": False, "cpus_per_node": 128}, r"exclusive=false with 128 CPUs of a node.*cpus_per_node=100 or less"),
    ([], {"nodes": 3}, r"nodes=3 with 8 GPUs .* do not hold the run: trainer 8 \(1 GPU, 4 CPU\) finds no place.*set nodes=4"),
    ([], {"nodes": 1}, r"engine 4 \(2 GPU, 4 CPU\) finds no place"),
    ([], {"gpus_per_node": 1}, r"engine bundle needs 2 GPUs on one node"),
    ([], {"cpus_per_node": "8"}, r"cpus_per_node is '8' \(text\), expected a whole number"),
]


@pytest.mark.parametrize(("words", "values", "message"), REFUSED)
def test_what_cannot_work_is_refused_with_the_fix(words: list[str], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config_of([*MULTINODE, *words]), settings_with(**values))


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)^2 problems in the settings.*time_limit.*job_name"):
        check(config_of(MULTINODE), settings_with(time_limit="x", job_name="a b"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:15", 1815), ("2:30:00", 9000), ("1-6", 108000), ("1-6:30", 109800), ("1-0:0:1", 86401), ("UNLIMITED", None)],
)
def test_time_limits_are_read_as_sbatch_does(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def test_a_signal_too_late_for_a_step_is_warned_of() -> None:
    config = config_of([*MULTINODE, "checkpoint.every=5"])
    late = check(config, settings_with(signal_s=600), step_s=580)
    assert len(late) == 1 and "leaves 540 s" in late[0] and "take 580 s; set signal_s to 641 or more" in late[0]
    assert check(config, settings_with(signal_s=641), step_s=580) == check(config, settings_with(signal_s=600)) == []
    assert "leaves 0 s before the time limit for a step" in check(config, settings_with(signal_s=60))[0]


def test_a_requeue_without_checkpoints_on_the_way_is_warned_of() -> None:
    warned = check(config_of([*MULTINODE, "checkpoint.every=0"]), settings_with(), step_s=1)
    assert len(warned) == 1 and "checkpoint.every=0" in warned[0]


def test_cores_that_the_driver_shares_with_the_parts_are_warned_of() -> None:
    config = config_of(MULTINODE)
    most = job_needs(config, gpus_per_node=8).groups[0].bundle_cpus + job_needs(config, gpus_per_node=8).head_cpus
    assert check(config, settings_with(cpus_per_node=most)) == []
    warned = check(config, settings_with(cpus_per_node=most - 1))
    assert len(warned) == 1 and f"they share cores; raise cpus_per_node to {most}" in warned[0]


def test_an_environment_that_export_would_lose_is_warned_of() -> None:
    config = config_of(MULTINODE)
    warned = check(config, settings_with(export=["HF_TOKEN"]))
    assert len(warned) == 1 and "set setup=[source .../bin/activate], or add PATH" in warned[0]
    kept: list[dict[str, Any]] = [{"export": ["HF_TOKEN", "PATH"]}, {"setup": ["true"]}, {"container": "x"}]
    assert [check(config, settings_with(**{"export": ["HF_TOKEN"], **values})) for values in kept] == [[], [], []]


def test_settings_of_rollout_nodes_are_refused_for_a_run_without_engines() -> None:
    with pytest.raises(ConfigError, match=r"rollout_partition given, but the run has no rollout engines"):
        check(config_of(["config=dpo_tiny"]), settings_with(gpus_per_node=0, separate_roles=True, rollout_partition="x"))


# ---- what the run reads, found from the job --------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which launch runs, with a configuration and its data."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "rows.jsonl").write_text("{}\n")
    (tmp_path / "here" / "mine.yaml").write_text("base: grpo_tiny\n")
    return tmp_path / "here"


def path_lines(words: list[str], **values: Any) -> list[str]:
    return list(path_warnings(load_config(words).config, words, settings_with(gpus_per_node=0, **values)))


@pytest.mark.parametrize("name", ["./mine.yaml", "mine.yaml", "../here/mine.yaml"])
def test_a_configuration_that_was_named_by_a_path_is_found_from_another_directory(here: Path, name: str) -> None:
    words = [f"config={name}", "schedule.steps=2"]
    text = render(load_config(words).config, words, settings_with(gpus_per_node=0))
    for command in ("COMMAND", "PREFLIGHT"):
        assert array(text, command)[3 + (command == "PREFLIGHT") :][:2] == [f"config={here}/mine.yaml", "schedule.steps=2"]


def test_a_configuration_keeps_the_link_by_which_it_was_named(here: Path) -> None:
    (here.parent / "link").symlink_to(here)
    words = [f"config={here.parent}/link/mine.yaml"]
    assert f"{words[0]} " in render(load_config(words).config, words, settings_with(gpus_per_node=0))


def test_relative_paths_that_the_job_looks_for_elsewhere_are_warned_of(here: Path) -> None:
    (here / "scores.py").write_text("")
    words = ["config=mine.yaml", "data.train=./rows.jsonl", "rewards.0.function=scores:score"]
    assert path_lines(words, working_directory=str(here)) == []
    [line] = path_lines(words)
    assert (
        f"data.train=./rows.jsonl, rewards.0.function=scores.py was checked in {here}, and the job looks for it in /shared/rlpost" in line
    )


def test_a_relative_model_is_warned_of_where_the_job_looks_elsewhere(here: Path) -> None:
    (here / "model").mkdir()
    words = ["config=mine.yaml", "model.path=model"]
    assert path_lines(words, working_directory=str(here)) == []
    assert ["model.path=model" in line for line in path_lines(words)] == [True]


def test_what_is_not_in_the_container_is_warned_of(here: Path) -> None:
    words = ["config=mine.yaml", f"data.train={here}/rows.jsonl", "model.path=/models/x"]
    assert path_lines(words) == []
    [line] = path_lines(words, container="x", container_mounts=["/models:/weights:ro"])
    assert line.startswith(f"config={here}/mine.yaml, ") and line.endswith("is not in the container; add it to container_mounts")
    assert f"data.train={here}/rows.jsonl" in line and "model.path=/models/x" in line
    assert path_lines(words, container="x", container_mounts=["/fast:/models", f"{here}:ro"]) == []


# ---- ports -----------------------------------------------------------------------------------------------------------


NOTHING_LISTENS = "awk() { :; }"
"""In place of the program that reads which ports are in use."""


def ports_of(job: int, node: int = 0, before: str = "") -> set[int]:
    """All ports that Ray is given on one node of a job, as the script's own functions find them; ``before`` are lines of shell."""
    functions = [re.search(rf"(?ms)^{name}\(\) \{{.*?^\}}", template()) for name in ("port_block", "port_options")]
    constants = re.search(r"(?m)^readonly (PORT_FIRST=\S+ PORT_LAST=\S+ PORT_BLOCK=\S+)", template())
    assert constants and all(functions)
    body = "\n".join(found[0] for found in functions if found)
    script = f'{constants[1]}\n{before}\n{body}\nfirst=$(port_block {node})\necho "--port=$first $(port_options "$first")"'
    output = subprocess.run(
        ["bash", "-euc", script], env={**os.environ, "SLURM_JOB_ID": str(job)}, capture_output=True, text=True, check=True
    )
    given = {name: int(value) for name, value in re.findall(r"--([a-z-]+)=(\d+)", output.stdout)}
    low, high = given.pop("min-worker-port"), given.pop("max-worker-port")
    workers = set(range(low, high + 1))
    assert len(workers) >= 100 and len(set(given.values()) - workers) == len(given) == 8
    assert "ray-client-server-port" in given  # 10001 unless told, with which two heads on a node, and other ports, collide
    return workers | set(given.values())


def test_rays_of_jobs_and_nodes_that_share_a_host_get_different_ports() -> None:
    blocks = [ports_of(job, node, NOTHING_LISTENS) for job in (0, 4100, 4101, 4177) for node in (0, 1)]
    assert len(set.union(*blocks)) == sum(len(block) for block in blocks)
    assert min(min(block) for block in blocks) > 10001 and max(max(block) for block in blocks) <= 32767


def test_a_block_with_a_port_in_use_is_left_to_who_uses_it() -> None:
    wanted = ports_of(5200)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", sorted(wanted)[-1]))
        listener.listen()
        assert ports_of(5200).isdisjoint(wanted)


# ---- the script at work, with stand-ins for Slurm, Ray and the driver -------------------------------------------------

STAND_INS = {
    "srun": 'while [[ $1 != bash ]]; do shift; done; exec "$@"',
    "squeue": 'if [[ "$*" == *%T* ]]; then cat "$PLACE/state"; else echo N/A; fi; echo "$*" >>"$PLACE/asked"',
    "scontrol": """
        case $* in
            *hostnames*) echo n1 ;;
            *"show node"*) echo NodeAddr=127.0.0.1 ;;
            *"show job"*) echo "JobId=7 Requeue=${REQUEUE:-1} Restarts=0" ;;
            *) echo "$*" >>"$PLACE/scontrol" ;;
        esac""",
    "scancel": "true",
    "ray": 'echo "$*" >>"$PLACE/ray"; while [[ $1 != -- ]]; do shift; done; shift; "$@"',
    # WAIT_FOR_NODES, the doctor, or the training: until it gets TERM, or for as long as $CODE says nothing.
    "python": """
        case $2 in
            rlpost.train) ;;
            rlpost.doctor) if [[ ${DOCTOR:-0} != slow ]]; then exit "${DOCTOR:-0}"; fi; echo started >>"$PLACE/doctor"; exec sleep 60 ;;
            *) exit 0 ;;
        esac
        trap 'echo TERM >>"$PLACE/signals"; code=${STOPPED:-75}' TERM
        code=${CODE:-}
        echo started >>"$PLACE/started"
        until [[ -n $code ]]; do sleep 0.1; done
        sleep 0.5
        exit "$code" """,
}


class Job:
    """The script of a run on one node, in ``place``, as a process that is signalled as Slurm would."""

    def __init__(self, place: Path, variables: dict[str, str], **values: Any) -> None:
        self.place = place
        (place / "bin").mkdir()
        (place / "logs").mkdir()
        (place / "state").write_text("RUNNING\n")
        for name, body in STAND_INS.items():
            (place / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
            (place / "bin" / name).chmod(0o755)
        text = rendered(TINY, working_directory=str(place), gpus_per_node=0, **values)
        (place / "job.sbatch").write_text(text)
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "grpo_tiny",
            "SLURM_JOB_NODELIST": "n1",
            "SLURMD_NODENAME": "n1",
            "SLURM_PROCID": "0",
        }
        path = f"{place / 'bin'}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", str(place / "job.sbatch")],
            env={"PATH": path, "HOME": str(place), "PLACE": str(place), **slurm, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def told(self, name: str) -> list[str]:
        """What a stand-in wrote down."""
        path = self.place / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_until(self, name: str) -> None:
        """Until a stand-in has written something down."""
        deadline = time.monotonic() + 30
        while not self.told(name):
            assert time.monotonic() < deadline and self.process.poll() is None, f"nothing in {name}"
            time.sleep(0.02)

    def stop(self, when: str = "started") -> None:
        """TERM to the batch script alone, when a stand-in has written something down: ``started``, when the driver runs."""
        self.wait_until(when)
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """The script's exit code and what it said."""
        try:
            output, _ = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, output


@pytest.mark.parametrize("code", [0, 9])
def test_the_code_of_the_driver_is_the_jobs(tmp_path: Path, code: int) -> None:
    job = Job(tmp_path, {"CODE": str(code)})
    ended, output = job.end()
    assert ended == code and f"the driver ended with {code}" in output
    assert job.told("scontrol") == []


def test_a_job_that_is_told_to_stop_tells_the_driver_once_and_is_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, {"SLURM_RESTART_COUNT": "2"})
    job.stop()
    code, output = job.end()
    assert code == 75 and job.told("signals") == ["TERM"], output
    assert job.told("scontrol") == ["requeue 7"]
    assert list((tmp_path / "logs").glob("*.start-*")) == []


def test_a_job_that_slurm_ends_is_neither_told_twice_nor_requeued(tmp_path: Path) -> None:
    """After scancel, or at the end of a pre-emption, every process has got the signal; a second one would end the driver unsaved."""
    job = Job(tmp_path, {})
    (tmp_path / "state").write_text("COMPLETING\n")
    job.stop()
    job.wait_until("asked")
    pid = int(next((tmp_path / "logs").glob("*.start-0/driver.pid")).read_text())
    os.kill(pid, signal.SIGTERM)
    code, output = job.end()
    assert code == 75 and "told to stop" not in output  # what it says when it passes a signal on
    assert job.told("signals") == ["TERM"] and job.told("scontrol") == []


def test_a_job_is_not_requeued_for_ever(tmp_path: Path) -> None:
    job = Job(tmp_path, {"SLURM_RESTART_COUNT": "3"}, max_requeues=3)
    job.stop()
    code, output = job.end()
    assert code == 75 and "MAX_REQUEUES" in output
    assert f"to go on, submit it again with run_dir={tmp_path}/runs/grpo_tiny-7" in output
    assert job.told("scontrol") == []


@pytest.mark.parametrize("variables", [{"REQUEUE": "0"}, {"STOPPED": "2"}])
def test_what_is_stopped_for_good_or_is_the_users_error_is_not_requeued(tmp_path: Path, variables: dict[str, str]) -> None:
    job = Job(tmp_path, variables)
    job.stop()
    code, output = job.end()
    assert (code, job.told("signals")) == (int(variables.get("STOPPED", 75)), ["TERM"]), output
    assert job.told("scontrol") == []


def test_a_job_that_is_told_to_stop_during_the_preflight_does_not_wait_for_it(tmp_path: Path) -> None:
    job = Job(tmp_path, {"DOCTOR": "slow"})
    job.stop("doctor")
    code, output = job.end()
    assert code == 75 and "told to stop before the training" in output and "the preflight failed" not in output
    assert job.told("started") == [] and job.told("scontrol") == ["requeue 7"]


def test_a_failed_preflight_ends_the_job_before_the_training(tmp_path: Path) -> None:
    job = Job(tmp_path, {"DOCTOR": "1", "CODE": "0"})
    assert job.end()[0] == 1
    assert job.told("started") == []


def test_an_allocation_of_another_size_is_refused(tmp_path: Path) -> None:
    """`sbatch --nodes=1` over a script for two."""
    job = Job(tmp_path, {}, nodes=2)
    code, output = job.end()
    assert code == 1 and "the allocation has 1 nodes (n1), but GROUP_NODES asks for 2" in output
    assert job.told("ray") == []


def test_an_interface_without_an_address_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, {}, interface="none0")
    code, output = job.end()
    assert code == 1 and "no IPv4 address of n1 is found on its interface none0" in output
    assert job.told("ray") == []


def test_a_line_of_setup_that_fails_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, {"CODE": "0"}, setup=["source /no/such/activate"])
    code, output = job.end()
    assert code == 1 and "a line of setup failed: source /no/such/activate" in output
    assert job.told("ray") == []


def test_what_a_file_of_setup_tries_in_vain_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("false\nprobe() { false; }\nprobe\ntrue\n")
    job = Job(tmp_path, {"CODE": "0"}, setup=[f"source {tmp_path}/profile"])
    code, output = job.end()
    assert code == 0, output


SHOW_TOKEN = ['trap \'echo "$RAY_AUTH_MODE ${RAY_AUTH_TOKEN:-none}" >"$PLACE/token"\' EXIT']


def test_every_job_has_a_token_of_its_own_for_its_ray(tmp_path: Path) -> None:
    """Nodes that join need the head's; Ray would look for it in each node's home directory."""
    tokens = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        job = Job(tmp_path / name, {"CODE": "0"}, setup=SHOW_TOKEN)
        assert job.end()[0] == 0
        tokens += job.told("token")
    assert all(re.fullmatch("token [0-9a-f]{64}", token) for token in tokens) and len(set(tokens)) == 2


def test_a_token_of_the_user_is_used(tmp_path: Path) -> None:
    job = Job(tmp_path, {"CODE": "0", "RAY_AUTH_TOKEN": "mine"}, setup=SHOW_TOKEN)
    assert job.end()[0] == 0
    assert job.told("token") == ["token mine"]
