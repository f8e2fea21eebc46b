"""Claim: GRPO's variants are what their papers say, in the run as in the formula.

Every variant trains without a warning on two ranks as it does on one, and differs from the others.
`test_one_file.py` has the loop. About `train_grpo` and `common.grpo`.
"""

import math
import re
import signal
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import tiny
import torch
from ranks import SHORT_RUN, launch, run_and_listen, run_stages, untimed_lines
from torch import Tensor

import train_grpo
from common import distributed, self_checks
from common.advantages import EPSILON
from common.batch import MAKERS, AnyBatch
from common.checkpoint import layout
from common.config.grpo import GRPOConfig
from common.errors import UserError
from common.forward import Policy, ReferenceStates
from common.grpo import minibatches, rollouts
from common.grpo.minibatches import Columns, Denominators
from common.grpo.monitor import StepMonitor
from common.grpo.rollouts import Groups, SelectedCandidates
from common.losses import AGGREGATIONS, aggregate, kl_estimate
from common.model import fsdp
from common.objectives.kinds import Advantages, PolicyObjective
from common.record.metrics import Accumulator
from common.rewards import functions
from common.rewards.score import RewardLog, Rewards
from common.run import Run
from common.sampling.sampler import Rollouts, Sampler
from common.shutdown import signals
from tests.variants import REWARD_FILE, stopping_model_job

pytestmark = pytest.mark.usefixtures("process_group")

LAYOUTS = ("shared_prefix", "padded")
PAD = 7
NEEDED: dict[str, Any] = {
    "output_dir": "unused",
    "model_name_or_path": "unused",
    "reward_funcs": ["gold"],
}


def new_config(**flags: Any) -> GRPOConfig:
    return GRPOConfig(**(NEEDED | {"num_generations": 3, "max_completion_length": 8} | flags))


def new_groups(rewards: list[list[float]], **changes: Any) -> Groups:
    """Prompts with K completions of 1 to 7 tokens each; the log-probs tell which is which."""
    num_prompts, num_candidates = len(rewards), len(rewards[0])
    examples = tiny.ragged_examples([(n,) for n in (9, 1, 14, 4)[:num_prompts]])
    lengths = [1 + 5 * i % 7 for i in range(num_prompts * num_candidates)]
    ids = [tiny.random_ids(n, seed=i) for i, n in enumerate(lengths)]
    logps = [[-i - t / 10 for t in range(n)] for i, n in enumerate(lengths)]
    values: dict[str, Any] = {
        "examples": examples,
        "real": torch.ones(num_prompts, dtype=torch.bool),
        "rollouts": Rollouts.of(ids, logps, [True] * len(ids)),
        "rewards": torch.tensor(rewards),
        "by_function": {"f": torch.tensor(rewards)},
    }
    return Groups(**(values | changes))


def part_of(groups: Groups, indices: list[int]) -> Groups:
    places = torch.arange(groups.rewards.numel()).view_as(groups.rewards)[indices].flatten()
    examples, drawn = [groups.examples[n] for n in indices], groups.rollouts[places]
    return Groups(examples, groups.real[indices], drawn, groups.rewards[indices], {})


class MicroBatch(NamedTuple):
    """The completions of a forward pass, with what their loss takes."""

    batch: AnyBatch
    rows: Columns
    denominators: Denominators

    def with_sampled(self, sampled_logps: Tensor) -> "MicroBatch":
        return self._replace(rows=replace(self.rows, sampled_logps=sampled_logps))

    def loss(self, policy: Policy, config: GRPOConfig, watch: StepMonitor) -> Tensor:
        """That of `train_grpo.py`, the only batch of its update."""
        update = minibatches.Update([self.batch], self.denominators)
        objective, _ = config.find_objective()
        return train_grpo.grpo_loss(policy, self.batch, self.rows, update, objective, watch, True)


def advantages_of(config: GRPOConfig) -> Advantages:
    return config.find_objective()[1]


def select(groups: Groups, config: GRPOConfig, step: int) -> SelectedCandidates:
    return rollouts.select(groups, advantages_of(config), config, step)


def gathered(groups: Groups, indices: Tensor, config: GRPOConfig) -> SelectedCandidates:
    return rollouts.gather_candidates(groups, indices, advantages_of(config), config)


def replace_flat(
    groups: Groups, train_set: Any, draw: Any, config: GRPOConfig, step: int
) -> Groups:
    return rollouts.replace_flat(groups, train_set, draw, advantages_of(config), config, step)


def compute_advantages(
    selected: SelectedCandidates, ref_logps: Tensor | None, config: GRPOConfig
) -> Tensor:
    return minibatches.compute_advantages(selected, ref_logps, advantages_of(config), config)


def collated(selected: SelectedCandidates, config: GRPOConfig) -> list[list[MicroBatch]]:
    """The micro-batches of every update, without a reference."""
    advantages = compute_advantages(selected, None, config)
    updates = minibatches.plan_updates(selected, config, tiny.vocabulary(pad_id=PAD), 0)
    columns = minibatches.sampled_columns(selected, config).with_advantages(advantages)
    micro_batches = []
    for update in updates:
        rows = [columns.of(batch) for batch in update.batches]
        counts = map(update.denominators_of, rows)
        micro_batches.append([*map(MicroBatch, update.batches, rows, counts)])
    return micro_batches


def prepared(groups: Groups, config: GRPOConfig) -> tuple[list[MicroBatch], Tensor]:
    """The micro-batches of the only update, if there is one, and which completions count."""
    selected = select(groups, config, 0)
    return [batch for update in collated(selected, config) for batch in update], selected.counted


def gradient(policy: Policy, groups: Groups, config: GRPOConfig) -> Tensor:
    """Of a step's loss with respect to all parameters, with a KL to what the sampler recorded."""
    policy.zero_grad()
    clip = PolicyObjective.find("clip")
    for micro_batch in prepared(groups, config)[0]:
        logps, mask = policy(micro_batch.batch).token_logps, micro_batch.batch.completion_mask
        per_token, _ = clip(logps, logps.detach(), logps, micro_batch.rows.advantages, mask)
        if config.beta > 0:
            nearby = logps.detach() + 0.02 * micro_batch.rows.sampled_logps
            per_token = per_token + config.beta * kl_estimate(logps, nearby)
        options = {"aggregation": config.aggregation, "max_length": config.max_completion_length}
        aggregate(per_token, mask, **options, **micro_batch.denominators._asdict()).backward()
    return flat_gradient(policy)


def flat_gradient(policy: Policy) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in policy.parameters() if p.grad is not None])


# ---- what a step warns of ------------------------------------------------------------------------

STOPS, GOES_ON = [True] * 6, [False] * 6
MIXED = [True, True, False, True, True, True]


