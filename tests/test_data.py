"""Claim: what is tokenised is what was meant, what is lost is counted, and order is a function.

A truncated prompt fits, keeps header and cue, and ends where a brute-force search over all line
breaks (sentence ends, words) would end it. Completions end in exactly one stop token. The rows of a
step do not depend on the number of ranks, and every epoch shows every row once. About
`common.data`, `common.text.tokenise` and `common.text.data_report`.
"""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from common.config.stages import TrainConfig
from common.data import BatchOrder, prompts
from common.errors import UserError
from common.text import synthetic
from common.text.data_report import describe, refuse_lossy
from common.text.example import Example
from common.text.reading import load_examples, load_held_out_pairs, load_rows, load_splits
from common.text.schemas import Row
from common.text.tokenise import (
    closing_cue,
    encode,
    leading_ids,
    split_prompt,
    tokenize_rows,
    truncate_prompt,
)

pytestmark = pytest.mark.usefixtures("process_group")
EOS, NEWLINE = "<|endoftext|>", "\n"


@pytest.fixture(scope="module")
def plain():
    return synthetic.train_tokenizer()


@pytest.fixture(scope="module", params=["plain", "with bos"])
def tokenizer(request):
    tokenizer = synthetic.train_tokenizer()
    if request.param == "with bos":  # puts a special token before every text, like Llama
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.eos_token_id)]
        )
        assert tokenizer("a")["input_ids"][0] == tokenizer.eos_token_id
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tokenize(
    rows: list[dict[str, Any]], tokenizer: Any, stop: str = EOS, kind: str = "sft", **fields: Any
) -> Any:
    (stop_id,) = ids_of(tokenizer, stop)
    limits = {"max_prompt_length": 400, "max_completion_length": 60, "max_dropped_fraction": 0.0}
    config = tiny.train_config(**(limits | fields))
    vocabulary = tiny.vocabulary([stop_id], tokenizer, pad_id=stop_id)
    texts = [Row.of_text(row, kind, number) for number, row in enumerate(rows)]
    tokenised = tokenize_rows(texts, vocabulary, config)
    refuse_lossy(tokenised, "train", config.max_dropped_fraction)
    report = describe(tokenised, "train")
    return [row.example for row in tokenised if not row.drop_reason], report


# --- truncation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "body", "cue"),
    [
        ("SUBREDDIT: r/a\n\nTITLE: t\n\nPOST:", " x\ny\n\nPOST: z", "\n\nTL;DR:"),
        ("TITLE: t\n\nPOST:", " x TL;DR: y", "\n\nTL;DR:"),
        ("POST:", " x", " TL;DR: "),
        ("TITLE: t\n\n", "An article.\nThe POST: is a newspaper.", "\n\nTL;DR:"),
        ("SUBREDDIT: r/a\n\nTITLE: t\n\n", "x", "\n\nTL;DR:"),
        ("", "Question?\n\nPOST: no header", "\n\nTL;DR:"),
        ("", "Question? Answer:", ""),
        ("TITLE: t\n\nPOST:", " no cue", ""),
        ("TITLE: t\n\nPOST:", "", "\n\nTL;DR:"),
        ("TITLE: TL;DR:\n", "", ""),
    ],
)
def test_split_prompt(header, body, cue):
    assert split_prompt(header + body + cue) == (header, body, cue)


def test_splitting_a_prompt_takes_a_time_that_is_linear_in_its_white_space():
    start = time.perf_counter()
    assert split_prompt("x" + " " * 30_000 + "y") == ("", "x" + " " * 30_000 + "y", "")
    assert time.perf_counter() - start < 1  # the search for a cue took 8 s


def brute_force(prompt: str, tokenizer: Any, max_length: int) -> str | None:
    """The longest cut at a line break that fits, else at a sentence end, else at a word."""
    header, body, cue = split_prompt(prompt)
    breaks = [i for i, character in enumerate(body) if character == "\n"]
    words = [i for i, character in enumerate(body) if character.isspace()]
    sentences = [i for i in words if re.search(r"[.!?][\"')\]]*\Z", body[:i])]
    for cuts in (breaks, sentences, words):
        texts = [header + body[:i].rstrip() + cue for i in cuts if body[:i].strip()]
        fitting = [text for text in texts if len(ids_of(tokenizer, text)) <= max_length]
        if fitting:
            return fitting[-1]
    return None


