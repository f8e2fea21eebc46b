"""Every training objective, as small pure tensor functions.

Losses are to be minimised. Token tensors are (B, C): one row per completion, one column per
completion token; masks are bool, True = the token counts. Log-probabilities are in nats and float32
or better; a lower precision is raised to float32 here. Where a loss is a mean, its denominator can
be passed in, since it has to be the one of the whole optimiser step (all micro-batches, all ranks).
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

PREFERENCE_LOSSES = ("sigmoid", "robust", "ipo", "ipo_mean", "hinge", "simpo")
SMOOTHED_LOSSES = ("sigmoid", "robust", "simpo")  # those that a label smoothing has a meaning for
PER_TOKEN_LOSSES = ("ipo_mean", "simpo")  # those of log-probs divided by the completion's length
REFERENCE_FREE_LOSSES = ("simpo",)
KL_ESTIMATORS = ("k1", "k2", "k3")
RATIO_LEVELS = ("token", "sequence")
POLICY_OBJECTIVES = ("clip", "cispo")
SAMPLER_CORRECTIONS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)
MAX_LOG_RATIO = 60.0  # exp of more overflows float32, and 0 times infinity is no gradient
AGGREGATIONS = ("grpo", "token", "constant", "prompt")


def check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{field} is {value!r} but must be one of {', '.join(allowed)}")


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values where the mask is True, over one dimension or all of them.

    Selects instead of multiplying, so that an infinity or NaN under a False stays out.
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def sft_loss(token_logps: Tensor, completion_mask: Tensor, *, num_tokens: Tensor | float) -> Tensor:
    """Negative log-likelihood per completion token: -sum m log pi / num_tokens.

    Args:
        token_logps: (B, C), log pi(token | what precedes it).
        completion_mask: (B, C) bool, True = a completion token, the stop token included.
        num_tokens: Completion tokens of the whole optimiser step, so that the micro-batches' losses
            add up to the step's mean.

    Returns:
        Scalar, nats per token.
    """
    return -_mean(masked_sum(_precise(token_logps), completion_mask), num_tokens)


def bradley_terry_loss(
    chosen_rewards: Tensor, rejected_rewards: Tensor, *, margin: Tensor | None = None
) -> Tensor:
    """Reward-model loss -log sigma(r_w - r_l - margin).

    Stiennon et al. 2020, section 3.4; the margin is Llama 2's (Touvron et al. 2023, eq. 2).

    Args:
        chosen_rewards: (N,) rewards of the preferred completions.
        rejected_rewards: (N,) rewards of the others.
        margin: (N,) by how much the first should exceed the second; default 0.

    Returns:
        (N,) loss of each pair, nats.
    """
    difference = _precise(chosen_rewards) - _precise(rejected_rewards)
    return -F.logsigmoid(difference if margin is None else difference - margin)


def centering_penalty(chosen_rewards: Tensor, rejected_rewards: Tensor) -> Tensor:
    """Penalty (r_w + r_l)^2 that keeps a reward model's scores near 0.

    The comparisons fix differences only, so all rewards may drift together (Eisenstein et al. 2023,
    eq. 2).

    Args:
        chosen_rewards: (N,) rewards of the preferred completions.
        rejected_rewards: (N,) rewards of the others.

    Returns:
        (N,) penalty of each pair.
    """
    return (_precise(chosen_rewards) + _precise(rejected_rewards)) ** 2


def sequence_logps(
    token_logps: Tensor, completion_mask: Tensor, shared_lengths: Tensor, *, ld_alpha: float = 1.0
) -> Tensor:
    """Log-probability of each completion, in which the tail counts less: LD-DPO (Liu et al. 2024).

        sum_{t <= l} log pi(y_t | x, y_<t) + alpha sum_{t > l} log pi(y_t | x, y_<t)

    where l is the length of the pair's shorter completion: what the longer one has beyond it is the
    part by which DPO prefers length. 1 is the plain sum, 0 ignores the tail.

    Args:
        token_logps: (B, C).
        completion_mask: (B, C) bool, True = a completion token; they are each row's first columns.
        shared_lengths: (B,) tokens of the shorter completion of the row's pair.
        ld_alpha: alpha above.

    Returns:
        (B,) nats.
    """
    columns = torch.arange(token_logps.shape[1], device=token_logps.device)
    is_shared = columns < shared_lengths[:, None]  # (B, C)
    return masked_sum(
        _precise(token_logps) * torch.where(is_shared, 1.0, ld_alpha), completion_mask, 1
    )


def preference_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    gamma: float = 0.0,
) -> Tensor:
    """Loss of the DPO family on pairs of completions.

    With D = (log pi_w - log pi_l) - (log ref_w - log ref_l), and e the label smoothing:

    - `sigmoid`: -(1 - e) log sigma(beta D) - e log sigma(-beta D). With e = 0 DPO (Rafailov et al.
      2023, eq. 7), else conservative DPO (Mitchell 2023), e being the chance of a wrong label.
    - `robust`: [-(1 - e) log sigma(beta D) + e log sigma(-beta D)] / (1 - 2e), whose mean over
      labels flipped with chance e is the loss on clean labels (Chowdhury et al. 2024).
    - `ipo`: (D - 1 / (2 beta))^2 on summed log-probs (Azar et al. 2023, eq. 17).
    - `ipo_mean`: the same on log-probs per token.
    - `hinge`: max(0, 1 - beta D), RSO's hinge-norm (Liu et al. 2023, eq. 10).
    - `simpo`: the sigmoid loss of beta (log pi_w / |y_w| - log pi_l / |y_l|) - gamma, no reference
      (Meng et al. 2024, eq. 6).

    Args:
        chosen_logps: (N,) policy log-probs of the preferred completions, summed over their tokens.
        rejected_logps: (N,) the same of the others.
        ref_chosen_logps: (N,) reference log-probs of the preferred completions, summed.
        ref_rejected_logps: (N,) the same of the others.
        beta: Strength of the tie to the reference, or for `simpo` scale of the reward.
        loss_type: One of `PREFERENCE_LOSSES`.
        label_smoothing: e above, in [0, 0.5).
        chosen_lengths: (N,) completion tokens of the preferred ones, for `ipo_mean` and `simpo`.
        rejected_lengths: (N,) completion tokens of the others.
        gamma: Margin of `simpo`.

    Returns:
        (N,) loss of each pair.

    Raises:
        ValueError: An unknown loss type, or a label smoothing that is out of range or that the loss
            type has no use for.
    """
    _check_preference_options(loss_type, label_smoothing)
    chosen, rejected = _precise(chosen_logps), _precise(rejected_logps)
    ref_chosen, ref_rejected = _precise(ref_chosen_logps), _precise(ref_rejected_logps)
    if loss_type in PER_TOKEN_LOSSES:
        assert chosen_lengths is not None, f"{loss_type} averages over tokens: pass the lengths"
        assert rejected_lengths is not None, f"{loss_type} averages over tokens: pass the lengths"
        chosen, ref_chosen = chosen / chosen_lengths, ref_chosen / chosen_lengths
        rejected, ref_rejected = rejected / rejected_lengths, ref_rejected / rejected_lengths

    if loss_type == "simpo":
        return _smoothed_logistic(beta * (chosen - rejected) - gamma, label_smoothing)
    log_ratio_gap = (chosen - rejected) - (ref_chosen - ref_rejected)  # (N,), D above
    if loss_type in ("ipo", "ipo_mean"):
        return (log_ratio_gap - 1 / (2 * beta)) ** 2
    if loss_type == "hinge":
        return torch.relu(1 - beta * log_ratio_gap)
    if loss_type == "robust":
        # The smoothed loss with a negative share of flipped labels, rescaled: weights sum to one.
        flipped = -label_smoothing / (1 - 2 * label_smoothing)
        return _smoothed_logistic(beta * log_ratio_gap, flipped)
    return _smoothed_logistic(beta * log_ratio_gap, label_smoothing)


def kl_estimate(token_logps: Tensor, ref_token_logps: Tensor, *, estimator: str = "k3") -> Tensor:
    """Estimate KL(pi || ref) at each token that was sampled from pi (Schulman 2020).

    With d = log ref - log pi, and expectations over tokens drawn from pi:

    - `k1` = -d: unbiased, of either sign; as a loss its expected gradient is 0: for rewards.
    - `k2` = d^2 / 2: biased; as a loss its expected gradient is that of KL(pi || ref), on tokens
      of pi itself only: times the ratio it is that of something else.
    - `k3` = exp(d) - d - 1: unbiased, never negative (DeepSeekMath eq. 4); as a loss its expected
      gradient is that of KL(ref || pi).

    Times `probability_ratio` at token level, `k1` and `k3` as a loss have the expected gradient of
    KL(pi || ref), also when the tokens were drawn from an older policy (DeepSeek-V3.2, 2025).

    Args:
        token_logps: (B, C), log pi of the sampled tokens.
        ref_token_logps: (B, C), log ref of the same tokens.
        estimator: One of `KL_ESTIMATORS`.

    Returns:
        (B, C), nats. Not masked: the log-probs at padding have to be finite.

    Raises:
        ValueError: An unknown estimator.
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    difference = _precise(ref_token_logps) - _precise(token_logps)  # (B, C)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    return torch.expm1(difference) - difference  # expm1: near 0, exp(d) - 1 keeps no digits


