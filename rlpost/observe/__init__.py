"""What a run tells about itself: where the time went, how the reward moves, every trajectory on disk.

Comes in: one record of numbers a step from the driver, the step's groups, phase changes. Goes out, below the run directory:
``metrics.jsonl``, ``rollouts/``, ``logs/driver.log``, tracker directories; and the console. Imports neither torch, ray nor vllm.

    phases.py    PhaseClock: every second of a step is in exactly one phase
    metrics.py   METRICS, the catalogue of names; summarise_rollouts; read_metrics
    trackers.py  make_trackers: jsonl, console, tensorboard, wandb behind one ``log``
    console.py   Console: a live panel on a terminal, one line a step elsewhere
    formats.py   numbers and durations as short text, the step line, the sparkline
    rollouts.py  RolloutWriter and read_rollouts: the trajectories of a step as JSONL or Parquet
    logs.py      setup_logging: the logger ``rlpost`` into the run directory
    summary.py   summarise_run: what ``python -m rlpost.report`` prints

Guaranteed: the phases of a step add up to the step; a metric name is documented or refused by ``validate_record``; a record is on
disk before ``log`` returns; no tracker but jsonl can end a run; no file of rollouts is ever half written.
"""

from rlpost.observe.console import Console
from rlpost.observe.logs import setup_logging
from rlpost.observe.metrics import METRICS, Metric, markdown_table, read_metrics, summarise_rollouts, validate_record
from rlpost.observe.phases import PHASES, PhaseClock
from rlpost.observe.rollouts import RolloutWriter, read_rollouts
from rlpost.observe.trackers import TRACKERS, Tracker, Trackers, make_trackers

__all__ = [
    "METRICS",
    "PHASES",
    "TRACKERS",
    "Console",
    "Metric",
    "PhaseClock",
    "RolloutWriter",
    "Tracker",
    "Trackers",
    "make_trackers",
    "markdown_table",
    "read_metrics",
    "read_rollouts",
    "setup_logging",
    "summarise_rollouts",
    "validate_record",
]
