"""A chain of stages: tables of means over seeds and of its texts, and a picture."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from common.evaluation.records import REFERENCE, Results
from common.record.jsonl import read_jsonl
from common.record.terminal import NOT_MEASURED
from common.report import evaluation_report, markdown
from common.report.figures import draw_accuracy, draw_reward, held_out, reward_functions
from common.report.plots import save, style, system_colours, titled_figure
from common.report.tables import accuracy_table
from experiments.outcomes import over
from experiments.records import make
from experiments.sweep.effects import DPI

CHAINS = [name for name, part in make.PARTS.items() if "replicate" in part.command]
TITLE = re.compile(r"(?:^TITLE: |words:\n\n)(.+)")  # in the prompts of `scitldr`, `one-sentence`
COLUMNS = {  # of the means over seeds: heading, scale, digits
    "accuracy": ("accuracy %", 100, 1),
    "gold": ("gold reward", 1, 3),
    "model": ("RM score", 1, 2),
    "wins": ("RM prefers it to the reference at equal length %", 100, 1),
    "rouge_l": ("ROUGE-L", 100, 1),
    "kl": ("KL", 1, 2),
    "length": ("length", 1, 1),
    "stop_rate": ("stop %", 100, 1),
}
TRAINED = ("RM score as trained", 1, 2)
DRAWN = ("demo", "scitldr")
SCORES = (
    "{}",
    "{} implicit_reward",
    "{} logp",
)  # the score of a system's accuracy: the first found


def evaluations(part: str) -> dict[str, Results]:
    """The results of evaluation, by seed."""
    files = sorted((make.RECORDS / part).glob("seed_*/evaluation/results.json"))
    return {
        file.parents[1].name.removeprefix("seed_"): Results(**json.loads(file.read_text()))
        for file in files
    }


def measured(results: Results) -> dict[str, dict[str, Any]]:
    """The values of reference completions, every system, and baselines that need no model."""
    systems = sorted(results.systems, key=lambda s: s.get("minutes") is not None)
    models = reward_models(systems)
    functions = ["gold", *reward_functions(systems)]
    references = results.reference_completions
    compared = (results.comparison or {}).get("systems", [])
    lines = {}
    for system in [
        *([{**references, "name": REFERENCE}] if references else []),
        *systems,  # first those without a run: the model that the chain starts from
        *(own for own in compared if own["name"] in ("longer wins", "ROUGE-L wins")),
    ]:
        rewards = system.get("rewards") or {}
        wins = [
            rate["length_controlled"]
            for rate in results.win_rates or []
            if (rate["a"], rate["b"]) == (system["name"], REFERENCE) and rate["judge"] in models
        ]
        lines[system["name"]] = {
            **{key: system.get(key) for key in COLUMNS},
            **{name: rewards.get(name) for name in functions},
            "model": next((rewards[name] for name in models if name in rewards), None),
            "wins": next(iter(wins), None),
        }
    return lines


def means(part: str) -> str:
    """A line per system: means over seeds."""
    seeds = [measured(results) for results in evaluations(part).values()]
    names = list(seeds[0])
    keys = [*COLUMNS, *(key for values in seeds[0].values() for key in values)]
    heads, rows = [], [[name] for name in names]
    for key in dict.fromkeys(keys):
        found = [[number(values[name].get(key)) for values in seeds] for name in names]
        if any(value is not None for values in found for value in values):
            head, scale, digits = COLUMNS.get(key, (f"reward {key}", 1, 3))
            heads.append(head)
            for row, values in zip(rows, found, strict=True):
                known = [scale * value for value in values if value is not None]
                is_known, is_share = len(known) == len(seeds), scale == 100
                row.append(over(known, digits, is_share=is_share) if is_known else NOT_MEASURED)
    return markdown.table([f"mean of {len(seeds)} seeds [95%]", *heads], rows)


def beside(part: str, base: str, names: Sequence[str]) -> str:
    """Differences of systems to another one of the same seed: means over seeds."""
    shown = ("model", "trained", "rouge_l", "length")
    keys = {key: {**COLUMNS, "trained": TRAINED}[key] for key in shown}
    seeds, rates = [], []
    for seed, results in evaluations(part).items():
        lines = measured(results)
        for name, reward in as_trained(part, seed).items():
            lines[name]["trained"] = reward
        seeds.append(lines)
        models = reward_models(results.systems)
        rates.append([rate for rate in results.win_rates if rate["judge"] in models])
    rows = []
    for name in names:
        cells = []
        for key, (_, scale, digits) in keys.items():
            found = [[number(lines[of].get(key)) for of in (name, base)] for lines in seeds]
            known = [scale * (a - b) for a, b in found if a is not None and b is not None]
            cells.append(over(known, digits) if len(known) == len(seeds) else NOT_MEASURED)
        wins = (next(r for r in own if (r["a"], r["b"]) == (name, base)) for own in rates)
        shares = [100 * rate["length_controlled"]["win_rate"] for rate in wins]
        cells.append(over(shares, 1, is_share=True))
        rows.append([name, *cells])
    heads = [f"compared with {base}", *(head for head, _, _ in keys.values())]
    return markdown.table([*heads, "RM prefers it at equal length %"], rows)


def reward_models(systems: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the reward models among the systems of an evaluation."""
    return [system["name"] for system in systems if system.get("kind") == "reward_model"]


