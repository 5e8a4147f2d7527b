"""More is asked than the cluster has: a table of both and exit code 2, never a wait."""

from __future__ import annotations

from training_runs import Command


def test_more_cpus_than_there_are_gives_a_table_and_no_hang(command: Command) -> None:
    output = command.run("config=grpo_tiny", "training.ranks=3", "placement.trainer_cpus=400", code=2)
    assert "too small" in output and "Traceback" not in output
    assert "3 x trainer    CPU 400 each" in output
    assert "1 x engine     CPU 0.5 each" in output
    asked, _, present = output.partition("present:")
    assert asked and "CPU" in present, "what the cluster has"
    assert "placement.trainer_cpus" in output, "what to change"
    assert "run: " not in output


def test_ray_address_where_nothing_answers_is_named(command: Command) -> None:
    output = command.run("config=grpo_tiny", "placement.ray_address=127.0.0.1:1", code=2)
    assert "127.0.0.1:1" in output and "placement.ray_address" in output
