"""What differs between systems and what does not, in words: from comparisons on the same rows.

Two systems differ where the 95% interval of their comparison excludes what equal systems have: 0
points of accuracy, a win rate of 50%. An interval that holds it is no proof that they are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.evaluation.accuracy import Interval
from common.evaluation.results import Results, WinRate, score_name
from common.report.tables import interval_cell

ACCURACY = "Preference accuracy, difference in points"
MOST_COMPARED = 6  # comparisons of a measure: every two of four systems
NOTE = (
    '"No difference was found" does not mean equal: the 95% interval holds 0 points, or a win rate '
    "of 50%. {number} here; no interval is corrected for their number, and of equal systems one in "
    "20 comparisons shows a difference."
)


@dataclass(frozen=True)
class Compared:
    """Two systems, of which the first is not behind."""

    ahead: str
    behind: str
    interval: Interval  # of the difference in accuracy, or the win rate, in [0, 1]
    even: float  # what the interval of equal systems holds

    @classmethod
    def of(cls, first: str, second: str, interval: Interval, even: float) -> "Compared":
        """The comparison of the first with the second, or of the second with the first."""
        if interval.mean >= even:
            return cls(first, second, interval, even)
        low, high = (None if x is None else 2 * even - x for x in (interval.high, interval.low))
        return cls(second, first, Interval(2 * even - interval.mean, low, high), even)


def conclusions(results: Results) -> str:
    """A list with a sentence for each measure, and what they do not say; empty of one system."""
    measures = {ACCURACY: compared_accuracies(results)}
    for judge, compared in compared_completions(results.win_rates).items():
        measures[f"Completions judged by {judge}, win rate in %"] = compared
    count = sum(map(len, measures.values()))
    number = "There is 1 comparison" if count == 1 else f"There are {count} comparisons"
    sentences = [sentence(name, compared) for name, compared in measures.items() if compared]
    return "\n".join(f"- {text}" for text in [*sentences, NOTE.format(number=number)] if count)


def sentence(measure: str, comparisons: Sequence[Compared]) -> str:
    """What differs in a measure, then what does not, then what too few prompts leave open."""
    above: dict[str, list[str]] = {}
    alike, unknown = [], []
    for each in comparisons:
        low, number = each.interval.low, interval_cell(each.interval, 100, 1)
        if low is None:
            unknown.append(f"{each.ahead} and {each.behind}")
        elif low > each.even:
            above.setdefault(each.ahead, []).append(f"{each.behind} ({number})")
        else:
            alike.append(f"{each.ahead} and {each.behind} ({number})")
    texts = [f"{ahead} is above {', '.join(behind)}" for ahead, behind in above.items()]
    if alike:
        texts.append(f"no difference was found between {', '.join(alike)}")
    if unknown:
        texts.append(f"there are too few prompts to compare {', '.join(unknown)}")
    return f"{measure}: {'; '.join(texts)}."


def compared_accuracies(results: Results) -> list[Compared]:
    """Every two systems by the score that the systems' table has; of many, each with the best."""
    if not (comparison := results.comparison):
        return []
    # A reward model has one score, without a name
    scores = {s.name: "" if s.kind == "reward_model" else s.scored_by for s in results.systems}
    names = {score_name(name, score.replace(" ", "_")): name for name, score in scores.items()}
    accuracies = {s.name: s.accuracy.accuracy for s in comparison.systems if s.name in names}
    best = max(accuracies, key=lambda name: accuracies[name], default="")
    shown = [d for d in comparison.differences if {d.first, d.second} <= accuracies.keys()]
    if len(shown) > MOST_COMPARED:
        shown = [d for d in shown if best in (d.first, d.second)]
    return [
        Compared.of(names[d.first], names[d.second], Interval(d.difference, d.low, d.high), 0)
        for d in shown
    ]


def compared_completions(win_rates: Sequence[WinRate]) -> dict[str, list[Compared]]:
    """By judge every two systems; of many, each with the first policy."""
    compared: dict[str, list[Compared]] = {}
    for judge in dict.fromkeys(rate.judge for rate in win_rates):
        shown = [rate for rate in win_rates if rate.judge == judge]
        if len(shown) > MOST_COMPARED:
            shown = [rate for rate in shown if win_rates[0].b in (rate.a, rate.b)]
        compared[judge] = [Compared.of(rate.a, rate.b, rate.interval, 0.5) for rate in shown]
    return compared
