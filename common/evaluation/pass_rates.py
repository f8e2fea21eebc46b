"""Pass rates of k samples of a prompt by a check: pass@k and maj@k.

A check is a judge whose rewards are all 0 or 1, such as `gsm8k`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb

from common.evaluation.accuracy import Interval
from common.evaluation.intervals import share_over_prompts


def pass_rates(
    rewards: Sequence[Sequence[float | None]],  # (N, K) 0 or 1; None: the prompt is left out
    answers: Sequence[Sequence[str | None]] | None,  # (N, K), None for no answer; None: no vote
    prompts: Sequence[Hashable],  # N keys, equal for rows of the same prompt
) -> dict[str, Interval | None]:
    """`pass@k` of K samples for k = 1, 2, 4, ... and K, and with answers `maj@K`, over prompts."""
    most = len(rewards[0])
    rates = {}
    for k in sorted({most, *(2**i for i in range(most.bit_length()))}):
        passed = [None if None in row else pass_at(k, most, row.count(1)) for row in rewards]
        rates[f"pass@{k}"] = share_over_prompts(passed, prompts)
    if answers is not None and most > 1:
        rows = zip(rewards, answers, strict=True)
        votes = [None if None in row else majority(row, texts) for row, texts in rows]
        rates[f"maj@{most}"] = share_over_prompts(votes, prompts)
    return rates


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """Probability that at least one of k samples passes, unbiased (Chen et al. 2021, eq. 1).

    >>> pass_at(2, num_samples=4, num_passed=1)  # 3 of the 6 draws of two have it
    0.5
    """
    draws = comb(num_samples, k)
    return (draws - comb(num_samples - num_passed, k)) / draws


def majority(rewards: Sequence[float | None], answers: Sequence[str | None]) -> float:
    """Whether the answer that most samples give is right (Wang et al. 2023, self-consistency).

    An answer is right if a sample with it passed. In a tie it is the share of right ones among the
    tied answers. A sample without an answer has no vote; without any vote it is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    first = [answer for answer, number in votes.items() if number == max(votes.values())]
    right = {answer for answer, reward in zip(answers, rewards, strict=True) if reward == 1}
    return sum(answer in right for answer in first) / max(1, len(first))
