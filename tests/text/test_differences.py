"""Claim: two tokenizers are the same where they make the same ids of rows, whatever else differs.

Each tokenizer here differs from the embedded task's in one thing. What a base lacks, and what a
fine-tune adds, is no difference. Its use is that of `common.model.load`. About
`common.text.differences`.
"""

import copy
import json

import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.errors import UserError
from common.model import load
from common.text import differences
from common.text.example import Example

MARKS = ["<|im_start|>", "<|im_end|>"]
QWEN = (  # has a system turn of its own where the rows have none
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
USER, SYSTEM = ({"role": role, "content": f"As a {role}?"} for role in ("user", "system"))


def with_tokens(*tokens):
    """The embedded task's tokenizer with added tokens."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_tokens([AddedToken(t, special=True) if isinstance(t, str) else t for t in tokens])
    return tokenizer


def with_pad(token):
    """The tokenizer with a pad token that was added."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_special_tokens({"pad_token": token})
    return tokenizer


def with_part(name, part):
    """The tokenizer with another part."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def with_model(change):
    """The tokenizer with another table or other merges, as in its file."""
    fields = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    change(fields["model"])
    backend = Tokenizer.from_str(json.dumps(fields))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def with_bos():
    special = [("<|endoftext|>", 0)]
    return processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=special)


BY_WORDS = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)
BY_DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
)


def swap_tokens(model):
    model["vocab"]["a"], model["vocab"]["b"] = model["vocab"]["b"], model["vocab"]["a"]


def rename_token(model):
    model["vocab"]["zzz"] = model["vocab"].pop("Z")


SAME = {
    "itself": (tiny.tokenizer, tiny.tokenizer),
    "a base, which lacks the marks": (lambda: with_tokens(*MARKS), tiny.tokenizer),
    "a fine-tune, which adds them": (tiny.tokenizer, lambda: with_tokens(*MARKS)),
    "a slot that the base keeps free": (
        lambda: with_tokens("<|reserved_special_token_0|>", "<unused1>"),
        lambda: with_tokens(*MARKS),
    ),
    "another pad": (tiny.tokenizer, lambda: with_tokens("<|pad|>")),
    "another name of the pad": (lambda: with_pad("[PAD]"), lambda: with_pad("<pad>")),
    "a mark at the pad's id": (lambda: with_pad("[PAD]"), lambda: with_tokens(*MARKS)),
    "another template": (
        tiny.tokenizer,
        lambda: tiny.with_template(tiny.tokenizer(), tiny.TURNS),
    ),
}
OTHER = {
    "swapped marks": (
        lambda: with_tokens(*MARKS),
        lambda: with_tokens(*MARKS[::-1]),
        "301 and not 300",
    ),
    "other tokens at the ids": (
        lambda: with_tokens(*MARKS),
        lambda: with_tokens("<tool>", "</tool>"),
        "'<tool>' in place of '<|im_start|>'",
    ),
    "swapped tokens of the table": (tiny.tokenizer, lambda: with_model(swap_tokens), "ids are"),
    "another token in the table": (tiny.tokenizer, lambda: with_model(rename_token), "'zzz'"),
    "a bos": (
        tiny.tokenizer,
        lambda: with_part("post_processor", with_bos()),
        "puts <|endoftext|> in front of a text, not no token",
    ),
    "other words": (tiny.tokenizer, lambda: with_part("pre_tokenizer", BY_WORDS), "same text"),
    "a space ahead": (
        tiny.tokenizer,
        lambda: with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "same text",
    ),
    "lower case": (
        tiny.tokenizer,
        lambda: with_part("normalizer", normalizers.Lowercase()),
        "same text",
    ),
    "one form of accents": (
        tiny.tokenizer,
        lambda: with_part("normalizer", normalizers.NFC()),
        "same text",
    ),
    "one form of signs": (
        tiny.tokenizer,
        lambda: with_part("normalizer", normalizers.NFKC()),
        "same text",
    ),
    "a merge less": (
        tiny.tokenizer,
        lambda: with_model(lambda model: model["merges"].pop(20)),
        "same text",
    ),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_what_a_base_lacks_and_a_fine_tune_adds_is_no_difference(one, other):
    tokenizer, another = one(), other()
    for pair in ((tokenizer, another), (another, tokenizer)):
        assert not differences.of_tokenizers(*pair)
        assert not differences.of_marks(*pair)


@pytest.mark.parametrize(("one", "other", "words"), OTHER.values(), ids=OTHER)
def test_other_ids_of_a_row_are_a_difference_either_way(one, other, words):
    tokenizer, another = one(), other()
    assert words in differences.of_tokenizers(tokenizer, another)
    assert differences.of_tokenizers(another, tokenizer)


def test_digits_one_by_one_are_a_difference_where_numbers_are_tokens():
    def merge_digits(model):
        model["vocab"]["12"] = len(model["vocab"])
        model["merges"].append(["1", "2"])

    tokenizer, other = with_model(merge_digits), with_model(merge_digits)
    assert not differences.of_tokenizers(tokenizer, other)
    other.backend_tokenizer.pre_tokenizer = BY_DIGITS
    assert "same text" in differences.of_tokenizers(tokenizer, other)


def test_a_saved_tokenizer_is_the_same(tmp_path):
    tokenizer = with_tokens(*MARKS)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert not differences.of_tokenizers(tokenizer, again)
    assert not differences.of_marks(tokenizer, again)


def test_a_table_of_words_without_one_for_the_unknown_is_compared():
    """It refuses most texts, in its library's plain Exception."""
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<none>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    with pytest.raises(Exception, match=r"\[UNK\]"):
        tokenizer("c")
    assert not differences.of_tokenizers(tokenizer, copy.deepcopy(tokenizer))


def test_marks_that_take_the_white_space_around_are_a_difference():
    tokenizer, other = with_tokens(*MARKS), with_tokens(MARKS[0], AddedToken(MARKS[1], rstrip=True))
    assert "'a <|im_end|> b" in differences.of_marks(tokenizer, other)


# ---- chat templates ------------------------------------------------------------------------------


def test_the_same_text_of_a_conversation_may_be_other_ids():
    tokenizer, other = with_tokens(*MARKS), with_tokens(MARKS[0], AddedToken(MARKS[1], rstrip=True))
    difference = differences.of_conversations([], tokenizer, other)
    assert (difference.kind, difference.is_opening) == ("tokenizer", True)


def chat(*turns, **columns):
    return Example(4, "", [5], [], columns, messages=list(turns))


@pytest.mark.parametrize(
    ("template", "turns", "clause", "is_opening"),
    [
        (tiny.TURNS, [USER], "it writes 'user>As", False),
        (tiny.CHATML.replace("im_end", "im_over"), [USER], "over|>", False),
        (QWEN + tiny.CHATML, [USER], "it writes 'system\\nYou help.", True),
        (STRICT + tiny.CHATML, [SYSTEM, USER], "in row 5: ", False),
    ],
    ids=["other marks", "another end", "a system turn of its own", "none that rows have"],
)
def test_what_another_template_writes(template, turns, clause, is_opening):
    chatml = tiny.chatml_tokenizer()
    other = tiny.with_template(chatml, template)
    difference = differences.of_conversations([chat(USER), chat(*turns)], chatml, other)
    assert difference is not None
    assert clause in difference.clause
    assert difference.is_opening is is_opening


@pytest.mark.parametrize("words", ["You", "s", "im_start", "assistant", ""])
def test_words_that_an_opening_has_too_do_not_hide_that_only_it_differs(words):
    chatml = tiny.chatml_tokenizer()
    other = tiny.with_template(chatml, QWEN + tiny.CHATML)
    difference = differences.of_conversations([chat(USER | {"content": words})], chatml, other)
    assert difference is not None
    assert difference.is_opening


def test_a_template_that_cuts_white_space_changes_more_than_the_opening():
    chatml = tiny.chatml_tokenizer()
    other = tiny.with_template(chatml, tiny.CHATML.replace("m.content", "m.content | trim"))
    assert differences.of_conversations([chat(USER)], chatml, other) is None
    spaced = chat(USER | {"content": " a question "})
    difference = differences.of_conversations([spaced], chatml, other)
    assert difference is not None
    assert not difference.is_opening


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (None, [USER]),
        (QWEN + tiny.CHATML, [SYSTEM, USER]),
        (STRICT + tiny.CHATML, [USER]),
        ("{# a comment #}" + tiny.CHATML, [USER]),
    ],
    ids=["none", "a system turn that rows have", "a refusal of other rows", "a comment"],
)
def test_templates_are_the_same_where_they_write_the_rows_alike(template, turns):
    chatml = tiny.chatml_tokenizer()
    other = tiny.with_template(chatml, template)
    assert differences.of_conversations([chat(*turns)], chatml, other) is None


