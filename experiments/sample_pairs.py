"""Preference pairs from samples of a policy, labelled by reward functions, as files of rows.

    python -m experiments.sample_pairs --config assets/recipes/sentiment/pairs.yaml

The policy samples `num_candidates` completions of every prompt, the reward functions score them,
and `pair_method` says who is compared: RSO's first-round ranking (Liu et al. 2023), the best with
the worst, or `all`, six pairs of four (Rafailov et al. 2023, C.1). `output_dir` gets `train.jsonl`,
and `validation.jsonl` of a held-out split: it is then a `dataset_name` of DPO and reward models.
Pairs of conversations are messages, so that training reads the tokens that were sampled from.

The pairs are a function of the seed, the prompts and the weights, on any number of processes.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from common import data, distributed, launch, self_checks
from common.advantages import (
    apply_missing_eos_penalty,
    eos_penalty,
    first_of_text,
    rejection_sample,
)
from common.config.engine import EngineConfig
from common.config.flags import SMALLEST_TEMPERATURE, FrozenFlags, flag, path_flag
from common.config.stages import RowsConfig
from common.errors import UserError
from common.evaluation.scoring import check_sampler
from common.forward import Policy
from common.model import fsdp, load
from common.noise import derive_seed, hash_counters, uniform
from common.record.environment import save_run_files
from common.record.jsonl import json_line, write_atomically
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts, Sampler
from common.sampling.vllm.sampler import EngineSampler
from common.text.chat import TEMPLATE_COLUMNS, as_answers, render
from common.text.example import Example, Vocabulary
from common.text.reading import load_splits
from common.text.tokenise import leading_ids, tokenize_completions


@dataclass
class PairsConfig(FrozenFlags, RowsConfig, EngineConfig):
    """Rows have the column `prompt`."""

    _pairs: ClassVar = "pairs"
    pair_method: str = flag(
        "rso_tournament",
        "rso_tournament: random pairs of what rejection sampling accepts; best_worst: one pair; "
        "all: every pair",
        ("rso_tournament", "best_worst", "all"),
    )
    num_candidates: int = flag(8, "completions sampled per prompt")
    num_generations: int = flag(4, "rso_tournament: candidates accepted, twice the pairs; even")
    rejection_temperature: float = flag(
        0.5, "of rejection sampling, in units of reward", ge=SMALLEST_TEMPERATURE
    )
    temperature: float = flag(1.0, "of sampling", ge=SMALLEST_TEMPERATURE)
    reward_funcs: list[str] = path_flag(
        [],
        "as in train_grpo.py: built-ins, file.py:function (your file is run as code), folders",
        required=True,
    )
    reward_weights: list[float] = flag([], "one per reward function (empty: 1 each)")
    missing_eos_penalty: float = flag(-1.0, "reward of a completion that did not stop")
    penalize_missing_eos: bool = flag(True, "false: such a completion keeps its own reward")

    @property
    def candidates_per_prompt(self) -> int:
        """Completions sampled per prompt."""
        return self.num_candidates

    def __post_init__(self) -> None:
        """Refuse values that make no pairs."""
        super().__post_init__()
        num_accepted = self.num_generations if self.pair_method == "rso_tournament" else 2
        if not 2 <= num_accepted <= self.num_candidates or num_accepted % 2:
            most = f"at most --num_candidates, {self.num_candidates}"
            raise self.refused("num_generations", f"even, at least 2 and {most}")


def main(config: PairsConfig) -> None:
    """Sample, score, pair and write each split, the training split last."""
    distributed.seed_everything(config.seed)
    mesh = distributed.mesh(config.num_replicas)
    vocabulary = load.load_vocabulary(config)
    path, folder = config.model_name_or_path, Path(config.output_dir)
    model_config = load.read_model_config(path, "policy", vocabulary.tokenizer, config)
    if distributed.is_rank0():
        commit = getattr(model_config, "_commit_hash", None)
        save_run_files(folder, config, distributed.world_size(), model_commit=commit)
        (folder / "validation.jsonl").unlink(missing_ok=True)  # of an earlier command

    # Prompts, reward functions
    train_set, eval_set = load_splits(config, "prompts", vocabulary)
    scorer = RewardFunctions.find(config.reward_funcs, config.reward_weights, vocabulary, config)
    scorer.check_rows(train_set, eval_set)

    # Policy
    lm = load.load_policy(path, model_config, config)
    policy = fsdp.shard(Policy(lm).requires_grad_(False), config, mesh)
    self_checks.only_tokens_matter(policy, config)
    scorer.load(mesh)
    sampler_class = EngineSampler if config.rollout_server else Sampler
    sampler = sampler_class(policy, vocabulary, config)

    for name, examples in (("validation", eval_set), ("train", train_set)):
        pairs = sample_pairs(examples, sampler, scorer, config) if examples else []
        if pairs and distributed.is_rank0():
            write_rows(folder, name, pairs)


def sample_pairs(
    prompts: Sequence[Example],
    sampler: Sampler,
    scorer: RewardFunctions,
    config: PairsConfig,
) -> "list[Pair]":
    """Sample completions of the prompts, score and pair them. Collective."""
    order = data.BatchOrder.of_training(config, prompts)
    pairs: list[Pair] = []
    all_rewards: list[float] = []
    bar = distributed.progress_bar("rollouts", order.steps_per_epoch)
    for step in range(order.steps_per_epoch):
        examples, is_real = data.prompts(prompts, order.rows(step))  # N
        rollouts = sampler.sample(
            examples,
            num_samples=config.num_candidates,
            temperature=config.temperature,
            step=0,  # every prompt is sampled once
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
        texts = texts_with_stops(rollouts, sampler.vocabulary)
        pairs += as_pairs(examples, is_real, texts, rewards, chosen_pairs)
        all_rewards += rewards[is_real].flatten().tolist()
        bar.update()
    bar.close()
    all_rewards = distributed.from_all_ranks(all_rewards)
    selected = informative_pairs(distributed.from_all_ranks(pairs), all_rewards, len(prompts))
    return as_conversations(selected, sampler.vocabulary, config)


def texts_with_stops(rollouts: Rollouts, vocabulary: Vocabulary) -> list[str]:
    """The completions as text, each with its stop token unless DPO appends that one."""
    texts = rollouts.texts(vocabulary.tokenizer)
    for i, ids in enumerate(rollouts.completion_ids):
        if rollouts.has_stop[i] and ids[-1] != vocabulary.stop_ids[0]:
            texts[i] += vocabulary.tokenizer.decode(ids[-1:])
    return texts


# ---- pairing of candidates -----------------------------------------------------------------------


def choose_pairs(
    rewards: Tensor,  # (N, K), raw: N prompts with K candidates each
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
class Pair:
    """Two completions that the policy sampled, with their rewards."""

    row: int  # of the prompt, before rows were dropped
    prompt: Any  # text, and at last messages if it is a conversation
    chosen: Any
    rejected: Any
    chosen_reward: float
    rejected_reward: float
    messages: list[dict[str, Any]] = field(default_factory=list)  # the prompt; empty for text
    options: dict[str, Any] = field(default_factory=dict)  # columns for the chat template


def as_pairs(
    examples: Sequence[Example],  # N
    is_real: Tensor,  # (N,) bool, False = a filler, which counts nowhere
    texts: Sequence[str],  # N*K
    rewards: Tensor,  # (N, K)
    chosen_pairs: Tensor,  # (N, P, 2), see `choose_pairs`
) -> list[Pair]:
    """The chosen pairs with their texts, those of equal reward included."""
    pairs = []
    for n in is_real.nonzero().flatten().tolist():
        for pair in chosen_pairs[n][chosen_pairs[n, :, 0] >= 0].tolist():
            chosen, rejected = (texts[n * rewards.shape[1] + i] for i in pair)
            example = examples[n]
            made = Pair(example.row, example.prompt, chosen, rejected, *rewards[n, pair].tolist())
            made.messages = example.messages
            if example.messages:
                given = example.columns
                made.options = {name: given[name] for name in TEMPLATE_COLUMNS if name in given}
            pairs.append(made)
    return pairs


def informative_pairs(
    pairs: Sequence[Pair], all_rewards: Sequence[float], num_prompts: int
) -> list[Pair]:
    """The pairs of unequal rewards without a blank text, by prompt; a UserError if there is none.

    Rank 0 prints the counts. `all_rewards` are those of every candidate.
    """
    unequal = [pair for pair in pairs if pair.chosen_reward != pair.rejected_reward]
    selected = [pair for pair in unequal if pair.chosen.strip() and pair.rejected.strip()]
    selected.sort(key=lambda pair: pair.row)  # stable: a prompt is on one rank
    if not selected:
        raise UserError(
            "rollouts gave no pair: all candidates of a prompt have the same reward, which is "
            "--missing_eos_penalty where none stops; change --reward_funcs, raise --temperature or "
            "--num_candidates."
        )
    distributed.print_rank0(
        f"pairs from rollouts: {len(selected)} of {len(pairs)} "
        f"(dropped {len(pairs) - len(unequal)} of equal reward, {len(unequal) - len(selected)} "
        "with a blank completion)\n"
        f"  mean reward of {len(all_rewards)} candidates of {num_prompts} prompts "
        f"{fmean(all_rewards):.3f}, of the chosen {fmean(p.chosen_reward for p in selected):.3f}, "
        f"of the rejected {fmean(p.rejected_reward for p in selected):.3f}"
    )
    return selected


def as_conversations(
    pairs: Sequence[Pair], vocabulary: Vocabulary, config: PairsConfig
) -> list[Pair]:
    """Pairs of conversations as messages, others as they are; a UserError if none is left.

    Trained on, they must be the tokens of the template's prompt and of the sampled texts. Where a
    template writes an answer differently, the pair stays text, or is dropped if its prompt would
    get a bos that the template does not write. Rank 0 prints the counts.
    """
    opening = vocabulary.tokenizer.decode(leading_ids(vocabulary.tokenizer))
    chats = [as_messages(pair, vocabulary, config) if pair.messages else pair for pair in pairs]
    texts = [pair if pair.prompt.startswith(opening) else None for pair in pairs]
    written = [chat or text for chat, text in zip(chats, texts, strict=True)]
    if num_other := chats.count(None):
        distributed.print_rank0(
            f"  the chat template writes an answer of {num_other} pairs differently: "
            f"{num_other - written.count(None)} are rows of text, {written.count(None)} are dropped"
        )
    if not any(written):
        raise UserError(
            "the chat template writes every sampled answer differently, and a text would get a bos "
            "that the template does not write; render the prompts to text yourself."
        )
    return [pair for pair in written if pair]


def as_messages(pair: Pair, vocabulary: Vocabulary, config: PairsConfig) -> Pair | None:
    """A pair with messages for texts; None if the chat template does not give its tokens back."""
    limit = config.max_completion_length
    sampled = tokenize_completions([pair.chosen, pair.rejected], vocabulary, limit)
    texts = [completion.text for completion in sampled]
    with contextlib.suppress(UserError):  # of a template that has no such turns
        chosen, rejected = as_answers(texts, [pair.messages] * 2, vocabulary.tokenizer)
        cells = {"prompt": pair.messages, "chosen": chosen, "rejected": rejected}
        (row,) = render(pair.options | cells, "preference", vocabulary.tokenizer)
        trained = tokenize_completions(row.completions, vocabulary, limit)
        same_ids = [text.ids for text in trained] == [text.ids for text in sampled]
        if row.prompt == pair.prompt and same_ids and not row.is_partial:
            return replace(pair, **cells)
    return None


def write_rows(folder: Path, name: str, pairs: Iterable[Pair]) -> None:
    """Write pairs as rows of any stage, without the number of the prompt's row."""
    ours = ("row", "messages", "options")
    columns = ({k: v for k, v in vars(p).items() if k not in ours} | p.options for p in pairs)
    write_atomically(folder / f"{name}.jsonl", map(json_line, columns))


if __name__ == "__main__":
    launch.run(main, PairsConfig)
