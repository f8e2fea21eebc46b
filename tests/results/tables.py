"""The tables of README and `docs/` that show records, made from the records.

    python -m tests.results.tables

A page has the place of a table between `<!-- NAME -->` and `<!-- /NAME -->`; NAME is one of
`TABLES`, a part of `make.py` or a part, a dot and what is shown of it. A record that is not there
leaves its place as it is.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

import yaml

from common.evaluation.completions import REFERENCE
from common.evaluation.intervals import interval_cell
from common.experiments.outcomes import over_seeds
from common.record.folder import read_metrics
from common.record.jsonl import read_jsonl
from common.record.terminal import NOT_MEASURED
from common.report import chain, markdown
from common.report.figures import reward_functions
from common.report.tables import accuracy_table, generation_tables, win_rate_table
from tests.benchmarks.scaling import figure
from tests.results import ablations, chain_picture, papers, reward_curve
from tests.results.make import PARTS, RECORDS, REWARDS, ROOT, read_record

PLACE = re.compile(r"(?s)(<!-- ([a-z0-9_.-]+) -->\n)(.*?)(<!-- /\2 -->)")
TITLE = re.compile(r"(?:^TITLE: |words:\n\n)(.+)")  # in the prompts of `scitldr`, `one-sentence`
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
METHODS = {  # what the first word of their settings is
    "grpo": ("GRPO over steps", "step"),
    "best_of_n": ("Best of n", "n"),
    "dpo": ("DPO over beta", "beta"),
    "rejection": ("SFT on the best of n", "n"),
}
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
STEPS = 20  # between two lines of the table of `too-far`


def write() -> None:
    """Put the tables of what is recorded into the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text(), is_in_docs=page.parent != ROOT))
    for part in filter(read_record, chain_picture.PARTS):
        chain_picture.draw(part, evaluations(part)["0"])
    if read_record(reward_curve.PART):
        reward_curve.draw()
    if read_record("ablations"):
        ablations.draw()


def filled(text: str, *, is_in_docs: bool = True) -> str:
    """A page with its tables as the records have them; in `docs/` the first one of a part names it.

    Raises:
        KeyError: a place has the name of no table.
    """
    named = {"records"} if is_in_docs else {"records", *PARTS}

    def table(place: re.Match[str]) -> str:
        begin, name, _, end = place.groups()
        part, make = name.partition(".")[0], TABLES[name]
        if not any(map(read_record, PARTS if part == "records" else [part])):
            return place[0]
        told = "" if part in named else f"\n\n*[Record](../assets/results/{part}): {source(part)}.*"
        named.add(part)
        return f"{begin}{make()}{told}\n{end}"

    return PLACE.sub(table, text)


def source(part: str) -> str:
    """What made a record."""
    record = read_record(part)
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    return (
        f"`make results PARTS={part}`, {record['minutes']:.0f} minutes, {record['date']}, commit "
        f"{record['git_commit'][:10]}, {record['cpu']}, {record['cores']} cores, {packages}"
    )


def read(part: str, file: str) -> Any:
    """A recorded JSON file."""
    return json.loads((RECORDS / part / file).read_text())


def printed(part: str, file: str = "printed.md") -> str:
    """What a command wrote, as it stands."""
    return (RECORDS / part / file).read_text().strip()


def columns(part: str) -> dict[str, list[str]]:
    """The table that a command printed, by the heads of its columns."""
    rows = [line.strip("|").split("|") for line in printed(part).splitlines() if line[:1] == "|"]
    heads, _, *cells = [[cell.strip() for cell in row] for row in rows]
    return dict(zip(heads, map(list, zip(*cells, strict=True)), strict=True))


def records() -> str:
    """Every part: how long its record took, on which machine and commit, and what makes it."""
    rows = []
    for name, part in PARTS.items():
        record = read_record(name)
        known = [str(record.get(key, NOT_MEASURED)) for key in ("minutes", "date", "cpu")]
        commit = record.get("git_commit", NOT_MEASURED)[:10]
        commands = record.get("commands") or part.commands_to(f"output/{name}")
        told = "; ".join(f"`python -m {command}`" for command in commands)
        rows.append([name, *known, commit, told])
    return markdown.table(["part", "minutes", "date", "processor", "commit", "commands"], rows)


