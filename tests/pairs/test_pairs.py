"""Claim: pairs are chosen, dropped and written as their papers and flags say.

RSO's pairs are random among those accepted, the winner is the one with the higher reward, and a
pair without a difference is dropped and counted.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

import train_reward
from common import advantages
from common.data import Example
from common.errors import UserError
from common.pairs import from_rollouts
from common.sampling.sampler import Rollouts
from common.text.reading import load_rows

SEEDS = torch.arange(3000)
PROMPT = Example(4, "A prompt TL;DR:", [5, 6], [], {"facts": 1}, "tldr")


def choose(rewards: torch.Tensor, method: str, num_accepted: int = 4, seeds: Any = None) -> Any:
    seeds = torch.arange(len(rewards)) if seeds is None else seeds
    options = {"num_accepted": num_accepted, "temperature": 0.5, "seeds": seeds}
    return from_rollouts.choose_pairs(rewards, method=method, **options)


def test_best_worst_by_hand():
    rewards = torch.tensor([[0.1, 0.9, -0.3], [2.0, 2.0, 2.0]])
    assert choose(rewards, "best_worst")[0].tolist() == [[1, 2]]
    assert choose(rewards, "best_worst").shape == (2, 1, 2)
    chosen = choose(torch.tensor([[0.1, 0.9, -0.3], [3.0, 2.0, 1.0]]), "all")
    assert chosen.tolist() == [[[1, 0], [0, 2], [1, 2]], [[0, 1], [0, 2], [1, 2]]]
    assert choose(torch.rand(5, 4), "all").shape == (5, 6, 2), "six pairs of four"


def test_every_accepted_candidate_plays_once_and_the_higher_reward_wins():
    """Accepted by rejection sampling: `test_advantages.py` has that it is RSO's algorithm 1."""
    rewards = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    chosen = choose(rewards, "rso_tournament", 8)
    assert chosen.shape == (50, 4, 2)
    options = {"num_keep": 8, "temperature": 0.5, "method": "rso", "seed": SEEDS[:50]}
    accepted = advantages.rejection_sample(rewards, **options).sort(1).values
    assert torch.equal(chosen.flatten(1).sort(1).values, accepted)
    assert not torch.equal(accepted, rewards.topk(8).indices.sort(1).values)
    scores = rewards.gather(1, chosen.flatten(1)).view(50, 4, 2)
    assert (scores[..., 0] >= scores[..., 1]).all()


def test_opponents_are_random_whatever_their_rewards():
    """With all four accepted the three ways to pair them are equally likely.

    In the order of acceptance they are not: the worst are accepted last, next to each other.
    """
    rewards = torch.tensor([1.0, 0.9, -0.5, -0.6]).expand(len(SEEDS), 4)
    chosen = choose(rewards, "rso_tournament", 4, SEEDS)
    pairings = Counter(frozenset(frozenset(pair) for pair in row) for row in chosen.tolist())
    assert len(pairings) == 3
    for count in pairings.values():
        assert abs(count / len(SEEDS) - 1 / 3) < 4 * (2 / 9 / len(SEEDS)) ** 0.5


def test_a_prompt_s_pairs_do_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(1)
    rewards, seeds = torch.randn(6, 8, generator=generator), torch.arange(6) + 40
    together = choose(rewards, "rso_tournament", 4, seeds)
    apart = [choose(rewards[i : i + 1], "rso_tournament", 4, seeds[i : i + 1]) for i in range(6)]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("method", ["rso_tournament", "all"])
def test_equal_texts_are_one_before_pairs_are_drawn(method: str):
    """Of a, a, b, b two are accepted: always a and b, of which a wins; and no text meets itself."""
    rewards, seeds = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(200, 4), torch.arange(200)
    texts = torch.tensor([7, 7, 3, 3]).expand(200, 4)
    options = {"method": method, "temperature": 0.1, "seeds": seeds, "texts": texts}
    for num_accepted in (2, 4):
        chosen = from_rollouts.choose_pairs(rewards, num_accepted=num_accepted, **options)
        for pairs in chosen.tolist():
            assert [pair for pair in pairs if pair != [-1, -1]] == [[0, 2]]
    ids = [[5, 0], [5, 0], [6, 0], [6, 0]]
    rollouts = Rollouts.of(ids, [], [True] * 4)
    assert rollouts.numbered(1).tolist() == [[0, 0, 1, 1]]
    assert len(sampled([0], rollouts, ["a", "a", "b", "b"], rewards[:1], chosen[:1])) == 1


