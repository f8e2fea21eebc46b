"""Every name that stages and evaluation write, with unit and formula, as one Markdown table.

    python -m common.metric_table

prints it as it stands in the README. What a stage logs is defined in `common/glossary.py`; here are
its formulas, and the names of `results.json`. x prompt, y completion of |y| tokens, pi policy, ref
reference, r reward, m mask, K candidates of a prompt, w chosen, l rejected.
"""

from common.glossary import METRICS
from common.terminal import markdown_table

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

# What `results.json` says of a system: unit, formula, definition.
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
    "minutes": ("min", NONE, "`elapsed_minutes` of the training run."),
    "peak_memory_gb": ("GB", NONE, "`peak_memory_gb` of the training run."),
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
    # Not aligned: sentences are longer than any line.
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head = markdown_table(headers, []).splitlines()[0]
    lines = [head, "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in escaped)]
    return "\n".join(lines)


def _cells(unit: str, formula: str) -> tuple[str, str]:
    return unit, f"`{formula}`" if formula else ""


if __name__ == "__main__":
    print(glossary_table())
