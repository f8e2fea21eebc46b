"""Claim: pairs are chosen, dropped and written as their papers and flags say.

RSO's pairs are random among those accepted, the winner is the one with the higher reward, and a
pair without a difference is dropped and counted. About `experiments.sample_pairs`.
"""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import tiny
import torch
from ranks import arguments, launch
from tokenizers.processors import TemplateProcessing

import train_reward
from common import advantages
from common.config.parser import parse
from common.errors import UserError
from common.sampling.sampler import Rollouts
from common.text.example import Example, Vocabulary
from common.text.reading import load_examples, load_rows
from experiments import sample_pairs

SEEDS = torch.arange(3000)
PROMPT = Example(4, "A prompt TL;DR:", [5, 6], [], {"facts": 1}, "tldr")


def choose(rewards: torch.Tensor, method: str, num_accepted: int = 4, seeds: Any = None) -> Any:
    seeds = torch.arange(len(rewards)) if seeds is None else seeds
    options = {"num_accepted": num_accepted, "temperature": 0.5, "seeds": seeds}
    return sample_pairs.choose_pairs(rewards, method=method, **options)


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


@pytest.mark.parametrize("method", ["rso_tournament", "all"])
def test_equal_texts_are_one_before_pairs_are_drawn(method: str):
    """Of a, a, b, b two are accepted: always a and b, of which a wins; and no text meets itself."""
    rewards, seeds = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(200, 4), torch.arange(200)
    texts = torch.tensor([7, 7, 3, 3]).expand(200, 4)
    options = {"method": method, "temperature": 0.1, "seeds": seeds, "texts": texts}
    for num_accepted in (2, 4):
        chosen = sample_pairs.choose_pairs(rewards, num_accepted=num_accepted, **options)
        for pairs in chosen.tolist():
            assert [pair for pair in pairs if pair != [-1, -1]] == [[0, 2]]
    ids = [[5, 0], [5, 0], [6, 0], [6, 0]]
    rollouts = Rollouts.of(ids, [], [True] * 4)
    assert rollouts.numbered(1).tolist() == [[0, 0, 1, 1]]
    assert len(sampled([0], ["a", "a", "b", "b"], rewards[:1], chosen[:1])) == 1


def sampled(rows: list[int | None], *candidates: Any) -> list[sample_pairs.Pair]:
    """Of prompts with these rows, a filler where it is None."""
    is_real = torch.tensor([row is not None for row in rows])
    examples = [replace(PROMPT, row=row or 0) for row in rows]
    return sample_pairs.as_pairs(examples, is_real, *candidates)


def test_pairs_without_a_difference_or_a_text_are_dropped_and_counted(capsys):
    texts = [" a", " b", " c", " d", " ", " e", " f", " g"]
    rewards = torch.tensor([[1.0, 0.5], [0.25, 0.25], [1.0, 0.0], [9.0, 8.0]])
    chosen = torch.tensor([[[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]]])
    pairs = sampled([7, 3, 5, None], texts, rewards, chosen)
    assert len(pairs) == 3  # a filler counts nowhere
    (pair,) = sample_pairs.informative_pairs(pairs, rewards[:3].flatten().tolist(), 3)
    assert pair == sample_pairs.Pair(7, PROMPT.prompt, " a", " b", 1.0, 0.5)
    said = capsys.readouterr().out
    assert "1 of 3 (dropped 1 of equal reward, 1 with a blank completion)" in said
    assert "mean reward of 6 candidates of 3 prompts 0.500, of the chosen 1.000, of" in said
    with pytest.raises(UserError, match="all candidates of a prompt have the same reward"):
        sample_pairs.informative_pairs([], [], 1)


def test_written_pairs_are_rows_of_every_stage(tmp_path):
    texts = [" one two\u2028", " three"]
    rewards = torch.tensor([[0.5, 0.75]])
    order = torch.tensor([[[1, 0]]])
    pairs = sampled([0], texts, rewards, order)
    sample_pairs.write_rows(tmp_path / "run", "train", pairs)
    row = {"prompt": "A prompt TL;DR:", "chosen": " three", "rejected": " one two\u2028"}
    rewards = {"chosen_reward": 0.75, "rejected_reward": 0.5}
    assert load_rows(tiny.train_config(), f"{tmp_path}/run", "train", "preference") == [
        row | rewards
    ]


def test_a_text_keeps_the_stop_that_training_does_not_append():
    vocabulary = tiny.vocabulary()
    tokenizer, eos = vocabulary.tokenizer, vocabulary.stop_ids[0]
    other = next(i for i in range(200, 260) if i != eos)
    vocabulary = replace(vocabulary, stop_ids=[eos, other])
    completions = [[5, eos], [5, other], [5, 6]]
    rollouts = Rollouts.of(completions, [[0.0] * 2] * 3, [True, True, False])
    texts = sample_pairs.texts_with_stops(rollouts, vocabulary)
    assert texts == [tokenizer.decode(ids) for ids in ([5], [5, other], [5, 6])]