def as_trained(part: str, seed: str) -> dict[str, float]:
    """The mean reward of each system's completions, with GRPO's penalty for not stopping."""
    lines = read_jsonl(make.RECORDS / part / f"seed_{seed}" / "evaluation" / make.REWARDS)
    recipe = yaml.safe_load((make.ROOT / "assets" / "recipes" / part / "grpo.yaml").read_text())
    penalty = recipe["missing_eos_penalty"]
    rewards: dict[str, list[float]] = defaultdict(list)
    for name, completions in (pair for line in lines for pair in line.items()):
        rewards[name] += [
            sum(own["rewards"].values()) if own["stopped"] else penalty for own in completions
        ]
    return {name: mean(found) for name, found in rewards.items()}


def number(value: Any) -> float | None:
    """A number, or the value of a mapping that has its interval too."""
    if isinstance(value, dict):
        value = next(value[key] for key in ("mean", "accuracy", "win_rate") if key in value)
    return None if value is None else float(value)


def of_seed_0(part: str, what: Callable[[Any], Any]) -> str:
    """A table of an evaluation's report."""
    return str(what(evaluations(part)["0"]))


def samples(part: str, number: int) -> str:
    """Summaries of the first abstracts by every system."""
    lines = list(read_jsonl(make.RECORDS / part / "samples.jsonl"))[:number]
    titles = [TITLE.findall(line["prompt"])[0] for line in lines]
    rows = [["author", *(line["reference"]["completion"] for line in lines)]]
    rows += [
        [name, *(text_of(line["systems"][name]) for line in lines)] for name in lines[0]["systems"]
    ]
    return markdown.table(["summary by", *titles], rows)


def text_of(completion: Mapping[str, Any]) -> str:
    """A completion, with a mark where it was cut."""
    return f"{completion['completion']}{'' if completion['stopped'] else ' [...]'}"


def draw(part: str) -> Path:
    """Draw accuracy, with intervals over prompts, and reward of seed 0."""
    results = evaluations(part)["0"]
    assert results.comparison, "an evaluation on pairs"
    compared = {own["name"]: own["accuracy"] for own in results.comparison["systems"]}
    for system in results.systems:
        names = [score.format(system["name"]) for score in SCORES]
        over_prompts = next(compared[name] for name in names if name in compared)
        system["accuracy"] |= {end: over_prompts[f"prompt_{end}"] for end in ("low", "high")}
    colours = system_colours(system["name"] for system in results.systems)
    with style():
        figure = titled_figure(held_out(results).capitalize(), 5, 6.6)
        above, below = figure.subplots(2, 1)
        draw_accuracy(above, results, colours)
        draw_reward(below, results, colours)
        return save(figure, make.ROOT / "assets" / f"{part}.png", DPI)


OF_SEED_0: dict[str, Callable[[Any], Any]] = {
    "systems": evaluation_report.systems_table,
    "accuracy": lambda results: accuracy_table(results.comparison),
}
TABLES: dict[str, Callable[[], str]] = {
    "scitldr.differences": partial(beside, "scitldr", "sft", ["dpo", "grpo"]),
    "scitldr.picture": lambda: "![Accuracy and reward of seed 0](../assets/scitldr.png)",
}
for part in CHAINS:
    TABLES[f"{part}.mean"] = partial(means, part)
    TABLES |= {f"{part}.{name}": partial(of_seed_0, part, f) for name, f in OF_SEED_0.items()}
    TABLES[f"{part}.samples"] = partial(samples, part, 1)
