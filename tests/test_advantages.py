"""Claim: advantages are the papers' formulas, and kept candidates follow the stated distributions.

Targets are numbers worked by hand, literal loops over the papers' definitions, and exact
enumeration of sampling without replacement. Nothing depends on which rank or batch holds a prompt.
About `common.advantages` and `common.objectives.advantages`.
"""

import itertools
import math
import random
import statistics
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import advantages
from common.objectives.kinds import Advantages

EPSILON = 1e-4


def close(value: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    assert value.dtype == torch.float32
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


# ---- group advantages ----------------------------------------------------------------------------

# Means 3 and 10; squared deviations 4 + 1 + 0 + 9 = 14 and 4; over all: mean 6.5, see below.
REWARDS = torch.tensor([[1.0, 2.0, 3.0, 6.0], [11.0, 11.0, 9.0, 9.0]])
GROUP_STD = (math.sqrt(14 / 3), math.sqrt(4 / 3))
# Squared distances from 6.5: 30.25 + 20.25 + 12.25 + 0.25 + 2 * 20.25 + 2 * 6.25 = 116
BATCH_STD = math.sqrt(116 / 7)
CENTRED = [[-2, -1, 0, 3], [1, 1, -1, -1]]
LEFT_OUT = [[1 - 11 / 3, 2 - 10 / 3, 0, 6 - 2], [11 - 29 / 3, 11 - 29 / 3, 9 - 31 / 3, 9 - 31 / 3]]


SCALES = ("group", "batch", "none", "mean")
BY_NAME = [*SCALES, *(f"rloo:scale={scale}" for scale in SCALES[:3])]


def group_advantages(text: str, rewards: Tensor = REWARDS, **options: Any) -> Tensor:
    return Advantages.find(text)(rewards, **options)


@pytest.mark.parametrize(("prefix", "centred"), [("", CENTRED), ("rloo:scale=", LEFT_OUT)])
def test_group_advantages_by_hand(prefix: str, centred: list[list[float]]):
    divisors = {"none": (1, 1), "group": [std + EPSILON for std in GROUP_STD], "mean": (3, 10)}
    divisors["batch"] = [BATCH_STD + EPSILON] * 2
    assert divisors.keys() == {*SCALES}
    if prefix:
        del divisors["mean"]  # of rewards that are not negative
    for scale, by_group in divisors.items():
        rows = zip(centred, by_group, strict=True)
        ours = group_advantages(prefix + scale)
        close(ours, [[value / divisor for value in row] for row, divisor in rows])
        assert torch.equal(group_advantages(prefix + scale, REWARDS[None]), ours)
    # A large common reward costs no digits.
    in_group = prefix + "group"
    close(group_advantages(in_group, REWARDS.double() + 1e6), group_advantages(in_group))


def test_words_of_trl_name_scales_of_rloo_and_without_one_it_divides_by_nothing():
    for text, same in (
        ("rloo", "rloo:scale=none"),
        ("rloo:scale=false", "rloo:scale=none"),
        ("rloo:scale=true", "rloo:scale=group"),
    ):
        assert torch.equal(group_advantages(text), group_advantages(same))


def test_objectives_are_normalised_one_by_one_by_hand():
    # GDPO's example: 0 and 1, 0 and 1 of two rewards that agree, and of two of which one is equal.
    # By group each reward is -1 and 1 over sqrt 2; the sum of two is 2 or 1 of that.
    first = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    second = torch.tensor([[0.0, 1.0], [5.0, 5.0]])
    unit = 0.5 / (math.sqrt(0.5) + EPSILON)
    gdpo = Advantages.find("gdpo")
    ours = gdpo(torch.stack([first, second]), [1.0, 1.0])
    close(ours, [[-2 * unit, 2 * unit], [-unit, unit]])
    ours = gdpo(torch.stack([first, second]), [1.0, 0.5])
    close(ours, [[-1.5 * unit, 1.5 * unit], [-unit, unit]])
    summed = group_advantages("group", first + second)  # GRPO tells them apart no more
    assert (summed[0] - summed[1]).abs().max() < 1e-3
    alone = gdpo(REWARDS[None], [1.0])
    assert torch.equal(alone, group_advantages("group"))
    # Objectives that cancel but for rounding teach nothing.
    by_function = REWARDS.expand(3, -1, -1)  # 0.1 + 0.2 - 0.3 is 2.8e-17, in float32 7e-9
    weights = [0.1, 0.2, -0.3]
    terms = [w * group_advantages("group") for w in weights]
    assert sum(terms, torch.zeros(2, 4)).any()
    assert not gdpo(by_function, weights).any()
    steps, ends = [[0.1 + 0.2], [0.3]], [[1], [0]]
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert not advantages.step_advantages(steps, ends, mask, num_generations=2).any()


# Rewards of 0.1 + 0.2 and of 0.3, of -0.1 - 0.7 and of -0.8, one unit in the last place apart
ROUNDED = torch.tensor([[0.3, 0.3 + 3e-8, 0.3], [-0.8, -0.8, -0.8 + 6e-8]])


@pytest.mark.parametrize("text", BY_NAME)
def test_what_rounding_may_make_is_no_difference(text: str):
    assert (ROUNDED[:, :1] != ROUNDED).any(1).all()
    ordinary = torch.tensor([[0.0, 0.0, 3e-8], [1.0, 1.0 + 1e-6, 2.0]])
    rewards = torch.cat([ROUNDED, ordinary])
    ours = group_advantages(text, rewards.abs() if text == "mean" else rewards)
    assert (ours[:2] == 0).all()
    assert ours[2:].any(1).all()
    assert ours[3, 0] != ours[3, 1]  # in a group that differs nothing is rounded off
    everywhere = torch.ones(4, 3, dtype=torch.bool)
    ours = advantages.normalise_globally(ours, everywhere, lambda sums: sums)
    assert (ours[:2] == 0).all()


@pytest.mark.parametrize(("text", "centred"), [("batch", CENTRED), ("rloo:scale=batch", LEFT_OUT)])
def test_batch_scale_counts_the_prompts_of_all_ranks_that_are_counted(text: str, centred: list):
    whole = group_advantages(text)
    for rank in (0, 1):
        other = REWARDS[1 - rank].double()
        elsewhere = torch.stack([other.sum(), (other**2).sum(), torch.tensor(4.0).double()])
        all_reduce = mock.Mock(side_effect=lambda sums, elsewhere=elsewhere: sums + elsewhere)
        ours = group_advantages(text, REWARDS[rank : rank + 1], all_reduce=all_reduce)
        close(ours, whole[rank : rank + 1])
        all_reduce.assert_called_once()
    # Of the first group alone: mean 3, squared deviations 14, four rewards.
    ours = group_advantages(text, counted=torch.tensor([True, False]))
    close(ours[0], [value / (GROUP_STD[0] + EPSILON) for value in centred[0]])


def test_normalise_globally_over_two_ranks_and_a_mask():
    kept = [[3.0, 1.0, 0.5], [-2.0, 4.0]]
    everything = kept[0] + kept[1]
    mean, std = statistics.mean(everything), statistics.stdev(everything)
    masked = torch.tensor([[3.0, 99.0, 1.0, 0.5], [-2.0, 4.0, torch.nan, torch.inf]])
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    seen = []
    for rank in (0, 1):
        other = torch.tensor(kept[1 - rank], dtype=torch.float64)
        elsewhere = torch.stack([other.sum(), (other**2).sum(), torch.tensor(float(len(other)))])

        def all_reduce(sums: Tensor, elsewhere: Tensor = elsewhere) -> Tensor:
            assert sums.dtype == torch.float64
            return sums + elsewhere

        ours = advantages.normalise_globally(masked[rank], mask[rank], all_reduce)
        close(ours[mask[rank]], [(value - mean) / (std + EPSILON) for value in kept[rank]])
        assert (ours[~mask[rank]] == 0).all()
        seen += ours[mask[rank]].tolist()
    assert abs(statistics.mean(seen)) < 1e-6
    assert abs(statistics.stdev(seen) - 1) < 1e-3
    for counted in ([False, False], [True, False]):  # no deviation of none, or of one
        alone = advantages.normalise_globally(
            torch.tensor([5.0, 1.0]), torch.tensor(counted), lambda sums: sums
        )
        close(alone, [0.0, 0.0])


def test_moments_are_exact_where_values_are_far_from_0_equal_or_none():
    far = [10_000.0, 10_001.0, 10_002.5]
    everywhere = torch.ones(3, dtype=torch.bool)
    ours = advantages.normalise_globally(torch.tensor(far), everywhere, lambda sums: sums)
    mean, std = statistics.mean(far), statistics.stdev(far)
    close(ours, [(value - mean) / (std + EPSILON) for value in far])
    for value in (0.1, 0.3, 0.7, 1e6 / 3):  # of some the mean's square is above the squares' mean
        values = torch.full((7,), value, dtype=torch.float64)
        mean_of_equal, std_of_equal = advantages.global_moments(values, None)
        assert float(mean_of_equal) == pytest.approx(value)
        assert float(std_of_equal) == pytest.approx(0.0, abs=1e-6 * value)
    assert advantages.global_moments(torch.empty(0, dtype=torch.float64), None) == (0.0, 0.0)


# ---- step advantages -----------------------------------------------------------------------------


def literal_step_advantages(rewards: list, ends: list, mask: list, size: int) -> list[list[float]]:
    """DeepSeekMath 4.1.3 word by word, with this project's deviation and 1e-4."""
    result = []
    for i, row in enumerate(mask):
        group = range(i // size * size, i // size * size + size)
        pool = [reward for k in group for reward in rewards[k]]
        std = statistics.stdev(pool) if len(pool) > 1 else 0.0
        normalised = [(r - statistics.mean(pool)) / (std + EPSILON) for r in rewards[i]]
        result.append(
            [
                sum(r for r, end in zip(normalised, ends[i], strict=True) if end >= t) * counts
                for t, counts in enumerate(row)
            ]
        )
    return result


STEPS = st.lists(st.tuples(st.floats(-3, 3, width=16), st.integers(0, 5)), max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(STEPS, st.integers(0, 6)), min_size=6, max_size=6),
    num_generations=st.sampled_from([1, 2, 3, 6]),
)
def test_step_advantages_against_the_definition(rows: list, num_generations: int):
    rewards = [[reward for reward, _ in steps] for steps, _ in rows]
    ends = [[end for _, end in steps] for steps, _ in rows]
    mask = torch.arange(6) < torch.tensor([length for _, length in rows])[:, None]
    ours = advantages.step_advantages(rewards, ends, mask, num_generations=num_generations)
    expected = literal_step_advantages(rewards, ends, mask.tolist(), num_generations)
    close(ours, expected, 1e-5)

    width = max(max(map(len, rewards)), 1)
    padded_rewards = torch.tensor([row + [7.0] * (width - len(row)) for row in rewards])
    padded_ends = torch.tensor([row + [-1] * (width - len(row)) for row in ends])
    padded = advantages.step_advantages(
        padded_rewards, padded_ends, mask, num_generations=num_generations
    )
    assert torch.equal(padded, ours)


def test_equal_steps_have_no_advantage_and_one_outside_of_the_completion_is_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    equal = advantages.step_advantages([[0.1, 0.1], [0.1]], [[0, 2], [1]], mask, num_generations=2)
    assert (equal == 0).all()
    for end in (3, -2):  # outside of the completion
        with pytest.raises(ValueError, match=r"completion 1 .* between 0 and 2"):
            advantages.step_advantages([[1.0], [1.0]], [[0], [end]], mask, num_generations=2)


# ---- rejection sampling --------------------------------------------------------------------------


def literal_algorithm_1(
    rewards: list[float], num_keep: int, beta: float, draw: object
) -> list[int]:
    """Liu et al. 2023, algorithm 1; draw(pass, candidate) is the uniform number it asks for."""
    left = dict(enumerate(rewards))
    accepted: list[int] = []
    number = 0
    while len(accepted) < num_keep:
        best = max(left.values())
        taken = []
        for candidate, reward in left.items():
            if draw(number, candidate) < math.exp((reward - best) / beta):
                accepted.append(candidate)
                taken.append(candidate)
                if len(accepted) == num_keep:
                    break
        for candidate in taken:
            del left[candidate]
        number += 1
    return accepted


@settings(max_examples=80, deadline=None)
@given(
    rewards=st.lists(
        st.lists(st.floats(-3, 3, width=16), min_size=6, max_size=6), min_size=1, max_size=4
    ),
    num_keep=st.integers(1, 6),
    beta=st.sampled_from([0.05, 0.5, 2.0, 100.0]),
    seed=st.integers(0, 10**6),
)
def test_rso_is_algorithm_1_draw_by_draw(rewards: list, num_keep: int, beta: float, seed: int):
    generator = random.Random(seed)
    table = torch.tensor(
        [[[generator.random() for _ in range(6)] for _ in rewards] for _ in range(6)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advantages, "uniform", lambda salt, seeds, number, candidates: table[number])
        options = {"num_keep": num_keep, "temperature": beta, "seed": torch.arange(len(rewards))}
        ours = advantages.rejection_sample(torch.tensor(rewards), method="rso", **options)
    for i, row in enumerate(rewards):

        def uniform(number: int, candidate: int, i: int = i) -> float:
            return table[number, i, candidate].item()

        assert ours[i].tolist() == literal_algorithm_1(row, num_keep, beta, uniform)
    assert ours.dtype == torch.int64


def exact_without_replacement(rewards: list[float], num_keep: int, beta: float) -> Counter:
    """Probability of each ordered draw without replacement from softmax(rewards / beta)."""
    weights = [math.exp(reward / beta) for reward in rewards]
    outcomes: Counter = Counter()
    for draw in itertools.permutations(range(len(rewards)), num_keep):
        total, probability = sum(weights), 1.0
        for candidate in draw:
            probability *= weights[candidate] / total
            total -= weights[candidate]
        outcomes[draw] = probability
    return outcomes


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_frequencies_of_ordered_draws_of_gumbel(beta: float):
    rewards, num_keep, num_prompts = [0.3, -0.8, 1.1, 0.0, 0.9], 3, 30_000
    outcomes = exact_without_replacement(rewards, num_keep, beta)
    assert abs(sum(outcomes.values()) - 1) < 1e-9
    kept = advantages.rejection_sample(
        torch.tensor(rewards).expand(num_prompts, 5),
        num_keep=num_keep,
        temperature=beta,
        method="gumbel",
        seed=5,
    )
    counts = Counter(map(tuple, kept.tolist()))
    assert set(counts) <= set(outcomes)
    statistic = sum(
        (counts[draw] - num_prompts * p) ** 2 / (num_prompts * p) for draw, p in outcomes.items()
    )
    degrees = len(outcomes) - 1
    assert abs(statistic - degrees) / (2 * degrees) ** 0.5 < 4.5

    for candidate in range(5):  # inclusion frequencies
        inclusion = sum(p for draw, p in outcomes.items() if candidate in draw)
        frequency = (kept == candidate).any(dim=1).double().mean().item()
        spread = (max(inclusion * (1 - inclusion), 0) / num_prompts) ** 0.5
        assert abs(frequency - inclusion) < 4.5 * spread + 1e-9


TEXTS = torch.tensor([7, 7, 3, 3])  # the candidates a, a, b, b


@pytest.mark.parametrize("method", ["rso", "gumbel"])
def test_of_a_set_of_texts_each_is_drawn_once_before_any_twice(method: str):
    """RSO's Y is such a set: of a, a, b, b with rewards 1, 1, 0, 0 it keeps a and b."""
    rewards, texts = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(500, 4), TEXTS.expand(500, 4)
    options = {"temperature": 0.1, "method": method, "seed": 3}
    drawn = advantages.rejection_sample(rewards, num_keep=2, **options)
    assert (TEXTS[drawn] == 7).all(1).double().mean() > 0.99  # samples: a twice
    of_set = advantages.rejection_sample(rewards, num_keep=2, texts=texts, **options)
    assert of_set.sort(1).values.tolist() == [[0, 2]] * 500
    more = advantages.rejection_sample(rewards, num_keep=3, texts=texts, **options)
    assert (TEXTS[more[:, :2]].sort(1).values == torch.tensor([3, 7])).all()
    assert (more[:, 2] == 1).double().mean() > 0.99  # a again, which is the better one
    # Without equal texts it is what it was.
    options = {"num_keep": 3, "temperature": 1.0, "method": method, "seed": 3}
    plain = advantages.rejection_sample(rewards, **options)
    unequal = torch.arange(4).expand(500, 4)
    assert torch.equal(advantages.rejection_sample(rewards, texts=unequal, **options), plain)


@pytest.mark.parametrize("method", ["rso", "gumbel"])
def test_choice_does_not_depend_on_where_the_prompt_is(method: str):
    rewards = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    seeds = torch.randint(2**62, (12,), generator=torch.Generator().manual_seed(2))
    options = {"num_keep": 5, "temperature": 1.0, "method": method}
    whole = advantages.rejection_sample(rewards, seed=seeds, **options)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    for part in order.split(5):  # other ranks, other batches
        ours = advantages.rejection_sample(rewards[part], seed=seeds[part], **options)
        assert torch.equal(ours, whole[part])
    assert not torch.equal(advantages.rejection_sample(rewards, seed=seeds + 1, **options), whole)


@pytest.mark.parametrize(
    ("method", "drawn"),
    [
        ("rso", [[1, 4, 5], [4, 5, 0], [4, 5, 2], [3, 5, 0]]),
        ("gumbel", [[3, 2, 5], [5, 3, 4], [5, 4, 3], [4, 5, 1]]),
    ],
)
def test_a_seed_draws_the_same_in_every_version(method: str, drawn: list[list[int]]):
    """Else a run of an older commit could not be repeated. There is no other target."""
    rewards = torch.linspace(0, 1, 24).view(4, 6)
    options = {"num_keep": 3, "temperature": 0.1, "seed": 7}
    assert advantages.rejection_sample(rewards, method=method, **options).tolist() == drawn


@settings(max_examples=100, deadline=None)
@given(rewards=st.lists(st.integers(-5, 5), min_size=7, max_size=7), num_keep=st.integers(1, 7))
def test_max_variance_against_every_subset(rewards: list[int], num_keep: int):
    kept = advantages.rejection_sample(
        torch.tensor([rewards]).float() / 2,
        num_keep=num_keep,
        temperature=1.0,
        method="max_variance",
        seed=0,
    )[0].tolist()
    assert len(set(kept)) == num_keep
    best = max(statistics.pvariance(subset) for subset in itertools.combinations(rewards, num_keep))
    assert statistics.pvariance([rewards[i] for i in kept]) == pytest.approx(best)
    if num_keep == 1:
        assert rewards[kept[0]] == max(rewards), "no variance to compare: the best one"
    chosen = [rewards[i] for i in kept]
    assert chosen == sorted(chosen, reverse=True)


def test_unusable_options_are_refused_with_the_values_allowed():
    def sample(**changes: object) -> Tensor:
        options = {"num_keep": 2, "temperature": 1.0, "method": "rso", "seed": 0, **changes}
        return advantages.rejection_sample(torch.zeros(1, 4), **options)

    refusals = [
        (lambda: sample(method="best"), "'best'.*rso, gumbel, max_variance"),
        (lambda: sample(num_keep=5), "num_keep is 5.*between 1 and 4"),
        (lambda: sample(num_keep=0), "num_keep is 0.*between 1 and 4"),
        (lambda: sample(temperature=0.0), "temperature is 0.0"),
        (lambda: group_advantages("rloo:scale=mean"), "'mean'.*none.*group.*batch"),
        (lambda: group_advantages("rloo:scale=min"), "'min'.*none.*group.*batch"),
    ]
    for call, message in refusals:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(AssertionError, match="finite"):
        advantages.rejection_sample(
            torch.tensor([[0.0, torch.nan]]), num_keep=1, temperature=1.0, method="rso", seed=0
        )


@pytest.mark.parametrize("name", Advantages.built_in())
def test_groups_of_one_completion_are_refused(name: str):
    alone = REWARDS[:, :1]
    for rewards in (alone, alone[None]):
        with pytest.raises(ValueError, match="num_generations is 1; a group needs at least 2"):
            group_advantages(name, rewards)
    assert group_advantages(name, REWARDS[:, :2]).isfinite().all()


def test_effective_sample_size_by_hand():
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0]])
    close(advantages.effective_sample_size(weights), [4.0, 1.0, 1.6])
    close(advantages.effective_sample_size(10 * weights), [4.0, 1.0, 1.6])