# ---- pairs of conversations ----------------------------------------------------------------------

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It"}]
CONTINUED = {"chat_template_kwargs": {"continue_final_message": True}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
OPTIONS = {"tools": TOOLS, "chat_template_kwargs": {"mood": "calm"}}
WITH_OPTIONS = "{{ mood }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + tiny.CHATML
TRIMMED = tiny.CHATML.replace("m.content", "(m.content | trim)")
THINKS = tiny.CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>{% endif %}{{ m.content }}"
)


def chat_vocabulary(template: str, bos: str = "<|bos|>") -> Vocabulary:
    """Of a tokenizer that begins texts with a bos, and its turns with none."""
    tokenizer = tiny.with_template(tiny.chatml_tokenizer("<|endoftext|>"), template)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    if bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
        )
    stops = ["<|im_end|>", tokenizer.eos_token]
    return tiny.vocabulary(tokenizer.convert_tokens_to_ids(stops), tokenizer)


def written_and_read(folder: Any, row: Any, completions: list[Any], vocabulary: Vocabulary) -> Any:
    """The sampled prompt, and the examples and rows that two sampled completions become."""
    flags: dict[str, Any] = {"max_prompt_length": 200, "max_completion_length": 8}
    config = tiny.train_config(**flags)
    file = tiny.write_rows(folder / "prompts.jsonl", [row])
    (prompt,) = load_examples(config, str(file), "train", "prompts", vocabulary)
    ids = [vocabulary.tokenizer(c, add_special_tokens=False)["input_ids"] for c in completions]
    rollouts = Rollouts.of(ids, [], [row[-1] in vocabulary.stop_ids for row in ids])
    texts = sample_pairs.texts_with_stops(rollouts, vocabulary)
    chosen = torch.tensor([[[0, 1]]])
    pairs = sample_pairs.as_pairs(
        [prompt], torch.tensor([True]), texts, torch.tensor([[1.0, 0.5]]), chosen
    )
    pairs_config: Any = tiny.train_config(**flags)
    pairs = sample_pairs.as_conversations(pairs, vocabulary, pairs_config)
    sample_pairs.write_rows(folder, "train", pairs)
    rows = load_rows(config, str(folder / "train.jsonl"), "train", "preference")
    examples = load_examples(config, str(folder / "train.jsonl"), "train", "preference", vocabulary)
    return prompt, ids, examples, rows


@pytest.mark.parametrize(
    ("template", "row", "completions", "is_chat"),
    [
        (tiny.CHATML, {"prompt": ASKED}, ["Yes.<|im_end|>", "No.<|im_end|>"], True),
        (tiny.CHATML, {"prompt": "Why?"}, ["Yes.<|im_end|>", "No.<|im_end|>"], False),
        (WITH_OPTIONS, {"prompt": ASKED, **OPTIONS}, ["Yes.<|im_end|>", "No.<|im_end|>"], True),
        (tiny.CHATML, {"prompt": BEGUN, **CONTINUED}, [" is.<|im_end|>", " was.<|im_end|>"], True),
        # Broken off by the limit of 8 tokens, here of one byte each
        (tiny.CHATML, {"prompt": ASKED}, ["\u0410\u0411\u0412\u0413", "No.<|im_end|>"], True),
        (TRIMMED, {"prompt": ASKED}, ["Yes.<|im_end|>", "No.<|im_end|>"], True),
    ],
)
def test_training_on_pairs_reads_the_tokens_that_were_sampled(
    tmp_path, template, row, completions, is_chat
):
    prompt, ids, (example,), (written,) = written_and_read(
        tmp_path, row, completions, chat_vocabulary(template)
    )
    assert example.prompt_ids == prompt.prompt_ids
    assert example.completions == ids
    assert bool(example.messages) is is_chat
    assert written["prompt"] == row["prompt"]
    assert {k: written[k] for k in row} == row
    assert written["chosen_reward"] == 1.0
    if is_chat:
        assert [m["role"] for m in written["chosen"]] == ["assistant"]
        assert written["rejected"][0]["content"] == completions[1].removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    ("template", "completions"),
    [
        (TRIMMED, [" Yes.<|im_end|>", "No.<|im_end|>"]),
        (THINKS, ["Yes.<|im_end|>", "No.<|im_end|>"]),
        (tiny.CHATML, ["Yes.<|endoftext|>", "No.<|im_end|>"]),
        (tiny.CHATML + "{{ raise_exception('No') if messages | length > 2 }}", ["Yes.", "No."]),
    ],
)
def test_an_answer_that_the_template_writes_differently_stays_text_or_is_dropped(
    tmp_path, capsys, template, completions
):
    """A text gets a bos, which the policy did not see, where the tokenizer has one."""
    vocabulary = chat_vocabulary(template, bos="")
    found = written_and_read(tmp_path, {"prompt": ASKED}, completions, vocabulary)
    prompt, ids, (example,), (written,) = found
    assert (example.prompt_ids, written["prompt"]) == (prompt.prompt_ids, prompt.prompt)
    assert [c[: len(i)] for c, i in zip(example.completions, ids, strict=True)] == ids
    assert "1 pairs differently: 1 are rows of text, 0 are dropped" in capsys.readouterr().out
    with pytest.raises(UserError, match="a text would get a bos that the template does not write"):
        written_and_read(tmp_path, {"prompt": ASKED}, completions, chat_vocabulary(template))