# ---- models of one run ---------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    """Tokenizers of models, of which `run` is that of the run."""
    chatml = tiny.chatml_tokenizer()
    kinds = {"run": chatml, "base": tiny.with_template(chatml, None)}
    kinds |= {"turns": tiny.with_template(chatml, tiny.TURNS)}
    kinds |= {"system": tiny.with_template(chatml, QWEN + tiny.CHATML)}
    lower = copy.deepcopy(chatml)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    for name, tokenizer in (kinds | {"lower": lower}).items():
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "none").mkdir()
    return {path.name: str(path) for path in tmp_path.iterdir()}


def test_models_that_read_the_text_of_the_run_are_named_where_theirs_differs(folders, capsys):
    """A reference by a line; a policy is refused, for its numbers would be another model's."""
    config = tiny.train_config(model_name_or_path=folders["run"])
    run, rows = tiny.chatml_tokenizer(), [chat(USER)]
    load.compare_templates([folders[n] for n in ("run", "base", "none")], run, rows, config)
    assert capsys.readouterr().out == ""
    paths = [folders[name] for name in ("turns", "system")]
    load.compare_templates(paths, run, rows, config)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for path, line in zip(paths, lines, strict=True):
        assert line.startswith(f"{path!r} has another chat template than {folders['run']!r}: it")
    with pytest.raises(UserError) as caught:
        load.compare_templates(paths, run, rows, config, own_text=paths)
    tiny.check_sentence(caught.value, repr(paths[0]), "chat template", "--tokenizer_name_or_path")
    load.compare_templates(paths[1:], run, rows, config, own_text=paths)
    assert "'system\\nYou help" in capsys.readouterr().out
    load.compare_templates(paths, run, [Example(0, "a text", [5], [], {})], config, own_text=paths)
    named = tiny.train_config(tokenizer_name_or_path=folders["run"])
    load.compare_templates(paths, run, rows, named, own_text=paths)
    assert capsys.readouterr().out == ""


