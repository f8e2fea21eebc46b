"""From a step's prompts to the micro-batches that GRPO trains on.

N prompts of this rank, K candidates of each, of which G are kept. A group is *flat* if the rewards
that its baseline is made of are all equal: its advantages are 0.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common import data, distributed, self_checks
from common.advantages import (
    effective_sample_size,
    group_advantages,
    normalise_globally,
    num_candidates_seen,
    rejection_sample,
    step_advantages,
)
from common.config import UserError
from common.data import Example
from common.grpo.config import GRPOConfig
from common.model import fsdp
from common.model.lora import AdapterReference
from common.model.projection import Head
from common.noise import derive_seed, hash_counters, permutation
from common.padding import AnyBatch
from common.record.glossary import FUNCTION_PREFIX, LOGGED_PREFIX
from common.record.metrics import Accumulator
from common.rewards.call import (
    Rewards,
    Steps,
    apply_missing_eos_penalty,
    eos_penalty,
    penalise_steps,
)
from common.rewards.kept import kept
from common.rewards.scorer import RewardScorer
from common.sampling import token_records
from common.sampling.sampler import Rollouts, Sampler
from common.scoring import Policy, ReferenceStates


@dataclass
class Groups:
    """The prompts of a step on this rank, with all candidates."""

    examples: list[Example]  # N
    real: Tensor  # (N,) bool, False = filler, which counts nowhere
    rollouts: Rollouts  # N*K completions, prompt-major
    rewards: Tensor  # (N, K)
    by_function: dict[str, Tensor]  # (N, K) each, nan where a function does not apply
    steps: list[Steps] = field(default_factory=list)  # N*K, empty if no function rewards steps

    @property
    def has_stop(self) -> Tensor:
        """(N, K) bool, False = ended by the length limit."""
        return self.rollouts.has_stop.view(self.rewards.shape)

    @property
    def rows(self) -> Tensor:
        """(N,) int64, the prompts' row numbers."""
        return data.row_numbers(self.examples)


@dataclass
class MicroBatch:
    """Kept completions that go through one forward pass."""

    batch: AnyBatch  # B completions; their places are n * G + g
    sampled_logps: Tensor  # (B, C) from the sampler
    aggregation: dict[str, Any]  # for `losses.aggregate`: by what, and the whole update's counts
    has_effect: bool  # whether any completion of the update counts, on any rank
    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))  # (B,)
    ref_logps: Tensor | None = None  # (B, C); None with beta 0
    ref_states: ReferenceStates | None = None  # for the exact KL only
    old_logps: Tensor | None = None  # (B, C); None with one update per rollout: old = current
    weights: Tensor | None = None  # (B, C) from `losses.sampler_weights`, if it is asked for


# ---- sampling and rewards ------------------------------------------------------------------------


def draw(
    examples: list[Example],
    real: Tensor,
    *,
    step: int,
    total_steps: int,
    sampler: Sampler,
    scorer: RewardScorer,
    config: GRPOConfig,
    metrics: Accumulator,
    report: Callable[[str], object],
) -> Groups:
    """Sample K candidates for each of N prompts, and reward every one. Collective."""
    with metrics.timed("sample_seconds"):
        rollouts = sampler.sample(
            examples,
            num_samples=config.num_candidates,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            step=step,
            report=report,
        )
    with metrics.timed("score_seconds"):
        scored = reward(scorer, examples, rollouts, config, step, total_steps)
    for name, values in scored.notes.metrics.items():
        metrics.add(f"{LOGGED_PREFIX}{name}", sum(values), len(values))
    rest = (scored.by_function, scored.steps)
    return Groups(examples, real, rollouts, scored.total, *rest)


