"""Outcomes of runs: units, reading them from results, means over seeds with Student's interval.

The interval takes the seeds' results as a sample from a normal distribution. It covers the draw of
initialisation, row order and sampling noise, not that of the evaluation
rows, which all seeds share.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common.evaluation.accuracy import Interval, finite_vector
from common.evaluation.intervals import t_quantile
from common.evaluation.records import RESULTS
from common.evaluation.results import Rates, System, read_results
from common.record.run_folder import ENVIRONMENT, read_config, read_metrics
from common.report.blocks import Block, Section, Table
from common.report.page import write_page
from common.report.tables import ends_cell, interval_cell


@dataclass(frozen=True)
class Outcome:
    """A number that runs are judged by."""

    label: str
    unit: str
    scale: float = 1.0  # from what is recorded to the unit

    @property
    def is_share(self) -> bool:
        """Whether its values are between 0 and 100."""
        return self.scale == 100

    @property
    def heading(self) -> str:
        """Of its column in a table."""
        return f"{self.label}, {self.unit}"


# `judged/JUDGE`: the mean reward by a judge of evaluate.py; `judged/CHECK/pass@1`: a pass rate
JUDGED = "judged/"
# Of evaluate.py's results.json; any other name is a metric, of which the run's last value counts.
OUTCOMES = {
    "accuracy": Outcome("accuracy on held-out pairs", "points", 100),
    "gold_reward": Outcome("gold reward", "points of 100", 100),
    "reward": Outcome("score of the reward model", "units of reward"),
    "kl": Outcome("KL to the reference", "nats per completion"),
    "stop_rate": Outcome("completions that stop", "points", 100),
    "length": Outcome("length of a completion", "tokens"),
}


def about(name: str) -> Outcome:
    """Label, unit and scale of an outcome."""
    if name.startswith(JUDGED):
        judge, _, rate = name.removeprefix(JUDGED).rpartition("/")
        if "@" in rate:
            return Outcome(f"{rate} by {judge}", "points", 100)
        return Outcome(f"reward by {name.removeprefix(JUDGED)}", "units of reward")
    return OUTCOMES.get(name, Outcome(name, "as recorded"))


def systems_by_run(*evaluations: Path) -> dict[str, System]:
    """The systems of evaluate.py's results, by the folder of the run whose `model` it judged."""
    every = [read_results(folder / RESULTS).systems for folder in evaluations]
    return {str(Path(system.path).parent): system for systems in every for system in systems}


def outcome_of(name: str, run_dir: Path, systems: Mapping[str, System]) -> float | None:
    """An outcome of a run, in its unit; None where it was not measured."""
    system = systems.get(str(run_dir))
    values = outcomes_of(system) if system else {}
    if name.startswith(JUDGED):
        # A table of many systems may have named it with its file: `judged/FILE.py:JUDGE`
        end = f":{name.removeprefix(JUDGED)}"
        value = values.get(name, next((values[key] for key in values if key.endswith(end)), None))
    elif name in OUTCOMES:
        value = values.get(name)
    else:
        logged = [r[name] for r in read_metrics(run_dir) if name in r]
        value = logged[-1] if logged else None
    return None if value is None else float(value) * about(name).scale


def outcomes_of(system: System) -> dict[str, float | None]:
    """The values of a system by outcome: `OUTCOMES`, and rewards and pass rates by its judges."""
    means: Rates = {"gold_reward": system.gold_reward, "reward": system.reward}
    means["accuracy"] = system.accuracy.interval if system.accuracy else None
    means |= {f"{JUDGED}{judge}": mean for judge, mean in system.rewards.items()}
    values: dict[str, float | None] = {}
    if sampled := system.generations:
        values = {"stop_rate": sampled.stop_rate, "length": sampled.length}
        means["kl"] = sampled.kl
        for judge, rates in sampled.pass_rates.items():
            means |= {f"{JUDGED}{judge}/{name}": rate for name, rate in rates.items()}
    return values | {name: mean.mean if mean else None for name, mean in means.items()}


def judges(systems: Mapping[str, System]) -> list[str]:
    """Outcomes by judges that are not among `OUTCOMES`. Of a check: its rates (mean = pass@1)."""
    every = list(systems.values())
    model = next((system.name for system in every if system.kind == "reward_model"), "")
    measured = {f"{JUDGED}gold" for system in every if system.gold_reward}
    measured |= {f"{JUDGED}{model}" for system in every if system.reward}
    names = dict.fromkeys(name for system in every for name in outcomes_of(system))
    others = [name for name in names if name.startswith(JUDGED) and name not in measured]
    return [name for name in others if f"{name}/pass@1" not in names]


