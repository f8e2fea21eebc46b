"""From kept completions to the micro-batches of a step's updates.

`split` says which completions share an update and a forward pass; `before_updates` asks reference
and policy about them, `advantages` compares them; `collate` puts all of it together, once. In
between what is known of the completions stands by their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common import data, distributed
from common.advantages import group_advantages, normalise_globally, step_advantages
from common.grpo.config import GRPOConfig
from common.grpo.rollouts import Kept
from common.losses import aggregate
from common.model import fsdp
from common.model.projection import Head
from common.noise import derive_seed, hash_counters
from common.padding import AnyBatch, on_device
from common.scoring import Policy, ReferenceStates
from common.text.example import Vocabulary

if TYPE_CHECKING:
    from common.model.lora import AdapterReference


class Denominators(NamedTuple):
    """How much there is in an update over all ranks, float32 scalars on the device."""

    num_sequences: Tensor  # completions that count
    num_tokens: Tensor  # of them; with the aggregation `prompt` (B,), those of each row's prompt
    num_prompts: Tensor  # that have one


class Update(NamedTuple):
    """What goes through one optimiser step: on this rank in batches, as many on every rank."""

    batches: list[AnyBatch]  # on the device
    denominators: Denominators


class Before(NamedTuple):
    """What is said of the completions before the updates; log-probabilities by place, (N*G, C)."""

    ref_logps: Tensor | None  # None with beta 0
    old_logps: Tensor | None  # None with one update per rollout: old = current
    ref_states: list[ReferenceStates]  # of each batch in order; for the exact KL only


@dataclass(frozen=True)
class MicroBatch:
    """Kept completions that go through one forward pass, with all that their loss needs."""

    batch: AnyBatch  # B completions
    denominators: Denominators
    advantages: Tensor  # (B,), or (B, C) where steps are rewarded
    sampled_logps: Tensor  # (B, C) from the sampler
    old_logps: Tensor | None  # (B, C)
    ref_logps: Tensor | None  # (B, C)
    ref_states: ReferenceStates | None

    def to(self, device: torch.device) -> "MicroBatch":
        """Itself: it was made on the device."""
        return self

    def aggregated(self, per_token: Tensor, config: GRPOConfig) -> Tensor:
        """The part of the update's loss that these terms (B, C) are, a scalar."""
        return aggregate(
            per_token,
            self.batch.completion_mask,
            aggregation=config.aggregation,
            max_length=config.max_completion_length,
            **self.denominators._asdict(),
        )


# ---- which go together ---------------------------------------------------------------------------


def split(kept: Kept, config: GRPOConfig, vocabulary: Vocabulary, step: int) -> list[Update]:
    """The completions that count, per update in batches packed by length. Collective.

    An update in which nothing counts on any rank is left out.
    """
    dealt, device = deal(kept, config, step), distributed.device()
    shares = [kept.counted & (dealt == m)[:, None] for m in range(config.num_minibatches)]  # (N, G)
    sums = [[share.sum(), kept.lengths[share].sum(), share.any(1).sum()] for share in shares]
    updates = []
    for share, totals in zip(shares, distributed.all_reduce_sum(torch.tensor(sums)), strict=True):
        if totals[0] > 0:
            batches = data.batches(pieces(kept, share, config), config, vocabulary.pad_id)
            own = Denominators(*on_device(totals.float(), device))
            updates.append(Update([batch.to(device) for batch in batches], own))
    return updates


def deal(kept: Kept, config: GRPOConfig, step: int) -> Tensor:
    """The update (N,) in which a prompt takes part: the same on any number of ranks. Collective.

    The prompts of all ranks that count are put in an order by chance and dealt out in turn.
    """
    rows = kept.groups.rows  # (N,)
    if config.num_minibatches == 1:
        return torch.zeros_like(rows)
    keys = hash_counters(derive_seed(config.seed, "minibatches", step), rows)
    keys = torch.where(kept.counted.any(1), keys, torch.iinfo(torch.int64).max)  # others go last
    everyone = torch.tensor(distributed.from_all_ranks(keys.tolist())).sort().values
    return torch.searchsorted(everyone, keys) % config.num_minibatches


def pieces(kept: Kept, share: Tensor, config: GRPOConfig) -> list[data.PromptGroup]:
    """The completions of a share (N, G) in pieces that fit into a forward pass."""
    found = []
    for n, example in enumerate(kept.groups.examples):
        places = (n * share.shape[1] + share[n].nonzero().flatten()).tolist()
        completions = [kept.rollouts.completion_ids[place] for place in places]
        if places:
            found += data.cut_group(example.prompt_ids, completions, places, config, example.row)
    return found


# ---- log-probabilities by place ------------------------------------------------------------------


def before_updates(
    policy: Policy,
    reference: "Policy | AdapterReference | None",
    updates: Sequence[Update],
    kept: Kept,
    config: GRPOConfig,
) -> Before:
    """What the reference and, before several updates, the policy say. Collective."""
    batches = [batch for update in updates for batch in update.batches]
    ref_logps = old_logps = None
    ref_states: list[ReferenceStates] = []
    exact = config.has_exact_kl
    if reference:
        own = [reference(b, temperature=config.temperature, with_hidden=exact) for b in batches]
        ref_logps = by_place(kept, batches, [scores.token_logps for scores in own])
        if exact:
            head = reference_head(reference, config)
            ref_states = [ReferenceStates(scores.hidden, head) for scores in own]
    if config.num_updates > 1:
        logps = [policy(batch, temperature=config.temperature).token_logps for batch in batches]
        old_logps = by_place(kept, batches, logps)
    return Before(ref_logps, old_logps, ref_states)