WORDS = st.sampled_from(
    ["my", "sister", "sold.", "TL;DR:", "(why?)", '"no!"', "naïve", "喵喵", "supercalifragilistic"]
    + ["🙂", "e.g.", "POST:", "1,000", "don't"]
)
BODIES = st.lists(
    st.tuples(WORDS, st.sampled_from([" ", " ", " ", " ", "\n", "\n\n", "  "])), min_size=5
).map(lambda pieces: " " + "".join(word + space for word, space in pieces))
HEADERS = st.sampled_from(["SUBREDDIT: r/a\n\nTITLE: b\n\nPOST:", "TITLE: b c\n\n", "POST:", ""])
CUES = st.sampled_from(["\n\nTL;DR:", " TL;DR:", ""])


@settings(max_examples=200, deadline=None)
@given(header=HEADERS, body=BODIES, cue=CUES, share=st.floats(0, 0.999))
def test_truncation_keeps_header_and_cue_and_fits(tokenizer, header, body, cue, share):
    prompt = header + body.rstrip() + cue
    header, body, cue = split_prompt(prompt)
    least, most = (len(ids_of(tokenizer, text)) for text in (header + cue, prompt))
    max_length = int(least + share * (most - least))
    assume(max_length < most)
    result = truncate_prompt(prompt, tokenizer, max_length)
    expected = brute_force(prompt, tokenizer, max_length)
    if result is None:
        assert expected is None
        return
    text, ids = result
    assert ids == ids_of(tokenizer, text)
    assert len(ids) <= max_length
    assert text.startswith(header)
    assert text.endswith(cue)
    kept = text[len(header) : len(text) - len(cue)]
    assert kept.strip()
    assert body.startswith(kept)
    if expected is not None:
        assert text == expected


def test_truncation_of_a_post_without_any_space_cuts_inside_it(tokenizer):
    text, ids = truncate_prompt("TITLE: t\n\nPOST: " + "喵" * 200 + "\n\nTL;DR:", tokenizer, 60)
    assert re.fullmatch("TITLE: t\n\nPOST: 喵+\n\nTL;DR:", text)
    assert 50 < len(ids) <= 60


@pytest.mark.parametrize(
    ("prompt", "cue"),
    [
        ("Some text.\n\nSubject:", "\n\nSubject:"),
        ("Some text. \n\n\nTo whom?\nAnswer: \n", " \n\n\nTo whom?\nAnswer: \n"),
        ("Some\n\ntext.\n\n" + "x" * 100, "\n\n" + "x" * 100),
        ("Some\n\ntext.\n\n" + "x" * 101, ""),  # a paragraph, and no cue
        ("Some text.\nSubject:", ""),  # no blank line
        ("Some text. TL;DR: ", " TL;DR: "),
        ("", ""),
        ("\n\n", ""),
    ],
)
def test_the_closing_cue_is_tldr_or_what_follows_the_last_blank_line(prompt, cue):
    assert closing_cue(prompt) == cue


def test_cues_are_kept_by_a_cut(plain):
    """Of prompts that end in three ways and in none."""
    body = "my sister sold my guitar at the airport.\n" * 9
    ends = ["In short.\nSubject:", "Who wrote it?\nThe answer in short:", "TL;DR:"]
    prompts = [*(f"{body}\n{end}" for end in ends), body]
    rows = [{"prompt": prompt, "completion": " x"} for prompt in prompts]
    examples, report = tokenize(rows, plain, max_prompt_length=70)
    assert "truncated 4 prompts" in report
    for example, end in zip(examples[:3], ends, strict=True):
        assert example.prompt.endswith(f"airport.\n\n{end}")
    assert examples[3].prompt.endswith("airport.")
    # Without room for its cue a prompt is dropped.
    rows = [{"prompt": "a b c " * 30 + ".\n\nOne.\nTwo.\nSubject:", "completion": " x"}] * 3
    with pytest.raises(UserError, match="3 prompt over max_prompt_length"):
        tokenize(rows, plain, max_prompt_length=8)


