"""Claim: a cache of tokenised rows changes how long a run takes and nothing else.

What is read equals what tokenising the same rows gives, ids, texts, columns, report and refusals;
whatever could change a token is another file; and a file or folder that cannot be used is none.
"""

import copy
import datetime
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import tiny
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import TemplateProcessing

from common.data import Example, load_examples
from common.errors import UserError
from common.text import checked_file, token_cache, tokenise
from common.text.data_report import DataReport

EOS = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
POST = "SUBREDDIT: r/pets\n\nTITLE: a cät\n\nPOST: one 喵 two.\nthree {n} four\n\nTL;DR:"
PAIRS = [
    {"prompt": POST.format(n=7), "chosen": " a 🙂", "rejected": " b b", "facts": {"k": [1]}},
    {"prompt": POST.format(n=8), "chosen": f" a{EOS}x", "rejected": " b", "source": "here"},
    {"prompt": POST.format(n=7), "chosen": " a 🙂", "rejected": " b b"},  # duplicate
    {"prompt": "short", "chosen": " a", "rejected": " a"},  # identical: dropped
    {"prompt": "short", "chosen": EOS, "rejected": " a"},  # empty before its stop: dropped
    {"prompt": f"{EOS}short TL;DR:", "chosen": " one two three four five", "rejected": " c"},
]
PLAIN = [{"completion": row["chosen"], **row} for row in PAIRS]


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


TURNS = [
    {"prompt": turn("user", "Why?"), "completion": turn("assistant", " Because 喵.")},
    {"prompt": turn("user", "Why? " * 30), "completion": turn("assistant", " a")},  # dropped
]


class Load(NamedTuple):
    """What became of one call of `load_examples`."""

    examples: list[Example]
    printed: str
    is_hit: bool


@pytest.fixture(autouse=True)
def _any_number_of_rows(monkeypatch):
    monkeypatch.setattr(token_cache, "MIN_ROWS", 1)
    checked_file._warn_once.cache_clear()


