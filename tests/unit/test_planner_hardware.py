"""Machines: data sheets against facts that hold among them, and every slip with names and units that a user makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.planner import hardware as module
from rlpost.planner.hardware import KINDS, find_hardware
from rlpost.planner.quantities import GB, GIB, MIB
from rlpost.types import ConfigError

BY_NAME = {kind.accelerator.name: kind.accelerator for kind in KINDS}


def refused(words: list[str], **given: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        find_hardware(**given)
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, str(raised.value)


# ---- data sheets -----------------------------------------------------------------------------------------------------

NVIDIA_SMI_MIB = {
    "A100-40GB": 40960, "A100-80GB": 81920, "H100-80GB": 81559, "H100-PCIe": 81559, "H200-141GB": 143771, "H20-96GB": 97871,
    "B200": 183359, "L40S": 46068, "L4": 23034, "A10G": 23028, "RTX-4090": 24564, "RTX-3090": 24576,
}  # fmt: skip
"""Total of the memory column in logs that were published; seven of them also in modal-labs/modal-client#2797."""

SPARSE_TFLOPS = {"A100-40GB": 624, "A100-80GB": 624, "H100-80GB": 1979, "H100-PCIe": 1513, "H200-141GB": 1979, "L4": 242}
"""What the data sheets print for bfloat16, "with sparsity"."""

DENSE_TFLOPS = {"L40S": 362, "H20-96GB": 148, "B200": 2250, "A10G": 70, "RTX-4090": 165.2, "RTX-3090": 71}
"""Data sheets, white papers (float32 sums) and torchtitan's get_peak_flops (B200)."""


def test_memory_is_what_the_driver_reports_and_not_the_gigabytes_of_the_name() -> None:
    assert {name: one.memory_bytes // MIB for name, one in BY_NAME.items()} == NVIDIA_SMI_MIB


def test_no_rate_is_the_one_with_sparsity() -> None:
    expected = {**{name: rate / 2 for name, rate in SPARSE_TFLOPS.items()}, **DENSE_TFLOPS}
    assert {name: one.flops_per_second / 1e12 for name, one in BY_NAME.items()} == pytest.approx(expected, rel=0.005)


def test_fp8_is_twice_bfloat16_where_the_hardware_has_it_and_absent_on_ampere() -> None:
    assert {name for name, one in BY_NAME.items() if one.fp8_flops_per_second is None} == {"A100-40GB", "A100-80GB", "A10G", "RTX-3090"}
    for one in BY_NAME.values():
        if one.fp8_flops_per_second is not None:
            assert one.fp8_flops_per_second == pytest.approx(2 * one.flops_per_second, rel=0.02)


@pytest.mark.parametrize(
    ("name", "terabytes"),
    [("A100-40GB", 1.555), ("A100-80GB", 2.039), ("H100-80GB", 3.35), ("H100-PCIe", 2.0), ("H200-141GB", 4.8), ("H20-96GB", 4.0),
     ("B200", 8), ("L40S", 0.864), ("L4", 0.3), ("A10G", 0.6), ("RTX-4090", 1.008), ("RTX-3090", 0.936)],
)  # fmt: skip
def test_memory_bandwidth_is_the_data_sheets_in_bytes_a_second(name: str, terabytes: float) -> None:
    assert BY_NAME[name].bytes_per_second == pytest.approx(terabytes * 1e12)


def test_what_is_assumed_of_a_bus_is_no_more_than_the_link() -> None:
    for kind in KINDS:
        assert kind.bus <= kind.link, kind.accelerator.name


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "nodes", "gpus_per_node"),
    [
        ("h100-8", "H100-80GB", 1, 8),
        ("H100-80GB-8", "H100-80GB", 1, 8),
        ("h100-32", "H100-80GB", 4, 8),
        ("a100-80gb-16", "A100-80GB", 2, 8),
        ("a100-40gb-1", "A100-40GB", 1, 1),
        ("h100-pcie-4", "H100-PCIe", 1, 4),
        ("rtx-4090-2", "RTX-4090", 1, 2),
        ("b200-72", "B200", 9, 8),
        ("l4-4", "L4", 1, 4),
    ],
)
def test_a_name_gives_kind_and_number_and_above_eight_nodes_of_eight(name: str, kind: str, nodes: int, gpus_per_node: int) -> None:
    found = find_hardware(hardware=name)
    assert (found.accelerator.name, found.nodes, found.gpus_per_node, found.device) == (kind, nodes, gpus_per_node, "gpu")
    assert found.gpus == nodes * gpus_per_node


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        ("H100", "H100-80GB"),
        ("h100-80gb", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("h200", "H200-141GB"),
        ("H20", "H20-96GB"),
        ("l40s", "L40S"),
    ],
)
def test_a_gpu_is_taken_in_any_case_and_as_nvidia_smi_calls_it(gpu: str, kind: str) -> None:
    found = find_hardware(nodes=2, gpus=4, gpu=gpu)
    assert found.accelerator.name == kind
    assert found.name == f"2x4 {kind}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu": "H10", "gpus": 8}, ["gpu=H10", "nearest", "H100-80GB", "RTX-3090", "hardware=cpu"]),
        ({"gpu": "MI300X", "gpus": 8}, ["MI300X", "NVIDIA"]),
        ({"hardware": "h800-8"}, ["hardware=h800-8", "'h800'", "gpu_memory"]),
        ({"hardware": "a100-8"}, ["A100-40GB or A100-80GB"]),
        ({"gpu": "a100", "gpus": 8}, ["A100-40GB or A100-80GB"]),
        ({"hardware": "h100"}, ["how many", "h100-80gb-8"]),
        ({"hardware": "rtx-4090"}, ["how many", "rtx-4090-8"]),
        ({"hardware": "a100-40gb"}, ["how many", "a100-40gb-8"]),
        ({"hardware": "h100-80"}, ["80 GPUs or GPUs of 80 GB"]),
        ({"hardware": "h200-141"}, ["141 GB"]),
        ({"hardware": "h100-12"}, ["12 GPUs", "nodes of 8", "nodes=N gpus=N gpu=h100"]),
        ({"hardware": "h100-0"}, ["at least 1"]),
        ({"hardware": "cpu-0"}, ["cpu-CORES"]),
        ({"hardware": "cpu-two"}, ["cpu-CORES"]),
        ({"hardware": "h100-8", "gpu": "L4"}, ["hardware=h100-8", "gpu=L4", "leave out"]),
        ({"hardware": "h100-8", "gpus": 8}, ["gpus=8", "leave out"]),
        ({"hardware": "cpu", "nodes": 2}, ["nodes=2", "leave out"]),
        ({"hardware": "cpu", "gpu_memory": 80}, ["gpu_memory", "no GPU"]),
        ({"gpu": "cpu", "nvlink": 400}, ["nvlink", "no GPU"]),
        ({}, ["no gpus and gpu", "hardware=cpu"]),
        ({"nodes": 4, "gpu": "H100"}, ["no gpus;", "add gpus"]),
        ({"gpus": 8}, ["no gpu;", "add gpu"]),
        ({"gpus": 32, "gpu": "H100"}, ["gpus=32", "nodes=4 gpus=8"]),
        ({"gpus": 0, "gpu": "H100"}, ["gpus=0"]),
        ({"nodes": -1, "gpus": 8, "gpu": "H100"}, ["nodes=-1"]),
    ],
)
def test_unknown_ambiguous_and_contradictory_machines_are_refused_with_what_to_write(given: dict[str, Any], words: list[str]) -> None:
    refused(words, **given)