def test_start_drops_tokens_from_the_start_and_leaves_the_source(tokenizer):
    row = {"prompt": "one two three four five\n\nTL;DR:", "completion": " x"}
    whole = ids_of(tokenizer, row["prompt"])
    (example,), report = tokenize([row], tokenizer, prompt_truncation="start", max_prompt_length=6)
    leading = leading_ids(tokenizer)
    assert example.prompt_ids == leading + whole[len(leading) - 6 :]
    assert row["prompt"].endswith(example.prompt)
    assert "truncated 1 prompts" in report
    post = "SUBREDDIT: r/pets\n\nTITLE: a\n\nPOST: one two three four five six\n\nTL;DR:"
    row = {"prompt": post, "completion": " x"}
    (example,), _ = tokenize([row], tokenizer, prompt_truncation="start", max_prompt_length=8)
    assert "SUBREDDIT" not in example.prompt
    assert example.source == "tldr"


@pytest.mark.parametrize("leading", [[], [0]])
def test_an_alphabet_may_lack_any_letter(leading):
    """As of DNA: a text of other letters has no tokens at all, or none are known."""
    ids = {"<eos>": 0, "A": 1, "C": 2, "G": 3, "T": 4}
    for model in (models.BPE(ids, []), models.WordLevel(ids)):
        base = Tokenizer(model)
        base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        if leading:
            end = [("<eos>", 0)]
            base.post_processor = TemplateProcessing(single="<eos> $A <eos>", special_tokens=end)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>")
        assert leading_ids(tokenizer) == leading


def test_a_prompt_has_the_bos_of_its_tokenizer_once(tokenizer):
    leading = leading_ids(tokenizer)
    ids = [*leading, *ids_of(tokenizer, "one two")]
    for text in ("one two", tokenizer.decode(leading) + "one two"):  # rendered with it or not
        (example,), _ = tokenize([{"prompt": text, "completion": " x"}], tokenizer)
        assert example.prompt_ids == ids
    post = "TITLE: a\n\nPOST: one two three four five six\n\nTL;DR:"
    room = len(leading) + len(ids_of(tokenizer, post)) - 2
    for truncation in ("tldr", "start"):
        cut = {"prompt_truncation": truncation, "max_prompt_length": room}
        both = (post, tokenizer.decode(leading) + post)
        rows = [{"prompt": text, "completion": " x"} for text in both]
        (first, second), report = tokenize(rows, tokenizer, **cut)
        assert (first.prompt, first.prompt_ids) == (second.prompt, second.prompt_ids)
        assert first.prompt_ids[: len(leading)] == leading
        assert len(first.prompt_ids) <= room
        assert first.prompt_ids.count(0) == len(leading)
        assert "truncated 2 prompts" in report


# --- tokenisation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [EOS, NEWLINE])
@pytest.mark.parametrize("tail", ["", "{stop}", "{stop}{stop}", "{stop} more{stop}"])
def test_a_completion_ends_in_one_stop_token(tokenizer, stop, tail):
    completion = " a cat" + tail.format(stop=stop)
    (example,), _ = tokenize([{"prompt": "p", "completion": completion}], tokenizer, stop)
    assert example.completions == [ids_of(tokenizer, " a cat") + ids_of(tokenizer, stop)]
    assert example.prompt_ids == tokenizer("p")["input_ids"]  # bos and all


def test_a_stop_id_whose_text_is_not_its_own_token_still_ends_the_completion(plain, monkeypatch):
    """As in SentencePiece: the decoded text has another token."""
    (first,), decode = ids_of(plain, " sister"), plain.decode
    disguised = lambda ids, **options: "sister" if ids == [first] else decode(ids, **options)  # noqa: E731
    monkeypatch.setattr(plain, "decode", disguised)
    rows = [{"prompt": "p", "completion": " my sister sold"}]
    (example,), _ = tokenize(rows, plain, stop=" sister")
    assert example.completions == [[*ids_of(plain, " my"), first]]


