"""Claim: a completion that is compared several times is scored once, and nothing else changes.

Losses and gradients of a prompt's comparisons together are those of the same comparisons one by
one, where every completion is computed each time.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from common.data import Example, Piece
from common.losses import bradley_terry_loss
from common.pairs import groups
from common.scoring import RewardModel

pytestmark = pytest.mark.usefixtures("process_group")

LAYOUTS = ("shared_prefix", "padded")
GROUPS = ([0, 2, 4], [1], [3, 5])


def new_examples() -> list[Example]:
    """All comparisons of three completions; one; and one against each of two. Not in order."""
    texts = [tiny.random_ids(n, seed=n) for n in (4, 2, 5, 3, 6, 1, 7)]
    prompts = [tiny.random_ids(n, seed=50 + n) for n in (6, 3, 9)]
    pairs = [(0, 0, 1), (1, 3, 4), (0, 0, 2), (2, 6, 5), (0, 2, 1), (2, 6, 0)]
    return [
        Example(row, "p", prompts[p], [texts[chosen], texts[rejected]], {})
        for row, (p, chosen, rejected) in enumerate(pairs)
    ]


def config(layout: str, **limits: int) -> Any:
    return tiny.train_config(**{"layout": layout, "micro_batch_size": 8, **limits})


def losses_and_gradient(
    model: RewardModel, grouped: Sequence[Sequence[int]], run_config: Any
) -> tuple[Tensor, Tensor, int]:
    """The loss of each of the six rows, the gradient of their sum, and completions computed."""
    model.zero_grad()
    losses, num_scored = torch.zeros(6), 0
    for part in groups.micro_batches(new_examples(), grouped, run_config, 7):
        rewards = model(part.batch)
        num_scored += len(rewards)
        values = bradley_terry_loss(*rewards[part.pairs].unbind(-1))
        values.sum().backward()
        losses[part.rows] += values.detach()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return losses, torch.cat(gradients), num_scored


@pytest.mark.parametrize("layout", LAYOUTS)
def test_together_the_losses_are_those_of_the_comparisons_one_by_one(layout: str):
    model = RewardModel(tiny.classifier("gpt2"))
    apart = [[row] for rows in GROUPS for row in rows]
    losses, gradient, num_scored = losses_and_gradient(model, apart, config(layout))
    again, same_gradient, num_scored_once = losses_and_gradient(model, GROUPS, config(layout))
    assert losses.std() > 0.1
    torch.testing.assert_close(again, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        same_gradient, gradient, rtol=1e-4, atol=1e-6 * float(gradient.norm())
    )
    assert (num_scored, num_scored_once) == (12, 3 + 2 + 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_over_the_limits_is_cut_between_comparisons(layout: str):
    model = RewardModel(tiny.classifier("gpt2"))
    losses, *_ = losses_and_gradient(model, GROUPS, config(layout))
    cut, _, num_scored = losses_and_gradient(model, GROUPS, config(layout, micro_batch_size=2))
    torch.testing.assert_close(cut, losses, rtol=1e-5, atol=1e-5)
    assert num_scored == 3 + 2 + 2 + 3  # three comparisons do not fit, two do


def test_every_pair_names_its_own_tokens():
    examples = new_examples()
    (part,) = groups.micro_batches(examples, GROUPS, config("padded"), 7)
    assert sorted(part.rows.tolist()) == list(range(6))
    for row, pair in zip(part.rows.tolist(), part.pairs.tolist(), strict=True):
        for place, expected in zip(pair, examples[row].completions, strict=True):
            mask = part.batch.completion_mask[place]
            assert part.batch.completion_ids[place][mask].tolist() == expected
            prompt = part.batch.attention_mask[place].sum() - mask.sum()
            assert prompt == len(examples[row].prompt_ids)


def test_two_equal_completions_are_one():
    example = Example(0, "p", [5], [[1, 2], [1, 2]], {})
    (part,) = groups.micro_batches([example], [[0]], config("padded"), 7)
    assert part.pairs.tolist() == [[0, 0]]
    assert len(part.batch.places) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_filler_has_no_comparison_and_a_gradient_of_0(layout: str):
    part = groups.collate([Piece([0], [[0], [0]], [])], layout, 7)
    assert part.pairs.shape == (0, 2)
    assert part.rows.shape == (0,)
    model = RewardModel(tiny.classifier("gpt2"))
    loss = bradley_terry_loss(*model(part.batch)[part.pairs].unbind(-1)).sum()
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)
    assert model.lm.score.weight.grad is not None