# ---- units -----------------------------------------------------------------------------------------------------------

H100S = {"nodes": 4, "gpus": 8, "gpu": "H100"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nvlink": 900}, ["nvlink=450 if 900 is both directions", "450 to others"]),
        ({"nvlink": 3600}, ["nvlink=450 if 3600 is in Gbit/s"]),
        ({"nvlink": 450e9}, ["nvlink=450 if 4.5e+11 is in bytes/s"]),
        ({"nvlink": 600, "gpu": "A100-80GB"}, ["nvlink=300"]),
        ({"nvlink": 450, "gpu": "L40S"}, ["32 to others"]),
        ({"nvlink": 0}, ["nvlink=0"]),
        ({"nvlink": -450}, ["nvlink=-450"]),
        ({"nvlink": float("nan")}, ["nvlink=nan"]),
        ({"net": 3200}, ["net=400 if 3200 is in Gbit/s", "GB/s of a node"]),
        ({"net": 50e9}, ["net=50 if 5e+10 is in bytes/s"]),
        ({"net": 400, "gpus": 4}, ["net=50 if 400 is in Gbit/s", "bring 200"]),
        ({"net": 200, "gpus": 1}, ["net=25 if 200 is in Gbit/s"]),
        ({"net": -1}, ["net=-1"]),
        ({"disk": 2000}, ["disk=2 if 2000 is in MB/s"]),
        ({"disk": 2e9}, ["disk=2 if 2e+09 is in bytes/s"]),
        ({"disk": 0}, ["disk=0"]),
        ({"gpu_memory": 81559}, ["gpu_memory=79.65 if 81559 is in MiB"]),
        ({"gpu_memory": 85520809984}, ["gpu_memory=79.65", "in bytes"]),
        ({"gpu_memory": -80}, ["gpu_memory=-80"]),
    ],
)
def test_a_value_that_only_another_unit_explains_is_refused_with_what_it_would_be(given: dict[str, Any], words: list[str]) -> None:
    refused([f"{next(iter(given))}=", *words], **{**H100S, **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"net": 400}, ["3200 Gbit/s", "net=50"]),
        ({"net": 100}, ["800 Gbit/s", "net=12.5"]),
        ({"nvlink": 0.45}, ["TB/s", "nvlink=450"]),
        ({"disk": 150}, ["MB/s", "disk=0.15"]),
        ({"gpu_memory": 80}, ["79.65 GiB"]),
    ],
)
def test_a_value_that_is_possible_and_looks_like_a_slip_is_used_and_warned_of(given: dict[str, float], words: list[str]) -> None:
    found = find_hardware(**H100S, **given)  # type: ignore[arg-type]
    assert len(found.warnings) == 1
    assert all(word in found.warnings[0] for word in words), found.warnings