@pytest.mark.parametrize(
    ("rewards", "has_stop", "flags", "words"),
    [
        ([[-1.0] * 3] * 2, GOES_ON, {}, "no completion stopped within --max_completion_length 8,"),
        ([[0.5] * 3] * 2, GOES_ON, {"penalize_missing_eos": False}, "in 2 of 2 all rewards are eq"),
        ([[0.5] * 3, [1.0] * 3], STOPS, {}, "in 2 of 2 all rewards are equal"),
        ([[0.5] * 3, [0.0, 1.0, 1.0]], STOPS, {}, ""),
        (
            [[-1.977, 0.5, -1.0], [-3.0, 1.0, 0.0]],
            MIXED,
            {},
            "not stopping pays: --missing_eos_penalty -1 is above the reward of one that stopped, "
            "in the groups of 1 that did not",
        ),
        ([[-0.9, 0.5, -1.0], [-3.0, 1.0, 0.0]], MIXED, {}, ""),
        ([[-1.977, 0.5, -9.0], [-3.0, 1.0, 0.0]], MIXED, {"missing_eos_penalty": -9.0}, ""),
    ],
)
def test_a_step_that_teaches_nothing_or_the_wrong_thing_says_so_once(
    capsys, rewards, has_stop, flags, words
):
    config, groups = new_config(**flags), new_groups(rewards)
    groups.rollouts.has_stop[:] = torch.tensor(has_stop)
    watch = StepMonitor(Accumulator("cpu"), config)
    for step in (4, 5):
        watch.warn(select(groups, config, step), step)
    warnings = capsys.readouterr().out.splitlines()
    assert len(warnings) == bool(words), warnings
    if words:
        assert warnings[0].startswith("warning: step 5: ")
        assert words in warnings[0]


def test_the_effective_sample_size_of_rewards_far_apart_is_that_of_the_best():
    """Weights are relative to the best candidate: e^1000 is not finite."""
    config = new_config(num_candidates=4, num_generations=2, rejection_temperature=1.0)
    groups = new_groups([[1000.0, 0.0, 0.0, 1000.0], [0.0, 0.0, 0.0, 0.0]])
    selected, metrics = select(groups, config, 0), Accumulator("cpu")
    StepMonitor(metrics, config).record(selected, torch.zeros(2, 2), 0)
    assert metrics.reduce()["effective_sample_size"] == pytest.approx((2 + 4) / 2)


# ---- what is collated ----------------------------------------------------------------------------


def test_candidates_are_samples_or_a_set_of_texts():
    texts = Rollouts.of([[5], [5], [6], [6]], [], [True] * 4)
    groups = new_groups([[1.0, 1.0, 0.0, 0.0]], rollouts=texts)
    flags = {"num_generations": 2, "num_candidates": 4, "rejection_temperature": 0.1}
    for method, expected in (("rso", [[0, 1]]), ("rso_distinct", [[0, 2]])):
        config = new_config(rejection_method=method, **flags)
        assert select(groups, config, 0).indices.sort(1).values.tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limits", [(64, 4096), (3, 4096), (64, 40), (1, 1)])
def test_kept_completions_bring_their_log_probs_and_places(layout, limits):
    """Three of four candidates for each of four prompts, one of which is filler."""
    groups = new_groups([[0.0, 1.0, 2.0, 3.0]] * 4, real=torch.tensor([True, True, False, True]))
    kept = torch.tensor([[3, 0, 2], [1, 2, 3], [0, 1, 2], [2, 1, 0]])
    config = new_config(
        num_candidates=4, layout=layout, micro_batch_size=limits[0], micro_batch_tokens=limits[1]
    )
    selected = gathered(groups, kept, config)
    counted = selected.counted.clone()
    counted[1, 2] = False
    selected = replace(selected, counted=counted)
    ids = groups.rollouts.completion_ids
    logps = groups.rollouts.as_lists(groups.rollouts.token_logps)
    seen = set()
    (micro_batches,) = collated(selected, config)
    for micro_batch in micro_batches:
        assert micro_batch.rows.ref_logps is micro_batch.rows.old_logps is None
        assert not micro_batch.rows.ref_states
        assert micro_batch.rows.sampled_logps.shape == micro_batch.batch.completion_mask.shape
        assert (micro_batch.rows.sampled_logps[~micro_batch.batch.completion_mask] == 0).all()
        for row in micro_batch.batch.is_real.nonzero().flatten().tolist():
            mask: Tensor = micro_batch.batch.completion_mask[row]
            sampled = micro_batch.rows.sampled_logps[row][mask]
            n, g = divmod(int(micro_batch.batch.slots[row]), 3)
            source = 4 * n + int(kept[n, g])
            assert (n, g) not in seen
            assert micro_batch.batch.completion_ids[row][mask].tolist() == ids[source]
            torch.testing.assert_close(sampled, torch.tensor(logps[source]))
            seen.add((n, g))
    assert seen == {(n, g) for n in (0, 1, 3) for g in range(3)} - {(1, 2)}
    batches = [x.batch for x in micro_batches]
    again = minibatches.values_by_slot(
        selected, batches, [x.rows.sampled_logps for x in micro_batches]
    )
    expected = selected.rollouts.token_logps * counted.view(-1, 1)
    torch.testing.assert_close(again.cpu(), expected, rtol=0, atol=0)


def test_the_rows_of_a_batch_are_those_of_its_slots_and_0_at_padding():
    """Also where the table has other values there, and for a row that only keeps ranks in step."""
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    batch = mock.Mock(slots=torch.tensor([2, 1, 0]), completion_mask=mask)
    table = 1.0 + torch.arange(9).view(3, 3)
    columns = Columns(table, ref_logps=10 * table).with_advantages(torch.tensor([[0.5, -1.0, 2.0]]))
    rows = columns.of(batch)
    assert rows.sampled_logps.tolist() == [[7.0, 8.0], [4.0, 0.0], [0.0, 0.0]]
    assert rows.ref_logps.tolist() == [[70.0, 80.0], [40.0, 0.0], [0.0, 0.0]]
    assert rows.advantages.tolist() == [2.0, -1.0, 0.5]
    assert rows.old_logps is rows.prompt_tokens is None
    of_tokens = columns.with_advantages(table[None]).of(batch).advantages
    assert of_tokens.tolist() == rows.sampled_logps.tolist()


def test_denominators_count_what_is_in_the_loss():
    real = torch.tensor([True, True, False, True])
    groups = new_groups([[0.0, 1.0, 2.0], [5.0] * 3, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], real=real)
    groups.rollouts.has_stop[0] = groups.rollouts.has_stop[5] = False
    lengths = groups.rollouts.lengths.view(4, 3)
    every = torch.ones(4, 3, dtype=torch.bool) & real[:, None]
    without_flat = every & (torch.arange(4) != 1)[:, None]
    without_truncated = every.clone()
    without_truncated[0, 0] = without_truncated[1, 2] = False
    drop, mask = {"zero_variance": "drop"}, {"mask_truncated_completions": True}
    for flags, expected in (
        ({}, every),
        (drop, without_flat),
        (mask, without_truncated),
        (drop | mask, without_truncated & without_flat),
    ):
        micro_batches, counted = prepared(groups, new_config(**flags, micro_batch_size=2))
        assert torch.equal(counted, expected)
        rows = sum(int(micro_batch.batch.is_real.sum()) for micro_batch in micro_batches)
        assert rows == expected.sum()
        for micro_batch in micro_batches:
            assert micro_batch.denominators.num_sequences == expected.sum()
            assert micro_batch.denominators.num_tokens == (lengths * expected).sum()
            assert micro_batch.denominators.num_prompts == expected.any(1).sum()
    # A step in which nothing counts has no update.
    assert prepared(new_groups([[1.0] * 3] * 2), new_config(zero_variance="drop"))[0] == []