def probability_ratio(
    token_logps: Tensor,
    old_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    ratio_level: str = "token",
) -> Tensor:
    """How much likelier the policy makes what was sampled than the policy that sampled it.

    - `token`: pi / old of each token.
    - `sequence`: the geometric mean of these over the completion (GSPO, Zheng et al. 2025, eq. 7),
      at each token with the gradient of that token's log-prob (eq. 14).

    With the log-probs as their own old ones it is exactly 1 and its gradient is theirs.

    Args:
        token_logps: (B, C), log pi with gradient.
        old_token_logps: (B, C), of the policy that sampled; no gradient goes into them.
        completion_mask: (B, C) bool, True = the token counts.
        ratio_level: One of `RATIO_LEVELS`.

    Returns:
        (B, C); 1 where the mask is False, at sequence level the completion's ratio.

    Raises:
        ValueError: An unknown ratio level.
    """
    check_choice("ratio_level", ratio_level, RATIO_LEVELS)
    log_ratio = _precise(token_logps) - _precise(old_token_logps).detach()
    # Masked before exp: an infinity there would turn the zero gradient of padding into NaN.
    log_ratio = torch.where(completion_mask, log_ratio, torch.zeros_like(log_ratio))  # (B, C)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # far outside of any clip
    if ratio_level == "sequence":
        mean = _mean(log_ratio.sum(dim=1), completion_mask.sum(dim=1))[:, None]  # (B, 1)
        log_ratio = mean.detach() + (log_ratio - log_ratio.detach())
    return log_ratio.exp()


