"""Tables of what generations are worth: headers, rows, and what to know to read them."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.completions import REFERENCE
from common.terminal import NOT_MEASURED

Rows = tuple[list[str], list[list[str]]]

QUALITY = {  # key in results.json: heading, scale, digits
    "rouge_1": ("ROUGE-1", 100, 1),
    "rouge_2": ("ROUGE-2", 100, 1),
    "rouge_l": ("ROUGE-L", 100, 1),
    "kl": ("KL", 1, 2),
    "entropy": ("entropy", 1, 2),
    "length_interval": ("length", 1, 1),
    "stop_rate_interval": ("stop %", 100, 1),
    "repeated_3": ("repeated %", 100, 1),
    "copied_2": ("copied 2 %", 100, 1),
    "copied_3": ("copied 3 %", 100, 1),
    "copied_4": ("copied 4 %", 100, 1),
}
QUALITY_NOTES = [
    "Intervals are 95%, over prompts (rows with the same prompt are kept together).",
    "ROUGE is F1 with the row's own completion, times 100, words as in Google's rouge-score "
    "without stemming. KL is log pi - log ref of the completion in nats, at temperature 1 only.",
    "Entropy is that of the next-token distribution at temperature 1 along the samples, nats per "
    "token. Length is in tokens with the stop token.",
    "Repeated is the share of a completion's 3-grams of words that it had before (seq-rep-3 of "
    "Welleck et al. 2020, on words); copied the share of its 2-, 3- and 4-grams found in the "
    "prompt. A completion without n-grams, being shorter, is in neither.",
    "Distinct is the number of different completions of all prompts by their number.",
]
WIN_RATE_NOTES = [
    "Win rate is the mean verdict, a tie counting one half; a reward prefers the completion it "
    "scores higher. The interval is Wilson's for the effective sample size, with Student's "
    "quantile: ties narrow it, rows with the same prompt widen it; one prompt alone has none.",
    "At equal length: a logistic regression of the verdict on tanh(length difference / its "
    "standard deviation), evaluated at 0 (Dubois et al. 2024), with the bootstrap over prompts; "
    "not told where one system is longer by the same number of tokens everywhere.",
]


def tables(results: Mapping[str, Any]) -> list[Rows]:
    """The tables of `results.json`; one without a row is left out."""
    own = results.get("reference_completions")
    systems = [*results["systems"], *([{**own, "name": REFERENCE}] if own else [])]
    found = [
        quality_table(systems),
        reward_table(systems),
        win_rate_table(results.get("win_rates") or []),
    ]
    return [(headers, rows) for headers, rows in found if rows]


def quality_table(systems: Sequence[Mapping[str, Any]]) -> Rows:
    """What the systems' completions are like, by the texts and by the policy itself.

    Args:
        systems: `name`, and what `generation_quality.summary` gives; those without are left out.
    """
    measured = [s for s in systems if s.get("distinct_completions") is not None]
    headers = ["system", *(heading for heading, _, _ in QUALITY.values()), "distinct %"]
    rows = [
        [
            str(system["name"]),
            *(interval_cell(system.get(k), s, d) for k, (_, s, d) in QUALITY.items()),
            f"{100 * system['distinct_completions']:.1f}",
        ]
        for system in measured
    ]
    return headers, rows


def reward_table(systems: Sequence[Mapping[str, Any]]) -> Rows:
    """Mean reward of the systems' completions by every judge of single completions."""
    measured = [system for system in systems if system.get("rewards")]
    judges = list(dict.fromkeys(judge for system in measured for judge in system["rewards"]))
    rows = [
        [str(system["name"]), *(interval_cell(system["rewards"].get(j), 1, 3) for j in judges)]
        for system in measured
    ]
    return ["system", *judges], rows


def win_rate_table(win_rates: Sequence[Mapping[str, Any]]) -> Rows:
    """Every comparison of two systems by a judge, as `win_rates.win_rate` gives it."""
    headers = ["comparison", "judge", "win rate % [95% CI]", "at equal length % [95% CI]"]
    headers += ["wins", "ties", "losses", "not judged", "tokens longer"]
    rows = [
        [
            f"{rate['a']} against {rate['b']}",
            str(rate["judge"]),
            interval_cell(rate, 100, 1, "win_rate"),
            interval_cell(rate["length_controlled"], 100, 1, "win_rate"),
            *(str(rate[f"num_{key}"]) for key in ("wins", "ties", "losses", "not_judged")),
            f"{rate['length_difference']:+.1f}",
        ]
        for rate in win_rates
    ]
    return headers, rows


def interval_cell(
    interval: Mapping[str, Any] | None, scale: float, digits: int, key: str = "mean"
) -> str:
    """`value [low, high]`, or the value where it has no interval; an en dash without one."""
    if not interval:
        return NOT_MEASURED
    parts = (key, "low", "high") if interval["low"] is not None else (key,)
    value, *ends = (f"{scale * interval[part]:.{digits}f}" for part in parts)
    return f"{value} [{', '.join(ends)}]" if ends else value