def test_minibatches_share_the_prompts_evenly_and_anew_in_every_step():
    groups = new_groups([[0.0, 1.0]] * 4, real=torch.tensor([True, True, True, False]))
    config = new_config(num_generations=2, num_minibatches=3)
    kept = select(groups, config, 0)
    chosen = [
        tuple(minibatches.assign_minibatch(kept, config, step)[:3].tolist()) for step in range(9)
    ]
    assert all(sorted(numbers) == [0, 1, 2] for numbers in chosen)
    assert len(set(chosen)) > 2
    updates = collated(kept, config)
    places = [sorted(p for x in m for p in x.batch.slots.tolist()) for m in updates]
    assert places == [[2 * chosen[0].index(m), 2 * chosen[0].index(m) + 1] for m in range(3)]
    assert [float(m[0].denominators.num_sequences) for m in updates] == [2.0] * 3


# ---- rewards and advantages ----------------------------------------------------------------------


def test_negative_rewards_are_refused_where_their_mean_divides():
    config = new_config(advantages="mean", missing_eos_penalty=0.0)
    kept = select(new_groups([[1.0, 0.0, -0.5]]), config, 0)
    message = "--advantages mean takes rewards of at least 0; one is -0.5"
    with pytest.raises(UserError, match=message):
        compute_advantages(kept, None, config)
    with pytest.raises(UserError, match=message):
        Advantages.find("mean")(kept.rewards)


def test_a_reward_that_one_rank_refuses_ends_all_before_the_next_collective(monkeypatch):
    refusal = UserError("of another rank")
    monkeypatch.setattr(distributed, "from_all_ranks", lambda values: [*values, refusal])
    groups, scorer = new_groups([[1.0, 0.0]]), mock.Mock()
    scorer.score.return_value = Rewards(groups.rewards, {}, [], RewardLog(2))
    with pytest.raises(UserError, match="of another rank"):
        rollouts.reward(scorer, groups.examples, groups.rollouts, new_config(), 0, 1)


def test_kl_in_the_reward_lowers_it_by_beta_times_the_completion_s_log_ratio():
    groups = new_groups([[1.0, 2.0, 4.0], [0.0, 0.0, 3.0]])
    config = new_config(beta=0.5, kl_estimator="k1_reward", advantages="none", micro_batch_size=2)
    kept = select(groups, config, 0)
    ref_logps = kept.rollouts.token_logps + 0.25  # nats more per token than the sampler's
    advantages = compute_advantages(kept, ref_logps, config)
    rewards = groups.rewards + 0.5 * 0.25 * groups.rollouts.lengths.view(2, 3)
    torch.testing.assert_close(advantages, rewards - rewards.mean(1, keepdim=True))


@pytest.mark.parametrize(("bf16", "noise"), [(False, 1e-5), (True, 0.05)])
@pytest.mark.parametrize("name", ["group", "batch", "none"])
def test_a_kl_of_rounding_in_equal_rewards_teaches_nothing(name: str, bf16: bool, noise: float):
    """The noise is that of SmolLM2's log-probabilities between two forward passes."""
    groups = new_groups([[1.0, 1.0, 1.0], [0.0, 1.0, 3.0]])
    config = new_config(beta=0.5, kl_estimator="k1_reward", advantages=name, bf16=bf16)
    kept = select(groups, config, 0)
    torch.manual_seed(0)
    gaps = noise * torch.randn_like(kept.rollouts.token_logps)
    values = compute_advantages(kept, kept.rollouts.token_logps + gaps, config)
    assert (values[0] == 0).all()
    assert values[1].all()
    values = compute_advantages(kept, kept.rollouts.token_logps + 100 * gaps, config)
    assert values[0].all()