def kl_loss(
    token_logps: Tensor,
    ref_token_logps: Tensor,
    old_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    estimator: str,
    corrected: bool,
) -> Tensor:
    """The tie to the reference at each token: `kl_estimate`, if corrected times the ratio.

    Then its gradient is that of KL(pi || ref) also after the first update (DeepSeek-V3.2 2025).

    Args:
        token_logps: (B, C), log pi with gradient.
        ref_token_logps: (B, C), of the reference.
        old_token_logps: (B, C), of the policy that sampled.
        completion_mask: (B, C) bool, True = the token counts.
        estimator: One of `KL_ESTIMATORS`.
        corrected: Whether to multiply by `probability_ratio` at token level.

    Returns:
        (B, C), nats; not masked.

    Raises:
        ValueError: An unknown estimator.
    """
    kl = kl_estimate(token_logps, ref_token_logps, estimator=estimator)
    if corrected:
        kl = kl * probability_ratio(token_logps, old_token_logps, completion_mask)
    return kl


def policy_loss(
    token_logps: Tensor,
    old_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    objective: str = "clip",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    ratio_level: str = "token",
) -> Tensor:
    """Policy objective at each token, negated; rho is the `probability_ratio`.

    - `clip`: -min(rho A, clip(rho) A), PPO (Schulman et al. 2017, eq. 7) as used by GRPO
      (DeepSeekMath eq. 3), with DAPO's two bounds (Yu et al. 2025, eq. 8) and the dual clip
      max(., delta A) where A < 0 (Ye et al. 2020).
    - `cispo`: -sg(min(rho, 1 + epsilon_high)) A log pi, where sg stops the gradient: no token
      loses its gradient, only its weight is bounded (MiniMax-M1 2025, eq. 4-5).

    With one update per rollout, pass the log-probs as their own old ones: rho is then exactly 1,
    and the loss's gradient is REINFORCE's.

    Args:
        token_logps: (B, C), log pi with gradient.
        old_token_logps: (B, C), log-probs of the policy that sampled; no gradient goes into them.
        advantages: (B, C), or (B,) for one per completion.
        completion_mask: (B, C) bool, True = the token counts.
        objective: One of `POLICY_OBJECTIVES`.
        epsilon_low: `clip` bounds the ratio below at 1 - epsilon_low.
        epsilon_high: The ratio is bounded above at 1 + epsilon_high.
        delta: Bound of `clip`, above 1 + epsilon_high, on the ratio of a token with negative
            advantage, which the two bounds leave unlimited; None = no bound.
        ratio_level: See `probability_ratio`. At sequence level the gradient of `clip` is that of
            GSPO's eq. 5 when a completion has one advantage and `aggregate` is told `grpo`: the
            others weigh a completion by its tokens.

    Returns:
        (B, C), to be minimised; 0 where the mask is False.

    Raises:
        ValueError: An unknown objective or ratio level, or a delta that has no meaning.
    """
    _check_policy_options(objective, epsilon_high, delta)
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    ratio = probability_ratio(
        token_logps, old_token_logps, completion_mask, ratio_level=ratio_level
    )
    if objective == "cispo":
        logps = torch.where(completion_mask, _precise(token_logps), torch.zeros_like(ratio))
        gain = ratio.detach().clamp(max=1 + epsilon_high) * advantages * logps  # (B, C)
    else:
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)  # (B, C)
    if delta is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, delta * advantages), gain)
    return torch.where(completion_mask, -gain, torch.zeros_like(gain))