def sampled(rows: list[int | None], *candidates: Any) -> list[from_rollouts.SampledPair]:
    """Of prompts with these rows, a filler where it is None."""
    is_real = torch.tensor([row is not None for row in rows])
    examples = [replace(PROMPT, row=row or 0) for row in rows]
    return from_rollouts.sampled_pairs(examples, is_real, *candidates)


def rollouts_of(texts: list[str]) -> Rollouts:
    tokenizer = tiny.tokenizer()
    ids = [[*tokenizer(text)["input_ids"], 0] for text in texts]
    return Rollouts.of(ids, [[0.0] * len(row) for row in ids], [True] * len(ids))


def test_pairs_without_a_difference_or_a_text_are_dropped_and_counted(capsys):
    texts = [" a", " b", " c", " d", " ", " e", " f", " g"]
    rewards = torch.tensor([[1.0, 0.5], [0.25, 0.25], [1.0, 0.0], [9.0, 8.0]])
    chosen = torch.tensor([[[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]]])
    pairs = sampled([7, 3, 5, None], rollouts_of(texts), texts, rewards, chosen)
    assert len(pairs) == 3  # a filler counts nowhere
    (pair,) = from_rollouts.informative_pairs(pairs, rewards[:3].flatten().tolist(), 3)
    assert (pair.example.row, pair.texts, pair.rewards) == (7, [" a", " b"], [1.0, 0.5])
    said = capsys.readouterr().out
    assert "1 of 3 (dropped 1 of equal reward, 1 with a blank completion)" in said
    assert "mean reward of 6 candidates of 3 prompts 0.500, of the chosen 1.000, of" in said
    with pytest.raises(UserError, match="all candidates of a prompt have the same reward"):
        from_rollouts.informative_pairs([], [], 1)


def test_pairs_of_all_ranks_stand_in_the_order_of_the_prompts():
    texts, rewards = [" a", " b", " c", " d"], torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    chosen = torch.tensor([[[0, 1]], [[0, 1]]])
    pairs = sampled([3, 0], rollouts_of(texts), texts, rewards, chosen)
    pairs += sampled([2, 1], rollouts_of(texts), texts, rewards, chosen)
    kept = from_rollouts.informative_pairs(pairs, [], 4)
    assert [pair.example.row for pair in kept] == [0, 1, 2, 3]


def test_written_pairs_are_rows_of_every_stage(tmp_path):
    texts = [" one two\u2028", " three"]
    rewards = torch.tensor([[0.5, 0.75]])
    order = torch.tensor([[[1, 0]]])
    pairs = sampled([0], rollouts_of(texts), texts, rewards, order)
    file = tmp_path / "run" / "pairs.jsonl"
    from_rollouts.write_jsonl(file, pairs)
    row = {"prompt": "A prompt TL;DR:", "chosen": " three", "rejected": " one two\u2028"}
    rewards = {"chosen_reward": 0.75, "rejected_reward": 0.5}
    assert load_rows(tiny.train_config(), str(file), "train", "preference") == [row | rewards]
    example = pairs[0].example
    assert example.completions == [rollouts_of(texts).completion_ids[i] for i in (1, 0)]
    assert (example.row, example.prompt_ids, example.columns) == (0, [5, 6], {"facts": 1})


# ---- margins and lengths of pairs ----------------------------------------------------------------


def with_margins(*values: Any) -> list[Example]:
    return [Example(i, "p", [1], [[2], [3]], {"margin": v}) for i, v in enumerate(values)]


def test_margins_are_numbers_in_the_column_that_is_asked_for():
    assert train_reward.margins(with_margins(1, 0.5), "").tolist() == [0.0] * 2
    assert train_reward.margins(with_margins(1, 0.5), "margin").tolist() == [1.0, 0.5]
    for value in (None, "big", float("nan"), True):
        with pytest.raises(UserError, match="row 2 .* column 'margin'"):
            train_reward.margins(with_margins(1.0, value), "margin")
    with pytest.raises(UserError, match="row 1 .* column 'difference'"):
        train_reward.margins(with_margins(1.0), "difference")


def test_length_balance_by_hand(capsys):
    examples = tiny.ragged_examples([(2, 4, 2), (2, 2, 5), (2, 3, 3), (2, 7, 1)])
    train_reward.print_balance(examples, [])
    assert f"in {(1 + 0 + 0.5 + 1) / 4:.1%} of training pairs" in capsys.readouterr().out
