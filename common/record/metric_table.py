"""Every name that stages and evaluation write, with unit and formula, as one Markdown table.

    python -m common.record.metric_table

prints it as it stands in `docs/metrics.md`. What a stage logs is defined in `glossary.py`;
here are its formulas, and the names of `results.json`. x prompt, y completion of |y| tokens, pi
policy, ref reference, r reward, m mask, K candidates of a prompt, w chosen, l rejected.
"""

from common.record.glossary import METRICS
from common.record.terminal import markdown_table

NONE = ""
# Unit and formula of what stages log; a name without a formula is defined by its sentence alone.
FORMULAS: dict[str, tuple[str, str]] = {
    "loss": ("nats", "SFT -sum m log pi / sum m; RM -log sigma(r_w - r_l); DPO -log sigma(beta D)"),
    "grad_norm": ("norm", "sqrt(sum g^2)"),
    "learning_rate": (NONE, NONE),
    "epoch": ("epochs", "rows used / rows"),
    "tokens": ("tokens", "sum m"),
    "tokens_per_second": ("tokens / s", "tokens / step_seconds"),
    "step_seconds": ("s", NONE),
    "sample_seconds": ("s", NONE),
    "score_seconds": ("s", NONE),
    "reference_seconds": ("s", NONE),
    "update_seconds": ("s", NONE),
    "elapsed_minutes": ("min", NONE),
    "peak_memory_gb": ("GB", NONE),
    "eval_loss": ("nats", "as loss"),
    "eval_accuracy": ("share", "as accuracy"),
    "entropy": ("nats / token", "-sum_v pi(v) log pi(v)"),
    "accuracy": ("share", "(wins + ties / 2) / pairs"),
    "reward_margin": ("reward", "mean(r_w - r_l)"),
    "chosen_reward": ("reward", "mean r_w; DPO beta (log pi(y_w) - log ref(y_w))"),
    "rejected_reward": ("reward", "mean r_l; DPO beta (log pi(y_l) - log ref(y_l))"),
    "chosen_longer": ("share", "(longer + ties / 2) / pairs, by |y|"),
    "reward_shift": ("reward", "-mean r over SFT references"),
    "chosen_logp": ("nats / completion", "mean sum_t log pi(y_w,t)"),
    "rejected_logp": ("nats / completion", "mean sum_t log pi(y_l,t)"),
    "reward": ("reward", "mean sum_i weight_i r_i"),
    "reward_std": ("reward", "mean over groups of sqrt(sum (r - mean r)^2 / (K - 1))"),
    "reward/<function>": ("reward", "mean r_i"),
    "logged/<name>": ("the function's", "mean over calls"),
    "kept_reward": ("reward", "mean r of the kept"),
    "advantage_mean_kept": ("advantage", "mean A of the kept; A = (r - mean r) / (std r + 1e-4)"),
    "effective_sample_size": ("completions", "(sum w)^2 / sum w^2, w = exp((r - max r) / tau)"),
    "candidates_seen": ("completions", NONE),
    "zero_variance_fraction": ("share", "groups with std r = 0 / groups"),
    "replaced_groups": ("groups / step", NONE),
    "kl": ("nats / completion", "mean sum_t (exp(d) - d - 1), d = log ref - log pi (k3)"),
    "clip_fraction": ("share", "clipped tokens / tokens"),
    "sampler_kl": ("nats / token", "mean(log sampler - log trainer)"),
    "sampler_weight_share": ("share", "(sum w)^2 / (n sum w^2)"),
    "completion_length": ("tokens", "mean |y|"),
    "stop_rate": ("share", "stopped / completions"),
}

