"""The embedded TL;DR task: posts from a seeded grammar, summaries and a known gold reward.

Every post states five facts (who, event, thing, place, wish) among filler sentences. The reward of
a summary is the facts that it states, minus wrong facts, minus words beyond need. So the true
reward of any text is known, and so is the best accuracy that a model of the labels can reach.

A row is a function of (kind, split, seed, index): asking for fewer rows gives a prefix. Validation
posts use (who, thing, place) combinations that no training post uses, whatever the seed.
"""

import functools
import itertools
import math
import random
import re
from typing import Any

from common.errors import UserError
from common.noise import derive_seed

SLOTS: dict[str, tuple[str, ...]] = {
    slot: tuple(values.split())
    for slot, values in {
        "who": "sister brother boss neighbor roommate cousin uncle aunt "
        "teacher landlord coworker friend",
        "event": "sold broke stole lost hid burned painted borrowed "
        "scratched dropped traded ruined",
        "thing": "guitar laptop bicycle camera phone couch piano drone violin jacket tent scooter",
        "place": "airport library office beach wedding gym church hospital "
        "hotel museum station park",
        "wish": "revenge closure advice forgiveness money peace honesty respect "
        "privacy proof justice support",
    }.items()
}
"""The values of each fact. Every value is one word that occurs in no other slot and no filler."""

# Gold reward, in units of reward: a post has 5 facts, each worth 1/5.
WRONG_FACT = 0.5  # cost of a wrong value, in facts
REPEATED_FACT = 0.1  # cost of each further mention of a value already given
EXTRA_WORD = 0.02  # cost of each word beyond NEEDED_WORDS
NEEDED_WORDS = 15  # a sentence with every fact has 12

LABEL_SCALE = 10.0  # Bradley-Terry: p(a preferred to b) = sigmoid(LABEL_SCALE * (gold_a - gold_b))
HELD_OUT_SHARE = 8  # one (who, thing, place) in so many is kept for validation

SUBREDDITS = ("relationships", "advice", "tifu", "family", "offmychest", "legaladvice", "rant")
TITLES = (
    "Trouble with my {who}",
    "What happened to my {thing}",
    "A bad day at the {place}",
    "Looking for {wish}",
    "Is this normal?",
    "I do not know what to do",
)
STORIES = (
    "My {who} {event} my {thing} at the {place}.",
    "Last week my {who} {event} my {thing} at the {place}.",
    "We were at the {place} when my {who} {event} my {thing}.",
    "I found out that my {who} {event} my {thing} at the {place}.",
    "At the {place} my {who} {event} my {thing}.",
)
WISHES = (
    "I just want {wish}.",
    "All I want now is {wish}.",
    "I only hope for {wish}.",
    "Is it wrong to expect {wish}?",
    "I think I deserve {wish}.",
)
FILLERS = (
    "This has been going on for a while.",
    "Sorry for the long post.",
    "I am new here.",
    "English is not my first language.",
    "I have been thinking about it all day.",
    "Nobody seems to care about it.",
    "It was a very long day.",
    "I did not sleep at all.",
    "We used to get along well.",
    "The weather was really bad.",
    "I was already tired that morning.",
    "Everybody else thinks it is funny.",
    "I tried to stay calm.",
    "It was not the first time.",
    "I am still quite upset.",
    "I usually do not post here.",
    "Maybe I am too sensitive.",
    "It cost me a lot.",
    "Nothing like this happened before.",
    "I am on mobile.",
)
REFERENCES = (
    " {clause} and I want {wish}.",
    " I want {wish} because {clause}.",
    " {clause}, now I want {wish}.",
)
PADDING = (
    ", and honestly I do not know what else to say about it",
    ", which is a very long story that I could tell for many hours",
    ", and I have been thinking about all of it for a while now",
)

DEFAULT_ROWS = {"sft": 20_000, "preference": 20_000, "prompts": 4_000}
VALIDATION_ROWS = 1_024
# How people write: nothing wrong, often incomplete, sometimes long-winded. (values, weights)
NUM_MISSING = ((0, 1, 2, 3), (0.25, 0.35, 0.25, 0.15))
PADDING_SHARE = 0.25
# What only the summaries in pairs have.
WRONG_SHARE = 0.01
REPEAT_SHARE = 0.1
STUTTER_SHARE = 0.1  # "at the park at the park", as policies write