def test_a_tokenizer_that_is_named_for_a_model_needs_the_same_tokens(folders, tmp_path, capsys):
    """How a text becomes ids it says itself; without the flag another way is refused."""
    run = tiny.chatml_tokenizer()
    named = tiny.train_config(tokenizer_name_or_path=folders["run"])
    load.refuse_other_tokenizer(folders["lower"], run, named)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{folders['lower']!r} has another tokenizer than")
    for path in (folders["none"], folders["base"], folders["turns"]):
        load.refuse_other_tokenizer(path, run, named)
    config = tiny.train_config(model_name_or_path=folders["run"])
    with pytest.raises(UserError) as caught:
        load.refuse_other_tokenizer(folders["lower"], run, config)
    tiny.check_sentence(caught.value, "lower", "the same text has other ids", "cannot be in one")
    with_tokens(*MARKS[::-1]).save_pretrained(tmp_path / "swapped")
    with pytest.raises(UserError, match="the same ids are other tokens"):
        load.refuse_other_tokenizer(str(tmp_path / "swapped"), with_tokens(*MARKS), named)


def test_a_tokenizer_without_a_file_of_that_name_is_compared(tmp_path):
    """As in GPT-2's first folder: `vocab.json` and `merges.txt` alone."""
    fields = json.loads(tiny.tokenizer().backend_tokenizer.to_str())["model"]
    swap_tokens(fields)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text(json.dumps(fields["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in fields["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    with pytest.raises(UserError, match="another tokenizer"):
        load.refuse_other_tokenizer(str(tmp_path), tiny.tokenizer(), tiny.train_config())