def by_place(kept: Kept, batches: Sequence[AnyBatch], values: Sequence[Tensor]) -> Tensor:
    """Values (B, C) of each batch's tokens as (N*G, C) on the device; 0 where there is none."""
    found = torch.zeros(kept.rollouts.mask.shape, device=distributed.device())
    for batch, own in zip(batches, values, strict=True):
        found[:, : own.shape[1]].index_add_(0, batch.slots, own)  # 0 in rows that are not real
    return found


def reference_head(reference: "Policy | AdapterReference", config: GRPOConfig) -> Head:
    """The reference's projection onto the vocabulary, whole, as it computes. Collective."""
    fsdp.reshard(reference)
    dtype = torch.bfloat16 if config.bf16 else torch.float32

    def whole(parameter: Tensor) -> Tensor:
        value = parameter.detach().to(distributed.device(), dtype)
        return (value.full_tensor() if isinstance(value, DTensor) else value).float()

    head = reference.lm.get_output_embeddings()
    return Head(whole(head.weight), None if head.bias is None else whole(head.bias))


# ---- advantages by place -------------------------------------------------------------------------


def advantages(kept: Kept, ref_logps: Tensor | None, config: GRPOConfig) -> Tensor:
    """Advantages (N, G) of the kept candidates, or (N, G, C) of their tokens if steps have rewards.

    Collective if the batch takes part. What rejection sampling keeps is better than the group it
    comes from: against the mean of all candidates the kept advantages are positive on average,
    against their own mean they are not. `ref_logps` (N*G, C) are for a KL in the reward.
    """
    groups, in_reward = kept.groups, config.beta > 0 and config.kl_in == "reward"
    if groups.steps:
        return advantages_of_steps(kept, config)
    relative = partial(
        group_advantages,
        scale=config.scale_rewards,
        baseline=config.advantage_baseline,  # of whom says `config.baseline`, below
        counted=kept.counted.any(1),
        all_reduce=distributed.all_reduce_sum,
    )
    if in_reward:
        # k1, log-probability under sampler minus reference: PPO's (Ziegler et al. 2019, eq. 2)
        assert ref_logps is not None, "the reference comes first"
        gaps = (kept.rollouts.token_logps - ref_logps.cpu()) * kept.rollouts.mask  # (N*G, C)
        kl = gaps.sum(1).view(kept.rewards.shape) * kept.counted  # (N, G) nats
        found = relative(kept.rewards - config.beta * kl)
    elif config.baseline == "kept":
        found = relative(kept.rewards)
    else:
        found = relative(groups.rewards).gather(1, kept.indices)
    if config.normalize_globally:
        found = normalise_globally(found, kept.counted, distributed.all_reduce_sum)
    return found


def advantages_of_steps(kept: Kept, config: GRPOConfig) -> Tensor:
    """Advantages (N, G, C) of the kept candidates' tokens; see `advantages.step_advantages`."""
    mask, against_all = kept.groups.rollouts.mask, config.baseline == "all"
    candidates = torch.arange(len(mask)) if against_all else kept.candidates
    steps = [kept.groups.steps[i] for i in candidates.tolist()]
    found = step_advantages(
        [list(own.values()) for own in steps],
        [list(own) for own in steps],
        mask[candidates],
        num_generations=len(candidates) // len(kept.indices),
    )
    return (found[kept.candidates] if against_all else found).view(*kept.indices.shape, -1)


# ---- all of it -----------------------------------------------------------------------------------


def collate(
    kept: Kept, updates: Sequence[Update], before: Before, advantages: Tensor, config: GRPOConfig
) -> list[list[MicroBatch]]:
    """The micro-batches of every update, from what is known by place."""
    device, ref_states = distributed.device(), iter(before.ref_states)
    of_completion = on_device(advantages.flatten(0, 1), device)  # (N*G,) or (N*G, C)
    sampled_logps = on_device(kept.rollouts.token_logps, device)
    of_prompt = (kept.lengths * kept.counted).sum(1, keepdim=True).expand_as(kept.counted)
    of_prompt = on_device(of_prompt.flatten(), device)  # (N*G,) tokens

    def micro_batch(batch: AnyBatch, denominators: Denominators) -> MicroBatch:
        def own(known: Tensor) -> Tensor:
            values, mask = known[batch.slots], batch.completion_mask
            return values if values.dim() == 1 else values[:, : mask.shape[1]] * mask

        if config.aggregation == "prompt":
            denominators = denominators._replace(num_tokens=own(of_prompt))
        return MicroBatch(
            batch,
            denominators,
            advantages=own(of_completion),
            sampled_logps=own(sampled_logps),
            old_logps=None if before.old_logps is None else own(before.old_logps),
            ref_logps=None if before.ref_logps is None else own(before.ref_logps),
            ref_states=next(ref_states, None),
        )

    return [[micro_batch(batch, totals) for batch in batches] for batches, totals in updates]
