"""Tables of an evaluation: comparisons on pairs, and generations."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.evaluation.intervals import MIN_PROMPTS
from common.evaluation.records import BASELINES, REFERENCE, Results
from common.record.terminal import NOT_MEASURED
from common.report.blocks import Section, Table

Comparison = Mapping[str, Any]  # what `summary.compare` returns
SMALLEST_P = 1e-4
MOST_COMPARED = 6  # systems of which every two are a row of the table: 15 rows

ACCURACY_NOTE = (
    "A tie counts one half. Wilson's interval takes pairs as independent; the bootstrap over "
    "prompts does not, and holds where a prompt has several pairs; below "
    f"{MIN_PROMPTS} prompts there is none. Baselines that need no model: the completion of more "
    "tokens, of fewer, of the higher ROUGE-L F1 against the prompt, and a seeded random guess."
)
DIFFERENCES_NOTE = (
    "The interval is of the paired bootstrap over prompts. Better : worse counts the pairs on "
    "which one of the two counts more. McNemar's p is exact and two-sided and takes pairs as "
    "independent; it is not corrected for the number of comparisons. Of more than "
    f"{MOST_COMPARED} systems only the differences to the best one are shown; results.json has all."
)
SOURCE_NOTE = (
    "Where the rows come from. Intervals are over prompts, at 0 and 100 Wilson's, below "
    f"{MIN_PROMPTS} prompts none; of fewer than about 20 they are too narrow."
)


def comparison_sections(comparison: Comparison) -> list[Section]:
    """All tables of a comparison that have a row, in the order of a report."""
    by_title = {
        "Preference accuracy of every system": accuracy_table(comparison),
        "Differences on the same pairs": difference_table(comparison),
        "Accuracy by source": source_table(comparison),
    }
    return [Section(title, [table]) for title, table in by_title.items() if table.rows]


def accuracy_table(comparison: Comparison) -> Table:
    """Accuracy of every system, with both intervals."""
    rows = []
    for system in comparison["systems"]:
        accuracy = system["accuracy"]
        cells = [f"{100 * accuracy['accuracy']:.1f}", interval_cell(accuracy, 100, 1, None)]
        cells.append(interval_cell(accuracy, 100, 1, None, prefix="prompt_"))
        rows.append([system["name"], *cells, f"{accuracy['num_ties']:,}"])
    size = f"{comparison['num_pairs']:,} pairs of {comparison['num_prompts']:,} prompts."
    headers = ["system", "accuracy %", "Wilson", "over prompts", "ties"]
    return Table(headers, rows, f"{size} {ACCURACY_NOTE}")


def difference_table(comparison: Comparison) -> Table:
    """Every two systems but the baselines on the same pairs; of many, each against the best one."""
    systems = [s for s in comparison["systems"] if s["name"] not in BASELINES]
    names = {system["name"] for system in systems}
    shown = [d for d in comparison["differences"] if {d["first"], d["second"]} <= names]
    if len(systems) > MOST_COMPARED:
        best = max(systems, key=lambda system: system["accuracy"]["accuracy"])["name"]
        shown = [d for d in shown if best in (d["first"], d["second"])]
    headers = ["first - second", "points [95% CI]", "better : worse", "McNemar p"]
    rows = [
        [
            f"{d['first']} - {d['second']}",
            interval_cell(d, 100, 1, "difference", sign="+"),
            f"{d['num_first_better']:,} : {d['num_second_better']:,}",
            p_value(d["p_value"]),
        ]
        for d in shown
    ]
    return Table(headers, rows, DIFFERENCES_NOTE)


def source_table(comparison: Comparison) -> Table:
    """Accuracy of every system on the pairs of each source; no row without several sources."""
    systems = [system for system in comparison["systems"] if system["accuracy_by"]]
    sources = systems[0]["accuracy_by"]["source"] if systems else {}
    headers = [f"{source} ({each['num_pairs']:,})" for source, each in sources.items()]
    rows = [
        [system["name"], *map(accuracy_cell, system["accuracy_by"]["source"].values())]
        for system in systems
    ]
    return Table(["system", *headers], rows, SOURCE_NOTE)


def interval_cell(
    interval: Mapping[str, Any] | None,
    scale: float,
    digits: int,
    key: str | None = "mean",
    *,
    prefix: str = "",
    sign: str = "",
) -> str:
    """`value [low, high]` for a table, times the scale; an en dash without an interval.

    `interval` has the value under the key (with None the ends are shown alone) and the ends under
    `low` and `high` after a prefix, None without ends. The sign "+" is that of format().
    """
    if not interval:
        return NOT_MEASURED
    low, high = f"{prefix}low", f"{prefix}high"
    names = [name for name in (key, low, high) if name and interval[name] is not None]
    numbers = {name: scale * interval[name] or 0.0 for name in names}  # never -0.0
    cells = {name: f"{number:{sign}.{digits}f}" for name, number in numbers.items()}
    ends = f"[{cells[low]}, {cells[high]}]" if low in cells else ""
    return f"{cells.get(key or '', '')} {ends}".strip() or NOT_MEASURED


def accuracy_cell(accuracy: Mapping[str, Any]) -> str:
    """An accuracy with its interval over prompts; Wilson's where no resample could differ."""
    is_alike = accuracy["accuracy"] in (0, 1) and accuracy["num_prompts"] >= MIN_PROMPTS
    return interval_cell(accuracy, 100, 1, "accuracy", prefix="" if is_alike else "prompt_")


