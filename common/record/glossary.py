"""Every metric a run records, defined once. Logging a name that is not here is refused."""

from collections.abc import Iterable

FUNCTION_PREFIX = "reward/"
LOGGED_PREFIX = "logged/"
PREFIXES = (FUNCTION_PREFIX, LOGGED_PREFIX)  # of names that a run makes up

METRICS: dict[str, str] = {
    # --- every stage; tokens only in SFT ---
    "loss": "Training loss of the step: SFT nats per completion token; reward model and DPO nats "
    "per pair, all terms included; GRPO the objective that is minimised, KL term included.",
    "grad_norm": "Euclidean norm of the gradient of the step over all parameters, before clipping.",
    "learning_rate": "Learning rate the step was made with.",
    "epoch": "Passes over the training rows so far; fractional.",
    "tokens": "Completion tokens in the loss of the step, over all ranks.",
    "tokens_per_second": "Completion tokens in the loss per second of wall time, over all ranks; "
    "the tokens of prompts, which take their time too, are not counted.",
    "step_seconds": "Wall time of an optimiser step in seconds without evaluation, mean since the "
    "last log.",
    # A phase is timed on the device's clock where there is one, and is a mean over steps and ranks.
    "sample_seconds": "Wall time per step of drawing completions in seconds; GRPO.",
    "score_seconds": "Wall time per step of the reward functions and models in seconds; GRPO.",
    "reference_seconds": "Wall time per step of log-probabilities that are not trained on in "
    "seconds: under the reference, and in GRPO under the policy before its updates.",
    "update_seconds": "Wall time per step of forward, backward and the optimiser's step in "
    "seconds.",
    "elapsed_minutes": "Wall time of the training loop so far in minutes with evaluation, and with "
    "earlier launches of a resumed run.",
    "peak_memory_gb": "Largest memory of any process so far in GB (1e9 bytes), of the GPU if used, "
    "with earlier launches of a resumed run.",
    "eval_loss": "Loss over the whole held-out split, in the units of `loss`.",
    "eval_accuracy": "Preference accuracy on the whole held-out split; a tie counts one half.",
    # --- what the policy does to its tokens ---
    "entropy": "Entropy of the policy's next-token distribution at the temperature of sampling, in "
    "nats, mean over the tokens.",
    # --- pairs; a reward is the model's score, or the implicit one in DPO, beta log(pi / ref): over
    # the completion's length where all losses take that, without ref where none does ---
    "accuracy": "Share of the step's pairs whose chosen reward is the higher; a tie is one half.",
    "reward_margin": "Chosen minus rejected reward, mean over the pairs.",
    "chosen_reward": "Reward of the chosen completion, mean over the pairs; in DPO "
    "beta log(pi/ref) in beta times nats.",
    "rejected_reward": "Reward of the rejected completion, mean over the pairs; in DPO "
    "beta log(pi/ref) in beta times nats.",
    "chosen_longer": "Share of the step's pairs whose chosen completion has more tokens; a tie "
    "is one half.",
    "reward_shift": "What is added to every reward so that references have mean 0.",
    "chosen_logp": "Log-probability of the chosen completion under the policy in nats, summed over "
    "its tokens, mean over the pairs.",
    "rejected_logp": "Log-probability of the rejected completion under the policy in nats, summed "
    "over its tokens, mean over the pairs.",
    # --- GRPO; a group is the completions of one prompt ---
    "reward": "Weighted sum of the reward functions, mean over all candidates but those of "
    "replaced groups.",
    "reward_std": "Standard deviation of the reward within a group, mean over the groups.",
    "reward/<function>": "One reward function before its weight, mean over the completions it "
    "applies to.",
    "logged/<name>": "What reward functions gave to `log_metric`, mean over the calls; one sees "
    "the completions of one rank, also of the prompts that fill up a short batch.",
    "kept_reward": "Reward, mean over the completions that rejection sampling kept.",
    "advantage_mean_kept": "Advantage, mean over the kept completions; far from 0, the baseline is "
    "none.",
    "effective_sample_size": "Kish's (sum w)^2 / sum w^2 of the rejection-sampling weights in "
    "completions, mean over the groups.",
    "candidates_seen": "Candidates that rejection sampling looked at before it had enough, mean "
    "over the groups.",
    "zero_variance_fraction": "Share of groups whose rewards are all equal: they teach nothing.",
    "replaced_groups": "Groups of equal rewards that fresh prompts were put in the place of, per "
    "step, over all ranks.",
    "kl": "KL(policy || reference) by `kl_estimator` in nats per completion: summed over the "
    "tokens, mean over the completions in the loss.",
    "clip_fraction": "Share of completion tokens at which a bound on the ratio is active: no "
    "gradient, in CISPO a smaller one.",
    "sampler_kl": "Sampler minus trainer log-probability in nats, mean over the tokens: estimates "
    "KL(sampler || trainer), and 0 means that both compute the same policy.",
    "sampler_weight_share": "Kish's effective sample size of the weights of `sampler_correction`, "
    "as a share of the tokens: (sum w)^2 / (n sum w^2).",
    "completion_length": "Tokens per completion, stop token included, mean.",
    "stop_rate": "Share of completions that ended with a stop token within the length limit.",
}


# What a console line and the bar show, in this order; metrics.jsonl has everything.
CONSOLE = (
    "loss",
    "eval_loss",
    "accuracy",
    "eval_accuracy",
    "reward",
    "kl",
    "completion_length",
    "stop_rate",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "reward_shift",
)
POSTFIX = ("loss", "accuracy", "reward", "kl")


def check_names(names: Iterable[str]) -> None:
    """Assert that every name is defined."""
    for name in names:
        assert is_defined(name), f"metric {name!r} has no definition in METRICS"


def is_defined(name: str) -> bool:
    """Whether a metric is in `METRICS`, or made up behind one of `PREFIXES`."""
    return name in METRICS or any(name.startswith(p) and len(name) > len(p) for p in PREFIXES)
