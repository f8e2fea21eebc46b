"""The numbers that runs are compared by: their names, their units, where they are found."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.experiments.seed_statistics import SeedMean
from common.record.folder import read_environment, read_metrics


@dataclass(frozen=True)
class Outcome:
    """A number that runs are judged by."""

    label: str
    unit: str
    scale: float = 1.0  # from what is recorded to the unit


JUDGED = "judged/"  # and a judge's name: the mean reward that evaluate.py has of that judge
# Of evaluate.py's results.json; any other name is a metric that the run itself has logged last.
OUTCOMES = {
    "accuracy": Outcome("accuracy on held-out pairs", "points", 100),
    "gold_reward": Outcome("gold reward", "points of 100", 100),
    "reward": Outcome("score of the reward model", "units of reward"),
    "kl": Outcome("KL to the reference", "nats per completion"),
    "stop_rate": Outcome("completions that stop", "points", 100),
    "length": Outcome("length of a completion", "tokens"),
}


def about(name: str) -> Outcome:
    """What an outcome is."""
    if name.startswith(JUDGED):
        return Outcome(f"reward by {name.removeprefix(JUDGED)}", "units of reward")
    return OUTCOMES.get(name, Outcome(name, "as recorded"))


def systems_by_run(evaluation_dir: Path) -> dict[str, dict[str, Any]]:
    """What evaluate.py found out, by the folder of the run whose `model` it judged."""
    results = json.loads((evaluation_dir / "results.json").read_text(encoding="utf-8"))
    return {str(Path(system["path"]).parent): system for system in results["systems"]}


def outcome_of(name: str, run_dir: Path, systems: Mapping[str, Mapping[str, Any]]) -> float | None:
    """An outcome of a run, in its unit; None where it was not measured."""
    system = systems.get(str(run_dir), {})
    if name in OUTCOMES or name.startswith(JUDGED):
        rewards = system.get("rewards") or {}
        is_judged = name.startswith(JUDGED)
        value = rewards.get(name.removeprefix(JUDGED)) if is_judged else system.get(name)
        if isinstance(value, dict):  # a mean, or an accuracy, with its interval
            value = value.get("mean", value.get("accuracy"))
    else:
        logged = [r[name] for r in read_metrics(run_dir) if name in r]
        value = logged[-1] if logged else None
    return None if value is None else float(value) * about(name).scale


def judges(systems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Outcomes of the judges that have no name of their own among `OUTCOMES`."""
    found: dict[str, None] = {}
    for system in systems.values():
        rewards = system.get("rewards") or {}
        own = (system.get("gold_reward"), system.get("reward"))
        found |= dict.fromkeys(name for name, value in rewards.items() if value not in own)
    return [f"{JUDGED}{name}" for name in found]


def spread(mean: SeedMean) -> str:
    """Mean and standard deviation over seeds."""
    sd = "" if mean.sd is None else f" \N{PLUS-MINUS SIGN} {mean.sd:.2f}"
    return f"{mean.mean:.2f}{sd}"


def commits(run_dirs: list[Path]) -> list[str]:
    """The commits that the runs were made with, as they recorded them."""
    found = (read_environment(run_dir) for run_dir in run_dirs)
    return sorted({str(environment["git_commit"]) for environment in found if environment})
