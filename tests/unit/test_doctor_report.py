"""What the doctor prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rlpost import doctor
from rlpost.diagnosis import machine
from rlpost.diagnosis.report import Finding, Status, exit_code, format_findings, to_json


def finding(status: Status, name: str = "speed", **changes: Any) -> Finding:
    fields = {"area": "disk", "found": "1.5 GB/s", "expected": "50 MB/s", "fix": "" if status == "ok" else "a faster disk"}
    return Finding(name=name, status=status, **{**fields, **changes})


EVERY: tuple[Status, ...] = ("failed", "ok", "warning", "unknown")


def test_failed_findings_stand_last_with_what_was_expected_and_what_to_change() -> None:
    lines = format_findings([finding(status) for status in EVERY]).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ") and line] == ["ok", "unknown", "warning", "failed", "4"]
    place = next(number for number, line in enumerate(lines) if line.startswith("failed"))
    assert [line.strip() for line in lines[place + 1 : place + 3]] == ["expected: 50 MB/s", "fix: a faster disk"]
    assert lines[1].startswith("unknown") and "expected" not in lines[0]
    assert lines[-1] == "4 checks: 1 ok, 1 unknown, 1 warning, 1 failed"


def test_the_table_is_ascii_and_keeps_the_lines_of_a_finding() -> None:
    text = format_findings([finding("failed", found="caf\u00e9\n  2 x trainer")])
    assert text.isascii() and "caf\\xe9" in text
    assert any(line.endswith("2 x trainer") and line.startswith(" ") for line in text.splitlines())
    assert format_findings([]).strip() == "0 checks: 0 ok, 0 unknown, 0 warning, 0 failed"


def test_what_is_the_same_on_many_nodes_is_one_row_that_still_names_them_when_it_is_bad() -> None:
    same = [finding("failed", where=f"node-{index}", values={"x_s": index}) for index in range(3)]
    lines = format_findings([*same, finding("failed", where="node-3", found="0.1 GB/s")]).splitlines()
    rows = [line for line in lines if line.startswith("failed")]
    assert len(rows) == 2 and "node-0 and 2 more" in rows[0] and "node-3" in rows[1]
    assert "nodes: node-0, node-1, node-2" in "\n".join(lines)
    assert lines[-1].startswith("4 checks")


def test_json_has_every_finding_and_the_counts_and_no_number_that_json_has_not() -> None:
    given = [finding("ok", values={"write_bytes_s": 1.5e9, "odd": float("inf")}), finding("failed", where="n"), finding("warning")]
    found = json.loads(json.dumps(to_json(given), allow_nan=False))
    assert (found["failed"], found["warnings"], len(found["findings"])) == (1, 1, 3)
    assert found["findings"][0] == {
        "area": "disk", "name": "speed", "status": "ok", "found": "1.5 GB/s", "expected": "50 MB/s", "fix": "", "where": "",
        "values": {"write_bytes_s": 1.5e9, "odd": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "code"), [([], 0), (["ok"], 0), (["warning", "unknown"], 0), (["ok", "failed"], 1)]
)  # fmt: skip
def test_only_failures_make_the_exit_code_1(statuses: Sequence[Status], code: int) -> None:
    assert exit_code([finding(status) for status in statuses]) == code


# ---- the command -----------------------------------------------------------------------------------------------------


def machine_with(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[Any]:
    """A machine that is found so; the list gets what the checks were asked."""
    asked: list[Any] = []

    def found(needs: Any, say: Any) -> list[Finding]:
        asked.append(needs)
        say("checking ...")
        return list(findings)

    monkeypatch.setattr(machine, "machine_findings", found)
    return asked


def test_the_result_is_on_standard_output_and_progress_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine_with(monkeypatch, finding("failed"))
    assert doctor.main(["--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failed"] == 1
    assert printed.err == "checking ...\n"
    machine_with(monkeypatch, finding("warning"))
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.endswith("1 warning, 0 failed\n")


def test_a_configuration_says_what_is_needed_and_its_warnings_are_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = machine_with(monkeypatch)
    monkeypatch.setattr("rlpost.config.checks.check", lambda config: ["lr is high"])
    assert doctor.main(["config=grpo_tiny", "output_dir=/data/mine", "--json", "training.ranks=3", "placement.device=cpu"]) == 0
    assert (asked[0].directory, len(asked[0].bundles)) == ("/data/mine", 4)
    [warning] = json.loads(capsys.readouterr().out)["findings"]
    assert (warning["area"], warning["status"], warning["found"]) == ("config", "warning", "lr is high")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["config=no_such_config"], "no_such_config"),
        (["config=grpo_tiny", "trainig.ranks=3"], "training"),
        (["clutser"], "clutser"),
        (["cluster", "--expect-gb-s", "-1"], "--expect-gb-s"),
        (["cluster", "--address", "127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_a_wrong_command_is_exit_code_2_with_one_message(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "error: " in printed.err and named in printed.err


@pytest.mark.parametrize(("words", "told"), [([], "exit codes"), (["cluster"], "--expect-gb-s"), (["verify"], "accumulation")])
def test_help_says_what_is_checked(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main([*words, "--help"])
    assert ended.value.code == 0
    assert told in capsys.readouterr().out