@pytest.mark.parametrize(("share", "is_rounding"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_rounding_is_up_to_its_root_mean_square_over_the_tokens(share, is_rounding, temperature):
    groups = new_groups([[1.0, 1.0, 1.0]])
    config = new_config(beta=0.5, kl_estimator="k1_reward", temperature=temperature)
    kept = select(groups, config, 0)
    gap = share * 2.0**-15 / temperature  # of each token, nats
    values = compute_advantages(kept, kept.rollouts.token_logps.double() + gap, config)
    assert (values == 0).all() == is_rounding


def test_weighted_sums_that_are_equal_but_for_rounding_are_a_flat_group():
    """0.3 + 0.4 and 0.7, and 100.01 - 100 and 0.01, which float32 has 6e-6 apart; 0.011 is not."""
    functions = [
        torch.tensor([[3.0, 0.0, 0.0], [1000.1, 0.1, 0.1], [1000.1, 0.1, 0.1]]),
        torch.tensor([[4.0, 7.0, 7.0], [-1000.0, 0.0, 0.0], [-1000.0, 0.01, 0.0]]),
    ]
    weights = [0.1, 0.1]
    totals = sum((w * f for w, f in zip(weights, functions, strict=True)), torch.zeros(3, 3))
    assert (totals[:, 0] != totals[:, 1]).all()
    groups = replace(
        new_groups(totals.tolist()), by_function=dict(zip("ab", functions, strict=True))
    )
    config = new_config(reward_weights=weights, zero_variance="drop", beta=0.0)
    kept = select(groups, config, 0)
    assert kept.flat.tolist() == [True, True, False]
    assert kept.counted.any(1).tolist() == [False, False, True]
    assert (compute_advantages(kept, None, config) != 0).any(1).tolist() == [
        False,
        False,
        True,
    ]


BY_BASELINE = {  # of the candidates with rewards 9 and 2, kept of 0, 1, 2 and 9
    ("all", "none"): [6.0, -1.0],  # mean 3
    ("kept", "none"): [3.5, -3.5],  # mean 5.5
    ("all", "group"): [6.0 / (50 / 3) ** 0.5, -1.0 / (50 / 3) ** 0.5],  # 9 + 4 + 1 + 36 over 3
    ("kept", "group"): [3.5 / 24.5**0.5, -3.5 / 24.5**0.5],
}


@pytest.mark.parametrize(("baseline", "name"), BY_BASELINE)
def test_the_baseline_is_the_mean_of_the_set_that_the_flag_names(baseline: str, name: str):
    config = new_config(baseline=baseline, advantages=name, beta=0.0)
    groups = new_groups([[0.0, 1.0, 2.0, 9.0]])
    kept = gathered(groups, torch.tensor([[3, 2]]), config)
    advantages = compute_advantages(kept, None, config)
    expected = torch.tensor([BY_BASELINE[baseline, name]])
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-4)
    # A group is flat if all rewards of its baseline are equal.
    groups = new_groups([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    kept = gathered(groups, torch.tensor([[1, 3], [0, 1]]), config)
    assert kept.flat.tolist() == [baseline == "kept", True]


def standardised(values: list[float]) -> list[float]:
    mean, std = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / (std + EPSILON) for value in values]


@pytest.mark.parametrize("baseline", ["all", "kept"])
def test_each_reward_is_normalised_in_its_group_and_their_sum_over_the_batch(baseline: str):
    """GDPO: the first group's rewards have equal sums and teach something, the last one nothing.

    The third candidate of the first group did not stop: each of its rewards is the penalty.
    """
    first = [[0.0, 1.0, 9.0, 3.0], [2.0, 0.0, 1.0, 0.0], [4.0] * 4]
    second = [[3.0, 2.0, 9.0, 0.0], [0.0, 0.0, 5.0, 1.0], [1.0] * 4]
    by_function = {"a": torch.tensor(first), "b": torch.tensor(second)}
    groups = new_groups([[3.0] * 4, [2.0, 0.0, 6.0, 1.0], [5.0] * 4], by_function=by_function)
    groups.rollouts.has_stop[2] = False
    first[0][2] = second[0][2] = -1.0
    flags = {
        "advantages": "gdpo",
        "reward_funcs": ["gold", "length"],
    }
    flags |= {"reward_weights": [1.0, 0.25], "zero_variance": "drop", "num_generations": 2}
    config = new_config(**flags, num_candidates=4, baseline=baseline)
    kept = torch.tensor([[0, 3], [2, 1], [0, 1]])
    selected = gathered(groups, kept, config)
    assert selected.flat.tolist() == [False, False, True]
    sums = []
    for n in (0, 1):
        chosen = kept[n].tolist()
        of_group = [
            [f[n][i] for i in chosen] if baseline == "kept" else f[n] for f in (first, second)
        ]
        a, b = map(standardised, of_group)
        total = [x + 0.25 * y for x, y in zip(a, b, strict=True)]
        sums += total if baseline == "kept" else [total[i] for i in chosen]
    expected = [*standardised(sums), 0.0, 0.0]
    ours = compute_advantages(selected, None, config)
    torch.testing.assert_close(ours.flatten(), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_reward_that_does_not_apply_adds_nothing():
    config = new_config(advantages="gdpo")
    by_function = {"a": torch.tensor([[1.0, 2.0, 3.0]]), "b": torch.full((1, 3), torch.nan)}
    stopped = torch.tensor([[True, True, False]])
    function = advantages_of(config)
    both = rollouts.advantage_rewards(torch.zeros(1, 3), by_function, stopped, function, config)
    assert both.tolist() == [[[1.0, 2.0, -1.0]], [[0.0, 0.0, 0.0]]]
    by_function["b"] = torch.tensor([[torch.nan, 4.0, torch.nan]])
    function = advantages_of(config)
    both = rollouts.advantage_rewards(torch.zeros(1, 3), by_function, stopped, function, config)
    assert both[1].tolist() == [[4.0, 4.0, 4.0]]


def test_the_bar_of_a_rollout_moves_with_every_token(monkeypatch, capsys):
    """On a terminal, once it takes seconds: here at once."""
    progress_bar = distributed.progress_bar

    def at_once(*args: Any, **options: Any) -> Any:
        bar = progress_bar(*args, **options)
        bar.delay = bar.mininterval = 0.0
        return bar

    monkeypatch.setattr(distributed, "progress_bar", at_once)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(rollouts, "reward", mock.MagicMock())
    config, examples = new_config(), tiny.ragged_examples([(9,), (1,)])
    sampler = Sampler(Policy(tiny.causal_lm("gpt2")), tiny.vocabulary(()), config)
    run, real = mock.MagicMock(step=0), torch.ones(2, dtype=torch.bool)
    train_grpo.sample_and_reward(run, sampler, mock.Mock(), config, examples, real)
    drawn = capsys.readouterr().err.split("\r")
    numbers = [match[1] for text in drawn if (match := re.search(r"\| ([\d.]+)/6.00 ", text))]
    assert numbers == [f"{6 * token / 8:.2f}" for token in range(1, 9)]


def fake_draw(flat_rows: set[int], drawn: list[int]) -> Any:
    """Groups whose rewards are equal in the rows named, and else the row number and 0."""

    def draw(examples: list[Any], real: Tensor) -> Groups:
        rows = [example.row for example in examples]
        drawn.extend(row for row, is_real in zip(rows, real.tolist(), strict=True) if is_real)
        rewards = torch.tensor([[float(row), 0.0 if row not in flat_rows else row] for row in rows])
        count = 2 * len(rows)
        ids = [[row] for row in rows for _ in range(2)]
        texts = Rollouts.of(ids, [[-1.0]] * count, [True] * count)
        return Groups(list(examples), real, texts, rewards, {"f": rewards.clone()})

    return draw


def test_flat_groups_are_replaced_by_fresh_prompts_until_none_is_left(monkeypatch):
    train_set = tiny.ragged_examples([(3,)] * 12)
    monkeypatch.setattr(rollouts, "MAX_RESAMPLES", 20)
    config = new_config(num_generations=2, zero_variance="resample")
    flat_rows = {1, 3, 5, 7, 9}
    first = [train_set[row] for row in (1, 2, 3, 0)]
    drawn: list[int] = []
    draw = fake_draw(flat_rows, drawn)
    groups = draw(first, torch.tensor([True, True, True, False]))
    drawn.clear()
    groups = replace_flat(groups, train_set, draw, config, 0)
    rows = groups.rows.tolist()
    assert groups.num_replaced == len(drawn) >= 2
    assert len(set(drawn)) == len(drawn)
    assert not set(drawn) & {1, 2, 3}
    assert rows[1] == 2
    assert rows[3] == 0  # filler stays as it is
    assert not {rows[0], rows[2]} & flat_rows
    for n, row in enumerate(rows):
        assert groups.rewards[n].tolist() == groups.by_function["f"][n].tolist() == [row, 0.0]
        assert groups.rollouts.completion_ids[2 * n : 2 * n + 2] == [[row], [row]]


def test_replacing_ends_with_its_rounds_or_with_the_rows_and_then_drops(monkeypatch):
    train_set = tiny.ragged_examples([(3,)] * 7)
    for rounds, expected in ((2, 4), (50, 5)):
        monkeypatch.setattr(rollouts, "MAX_RESAMPLES", rounds)
        config = new_config(num_generations=2, zero_variance="resample")
        drawn: list[int] = []
        draw = fake_draw(set(range(7)), drawn)
        groups = draw(train_set[:2], torch.ones(2, dtype=torch.bool))
        groups = replace_flat(groups, train_set, draw, config, 0)
        assert groups.num_replaced == expected
        assert not select(groups, config, 0).counted.any()


def test_fresh_prompts_are_none_of_the_batch_where_rows_were_dropped(monkeypatch):
    """A row's number is that in the file: here places 0 to 7 hold the rows 0, 2, 4 and so on."""
    train_set = tiny.ragged_examples([(3,)] * 8)
    for example in train_set:
        example.row *= 2
    monkeypatch.setattr(rollouts, "MAX_RESAMPLES", 9)
    config = new_config(num_generations=2, zero_variance="resample")
    for step in range(20):
        drawn: list[int] = []
        draw = fake_draw(set(range(16)), drawn)
        groups = draw([train_set[1], train_set[3]], torch.ones(2, dtype=torch.bool))
        drawn.clear()
        assert (
            rollouts.replace_flat(
                groups, train_set, draw, advantages_of(config), config, step
            ).num_replaced
            == 6
        )
        assert sorted(drawn) == [0, 4, 8, 10, 12, 14]


@pytest.mark.parametrize("baseline", ["all", "kept"])
def test_step_rewards_reach_the_tokens_of_the_kept(baseline):
    """Normalised over the candidates of the baseline; a token gets the steps from it on."""
    steps = [{0: 1.0}, {1: 0.0}, {0: 2.0, 3: 1.0}]
    groups = new_groups([[1.0, 0.0, 3.0]], steps=steps)  # of 1, 6 and 4 tokens
    config = new_config(num_generations=2, num_candidates=3, baseline=baseline)
    kept = torch.tensor([[2, 0]])
    rewards = [1.0, 0.0, 2.0, 1.0] if baseline == "all" else [2.0, 1.0, 1.0]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards) + EPSILON
    one, two = (1.0 - mean) / std, (2.0 - mean) / std
    selected = gathered(groups, kept, config)
    expected = torch.tensor(
        [[[one + two, one, one, one, 0.0, 0.0], [one, 0.0, 0.0, 0.0, 0.0, 0.0]]]
    )
    torch.testing.assert_close(compute_advantages(selected, None, config), expected)


@pytest.mark.parametrize(
    "flags",
    [
        {"advantages": "none"},
        {"normalize_globally": True},
        {"zero_variance": "drop"},
        {"advantages": "gdpo"},
    ],
    ids=str,
)
def test_step_rewards_refuse_what_means_nothing_to_them(flags):
    with pytest.raises(UserError, match=f"--{next(iter(flags))} is .* where a reward function"):
        rollouts.refuse_with_steps(new_config(**flags))


# ---- gradients -----------------------------------------------------------------------------------

REWARDS = [[0.0, 1.0, 5.0], [2.0, 2.5, 2.0], [1.0, -1.0, 0.5], [3.0, 3.0, 1.0]]


def test_the_first_update_is_not_clipped_where_the_sampler_drifted():
    """Old log-probs are the policy's before the update, not those that the sampler computed."""
    policy, groups = Policy(tiny.causal_lm("gpt2")), new_groups(REWARDS)
    config = new_config(beta=0.0)
    watch = StepMonitor(Accumulator("cpu"), config)
    expected = gradient(policy, groups, config)
    policy.zero_grad()
    for batch in prepared(groups, config)[0]:
        with torch.no_grad():
            drifted = policy(batch.batch).token_logps + 0.5 * batch.rows.advantages[:, None].sign()
        batch.with_sampled(drifted).loss(policy, config, watch).backward()
    torch.testing.assert_close(flat_gradient(policy), expected)
    assert watch.metrics.reduce()["clip_fraction"] == 0


# Loss of a token by log pi, the sampler's, the completion's advantage and mean of their difference
WITH_THE_SAMPLER: list[tuple[str, Any]] = [
    (
        "dppo:epsilon_low=1,epsilon_high=1,delta=2.5",
        lambda pi, mu, a, gap: -a * (pi - mu).exp().clamp(max=2.5).detach() * pi,
    ),
    ("clip sampler_drift:coef=0.3", lambda pi, mu, a, gap: -a * pi + 0.3 * (pi - mu) ** 2),
    (
        "clip off_policy_mask:threshold=0.7",
        lambda pi, mu, a, gap: -a * pi * bool(a > 0 or gap <= 0.7),
    ),
    (
        "clip geometric_mask:low=0.7",
        lambda pi, mu, a, gap: -a * pi * bool(math.log(0.7) <= -gap <= math.log(2)),
    ),
    (
        "clip sampler_weights:cap=1.7",
        lambda pi, mu, a, gap: -a * pi * (pi - mu).exp().clamp(max=1.7).detach(),
    ),
]


@pytest.mark.parametrize(("objective", "term"), WITH_THE_SAMPLER, ids=lambda x: str(x)[:25])
def test_the_sampler_counts_where_an_objective_names_it(objective: str, term: Any):
    """The sampler preferred by half a nat or a nat what has a negative advantage, and not the rest.

    The gradient of the loop's loss is that of the formula, written out here token by token.
    """
    policy, groups = Policy(tiny.causal_lm("gpt2")), new_groups(REWARDS)
    config = new_config(beta=0.0, aggregation="constant", policy_objective=objective.split())
    watch = StepMonitor(Accumulator("cpu"), config)
    micro_batches = []
    for batch in prepared(groups, config)[0]:
        shift = -batch.rows.advantages.sign() * torch.where(batch.batch.slots % 2 == 0, 0.5, 1.0)
        with torch.no_grad():
            sampled = policy(batch.batch).token_logps + shift[:, None]
        micro_batches.append(batch.with_sampled(sampled * batch.batch.completion_mask))
    policy.zero_grad()
    for batch in micro_batches:
        logps, mask = policy(batch.batch).token_logps, batch.batch.completion_mask
        total = 0.0 * logps.sum()
        for pi, mu, a, m in zip(
            logps, batch.rows.sampled_logps, batch.rows.advantages, mask, strict=True
        ):
            gap = float((mu[m] - pi[m]).detach().mean())
            total = total + term(pi[m], mu[m], a, gap).sum() / (12 * 8)
        total.backward()
    expected = flat_gradient(policy)
    policy.zero_grad()
    for batch in micro_batches:
        batch.loss(policy, config, watch).backward()
    ours = flat_gradient(policy)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.norm()))
    plain = gradient(policy, groups, config)
    assert (plain - expected).norm() > 0.05 * plain.norm()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_the_micro_batches(aggregation: str):
    policy, groups = Policy(tiny.causal_lm("gpt2")), new_groups(REWARDS)
    groups.rollouts.has_stop[4] = False
    flags = {"aggregation": aggregation, "mask_truncated_completions": True}
    whole = gradient(policy, groups, new_config(**flags))
    assert whole.norm() > 0.1
    for limits in ({"micro_batch_size": 2}, {"micro_batch_tokens": 25}, {"micro_batch_size": 1}):
        config = new_config(**flags, **limits)
        assert len(prepared(groups, config)[0]) > 2
        ours = gradient(policy, groups, config)
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-6 * float(whole.norm()))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "flags", [{}, {"advantages": "batch"}, {"normalize_globally": True}], ids=str
)
def test_dropped_groups_leave_the_gradient_of_the_others(aggregation: str, flags: dict[str, Any]):
    """As if the batch held only those; kept ones add their KL and fill the denominators."""
    policy = Policy(tiny.causal_lm("gpt2"))
    groups = new_groups([REWARDS[0], [2.0] * 3, REWARDS[2], [-1.0] * 3])
    flags = {"aggregation": aggregation, "micro_batch_size": 4} | flags
    alone = gradient(policy, part_of(groups, [0, 2]), new_config(**flags))
    dropped = gradient(policy, groups, new_config(**flags, zero_variance="drop"))
    kept = gradient(policy, groups, new_config(**flags))
    torch.testing.assert_close(dropped, alone, rtol=1e-4, atol=1e-6 * float(alone.norm()))
    assert (kept - alone).norm() > 0.05 * alone.norm()