@pytest.mark.parametrize(
    "given", [{"nvlink": 480, "net": 50}, {"nvlink": 35, "net": 35}, {"net": 3.125}, {"net": 390}, {"disk": 5}, {"gpus": 1, "net": 90}]
)
def test_values_that_people_measured_pass_without_a_word(given: dict[str, float]) -> None:
    assert find_hardware(**{**H100S, **given}).warnings == ()  # type: ignore[arg-type]


def test_faster_generations_allow_what_is_impossible_before_them() -> None:
    assert find_hardware(gpus=8, gpu="B200", nvlink=840, net=780).warnings == ()
    refused(["nvlink=840"], gpus=8, gpu="H200", nvlink=840)


# ---- what is given, assumed and measured ------------------------------------------------------------------------------


def test_what_was_given_is_used_in_bytes_and_told_from_what_is_assumed() -> None:
    found = find_hardware(**H100S, nvlink=450, net=50, disk=4, gpu_memory=70)  # type: ignore[arg-type]
    assert (found.node_bus_bytes_per_second, found.network_bytes_per_second) == (450 * GB, 50 * GB)
    assert (found.disk_write_bytes_per_second, found.disk_read_bytes_per_second) == (4 * GB, 4 * GB)
    assert found.accelerator.memory_bytes == 70 * GIB
    assert found.given == {
        "accelerator", "nodes", "gpus_per_node", "memory_bytes", "node_bus_bytes_per_second", "network_bytes_per_second",
        "disk_write_bytes_per_second", "disk_read_bytes_per_second",
    }  # fmt: skip


def test_a_name_alone_gives_no_bandwidth() -> None:
    found = find_hardware(hardware="h100-16")
    assert found.given == {"accelerator", "nodes", "gpus_per_node"}
    assert found.network_bytes_per_second < found.node_bus_bytes_per_second


def test_a_name_and_measured_bandwidths_go_together() -> None:
    assert find_hardware(hardware="h100-16", net=90).network_bytes_per_second == 90 * GB


def test_a_collective_over_several_nodes_runs_at_the_network_and_within_one_at_the_bus() -> None:
    found = find_hardware(**H100S, nvlink=450, net=90)  # type: ignore[arg-type]
    assert [found.bus_bytes_per_second(gpus) / GB for gpus in (1, 2, 8, 9, 16, 32)] == [450, 450, 450, 90, 90, 90]


def test_a_network_faster_than_the_bus_does_not_make_it_faster() -> None:
    found = find_hardware(nodes=2, gpus=8, gpu="L4", nvlink=10, net=24)
    assert found.bus_bytes_per_second(16) == 10 * GB
    with pytest.raises(ConfigError, match="gpus=0"):
        found.bus_bytes_per_second(0)


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def fake_machine(monkeypatch: pytest.MonkeyPatch, directory: Path, meminfo: str | None, limit: str | None) -> None:
    for name, content in (("MEMORY_FILE", meminfo), ("CONTAINER_LIMIT_FILE", limit)):
        file = directory / name
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(module, name, file)


MEMINFO = "MemFree:  1 kB\nMemTotal:       16777216 kB\nMemAvailable:  2 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "gib", "measured"),
    [
        (MEMINFO, None, 16, True),
        (MEMINFO, "max\n", 16, True),
        (MEMINFO, f"{6 * GIB}\n", 6, True),
        (MEMINFO, f"{64 * GIB}\n", 16, True),
        (None, f"{6 * GIB}\n", 8, False),
        ("nothing\n", None, 8, False),
    ],
)
def test_a_cpus_memory_is_the_machines_or_the_containers_and_assumed_where_nothing_tells(
    meminfo: str | None, limit: str | None, gib: int, measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_machine(monkeypatch, tmp_path, meminfo, limit)
    found = find_hardware(hardware="cpu-2")
    assert found.host_memory_bytes == found.accelerator.memory_bytes == gib * GIB
    assert ("host_memory_bytes" in found.measured) is measured
    assert found.given == {"cores"}


def test_without_a_number_the_cores_are_those_that_this_process_may_use() -> None:
    found = find_hardware(hardware="CPU")
    assert found.cores == len(os.sched_getaffinity(0))
    assert "cores" in found.measured
    assert found.name == f"cpu-{found.cores}"
    assert (found.device, found.gpus) == ("cpu", 1)
    assert find_hardware(gpu="cpu") == found


def test_a_cores_rates_are_the_same_however_many_there_are() -> None:
    one, many = (find_hardware(hardware=f"cpu-{cores}") for cores in (1, 64))
    assert one.accelerator == many.accelerator
    assert (one.cores, many.cores) == (1, 64)


def test_a_cpu_machines_network_and_disk_can_be_given() -> None:
    found = find_hardware(hardware="cpu-2", net=1.5, disk=0.5)
    assert (found.network_bytes_per_second, found.disk_read_bytes_per_second) == (1.5 * GB, 0.5 * GB)
    assert found.given == {"cores", "network_bytes_per_second", "disk_write_bytes_per_second", "disk_read_bytes_per_second"}
