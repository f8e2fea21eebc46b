"""Names of the metrics that runs record; docs/metrics.md defines them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FUNCTION_PREFIX = "reward/"
LOGGED_PREFIX = "logged/"
OBJECTIVE_PREFIX = "objective/"
# Prefixes of names that depend on the run: of reward functions, what they log, an objective's.
PREFIXES = (FUNCTION_PREFIX, LOGGED_PREFIX, OBJECTIVE_PREFIX, f"eval_{FUNCTION_PREFIX}")
ENDS = ("_low", "_high")  # of a 95% interval: eval_reward_low, eval_reward_low/gold

METRICS = (
    # every stage; tokens only in SFT
    *("loss", "grad_norm", "learning_rate", "epoch", "tokens", "tokens_per_second"),
    *("step_seconds", "sample_seconds", "score_seconds", "reference_seconds", "update_seconds"),
    *("elapsed_minutes", "peak_memory_gb", "eval_loss", "eval_accuracy", "entropy"),
    # pairs: reward model and DPO
    *("accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_longer"),
    *("reward_shift", "chosen_logp", "rejected_logp", "eval_reward_margin"),
    # GRPO
    *("reward", "reward_std", "reward/<function>", "logged/<name>", "objective/<name>"),
    *("kept_reward", "advantage_mean_kept", "effective_sample_size"),
    *("zero_variance_fraction", "replaced_groups", "kl", "clip_fraction", "off_policy_fraction"),
    *("sampler_kl", "completion_length", "stop_rate"),
    *("eval_reward", "eval_reward/<function>", "eval_kl", "eval_completion_length"),
    *("eval_stop_rate", "eval_<name>_low", "eval_<name>_high"),
)

# Metrics on a console line, in this order; a prefix stands for all names that begin with it.
CONSOLE = (
    *("loss", "eval_loss", "accuracy", "eval_accuracy", "reward", FUNCTION_PREFIX, "eval_reward"),
    *(f"eval_{FUNCTION_PREFIX}", "kl", "eval_kl"),
    *("completion_length", "stop_rate", "grad_norm", "learning_rate", "tokens_per_second"),
    *("reward_shift",),
)
POSTFIX = ("loss", "accuracy", "reward", "kl")


def with_interval(name: str, value: float, *ends: float | None) -> dict[str, float]:
    """A metric, and the ends of its 95% interval that are not None, by name."""
    values = zip((name, *ends_of(name)), (value, *ends), strict=True)
    return {end: number for end, number in values if number is not None}


def ends_of(name: str) -> list[str]:
    """The names of the ends of a metric's interval."""
    head, slash, function = name.partition("/")
    return [f"{head}{end}{slash}{function}" for end in ENDS]


def recorded(records: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The recorded ones of `names`; one of `PREFIXES` stands for all names that begin with it."""
    present = sorted({name for record in records for name in record})
    return [
        name
        for wanted in names
        for name in present
        if name == wanted or (wanted in PREFIXES and name.startswith(wanted))
    ]
