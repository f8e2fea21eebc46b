"""Preference pairs from rollouts of the starting policy (RSO, Liu et al. 2023).

Rewards are (N, K): N prompts with K candidates each. A pair is two indices of candidates, the
winner's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common import data, distributed, self_checks
from common.advantages import (
    apply_missing_eos_penalty,
    eos_penalty,
    first_of_text,
    rejection_sample,
)
from common.data import Example
from common.errors import UserError
from common.losses import check_choice
from common.model import fsdp, load
from common.noise import derive_seed, hash_counters, uniform
from common.pairs.config import PAIR_METHODS, DPOConfig
from common.record.jsonl import json_line, write_atomically
from common.record.terminal import progress_bar, show_status
from common.rewards.scorer import RewardScorer
from common.sampling.sampler import Rollouts, Sampler
from common.scoring import Policy


def pairs_from_rollouts(
    config: DPOConfig,
    tokenizer: Any,
    stop_ids: list[int],
    model_config: Any,
    mesh: DeviceMesh,
) -> list[Example]:
    """Sample from the starting policy, score, and pair: the training set. Collective.

    A function of the seed, the prompts and the weights: a resumed run makes the same pairs again.
    """
    name, split = config.dataset_name, config.dataset_train_split
    prompts = data.load_examples(
        config, name, split, "prompts", tokenizer, stop_ids, config.num_train_rows
    )
    scorer = RewardScorer(config.reward_funcs, config.reward_weights, tokenizer, config)
    scorer.check_rows(prompts)
    order = data.BatchOrder.of_training(config, data.num_tokens(prompts))
    lm = load.load_policy(config.model_name_or_path, model_config, config)
    policy = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
    self_checks.loaded_model(policy, config)
    scorer.load(mesh)
    sampler = Sampler(policy, tokenizer, stop_ids, config)
    report = PairReport()
    bar = progress_bar("rollouts", order.steps_per_epoch, active=distributed.is_rank0())
    for step in range(order.steps_per_epoch):
        indices = order.rows(step)
        examples, _ = data.prompts(prompts, indices)  # N
        rollouts = sampler.sample(
            examples,
            num_samples=config.num_candidates,
            temperature=config.temperature,
            step=0,  # every prompt is sampled once, before the first step
            report=lambda text: show_status(bar, f"rollouts: {text}"),
        )
        rewards = scorer.score(examples, rollouts).total  # (N, K)
        has_stop = rollouts.has_stop.view(rewards.shape)
        rewards = apply_missing_eos_penalty(rewards, has_stop, eos_penalty(config))
        chosen_pairs = choose_pairs(
            rewards,
            method=config.pair_method,
            num_accepted=config.num_generations,
            temperature=config.rejection_temperature,
            # A prompt has the same seed on any rank.
            seeds=hash_counters(
                derive_seed(config.seed, "pairs from rollouts"), data.row_numbers(examples)
            ),
            texts=rollouts.numbered(len(examples)),
        )  # (N, P, 2)
        report.add(indices, rollouts, rollouts.texts(tokenizer), rewards, chosen_pairs)
        bar.update()
    bar.close()
    report = merge(distributed.from_all_ranks([report]))
    distributed.print_rank0(report)
    train_set = as_examples(report.pairs, prompts)
    if distributed.is_rank0():
        write_jsonl(Path(config.output_dir) / "pairs.jsonl", report.pairs, prompts)
    return train_set


# ---- who is compared -----------------------------------------------------------------------------


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


# ---- what became of them -------------------------------------------------------------------------


@dataclass
class SampledPair:
    """A comparison of two completions that a policy made, the chosen one first."""

    prompt_index: int  # place of the prompt among those sampled from
    completion_ids: list[list[int]]
    texts: list[str]
    rewards: list[float]


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

    def add(
        self,
        prompt_indices: Sequence[int | None],
        rollouts: Rollouts,
        texts: Sequence[str],
        rewards: Tensor,
        chosen_pairs: Tensor,
    ) -> None:
        """Take the pairs that teach something, and count the others.

        Args:
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
            self.num_prompts += 1
            self.num_candidates += num_candidates
            self.reward_sum += float(rewards[n].double().sum())
            for pair in chosen_pairs[n].tolist():
                if pair[0] < 0:
                    continue
                places = [n * num_candidates + i for i in pair]
                values, both = rewards[n, pair].tolist(), [texts[i] for i in places]
                if values[0] == values[1]:
                    self.num_equal += 1
                elif not all(text.strip() for text in both):
                    self.num_blank += 1
                else:
                    ids = [rollouts.completion_ids[i] for i in places]
                    self.pairs.append(SampledPair(index, ids, both, values))


def merge(reports: Sequence[PairReport]) -> PairReport:
    """The ranks' reports as one, whose pairs stand in the order of the prompts."""
    counts = ("num_prompts", "num_candidates", "reward_sum", "num_equal", "num_blank")
    sums: Any = {name: sum(getattr(report, name) for report in reports) for name in counts}
    pairs = [pair for report in reports for pair in report.pairs]
    pairs.sort(key=lambda pair: pair.prompt_index)  # stable: a prompt is on one rank
    return PairReport(**sums, pairs=pairs)


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
        rest = (pair.completion_ids, prompt.columns, prompt.source)
        examples.append(Example(row, prompt.prompt, prompt.prompt_ids, *rest))
    return examples


def write_jsonl(path: Path, pairs: Sequence[SampledPair], prompts: Sequence[Example]) -> None:
    """Write the pairs as rows that every stage reads: prompt, chosen, rejected, and the rewards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward")
    rows = [(prompts[pair.prompt_index].prompt, *pair.texts, *pair.rewards) for pair in pairs]
    write_atomically(path, [json_line(dict(zip(names, row, strict=True))) for row in rows])
