"""By default a run is saved every half hour, whatever its steps: so much a kill costs at most.

The clock is a fake that a step moves on; each rank has another, and rank 0's decides. About
`common.checkpoint.checkpointer` and `common.shutdown.signals`.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import SHORT_RUN, launch, run_stages, untimed_lines

from common import distributed
from common.checkpoint import checkpointer, layout
from common.config.stages import SFTConfig
from common.run import Run

LIMIT = 30  # minutes, the default


class Clock:
    """The `time` of the checkpointer; in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def run_on_a_clock(jobs: list[dict[str, Any]], minutes: list[float]) -> list[list[float]]:
    """Run stages whose steps take these minutes in turn: of each when it was saved, in minutes.

    The clock of any rank but the first runs three times as fast.
    """
    by_job = []
    for job in jobs:
        clock, saved = Clock(), list[float]()
        update, save = Run.update, checkpointer.Checkpointer.save

        def take_long(run: Run, clock: Any = clock, update: Any = update) -> None:
            update(run)
            clock.now += 60 * minutes[run.step % len(minutes)] * (3 if distributed.rank() else 1)

        def note(it: Any, step: int, clock: Any = clock, saved: Any = saved, s: Any = save) -> None:
            saved.append((clock.now - 1000) / 60)
            s(it, step)

        with (
            mock.patch.object(checkpointer, "time", clock),
            mock.patch.object(Run, "update", take_long),
            mock.patch.object(checkpointer.Checkpointer, "save", note),
        ):
            run_stages([job])
        by_job.append(saved)
    return by_job


@pytest.fixture(scope="module")
def flags(start_flags: dict[str, str]) -> dict[str, Any]:
    more = {"dataset_test_split": "", "num_train_rows": 16, "self_check": False, "keep_last": 0}
    return SHORT_RUN | start_flags | more | {"max_completion_length": 8, "max_steps": 12}


def steps_in(run: Path) -> list[int]:
    return [layout.step_of(path) for path in reversed(layout.newest_first(run))]


def run(folder: Path, ranks: int, minutes: list[float], flags: dict[str, Any]) -> list[float]:
    job = {"stage": "sft", "flags": flags | {"output_dir": str(folder / "run")}}
    ended = launch(run_on_a_clock, ranks, folder, jobs=[job], minutes=minutes)
    assert ended[0][0] is not None
    return ended[0][0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("minutes", [[10], [7], [4, 9], [0.5]], ids=str)
def test_a_kill_costs_half_an_hour_at_most(
    flags: dict[str, Any], minutes: list[float], ranks: int, tmp_path: Path
) -> None:
    """Of a longer run; a shorter one writes no checkpoint."""
    saved = run(tmp_path, ranks, minutes, flags)
    ends = [sum(minutes[i % len(minutes)] for i in range(n + 1)) for n in range(12)]
    assert (len(saved) > 0) == (ends[-1] > LIMIT)
    losses = [at - before for before, at in zip([0, *saved], [*saved, ends[-1]], strict=True)]
    assert max(losses) <= LIMIT
    assert min(losses[:-1], default=LIMIT) > LIMIT - 2 * max(minutes)  # nor more often than needed
    assert steps_in(tmp_path / "run") == [ends.index(at) + 1 for at in saved]


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_longer_than_that_are_saved_each(flags: Any, ranks: int, tmp_path: Path) -> None:
    """Ranks that exchange no more than before a forward pass learn of it in the second step."""
    run(tmp_path, ranks, [40], flags | {"max_steps": 4})
    assert steps_in(tmp_path / "run") == ([1, 2, 3] if ranks == 1 else [2, 3])


def test_the_saves_change_no_bit_and_can_be_turned_off(flags: Any, tmp_path: Path) -> None:
    results = []
    for number, more in enumerate(({}, {"save_minutes": 0.0}, {"save_minutes": 15.0})):
        folder = tmp_path / str(number)
        folder.mkdir()
        saved = run(folder, 2, [7], flags | more)
        assert len(saved) == (2, 0, 5)[number]
        weights = (folder / "run" / "model" / "model.safetensors").read_bytes()
        results.append((untimed_lines(folder / "run"), weights))
    assert results[0] == results[1] == results[2]
    assert SFTConfig(output_dir="a", model_name_or_path="b").save_minutes == LIMIT


def test_steps_and_minutes_go_together_and_the_newest_are_kept(flags: Any, tmp_path: Path) -> None:
    """What either saved counts for the other; a run that goes on begins to count anew."""
    more = {"save_steps": 5, "keep_last": 2}
    saved = run(tmp_path, 1, [8], flags | more)
    assert saved == [24, 40, 64, 80, 96]  # steps 3, 5, 8, 10, 12
    assert steps_in(tmp_path / "run") == [10, 12]
    more |= {"max_steps": 15, "resume_from_checkpoint": "latest", "save_steps": 0}
    assert run(tmp_path, 1, [8], flags | more) == []