# ---- exact KL ------------------------------------------------------------------------------------

TEMPERATURE = 0.7


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "shape"), [*((family, {}) for family in tiny.FAMILIES), *tiny.SCALED]
)
def test_the_exact_kl_is_the_enumerated_one_and_so_is_its_gradient(layout, family, shape):
    """The reference is wider, and has more embeddings than the policy has ids."""
    policy = Policy(tiny.causal_lm(family, seed=1, **shape))
    reference = Policy(tiny.causal_lm(family, seed=2, width=64, vocab_size=70, **shape))
    reference.requires_grad_(False)
    prompts = [tiny.random_ids(n, seed=n) for n in (5, 3)]
    completions = [[tiny.random_ids(n, seed=n) for n in lengths] for lengths in ((4, 2), (1, 6))]
    batch = MAKERS[layout](prompts, completions, PAD)
    ref_scores = reference(batch, temperature=TEMPERATURE, with_hidden=True)
    config = new_config(layout=layout)
    states = ReferenceStates(
        ref_scores.hidden,
        minibatches.reference_head(reference, config, policy.lm.config.vocab_size),
    )
    scores = policy(batch, temperature=TEMPERATURE, reference=states)
    assert scores.hidden is None
    assert (policy(batch, temperature=TEMPERATURE).kl == 0).all()

    rows = [(p, ids) for p, group in zip(prompts, completions, strict=True) for ids in group]
    for row, (prompt, ids) in enumerate(rows):
        with torch.no_grad():
            expected = tiny.enumerated_kl(policy.lm, reference.lm, prompt, ids, TEMPERATURE)
        assert expected.max() > 0.1
        torch.testing.assert_close(scores.kl[row, : len(ids)], expected, rtol=1e-4, atol=1e-4)
        assert (scores.kl[row, len(ids) :] == 0).all()

    scores.kl.sum().backward()
    ours = flat_gradient(policy)
    policy.zero_grad()
    torch.stack(
        [tiny.enumerated_kl(policy.lm, reference.lm, *row, TEMPERATURE).sum() for row in rows]
    ).sum().backward()
    expected = flat_gradient(policy)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_that_are_not_the_head_s_are_refused(layout):
    """A cap of 30, as Gemma 2's, which logits below 1 would hide."""
    lm = tiny.causal_lm("gpt2")
    with torch.no_grad():
        lm.lm_head.weight *= 1e-2
    config = tiny.train_config(max_prompt_length=40, max_completion_length=8, layout=layout)
    self_checks.only_tokens_matter(Policy(lm), config, is_projected=True)
    tiny.cap_logits(lm)
    with pytest.raises(UserError, match="GPT2LMHeadModel changes its logits in another"):
        self_checks.only_tokens_matter(Policy(lm), config, is_projected=True)
    if layout == "padded":  # without the exact KL the model's own logits are read
        self_checks.only_tokens_matter(Policy(lm), config)


