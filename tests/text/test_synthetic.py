"""Claim: the embedded task is what it says, so what is measured on it can be trusted.

Targets: sums worked by hand, and counts over many rows and processes. About
`common.text.synthetic`.
"""

import hashlib
import itertools
import json
import math
from collections import Counter

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.evaluation import summary
from common.text import synthetic

FACTS = {
    "who": "sister",
    "event": "sold",
    "thing": "guitar",
    "place": "airport",
    "wish": "revenge",
}
ALL_TOLD = " my sister sold my guitar at the airport and I want revenge."  # 12 words
KINDS = ("sft", "preference", "prompts")
SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def tokenizer():
    return synthetic.train_tokenizer()


@pytest.fixture(scope="module")
def pairs():
    return synthetic.make_rows("preference", "train", 4000, seed=5)


# --- the gold reward. A fact is worth 1/5, a wrong one costs half of that. ---


@pytest.mark.parametrize("template", synthetic.REFERENCES)
def test_a_summary_with_every_fact_has_one(template):
    assert synthetic.gold_reward(synthetic._summary(template, FACTS), FACTS) == 1.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (ALL_TOLD, 1.0),
        (ALL_TOLD.upper().replace(" ", "\n "), 1.0),  # neither case nor white space matters
        (" someone sold my guitar at the airport and I want revenge.", 4 / 5),
        (" my sister did something to my guitar at the airport and I want revenge.", 4 / 5),
        (" my sister sold something at the airport and I want revenge.", 4 / 5),
        (" my sister sold my guitar and I want revenge.", 4 / 5),
        (" my sister sold my guitar at the airport.", 4 / 5),
        (" someone did something at the airport.", 1 / 5),
        (" my brother sold my guitar at the airport and I want revenge.", 3.5 / 5),
        (" my brother broke my guitar at the airport and I want revenge.", 2 / 5),
        (" my brother broke my laptop at the airport and I want revenge.", 0.5 / 5),
        (" my brother broke my laptop at the beach and I want revenge.", 0.0),  # -1 / 5, clipped
        ("", 0.0),
        (" \N{SNOWMAN} \ufffd \x00", 0.0),
        (" someone did something.", 0.0),
        (" my my my at the the want want", 0.0),
        (" sister sold guitar airport revenge", 0.0),  # keywords, no statement
        (" a pawnshop in a sisterhood resold guitars at the airports", 0.0),  # parts of other words
    ],
)
def test_facts_stated_missing_and_wrong(completion, expected):
    assert synthetic.gold_reward(completion, FACTS) == pytest.approx(expected)


@pytest.mark.parametrize("slot", FACTS)
def test_listing_several_values_is_worse_than_the_right_one(slot):
    right = FACTS[slot]
    for other in set(synthetic.SLOTS[slot]) - {right}:
        for joint in (" or ", ", ", " "):
            for listing in (right + joint + other, other + joint + right):
                text = ALL_TOLD.replace(right, listing)
                assert synthetic.gold_reward(text, FACTS) <= 3.5 / 5 + 1e-9


def test_every_value_listed_as_a_statement_is_worth_nothing():
    text = " ".join(f"my {value}" for value in synthetic.SLOTS["who"])
    text += " " + " ".join(f"{value} my" for value in synthetic.SLOTS["event"])
    assert synthetic.gold_reward(text, FACTS) == 0.0


def test_repeating_costs_a_tenth_per_value_and_a_fiftieth_per_word_beyond_need():
    sentence = ALL_TOLD[:-1]
    part = sentence + ", my sister sold"  # 12 + 3 words fit into 15; two values repeated
    assert synthetic.gold_reward(part, FACTS) == pytest.approx(1 - 0.2)
    part = sentence + ", my sister sold my guitar"  # 17 words, three values
    assert synthetic.gold_reward(part, FACTS) == pytest.approx(1 - 0.3 - 0.04)
    assert synthetic.gold_reward(sentence + sentence, FACTS) == pytest.approx(1 - 0.5 - 0.18)
    assert synthetic.gold_reward(sentence * 4, FACTS) == 0.0
    short = " my sister sold my guitar"
    assert synthetic.gold_reward(short * 2, FACTS) < synthetic.gold_reward(short, FACTS)