def reward(
    scorer: RewardScorer,
    examples: list[Example],
    rollouts: Rollouts,
    config: GRPOConfig,
    step: int,
    total_steps: int,
) -> Rewards:
    """Rewards (N, K) of K completions of N prompts, with the penalties of length. Collective.

    `step` is the number of finished steps of the run's `total_steps`.
    """
    with kept(scorer, examples, rollouts, config, step, total_steps):
        scored = scorer.score(examples, rollouts, step, total_steps)
    rewards, steps = scored.total, scored.steps
    lengths = rollouts.lengths.view(rewards.shape)
    ends = (lengths.flatten() - 1).tolist()  # of the last tokens, N*K
    if config.overlong_buffer:
        penalties = overlong_penalty(lengths, config.max_completion_length, config.overlong_buffer)
        rewards = rewards + penalties
        for own, end, penalty in zip(steps, ends, penalties.flatten().tolist(), strict=False):
            if penalty != 0:  # a step of 0 would count in the group's mean
                own[end] = own.get(end, 0.0) + penalty
    has_stop = rollouts.has_stop.view(rewards.shape)
    penalty = eos_penalty(config)
    rewards = apply_missing_eos_penalty(rewards, has_stop, penalty)
    if steps:
        refuse_with_steps(config)
        steps = penalise_steps(steps, ends, rollouts.has_stop.tolist(), penalty)
    return replace(scored, total=rewards, steps=steps)


def refuse_with_steps(config: GRPOConfig) -> None:
    """Raise a UserError for flags that mean nothing where functions reward steps."""
    plain = {
        "scale_rewards": "group",
        "advantage_baseline": "mean",
        "normalize_globally": False,
        "kl_in": "loss",
        "zero_variance": "keep",
    }
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise UserError(
                f"--{name} is {getattr(config, name)}; it must be {value} where a reward function "
                "rewards steps, which are normalised as in DeepSeekMath, section 4.1.3."
            )


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft punishment of long completions, from 0 down to -1 (DAPO, Yu et al. 2025, eq. 13).

    Args:
        lengths: Tokens, any shape.
        max_length: The length at which -1 is reached.
        buffer: Tokens before that over which the penalty grows; above 0.

    Returns:
        The shape of `lengths`, float32.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(min=-1, max=0)


# ---- selection -----------------------------------------------------------------------------------


def rejection_options(groups: Groups, config: GRPOConfig, step: int) -> dict[str, Any]:
    """What `rejection_sample` is told; the noise belongs to the prompt, not to its place."""
    return {
        "num_keep": config.num_generations,
        "temperature": config.rejection_temperature,
        "method": config.rejection_method,
        "seed": hash_counters(derive_seed(config.seed, "selection", step), groups.rows),
        "texts": groups.rollouts.numbered(len(groups.rows)) if config.distinct_candidates else None,
    }


def select(groups: Groups, config: GRPOConfig, step: int) -> Tensor:
    """Which of the candidates (N, K) are kept: indices (N, G)."""
    num_prompts, num_candidates = groups.rewards.shape
    if num_candidates == config.num_generations:
        return torch.arange(num_candidates).expand(num_prompts, -1)
    return rejection_sample(groups.rewards, **rejection_options(groups, config, step))


def places_of(groups: Groups, kept: Tensor) -> Tensor:
    """Where the kept candidates (N, G) stand among all N*K rollouts, (N, G)."""
    num_prompts, num_candidates = groups.rewards.shape
    return torch.arange(num_prompts)[:, None] * num_candidates + kept


