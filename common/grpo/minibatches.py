"""From selected completions to the updates of a step.

`plan_updates` plans which completions share an update and a forward pass, `logps_before_updates`
computes their log-probabilities, `compute_advantages` their advantages. All of these are columns of
one table with a row for each slot (see `rollouts`), of which a loss takes its batch's rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import data, distributed
from common.advantages import normalise_globally, step_advantages
from common.batch import AnyBatch, on_device
from common.config.grpo import GRPOConfig
from common.errors import naming, naming_rows
from common.forward import Policy, ReferenceStates
from common.grpo.rollouts import SelectedCandidates
from common.model import fsdp, rollout_copy
from common.model.lora import AdapterReference
from common.model.projection import Head
from common.noise import derive_seed, hash_counters
from common.objectives.kinds import Advantages
from common.record.metrics import Accumulator
from common.text.example import Vocabulary

# Nats, root mean square over the tokens of a group, by which rounding may move log-probabilities
# between two forward passes. Logits are tens of nats: 32 times a unit of their type, 2^-24 or 2^-8;
# in float32 16 times as much, for sums of hundreds of terms in another order (bfloat16 adds in
# float32). An error grows with the root of the number of terms (Higham and Mary 2019). SmolLM2-135M
# has 7e-6 and 0.05.
LOGP_ROUNDING = {"float32": 2.0**-15, "bfloat16": 2.0**-3}


class Denominators(NamedTuple):
    """Counts over all ranks that an update's losses are divided by, float32 on the device."""

    num_sequences: Tensor  # completions that count
    num_tokens: Tensor  # of them; with the aggregation `prompt` (B,), those of each row's prompt
    num_prompts: Tensor  # that have one


@dataclass(frozen=True)
class Columns:
    """What the loss takes of completions, on the device: a row for each of N*G slots, or of B."""

    sampled_logps: Tensor  # (N*G, C) nats, under the sampler
    prompt_tokens: Tensor | None = None  # (N*G,) of the prompt's completions; for `prompt` only
    ref_logps: Tensor | None = None  # (N*G, C) under the reference; None with beta 0
    old_logps: Tensor | None = None  # (N*G, C) under the policy before several updates; None: one
    advantages: Tensor | None = None  # (N*G,), or (N*G, C) where steps are rewarded
    ref_states: dict[int, ReferenceStates] = field(
        default_factory=dict
    )  # by a batch's id; exact KL

    def of(self, batch: AnyBatch) -> "Columns":
        """The rows of a batch's B completions; 0 at padding."""
        mask, rows = batch.completion_mask, dict[str, Any]()  # (B, C), C at most the table's
        for name, column in vars(self).items():
            if isinstance(column, Tensor):
                values = column[batch.slots]
                rows[name] = values if values.dim() == 1 else values[:, : mask.shape[1]] * mask
        return replace(self, **rows)

    def with_advantages(self, advantages: Tensor) -> "Columns":
        """The table with advantages (N, G) or (N, G, C)."""
        return replace(self, advantages=on_device(advantages.flatten(0, 1), distributed.device()))


class Update(NamedTuple):
    """The completions of an optimiser update; every rank has the same number of batches."""

    batches: list[AnyBatch]  # a forward pass each, on the device
    denominators: Denominators

    def denominators_of(self, rows: Columns) -> Denominators:
        """Those of a batch's rows: with the aggregation `prompt` each has its prompt's tokens."""
        if rows.prompt_tokens is None:
            return self.denominators
        return self.denominators._replace(num_tokens=rows.prompt_tokens)


# ---- completions that go together ----------------------------------------------------------------


def plan_updates(
    selected: SelectedCandidates, config: GRPOConfig, vocabulary: Vocabulary, step: int
) -> list[Update]:
    """Split the completions that count into updates, and each into batches by length. Collective.

    An update in which nothing counts on any rank is left out.
    """
    assigned, device = assign_minibatch(selected, config, step), distributed.device()
    masks = [assigned == m for m in range(config.num_minibatches)]  # (N,) each
    shares = [selected.counted & mask[:, None] for mask in masks]  # (N, G) each
    sums = [[share.sum(), selected.lengths[share].sum(), share.any(1).sum()] for share in shares]
    updates = []
    for share, totals in zip(shares, distributed.all_reduce_sum(torch.tensor(sums)), strict=True):
        if totals[0] > 0:
            packed = data.pack_micro_batches(prompt_groups(selected, share, config), config)
            batches = [data.collate(groups, config, vocabulary.pad_id) for groups in packed]
            denominators = Denominators(*on_device(totals.float(), device))
            updates.append(Update([batch.to(device) for batch in batches], denominators))
    return updates