_WORD = re.compile(r"[a-z']+")
_SLOT_OF = {value: slot for slot, values in SLOTS.items() for value in values}
_STATEMENT = {  # the words before a value (and after it) that make a mention a statement
    "who": r"\bmy ({})\b",
    "event": r"\b({}) (?:my|something)\b",
    "thing": r"\bmy ({})\b",
    "place": r"\bat the ({})\b",
    "wish": r"\bwant ({})\b",
}
_PATTERNS = {
    slot: re.compile(pattern.format("|".join(SLOTS[slot]))) for slot, pattern in _STATEMENT.items()
}

Facts = dict[str, str]


def make_rows(
    kind: str,
    split: str,  # `train` or `validation`
    num_rows: int = 0,  # 0: `DEFAULT_ROWS` for training and `VALIDATION_ROWS`
    seed: int = 0,  # of the grammar and of the preference labels
) -> list[dict[str, Any]]:
    """Rows of the embedded task, in TRL's column layouts; row i does not depend on `num_rows`.

    Their columns are for `sft` and `prompts` prompt, completion and facts, for `preference` prompt,
    chosen, rejected, facts, chosen_gold, rejected_gold and label_probability.
    """
    if split not in ("train", "validation"):
        raise UserError(
            f"split is {split!r}, the embedded task has train and validation: change the split."
        )
    num_rows = num_rows or (DEFAULT_ROWS[kind] if split == "train" else VALIDATION_ROWS)
    make = _preference_row if kind == "preference" else _sft_row
    return [
        make(random.Random(derive_seed(seed, "synthetic", kind, split, row)), split)
        for row in range(num_rows)
    ]


def gold_reward(completion: str, facts: Facts) -> float:
    """Quality of a summary in [0, 1]: 1 for one sentence with all facts, 0 for an unrelated text.

    A fact is stated by its value in a phrase ("at the airport"); a bare keyword earns nothing. A
    wrong value anywhere costs half a fact and forfeits the slot, so listing several values is
    worse than the right one, and a guess is worse than silence. Mentioning a value again and words
    beyond `NEEDED_WORDS` cost too.
    """
    text = " ".join(completion.lower().split())
    words = _WORD.findall(text)
    mentions = [word for word in words if word in _SLOT_OF]
    wrong = {word for word in mentions if facts[_SLOT_OF[word]] != word}
    contradicted = {_SLOT_OF[word] for word in wrong}
    num_right = sum(
        facts[slot] in pattern.findall(text)
        for slot, pattern in _PATTERNS.items()
        if slot not in contradicted
    )
    num_repeated = len(mentions) - len(set(mentions))
    # Signs and digits are no words, but a run of them is not free either.
    num_extra = max(0, len(words) - NEEDED_WORDS, len(text.split()) - NEEDED_WORDS)
    reward = (num_right - WRONG_FACT * len(wrong)) / len(SLOTS)
    return max(0.0, reward - REPEATED_FACT * num_repeated - EXTRA_WORD * num_extra)


def train_tokenizer(vocab_size: int = 1024) -> Any:
    """A byte-level BPE tokenizer trained on the task's training posts; the same bytes every time.

    `<|endoftext|>` is token 0 (eos, bos), `<|pad|>` token 1.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(vocab_size)),
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        pad_token="<|pad|>",
    )


@functools.cache
def _trained(vocab_size: int) -> str:
    """The tokenizer as JSON: reading it takes a two-hundredth of the time of training."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    assert vocab_size >= 258, vocab_size  # the 256 bytes and the two special ones
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    posts = (row["prompt"] + row["completion"] for row in make_rows("sft", "train", 4_000))
    pairs = (row["chosen"] + row["rejected"] for row in make_rows("preference", "train", 1_000))
    tokenizer.train_from_iterator(itertools.chain(posts, pairs), trainer)
    return tokenizer.to_str()


