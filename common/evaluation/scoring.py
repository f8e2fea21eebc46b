"""Evaluation on a whole split in fixed order, split over ranks, the same numbers on every rank."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from common import data, distributed
from common.batch import AnyBatch
from common.config.stages import CommonConfig
from common.data import PromptGroup
from common.forward import sequence_scores
from common.model import fsdp
from common.sampling.sampler import Rollouts, Sampler
from common.self_checks import sampler_equals_trainer
from common.text.example import Example, Vocabulary


def score_examples(
    model: nn.Module,
    examples: Sequence[Example],
    config: CommonConfig,
    vocabulary: Vocabulary,
    title: str,
    score: Callable[[nn.Module, AnyBatch], Tensor] = sequence_scores,
) -> Tensor:
    """Score every completion of every example, those of equal prompts together. Collective.

    The model is a `Policy` (log-probability of a completion) or a `RewardModel` (reward), unless
    `score` computes something else of a batch: (B,), or several numbers (B, S) of one forward pass.
    Returns (N, K), or (N, K, S), of N examples with K completions each, float64 on the host, the
    same on every rank.
    """
    groups, first_slots = distinct_completions(examples, config)
    packed = data.pack_micro_batches(groups[distributed.rank() :: distributed.world_size()], config)
    bar = distributed.progress_bar(title, None, unit="batch", items=packed)
    batches = (data.collate(batch, config, vocabulary.pad_id) for batch in bar)
    scores = score_batches(model, batches, len(first_slots), score)  # by slot
    by_example: Tensor = scores[first_slots].unflatten(0, (-1, len(examples[0].completions)))
    return by_example


@torch.no_grad()
def score_batches(
    model: nn.Module,
    batches: Iterable[AnyBatch],
    num_slots: int,
    score: Callable[[nn.Module, AnyBatch], Tensor],
) -> Tensor:
    """Score the completions of every rank's batches, by their slots. Collective.

    Returns (num_slots,), or (num_slots, S), as `score_examples`; 0 at a slot that is in no batch.
    """
    scored, slots, real = [], [], []
    for batch in batches:
        scored.append(score(model, batch.to(distributed.device())))
        slots.append(batch.slots)
        real.append(batch.is_real)
    fsdp.reshard(model)
    is_real = torch.cat(real)
    values = torch.cat(scored).double().cpu()  # the host waits once
    scores = values.new_zeros(num_slots, *values.shape[1:])
    scores[torch.cat(slots)[is_real]] = values[is_real]
    total: Tensor = distributed.all_reduce_sum(scores)
    return total


def distinct_completions(
    examples: Sequence[Example], config: CommonConfig
) -> tuple[list[PromptGroup], list[int]]:
    """Every different completion once, the longest first, and the slot whose score each slot takes.

    Slot n * K + k is completion k of row n. It takes the score of the first that equals it.
    """
    num_completions = len(examples[0].completions)
    first_slots = list(range(len(examples) * num_completions))
    by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}  # slots by completion
    for row, example in enumerate(examples):
        slots = by_prompt.setdefault(tuple(example.prompt_ids), {})
        for slot, ids in enumerate(example.completions, row * num_completions):
            first_slots[slot] = slots.setdefault(tuple(ids), slot)
    groups = []
    for prompt_ids, slots in by_prompt.items():
        completions = [list(ids) for ids in slots]
        groups += data.cut_group(list(prompt_ids), completions, list(slots.values()), config)
    return sorted(groups, key=lambda group: -data.cost([group], "shared_prefix")), first_slots


def check_sampler(
    sampler: Sampler, prompts: Sequence[Example], rollouts: Rollouts, temperature: float
) -> None:
    """`self_checks.sampler_equals_trainer`, on the longest of N prompts' rollouts. Collective."""
    config = sampler.config
    if config.self_check:
        groups, _ = distinct_completions(rollouts.completed(prompts), config)
        first = data.pack_micro_batches(groups, config)[0]
        batch = data.collate(first, config, sampler.vocabulary.pad_id)
        logps = rollouts.token_logps[batch.slots, : batch.completion_mask.shape[1]]
        batch, logps = batch.to(distributed.device()), logps.to(distributed.device())
        # Greedy sampling records log-probabilities at temperature 1
        sampler_equals_trainer(sampler.policy, batch, logps, None, config, temperature or 1.0)


def mean_sft_loss(
    model: nn.Module, examples: Sequence[Example], config: CommonConfig, vocabulary: Vocabulary
) -> float:
    """Mean negative log-likelihood per trained token over all examples, in nats. Collective."""

    def sums(model: nn.Module, batch: AnyBatch) -> Tensor:
        return torch.stack([sequence_scores(model, batch), batch.completion_mask.sum(-1)], -1)

    totals = score_examples(model, examples, config, vocabulary, "evaluating", score=sums)
    logp, num_tokens = totals.sum((0, 1)).tolist()  # of (N, 1, 2)
    return float(-logp / num_tokens)
