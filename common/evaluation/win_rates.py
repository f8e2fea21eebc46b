"""Win rates: how often a judge prefers the completion of one system to that of another.

A judge is a reward (of a reward model or a reward function: the higher one wins, equal ones tie),
or whoever gave verdicts on two completions (a Python function, a person, a model outside). A tie
counts one half. Every comparison is a function of `completions.jsonl`.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from common.evaluation.completions import Answers, system_names
from common.evaluation.intervals import share_over_prompts
from common.evaluation.length_control import length_controlled


def all_win_rates(answers: Sequence[Answers]) -> list[dict[str, Any]]:
    """Every system against every earlier one and against the rows' own completions, by every judge.

    Returns:
        As `win_rate`; a judge that compared nothing of two systems is left out.
    """
    names = system_names(answers)
    rates = []
    for first, second in combinations(names, 2):
        # The later of two systems is the one that is asked about, but a row's own completion.
        a, b = (second, first) if second in answers[0].systems else (first, second)
        judged = {judge: by_reward(answers, a, b, judge) for judge in reward_judges(answers)}
        judged |= {judge: given(answers, a, b, judge) for judge in verdict_judges(answers)}
        for judge, verdicts in judged.items():
            if any(verdict is not None for verdict in verdicts):
                rates.append(win_rate(answers, a, b, judge, verdicts))
    return rates


def win_rate(
    answers: Sequence[Answers], a: str, b: str, judge: str, verdicts: Sequence[float | None]
) -> dict[str, Any]:
    """How often a wins against b, ready for JSON.

    Args:
        answers: N prompts with their completions.
        a: A system, or REFERENCE.
        b: What it is compared with.
        judge: Whose verdicts these are.
        verdicts: N probabilities that a wins, or 1, 0.5 and 0; None where a prompt was not judged,
            and at least one is.

    Returns:
        `win_rate` is the mean verdict, with its 95% interval `low`, `high` (None of one prompt);
        `num_wins`, `num_ties` and `num_losses` count verdicts above, at and below one half;
        `length_difference` is the mean of a's tokens minus b's; `length_controlled` is as
        `length_control.LengthControlled`, None where it cannot be told.
    """
    rows = [(row, v) for row, v in zip(answers, verdicts, strict=True) if v is not None]
    prompts, wins = [row.prompt for row, _ in rows], [verdict for _, verdict in rows]
    share = share_over_prompts(wins, prompts)
    assert share is not None, "no prompt was judged"
    differences = []
    for row, _ in rows:
        own, other = row.of(a), row.of(b)
        assert own is not None, a
        assert other is not None, b
        differences.append(own.num_tokens - other.num_tokens)
    controlled = length_controlled(wins, differences, prompts)
    return {
        "a": a,
        "b": b,
        "judge": judge,
        "win_rate": share["mean"],
        "low": share["low"],
        "high": share["high"],
        "num_wins": sum(verdict > 0.5 for verdict in wins),
        "num_ties": sum(verdict == 0.5 for verdict in wins),
        "num_losses": sum(verdict < 0.5 for verdict in wins),
        "num_not_judged": len(answers) - len(rows),
        "length_difference": sum(differences) / len(differences),
        "length_controlled": controlled and controlled._asdict(),
    }


def by_reward(answers: Sequence[Answers], a: str, b: str, judge: str) -> list[float | None]:
    """1 where a's reward is the higher one, 0.5 where both are equal, else 0.

    The same completion twice is a tie: a reward model's scores are rounded by what stands beside a
    completion in the batch (5% of such pairs differed by that on the embedded task). None where
    the judge says nothing of either completion, or the row has none.
    """
    verdicts: list[float | None] = []
    for row in answers:
        own, other = (reward_of(row, name, judge) for name in (a, b))
        if own is None or other is None:
            verdicts.append(None)
        elif is_same(row, a, b):
            verdicts.append(0.5)
        else:
            verdicts.append((own > other) + 0.5 * (own == other))
    return verdicts


def is_same(row: Answers, a: str, b: str) -> bool:
    """Whether both completions are the same text and ended in the same way."""
    own, other = row.of(a), row.of(b)
    if own is None or other is None:
        return False
    return (own.completion, own.stopped) == (other.completion, other.stopped)


def reward_of(row: Answers, name: str, judge: str) -> float | None:
    """What a judge gives the completion of a system."""
    own = row.of(name)
    return own.rewards.get(judge) if own else None


def given(answers: Sequence[Answers], a: str, b: str, judge: str) -> list[float | None]:
    """The verdicts of a judge of two completions, whichever of them it was asked about first."""
    verdicts: list[float | None] = []
    for row in answers:
        own = [v for v in row.verdicts if v.judge == judge and {v.a, v.b} == {a, b}]
        verdicts.append((own[0].a_wins if own[0].a == a else 1 - own[0].a_wins) if own else None)
    return verdicts


def reward_judges(answers: Sequence[Answers]) -> list[str]:
    """The names of the rewards, in order."""
    return list(
        dict.fromkeys(n for row in answers for own in row.systems.values() for n in own.rewards)
    )


def verdict_judges(answers: Sequence[Answers]) -> list[str]:
    """The names of the judges of two completions, in order."""
    return list(dict.fromkeys(verdict.judge for row in answers for verdict in row.verdicts))