def clipped_tokens(
    token_logps: Tensor,
    old_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    objective: str = "clip",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    ratio_level: str = "token",
) -> Tensor:
    """Where a bound of `policy_loss` is active: no gradient in `clip`, a smaller one in `cispo`.

    Args:
        token_logps: As in `policy_loss`, and so the other arguments.
        old_token_logps: As in `policy_loss`.
        advantages: As in `policy_loss`.
        completion_mask: As in `policy_loss`.
        objective: As in `policy_loss`.
        epsilon_low: As in `policy_loss`.
        epsilon_high: As in `policy_loss`.
        delta: As in `policy_loss`.
        ratio_level: As in `policy_loss`.

    Returns:
        (B, C) bool, without gradient.
    """
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    with torch.no_grad():
        ratio = probability_ratio(
            token_logps, old_token_logps, completion_mask, ratio_level=ratio_level
        )
        above = ratio > 1 + epsilon_high
        if objective == "cispo":
            return above & (advantages != 0) & completion_mask
        outside = (above & (advantages > 0)) | ((ratio < 1 - epsilon_low) & (advantages < 0))
        if delta is not None:
            outside = outside | ((ratio > delta) & (advantages < 0))
    return outside & completion_mask


def sampler_weights(
    old_token_logps: Tensor,
    sampled_token_logps: Tensor,
    completion_mask: Tensor,
    *,
    correction: str,
    cap: float,
) -> Tensor:
    """Importance weights of completions that another program drew than the one that trains.

    With w = trainer / sampler, of a token (`token_...`) or as the product over the completion
    (`sequence_...`):

    - `..._truncate`: min(w, cap), truncated importance sampling (Yao et al. 2025).
    - `..._mask`: w where 1 / cap <= w <= cap, else 0: a token that both sides see too differently
      is left out (IcePop, 2025, which has two bounds).

    Args:
        old_token_logps: (B, C), of the trainer with the weights that sampled.
        sampled_token_logps: (B, C), recorded while sampling.
        completion_mask: (B, C) bool, True = the token counts.
        correction: One of `SAMPLER_CORRECTIONS`.
        cap: At least 1.

    Returns:
        (B, C) without gradient; 1 everywhere with `none`, and at padding at token level.

    Raises:
        ValueError: An unknown correction.
    """
    check_choice("correction", correction, SAMPLER_CORRECTIONS)
    log_weights = (_precise(old_token_logps) - _precise(sampled_token_logps)).detach()
    log_weights = torch.where(completion_mask, log_weights, torch.zeros_like(log_weights))
    if correction == "none":
        return torch.ones_like(log_weights)
    if correction.startswith("sequence"):
        log_weights = log_weights.sum(dim=1, keepdim=True).expand_as(log_weights)  # (B, C)
    weights = log_weights.exp()
    if correction.endswith("truncate"):
        return weights.clamp(max=cap)
    within = (weights >= 1 / cap) & (weights <= cap)
    return torch.where(within, weights, torch.zeros_like(weights))


