"""Tables of an evaluation: comparisons on pairs, and generations."""

from collections.abc import Mapping, Sequence

from common.evaluation.accuracy import Interval, PreferenceAccuracy
from common.evaluation.intervals import MIN_PROMPTS
from common.evaluation.records import BASELINES, REFERENCE
from common.evaluation.results import Comparison, GenerationSummary, Results, WinRate
from common.record.terminal import NOT_MEASURED
from common.report.blocks import Section, Table

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
    """Accuracy of every score, with both intervals."""
    rows = []
    for score in comparison.systems:
        accuracy = score.accuracy
        cells = [f"{100 * accuracy.accuracy:.1f}", ends_cell(accuracy.interval, 100, 1)]
        cells.append(ends_cell(accuracy.over_prompts, 100, 1))
        rows.append([score.name, *cells, f"{accuracy.num_ties:,}"])
    size = f"{comparison.num_pairs:,} pairs of {comparison.num_prompts:,} prompts."
    headers = ["system", "accuracy %", "Wilson", "over prompts", "ties"]
    return Table(headers, rows, f"{size} {ACCURACY_NOTE}")


def difference_table(comparison: Comparison) -> Table:
    """Every two scores but the baselines on the same pairs; of many, each against the best one."""
    scores = [score for score in comparison.systems if score.name not in BASELINES]
    names = {score.name for score in scores}
    shown = [d for d in comparison.differences if {d.first, d.second} <= names]
    if len(scores) > MOST_COMPARED:
        best = max(scores, key=lambda score: score.accuracy.accuracy).name
        shown = [d for d in shown if best in (d.first, d.second)]
    headers = ["first - second", "points [95% CI]", "better : worse", "McNemar p"]
    rows = [
        [
            f"{d.first} - {d.second}",
            interval_cell(Interval(d.difference, d.low, d.high), 100, 1, sign="+"),
            f"{d.num_first_better:,} : {d.num_second_better:,}",
            p_value(d.p_value),
        ]
        for d in shown
    ]
    return Table(headers, rows, DIFFERENCES_NOTE)


def source_table(comparison: Comparison) -> Table:
    """Accuracy of every score on the pairs of each source; no row without several sources."""
    scores = [score for score in comparison.systems if score.by_source]
    sources = scores[0].by_source if scores else {}
    headers = [f"{source} ({each.num_pairs:,})" for source, each in sources.items()]
    rows = [[score.name, *map(accuracy_cell, score.by_source.values())] for score in scores]
    return Table(["system", *headers], rows, SOURCE_NOTE)


def interval_cell(interval: Interval | None, scale: float, digits: int, *, sign: str = "") -> str:
    """`value [low, high]` times the scale, signed as by format(); an en dash without interval."""
    if not interval:
        return NOT_MEASURED
    mean = f"{scale * interval.mean or 0.0:{sign}.{digits}f}"  # never -0.0
    return mean if interval.low is None else f"{mean} {ends_cell(interval, scale, digits, sign)}"


def ends_cell(interval: Interval, scale: float, digits: int, sign: str = "") -> str:
    """`[low, high]` for a table, as in `interval_cell`."""
    if interval.low is None or interval.high is None:
        return NOT_MEASURED
    low, high = (scale * end or 0.0 for end in (interval.low, interval.high))
    return f"[{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def accuracy_cell(accuracy: PreferenceAccuracy) -> str:
    """An accuracy with its interval over prompts; Wilson's where no resample could differ."""
    is_alike = accuracy.accuracy in (0, 1) and accuracy.num_prompts >= MIN_PROMPTS
    return interval_cell(accuracy.interval if is_alike else accuracy.over_prompts, 100, 1)


def p_value(p: float) -> str:
    """A p-value as it is printed."""
    return f"< {SMALLEST_P:.4f}" if p < SMALLEST_P else f"{p:.4f}"


QUALITY = ("ROUGE-1", "ROUGE-2", "ROUGE-L", "KL", "entropy", "length", "stop %", "distinct %")
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
    """Tables with a row: quality (`summary.summarise`), rewards, pass rates and win rates."""
    by_name = {s.name: s.generations for s in results.systems if s.generations}
    if results.reference_completions:
        by_name[REFERENCE] = results.reference_completions
    judges = list(dict.fromkeys(judge for each in by_name.values() for judge in each.rewards))
    rewards = [
        [name, *(interval_cell(each.rewards.get(judge), 1, 3) for judge in judges)]
        for name, each in by_name.items()
        if each.rewards
    ]
    shown = [
        Table(["system", *QUALITY], [quality_row(n, g) for n, g in by_name.items()], QUALITY_NOTE),
        Table(["system", *judges], rewards),
        pass_rate_table(by_name),
        win_rate_table(results.win_rates),
    ]
    return [table for table in shown if table.rows]


def quality_row(name: str, generations: GenerationSummary) -> list[str]:
    """The cells of QUALITY for a system."""
    rouge = (generations.rouge_1, generations.rouge_2, generations.rouge_l)
    return [
        name,
        *(interval_cell(each, 100, 1) for each in rouge),
        interval_cell(generations.kl, 1, 2),
        interval_cell(generations.entropy, 1, 2),
        interval_cell(generations.length_interval, 1, 1),
        interval_cell(generations.stop_rate_interval, 100, 1),
        f"{100 * generations.distinct_completions:.1f}",
    ]


def pass_rate_table(by_name: Mapping[str, GenerationSummary]) -> Table:
    """Pass rates of each system by each check."""
    checked = [
        (name, judge, rates)
        for name, generations in by_name.items()
        for judge, rates in generations.pass_rates.items()
    ]
    rates_shown = dict.fromkeys(rate for _, _, rates in checked for rate in rates)
    rows = [
        [name, judge, *(interval_cell(rates.get(rate), 100, 1) for rate in rates_shown)]
        for name, judge, rates in checked
    ]
    return Table(["system", "check", *(f"{rate} %" for rate in rates_shown)], rows, PASS_NOTE)


def win_rate_table(win_rates: Sequence[WinRate]) -> Table:
    """Every comparison of two systems by a judge."""
    headers = ["comparison", "judge", "win rate % [95% CI]", "at equal length % [95% CI]"]
    headers += ["wins", "ties", "losses", "not judged", "tokens longer"]
    rows = []
    for rate in win_rates:
        even = rate.length_controlled
        counts = (rate.num_wins, rate.num_ties, rate.num_losses, rate.num_not_judged)
        rows.append(
            [
                f"{rate.a} against {rate.b}",
                rate.judge,
                interval_cell(rate.interval, 100, 1),
                interval_cell(
                    Interval(even.win_rate, even.low, even.high) if even else None, 100, 1
                ),
                *map(str, counts),
                f"{rate.length_difference:+.1f}",
            ]
        )
    return Table(headers, rows, WIN_RATE_NOTE)
