"""The run's plan, written before it begins, and compared with what the run measured at its end."""

from __future__ import annotations

import json
import logging
import math
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.config.derive import Derived
from rlpost.config.schema import RunConfig
from rlpost.observe.metrics import read_metrics
from rlpost.planner.as_json import plan_to_json
from rlpost.planner.hardware import Hardware, find_hardware
from rlpost.planner.measured import Comparison, compare_run, format_comparisons, measure
from rlpost.planner.options import PlanOptions
from rlpost.planner.plan import Plan, make_plan, used_gpus
from rlpost.types import ConfigError

PLAN_FILE = "plan.json"
_log = logging.getLogger(__name__)
MEMORY_TOLERANCE = 0.1
QUERY_TIMEOUT_S = 10.0


@dataclass(kw_only=True)
class PlanCheck:
    """A plan of this run on this machine."""

    config: RunConfig
    plan: Plan
    run_dir: Path
    rows: list[Comparison] = field(default_factory=list)
    """What was compared last."""

    @classmethod
    def start(cls, config: RunConfig, derived: Derived, run_dir: Path, say: Callable[[str], None]) -> PlanCheck | None:
        """Plan, and write plan.json; a resumed run keeps its first. None, and a line that says why, where no plan can be made."""
        try:
            plan = make_plan(config, PlanOptions(), hardware=this_machine(derived))
        except ConfigError as error:
            say(f"no plan of this run: {error}")
            return None
        except Exception as error:  # noqa: BLE001 - whatever a plan trips over, the run is not to stop for it
            _log.warning("no plan of this run", exc_info=True)
            say(f"no plan of this run, by a fault of the planner ({type(error).__name__}: {error}); logs/driver.log has where")
            return None
        path = run_dir / PLAN_FILE
        if not path.exists():
            path.write_text(json.dumps(plan_to_json(plan), indent=1) + "\n", encoding="utf-8")
        if not plan.fits:
            say(f"by its plan this run does not fit into memory: python -m rlpost.plan config={run_dir / 'config.yaml'} says what would")
        return cls(config=config, plan=plan, run_dir=run_dir)

    def errors(self, last: Mapping[str, Any]) -> dict[str, float]:
        """``plan/error_<phase>`` of the run so far; ``last`` is its newest record, not written yet. Empty where nothing can be compared."""
        try:
            records = [*self._written(), last]
            run = measure(self.config, self.plan.derived, self.plan.hardware, records, source=str(self.run_dir))
            self.rows = compare_run(run, self.plan.calibration)
        except ConfigError:
            return {}
        except Exception:  # noqa: BLE001 - as above: this is the run's last step
            _log.warning("the plan could not be compared with the run", exc_info=True)
            return {}
        return {f"plan/error_{row.name}": row.error for row in self.rows}

    def _written(self) -> list[dict[str, Any]]:
        try:
            return read_metrics(self.run_dir)
        except ConfigError:  # observe.trackers has no jsonl
            return []

    def report(self, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """The table at the end of the run; a warning when memory is off."""
        if not self.rows:
            return
        sources = {one.source for one in self.plan.calibration.measured.values()}
        for line in format_comparisons(self.rows, "calibrated" if sources else "assumed speeds").splitlines():
            say(line)
        if off := [row for row in self.rows if row.unit == "B" and abs(row.error) > MEMORY_TOLERANCE]:
            warn(memory_warning(off, self.run_dir))


def memory_warning(rows: list[Comparison], run_dir: Path) -> str:
    """What was planned and what was used."""
    what = ", ".join(f"{row.name} {row.predicted / 2**30:.2f} GiB planned, {row.measured / 2**30:.2f} used" for row in rows)
    return f"{what}: more than {MEMORY_TOLERANCE:.0%} off; python -m rlpost.plan calibrate {run_dir} makes later plans better"


def this_machine(derived: Derived) -> Hardware:
    """The hardware of this run: the CPU, or the GPUs that nvidia-smi shows here, in as many equal nodes as the run needs.

    Raises ConfigError when no GPU is visible here, or its kind is not known.
    """
    if derived.device == "cpu":
        return find_hardware(hardware="cpu")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"nvidia-smi does not answer on this machine ({error}), so its GPUs are not known") from error
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if not names:
        raise ConfigError("nvidia-smi lists no GPU on this machine")
    return find_hardware(gpu=names[0].removeprefix("NVIDIA "), gpus=len(names), nodes=math.ceil(used_gpus(derived) / len(names)))
