"""The tables of README and `docs/` that show records, made from the records.

    python -m tests.results.tables

A page has the place of a table between `<!-- NAME -->` and `<!-- /NAME -->`; NAME is one of
`TABLES`. A record that is not there leaves its table as it is.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from common.evaluation.intervals import interval_cell
from common.experiments.outcomes import over_seeds
from common.record.terminal import NOT_MEASURED
from common.report import chain, markdown
from tests.results.make import RECORDS, ROOT, read_record

PLACE = re.compile(r"(?s)(<!-- ([a-z0-9_.-]+) -->\n)(.*?)(<!-- /\2 -->)")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
METHODS = {"grpo": "GRPO over steps", "best_of_n": "best of n", "dpo": "DPO over beta"}


def write() -> None:
    """Put the tables of what is recorded into the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """A page with its tables as the records have them.

    Raises:
        KeyError: a place has the name of no table.
    """

    def table(place: re.Match[str]) -> str:
        begin, name, old, end = place.groups()
        part = name.partition(".")[0]
        return begin + (f"{TABLES[name]()}\n\n{source(part)}\n" if read_record(part) else old) + end

    return PLACE.sub(table, text)


def source(part: str) -> str:
    """What made a record."""
    record = read_record(part)
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    return (
        f"*`make results PARTS={part}`: {record['minutes']:.0f} minutes, {record['date']}, commit "
        f"{record['git_commit'][:12]}, {record['cpu']}, {record['cores']} cores, {packages}.*"
    )


def read(part: str, file: str) -> Any:
    """A recorded JSON file."""
    return json.loads((RECORDS / part / file).read_text())


# ---- the chain -----------------------------------------------------------------------------------


def systems(part: str) -> str:
    """What evaluation printed of seed 0."""
    return str(chain.systems_table(read(part, "seed_0/evaluation/results.json")))


def by_seed(part: str) -> str:
    """A line per seed and system."""
    rows = []
    for file in sorted((RECORDS / part).glob("seed_*/evaluation/results.json")):
        table = chain.systems_table(json.loads(file.read_text()))
        headers = ["seed", *table.headers]
        rows += [[file.parents[1].name.removeprefix("seed_"), *row] for row in table.rows]
    return markdown.table(headers, rows)


def over_all_seeds(part: str) -> str:
    """Mean, standard deviation and interval over seeds."""
    rows = [
        [o["system"], o["metric"], o["unit"], found.spread, found.interval, str(found.n)]
        for o in read(part, "replication.json")["ours"]
        for found in [over_seeds(o["by_seed"].values())]
    ]
    headers = ["system", "metric", "unit", "mean \N{PLUS-MINUS SIGN} sd", "95% interval", "seeds"]
    return markdown.table(headers, rows)


# ---- sweeps --------------------------------------------------------------------------------------


def effects(part: str) -> str:
    """Every detail's effect on the first outcome of its stage."""
    record, rows, seen = read(part, "sweep.json"), [], {}
    for effect in record["effects"]:
        outcome = seen.setdefault(effect["stage"], effect["outcome"])
        if outcome == effect["outcome"]:
            base = over_seeds(effect["base_by_seed"])
            found = over_seeds(
                a - b for a, b in zip(effect["by_seed"], effect["base_by_seed"], strict=True)
            )
            cells = [effect["stage"], effect["detail"], effect["choice"]]
            rows.append([*cells, f"{outcome}, {effect['unit']}", base.spread, found.difference])
    headers = ["stage", "detail", "choice", "outcome", "base", "difference [95%]"]
    return markdown.table(headers, rows)


# ---- over-optimisation ---------------------------------------------------------------------------


def turns() -> str:
    """What each method gains and loses behind its best setting."""
    rows = [
        [
            METHODS.get(turn["method"], turn["method"]),
            str(turn["seed"]),
            f"{turn['peak']:g}, {turn['last']:g}",
            interval_cell(turn["gold_change"], 1, 3, sign="+"),
            interval_cell(turn["proxy_change"], 1, 2, sign="+"),
        ]
        for turn in read("overoptimization", "results.json")["turns"]
    ]
    return markdown.table(["method", "seed", "best, last", "gold", "proxy"], rows)


# ---- speed ---------------------------------------------------------------------------------------


def printed(part: str, file: str = "printed.md") -> str:
    """What a command wrote, as it stands."""
    return (RECORDS / part / file).read_text().strip()


def costs(kind: str, title: str) -> str:
    """How cost grows along one axis."""
    lines = {
        "update, padded, s": "padded s",
        "update, shared prefix, s": "update s",
        "sampling, copied cache, s": "copied cache s",
        "sampling, one copy of the prompt, s": "sampling s",
    }
    found = read("scaling", "scaling.json")[kind]
    rows = [
        [told, *(f"{at[name]:.3g}" if name in at else NOT_MEASURED for at in found.values())]
        for told, name in lines.items()
    ]
    return markdown.table([title, *found], rows)


TABLES: dict[str, Callable[[], str]] = {
    **{f"{part}.systems": lambda part=part: systems(part) for part in ("demo", "scitldr")},
    **{f"{part}.seeds": lambda part=part: by_seed(part) for part in ("demo", "scitldr")},
    **{f"{part}.mean": lambda part=part: over_all_seeds(part) for part in ("demo", "scitldr")},
    **{f"{part}.effects": lambda part=part: effects(part) for part in ("ablations", "iterative")},
    "overoptimization.turns": turns,
    "bench-tiny": lambda: printed("bench-tiny", "table.md"),
    "bench-gpt2-small": lambda: printed("bench-gpt2-small", "table.md"),
    "scaling.group": lambda: costs("group", "completions of a prompt of 267"),
    "scaling.prompt": lambda: costs("prompt", "tokens of the prompt, 8 completions"),
    "plans": lambda: printed("plans"),
    "variants": lambda: printed("variants"),
    "kills": lambda: printed("kills"),
}


if __name__ == "__main__":
    write()