def assign_minibatch(selected: SelectedCandidates, config: GRPOConfig, step: int) -> Tensor:
    """Assign each prompt to a minibatch, (N,): the same on any number of ranks. Collective.

    The prompts of all ranks that count are shuffled, and assigned in turn.
    """
    rows = selected.groups.rows  # (N,)
    if config.num_minibatches == 1:
        return torch.zeros_like(rows)
    keys = hash_counters(derive_seed(config.seed, "minibatches", step), rows)
    last = torch.iinfo(torch.int64).max
    keys = torch.where(selected.counted.any(1), keys, last)
    all_keys = torch.tensor(distributed.from_all_ranks(keys.tolist())).sort().values
    return torch.searchsorted(all_keys, keys) % config.num_minibatches


def prompt_groups(
    selected: SelectedCandidates, share: Tensor, config: GRPOConfig
) -> list[data.PromptGroup]:
    """Cut the completions of a share (N, G) into groups that fit into a forward pass."""
    groups: list[data.PromptGroup] = []
    for n, example in enumerate(selected.groups.examples):
        slots = (n * share.shape[1] + share[n].nonzero().flatten()).tolist()
        completions = [selected.rollouts.completion_ids[slot] for slot in slots]
        if slots:
            groups += data.cut_group(example.prompt_ids, completions, slots, config, example.row)
    return groups


# ---- log-probabilities by slot -------------------------------------------------------------------


def sampled_columns(selected: SelectedCandidates, config: GRPOConfig) -> Columns:
    """The table with what sampling alone says."""
    device = distributed.device()
    columns = Columns(on_device(selected.rollouts.token_logps, device))
    if config.aggregation == "prompt":
        sums = (selected.lengths * selected.counted).sum(1, keepdim=True)  # (N, 1)
        prompt_tokens = sums.expand_as(selected.counted).flatten()
        columns = replace(columns, prompt_tokens=on_device(prompt_tokens, device))
    return columns


@torch.no_grad()
def logps_before_updates(
    policy: Policy,
    reference: Policy | AdapterReference | None,
    updates: Sequence[Update],
    selected: SelectedCandidates,
    config: GRPOConfig,
    metrics: Accumulator,
) -> Columns:
    """Log-probs under sampler, reference and, before several updates, the policy. Collective."""
    batches = [batch for update in updates for batch in update.batches]
    columns = sampled_columns(selected, config)
    at, exact = config.temperature, config.has_exact_kl
    with metrics.timed("reference_seconds"):
        if reference:
            scores = [reference(batch, temperature=at, with_hidden=exact) for batch in batches]
            ref_logps = values_by_slot(selected, batches, [each.token_logps for each in scores])
            columns = replace(columns, ref_logps=ref_logps)
            if exact:
                num_ids = policy.lm.config.get_text_config().vocab_size
                head = reference_head(reference, config, num_ids)
                states = [ReferenceStates(each.hidden, head) for each in scores]
                columns = replace(
                    columns, ref_states=dict(zip(map(id, batches), states, strict=True))
                )
        if config.num_iterations * config.num_minibatches > 1:
            logps = [policy(batch, temperature=at).token_logps for batch in batches]
            columns = replace(columns, old_logps=values_by_slot(selected, batches, logps))
    return columns


def values_by_slot(
    selected: SelectedCandidates, batches: Sequence[AnyBatch], values: Sequence[Tensor]
) -> Tensor:
    """Values (B, C) of each batch's tokens as (N*G, C) on the device; 0 where there is none."""
    placed = torch.zeros(selected.rollouts.mask.shape, device=distributed.device())
    for batch, of_batch in zip(batches, values, strict=True):
        # A row that is not real adds 0.
        placed[:, : of_batch.shape[1]].index_add_(0, batch.slots, of_batch)
    return placed