def other_tokenizer(change: Callable[[Any], Any] = lambda tokenizer: None) -> Any:
    """The tests' tokenizer after a change, which may return another one."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    return change(tokenizer) or tokenizer


def add_bos(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.eos_token_id)]
    )


def add_token(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken("three")])


def split_special(tokenizer: Any) -> None:
    tokenizer.split_special_tokens = True


@pytest.fixture
def load(tmp_path, monkeypatch, capsys) -> Callable[..., Load]:
    """Loads rows with a cache in `tmp_path / "cache"`, and tells whether they were tokenised."""
    calls = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return tokenize_rows(*args, **kwargs)

    tokenize_rows = tokenise.tokenize_rows
    monkeypatch.setattr(tokenise, "tokenize_rows", spy)

    def load(rows, kind="preference", tokenizer=None, stop_id=0, split="train", **fields) -> Load:
        folder = tmp_path / "rows"
        folder.mkdir(exist_ok=True)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        needed = {"token_cache_dir": str(tmp_path / "cache"), "max_dropped_fraction": 0.9}
        limits = {"max_prompt_length": 60, "max_completion_length": 20}
        config = tiny.train_config(**(needed | limits | fields))
        calls.clear()
        capsys.readouterr()
        args = (config, str(folder), split, kind, tokenizer or other_tokenizer(), [stop_id])
        return Load(list(load_examples(*args)), capsys.readouterr().out, not calls)

    return load


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("truncation", ["tldr", "start"])
@pytest.mark.parametrize("change", [lambda tokenizer: None, add_bos, add_token, split_special])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("preference", PAIRS), ("sft", PLAIN), ("prompts", PAIRS), ("sft", TURNS)],
)
def test_what_is_read_is_what_was_tokenised(load, tmp_path, kind, rows, change, truncation):
    tokenizer = other_tokenizer(change)
    call = {"kind": kind, "tokenizer": tokenizer, "prompt_truncation": truncation}
    limits = {"max_prompt_length": 50, "max_completion_length": 9}
    fresh = load(rows, token_cache_dir="", **call, **limits)
    assert not (tmp_path / "cache").exists()
    miss, hit = (load(rows, **call, **limits) for _ in range(2))
    assert [result.is_hit for result in (fresh, miss, hit)] == [False, False, True]
    assert fresh[:2] == miss[:2] == hit[:2]
    for one, other in zip(fresh.examples, hit.examples, strict=True):
        assert type(one.prompt) is type(other.prompt) is str
        assert {type(i) for i in other.prompt_ids} == {int}
        assert {type(ids) for ids in other.completions} <= {list}
    if rows is not TURNS:
        assert any(e.prompt != rows[e.row]["prompt"] for e in hit.examples)  # some are truncated
    if kind != "prompts" and change is not split_special:
        assert [e.row for e in hit.examples] != list(range(len(rows)))  # and some dropped


def test_a_report_is_read_as_it_was_made(load, monkeypatch):
    refuse, reports = DataReport.refuse_lossy, []

    def spy(report, max_dropped_fraction):
        reports.append(report)
        refuse(report, max_dropped_fraction)

    monkeypatch.setattr(DataReport, "refuse_lossy", spy)
    assert not load(PAIRS).is_hit
    assert load(PAIRS).is_hit
    assert reports[0] == reports[1]
    assert reports[1].num_dropped == 2


def test_examples_on_disk_are_read_like_a_list(load, tmp_path, monkeypatch):
    load(PAIRS)
    config = tiny.train_config(
        token_cache_dir=str(tmp_path / "cache"),
        max_prompt_length=60,
        max_completion_length=20,
        max_dropped_fraction=0.9,
    )
    monkeypatch.setattr(tokenise, "tokenize_rows", lambda *_, **__: pytest.fail("it is there"))
    rest = ("preference", other_tokenizer(), [0])
    examples = load_examples(config, str(tmp_path / "rows"), "train", *rest)
    assert isinstance(examples, token_cache.Stored)
    assert len(examples) == 4
    rows = [0, 1, 2, 5]
    assert [example.row for example in examples] == rows
    assert [example.row for example in examples[1:-1]] == rows[1:-1]
    assert examples[-1] == examples[3]
    with pytest.raises(IndexError):
        examples[4]


def test_columns_that_are_not_tokenised_come_from_the_rows_of_today(load):
    load(PAIRS)
    now = load([{**row, "source": "new", "facts": {"k": n}} for n, row in enumerate(PAIRS)])
    assert {example.source for example in now.examples} == {"new"}
    assert [e.columns["facts"] for e in now.examples] == [{"k": e.row} for e in now.examples]


def test_another_split_of_the_same_rows_has_its_own_name(load):
    load(PAIRS)
    assert load(PAIRS, split="validation").printed.startswith("validation: 4 of 6 rows")


def test_what_was_told_of_the_rows_is_told_again(load):
    rows = [{"prompt": "Say:", "chosen": f"Say: a{n}", "rejected": f"Say: b{n}"} for n in range(2)]
    miss, hit = load(rows), load(rows)
    assert hit.is_hit
    assert "chosen and rejected repeat the prompt in 2 of 2 rows" in miss.printed
    assert hit.printed == miss.printed


def test_too_many_dropped_rows_are_refused_on_a_hit_as_without(load):
    load(PAIRS)
    sentences = []
    for folder in ({}, {"token_cache_dir": ""}):
        with pytest.raises(UserError, match="would lose 2 of 6 rows") as caught:
            load(PAIRS, max_dropped_fraction=0.3, **folder)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    assert load(PAIRS, max_dropped_fraction=0.34).is_hit


# --- what names a file ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": PAIRS[::-1]},
        {"rows": PAIRS[:-1]},
        {"rows": [*PAIRS[:-1], {**PAIRS[-1], "prompt": "Short"}]},
        {"rows": [*PAIRS[:-1], {**PAIRS[-1], "rejected": " d"}]},
        {"rows": [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS]},
        {"kind": "prompts"},
        {"stop_id": 5},
        {"max_prompt_length": 59},
        {"max_completion_length": 19},
        {"prompt_truncation": "start"},
        {"tokenizer": other_tokenizer(add_token)},
        {"tokenizer": other_tokenizer(add_bos)},
        {"tokenizer": other_tokenizer(split_special)},
    ],
)
def test_whatever_changes_a_token_is_another_file(load, tmp_path, changes):
    assert not load(PAIRS).is_hit
    rows, changed = changes.get("rows", PAIRS), {k: v for k, v in changes.items() if k != "rows"}
    assert not load(rows, **changed).is_hit
    assert len(files(tmp_path)) == 2
    assert load(PAIRS).is_hit
    assert load(rows, **changed).is_hit


def name_of(tokenizer: Any = None, **settings: Any) -> str:
    settings = {"stop_ids": [0], **settings}
    file = token_cache.file_for("cache", tokenizer or tiny.tokenizer(), settings, lambda: "rows")
    assert file is not None
    return file.name


def test_data_sets_are_told_apart_by_their_bytes_and_by_where_a_file_ends(tmp_path):
    def identity_of(*shards: str) -> str:
        folder = tmp_path / "_".join(("of", *shards))
        folder.mkdir()
        for number, text in enumerate(shards):
            (folder / f"train-{number}-of-{len(shards)}.jsonl").write_text(text)
        return token_cache.identity(str(folder), "train", None)

    shards = [("ab", "c"), ("a", "bc"), ("abc", ""), ("abc",), ("abd",)]
    assert len({identity_of(*texts) for texts in shards}) == len(shards)


def test_a_template_names_a_file_unless_it_writes_the_date():
    def with_template(template: str) -> Any:
        return other_tokenizer(lambda tokenizer: setattr(tokenizer, "chat_template", template))

    assert name_of(with_template("a")) != name_of(with_template("b"))
    dated = with_template("{{ strftime_now('%d %b %Y') }}")
    assert token_cache.file_for("cache", dated, {"stop_ids": [0]}, lambda: "rows") is None


def test_versions_and_code_name_a_file(monkeypatch, tmp_path):
    names = [name_of()]
    for package in ("tokenizers", "transformers", "numpy", "pyarrow"):
        with monkeypatch.context() as patch:
            patch.setattr(token_cache, "package_version", lambda name, p=package: name == p)
            names.append(name_of())
    with monkeypatch.context() as patch:
        patch.setattr("platform.python_version", lambda: "3.99.0")
        names.append(name_of())
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "module.py").write_text("changed = True\n")
    monkeypatch.setattr(checked_file, "PACKAGE", tmp_path)
    checked_file.code_digest.cache_clear()
    names.append(name_of())
    checked_file.code_digest.cache_clear()
    assert len(set(names)) == len(names) == 7


def test_padding_left_by_an_earlier_call_names_no_other_file():
    tokenizer = other_tokenizer()
    before = name_of(tokenizer)
    tokenizer(["a", "b c"], padding="max_length", truncation=True, max_length=9)
    assert tokenizer.backend_tokenizer.padding
    assert name_of(tokenizer) == before


def test_half_a_surrogate_pair_is_refused_also_where_it_would_be_cut_away(load):
    rows = [{"prompt": "p", "completion": f" a{EOS}\ud800"}]
    with pytest.raises(UserError, match=r"row 1: column 'completion' holds \\ud800, half of"):
        load(rows, "sft")


# --- what is not cached ---------------------------------------------------------------------------


def in_python(tokenizer: Any) -> None:
    class Whole:
        def pre_tokenize(self, text: Any) -> None:
            pass

    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Whole())


def foreign(tokenizer: Any) -> None:
    tokenizer.__class__ = type("Own", (type(tokenizer),), {"__module__": "transformers_modules.x"})


def slow(tokenizer: Any) -> None:
    tokenizer.__class__ = type(
        "Slow", (type(tokenizer),), {"is_fast": False, "__module__": type(tokenizer).__module__}
    )


@pytest.mark.parametrize("change", [in_python, foreign, slow])
def test_a_tokenizer_that_cannot_be_written_down_tokenises_each_time(load, tmp_path, change):
    tokenizer = other_tokenizer(change)
    for _ in range(2):
        assert not load(PAIRS, tokenizer=tokenizer, max_prompt_length=200).is_hit
    assert not (tmp_path / "cache").exists()


def test_few_rows_and_an_empty_folder_are_not_cached(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [load(PAIRS, token_cache_dir="").is_hit for _ in range(2)] == [False, False]
    monkeypatch.setattr(token_cache, "MIN_ROWS", len(PAIRS) + 1)
    assert not load(PAIRS).is_hit
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(token_cache, "MIN_ROWS", len(PAIRS))
    assert [load(PAIRS).is_hit for _ in range(2)] == [False, True]


def test_other_ranks_read_and_do_not_write(load, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("common.distributed.is_first_on_host", lambda: False)
        first = load(PAIRS)
        assert not (tmp_path / "cache").exists()
    written = load(PAIRS)
    monkeypatch.setattr("common.distributed.is_first_on_host", lambda: False)
    read = load(PAIRS)
    assert [result.is_hit for result in (first, written, read)] == [False, False, True]
    assert first.examples == written.examples == read.examples


# --- files and folders that cannot be used --------------------------------------------------------


def test_a_damaged_file_is_tokenised_again_and_replaced(load, tmp_path):
    fresh = load(PAIRS)
    (file,) = files(tmp_path)
    whole = file.read_bytes()

    def flipped(place: int) -> bytes:
        return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]

    places = {0, 31, 32, len(whole) - 1, *range(40, len(whole), len(whole) // 8)}
    damaged = [b"", whole[:20], whole[:32], whole[:-1], whole[: len(whole) // 2], whole + b"\0"]
    damaged += [flipped(place) for place in sorted(places)]
    for content in damaged:
        file.write_bytes(content)
        again = load(PAIRS)
        assert not again.is_hit
        assert again[:2] == fresh[:2]
        assert files(tmp_path) == [file]
        assert load(PAIRS).is_hit


def test_a_file_under_the_name_of_another_is_not_taken_for_it(load, tmp_path):
    load(PAIRS)
    (own,) = files(tmp_path)
    load(PAIRS[::-1])
    (other,) = set(files(tmp_path)) - {own}
    own.write_bytes(other.read_bytes())
    assert not load(PAIRS).is_hit


def test_a_file_holds_no_pickle(load, tmp_path):
    load(PAIRS)
    (file,) = files(tmp_path)
    stored = token_cache.read(file)
    arrays = (stored.ends, stored.text_ends, stored.ids, stored.texts)
    assert all(array.dtype.kind in "iu" for array in arrays)


def test_values_that_json_cannot_hold_are_not_kept_and_said_so(tmp_path, capsys):
    table = pyarrow.table({"prompt": ["p"], "when": pyarrow.array([0], pyarrow.date32())})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    config = tiny.train_config(token_cache_dir=str(tmp_path / "cache"))
    rest = ("prompts", tiny.tokenizer(), [0])
    (example,) = load_examples(config, str(tmp_path), "train", *rest)
    assert example.columns == {"when": datetime.date(1970, 1, 1)}
    assert "warning: tokenised rows are not kept: Object of type date" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_warned_about_once(load, tmp_path):
    fresh = load(PAIRS, token_cache_dir="")
    (tmp_path / "cache").write_text("a file")
    for folder in ("cache", "cache/below"):
        where = {"token_cache_dir": str(tmp_path / folder)}
        first, second = (load(PAIRS, **where) for _ in range(2))
        assert first.examples == second.examples == fresh.examples
        warning, _, rest = first.printed.partition("\n")
        assert warning.startswith(f"warning: tokenised rows are not kept, {tmp_path / folder} ")
        assert "--token_cache_dir" in warning
        assert rest == second.printed == fresh.printed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_warned_about(load, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert "Permission denied" in load(PAIRS).printed


class FullDisk:
    """A file that takes some bytes and no more."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *args: Any) -> None:
        self.stream.close()

    def write(self, content: Any) -> None:
        self.stream.write(bytes(content)[:5])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing_behind(load, tmp_path, monkeypatch):
    really_open = Path.open

    def full_for_new_files(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = really_open(self, mode, *args, **kwargs)
        return FullDisk(stream) if "x" in mode else stream

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full_for_new_files)
        result = load(PAIRS)
    assert "(No space left on device)" in result.printed
    assert files(tmp_path) == []
    assert not load(PAIRS).is_hit
    assert load(PAIRS).is_hit