def rows_of(groups: Groups, kept: Tensor, places: Tensor) -> Tensor:
    """The row numbers (B,) of the prompts of kept candidates, by their places among the N*G."""
    return groups.rows[places.cpu() // kept.shape[1]]


def is_flat(groups: Groups, kept: Tensor, config: GRPOConfig) -> Tensor:
    """Groups (N,) in which all rewards behind the baseline are equal; False for filler."""
    rewards = groups.rewards if config.baseline == "all" else groups.rewards.gather(1, kept)
    return (rewards == rewards[:, :1]).all(1) & groups.real


def counted(groups: Groups, kept: Tensor, config: GRPOConfig) -> Tensor:
    """Which kept completions (N, G) are in the loss and in its denominators."""
    counts = groups.real[:, None].expand_as(kept)
    if config.zero_variance != "keep":
        counts = counts & ~is_flat(groups, kept, config)[:, None]
    if config.mask_truncated_completions:
        counts = counts & groups.has_stop.gather(1, kept)
    return counts


def replace_flat(
    groups: Groups,
    train_set: Sequence[Example],
    draw_more: Callable[[list[Example], Tensor], Groups],
    config: GRPOConfig,
    step: int,
) -> tuple[Groups, int]:
    """Put fresh prompts in the place of flat groups, for some rounds (DAPO's dynamic sampling).

    The fresh rows are those of a permutation that belongs to the step, without the rows of the
    batch: so neither a resumed run nor the number of ranks changes which prompts end in the batch.

    Args:
        groups: of the step.
        train_set: where fresh prompts come from.
        draw_more: samples and rewards prompts, of which some are filler; collective.
        config: `max_resamples` rounds at most.
        step: of the run.

    Returns:
        The groups after it, and how many were replaced, over all ranks. Collective.
    """
    rank, num_replaced = distributed.rank(), 0
    used = set(distributed.from_all_ranks(groups.rows[groups.real].tolist()))
    order = permutation(len(train_set), derive_seed(config.seed, "resampling"), step)
    fresh = [place for place in order if train_set[place].row not in used]
    for _ in range(config.max_resamples):
        flat = is_flat(groups, select(groups, config, step), config)  # (N,)
        num_flat = torch.tensor(distributed.from_all_ranks([int(flat.sum())]))  # of each rank
        taken, fresh = fresh[: int(num_flat.sum())], fresh[int(num_flat.sum()) :]
        if not taken:
            break
        # The k-th flat group over the ranks gets the k-th fresh row. Ranks draw equally many, since
        # a reward model is called by all or by none.
        start = int(num_flat[:rank].sum())
        mine = taken[start : start + int(num_flat[rank])]
        filler: list[int | None] = [None] * (int(num_flat.max()) - len(mine))
        drawn = draw_more(*data.prompts(train_set, [*mine, *filler]))
        groups = replaced(groups, flat.nonzero().flatten()[: len(mine)], drawn)
        num_replaced += len(taken)
    return groups, num_replaced


def replaced(groups: Groups, places: Tensor, others: Groups) -> Groups:
    """The groups with the first of the others in these places (n,)."""
    num_prompts = len(groups.examples)
    origin = torch.arange(num_prompts)  # (N,), in both one after the other
    origin[places] = num_prompts + torch.arange(len(places))

    def mixed(one: Tensor, other: Tensor) -> Tensor:
        by_prompt = torch.cat([one, other]).view(-1, one.numel() // num_prompts)
        return by_prompt[origin].view(one.shape)

    pairs = zip(groups.rollouts.tensors, others.rollouts.tensors, strict=True)
    examples = [*groups.examples, *others.examples]
    return Groups(
        [examples[i] for i in origin.tolist()],
        groups.real,
        Rollouts(*(mixed(*pair) for pair in pairs)),
        mixed(groups.rewards, others.rewards),
        {name: mixed(own, others.by_function[name]) for name, own in groups.by_function.items()},
    )


# ---- micro-batches -------------------------------------------------------------------------------


def collate(
    groups: Groups, kept: Tensor, counts: Tensor, config: GRPOConfig, pad_id: int, step: int
) -> list[list[MicroBatch]]:
    """The completions that count, per update in micro-batches packed by length. Collective.

    An update has as many micro-batches on every rank, at least one.
    """
    chosen = minibatch_of(groups, counts.any(1), config, step)  # (N,)
    return [
        collate_minibatch(groups, kept, counts & (chosen == m)[:, None], config, pad_id)
        for m in range(config.num_minibatches)
    ]


def minibatch_of(groups: Groups, counts: Tensor, config: GRPOConfig, step: int) -> Tensor:
    """The update (N,) in which a prompt takes part: the same on any number of ranks. Collective.

    The prompts of all ranks that count (N,) are put in an order by chance and dealt out in turn.
    """
    if config.num_minibatches == 1:
        return torch.zeros(len(groups.examples), dtype=torch.int64)
    keys = hash_counters(derive_seed(config.seed, "minibatches", step), groups.rows)  # (N,)
    keys = torch.where(counts, keys, torch.iinfo(torch.int64).max)  # the others go last
    everyone = torch.tensor(distributed.from_all_ranks(keys.tolist())).sort().values
    return torch.searchsorted(everyone, keys) % config.num_minibatches


def collate_minibatch(
    groups: Groups, kept: Tensor, counts: Tensor, config: GRPOConfig, pad_id: int
) -> list[MicroBatch]:
    """The micro-batches of one update, with the denominators of its loss. Collective."""
    device, sources = distributed.device(), places_of(groups, kept)  # (N, G) of the N*K
    tokens = groups.rollouts.lengths[sources] * counts
    pieces = []
    for n, example in enumerate(groups.examples):
        chosen = counts[n].nonzero().flatten()
        if len(chosen):
            completions = [groups.rollouts.completion_ids[i] for i in sources[n, chosen].tolist()]
            places = (n * kept.shape[1] + chosen).tolist()
            pieces += data.cut_group(example.prompt_ids, completions, places, config)
    packs = data.pack(pieces, config) or [[data.Piece([0], [[0]], [])]]
    totals = torch.stack([counts.sum(), tokens.sum(), counts.any(1).sum()])
    totals = distributed.all_reduce_sum(totals)
    has_effect = bool(totals[0] > 0)
    totals = totals.float().to(device)
    micro_batches = []
    for part in packs:
        batch = data.collate(part, config.layout, pad_id)
        sampled_logps = groups.rollouts.token_logps[sources.flatten()[batch.places]]
        mask = batch.completion_mask
        sampled_logps = sampled_logps[:, : mask.shape[1]] * mask  # (B, C)
        aggregation = {
            "aggregation": config.aggregation,
            "num_sequences": totals[0],
            "num_tokens": totals[1],
            "num_prompts": totals[2],
            "max_length": config.max_completion_length,
            "num_generations": config.num_generations,
        }
        if config.aggregation == "prompt":
            tokens_of_prompt = tokens.sum(1).repeat_interleave(kept.shape[1])  # (N*G,)
            aggregation["num_tokens"] = tokens_of_prompt[batch.places].to(device)  # (B,)
        on_device = (batch.to(device), sampled_logps.to(device))
        micro_batches.append(MicroBatch(*on_device, aggregation, has_effect))
    return micro_batches


def check_first(policy: Policy, part: MicroBatch, starts_equal: bool, config: GRPOConfig) -> None:
    """Hold the first rollout against policy and reference, see `self_checks.first_rollout`.

    Args:
        policy: before its first update.
        part: a micro-batch, with the reference's log-probabilities if there is one.
        starts_equal: whether policy and reference start from the same weights.
        config: of the run.
    """
    ref_logps = part.ref_logps if starts_equal else None
    given = (part.batch, part.sampled_logps, ref_logps)
    self_checks.first_rollout(policy, *given, config, config.temperature)


def reference_head(reference: Policy | AdapterReference, config: GRPOConfig) -> Head:
    """The reference's projection onto the vocabulary, whole, as it computes. Collective."""
    fsdp.reshard(reference)
    dtype = torch.bfloat16 if config.bf16 else torch.float32

    def whole(parameter: Tensor) -> Tensor:
        value = parameter.detach().to(distributed.device(), dtype)
        return (value.full_tensor() if isinstance(value, DTensor) else value).float()

    head = reference.lm.get_output_embeddings()
    return Head(whole(head.weight), None if head.bias is None else whole(head.bias))


# ---- advantages ----------------------------------------------------------------------------------


def kept_advantages(
    groups: Groups,
    kept: Tensor,
    counts: Tensor,
    micro_batches: Iterable[MicroBatch],
    config: GRPOConfig,
) -> Tensor:
    """Advantages (N, G) of the kept candidates, or (N, G, C) of their tokens if steps have rewards.

    Collective if the batch takes part. What rejection sampling keeps is better than the group it
    comes from: against the mean of all candidates the kept advantages are positive on average,
    against their own mean they are not.
    """
    options: dict[str, Any] = {
        "scale": config.scale_rewards,
        "baseline": config.advantage_baseline,
        "counted": counts.any(1),
        "all_reduce": distributed.all_reduce_sum,
    }
    if groups.steps:
        return kept_step_advantages(groups, kept, config)
    kept_rewards = groups.rewards.gather(1, kept)  # (N, G)
    if config.beta > 0 and config.kl_in == "reward":
        kept_rewards = kept_rewards - config.beta * sampled_kl(micro_batches, kept)
        advantages = group_advantages(kept_rewards, **options)
    elif config.baseline == "kept":
        advantages = group_advantages(kept_rewards, **options)
    else:
        advantages = group_advantages(groups.rewards, **options).gather(1, kept)
    if config.normalize_globally:
        advantages = normalise_globally(advantages, counts, distributed.all_reduce_sum)
    return advantages


def kept_step_advantages(groups: Groups, kept: Tensor, config: GRPOConfig) -> Tensor:
    """Advantages (N, G, C) of the kept candidates' tokens; see `advantages.step_advantages`."""
    sources = places_of(groups, kept)  # (N, G) of the N*K
    mask = groups.rollouts.mask  # (N*K, C)
    rows = torch.arange(len(mask)) if config.baseline == "all" else sources.flatten()
    steps = [groups.steps[row] for row in rows.tolist()]
    advantages = step_advantages(
        [list(own.values()) for own in steps],
        [list(own) for own in steps],
        mask[rows],
        num_generations=len(rows) // len(kept),
    )
    if config.baseline == "all":
        advantages = advantages[sources.flatten()]
    return advantages.view(*kept.shape, -1)


def set_advantages(micro_batches: Iterable[MicroBatch], advantages: Tensor) -> None:
    """Hand every micro-batch the advantages (B,) of its completions, or (B, C) of their tokens."""
    by_place = advantages.flatten(0, 1)  # (N*G,) or (N*G, C)
    for part in micro_batches:
        own = by_place[part.batch.places.cpu()]
        own = own if own.dim() == 1 else own[:, : part.batch.completion_mask.shape[1]]
        part.advantages = own.to(part.sampled_logps.device)


def sampled_kl(micro_batches: Iterable[MicroBatch], kept: Tensor) -> Tensor:
    """Log-probability under the sampler minus that under the reference, (N, G) nats.

    The estimate k1 of the KL of whole completions, which PPO's reward has (Ziegler et al. 2019,
    eq. 2). 0 for completions that do not count.
    """
    kl = torch.zeros(kept.numel())
    for part in micro_batches:
        assert part.ref_logps is not None, "the reference comes first"
        gaps = (part.sampled_logps - part.ref_logps) * part.batch.completion_mask  # (B, C)
        kl.index_add_(0, part.batch.places.cpu(), gaps.sum(1).cpu())
    return kl.view(kept.shape)


# ---- what is recorded ----------------------------------------------------------------------------


def sample_table(
    sampler: Sampler,
    scorer: RewardScorer,
    reference: Policy | AdapterReference | None,
    examples: list[Example],
    config: GRPOConfig,
    step: int,
    total_steps: int,
) -> list[dict[str, object]]:
    """Some completions of fixed prompts with fixed noise, their rewards and advantages. Collective.

    Every rank samples the same prompts, so that reward models are called equally often. With a
    reference each row also has its `ref_token_logps`, at the temperature of sampling.
    """
    if not examples:
        return []
    rollouts = sampler.sample(
        examples,
        num_samples=config.num_generations,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
    )
    scored = reward(scorer, examples, rollouts, config, step, total_steps)
    rewards = scored.total  # (N, G)
    scale, baseline = config.scale_rewards, config.advantage_baseline
    advantages = group_advantages(rewards, scale=scale, baseline=baseline)
    columns: dict[str, list[Any]] = {
        "reward": rewards.flatten().tolist(),
        "advantage": advantages.flatten().tolist(),
        **{f"{LOGGED_PREFIX}{name}": values for name, values in scored.notes.columns.items()},
    }
    if reference is not None:
        sampled = token_records.completed(examples, rollouts.completion_ids, config.num_generations)
        pad_id = sampler.tokenizer.pad_token_id
        columns["ref_token_logps"] = token_records.token_logps(
            reference, sampled, config, pad_id, config.temperature
        )
    return sampler.table(examples, rollouts, **columns)


def add_metrics(
    metrics: Accumulator,
    groups: Groups,
    kept: Tensor,
    advantages: Tensor,
    micro_batches: Iterable[MicroBatch],
    config: GRPOConfig,
    step: int,
) -> None:
    """Record what was sampled, as means over the completions or groups of real prompts."""
    rewards, rollouts = groups.rewards, groups.rollouts
    lengths = rollouts.lengths.view(rewards.shape)
    weights = ((rewards - rewards.amax(1, keepdim=True)) / config.rejection_temperature).exp()
    per_group = {
        "reward_std": rewards.std(1),
        "zero_variance_fraction": is_flat(groups, kept, config),
        "effective_sample_size": effective_sample_size(weights),
    }
    if config.num_candidates > config.num_generations:
        options = rejection_options(groups, config, step)
        per_group["candidates_seen"] = num_candidates_seen(rewards, **options)
    if groups.steps:  # of tokens: their mean
        advantages = advantages.sum(-1) / lengths.gather(1, kept)
    per_completion = {
        "reward": rewards,
        "completion_length": lengths,
        "stop_rate": groups.has_stop,
        "kept_reward": rewards.gather(1, kept),
        "advantage_mean_kept": advantages,
        **{f"{FUNCTION_PREFIX}{name}": values for name, values in groups.by_function.items()},
    }
    for name, values in (per_group | per_completion).items():
        in_batch = values[groups.real].double()
        in_batch = in_batch[~in_batch.isnan()]  # a function that does not apply to a row says nan
        metrics.add(name, in_batch.sum(), in_batch.numel())
    if config.sampler_correction != "none":
        metrics.add("sampler_weight_share", *effective_share(micro_batches))


class StepWarnings:
    """Says, once for each cause and on rank 0, why a step teaches nothing or the wrong thing."""

    MOST = 0.9  # share of flat groups that is worth a word

    def __init__(self, config: GRPOConfig) -> None:
        """Nothing was said yet."""
        self.config = config
        self.said: set[str] = set()

    def look(self, groups: Groups, kept: Tensor, step: int) -> None:
        """Look at a step, counted from 0. Collective."""
        penalty, config = eos_penalty(self.config), self.config
        has_stop, real = groups.has_stop, groups.real[:, None]
        is_paid = torch.zeros_like(has_stop)
        if penalty is not None:
            below = has_stop & (groups.rewards < penalty)
            is_paid = ~has_stop & below.any(1, keepdim=True) & real
        counted = (real, is_flat(groups, kept, config), has_stop & real, is_paid)
        counts = distributed.all_reduce_sum(torch.stack([which.sum() for which in counted]))
        num_groups, num_flat, num_stopped, num_paid = counts.tolist()
        if num_stopped == 0 and penalty is not None:
            self.say(
                step,
                "no completion stopped",
                f"within --max_completion_length {config.max_completion_length}, so every reward "
                f"is --missing_eos_penalty {penalty:g} and none tells completions apart: "
                "start from a model that was trained to stop, or raise that length, or use "
                "--penalize_missing_eos false.",
            )
        elif num_flat >= self.MOST * num_groups:
            self.say(
                step,
                "nearly all groups are flat:",
                f"in {num_flat} of {num_groups} all rewards are equal and do not tell a prompt's "
                "completions apart.",
            )
        if num_paid:
            self.say(
                step,
                "not stopping pays:",
                f"--missing_eos_penalty {penalty:g} is above the reward of one that stopped, in "
                f"the groups of {num_paid} that did not; lower it below every reward.",
            )

    def say(self, step: int, cause: str, rest: str) -> None:
        """Print a warning, the first time that the cause is met."""
        if cause not in self.said:
            self.said.add(cause)
            distributed.print_rank0(f"warning: step {step + 1}: {cause} {rest}")


def effective_share(micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, int]:
    """Effective sample size of the sampler weights over the number of tokens. Collective.

    Kish's (sum w)^2 / (n sum w^2) over the tokens of all ranks: 1 where all weights are equal.

    Returns:
        It, and how often it counts in a mean: 0 where there is no token, else 1.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for part in micro_batches:
        assert part.weights is not None, "the update comes first"
        weights = part.weights[part.batch.completion_mask].double().cpu()
        number = torch.tensor(float(len(weights)), dtype=torch.float64)
        sums += torch.stack([weights.sum(), weights.square().sum(), number])
    total, squares, number = distributed.all_reduce_sum(sums).unbind()
    share = total**2 / (number * squares).clamp(min=torch.finfo(torch.float64).tiny)
    return share, int(number > 0)
