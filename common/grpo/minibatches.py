"""From selected completions to the micro-batches of a step's updates.

`plan_updates` plans which completions share an update and a forward pass, `logps_before_updates`
computes their log-probabilities, `compute_advantages` their advantages; `make_micro_batches` puts
all of it into micro-batches, once. Until then tensors are indexed by slot (see `rollouts`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from common import data, distributed
from common.advantages import normalise_globally, step_advantages
from common.config.grpo import GRPOConfig
from common.errors import naming, naming_rows
from common.forward import Policy, ReferenceStates
from common.grpo.rollouts import SelectedCandidates
from common.model import fsdp
from common.model.projection import Head
from common.noise import derive_seed, hash_counters
from common.padding import AnyBatch, on_device
from common.record.metrics import Accumulator
from common.text.example import Vocabulary

if TYPE_CHECKING:
    from common.model.lora import AdapterReference


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


class UpdatePlan(NamedTuple):
    """The completions of one minibatch, in batches; every rank has the same number of them."""

    batches: list[AnyBatch]  # on the device
    denominators: Denominators


class OldLogps(NamedTuple):
    """Log-probabilities (N*G, C), by slot, before the updates of a step."""

    ref_logps: Tensor | None  # None with beta 0
    old_logps: Tensor | None  # of the policy; None with one update per rollout: old = current
    ref_states: list[ReferenceStates]  # of each batch in order; for the exact KL only


@dataclass(frozen=True)
class MicroBatch:
    """Completions that share a forward pass, with all that their loss needs, on the device."""

    batch: AnyBatch  # B completions
    denominators: Denominators
    advantages: Tensor  # (B,), or (B, C) where steps are rewarded
    sampled_logps: Tensor  # (B, C) from the sampler
    old_logps: Tensor | None  # (B, C)
    ref_logps: Tensor | None  # (B, C)
    ref_states: ReferenceStates | None


# ---- completions that go together ----------------------------------------------------------------


def plan_updates(
    selected: SelectedCandidates, config: GRPOConfig, vocabulary: Vocabulary, step: int
) -> list[UpdatePlan]:
    """Split the completions that count into updates, and each into batches by length. Collective.

    An update in which nothing counts on any rank is left out.
    """
    assigned, device = assign_minibatch(selected, config, step), distributed.device()
    masks = [assigned == m for m in range(config.num_minibatches)]  # (N,) each
    shares = [selected.counted & mask[:, None] for mask in masks]  # (N, G) each
    sums = [[share.sum(), selected.lengths[share].sum(), share.any(1).sum()] for share in shares]
    plans = []
    for share, totals in zip(shares, distributed.all_reduce_sum(torch.tensor(sums)), strict=True):
        if totals[0] > 0:
            packed = data.pack_micro_batches(prompt_groups(selected, share, config), config)
            batches = [data.collate(groups, config, vocabulary.pad_id) for groups in packed]
            denominators = Denominators(*on_device(totals.float(), device))
            plans.append(UpdatePlan([batch.to(device) for batch in batches], denominators))
    return plans


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


@torch.no_grad()
def logps_before_updates(
    policy: Policy,
    reference: "Policy | AdapterReference | None",
    plans: Sequence[UpdatePlan],
    selected: SelectedCandidates,
    config: GRPOConfig,
    metrics: Accumulator,
) -> OldLogps:
    """Log-probs under the reference and, if several updates follow, the policy. Collective."""
    batches = [batch for plan in plans for batch in plan.batches]
    ref_logps = old_logps = None
    ref_states: list[ReferenceStates] = []
    at, exact = config.temperature, config.has_exact_kl
    with metrics.timed("reference_seconds"):
        if reference:
            scores = [reference(batch, temperature=at, with_hidden=exact) for batch in batches]
            ref_logps = values_by_slot(selected, batches, [each.token_logps for each in scores])
            if exact:
                num_ids = policy.lm.config.get_text_config().vocab_size
                head = reference_head(reference, config, num_ids)
                ref_states = [ReferenceStates(each.hidden, head) for each in scores]
        if config.num_iterations * config.num_minibatches > 1:
            logps = [policy(batch, temperature=at).token_logps for batch in batches]
            old_logps = values_by_slot(selected, batches, logps)
    return OldLogps(ref_logps, old_logps, ref_states)


def values_by_slot(
    selected: SelectedCandidates, batches: Sequence[AnyBatch], values: Sequence[Tensor]
) -> Tensor:
    """Values (B, C) of each batch's tokens as (N*G, C) on the device; 0 where there is none."""
    placed = torch.zeros(selected.rollouts.mask.shape, device=distributed.device())
    for batch, of_batch in zip(batches, values, strict=True):
        # A row that is not real adds 0.
        placed[:, : of_batch.shape[1]].index_add_(0, batch.slots, of_batch)
    return placed


def reference_head(
    reference: "Policy | AdapterReference", config: GRPOConfig, num_ids: int
) -> Head:
    """The reference's projection onto the policy's ids, whole, as it computes. Collective.

    A larger model of a family may have more embeddings than the policy: no token has those ids.
    """
    from common.model import rollout_copy

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
    weights, counted = config.advantage_weights(len(rewards)), selected.counted.any(1)
    function = config.advantage_function  # by default `objectives/advantages/group.py`
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


# ---- micro-batches -------------------------------------------------------------------------------


def make_micro_batches(
    selected: SelectedCandidates,
    plans: Sequence[UpdatePlan],
    before: OldLogps,
    advantages: Tensor,
    config: GRPOConfig,
) -> list[list[MicroBatch]]:
    """Make the micro-batches of every minibatch, each with the values of its completions."""
    device, ref_states = distributed.device(), iter(before.ref_states)
    advantages = on_device(advantages.flatten(0, 1), device)  # (N*G,) or (N*G, C)
    sampled_logps = on_device(selected.rollouts.token_logps, device)  # (N*G, C)
    prompt_tokens = (selected.lengths * selected.counted).sum(1, keepdim=True)
    prompt_tokens = prompt_tokens.expand_as(selected.counted).flatten()
    prompt_tokens = on_device(prompt_tokens, device)  # (N*G,), those of all completions of a prompt
    micro_batches: list[list[MicroBatch]] = []
    for plan in plans:
        micro_batches.append([])
        for batch in plan.batches:
            denominators, values = plan.denominators, partial(values_of_batch, batch)
            if config.aggregation == "prompt":
                denominators = denominators._replace(num_tokens=values(prompt_tokens))
            micro_batches[-1].append(
                MicroBatch(
                    batch,
                    denominators,
                    advantages=values(advantages),
                    sampled_logps=values(sampled_logps),
                    old_logps=None if before.old_logps is None else values(before.old_logps),
                    ref_logps=None if before.ref_logps is None else values(before.ref_logps),
                    ref_states=next(ref_states, None),
                )
            )
    return micro_batches


def values_of_batch(batch: AnyBatch, values: Tensor) -> Tensor:
    """A batch's rows, (B,) or (B, C), of values by slot, (N*G,) or (N*G, C); 0 at padding."""
    values, mask = values[batch.slots], batch.completion_mask
    return values if values.dim() == 1 else values[:, : mask.shape[1]] * mask


def updates(
    minibatches: Sequence[list[MicroBatch]], config: GRPOConfig, metrics: Accumulator
) -> Iterator[tuple[list[MicroBatch], bool]]:
    """The updates of a rollout, timed: micro-batches, and whether they are new to the policy."""
    with metrics.timed("update_seconds"):
        for iteration, batches in product(range(config.num_iterations), minibatches):
            yield batches, iteration == 0