def _draw_facts(rng: random.Random, split: str) -> Facts:
    """Facts whose (who, thing, place) is of the split, which does not depend on any seed."""
    while True:
        facts = {slot: rng.choice(values) for slot, values in SLOTS.items()}
        combination = derive_seed(0, "held out", facts["who"], facts["thing"], facts["place"])
        if (combination % HELD_OUT_SHARE == 0) == (split == "validation"):
            return facts


def _draw_prompt(rng: random.Random, facts: Facts) -> str:
    first, second = rng.sample(FILLERS, 2)
    story, wish = rng.choice(STORIES), rng.choice(WISHES)
    post = rng.choice(
        (
            (first, story, second, wish),
            (story, first, wish, second),
            (first, second, story, wish),
            (story, first, second, wish),
        )
    )
    return (
        f"SUBREDDIT: r/{rng.choice(SUBREDDITS)}\n\n"
        f"TITLE: {rng.choice(TITLES)}\n\n"
        f"POST: {' '.join(post)}\n\nTL;DR:"
    ).format(**facts)


def _summary(template: str, facts: Facts) -> str:
    """One sentence, with a leading space, that states those of the facts that are given."""
    who = f"my {facts['who']}" if "who" in facts else "someone"
    event = facts.get("event", "did")
    thing = f"my {facts['thing']}" if "thing" in facts else "something"
    if "event" not in facts and "thing" in facts:
        event = "did something to"
    place = f" at the {facts['place']}" if "place" in facts else ""
    clause = f"{who} {event} {thing}{place}"
    if "wish" not in facts:
        return f" {clause}."
    return template.format(clause=clause, wish=facts["wish"])


def _draw_stated(rng: random.Random, facts: Facts) -> Facts:
    """The facts that a summary states."""
    num_missing = rng.choices(*NUM_MISSING)[0]
    missing = rng.sample(list(SLOTS), num_missing)
    return {slot: value for slot, value in facts.items() if slot not in missing}


def _draw_summary(rng: random.Random, facts: Facts) -> str:
    """A summary in a pair: as a person writes, with now and then a wrong fact or a repetition."""
    stated = _draw_stated(rng, facts)
    if rng.random() < WRONG_SHARE:
        slot = rng.choice(sorted(stated))
        stated[slot] = rng.choice([value for value in SLOTS[slot] if value != facts[slot]])
    kind = rng.random()
    tail = ""
    if kind < PADDING_SHARE:
        tail = rng.choice(PADDING)
    elif kind < PADDING_SHARE + REPEAT_SHARE:
        tail = f", my {facts['who']} {facts['event']} my {facts['thing']}"
    elif kind < PADDING_SHARE + REPEAT_SHARE + STUTTER_SHARE and "place" in stated:
        stated["place"] += f" at the {stated['place']}" * rng.randint(1, 3)
    return _summary(rng.choice(REFERENCES), stated)[:-1] + tail + "."


def _sft_row(rng: random.Random, split: str) -> dict[str, Any]:
    """A post and what a person wrote: the goal of fine-tuning, and not the best summary."""
    facts = _draw_facts(rng, split)
    prompt = _draw_prompt(rng, facts)
    tail = rng.choice(PADDING) if rng.random() < PADDING_SHARE else ""
    reference = _summary(rng.choice(REFERENCES), _draw_stated(rng, facts))[:-1] + tail + "."
    return {"prompt": prompt, "completion": reference, "facts": facts}


def _preference_row(rng: random.Random, split: str) -> dict[str, Any]:
    facts = _draw_facts(rng, split)
    prompt = _draw_prompt(rng, facts)
    texts = [_draw_summary(rng, facts)] * 2
    while texts[0] == texts[1]:
        texts[1] = _draw_summary(rng, facts)
    golds = [gold_reward(text, facts) for text in texts]
    # Bradley-Terry: that the first is preferred, that the second is
    shares = [1 / (1 + math.exp(-LABEL_SCALE * (a - b))) for a, b in (golds, golds[::-1])]
    chosen = int(rng.random() >= shares[0])
    return {
        "prompt": prompt,
        "chosen": texts[chosen],
        "rejected": texts[1 - chosen],
        "facts": facts,
        "chosen_gold": golds[chosen],
        "rejected_gold": golds[1 - chosen],
        "label_probability": shares[chosen],
    }