Measured = dict[tuple[str, str], dict[int, float]]  # by run and outcome: a value by seed


def measured(
    runs: Mapping[int, Mapping[str, Path]],
    systems: Mapping[int, Mapping[str, System]],
    asked: Iterable[str] = (),
) -> Measured:
    """The outcomes of runs by seed and name, in their units: judges', and metrics asked for.

    Of each seed the `systems` are those of its evaluations, by the folder of a run.
    """
    values: Measured = {}
    for seed, run_dirs in runs.items():
        outcomes = dict.fromkeys([*OUTCOMES, *judges(systems[seed]), *asked])
        for (name, run_dir), outcome in product(run_dirs.items(), outcomes):
            value = outcome_of(outcome, run_dir, systems[seed])
            if value is not None:
                values.setdefault((name, outcome), {})[seed] = value
    return values


# ---- over seeds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds."""

    mean: float
    sd: float | None  # unbiased; None for one value
    low: float | None  # of the 95% t interval; None for one value
    high: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0; never for one value."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def spread(self) -> str:
        """Mean and standard deviation."""
        sd = "" if self.sd is None else f" \N{PLUS-MINUS SIGN} {self.sd:.2f}"
        return f"{self.mean:.2f}{sd}"

    @property
    def difference(self) -> str:
        """The mean with its sign and its interval; a star where that excludes 0."""
        cell = interval_cell(Interval(self.mean, self.low, self.high), 1, 2, sign="+")
        return cell + (" *" if self.excludes_zero else "")


def over_seeds(values: Iterable[float], family: int = 1) -> SeedMean:
    """Mean and interval mean +- t sd / sqrt(n) of independent values, at least one (Student 1908).

    With a family the intervals of that many means are simultaneous: all are right in 95% of cases.

    Raises:
        RuntimeError: a value is not finite.
    """
    vector = finite_vector(list(values))  # (n,)
    n, mean = vector.size, float(vector.mean())
    if n == 1:
        return SeedMean(mean, None, None, None, 1)
    sd = float(vector.std(ddof=1))
    half_width = t_quantile(n - 1, family) * sd / math.sqrt(n)
    return SeedMean(mean, sd, mean - half_width, mean + half_width, n)


def seeds_interval(values: Sequence[float], digits: int = 2, *, is_share: bool) -> str:
    """The interval of a mean over seeds, empty where they do not differ.

    Student's interval ignores the ends of a scale: of a share in percent, where it would leave 0 to
    100, the seeds' values are given instead, in round brackets.
    """
    student = over_seeds(values)
    if not student.sd or student.low is None or student.high is None:
        return ""
    if is_share and not 0 <= student.low <= student.high <= 100:
        return f"({', '.join(f'{value:.{digits}f}' for value in values)})"
    return ends_cell(Interval(student.mean, student.low, student.high), 1, digits)


def over(
    values: Iterable[float], digits: int = 2, *, is_share: bool = False, sign: str = ""
) -> str:
    """A mean over seeds with its interval, for a table; equal values have none."""
    values = list(values)
    interval = seeds_interval(values, digits, is_share=is_share)
    return f"{over_seeds(values).mean or 0.0:{sign}.{digits}f} {interval}".strip()


def value_records(values: Measured) -> list[dict[str, Any]]:
    """Every outcome of every run over seeds, ready for JSON."""
    return [
        {"system": run, "metric": outcome, "by_seed": by_seed, "unit": about(outcome).unit}
        | asdict(over_seeds(by_seed.values()))
        for (run, outcome), by_seed in values.items()
    ]


# ---- results -------------------------------------------------------------------------------------


def write_results(
    file: Path,
    record: Mapping[str, Any],
    title: str,
    blocks: Sequence[Block],
    facts: Mapping[str, str],
    run_dirs: Iterable[Path],
) -> None:
    """Write the record and the page, with the runs' commits; print the page's tables."""
    environments = (read_config(run_dir, ENVIRONMENT) for run_dir in run_dirs)
    commits = sorted({str(values["git_commit"]) for values in environments if values})
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"git_commits": commits, **record}, indent=1, allow_nan=False) + "\n"
    file.write_text(text, encoding="utf-8")
    short = ", ".join(commit[:16] for commit in commits) or "none"
    write_page(file.parent, title, blocks, {**facts, "commits of the runs": short})
    for block in blocks:
        for table in block.blocks if isinstance(block, Section) else [block]:
            if isinstance(table, Table):
                print(f"\n{table}")
    print(f"\nreport: {file.parent}/report.html")
