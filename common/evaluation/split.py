"""Evaluation on a whole split in fixed order, split over ranks, the same numbers on every rank."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from common import data, distributed
from common.config.stages import CommonConfig, TrainConfig
from common.data import Example, PromptGroup
from common.forward import sequence_scores
from common.losses import PER_TOKEN_LOSSES, REFERENCE_FREE_LOSSES, sequence_logps, wins
from common.model import fsdp
from common.padding import AnyBatch
from common.self_checks import sampler_equals_trainer
from common.text.example import Vocabulary

if TYPE_CHECKING:
    from common.record.metrics import Accumulator
    from common.sampling.sampler import Rollouts, Sampler


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

    Returns:
        (N, K), or (N, K, S), of N examples with K completions each, float64 on the host, the same
        on every rank.
    """
    groups, first_slots = distinct_completions(examples, config)
    packed = data.pack_micro_batches(groups[distributed.rank() :: distributed.world_size()], config)
    bar = distributed.progress_bar(title, len(packed), unit="batch")

    def batches() -> Iterator[AnyBatch]:
        for batch in packed:
            bar.update()
            yield data.collate(batch, config.layout, vocabulary.pad_id)
        bar.close()

    scores = score_batches(model, batches(), len(first_slots), score)  # by slot
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
    """Every different completion of a prompt once, the longest first.

    Returns:
        The groups, in which completion k of row n has the slot n * K + k, n the first row with it;
        and for each of the N * K slots the first slot with the same prompt and completion.
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
    sampler: "Sampler", prompts: Sequence[Example], rollouts: "Rollouts", temperature: float
) -> None:
    """`self_checks.sampler_equals_trainer`, on the longest of N prompts' rollouts. Collective."""
    config = sampler.config
    if config.self_check:
        groups, _ = distinct_completions(rollouts.completed(prompts), config)
        first = data.pack_micro_batches(groups, config)[0]
        batch = data.collate(first, config.layout, sampler.vocabulary.pad_id)
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


def shorter_lengths(examples: Sequence[Example]) -> Tensor:
    """Tokens of the shorter completion of each pair, (rows,) on the device."""
    shorter: Tensor = data.lengths(examples)[:, 1:].amin(1)
    return shorter.to(distributed.device())


def tail_weighted_logps(
    model: nn.Module, batches: Iterable[AnyBatch], pairs: Sequence[Example], ld_alpha: float
) -> Tensor:
    """Log-probabilities (N, 2) of N pairs in these batches; tails count `ld_alpha`. Collective."""
    shared_lengths = shorter_lengths(pairs)  # (N,)

    def score(model: nn.Module, batch: AnyBatch) -> Tensor:
        shared = shared_lengths[batch.slots // 2]  # (B,)
        token_logps = model(batch).token_logps  # (B, C)
        return sequence_logps(token_logps, batch.completion_mask, shared, ld_alpha=ld_alpha)

    return score_batches(model, batches, 2 * len(pairs), score).view(-1, 2)


@dataclass(frozen=True)
class ImplicitReward:
    """The reward by which a run's preference loss judges a completion; its flags decide.

    beta (log pi - log ref) (Rafailov et al. 2023, eq. 5); per token with `PER_TOKEN_LOSSES`, and
    without log ref with `REFERENCE_FREE_LOSSES` (SimPO, Meng et al. 2024, eq. 4). Of a sum of
    losses: with the reference if one of them has it, per token if all are.
    """

    loss_type: Sequence[str] = ("sigmoid",)  # one or several of `PREFERENCE_LOSSES`
    beta: float = 1.0
    reference_free: bool = False  # every completion is as likely in the reference
    ld_alpha: float = 1.0  # weight of tokens beyond the shorter completion's length in log-probs

    @property
    def needs_reference(self) -> bool:
        """Whether any loss compares with the reference."""
        return not self.reference_free and not set(self.loss_type) <= set(REFERENCE_FREE_LOSSES)

    def __call__(self, logps: Tensor, ref_logps: Tensor | None, lengths: Tensor) -> Tensor:
        """Rewards (N, 2) by `sequence_logps` (N, 2) and lengths (N, 2) in tokens."""
        if self.needs_reference and ref_logps is not None:
            logps = logps - ref_logps
        is_per_token = set(self.loss_type) <= set(PER_TOKEN_LOSSES)
        return self.beta * (logps / lengths if is_per_token else logps)


def pair_logps(
    policy: nn.Module,
    pairs: Sequence[Example],
    config: CommonConfig,
    vocabulary: Vocabulary,
    title: str,
    ld_alpha: float = 1.0,
) -> Tensor:
    """Log-probabilities (N, 2) of N pairs; tails count `ld_alpha`. Collective."""
    if ld_alpha == 1:
        return score_examples(policy, pairs, config, vocabulary, title)
    # Where tails begin depends on the other completion of the row, so no row is left out.
    rows = list(range(distributed.rank(), len(pairs), distributed.world_size()))
    batches = data.micro_batches(pairs, rows, config, vocabulary)
    return tail_weighted_logps(policy, batches, pairs, ld_alpha)


def held_out_metrics(scores: Tensor, losses: Tensor) -> dict[str, float]:
    """Metrics of N held-out pairs by their scores (N, 2), chosen first, and losses (N,)."""
    from common.evaluation.intervals import outcomes, preference_accuracy

    margin, loss = (scores[:, 0] - scores[:, 1]).mean(), losses.mean()
    metrics = preference_accuracy(outcomes(*scores.unbind(1))).metrics
    return metrics | {"eval_reward_margin": float(margin), "eval_loss": float(loss)}


def add_pair_metrics(metrics: "Accumulator", rewards: Tensor, real: Tensor) -> None:
    """Add the metrics of N pairs by their rewards (N, 2), implicit ones or a reward model's.

    Where `real` (N,) is False a pair is filler that counts nowhere.
    """
    chosen, rejected = rewards.detach().unbind(-1)  # (N,) each
    columns = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
        "accuracy": wins(chosen, rejected),
    }
    for name, values in columns.items():
        metrics.add(name, (values * real).sum(), real.sum())


def pair_table(
    examples: Sequence[Example], scores: Tensor, vocabulary: Vocabulary, config: TrainConfig
) -> list[dict[str, Any]]:
    """Rows to print: prompt end, both completions and their scores (N, 2)."""
    table = []
    names = ("prompt", "chosen", "rejected", "chosen score", "rejected score")
    for example, score in zip(examples[: config.num_sample_prompts], scores.tolist(), strict=False):
        texts = vocabulary.tokenizer.batch_decode(example.completions, skip_special_tokens=True)
        table.append(dict(zip(names, (example.prompt, *texts, *score), strict=True)))
    return table
