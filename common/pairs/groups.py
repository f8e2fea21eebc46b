"""Pairs of completions: chosen among rollouts, grouped by prompt, and what they have beside texts.

Rewards are (N, K): N prompts with K candidates each. A pair is two indices of candidates, the
winner's first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.advantages import first_of_text, rejection_sample
from common.config import UserError
from common.data import Example
from common.losses import check_choice, wins
from common.noise import derive_seed, hash_counters, uniform
from common.record.jsonl import json_line
from common.sampling.sampler import Rollouts

LARGEST = torch.finfo(torch.float32).max  # of a margin
PAIR_METHODS = ("rso_tournament", "best_worst", "all")


# ---- pairs from rollouts -------------------------------------------------------------------------


def choose_pairs(
    rewards: Tensor,
    *,
    method: str,
    num_accepted: int,
    temperature: float,
    seeds: Tensor,
    texts: Tensor | None = None,
) -> Tensor:
    """Which candidates of each prompt to compare: those of equal text are one.

    - `rso_tournament`: statistical rejection sampling accepts some candidates (Liu et al. 2023,
      algorithm 1), which meet each other in random pairs, each once: first-round ranking (section
      3.2). What is accepted follows softmax(r / temperature) over what the policy samples.
    - `best_worst`: the highest reward against the lowest; one pair, no noise.
    - `all`: every candidate against every other, K (K - 1) / 2 pairs (Rafailov et al. 2023, C.1).

    Args:
        rewards: (N, K) raw rewards.
        method: One of `PAIR_METHODS`.
        num_accepted: Even, at most K; for `rso_tournament`, which makes half as many pairs.
        temperature: RSO's beta, in the unit of the rewards; for `rso_tournament`.
        seeds: (N,) int64, one per prompt: the choice does not depend on the rank or batch.
        texts: (N, K) int64, equal where candidates of a prompt have the same text; None: nowhere.

    Returns:
        (N, P, 2) int64 indices of candidates, the one with the higher reward first; equal rewards
        have no winner. -1 where there were too few texts for so many pairs.
    """
    check_choice("method", method, PAIR_METHODS)
    is_first = first_of_text(rewards, texts)  # (N, K)
    if method == "best_worst":
        return torch.stack([rewards.argmax(1), rewards.argmin(1)], dim=-1)[:, None]
    if method == "all":
        places = torch.combinations(torch.arange(rewards.shape[1])).expand(len(rewards), -1, -1)
        return higher_first(rewards, places, is_first)
    assert num_accepted % 2 == 0, "a tournament's first round pairs all who were accepted"
    accepted = rejection_sample(
        rewards,
        num_keep=num_accepted,
        temperature=temperature,
        method="rso",
        seed=seeds,
        texts=texts,
    )  # (N, M)
    # Late ones were accepted in a later pass, so are worse: neighbours are no random opponents.
    order = uniform(derive_seed(0, "tournament"), seeds[:, None], torch.arange(num_accepted))
    repeats = ~is_first.gather(1, accepted)  # (N, M), which meet each other
    shuffled = (order + repeats).argsort(1)  # (N, M)
    rounds = accepted.gather(1, shuffled).view(len(rewards), -1, 2)  # (N, P, 2)
    return higher_first(rewards, rounds, is_first)


def higher_first(rewards: Tensor, places: Tensor, is_first: Tensor) -> Tensor:
    """Pairs of candidates (N, P, 2), each turned so that the higher reward (N, K) is first.

    -1 in place of a pair with a candidate that is not the first of its text (N, K).
    """
    is_pair = is_first.gather(1, places.flatten(1)).view_as(places).all(-1, keepdim=True)
    scores = rewards.gather(1, places.flatten(1)).view_as(places)  # (N, P, 2)
    is_reversed = (scores[..., 1] > scores[..., 0])[..., None]  # (N, P, 1)
    return torch.where(is_reversed, places.flip(-1), places).where(is_pair, -1)


@dataclass
class SampledPair:
    """A comparison of two completions that a policy made."""

    prompt_index: int  # place of the prompt among those sampled from
    completion_ids: tuple[list[int], list[int]]  # chosen, rejected
    texts: tuple[str, str]
    rewards: tuple[float, float]


@dataclass
class PairReport:
    """What became of the completions that were drawn to make pairs."""

    num_prompts: int = 0
    num_candidates: int = 0  # over all prompts
    reward_sum: float = 0.0  # over all candidates
    num_equal: int = 0  # pairs dropped because their rewards are equal
    num_blank: int = 0  # pairs dropped because a completion has no text
    pairs: list[SampledPair] = field(default_factory=list)

    def __str__(self) -> str:
        """Two lines to print."""
        num_drawn = len(self.pairs) + self.num_equal + self.num_blank
        means = [
            sum(pair.rewards[i] for pair in self.pairs) / max(1, len(self.pairs)) for i in (0, 1)
        ]
        return (
            f"pairs from rollouts: {len(self.pairs)} of {num_drawn} (dropped {self.num_equal} of "
            f"equal reward, {self.num_blank} with a blank completion)\n"
            f"  mean reward of {self.num_candidates} candidates of {self.num_prompts} prompts "
            f"{self.reward_sum / max(1, self.num_candidates):.3f}, of the chosen {means[0]:.3f}, "
            f"of the rejected {means[1]:.3f}"
        )


def add_rollouts(
    report: PairReport,
    prompt_indices: Sequence[int | None],
    rollouts: Rollouts,
    texts: Sequence[str],
    rewards: Tensor,
    chosen_pairs: Tensor,
) -> None:
    """Add a batch of prompts with their candidates and the pairs chosen among these.

    Args:
        report: gets the pairs that teach something, and counts the others.
        prompt_indices: N places of the prompts; None = a filler, which counts nowhere.
        rollouts: K completions of each.
        texts: The same as N*K texts.
        rewards: (N, K).
        chosen_pairs: (N, P, 2), see `choose_pairs`.
    """
    num_candidates = rewards.shape[1]
    for n, index in enumerate(prompt_indices):
        if index is None:
            continue
        report.num_prompts += 1
        report.num_candidates += num_candidates
        report.reward_sum += float(rewards[n].double().sum())
        for winner, loser in chosen_pairs[n].tolist():
            if winner < 0:
                continue
            places = (n * num_candidates + winner, n * num_candidates + loser)
            values = (float(rewards[n, winner]), float(rewards[n, loser]))
            if values[0] == values[1]:
                report.num_equal += 1
            elif not (texts[places[0]].strip() and texts[places[1]].strip()):
                report.num_blank += 1
            else:
                ids = (rollouts.completion_ids[places[0]], rollouts.completion_ids[places[1]])
                both = (texts[places[0]], texts[places[1]])
                report.pairs.append(SampledPair(index, ids, both, values))


def merge(reports: Iterable[PairReport]) -> PairReport:
    """The ranks' reports as one, whose pairs stand in the order of the prompts."""
    total = PairReport()
    for report in reports:
        total.num_prompts += report.num_prompts
        total.num_candidates += report.num_candidates
        total.reward_sum += report.reward_sum
        total.num_equal += report.num_equal
        total.num_blank += report.num_blank
        total.pairs += report.pairs
    total.pairs.sort(key=lambda pair: pair.prompt_index)  # stable: a prompt is on one rank
    return total