def p_value(p: float) -> str:
    """A p-value as it is printed."""
    return f"< {SMALLEST_P:.4f}" if p < SMALLEST_P else f"{p:.4f}"


QUALITY = {  # key in results.json: heading, scale, digits
    "rouge_1": ("ROUGE-1", 100, 1),
    "rouge_2": ("ROUGE-2", 100, 1),
    "rouge_l": ("ROUGE-L", 100, 1),
    "kl": ("KL", 1, 2),
    "entropy": ("entropy", 1, 2),
    "length_interval": ("length", 1, 1),
    "stop_rate_interval": ("stop %", 100, 1),
}
QUALITY_NOTE = (
    "Intervals are over prompts. ROUGE is F1 with the row's own completion, times 100, without "
    "stemming. KL is log pi - log ref of the completion in nats, at temperature 1 only. Entropy is "
    "that of the next-token distribution, nats per token. Distinct is the share of different "
    "completions."
)
PASS_NOTE = (
    "A judge that gave nothing but 0 and 1 is a check. pass@k: one of k samples of a prompt "
    "passes; maj@k: the answer that most samples give is right."
)
WIN_RATE_NOTE = (
    "Win rate is the mean verdict, a tie counting one half; a reward prefers the completion it "
    "scores higher. The interval is Wilson's for the effective sample size, with Student's "
    "quantile. At equal length: a logistic regression of the verdict on tanh(length difference / "
    "its standard deviation), evaluated at 0 (Dubois et al. 2024)."
)


def generation_tables(results: Results) -> list[Table]:
    """Tables of generations: quality (`summary.summarise`), rewards, pass rates and win rates.

    A table without a row is left out.
    """
    systems = list(results.systems)
    if results.reference_completions:
        systems.append({**results.reference_completions, "name": REFERENCE})
    quality = [
        [
            system["name"],
            *(interval_cell(system.get(k), s, d) for k, (_, s, d) in QUALITY.items()),
            f"{100 * system['distinct_completions']:.1f}",
        ]
        for system in systems
        if system.get("distinct_completions") is not None
    ]
    judged = [system for system in systems if system.get("rewards")]
    judges = list(dict.fromkeys(judge for system in judged for judge in system["rewards"]))
    rewards = [
        [system["name"], *(interval_cell(system["rewards"].get(j), 1, 3) for j in judges)]
        for system in judged
    ]
    headings = [heading for heading, _, _ in QUALITY.values()]
    shown = [
        Table(["system", *headings, "distinct %"], quality, QUALITY_NOTE),
        Table(["system", *judges], rewards),
        pass_rate_table(systems),
        win_rate_table(results.win_rates),
    ]
    return [table for table in shown if table.rows]


def pass_rate_table(systems: Sequence[Mapping[str, Any]]) -> Table:
    """Pass rates of each system by each check."""
    checked = [
        (system["name"], judge, rates)
        for system in systems
        for judge, rates in (system.get("pass_rates") or {}).items()
    ]
    names = dict.fromkeys(name for _, _, rates in checked for name in rates)
    rows = [
        [system, judge, *(interval_cell(rates.get(name), 100, 1) for name in names)]
        for system, judge, rates in checked
    ]
    return Table(["system", "check", *(f"{name} %" for name in names)], rows, PASS_NOTE)


def win_rate_table(win_rates: Sequence[Mapping[str, Any]]) -> Table:
    """Every comparison of two systems by a judge, as `win_rates.win_rate` gives it."""
    headers = ["comparison", "judge", "win rate % [95% CI]", "at equal length % [95% CI]"]
    headers += ["wins", "ties", "losses", "not judged", "tokens longer"]
    rows = [
        [
            f"{rate['a']} against {rate['b']}",
            rate["judge"],
            interval_cell(rate, 100, 1, "win_rate"),
            interval_cell(rate["length_controlled"], 100, 1, "win_rate"),
            *(str(rate[f"num_{key}"]) for key in ("wins", "ties", "losses", "not_judged")),
            f"{rate['length_difference']:+.1f}",
        ]
        for rate in win_rates
    ]
    return Table(headers, rows, WIN_RATE_NOTE)