def reference_head(reference: Policy | AdapterReference, config: GRPOConfig, num_ids: int) -> Head:
    """The reference's projection onto the policy's ids, whole, as it computes. Collective.

    A larger model of a family may have more embeddings than the policy: no token has those ids.
    """
    fsdp.reshard(reference)
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    head = Head.of(reference.lm)
    weight, bias = rollout_copy.gather(head.weight, dtype)[:num_ids].float(), head.bias
    if bias is not None:
        bias = rollout_copy.gather(bias, dtype)[:num_ids].float()
    return head._replace(weight=weight, bias=bias)


# ---- advantages by slot --------------------------------------------------------------------------


def compute_advantages(
    selected: SelectedCandidates,
    ref_logps: Tensor | None,
    function: Advantages,
    config: GRPOConfig,
    step: int = 0,  # for messages
) -> Tensor:
    """Advantages (N, G) of the selected candidates; of tokens (N, G, C) if steps have rewards.

    Collective where the whole batch takes part. Rejection sampling keeps the better candidates of a
    group: relative to the mean of all candidates their advantages are positive on average, relative
    to the mean of the selected ones they are not. `ref_logps` (N*G, C) are for a KL in the reward.
    """
    if selected.groups.steps:
        return advantages_of_steps(selected, config)
    rewards = selected.advantage_rewards  # (F, N, K), or with the baseline kept (F, N, G)
    if config.has_kl_in_reward:
        # k1, log-probability under sampler minus reference: PPO's (Ziegler et al. 2019, eq. 2)
        assert ref_logps is not None, "the reference comes first"
        gaps = selected.rollouts.token_logps - ref_logps.cpu()  # (N*G, C)
        gaps = gaps * selected.rollouts.mask
        kl = gaps.sum(1).view(selected.rewards.shape) * selected.counted  # (N, G) nats
        # While policy and reference are equal, the gaps are rounding, and teach nothing
        largest = LOGP_ROUNDING["bfloat16" if config.bf16 else "float32"] / config.temperature
        squares = gaps.square().sum(1).view(kl.shape).sum(1)  # (N,)
        is_rounding = squares <= largest**2 * selected.lengths.sum(1)
        kl = kl.masked_fill((selected.flat & is_rounding)[:, None], 0.0)
        rewards = rewards - config.beta * kl
    weights = function.weights_of(config.reward_weights, len(rewards))
    counted = selected.counted.any(1)
    where = (
        f"at step {step + 1}, {naming_rows(selected.groups.rows[selected.groups.real].tolist())}"
    )
    with distributed.together(), naming("", where, is_ours=True):
        values = function(rewards, weights, counted, distributed.sum_together)  # (N, G) or (N, K)
    if config.baseline == "all":
        values = values.gather(1, selected.indices)  # (N, G)
    if config.normalize_globally or function.normalizes_globally:
        values = normalise_globally(values, selected.counted, distributed.all_reduce_sum)
    return values


def advantages_of_steps(selected: SelectedCandidates, config: GRPOConfig) -> Tensor:
    """Advantages (N, G, C) of the selected candidates' tokens; see `advantages.step_advantages`."""
    mask, against_all = selected.groups.rollouts.mask, config.baseline == "all"
    candidates = torch.arange(len(mask)) if against_all else selected.candidates
    steps = [selected.groups.steps[i] for i in candidates.tolist()]
    of_tokens = step_advantages(
        [list(rewards.values()) for rewards in steps],
        [list(rewards) for rewards in steps],  # the ends
        mask[candidates],
        num_generations=len(candidates) // len(selected.indices),
    )
    of_tokens = of_tokens[selected.candidates] if against_all else of_tokens
    return of_tokens.view(*selected.indices.shape, -1)


# ---- updates -------------------------------------------------------------------------------------


def repeated(
    updates: Sequence[Update], columns: Columns, config: GRPOConfig, metrics: Accumulator
) -> Iterator[tuple[Update, list[Columns], bool]]:
    """The updates of all passes over a rollout, timed, with the rows of each of their batches.

    The last value is whether the pass is the first.
    """
    with_rows = [(update, [*map(columns.of, update.batches)]) for update in updates]
    with metrics.timed("update_seconds"):
        for iteration, (update, rows) in product(range(config.num_iterations), with_rows):
            yield update, rows, iteration == 0