def aggregate(
    per_token: Tensor,
    completion_mask: Tensor,
    *,
    aggregation: str = "grpo",
    num_sequences: Tensor | float | None = None,
    num_tokens: Tensor | float | None = None,
    max_length: int | None = None,
    num_generations: int | None = None,
    num_prompts: Tensor | float | None = None,
) -> Tensor:
    """Reduce a loss per token to a scalar.

    - `grpo`: mean over completions of their token mean (DeepSeekMath eq. 3).
    - `token`: mean over all tokens (DAPO, Yu et al. 2025, eq. 8, read as one mean per step).
    - `constant`: sum / (num_sequences * max_length) (Dr. GRPO, Liu et al. 2025).
    - `prompt`: mean over prompts of the token mean over the prompt's completions (DAPO eq. 8, read
      as one mean per prompt).

    A denominator that is not given is the local batch's. A stage passes those of its optimiser step
    (all micro-batches, all ranks): then the micro-batches' losses add up to the step's.

    Args:
        per_token: (B, C).
        completion_mask: (B, C) bool, True = the token counts.
        aggregation: One of `AGGREGATIONS`.
        num_sequences: Completions of the step, for `grpo` and `constant`; default B.
        num_tokens: For `token` the tokens of the step. For `prompt` (B,), the tokens of all
            completions of the row's prompt; default: counted, each prompt's rows being here.
        max_length: Longest completion allowed, tokens, for `constant`; default C, which depends on
            the padding.
        num_generations: Completions of a prompt (neighbouring rows), for `prompt`.
        num_prompts: Prompts of the step, for `prompt`; default B / num_generations.

    Returns:
        Scalar. Where nothing counts it is 0, not 0 / 0.

    Raises:
        ValueError: An unknown aggregation.
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    num_rows, num_columns = per_token.shape
    per_sequence = masked_sum(_precise(per_token), completion_mask, dim=1)  # (B,)
    lengths = completion_mask.sum(dim=1)  # (B,)
    if aggregation == "token":
        return _mean(per_sequence.sum(), lengths.sum() if num_tokens is None else num_tokens)
    if aggregation == "prompt":
        assert num_generations is not None, "`prompt` needs num_generations"
        if num_tokens is None:
            num_tokens = lengths.view(-1, num_generations).sum(dim=1)  # (N,)
            num_tokens = num_tokens.repeat_interleave(num_generations)  # (B,)
        num_prompts = num_rows / num_generations if num_prompts is None else num_prompts
        return _mean(_mean(per_sequence, num_tokens).sum(), num_prompts)
    num_sequences = num_rows if num_sequences is None else num_sequences
    if aggregation == "constant":
        length = num_columns if max_length is None else max_length
        return _mean(per_sequence.sum(), num_sequences * length)
    return _mean(_mean(per_sequence, lengths).sum(), num_sequences)


def _smoothed_logistic(logits: Tensor, flipped: float) -> Tensor:
    """Logistic loss with a share of flipped labels: -(1 - f) log sigma(z) - f log sigma(-z)."""
    return -(1 - flipped) * F.logsigmoid(logits) - flipped * F.logsigmoid(-logits)


def _mean(total: Tensor, count: Tensor | float) -> Tensor:
    """Divide sums by counts; a count of 0, which has a sum of 0, gives 0."""
    if isinstance(count, Tensor):
        return total / count.clamp(min=1)
    return total / max(count, 1)


def _precise(values: Tensor) -> Tensor:
    """The values in float32, or as they are if they are float64."""
    return values if values.dtype == torch.float64 else values.float()


def _check_preference_options(loss_type: str, label_smoothing: float) -> None:
    """Raise ValueError for a loss type that does not exist or a label smoothing it cannot use."""
    check_choice("loss_type", loss_type, PREFERENCE_LOSSES)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing} but must lie in [0, 0.5)")
    if label_smoothing and loss_type not in SMOOTHED_LOSSES:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but must be 0 with loss_type {loss_type}"
        )


def _check_policy_options(objective: str, epsilon_high: float, delta: float | None) -> None:
    """Raise ValueError for an unknown objective, or a delta without a meaning."""
    check_choice("objective", objective, POLICY_OBJECTIVES)
    if delta is not None and objective != "clip":
        raise ValueError(f"delta is {delta} but must be None with objective {objective}")
    if delta is not None and delta <= 1 + epsilon_high:
        raise ValueError(f"delta is {delta} but must exceed 1 + epsilon_high = {1 + epsilon_high}")