@pytest.mark.parametrize(("room", "is_cut"), [(4, False), (3, True), (1, True)])
def test_a_completion_that_is_too_long_keeps_no_stop_token(plain, room, is_cut):
    rows = [{"prompt": "p", "completion": " sister sold guitar"}]
    (example,), report = tokenize(rows, plain, max_completion_length=room)
    expected = [*ids_of(plain, " sister sold guitar"), plain.eos_token_id][:room]
    assert example.completions == [expected]
    assert f" and {int(is_cut)} completions" in report


def test_pairs_and_prompts_keep_their_order_and_columns(tokenizer):
    pair = {"prompt": "p", "chosen": " a", "rejected": " b", "batch": "x", "facts": {"k": "v"}}
    (example,), _ = tokenize([pair], tokenizer, kind="preference")
    eos = ids_of(tokenizer, EOS)
    assert example.completions == [ids_of(tokenizer, " a") + eos, ids_of(tokenizer, " b") + eos]
    assert example.columns == {"batch": "x", "facts": {"k": "v"}}
    row = {"prompt": "p", "completion": " reference", "facts": 1}
    (example,), report = tokenize([row], tokenizer, kind="prompts")
    assert example == Example(
        0, "p", tokenizer("p")["input_ids"], [], {k: row[k] for k in list(row)[1:]}
    )
    assert "max_completion_length" not in report
    with pytest.raises(UserError, match="1 empty or no shared prompt"):
        tokenize([{**row, "prompt": ""}], tokenizer, kind="prompts")


def test_ids_are_those_of_each_text_alone_whatever_the_chunk(tokenizer):
    texts = [f"row {i} of\n many" for i in range(2345)]
    assert encode(texts, tokenizer) == [ids_of(tokenizer, text) for text in texts]


def test_losses_are_counted_and_rows_keep_their_numbers(plain):
    four = " sister sold guitar airport"
    long_title = "TITLE: " + "long " * 60 + "\n\nPOST: p\n\nTL;DR:"
    rows = [
        {"prompt": "p", "chosen": " a", "rejected": " b"},
        {"prompt": "p", "chosen": " a", "rejected": " b"},
        {"prompt": "p", "chosen": "\nlate", "rejected": " b"},  # empty before its stop
        {"prompt": "p", "chosen": " b\nx", "rejected": " b\ny"},  # identical up to the stop
        {"prompt": "p", "chosen": four, "rejected": f"{four} I"},  # identical when cut
        {"prompt": long_title, "chosen": " a", "rejected": " b"},  # no room for a post
        {"prompt": "p", "chosen": four, "rejected": " c"},
    ]
    limits = {"max_prompt_length": 50, "max_completion_length": 3, "stop": NEWLINE}
    examples, report = tokenize(rows, plain, kind="preference", max_dropped_fraction=0.6, **limits)
    assert [example.row for example in examples] == [0, 1, 6]
    longest = len(ids_of(plain, long_title))
    # Of six rows, the empty one left out: 2 2 2 2, 2 2, 5 6, 2 2, 5 2
    reasons = (
        "1 empty completion, 1 identical pair, 1 pair identical up to --max_completion_length, "
        "1 prompt over max_prompt_length; the first is row 3"
    )
    counts = f"train: 3 of 7 rows ({reasons}), truncated 0 prompts and 1 completions"
    most = f"--max_prompt_length {longest} and --max_completion_length 6 would keep 95 % whole"
    assert report == f"{counts}\n  {most}"
    with pytest.raises(UserError) as caught:
        tokenize(rows, plain, kind="preference", max_dropped_fraction=0.5, **limits)
    assert str(caught.value) == (
        f"split 'train' would lose 4 of 7 rows ({reasons}) and --max_dropped_fraction is 0.5; "
        "clean the data or change --max_prompt_length, --max_completion_length or "
        "--max_dropped_fraction."
    )
    with pytest.raises(UserError, match="lose 1 of 1 rows"):
        tokenize(rows[2:3], plain, kind="preference", max_dropped_fraction=1.0, **limits)