# ---- the reference that moves --------------------------------------------------------------------


def test_mixing_moves_the_reference_by_its_share():
    policy, reference = (Policy(tiny.causal_lm("gpt2", seed=seed)) for seed in (1, 2))
    before = [p.detach().clone() for p in reference.parameters()]
    fsdp.mix_into(reference, policy, 0.25)
    for p, old, new in zip(reference.parameters(), before, policy.parameters(), strict=True):
        torch.testing.assert_close(p, 0.25 * new + 0.75 * old)
    fsdp.mix_into(reference, policy, 1.0)
    assert all(map(torch.equal, reference.parameters(), policy.parameters()))


# ---- whole runs ----------------------------------------------------------------------------------

RUN = SHORT_RUN | {
    "dataset_test_split": "",
    "num_train_rows": 10,
    "max_completion_length": 8,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-5,  # else a gradient that is rounding only moves its weight by a whole step
    "max_steps": 3,  # the last one has two rows of four
    "num_generations": 3,
    "missing_eos_penalty": -0.2,
}
EVALUATED = {"dataset_test_split": "validation", "num_eval_rows": 4, "eval_steps": 1}
EVALUATED |= {"eval_pairs_dataset_name": "synthetic"}
OFF_POLICY: dict[str, Any] = {"num_iterations": 2, "learning_rate": 3e-3}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "sequence ratio": OFF_POLICY
    | {"policy_objective": ["gspo:epsilon_low=0.01,epsilon_high=0.2,delta=1.3"]}
    | {"aggregation": "token"},
    # Twice as many updates as the others, half as large: they amplify rounding
    "cispo in minibatches": OFF_POLICY
    | {"policy_objective": ["cispo:epsilon_high=0.01"], "num_minibatches": 2}
    | {"learning_rate": OFF_POLICY["learning_rate"] / 2}
    | {"aggregation": "prompt", "advantages": "rloo:scale=group"},
    "sapo": OFF_POLICY
    | {"policy_objective": ["sapo", "off_policy_mask:threshold=1e-3", "sampler_drift:coef=0.1"]},
    "dppo, two rewards": OFF_POLICY
    | {"policy_objective": ["dppo:epsilon_low=1e-3,epsilon_high=1e-3"]}
    | {"reward_funcs": ["gold", "length"], "zero_variance": "drop", "num_candidates": 4}
    | {"reward_weights": [1.0, 0.5], "advantages": "gdpo"},
    "mean": {"advantages": "mean", "missing_eos_penalty": 0.0}
    | {"policy_objective": ["clip", "geometric_mask:high=1.01,low=0.99"]},
    "k1 with its ratio": OFF_POLICY | {"kl_estimator": "k1_ratio"},
    "exact KL": {"kl_estimator": "full", "entropy_coef": 0.05},
    "exact KL, bfloat16": {"kl_estimator": "full", "entropy_coef": 0.05, "bf16": True}
    | {"layout": "padded", "ref_update_steps": 2, "ref_mixup_alpha": 0.5},
    "exact KL, padded": {"kl_estimator": "full", "entropy_coef": 0.05, "layout": "padded"},
    "KL in the reward": {"kl_estimator": "k1_reward", "further_reward": "overlong:2-8"},
    "drop": {"zero_variance": "drop", "mask_truncated_completions": True}
    | {"aggregation": "constant", "advantages": "batch"},
    "resample": {"zero_variance": "resample", "advantages": "none"},
    "step rewards": {"function": "steps", "num_candidates": 4},
    "sampler weights": {"policy_objective": ["clip", "sampler_weights:correction=sequence_mask"]}
    | {"num_candidates": 5},
    "moving reference": {"ref_update_steps": 2, "ref_mixup_alpha": 0.6}
    | {"num_candidates": 5, "rejection_method": "max_variance"},
}