# What `results.json` says of each of its `systems`: unit, formula, definition. Most are intervals:
# a mean, or the value itself, with `low` and `high`, 95%, and the `count` of values.
EVALUATION: dict[str, tuple[str, str, str]] = {
    "accuracy": (
        "share",
        "(wins + ties / 2) / pairs",
        "Held-out pairs whose chosen completion the system scores higher, with Wilson's 95% "
        "interval (`low`, `high`), `num_pairs` and `num_ties`.",
    ),
    "accuracy_by_source": ("share", "as accuracy", "The same for the rows of each source."),
    "gold_reward": ("0 to 1", "mean gold(x, y)", "Gold reward of one completion per prompt."),
    "reward": ("reward", "mean r(x, y)", "Score by the first reward model of one completion each."),
    "rewards": ("reward", "mean r_i(x, y)", "The same by every judge, by the judge's name."),
    "kl": (
        "nats / completion",
        "mean(log pi(y) - log ref(y)), y from pi",
        "KL(pi || ref) per completion, at temperature 1 only.",
    ),
    "length": ("tokens", "mean |y|", "Tokens per completion, stop token included."),
    "stop_rate": ("share", "stopped / completions", "Completions that ended by themselves."),
    "length_interval": ("tokens", "mean |y|", "The same, with its interval over prompts."),
    "stop_rate_interval": ("share", "stopped / completions", "The same, with its interval."),
    "entropy": (
        "nats / token",
        "-sum_v pi(v) log pi(v)",
        "Entropy of the next-token distribution at temperature 1, mean over the tokens.",
    ),
    "rouge_1": ("F1", "2 P R / (P + R)", "Words shared with the row's own completion."),
    "rouge_2": ("F1", "2 P R / (P + R)", "Pairs of words shared with the row's own completion."),
    "rouge_l": ("F1", "2 P R / (P + R)", "Longest common subsequence of words, as the two above."),
    "repeated_3": ("share", "repeated / 3-grams", "3-grams of words the completion had before."),
    "copied_2": ("share", "copied / 2-grams", "2-grams of words that the prompt has."),
    "copied_3": ("share", "copied / 3-grams", "3-grams of words that the prompt has."),
    "copied_4": ("share", "copied / 4-grams", "4-grams of words that the prompt has."),
    "distinct_completions": ("share", "distinct / prompts", "Different completions of all."),
    "minutes": ("min", NONE, "`elapsed_minutes` of the training run."),
    "peak_memory_gb": ("GB", NONE, "`peak_memory_gb` of the training run."),
}

# The same of `win_rates` and of parts of `comparison`.
COMPARISONS: dict[str, dict[str, tuple[str, str, str]]] = {
    "win_rates": {
        "win_rate": ("share", "(wins + ties / 2) / judged", "Verdicts for `a` against `b`."),
        "length_controlled": (
            "share",
            "sigma(theta) at equal |y|",
            "`win_rate` at equal length, by a logistic regression on the length difference.",
        ),
        "length_difference": ("tokens", "mean(|y_a| - |y_b|)", "How much longer `a` answers."),
    },
    "comparison.differences": {
        "difference": (
            "share",
            "accuracy_first - accuracy_second",
            "On the same pairs, with the paired bootstrap over prompts.",
        ),
        "p_value": ("probability", "McNemar, exact, two-sided", "Takes pairs as independent."),
        "prompt_p_value": (
            "probability",
            "permutation test over prompts",
            "Swaps the two systems on all pairs of a prompt at once.",
        ),
    },
    "comparison.calibration": {
        "ece": (
            "probability",
            "sum_bins n_bin / n |observed - predicted|",
            "Expected calibration error of sigma(r_w - r_l).",
        ),
        "ece_by_chance": ("probability", NONE, "Its mean if every prediction were right."),
        "log_loss": ("nats / pair", "-mean log sigma(r_w - r_l)", "0.693 for a coin."),
    },
}


def glossary_table() -> str:
    """All names as a Markdown table: those that stages log, then those of evaluation."""
    headers = ["name", "unit", "formula", "what it is"]
    rows = [
        [f"`{name}`", *_cells(*FORMULAS[name]), definition] for name, definition in METRICS.items()
    ]
    rows += [
        [f"results: `{name}`", *_cells(unit, formula), definition]
        for name, (unit, formula, definition) in EVALUATION.items()
    ]
    rows += [
        [f"results: `{part}.{name}`", *_cells(unit, formula), definition]
        for part, names in COMPARISONS.items()
        for name, (unit, formula, definition) in names.items()
    ]
    # Not aligned: sentences are longer than any line.
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head = markdown_table(headers, []).splitlines()[0]
    lines = [head, "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in escaped)]
    return "\n".join(lines)


def _cells(unit: str, formula: str) -> tuple[str, str]:
    return unit, f"`{formula}`" if formula else ""


if __name__ == "__main__":
    print(glossary_table())
