"""Progress of many runs: a screen that is drawn again and again, or a line for each change."""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from common.record.run_folder import read_metrics

UNFINISHED = ("running", "queued", "waiting")


class Screen:
    """Runs that are finished, running, waiting and failed, and the time left."""

    def __init__(self, kinds: Mapping[Path, str], *, is_apart: bool) -> None:
        """Take the runs by their folders; those of one kind take about as long. All wait.

        What runs apart from this process does not show its output here: in a terminal there is
        room for a screen.
        """
        self.kinds, self.states = kinds, dict.fromkeys(kinds, "waiting")
        self.is_live = is_apart and sys.stdout.isatty()
        self.begun = time.monotonic()
        self.started: dict[Path, float] = {}
        self.seconds: dict[str, list[float]] = defaultdict(list)  # by kind

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the screen until the block ends."""
        from rich.live import Live

        if self.is_live:
            with Live(get_renderable=self.table, refresh_per_second=1):
                yield
        else:
            yield

    def note(self, folder: Path, state: str) -> None:
        """Take a run's state; without a screen a new one is printed, with the counts."""
        if state == self.states[folder]:
            return
        self.states[folder] = state
        if state == "running":
            self.started.setdefault(folder, time.monotonic())
        elif state == "finished" and folder in self.started:  # else it was too quick to be seen
            self.seconds[self.kinds[folder]].append(time.monotonic() - self.started[folder])
        if not self.is_live:
            print(f"{folder}: {state} ({self.line()})", flush=True)

    def those(self, state: str) -> list[Path]:
        """The runs in a state."""
        return [folder for folder, other in self.states.items() if other == state]

    def line(self) -> str:
        """Counts and times. A run takes as long as those of its kind, or as all, on average."""
        counts, now = Counter(self.states.values()), time.monotonic()
        finished = counts["finished"] + counts["finished before"]
        texts = [f"{finished} of {len(self.states)} finished"]
        texts += [f"{counts[s]} {s}" for s in (*UNFINISHED, "failed") if counts[s]]
        texts.append(f"{(now - self.begun) / 60:.0f} min so far")
        if every := list(chain.from_iterable(self.seconds.values())):
            left = 0.0
            for folder, state in self.states.items():
                if state in UNFINISHED:
                    whole = mean(self.seconds.get(self.kinds[folder], every))
                    left += max(0.0, whole - (now - self.started.get(folder, now)))
            texts.append(f"about {left / max(1, counts['running']) / 60:.0f} min left")
        return ", ".join(texts)

    def table(self) -> Any:
        """The line, and the runs that have failed or are running."""
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, show_header=False)
        for shown in ("failed", "running"):
            for folder in self.those(shown):
                steps = [line["step"] for line in read_metrics(folder) if "step" in line]
                table.add_row(str(folder), shown, f"step {steps[-1]}" if steps else "")
        return Group(self.line(), table)