def grpo_job(folder: Path, output_dir: Path, **flags: Any) -> dict[str, Any]:
    further = [flags.pop("further_reward")] if "further_reward" in flags else []
    paths = {
        "model_name_or_path": str(folder / "base" / "model"),
        "reward_funcs": [f"{folder}/rewards.py:{flags.pop('function', 'letters')}", *further],
        "output_dir": str(output_dir),
    }
    return {"stage": "grpo", "flags": RUN | paths | flags}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path) -> Path:
    """A folder with a tiny model that has learned to stop after some words."""
    folder = tmp_path_factory.mktemp("grpo")
    (folder / "rewards.py").write_text(REWARD_FILE)
    job = stopping_model_job(folder / "base", tiny_gpt2, tokenizer_folder)
    launch(run_stages, 1, folder, jobs=[job])
    return folder


@pytest.fixture(scope="module")
def heard(base: Path) -> list[str]:
    """The warnings of all variants, run on one rank and, cut smaller, on two."""
    caught = []
    for num_ranks, limits in ((1, {}), (2, {"micro_batch_size": 2})):
        jobs = [
            grpo_job(base, base / str(num_ranks) / name, **(limits | flags))
            for name, flags in VARIANTS.items()
        ]
        caught += launch(run_and_listen, num_ranks, base, jobs=jobs)
    return [message for records in caught for r in records for message in r["warnings"]]


@pytest.mark.parametrize("name", [name for name in VARIANTS if "bfloat16" not in name])
def test_two_ranks_train_as_one_does(base: Path, heard: list[str], name: str):
    one, two = (untimed_lines(base / str(num_ranks) / name) for num_ranks in (1, 2))
    assert len(one) == RUN["max_steps"]
    for expected, line in zip(one, two, strict=True):
        assert line.keys() == expected.keys()
        for metric in line.keys() - {"sampler_kl"}:  # 0 up to rounding
            assert line[metric] == pytest.approx(expected[metric], rel=2e-5, abs=2e-5), metric