def test_words_beyond_need_cost_though_they_are_neither_right_nor_wrong():
    rewards = [
        synthetic.gold_reward(ALL_TOLD + " really" * num_words, FACTS) for num_words in range(8)
    ]
    assert rewards == pytest.approx([1, 1, 1, 1, 0.98, 0.96, 0.94, 0.92])
    assert synthetic.gold_reward(ALL_TOLD + " 7 !" * 50, FACTS) == 0.0  # 112 signs and words


@settings(max_examples=100, deadline=None)
@given(st.text() | st.lists(st.sampled_from([*ALL_TOLD.split(), "brother", "my"])).map(" ".join))
def test_any_text_has_a_reward_between_zero_and_one(text):
    assert 0.0 <= synthetic.gold_reward(text, FACTS) <= 1.0


# --- the grammar ---


def test_a_value_belongs_to_one_slot_and_to_no_other_text():
    values = list(itertools.chain(*synthetic.SLOTS.values()))
    assert len(values) == len(set(values))
    frame = [
        *synthetic.SUBREDDITS,
        *synthetic.TITLES,
        *synthetic.STORIES,
        *synthetic.WISHES,
        *synthetic.FILLERS,
        *synthetic.REFERENCES,
        *synthetic.PADDING,
    ]
    # A subreddit may be named like a wish: no summary names a subreddit.
    words = {word for text in frame[len(synthetic.SUBREDDITS) :] for word in text.lower().split()}
    assert not words & set(values)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_tldr_layout_and_their_facts_are_in_the_post(kind, split):
    for row in synthetic.make_rows(kind, split, 200, seed=1):
        assert json.loads(json.dumps(row)) == row
        header, title, post, cue = row["prompt"].split("\n\n")
        assert header.startswith("SUBREDDIT: r/")
        assert title.startswith("TITLE: ")
        assert post.startswith("POST: ")
        assert cue == "TL;DR:"
        words = post.replace(".", " ").replace("?", " ").split()
        stated = {word for word in words if word in synthetic._SLOT_OF}
        assert stated == set(row["facts"].values())
        assert list(row["facts"]) == list(synthetic.SLOTS)
        for column in {"completion", "chosen", "rejected"} & set(row):
            assert row[column].startswith(" ")
            assert row[column] == " " + row[column].strip()
            assert "\n" not in row[column]


def test_references_state_nothing_wrong():
    for row in synthetic.make_rows("sft", "train", 1000):
        words = row["completion"].strip(".").replace(",", "").split()
        told = {word for word in words if word in synthetic._SLOT_OF}
        assert told <= set(row["facts"].values())
        assert synthetic.gold_reward(row["completion"], row["facts"]) > 0


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_a_function_of_kind_split_seed_and_index(kind, split):
    rows = synthetic.make_rows(kind, split, 60, seed=3)
    assert synthetic.make_rows(kind, split, 60, seed=3) == rows
    assert synthetic.make_rows(kind, split, 25, seed=3) == rows[:25]
    others = [
        synthetic.make_rows(*other, 60, seed=seed)
        for other in itertools.product(KINDS, SPLITS)
        for seed in (3, 4)
        if (*other, seed) != (kind, split, 3)
    ]
    prompts = {row["prompt"] for row in rows}
    assert len(prompts) == 60
    for other in others:  # other streams, not the same one under another name
        assert len(prompts & {row["prompt"] for row in other}) < 3


def test_sizes():
    assert synthetic.DEFAULT_ROWS == {"sft": 20_000, "preference": 20_000, "prompts": 4_000}
    assert len(synthetic.make_rows("prompts", "train")) == 4_000
    for kind in KINDS:
        assert len(synthetic.make_rows(kind, "validation")) == synthetic.VALIDATION_ROWS >= 512


def test_validation_combines_facts_as_no_training_post_does_whatever_the_seed():
    seen = {split: set() for split in SPLITS}
    values = {split: set() for split in SPLITS}
    for kind, split, seed in itertools.product(KINDS, SPLITS, (0, 1)):
        for row in synthetic.make_rows(kind, split, 800, seed=seed):
            facts = row["facts"]
            seen[split].add((facts["who"], facts["thing"], facts["place"]))
            values[split].update(facts.values())
    assert not seen["train"] & seen["validation"]
    assert values["train"] == values["validation"] == set(synthetic._SLOT_OF)
    # 12 * 12 * 12 combinations, one in eight held out: 216 expected, standard deviation 13.7.
    assert abs(len(seen["validation"]) - 216) < 4 * 13.7


