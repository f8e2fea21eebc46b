"""A run that loses a rank or is stopped at random moments ends in the bits of one that never did.

The long form, over all stages and with kills of all ranks, is `python -m tests.fault_drill`.
"""

import random
from pathlib import Path

import fault_drill


def test_a_run_that_lost_a_rank_and_one_that_was_stopped_end_as_if_they_had_not(
    tmp_path: Path,
) -> None:
    fault_drill.prepare(tmp_path)
    case = fault_drill.Case("grpo", 2, fault_drill.MOVING)
    tally = fault_drill.drill(case, ["one", "stop"], tmp_path, random.Random(0))
    assert not tally.wrong
    assert (tally.kills, tally.stops) == (1, 1)
    assert (tally.identical, tally.lost_steps) == (tally.runs, 0)