def test_what_the_variants_record_without_a_warning(base: Path, heard: list[str]):
    assert heard == []
    runs = {name: untimed_lines(base / "1" / name) for name in VARIANTS}
    norms = {name: [line["grad_norm"] for line in run] for name, run in runs.items()}
    assert norms["exact KL"] == pytest.approx(norms["exact KL, padded"], rel=1e-3)
    assert norms["exact KL"][0] == pytest.approx(norms["exact KL, bfloat16"][0], rel=0.02)
    assert len({tuple(values) for values in norms.values()}) == len(VARIANTS)
    assert runs["default"][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert all(line["clip_fraction"] == 0 for line in runs["default"])
    for name in ("sequence ratio", "cispo in minibatches", "dppo, two rewards"):
        assert any(line["clip_fraction"] > 0 for line in runs[name])
    assert not any("clip_fraction" in line for line in runs["sapo"])  # which has no bound
    assert any(0 < line["off_policy_fraction"] < 1 for line in runs["sapo"])
    assert any(line["replaced_groups"] > 0 for line in runs["resample"])
    kept = {"kept_reward", "advantage_mean_kept", "effective_sample_size"}
    assert not any(kept & line.keys() for line in runs["default"])  # all are kept
    assert all(kept <= line.keys() for line in runs["moving reference"])
    for line in runs["sampler weights"] + runs["mean"]:  # sampler and trainer agree
        assert line["objective/sampler_weight"] == pytest.approx(1, abs=1e-4)
    # Advantages sum to 0 in a group, and at first the KL is 0: what is left is the bonus.
    first = runs["exact KL"][0]
    assert first["loss"] == pytest.approx(-0.05 * first["entropy"], rel=0.3)
    for line in runs["KL in the reward"]:  # and not in the loss
        assert line["loss"] == pytest.approx(0, abs=1e-6)
    assert abs(runs["KL in the reward"][2]["kl"]) > 0.01


def run_here(base: Path, name: str, **flags: Any) -> list[dict[str, Any]]:
    """The metrics of a short run in this process."""
    run_stages([grpo_job(base, base / name, **flags)])
    return untimed_lines(base / name)


def test_without_advantages_the_loss_is_the_share_of_entropy_or_of_the_kl(base: Path):
    """Of equal rewards; the second run is tied to what the first ended with."""
    flags: dict[str, Any] = {"function": "same", "missing_eos_penalty": 1.0, "learning_rate": 3e-3}
    bonus = {"beta": 0.0, "entropy_coef": 0.5, "aggregation": "token"}
    for line in (run := run_here(base, "entropy", **flags, **bonus)):  # means over tokens, both
        assert line["loss"] == pytest.approx(-0.5 * line["entropy"], rel=1e-4)
    assert run[0]["entropy"] > 0.5
    flags["ref_model_name_or_path"] = str(base / "entropy" / "model")
    for line in (run := run_here(base, "kl", **flags, beta=0.4, aggregation="constant")):
        # The KL is in nats per completion, the loss per token of the longest.
        assert line["loss"] == pytest.approx(0.4 * line["kl"] / 8, rel=1e-4)
    assert run[0]["kl"] > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_only_a_kl_needs_a_reference(base: Path, beta: float):
    (record,) = run_stages([grpo_job(base, base / f"beta {beta}", beta=beta, max_steps=1)])
    assert len(record["devices"]) == 1 + (beta > 0)  # models
    assert ("kl" in untimed_lines(base / f"beta {beta}")[0]) == (beta > 0)


def test_minibatches_of_a_single_pass_are_weighed_against_the_policy_that_sampled(base: Path):
    """The second meets a policy that the first has moved: its old log-probs have to be kept."""
    flags = {"num_minibatches": 2, "learning_rate": 1e-2}
    clip = "clip:epsilon_low=1e-3,epsilon_high=1e-3"
    run = run_here(base, "single pass", policy_objective=clip, **flags)
    assert all(line["sampler_kl"] == pytest.approx(0, abs=1e-5) for line in run)
    assert any(line["clip_fraction"] > 0.1 for line in run)


@pytest.mark.parametrize(
    ("flags", "estimator"),
    [
        ({}, "k3"),
        ({"kl_estimator": "k1_ratio"}, "k1"),
        ({"kl_estimator": "full"}, None),
    ],
    ids=str,
)
def test_the_kl_of_the_loop_is_the_estimator_that_was_asked_for(base, flags, estimator):
    """A token's KL of 1/2 times a ratio of 2 or not; the exact one asks no estimator."""
    half = mock.Mock(side_effect=lambda logps, *_, **__: 0 * logps + 0.5)
    twice = mock.Mock(side_effect=lambda logps, *_: 0 * logps + 2)
    with mock.patch.multiple(train_grpo, kl_estimate=half, probability_ratio=twice):
        (line,) = run_here(base, f"estimator {estimator}", max_steps=1, **flags)
    assert half.called == (estimator is not None)
    if estimator is None:
        assert line["kl"] == pytest.approx(0, abs=1e-6)
    else:
        assert half.call_args.kwargs == {"estimator": estimator}
        expected = 1.0 if flags else 0.5
        assert line["kl"] == pytest.approx(expected * line["completion_length"], rel=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_with_a_moving_reference_is_resumed_to_the_bit(base: Path, num_ranks: int):
    flags = {"ref_update_steps": 1, "ref_mixup_alpha": 0.5, "save_steps": 2, "beta": 0.5}
    flags |= EVALUATED
    folder = base / f"resume_{num_ranks}"
    whole = grpo_job(base, folder / "whole", **flags)
    saved = layout.folder_of(folder / "whole", 2)
    resumed = grpo_job(base, folder / "again", **flags, resume_from_checkpoint=str(saved))
    launch(run_stages, num_ranks, base, jobs=[whole, resumed])
    lines = untimed_lines(folder / "whole")
    assert untimed_lines(folder / "again") == [line for line in lines if line["step"] > 2]
    accuracy = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    assert len(accuracy) == 1 + RUN["max_steps"]
    assert accuracy[0] == 0.5  # of the policy that the run starts from
    files = [folder / name / "model" / "model.safetensors" for name in ("whole", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_signal_between_the_updates_of_a_step_waits_for_the_last_one(base, monkeypatch):
    """A checkpoint between them would hold some of them, and resuming would repeat these."""
    flags, update = OFF_POLICY | {"num_minibatches": 2}, Run.update

    def signalled(run: Run) -> None:
        update(run)
        if run.step == 1:
            monkeypatch.setattr(signals, "_first", (signal.SIGTERM, 0.0))

    with monkeypatch.context() as patched:
        patched.setattr(Run, "update", signalled)
        with pytest.raises(signals.Stopped, match="after step 2 by SIGTERM"):
            run_here(base, "stopped", **flags)
    monkeypatch.setattr(signals, "_first", None)
    saved = str(layout.folder_of(base / "stopped", 2))
    run_here(base, "resumed", **flags, resume_from_checkpoint=saved)
    run_here(base, "undisturbed", **flags)
    files = [base / name / "model" / "model.safetensors" for name in ("resumed", "undisturbed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_reference_that_was_just_replaced_is_the_policy(base: Path):
    """The KL is measured before the update of the step: 0 after each replacement, else not."""
    folder = base / "replaced"
    flags = {"beta": 0.5, "learning_rate": 1e-2}
    moving = grpo_job(base, folder / "moving", **flags, ref_update_steps=1)
    launch(run_stages, 2, base, jobs=[moving, grpo_job(base, folder / "fixed", **flags)])
    moving_kl, fixed_kl = (
        [r["kl"] for r in untimed_lines(folder / n)] for n in ("moving", "fixed")
    )
    assert max(moving_kl) < 1e-9
    assert fixed_kl[0] < 1e-9
    assert min(fixed_kl[1:]) > 1e-6


# ---- refusals ------------------------------------------------------------------------------------

WEIGHTED = {"policy_objective": ["clip", "sampler_weights"]}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"advantages": "mean"}, ["--missing_eos_penalty is -1", "at least 0"]),
    (
        {"advantages": "gdpo", "kl_estimator": "k1_reward"},
        ["--kl_estimator is k1_reward", "must be another one with --advantages gdpo"],
    ),
    ({"advantages": "group:scale=none"}, ["--advantages group has no setting 'scale'", "none"]),
    (
        {"policy_objective": ["clip:epsilon_high=-inf"]},
        ["--policy_objective clip has epsilon_high=-inf", "must be a finite number"],
    ),
    ({"num_minibatches": 65}, ["--num_minibatches is 65", "--batch_size, 64"]),
    ({"kl_estimator": "k1"}, ["--kl_estimator is 'k1'", "k1_ratio", "k1_reward"]),
    (
        {"kl_estimator": "k1_reward", "num_candidates": 9},
        ["--baseline is all", "must be kept"],
    ),
    (
        {"kl_estimator": "k1_reward", "mask_truncated_completions": True},
        ["--mask_truncated_completions is true", "must be false"],
    ),
    (WEIGHTED | {"top_p": 0.9}, ["clip sampler_weights has", "supports"]),
    (WEIGHTED | {"top_k": 3}, ["clip sampler_weights has", "--top_k above 0"]),
    ({"ref_mixup_alpha": 1.5}, ["--ref_mixup_alpha is 1.5", "at most 1"]),
    ({"entropy_coef": -1.0}, ["--entropy_coef is -1.0", "at least 0"]),
    # A server that samples
    ({"rollout_server": "node7:8000"}, ["it must be a URL, as http://node7:8000"]),
    (
        {"rollout_server": "http://a:1", "temperature": 0.001},
        ["--temperature is 0.001", "it must be at least 0.01"],
    ),
    (
        {"rollout_server": "http://a:1", "temperature": 0.7, "top_p": 0.9},
        ["must be 1 with", "and --top_k or --top_p"],
    ),
    # Adapters
    ({"lora_r": -1}, ["--lora_r is -1; it must be at least 0"]),
    ({"lora_r": 4, "lora_alpha": 0}, ["--lora_alpha is 0; it must be above 0"]),
    ({"lora_target_modules": ["c_fc"]}, ["must be empty without --lora_r"]),
    (
        {"lora_r": 4, "ref_update_steps": 2},
        ["--ref_update_steps is 2; it must be 0 with --lora_r"],
    ),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=str)
def test_what_contradicts_itself_is_refused_in_one_sentence(flags, words):
    with pytest.raises(UserError) as caught:
        new_config(**flags).find_objective()
    tiny.check_sentence(caught.value, *words)


def test_a_reference_of_other_shapes_does_not_move(monkeypatch):
    policy, other = (Policy(tiny.causal_lm("gpt2", n_layer=number)) for number in (2, 3))
    monkeypatch.setattr(train_grpo.load, "load_policy", lambda *_: other.lm)
    with pytest.raises(
        UserError, match="--ref_update_steps is 2; it must be 0: '.*' has other lay"
    ):
        train_grpo.load_reference(policy, other.lm.config, new_config(ref_update_steps=2), None)


def test_the_help_names_every_built_in_reward():
    help_text = GRPOConfig.__dataclass_fields__["reward_funcs"].metadata["help"]
    assert all(f"{name}, " in help_text for name in functions.BUILT_IN)
    assert all(f"{name}:" in help_text for name in functions.WITH_ARGUMENT)