@pytest.mark.parametrize(
    ("num_good", "num_equal", "fraction", "is_refused"),
    [
        (2, 1, 0.05, False),  # one is dropped and counted
        (7, 1, 0.05, False),
        (1, 1, 0.05, True),  # half of the rows
        (0, 1, 1.0, True),  # all of them
        (7, 1, 0.0, True),  # the flag allows none
        (7, 2, 0.05, True),
        (98, 5, 0.05, False),
    ],
)
def test_a_single_identical_pair_is_dropped_and_counted(
    plain, num_good, num_equal, fraction, is_refused
):
    pair = {"prompt": "p", "chosen": " a", "rejected": " b"}
    rows = [pair] * num_good + [{**pair, "rejected": " a"}] * num_equal
    if is_refused:
        with pytest.raises(UserError, match="--max_dropped_fraction is "):
            tokenize(rows, plain, kind="preference", max_dropped_fraction=fraction)
        return
    examples, report = tokenize(rows, plain, kind="preference", max_dropped_fraction=fraction)
    assert len(examples) == num_good
    assert f"train: {num_good} of {len(rows)} rows ({num_equal} identical pair; the" in report


def test_the_report_is_two_lines(plain):
    rows = [{"prompt": "p" + " sister" * n, "completion": " c"} for n in range(1, 101)]
    _, report = tokenize(rows, plain, max_prompt_length=99)
    lines = report.split("\n")
    assert lines[0] == ("train: 100 of 100 rows, truncated 2 prompts and 0 completions")
    limits = "--max_prompt_length 96 and --max_completion_length 2"  # of n + 1 tokens
    assert lines[1] == f"  {limits} would keep 95 % whole"
    assert len(lines) == 2
    cut = [{"prompt": "p", "completion": row["prompt"][1:]} for row in rows]  # n + 1 tokens
    for limit, num_truncated in ((51, 50), (50, 51)):
        _, report = tokenize(cut, plain, max_completion_length=limit)
        lines = report.split("\n")
        assert "and --max_completion_length 96 would keep" in lines[1]
        assert lines[0].endswith(f" and {num_truncated} completions")
        warning = "  warning: 51 of 100 completions lose their stop token: only the others teach to"
        assert [line.startswith(warning) for line in lines[2:]] == [True] * (num_truncated > 50)
    _, report = tokenize(cut, plain, max_completion_length=1)
    assert "100 of 100 completions lose their stop token: none teaches to stop; " in report


def test_the_printed_limit_of_prompts_is_not_refused(plain):
    """Each is longer than the one before; identical pairs are of the same 5% of rows."""
    texts = ["TITLE:" + " sister" * n + "\nPOST: the" for n in range(10, 90)]
    rows = [{"prompt": text, "chosen": " a", "rejected": " b"} for text in texts]
    for num_equal, num_over in ((0, 4), (2, 2), (4, 0)):
        equal = [{**row, "rejected": " a"} for row in rows[:num_equal]]
        flags: dict[str, Any] = {"kind": "preference", "max_dropped_fraction": 0.05}
        _, report = tokenize([*equal, *rows[num_equal:]], plain, **flags)
        flags["max_prompt_length"] = int(report.split("--max_prompt_length ")[1].split()[0])
        assert flags["max_prompt_length"] == len(ids_of(plain, texts[79 - num_over]))
        examples, _ = tokenize([*equal, *rows[num_equal:]], plain, **flags)
        assert len(examples) >= 76


def test_the_embedded_task_loses_nothing(plain):
    for kind in ("sft", "preference", "prompts"):
        rows = load_rows(tiny.train_config(), "synthetic", "train", kind, 200)
        examples, report = tokenize(rows, plain, kind=kind, max_prompt_length=128)
        assert len(examples) == 200
        assert "truncated 0 prompts" in report
        assert examples[7].columns["facts"] == rows[7]["facts"]


def test_a_stage_reads_both_splits_within_its_limits(tmp_path, capsys):
    limits = {"max_prompt_length": 128, "num_train_rows": 6, "num_eval_rows": 4}
    config = TrainConfig(output_dir=str(tmp_path), model_name_or_path="unused", seed=5, **limits)
    vocabulary = tiny.vocabulary(of=synthetic.train_tokenizer())
    train, test = load_splits(config, "preference", vocabulary)
    assert (len(train), len(test)) == (6, 4)
    rows = load_rows(config, "synthetic", "validation", "preference", 4)
    assert [example.prompt for example in test] == [row["prompt"] for row in rows]
    assert all(c[-1] == 0 for example in train for c in example.completions)
    printed = capsys.readouterr().out
    assert "train: 6 of 6 rows" in printed
    assert "validation: 4 of 4 rows" in printed
    assert load_examples(config, "", "train", "sft", vocabulary) == []
    config.dataset_test_split = ""
    assert load_splits(config, "sft", vocabulary)[1] == []