# ---- the command ---------------------------------------------------------------------------------

REWARD_FUNCTION = """
def reward(completions, **columns):
    return [len(set(text)) / 8 for text in completions]
"""
NUM_PROMPTS = 7
METHODS = {"rso_tournament": 2, "best_worst": 1}  # pairs of a prompt at most


def sample(jobs: list[dict[str, Any]]) -> None:
    """Run the command on this rank, once for each job's flags."""
    for flags in jobs:
        sample_pairs.main(parse(sample_pairs.PairsConfig, arguments(flags)))


def test_sampled_pairs_do_not_depend_on_the_ranks(tmp_path, tokenizer_folder):
    """Two ranks pack their prompts into unequal micro-batches, and one has a filler."""
    tiny.save_stopping_model(tmp_path / "start", tokenizer_folder, seed=1)
    (tmp_path / "judge.py").write_text(REWARD_FUNCTION)
    rows = [{"prompt": f"A story about number {i % 4}.\n\nTL;DR:"} for i in range(NUM_PROMPTS)]
    tiny.write_rows(tmp_path / "rows" / "train.jsonl", rows)
    tiny.write_rows(tmp_path / "rows" / "test.jsonl", rows[:3])
    flags: dict[str, Any] = {
        "model_name_or_path": str(tmp_path / "start"),
        "dataset_name": str(tmp_path / "rows"),
        "dataset_train_split": f"train[:{NUM_PROMPTS}]",
        "reward_funcs": f"{tmp_path}/judge.py:reward",
        "max_prompt_length": 64,
        "max_completion_length": 16,
        "batch_size": 4,
        "num_candidates": 6,
        "missing_eos_penalty": -0.5,
        "rejection_temperature": 0.3,
    }
    for num_ranks, size in {1: {"micro_batch_size": 8}, 2: {"micro_batch_tokens": 60}}.items():
        folders = {method: str(tmp_path / str(num_ranks) / method) for method in METHODS}
        jobs = [
            {**flags, **size, "pair_method": method, "output_dir": folder}
            for method, folder in folders.items()
        ]
        launch(sample, num_ranks, tmp_path, jobs=jobs)
    for method, split in product(METHODS, ("train", "validation")):
        files = [tmp_path / str(n) / method / f"{split}.jsonl" for n in (1, 2)]
        assert files[0].read_text() == files[1].read_text()
        pairs = load_rows(tiny.train_config(), str(files[0].parent), split, "preference")
        assert 0 < len(pairs) <= METHODS[method] * (NUM_PROMPTS if split == "train" else 3)
        for row in pairs:
            rewards = [len(set(row[name])) / 8 for name in ("chosen", "rejected")]
            # A completion that did not stop has the penalty instead.
            assert row["chosen_reward"] in (rewards[0], -0.5)
            assert row["rejected_reward"] in (rewards[1], -0.5)
            assert row["chosen_reward"] > row["rejected_reward"]


EVEN = "it must be even, at least 2 and at most --num_candidates, 8"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward_funcs": []}, "--reward_funcs is required"),
        ({"num_generations": 3}, f"--num_generations is 3; {EVEN}"),
        ({"num_generations": 10}, f"--num_generations is 10; {EVEN}"),
        ({"temperature": 0.0}, "--temperature is 0.0"),
        ({"pair_method": "worst"}, "--pair_method is 'worst'"),
    ],
)
def test_flags_that_make_no_pairs_are_refused(fields, message):
    with pytest.raises(UserError) as refusal:
        sample_pairs.PairsConfig(**({"output_dir": "unused", "reward_funcs": ["gold"]} | fields))
    assert message in str(refusal.value)


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