# ---- the chain -----------------------------------------------------------------------------------


def evaluations(part: str) -> dict[str, Any]:
    """What evaluation found, by seed."""
    files = sorted((RECORDS / part).glob("seed_*/evaluation/results.json"))
    return {
        file.parents[1].name.removeprefix("seed_"): json.loads(file.read_text()) for file in files
    }


def by_seed(part: str) -> str:
    """A line per seed and system."""
    rows, headers = [], ["seed"]
    for seed, results in evaluations(part).items():
        table = chain.systems_table(results)
        headers = ["seed", *table.headers]
        rows += [[seed, *row] for row in table.rows]
    return markdown.table(headers, rows)


def measured(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What evaluation found of references, every system, and baselines that need no model."""
    systems = sorted(results["systems"], key=lambda s: s.get("minutes") is not None)
    models = [s["name"] for s in systems if s.get("kind") == "reward_model"]
    functions = ["gold", *reward_functions(systems)]
    references = results.get("reference_completions")
    compared = (results.get("comparison") or {}).get("systems", [])
    lines = {}
    for system in [
        *([{**references, "name": REFERENCE}] if references else []),
        *systems,  # what no run made, first: the model that the chain starts from
        *(own for own in compared if own["name"] in ("longer wins", "ROUGE-L wins")),
    ]:
        rewards = system.get("rewards") or {}
        wins = [
            rate["length_controlled"]
            for rate in results.get("win_rates") or []
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
    keys = list(dict.fromkeys([*COLUMNS, *(key for own in seeds[0].values() for key in own)]))
    heads, rows = [], [[name] for name in seeds[0]]
    for key in keys:
        found = [[number(own[name].get(key)) for own in seeds] for name in seeds[0]]
        if any(value is not None for values in found for value in values):
            head, scale, digits = COLUMNS.get(key, (f"reward {key}", 1, 3))
            heads.append(head)
            for row, values in zip(rows, found, strict=True):
                known = [scale * value for value in values if value is not None]
                row.append(over(known, digits) if len(known) == len(seeds) else NOT_MEASURED)
    return markdown.table([f"mean of {len(seeds)} seeds [95%]", *heads], rows)


def beside(part: str, base: str, names: Sequence[str]) -> str:
    """What systems have over another of the same seed: means over seeds of the differences."""
    shown = ("model", "trained", "rouge_l", "length")
    keys = {key: {**COLUMNS, "trained": TRAINED}[key] for key in shown}
    seeds, rates = [], []
    for seed, results in evaluations(part).items():
        lines = measured(results)
        for name, reward in as_trained(part, seed).items():
            lines[name]["trained"] = reward
        seeds.append(lines)
        rates.append(results["win_rates"])
    rows = []
    for name in names:
        cells = []
        for key, (_, scale, digits) in keys.items():
            found = [[number(lines[of].get(key)) for of in (name, base)] for lines in seeds]
            known = [scale * (a - b) for a, b in found if a is not None and b is not None]
            cells.append(over(known, digits) if len(known) == len(seeds) else NOT_MEASURED)
        wins = (next(r for r in own if (r["a"], r["b"]) == (name, base)) for own in rates)
        cells.append(over((100 * rate["length_controlled"]["win_rate"] for rate in wins), 1))
        rows.append([name, *cells])
    heads = (head for head, _, _ in keys.values())
    return markdown.table([f"beside {base}", *heads, "RM prefers it at equal length %"], rows)


def as_trained(part: str, seed: str) -> dict[str, float]:
    """The mean reward that GRPO had for each system's completions, with what not stopping costs."""
    lines = read_jsonl(RECORDS / part / f"seed_{seed}" / "evaluation" / REWARDS)
    recipe = yaml.safe_load((ROOT / "assets" / "recipes" / part / "grpo.yaml").read_text())
    penalty = recipe["missing_eos_penalty"]
    rewards = defaultdict(list)
    for name, own in (pair for line in lines for pair in line.items()):
        rewards[name].append(sum(own["rewards"].values()) if own["stopped"] else penalty)
    return {name: mean(found) for name, found in rewards.items()}


def number(value: Any) -> float | None:
    """A number, or that of a mapping which has its interval too."""
    keys = ("mean", "accuracy", "win_rate")
    return next(value[key] for key in keys if key in value) if isinstance(value, dict) else value


def over(values: Iterable[float], digits: int = 2) -> str:
    """A mean over seeds with its interval, which equal values have not."""
    over_all = over_seeds(values)
    shown = asdict(over_all) if over_all.sd else {"mean": over_all.mean, "low": None}
    return interval_cell(shown, 1, digits)


def of_seed_0(part: str, what: Callable[[Any], Any]) -> str:
    """A table of an evaluation's report."""
    return str(what(evaluations(part)["0"]))


def samples(part: str) -> str:
    """The first abstracts, and what every system made of them."""
    lines = [json.loads(line) for line in printed(part, "samples.jsonl").splitlines()]
    titles = [TITLE.findall(line["prompt"])[0] for line in lines]
    rows = [["author", *(line["reference"]["completion"] for line in lines)]]
    rows += [
        [name, *(text_of(line["systems"][name]) for line in lines)] for name in lines[0]["systems"]
    ]
    return markdown.table(["summary by", *titles], rows)


def text_of(completion: Mapping[str, Any]) -> str:
    """A completion, with a mark where it was cut."""
    return completion["completion"] + ("" if completion["stopped"] else " [...]")


def too_far() -> str:
    """What was found on held-out prompts while GRPO went on."""
    heads = {
        "what is optimised: the reward model": ("eval_reward{}/reward", 1, 2),
        "what it stands for: gold reward": ("eval_reward{}/gold", 1, 3),
        "accuracy on pairs %": ("eval_accuracy{}", 100, 1),
        "KL": ("eval_kl{}", 1, 2),
    }
    rows = []
    for line in read_metrics(RECORDS / "too-far"):
        if line["step"] % STEPS or "eval_kl" not in line:
            continue
        cells = []
        for name, scale, digits in heads.values():
            ends = {end: line[name.format(f"_{end}")] for end in ("low", "high")}
            found = {"mean": line[name.format("")], **ends}
            cells.append(interval_cell(found, scale, digits))
        rows.append([str(line["step"]), *cells])
    return markdown.table(["step", *heads], rows)


# ---- sweeps --------------------------------------------------------------------------------------


def turns() -> str:
    """What each method gains and loses behind its best setting."""
    found = read("overoptimization", "results.json")["turns"]
    rows = [
        [
            METHODS[turn["method"]][0],
            str(turn["seed"]),
            f"{METHODS[turn['method']][1]} {turn['peak']:g}, {turn['last']:g}",
            interval_cell(turn["gold_change"], 1, 3, sign="+"),
            interval_cell(turn["proxy_change"], 1, 2, sign="+"),
        ]
        for turn in sorted(found, key=lambda turn: list(METHODS).index(turn["method"]))
    ]
    return markdown.table(["method", "seed", "best, last", "gold", "proxy"], rows)


# ---- speed and memory ----------------------------------------------------------------------------


def speed() -> str:
    """How many times TRL's speed each row has, and which share of its memory."""
    models = {"bench-tiny": "4 layers, 256 wide", "bench-gpt2-small": "GPT-2 small"}
    found = {part: read(part, "results.json")["rows"] for part in models if read_record(part)}
    heads = [line["row"] for line in found["bench-tiny"]]
    rows = []
    for part, lines in found.items():
        own = {line["row"]: f"{line['ratio']:.1f} ({line['memory_ratio']:.2f})" for line in lines}
        rows.append([models[part], *(own.get(head, NOT_MEASURED) for head in heads)])
    return markdown.table(["times TRL's speed (memory)", *heads], rows)


def against_trl(part: str) -> str:
    """A benchmark's table; where both sides sample, and lengths differ, its ratio per token."""
    added = ["ratio per token", "---"]
    for row in read(part, "results.json")["rows"]:
        ours, theirs = (row[side]["completion_length"] for side in ("ours", "trl"))
        added.append(f"{row['ratio'] * ours / theirs:.2f}" if theirs else "")
    lines = printed(part, "table.md").splitlines()
    rows = [f"{line} {cell} |" for line, cell in zip(lines, added, strict=False)]
    return "\n".join([*rows, *lines[len(rows) :]])


def costs(kind: str, title: str, lines: Mapping[str, str]) -> str:
    """How cost grows along one axis; the lines are what is measured, by how it is told."""
    found = read("scaling", "scaling.json")[kind]
    rows = [
        [told, *(figure(at.get(name)) for at in found.values())] for told, name in lines.items()
    ]
    return markdown.table([title, *found], rows)


SECONDS = {
    "update, padded, s": "padded s",
    "update, shared prefix, s": "update s",
    "sampling, copied cache, s": "copied cache s",
    "sampling, one copy of the prompt, s": "sampling s",
}
PEAKS = {"logits in chunks": "in chunks", "all logits kept": "all logits"}


def plans() -> str:
    """How near the plans of memory are to what runs took."""
    found = columns("plans")
    in_use, all_of_it = (sorted(map(float, found[f"planned / {k}"])) for k in ("in use", "that"))
    return (
        f"Of {len(in_use)} real runs on a CPU plans are {in_use[0]:.2f} to {in_use[-1]:.2f} of the "
        f"memory in use, and {all_of_it[0]:.2f} to {all_of_it[-1]:.2f} of what glibc keeps."
    )


def variants() -> str:
    """How alike runs on one process and on several are."""
    found = columns("variants")
    drawn = [cell for cell in found["other completions"] if cell[0] not in "0-"]
    return (
        f"Of {len(found['variant'])} variants the largest relative difference of a loss is "
        f"{max(map(float, found['loss'])):.1e}; {len(drawn)} drew another completion; "
        f"{sum(map(int, found['warnings']))} warnings."
    )


CHAINS = [name for name, part in PARTS.items() if "replicate" in part.commands[0]]
TABLES: dict[str, Callable[[], str]] = {
    "records": records,
    **{f"{part}.seeds": lambda part=part: by_seed(part) for part in CHAINS},
    **{f"{part}.mean": lambda part=part: means(part) for part in CHAINS},
    **{
        f"{part}.{name}": lambda part=part, what=what: of_seed_0(part, what)
        for part in CHAINS
        for name, what in {
            "systems": chain.systems_table,
            "wins": lambda results: win_rate_table(results["win_rates"]),
            "accuracy": lambda results: accuracy_table(results["comparison"]),
            "generations": lambda results: generation_tables(results)[0],
        }.items()
    },
    "scitldr.beside": lambda: beside("scitldr", "sft", ["dpo", "grpo"]),
    "scitldr.samples": lambda: samples("scitldr"),
    "scitldr.picture": lambda: "![Accuracy and reward of seed 0](../assets/scitldr.png)",
    "too-far": too_far,
    "ablations": ablations.ablations,
    "ablations.short": ablations.what_matters,
    "ablations.papers": papers.table,
    "iterative": ablations.iterative,
    "overoptimization": turns,
    "bench-tiny.short": speed,
    "one-sentence": reward_curve.shown,
    "one-sentence.samples": lambda: samples("one-sentence"),
    "one-sentence.short": lambda: reward_curve.table(is_short=True),
    "bench-tiny": lambda: against_trl("bench-tiny"),
    "bench-gpt2-small": lambda: against_trl("bench-gpt2-small"),
    "scaling.group": lambda: costs("group", "completions of a prompt of 267", SECONDS),
    "scaling.prompt": lambda: costs("prompt", "tokens of the prompt, 8 completions", SECONDS),
    "scaling.memory": lambda: costs("memory", "peak MB by vocabulary, 64 completions", PEAKS),
    "scaling.ranks": lambda: costs("ranks", "processes", {"step of SFT, s": "step s"}),
    "saving": lambda: printed("saving"),
    "plans": plans,
    "variants": variants,
    "kills": lambda: printed("kills"),
    "clusters": lambda: "[The tables](../assets/results/clusters/printed.md).",
}


if __name__ == "__main__":
    write()
