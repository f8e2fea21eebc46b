"""A run that is killed at random moments and restarted is the run that never stopped, to the bit.

The long form, over all stages, is `python -m tests.fault_drill`.
"""

import random
from pathlib import Path

import fault_drill


def test_killed_runs_end_as_if_they_had_not_been_killed(tmp_path: Path) -> None:
    fault_drill.prepare(tmp_path)
    case = fault_drill.Case("grpo", 2, fault_drill.MOVING)
    tally = fault_drill.drill(case, ["one", "stop", "all"], tmp_path, random.Random(0))
    assert not tally.wrong
    assert (tally.kills, tally.stops) == (2, 1)
    assert (tally.identical, tally.lost_steps) == (tally.runs, 0)
