"""Preference pairs from rollouts of the starting policy (RSO, Liu et al. 2023).

Rewards are (N, K): N prompts with K candidates each. A pair is two indices of candidates, the
winner's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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
from common.config.dpo import DPOConfig, RolloutPairConfig
from common.data import Example
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp, load
from common.noise import derive_seed, hash_counters, uniform
from common.record import output_lock
from common.record.jsonl import json_line, read_jsonl, write_atomically
from common.rewards.score import RewardFunctions
from common.sampling.engine import new_sampler
from common.sampling.sampler import Rollouts
from common.scoring import check_sampler
from common.text.example import Vocabulary
from common.text.reading import load_examples

PAIRS_FILE = "pairs.tokens"  # in a run's folder, JSON lines: its flags, then the sampled pairs


def pairs_of_run(
    config: DPOConfig,
    vocabulary: Vocabulary,
    model_config: Any,
    mesh: DeviceMesh,
    *,
    is_resumed: bool,
) -> Sequence[Example]:
    """`pairs_from_rollouts`, read from a file if the run is resumed with its flags. Collective."""
    file = Path(config.output_dir) / PAIRS_FILE
    flags = {
        f.name: getattr(config, f.name) for f in fields(config) if not f.metadata["may_change"]
    }
    if is_resumed:
        saved_flags, *rows = (distributed.is_rank0() and read_jsonl(file)) or [{}]
        rows = distributed.from_rank0(rows if saved_flags == flags else [])
        if rows:
            distributed.print_rank0(
                f"pairs from rollouts: the {len(rows)} of this run, from {file}"
            )
            return [Example(**row) for row in rows]
    pairs = pairs_from_rollouts(config, vocabulary, model_config, mesh)
    if distributed.is_rank0():
        output_lock.take(file.parent)
        rows = [vars(replace(pair, columns={})) for pair in pairs]  # training reads no columns
        write_atomically(file, map(json_line, [flags, *rows]))
    return pairs


def pairs_from_rollouts(
    config: RolloutPairConfig,
    vocabulary: Vocabulary,
    model_config: Any,
    mesh: DeviceMesh,
    file: str = "pairs.jsonl",  # in output_dir
) -> list[Example]:
    """Sample from the starting policy, score, and pair: the training set. Collective.

    A function of the seed, the prompts and the weights.
    """
    name, split = config.dataset_name, config.dataset_train_split
    prompts = load_examples(config, name, split, "prompts", vocabulary, config.num_train_rows)
    scorer = RewardFunctions.find(config.reward_funcs, config.reward_weights, vocabulary, config)
    scorer.check_rows(prompts)
    order = data.BatchOrder.of_training(config, data.num_tokens(prompts))
    lm = load.load_policy(config.model_name_or_path, model_config, config)
    policy = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
    self_checks.only_tokens_matter(policy, config)
    scorer.load(mesh)
    sampler = new_sampler(policy, vocabulary, config)
    pairs: list[SampledPair] = []
    all_rewards: list[float] = []
    bar = distributed.progress_bar("rollouts", order.steps_per_epoch)
    for step in range(order.steps_per_epoch):
        examples, is_real = data.prompts(prompts, order.rows(step))  # N
        rollouts = sampler.sample(
            examples,
            num_samples=config.num_candidates,
            temperature=config.temperature,
            step=0,  # every prompt is sampled once, before the first step
            report=lambda text: distributed.show_status(bar, f"rollouts: {text}"),
        )
        if step == 0:
            check_sampler(sampler, examples, rollouts, config.temperature)
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
        texts = rollouts.texts(vocabulary.tokenizer)
        pairs += sampled_pairs(examples, is_real, rollouts, texts, rewards, chosen_pairs)
        all_rewards += rewards[is_real].flatten().tolist()
        bar.update()
    bar.close()
    all_rewards = distributed.from_all_ranks(all_rewards)
    pairs = informative_pairs(distributed.from_all_ranks(pairs), all_rewards, len(prompts))
    if distributed.is_rank0():
        write_jsonl(Path(config.output_dir) / file, pairs)
    return [replace(pair.example, row=row, messages=[]) for row, pair in enumerate(pairs)]


# ---- pairing of candidates -----------------------------------------------------------------------


def choose_pairs(
    rewards: Tensor,  # (N, K), raw
    *,
    method: str,
    num_accepted: int,  # even, at most K; for `rso_tournament`, which makes half as many pairs
    temperature: float,  # RSO's beta, in the unit of the rewards; for `rso_tournament`
    seeds: Tensor,  # (N,) int64, one per prompt: the choice does not depend on the rank or batch
    texts: Tensor | None = None,  # (N, K) int64, equal for equal texts; None: all differ
) -> Tensor:
    """Pairs of each prompt's candidates to compare. Candidates of equal text count as one.

    - `rso_tournament`: statistical rejection sampling accepts some candidates (Liu et al. 2023,
      algorithm 1). They are paired at random, each once: first-round ranking (section 3.2). The
      accepted ones follow softmax(r / temperature) over the policy's samples.
    - `best_worst`: the highest reward against the lowest; one pair, no noise.
    - `all`: every candidate against every other, K (K - 1) / 2 pairs (Rafailov et al. 2023, C.1).

    Returns:
        (N, P, 2) int64 indices of candidates, the higher reward first (either, if they are equal);
        -1 where a prompt has too few different texts for P pairs.
    """
    is_first = first_of_text(rewards, texts)  # (N, K)
    if method == "best_worst":
        return torch.stack([rewards.argmax(1), rewards.argmin(1)], dim=-1)[:, None]
    if method == "all":
        pairs = torch.combinations(torch.arange(rewards.shape[1])).expand(len(rewards), -1, -1)
        return higher_first(rewards, pairs, is_first)
    assert num_accepted % 2 == 0, "a tournament's first round pairs all accepted candidates"
    accepted = rejection_sample(
        rewards,
        num_keep=num_accepted,
        temperature=temperature,
        method="rso",
        seed=seeds,
        texts=texts,
    )  # (N, M)
    # Shuffled: later passes accept worse candidates, so neighbours are no random opponents.
    order = uniform(derive_seed(0, "tournament"), seeds[:, None], torch.arange(num_accepted))
    repeats = ~is_first.gather(1, accepted)  # (N, M), moved to the end, where they make no pair
    shuffled = (order + repeats).argsort(1)  # (N, M)
    pairs = accepted.gather(1, shuffled).view(len(rewards), -1, 2)  # (N, P, 2)
    return higher_first(rewards, pairs, is_first)


def higher_first(rewards: Tensor, pairs: Tensor, is_first: Tensor) -> Tensor:
    """Pairs of candidates (N, P, 2), ordered so that the higher reward (N, K) is first.

    -1 for a pair with a candidate that is not the first of its text (N, K).
    """
    is_pair = is_first.gather(1, pairs.flatten(1)).view_as(pairs).all(-1, keepdim=True)
    pair_rewards = rewards.gather(1, pairs.flatten(1)).view_as(pairs)  # (N, P, 2)
    is_reversed = (pair_rewards[..., 1] > pair_rewards[..., 0])[..., None]  # (N, P, 1)
    return torch.where(is_reversed, pairs.flip(-1), pairs).where(is_pair, -1)


# ---- the pairs as rows ---------------------------------------------------------------------------


@dataclass
class SampledPair:
    """Two completions that the policy sampled, the chosen one first."""

    example: Example  # the prompt, with the ids of both completions
    texts: list[str]
    rewards: list[float]


def sampled_pairs(
    examples: Sequence[Example],  # N
    is_real: Tensor,  # (N,) bool, False = a filler, which counts nowhere
    rollouts: Rollouts,  # K completions of each
    texts: Sequence[str],  # N*K
    rewards: Tensor,  # (N, K)
    chosen_pairs: Tensor,  # (N, P, 2), see `choose_pairs`
) -> list[SampledPair]:
    """The chosen pairs with their texts, those of equal reward included."""
    pairs = []
    for n in is_real.nonzero().flatten().tolist():
        for pair in chosen_pairs[n][chosen_pairs[n, :, 0] >= 0].tolist():
            slots = [n * rewards.shape[1] + i for i in pair]
            example = replace(
                examples[n], completions=[rollouts.completion_ids[slot] for slot in slots]
            )
            pair_texts = [texts[slot] for slot in slots]
            pairs.append(SampledPair(example, pair_texts, rewards[n, pair].tolist()))
    return pairs


def informative_pairs(
    pairs: Sequence[SampledPair], all_rewards: Sequence[float], num_prompts: int
) -> list[SampledPair]:
    """The pairs of unequal rewards without a blank text, by prompt; rank 0 prints the counts.

    `all_rewards` are those of every candidate.

    Raises:
        UserError: there is none.
    """
    unequal = [pair for pair in pairs if pair.rewards[0] != pair.rewards[1]]
    selected = [pair for pair in unequal if all(text.strip() for text in pair.texts)]
    selected.sort(key=lambda pair: pair.example.row)  # stable: a prompt is on one rank
    means = [sum(pair.rewards[i] for pair in selected) / max(1, len(selected)) for i in (0, 1)]
    distributed.print_rank0(
        f"pairs from rollouts: {len(selected)} of {len(pairs)} "
        f"(dropped {len(pairs) - len(unequal)} of equal reward, {len(unequal) - len(selected)} "
        "with a blank completion)\n"
        f"  mean reward of {len(all_rewards)} candidates of {num_prompts} prompts "
        f"{sum(all_rewards) / max(1, len(all_rewards)):.3f}, of the chosen {means[0]:.3f}, of the "
        f"rejected {means[1]:.3f}"
    )
    if not selected:
        raise UserError(
            "rollouts gave no pair: all candidates of a prompt have the same reward, which is "
            "--missing_eos_penalty where none stops; change --reward_funcs, raise --temperature or "
            "--num_candidates."
        )
    return selected


def write_jsonl(path: Path, pairs: Sequence[SampledPair]) -> None:
    """Write the pairs as rows that every stage reads: prompt, chosen, rejected, and the rewards."""
    names = ("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward")
    rows = [dict(zip(names, (p.example.prompt, *p.texts, *p.rewards), strict=True)) for p in pairs]
    write_atomically(path, map(json_line, rows))
