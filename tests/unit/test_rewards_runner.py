"""Reward functions in worker processes: every failure has a name, is never 0, and costs only its own trajectory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpost.config.schema import RewardConfig
from rlpost.rewards import RewardRunner
from rlpost.types import ConfigError, InfrastructureError, RewardItem, RewardOutcome

FUNCTIONS = '''
import asyncio, os, signal, subprocess, sys, time
import numpy as np
from rlpost.rewards import RewardResult

def by_command(prompt, completion, **fields):
    """Does what the completion says."""
    if completion == "raise":
        raise KeyError("user bug")
    if completion == "exit":
        sys.exit(0)
    if completion == "spin":
        while True:
            pass
    if completion == "sleep":
        time.sleep(1000)
    if completion == "os._exit":
        os._exit(3)
    if completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "told to end":
        os.kill(os.getpid(), signal.SIGTERM)
        return 1.0
    if completion == "program told to end":
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        program.terminate()
        return float(program.wait(20) == -signal.SIGTERM)
    if completion == "gave up":
        raise TimeoutError("sandbox busy")
    if completion == "print":
        print("noise on stdout", flush=True)
        os.write(1, bytes(range(256)))
        return 1.0
    special = {"nan": float("nan"), "inf": float("-inf"), "huge": 10**400, "text": "1.0", "list": [1.0], "none": None, "true": True,
               "numpy": np.float32(0.5), "numpy int": np.int64(3), "array": np.array([1.0, 2.0]),
               "metrics": RewardResult(0.25, {"steps": 7}), "bad metric": RewardResult(1.0, {"steps": "many"}),
               "nan metric": RewardResult(1.0, {"steps": float("nan")}), "none with metrics": RewardResult(None, {"steps": 2})}
    return special[completion] if completion in special else float(completion)

async def async_by_command(prompt, completion, delay=0.0):
    if completion == "block":
        time.sleep(1000)
    if completion == "os._exit":
        os._exit(4)
    if completion == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if completion == "sleep":
        await nested()
    if completion == "raise":
        raise ValueError("async bug")
    if completion == "exit":
        sys.exit(0)
    await asyncio.sleep(delay)
    return float(completion)

async def nested():
    await asyncio.sleep(1000)

waiting = 0
async def together(prompt, completion, count):
    """Returns only when `count` calls wait at the same time."""
    global waiting
    waiting += 1
    while waiting < count:
        await asyncio.sleep(0.01)
    return 1.0

def forgotten(prompt, completion):
    return async_by_command(prompt, completion)

def seen(prompt, completion, answer, completion_tokens, truncated):
    return RewardResult(float(answer), {"tokens": completion_tokens, "truncated": truncated})

def environment(prompt, completion):
    assert "torch" not in sys.modules and "ray" not in sys.modules and "vllm" not in sys.modules
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    import threading
    assert threading.current_thread() is threading.main_thread()
    return RewardResult(1.0, {"pid": os.getpid()})

def child_process(prompt, completion):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=False)
    open(completion, "w").write(str(child.pid))
    time.sleep(1000)
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("user") / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def item(completion: str, number: int = 0, **fields: Any) -> RewardItem:
    return RewardItem(
        trajectory_id=f"t{number}", prompt_id=f"p{number}", prompt="?", completion=completion, fields=fields, tokens=5, truncated=True
    )


def score(
    configs: Sequence[RewardConfig], items: Sequence[RewardItem], workers: int = 1, timeout_s: float = 20.0, **more: Any
) -> list[RewardOutcome]:
    async def run() -> list[RewardOutcome]:
        async with RewardRunner(configs, workers=workers, timeout_s=timeout_s, **more) as runner:
            return await asyncio.wait_for(runner.score(items), 60)

    return asyncio.run(run())


def completions(*texts: str) -> list[RewardItem]:
    return [item(text, number) for number, text in enumerate(texts)]


def test_each_kind_of_failure_has_its_name_and_is_never_zero(functions: str) -> None:
    expected = {
        "raise": "raised", "exit": "raised", "gave up": "timeout", "nan": "not_a_number", "inf": "not_a_number", "huge": "not_a_number",
        "text": "wrong_type", "list": "wrong_type", "array": "wrong_type", "bad metric": "wrong_type", "nan metric": "not_a_number",
        "none": "not_scorable", "none with metrics": "not_scorable",
        "os._exit": "worker_died", "segfault": "worker_died",
    }  # fmt: skip
    outcomes = score([RewardConfig(function=f"{functions}:by_command")], completions(*expected))
    assert {text: outcome.failure.kind for text, outcome in zip(expected, outcomes, strict=True) if outcome.failure} == expected
    for number, outcome in enumerate(outcomes):
        assert outcome.value is None and outcome.parts == {"by_command": None}
        assert outcome.failure is not None and outcome.failure.where == "by_command"
        for part in ("by_command", f"{functions}:6", f"prompt p{number}"):
            assert part in outcome.failure.message
    by_text = {text: outcome.failure for text, outcome in zip(expected, outcomes, strict=True) if outcome.failure}
    assert 'raise KeyError("user bug")' in by_text["raise"].traceback and "rlpost/rewards" not in by_text["raise"].traceback
    assert "exit code 3" in by_text["os._exit"].message
    assert "SIGSEGV" in by_text["segfault"].message and "by_command" in by_text["segfault"].traceback


def test_numbers_bools_numpy_scalars_and_results_are_accepted_in_order(functions: str) -> None:
    items = completions("3", "true", "numpy", "numpy int", "metrics", "print", "-1")
    outcomes = score([RewardConfig(function=f"{functions}:by_command")], items)
    assert [outcome.value for outcome in outcomes] == [3.0, 1.0, 0.5, 3.0, 0.25, 1.0, -1.0]
    assert all(type(outcome.value) is float for outcome in outcomes)
    assert outcomes[4].metrics == {"by_command/steps": 7.0}
    assert [outcome.trajectory_id for outcome in outcomes] == [f"t{n}" for n in range(7)]


@pytest.mark.parametrize("hang", ["spin", "sleep"])
def test_hanging_call_times_out_and_the_remaining_items_are_scored(functions: str, hang: str) -> None:
    outcomes = score([RewardConfig(function=f"{functions}:by_command")], completions("1", hang, "2", "os._exit", "3"), timeout_s=0.5)
    assert [outcome.value for outcome in outcomes] == [1.0, None, 2.0, None, 3.0]
    timeout, died = outcomes[1].failure, outcomes[3].failure
    assert timeout is not None and timeout.kind == "timeout" and "by_command" in timeout.traceback and "prompt p1" in timeout.message
    assert died is not None and died.kind == "worker_died"


def test_a_hanging_call_does_not_hold_up_the_event_loop_or_the_other_worker(functions: str) -> None:
    async def run() -> None:
        async with RewardRunner([RewardConfig(function=f"{functions}:by_command")], workers=2, timeout_s=60) as runner:
            hanging = asyncio.create_task(runner.score(completions("sleep")))
            await asyncio.sleep(0.1)
            outcomes = await asyncio.wait_for(runner.score(completions(*map(str, range(20)))), 20)
            assert [outcome.value for outcome in outcomes] == [float(n) for n in range(20)]
            assert not hanging.done()
            began = time.monotonic()
        assert time.monotonic() - began < 10  # closing does not wait for the call's deadline of 60 s
        with pytest.raises(InfrastructureError, match="closed"):
            await hanging

    asyncio.run(run())


def test_order_is_kept_with_several_workers_and_concurrent_scores(functions: str) -> None:
    async def run() -> None:
        async with RewardRunner([RewardConfig(function=f"{functions}:by_command")], workers=2, timeout_s=20) as runner:
            batches = [[str(10 * batch + n) for n in range(7)] for batch in range(6)] + [[]]
            results = await asyncio.gather(*(runner.score(completions(*batch)) for batch in batches))
            assert [[outcome.value for outcome in result] for result in results] == [[float(text) for text in batch] for batch in batches]

    asyncio.run(run())


def test_several_rewards_are_summed_by_weight_and_one_failure_fails_the_sum(functions: str) -> None:
    configs = [
        RewardConfig(function=f"{functions}:by_command", weight=2.0),
        RewardConfig(function="exact_match", weight=-0.5),
        RewardConfig(function=f"{functions}:async_by_command", name="judge", weight=1.0),
    ]
    answers = {"1": "1", "3": "1", "raise": "raise", "none": "x"}
    outcomes = score(configs, [item(text, number, answer=answer) for number, (text, answer) in enumerate(answers.items())])
    assert outcomes[0].value == pytest.approx(2.5) and outcomes[0].parts == {"by_command": 1.0, "exact_match": 1.0, "judge": 1.0}
    assert outcomes[1].value == pytest.approx(9.0)
    assert outcomes[2].value is None and outcomes[2].parts == {"by_command": None, "exact_match": 1.0, "judge": None}
    # by_command answered None and judge raised: the fault is reported, not the None.
    assert outcomes[3].failure is not None and (outcomes[3].failure.kind, outcomes[3].failure.where) == ("raised", "judge")


def test_reward_models_among_the_configuration_and_the_tokens_for_them_stay_out_of_the_workers(functions: str) -> None:
    """Weights and names must not shift by the models; and tokens of a million trajectories are not for a pipe."""
    configs = [
        RewardConfig(model="somewhere/rm", weight=100.0),
        RewardConfig(function=f"{functions}:by_command", weight=3.0),
        RewardConfig(model="elsewhere", weight=1000.0),
        RewardConfig(function="length_penalty", name="length", options={"limit": 4}, weight=2.0),
    ]
    unpicklable = np.array([lambda: None], dtype=object)
    [outcome] = score(configs, [replace(item("2.0"), trajectory_tokens=unpicklable)])
    assert outcome.failure is None and outcome.parts == {"by_command": 2.0, "length": -1.0}
    assert outcome.value == 3.0 * 2.0 - 2.0 * 1.0


def test_models_alone_need_no_runner(functions: str) -> None:
    with pytest.raises(ConfigError, match="no reward function is configured"):
        RewardRunner([RewardConfig(model="somewhere/rm")], workers=1, timeout_s=1.0)


def test_async_calls_of_a_batch_run_at_the_same_time(functions: str) -> None:
    outcomes = score([RewardConfig(function=f"{functions}:together", options={"count": 16})], completions(*"x" * 16))
    assert [outcome.value for outcome in outcomes] == [1.0] * 16


def test_async_failures_are_named_and_a_slow_call_costs_only_itself(functions: str) -> None:
    outcomes = score(
        [RewardConfig(function=f"{functions}:async_by_command")], completions("1", "sleep", "raise", "stubborn", "exit", "2"), timeout_s=0.5
    )
    assert [outcome.value for outcome in outcomes] == [1.0, None, None, None, None, 2.0]
    kinds = [outcome.failure.kind if outcome.failure else None for outcome in outcomes]
    assert kinds == [None, "timeout", "raised", "timeout", "raised", None]
    slow = outcomes[1].failure
    assert slow is not None and "in nested" in slow.traceback and "prompt p1" in slow.message


def test_async_call_that_blocks_or_kills_the_worker_is_found_among_concurrent_ones(functions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.rewards.runner.ASYNC_GRACE_S", 0.3)
    config = RewardConfig(function=f"{functions}:async_by_command", options={"delay": 0.05})
    outcomes = score([config], completions("1", "block", "2", "os._exit", "3"), timeout_s=0.3)
    assert [outcome.value for outcome in outcomes] == [1.0, None, 2.0, None, 3.0]
    kinds = [outcome.failure.kind if outcome.failure else None for outcome in outcomes]
    assert kinds == [None, "timeout", None, "worker_died", None]


def test_sync_function_that_forgets_await_gets_a_hint(functions: str) -> None:
    (outcome,) = score([RewardConfig(function=f"{functions}:forgotten")], completions("1"))
    assert outcome.failure is not None and outcome.failure.kind == "wrong_type" and "async def" in outcome.failure.message


def test_fields_token_count_and_truncation_reach_the_function(functions: str) -> None:
    config = RewardConfig(function=f"{functions}:seen")
    with_answer, without = score([config], [item("x", 0, answer="4", other=1), item("x", 1, other=1)], field_names={"answer", "other"})
    assert with_answer.value == 4.0 and with_answer.metrics == {"seen/tokens": 5.0, "seen/truncated": 1.0}
    assert without.failure is not None and without.failure.kind == "raised" and "requires answer" in without.failure.message


def test_field_that_cannot_be_pickled_costs_only_its_item(functions: str) -> None:
    items = [item("1", 0), item("2", 1, bad=lambda: 0), item("3", 2)]
    outcomes = score([RewardConfig(function=f"{functions}:by_command")], items * 4)
    assert [outcome.value for outcome in outcomes] == [1.0, None, 3.0] * 4
    assert outcomes[1].failure is not None and "pickle" in outcomes[1].failure.traceback


def test_workers_load_nothing_heavy_see_no_gpu_and_run_in_the_main_thread(functions: str) -> None:
    outcomes = score([RewardConfig(function=f"{functions}:environment")], completions("x"))
    assert outcomes[0].value == 1.0, outcomes[0].failure
    assert outcomes[0].metrics["environment/pid"] != os.getpid()


def test_math_verify_runs_in_a_worker(functions: str) -> None:
    items = [item("so it is \\boxed{0.5}", 0, answer="\\frac{1}{2}"), item("$x^2$", 1, answer="x^2+1"), item("\\frac{", 2, answer="3")]
    assert [outcome.value for outcome in score([RewardConfig(function="math_verify")], items)] == [1.0, 0.0, 0.0]


def test_function_that_does_not_fit_is_refused_at_start(functions: str) -> None:
    configs = [RewardConfig(function="length_penalty", options={"limit": 4}), RewardConfig(function=f"{functions}:seen")]
    with pytest.raises(ConfigError, match=r"rewards\[1\].*seen.*functions\.py:\d+.*nothing provides 'answer'.*solution"):
        score(configs, [], field_names={"solution"})


def test_worker_that_cannot_be_replaced_stops_the_run_loudly(tmp_path: Path) -> None:
    file = tmp_path / "vanishes.py"
    file.write_text("import os\ndef f(prompt, completion):\n    os._exit(1)\n")

    async def run() -> None:
        async with RewardRunner([RewardConfig(function=f"{file}:f")], workers=1, timeout_s=20) as runner:
            file.unlink()
            for _ in range(2):  # the score in progress, and every later one
                with pytest.raises(InfrastructureError, match=r"vanishes\.py' does not exist"):
                    await asyncio.wait_for(runner.score(completions("1", "2")), 20)

    asyncio.run(run())


def test_file_that_ends_the_process_on_import_is_an_error_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(InfrastructureError, match="exit code 7"):
        score([RewardConfig(function=f"{tmp_path}/ends.py:f")], [])


def test_two_rewards_of_one_name_are_refused(functions: str) -> None:
    with pytest.raises(ConfigError, match=r"rewards\[0\] and rewards\[1\] are both named 'exact_match'"):
        RewardRunner([RewardConfig(function="exact_match"), RewardConfig(function="exact_match")], workers=1, timeout_s=1)


def test_signal_of_a_scheduler_to_all_processes_of_a_job_fails_no_reward(functions: str) -> None:
    """But a program that a reward has started, and ends itself, ends."""
    outcomes = score([RewardConfig(function=f"{functions}:by_command")], completions("told to end", "0.5", "program told to end"))
    assert [(outcome.value, outcome.failure) for outcome in outcomes] == [(1.0, None), (0.5, None), (1.0, None)]


def test_killing_a_hanging_call_also_kills_the_processes_that_it_started(functions: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (outcome,) = score([RewardConfig(function=f"{functions}:child_process")], completions(str(pid_file)), timeout_s=0.7)
    assert outcome.failure is not None and outcome.failure.kind == "timeout"
    _assert_ends(int(pid_file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux only")
def test_workers_die_with_a_killed_parent_and_the_parents_main_is_not_run_again(functions: str, tmp_path: Path) -> None:
    # A script without an `if __name__` guard: multiprocessing's spawn would run it again in every worker.
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, pathlib
        from rlpost.config.schema import RewardConfig
        from rlpost.rewards import RewardRunner
        from rlpost.types import RewardItem
        with open({str(tmp_path / "runs")!r}, "a") as file:
            file.write("x")
        def item(completion):
            return RewardItem(trajectory_id="t", prompt_id="p", prompt="?", completion=completion)
        async def main():
            async with RewardRunner([RewardConfig(function="{functions}:environment")], workers=1, timeout_s=900) as runner:
                (outcome,) = await runner.score([item("x")])
            async with RewardRunner([RewardConfig(function="{functions}:by_command")], workers=1, timeout_s=900) as runner:
                task = asyncio.create_task(runner.score([item("sleep")]))
                await asyncio.sleep(0.3)
                worker = pathlib.Path(f"/proc/{{__import__('os').getpid()}}/task").glob("*/children")
                print(outcome.value, *(child for path in worker for child in path.read_text().split()), flush=True)
                await task
        asyncio.run(main())
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        value, *workers = parent.stdout.readline().split()
        parent.send_signal(signal.SIGKILL)
    assert value == "1.0" and len(workers) == 1
    _assert_ends(int(workers[0]))
    assert (tmp_path / "runs").read_text() == "x"


def _assert_ends(pid: int) -> None:
    """The process is gone, or a zombie, within ten seconds."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still runs")