def as_examples(pairs: Sequence[SampledPair], prompts: Sequence[Example]) -> list[Example]:
    """The pairs as training examples, with the ids that were sampled.

    Raises:
        UserError: there is none.
    """
    if not pairs:
        raise UserError(
            "--pairs_from rollouts gave no pair: all candidates of a prompt have the same reward, "
            "which is --missing_eos_penalty where none stops; change --reward_funcs, raise "
            "--temperature or --num_candidates."
        )
    examples = []
    for row, pair in enumerate(pairs):
        prompt = prompts[pair.prompt_index]
        rest = (list(pair.completion_ids), prompt.columns, prompt.source)
        examples.append(Example(row, prompt.prompt, prompt.prompt_ids, *rest))
    return examples


def write_jsonl(path: Path, pairs: Sequence[SampledPair], prompts: Sequence[Example]) -> None:
    """Write the pairs as rows that every stage reads: prompt, chosen, rejected, and the rewards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            row: dict[str, Any] = {"prompt": prompts[pair.prompt_index].prompt}
            row |= dict(zip(("chosen", "rejected"), pair.texts, strict=True))
            row |= dict(zip(("chosen_reward", "rejected_reward"), pair.rewards, strict=True))
            file.write(json_line(row))


def prompt_seeds(prompts: Sequence[Example], seed: int) -> Tensor:
    """(N,) int64: a seed for each prompt, which identifies it on any rank."""
    rows = torch.tensor([prompt.row for prompt in prompts])
    return hash_counters(derive_seed(seed, "pairs from rollouts"), rows)


# ---- what pairs have beside their texts ----------------------------------------------------------


@dataclass
class Comparisons:
    """Rows that stay in one batch.

    Attributes:
        rows: Indices of the pairs.
        num_tokens: Of all of them.
    """

    rows: list[int]
    num_tokens: int


def group(examples: Sequence[Example], *, by_prompt: bool) -> list[Comparisons]:
    """All pairs of a prompt together, in the order of their first ones; or each for itself."""
    groups: dict[Any, Comparisons] = {}
    for row, example in enumerate(examples):
        key = tuple(example.prompt_ids) if by_prompt else row
        comparisons = groups.setdefault(key, Comparisons([], 0))
        comparisons.rows.append(row)
        comparisons.num_tokens += example.num_tokens
    return list(groups.values())


def weights(groups: Sequence[Comparisons]) -> Tensor:
    """What each pair counts, so that every group counts 1 (InstructGPT eq. 1): (rows,) float32."""
    num_rows = sum(len(comparisons.rows) for comparisons in groups)
    result = torch.zeros(num_rows)
    for comparisons in groups:
        result[comparisons.rows] = 1 / len(comparisons.rows)
    return result


def margins(examples: Sequence[Example], column: str) -> Tensor:
    """A column of all rows, (rows,) float32; zeros without a name.

    Raises:
        UserError: it is not a finite number in some row.
    """
    if not column:
        return torch.zeros(len(examples))
    values: list[Any] = [example.columns.get(column) for example in examples]
    for example, value in zip(examples, values, strict=True):
        if type(value) not in (int, float) or not abs(value) <= LARGEST:  # NaN compares as False
            raise UserError(
                f"row {example.row + 1} of the pairs has {value!r} in its column {column!r}; "
                "--margin_column names one with a finite number in every row."
            )
    return torch.tensor(values, dtype=torch.float32)


def longer_chosen(lengths: Tensor) -> Tensor:
    """Whether the chosen one of (N, 2) lengths is longer, (N,) float32; a tie is a half."""
    counts: Tensor = wins(*lengths.unbind(-1))
    return counts


def length_balance(examples: Sequence[Example]) -> float:
    """Share of the pairs whose chosen completion is longer: the accuracy of preferring length."""
    lengths = torch.tensor([[len(ids) for ids in example.completions] for example in examples])
    return float(longer_chosen(lengths).double().mean())