def test_a_folder_in_the_place_of_the_file_is_none(load, tmp_path):
    load(PAIRS)
    (file,) = files(tmp_path)
    file.unlink()
    file.mkdir()
    result = load(PAIRS)
    assert not result.is_hit
    assert "(Is a directory)" in result.printed
    assert files(tmp_path) == [file]


def test_a_run_that_writes_the_same_file_meanwhile_is_not_disturbed(load, tmp_path, monkeypatch):
    really_replace, meanwhile = Path.replace, []

    def replace_late(self: Path, target: Path) -> Path:
        if not meanwhile:
            meanwhile.append("begun")
            meanwhile.append(load(PAIRS))
        return really_replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_late)
    result = load(PAIRS)
    assert "warning" not in result.printed + meanwhile[1].printed
    assert result.examples == meanwhile[1].examples
    assert len(files(tmp_path)) == 1
    assert load(PAIRS).is_hit


RACE = """
import json, os, sys, time
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "tests")]
import tiny
from common.text import token_cache
from common.data import load_examples

token_cache.MIN_ROWS = 1
rows, cache, own, other = sys.argv[1:]
def load(folder):
    config = tiny.train_config(token_cache_dir=folder, max_prompt_length=60)
    return list(load_examples(config, rows, "train", "preference", tiny.tokenizer(), [0]))
fresh = load("")
open(own, "w").close()
while not os.path.exists(other):
    time.sleep(0.01)
for _ in range(15):
    assert load(cache) == fresh
    for name in os.listdir(cache):
        if name.endswith(".tokens"):
            try:
                os.unlink(os.path.join(cache, name))  # also by the other process
            except FileNotFoundError:
                pass
assert load(cache) == fresh
"""


def test_two_runs_may_write_and_delete_the_same_file_at_once(tmp_path):
    rows = [{"prompt": f"word {n}", "chosen": " a", "rejected": " b"} for n in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", RACE, str(tmp_path / "train.jsonl"), str(cache)]
    ready = [str(tmp_path / "first"), str(tmp_path / "second")]
    root = Path(__file__).resolve().parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    racers = [
        subprocess.Popen([*command, *flags], cwd=root, **pipes) for flags in (ready, ready[::-1])
    ]
    for racer in racers:
        output, _ = racer.communicate(timeout=300)
        assert racer.returncode == 0, output
        assert "warning" not in output
    assert all(file.suffix == ".tokens" for file in cache.iterdir())