def test_a_file_that_is_only_evaluated_on_is_its_own_split(tmp_path, capsys):
    limits = {"max_prompt_length": 128, "output_dir": str(tmp_path), "dataset_test_split": "auto"}
    config = tiny.train_config(**limits)
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    for name in ("own", "train"):
        (tmp_path / f"{name}.jsonl").write_text(pair * 3)
    vocabulary = tiny.vocabulary(of=synthetic.train_tokenizer())

    def load(path: Path) -> Any:
        return load_held_out_pairs(config, str(path), vocabulary)

    assert len(load(tmp_path / "own.jsonl")) == 3
    assert load(tmp_path) == []
    note = f"{tmp_path} has no split validation or test: no evaluation on it"
    assert note in capsys.readouterr().out


# --- order and batches ----------------------------------------------------------------------------


def orders(num_rows: int, batch_size: int, world_size: int, seed: int = 0) -> list[BatchOrder]:
    lengths = [1 + row % 5 for row in range(num_rows)]
    return [BatchOrder(lengths, batch_size, seed, rank, world_size) for rank in range(world_size)]


@given(num_rows=st.integers(1, 40), batch_size=st.sampled_from([4, 8, 12]), seed=st.integers(0, 9))
def test_every_epoch_shows_every_row_once(num_rows, batch_size, seed):
    (one,) = orders(num_rows, batch_size, 1, seed=seed)
    for epoch in range(3):
        steps = range(epoch * one.steps_per_epoch, (epoch + 1) * one.steps_per_epoch)
        batches = [one.rows(step) for step in steps]
        assert all(len(batch) == batch_size for batch in batches)
        flat = [row for batch in batches for row in batch]
        assert sorted(flat[:num_rows]) == list(range(num_rows))  # the fill comes last
        assert flat[num_rows:] == [None] * (len(flat) - num_rows)


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    (order,) = orders(50, 50, 1)
    first = [order.rows(step) for step in (0, 1, 2)]
    assert len({tuple(rows) for rows in first}) == 3
    (again,) = orders(50, 50, 1)
    assert [again.rows(step) for step in (2, 0, 1)] == [first[2], first[0], first[1]]
    (other,) = orders(50, 50, 1, seed=1)
    assert other.rows(0) != first[0]


@pytest.mark.parametrize(
    ("fields", "total_steps"),
    [({"num_train_epochs": 1}, 3), ({"num_train_epochs": 2.5}, 8), ({"max_steps": 5}, 5)],
)
def test_the_length_of_a_run(tmp_path, fields, total_steps):
    paths = {"output_dir": str(tmp_path), "model_name_or_path": "m"}
    config = TrainConfig(batch_size=4, seed=3, **paths, **fields)
    lengths = [9, 2, 5, 5, 1, 8, 3, 7, 4, 6]
    examples = [pair_example(row, length, (2, 1)) for row, length in enumerate(lengths)]
    order = BatchOrder.of_training(config, examples)
    rows = BatchOrder([1] * 10, 4, seed=3).rows(1)
    assert sorted(order.rows(1)) == sorted(rows)
    assert order.rows(1) == sorted(rows, key=lambda row: lengths[row])
    assert order.total_steps(config) == total_steps
    assert order.steps_per_epoch == 3


def test_prompts_of_a_step_have_a_stand_in_that_is_not_real():
    examples = [Example(row, f"p{row}", [row], [], {}) for row in range(3)]
    chosen, real = prompts(examples, [2, None, 0])
    assert [example.prompt for example in chosen] == ["p2", "p0", "p0"]
    assert real.tolist() == [True, False, True]


def pair_example(row: int, num_prompt: int, lengths: tuple[int, int]) -> Example:
    completions = [[100 + row] * length for length in lengths]
    return Example(row, "", [10 + row] * num_prompt, completions, {})
