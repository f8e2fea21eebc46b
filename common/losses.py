"""Training losses, and what objectives are made of, as small pure tensor functions.

Losses are to be minimised. Log-probabilities are in nats and float32 or better; a lower precision
is raised to float32 here. An argument means the same in every function:

    token_logps         (B, C)   log pi of each completion token, given what precedes it
    old_token_logps     (B, C)   the same of the policy before the updates; gets no gradient
    ref_token_logps     (B, C)   the same of the frozen reference
    completion_mask     (B, C)   bool, True = the token counts; the stop token does
    advantages          (B, C)   or (B,) for one per completion
    chosen_*, rejected_*  (N,)   of N pairs: of the preferred completion and of the other
    num_tokens, num_sequences, num_prompts  of the whole optimiser step (all micro-batches, all
                                 ranks), so that the micro-batches' losses add up to the step's

A name in `estimator` and the like that does not exist raises ValueError.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

RATIO_LEVELS = ("token", "sequence")
AGGREGATIONS = ("grpo", "token", "constant", "prompt")
# What the advantage of a reward equal to the mean of its group may be in float32: rounding, over
# the standard deviation. It is 0 for the share of clipped tokens.
ADVANTAGE_ROUNDING = 1e-5
MAX_LOG_RATIO = 60.0  # exp of more overflows float32, and 0 times infinity is no gradient


def check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{field} is {value!r} but must be one of {', '.join(allowed)}")


def check_bounds(**bounds: float) -> None:
    """Raise ValueError for a negative bound.

    >>> check_bounds(epsilon_low=-0.2)
    Traceback (most recent call last):
    ValueError: epsilon_low is -0.2 but must be at least 0
    """
    for name, value in bounds.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value} but must be at least 0")


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over one dimension or all where the mask is True; an infinity elsewhere stays out."""
    return torch.where(mask, values, 0.0).sum(dim=dim)


def sft_loss(token_logps: Tensor, completion_mask: Tensor, *, num_tokens: Tensor | float) -> Tensor:
    """Negative log-likelihood per completion token, a scalar: -sum m log pi / num_tokens."""
    return -_mean(masked_sum(precise(token_logps), completion_mask), num_tokens)


def bradley_terry_loss(
    chosen_rewards: Tensor, rejected_rewards: Tensor, *, margin: Tensor | None = None
) -> Tensor:
    """Reward-model loss of each pair (N,): -log sigma(r_w - r_l - margin).

    Stiennon et al. 2020, section 3.4; the margin (N,), by how much r_w should exceed r_l, is Llama
    2's (Touvron et al. 2023, eq. 2).

    >>> bradley_terry_loss(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 3.0]))
    tensor([0.6931, 2.1269])
    """
    difference = precise(chosen_rewards) - precise(rejected_rewards)
    return -F.logsigmoid(difference if margin is None else difference - margin)


def wins(first: Any, second: Any) -> Any:
    """Score of a pair, or of each of an array: 1 if first > second, 0.5 in a tie, else 0."""
    return (first > second) + 0.5 * (first == second)


def centering_penalty(chosen_rewards: Tensor, rejected_rewards: Tensor) -> Tensor:
    """Penalty (N,) that keeps rewards near 0: (r_w + r_l)^2 (Eisenstein et al. 2023, eq. 2)."""
    return (precise(chosen_rewards) + precise(rejected_rewards)) ** 2


# --- policy optimisation --------------------------------------------------------------------------

_KL: dict[str, Callable[[Tensor], Tensor]] = {  # by d = log ref - log pi, see `kl_estimate`
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.expm1(d) - d,  # expm1: near 0, exp(d) - 1 keeps no digits
}
KL_ESTIMATORS = tuple(_KL)