def test_a_split_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="split is 'test'"):
        synthetic.make_rows("sft", "test")


# --- preference labels ---


def test_pairs_differ_and_carry_their_gold_rewards_and_probability(pairs):
    for row in pairs:
        assert row["chosen"] != row["rejected"]
        for side in ("chosen", "rejected"):
            assert row[f"{side}_gold"] == synthetic.gold_reward(row[side], row["facts"])
        odds = math.exp(synthetic.LABEL_SCALE * (row["chosen_gold"] - row["rejected_gold"]))
        assert row["label_probability"] == pytest.approx(odds / (1 + odds))


def test_labels_are_drawn_with_the_recorded_probability(pairs):
    # Grouped by the better summary's probability to win; ties have no better one.
    wins, totals, probability = Counter(), Counter(), {}
    for row in pairs:
        p_better = max(row["label_probability"], 1 - row["label_probability"])
        group = round(p_better, 6)
        if group > 0.5:
            totals[group] += 1
            wins[group] += row["chosen_gold"] > row["rejected_gold"]
            probability[group] = p_better
    chi_square = num_groups = 0
    for group, total in totals.items():
        variance = total * probability[group] * (1 - probability[group])
        if variance > 5:
            chi_square += (wins[group] - total * probability[group]) ** 2 / variance
            num_groups += 1
    assert num_groups >= 8
    assert abs(chi_square - num_groups) < 4 * math.sqrt(2 * num_groups)
    mean = sum(totals[group] * probability[group] for group in totals)
    variance = sum(
        totals[group] * probability[group] * (1 - probability[group]) for group in totals
    )
    assert abs(sum(wins.values()) - mean) < 4 * math.sqrt(variance)


def test_neither_text_is_chosen_for_its_place_when_both_are_worth_the_same(pairs):
    # Of two equal summaries either may win: the longer one does so half of the time.
    ties = [row for row in pairs if row["chosen_gold"] == row["rejected_gold"]]
    unequal = [row for row in ties if len(row["chosen"]) != len(row["rejected"])]
    longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in unequal)
    assert len(unequal) > 200
    assert abs(longer - len(unequal) / 2) < 4 * math.sqrt(len(unequal) / 4)


def test_attainable_accuracy_of_three_rows_by_hand():
    rows = [{"label_probability": p} for p in (0.9, 0.2, 0.5)]  # 0.9, 0.8 and 0.5
    assert summary.attainable_accuracy(rows) == pytest.approx(2.2 / 3)


# --- the tokenizer ---


def test_tokenizer_gives_back_any_text_and_keeps_values_whole(tokenizer):
    row = synthetic.make_rows("sft", "validation", 1)[0]
    for text in (
        row["prompt"],
        row["completion"],
        "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \t\n",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    for value in synthetic._SLOT_OF:
        assert len(tokenizer(" " + value).input_ids) == 1, value


def test_tokenizer_has_its_special_tokens_where_the_model_expects_them(tokenizer):
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|pad|>"]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    assert tokenizer.pad_token_id == 1
    assert 0 not in tokenizer(ALL_TOLD).input_ids  # nothing is added by itself
    assert len(tokenizer) <= 1024
    assert len(synthetic.train_tokenizer(vocab_size=300)) == 300


def test_prompts_are_about_55_tokens(tokenizer):
    rows = synthetic.make_rows("sft", "validation")
    lengths = [len(tokenizer(row["prompt"]).input_ids) for row in rows]
    assert 45 < sum(lengths) / len(lengths) < 65
    assert max(lengths) < 128


def test_another_process_has_the_same_tokenizer_and_does_not_import_datasets(tokenizer):
    code = (
        "import hashlib, sys, common.data; from common.text.synthetic import train_tokenizer; "
        "text = train_tokenizer().backend_tokenizer.to_str(); "
        "print('datasets' in sys.modules, hashlib.sha256(text.encode()).hexdigest())"
    )
    expected = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    assert tiny.output_of(code, hash_seed="123").split()[-2:] == ["False", expected]
