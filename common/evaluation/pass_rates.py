"""How often a completion passes a check, of k samples of a prompt: pass@k and maj@k.

A check is a judge that gives nothing but 0 and 1, such as `gsm8k`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb
from typing import Any

from common.evaluation.intervals import share_over_prompts


def pass_rates(
    rewards: Sequence[Sequence[float | None]],
    answers: Sequence[Sequence[str | None]] | None,
    prompts: Sequence[Hashable],
) -> dict[str, Any]:
    """The rates of N prompts with K samples each, with their intervals over prompts.

    Args:
        rewards: (N, K) 0 or 1; None: the check does not apply, and the prompt is left out.
        answers: (N, K) what each sample gives as its answer, None for nothing; None: no vote.
        prompts: N keys, equal for rows of the same prompt.

    Returns:
        `pass@k` for k = 1, 2, 4, ... and K, and of several samples with answers `maj@K`, each as
        `share_over_prompts` has it.
    """
    most = len(rewards[0])
    rates = {}
    for k in sorted({most, *(2**i for i in range(most.bit_length()))}):
        passed = [None if None in own else pass_at(k, most, own.count(1)) for own in rewards]
        rates[f"pass@{k}"] = share_over_prompts(passed, prompts)
    if answers is not None and most > 1:
        rows = zip(rewards, answers, strict=True)
        votes = [None if None in own else majority(own, given) for own, given in rows]
        rates[f"maj@{most}"] = share_over_prompts(votes, prompts)
    return rates


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The chance that of k samples one passes, unbiased (Chen et al. 2021, eq. 1)."""
    draws = comb(num_samples, k)
    return (draws - comb(num_samples - num_passed, k)) / draws


def majority(rewards: Sequence[float | None], answers: Sequence[str | None]) -> float:
    """Whether the answer that most samples give is right (Wang et al. 2023, self-consistency).

    It is if a sample with it passed. Of a tie it is the share of the answers that are; a sample
    without an answer has no vote, and without any vote it is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    first = [answer for answer, number in votes.items() if number == max(votes.values())]
    right = {answer for answer, reward in zip(answers, rewards, strict=True) if reward == 1}
    return sum(answer in right for answer in first) / max(1, len(first))