def kl_estimate(token_logps: Tensor, ref_token_logps: Tensor, *, estimator: str = "k3") -> Tensor:
    """Estimate KL(pi || ref), (B, C) nats, at each token that was sampled from pi (Schulman 2020).

    With d = log ref - log pi, and expectations over tokens drawn from pi:

    - `k1` = -d: unbiased, of either sign; as a loss its expected gradient is 0: for rewards.
    - `k2` = d^2 / 2: biased; as a loss its expected gradient is that of KL(pi || ref), on tokens
      of pi itself only: times the ratio it is that of something else.
    - `k3` = exp(d) - d - 1: unbiased, never negative (DeepSeekMath eq. 4); as a loss its expected
      gradient is that of KL(ref || pi).

    Times the `probability_ratio` at token level, `k1` and `k3` have the expected gradient of
    KL(pi || ref), also when the tokens were drawn from an older policy (DeepSeek-V3.2, 2025).
    Nothing is masked: the log-probs at padding have to be finite.

    >>> kl_estimate(torch.tensor([0.4, 0.2]).log(), torch.tensor([0.2, 0.2]).log())
    tensor([0.1931, 0.0000])
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    return _KL[estimator](precise(ref_token_logps) - precise(token_logps))  # (B, C)


def probability_ratio(
    token_logps: Tensor,
    old_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    ratio_level: str = "token",
) -> Tensor:
    """Probability ratio pi / pi_old, (B, C).

    - `token`: pi / old of each token; 1 where the mask is False.
    - `sequence`: the geometric mean of these over the completion (GSPO, Zheng et al. 2025, eq. 7),
      at each token with the gradient of that token's log-prob (eq. 14).

    With the log-probs as their own old ones it is exactly 1 and its gradient is theirs.
    """
    check_choice("ratio_level", ratio_level, RATIO_LEVELS)
    log_ratio = precise(token_logps) - precise(old_token_logps).detach()
    # Masked before exp: an infinity there would turn the zero gradient of padding into NaN.
    log_ratio = torch.where(completion_mask, log_ratio, 0.0)  # (B, C)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # far outside of any clip
    if ratio_level == "sequence":
        mean = _mean(log_ratio.sum(dim=1), completion_mask.sum(dim=1))[:, None]  # (B, 1)
        log_ratio = mean.detach() + (log_ratio - log_ratio.detach())
    return log_ratio.exp()


def clipped_tokens(bounded: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Where a bound on the ratio is active, (B, C); not where A is 0 up to rounding."""
    counted = torch.nn.functional.hardshrink(advantages, ADVANTAGE_ROUNDING)  # one kernel
    return torch.logical_and(bounded != ratio, counted) & mask


def aggregate(
    per_token: Tensor,
    completion_mask: Tensor,
    *,
    aggregation: str = "grpo",
    num_sequences: Tensor | float | None = None,
    num_tokens: Tensor | float | None = None,
    num_prompts: Tensor | float | None = None,
    num_generations: int | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Reduce a loss per token (B, C) to a scalar; 0 where nothing counts.

    - `grpo`: mean over completions of their token mean (DeepSeekMath eq. 3).
    - `token`: mean over all tokens (DAPO, Yu et al. 2025, eq. 8, read as one mean per step).
    - `constant`: sum / (num_sequences * max_length) (Dr. GRPO, Liu et al. 2025).
    - `prompt`: mean over prompts of the token mean over the prompt's completions (DAPO eq. 8, read
      as one mean per prompt); `num_tokens` (B,) are those of all completions of the row's prompt.

    Without denominators the batch is the whole step and C the `max_length`; its rows are those of
    one prompt, or of prompts with `num_generations` each.

    >>> per_token, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[1, 1], [1, 0]]) > 0
    >>> [float(aggregate(per_token, mask, aggregation=name)) for name in AGGREGATIONS]
    [3.5, 3.0, 2.25, 3.0]
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    lengths = completion_mask.sum(dim=1)  # (B,)
    num_sequences = len(lengths) if num_sequences is None else num_sequences
    size = num_generations or len(lengths)  # rows of a prompt
    if num_tokens is None and aggregation == "prompt":
        num_tokens = lengths.view(-1, size).sum(1).repeat_interleave(size)  # (B,)
    num_tokens = lengths.sum() if num_tokens is None else num_tokens
    num_prompts = len(lengths) / size if num_prompts is None else num_prompts
    max_length = completion_mask.shape[1] if max_length is None else max_length
    denominators: dict[str, tuple[Tensor | float, Tensor | float]] = {
        "grpo": (lengths, num_sequences),
        "token": (1, num_tokens),
        "constant": (1, num_sequences * max_length),
        "prompt": (num_tokens, num_prompts),
    }
    of_sequence, of_all = denominators[aggregation]
    per_sequence = masked_sum(precise(per_token), completion_mask, dim=1)  # (B,)
    return _mean(_mean(per_sequence, of_sequence).sum(), of_all)


def _mean(total: Tensor, count: Tensor | float) -> Tensor:
    """Sums divided by counts; a count of 0, which has a sum of 0, gives 0."""
    return total / torch.as_tensor(count).clamp(min=1)


def precise(values: Tensor) -> Tensor:
    """The values in float32, or as they are if they are float64."""
    return values if values.dtype == torch.float64 else values.float()