@pytest.mark.parametrize("num_candidates", [8, 17, 64, 200])
def test_of_candidates_that_tie_the_first_are_kept(num_candidates: int):
    """A sort that is not stable reorders ties of 17 and more on some CPUs."""
    rewards = torch.zeros(2, num_candidates)
    kept = advantages.rejection_sample(
        rewards, num_keep=5, temperature=1.0, method="rso", seed=torch.tensor([3, 4])
    )
    assert kept.tolist() == [[0, 1, 2, 3, 4]] * 2
    rewards[:, 1::2] = 1.0
    kept = advantages.rejection_sample(
        rewards, num_keep=4, temperature=1.0, method="max_variance", seed=torch.tensor([3, 4])
    )
    lowest = [*range(0, num_candidates, 2)][-2:]
    assert [sorted(row) for row in kept.tolist()] == [sorted([1, 3, *lowest])] * 2


def test_rewards_are_equal_up_to_two_roundings_of_each():
    """Each is off by at most two units of 2^-24: two of them by four."""
    unit = 2.0**-24
    for units, is_equal in ((2, True), (4, True), (6, False)):
        rewards = torch.tensor([[1.0, 1.0 + units * unit, 1.0]])
        assert rewards[0, 1] != 1
        assert bool((group_advantages("none", rewards) == 0).all()) == is_equal
