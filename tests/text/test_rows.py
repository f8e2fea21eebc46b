"""Claim: the same rows come out of every kind of file, and every bad input ends in one sentence.

The sentence names the file or split, the row and the column. CNN/DailyMail rows of
`trl-lib/tldr-preference` are distinguished by the two prompt layouts of TRL's conversion script.
About `common.text.reading`, `common.text.sources`, `common.text.shared_prompt` and
`common.text.example`.
"""

import copy
import dataclasses
import gzip
import json
import time
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import tiny
from tokenizers import normalizers

from common.errors import UserError
from common.record.environment import save_run_files
from common.record.run_folder import ENVIRONMENT, read_config
from common.text import reading, schemas, shared_prompt, sources
from common.text.reading import load_examples, load_splits
from common.text.schemas import COMPLETION_COLUMNS, Row
from common.text.tokenise import source_of

SFT = [
    {"prompt": "TITLE: a\n\nTL;DR:", "completion": " one", "facts": {"who": "x"}, "n": 1},
    {"prompt": "TITLE: b\u2028é\n\nTL;DR:", "completion": " two", "facts": {"who": "y"}, "n": 2},
    {"prompt": "TITLE: c\n\nTL;DR:", "completion": " three", "facts": {"who": "z"}, "n": 3},
]
PAIR = {"prompt": "p", "chosen": "the cat", "rejected": "the dog"}  # no word joins the prompt
PACKED = gzip.compress(b'{"prompt": "p"}\n' * 50, mtime=0)  # in the names of tests


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def load_rows(name: str, split: str, kind: str, num_rows: int = 0, **fields: Any) -> list[Any]:
    config = tiny.train_config(dataset_name=name, **fields)
    return reading.load_rows(config, name, split, kind, num_rows)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_rows(*args, **{"kind": "sft", **kwargs})
    tiny.check_sentence(caught.value)
    return str(caught.value)


def test_every_format_gives_the_same_rows(tmp_path):
    (tmp_path / "list.json").write_text("\n " + json.dumps(SFT, indent=1))
    marked = [tmp_path / name for name in ("marked.jsonl", "marked.json")]  # by a byte order mark
    marked[0].write_text("\n".join(map(json.dumps, SFT)), encoding="utf-8-sig")
    marked[1].write_text(json.dumps(SFT), encoding="utf-8-sig")
    windows = tmp_path / "windows.jsonl"  # with blank lines
    windows.write_text("\r\n".join(["", *map(json.dumps, SFT[:2]), " ", json.dumps(SFT[2])]))
    files = [
        write_jsonl(tmp_path / "a.jsonl", SFT),
        write_jsonl(tmp_path / "a.jsonl.gz", SFT),
        write_jsonl(tmp_path / "lines.json", SFT),
        tmp_path / "list.json",
        write_parquet(tmp_path / "a.parquet", SFT),
        *marked,
        windows,
    ]
    for file in files:
        assert load_rows(str(file), "train", kind="sft") == SFT, file
    long = [{**SFT[0], "completion": "word " * 2_000_000}]  # 10 MB, of a line
    assert load_rows(str(write_jsonl(tmp_path / "long.jsonl", long)), "train", kind="sft") == long


def test_folders_give_exactly_the_split_asked_for(tmp_path):
    write_jsonl(tmp_path / "train.jsonl.gz", SFT[:1])
    write_jsonl(tmp_path / "validation.json", SFT[1:2])
    write_parquet(tmp_path / "test.parquet", SFT[2:])
    for split, row in zip(("train", "validation", "test"), SFT, strict=True):
        assert load_rows(str(tmp_path), split, kind="sft") == [row]


def test_shards_are_joined_in_order_also_in_a_data_folder(tmp_path):
    for i in (2, 0, 1):
        write_parquet(tmp_path / "data" / f"train-0000{i}-of-00003.parquet", SFT[i : i + 1])
    assert load_rows(str(tmp_path), "train", kind="sft") == SFT
    (tmp_path / "data" / "train-00001-of-00003.parquet").unlink()
    assert "all its shards" in refusal(str(tmp_path), "train")


def test_a_missing_or_doubled_split_lists_what_is_there(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", SFT)
    write_jsonl(tmp_path / "train.jsonl", SFT)
    message = refusal(str(tmp_path), "validation")
    assert "'validation'" in message
    assert "test.jsonl, train.jsonl" in message
    write_jsonl(tmp_path / "train.json", SFT)
    assert "train.json, train.jsonl" in refusal(str(tmp_path), "train")
    (tmp_path / "empty").mkdir()
    assert "no data files" in refusal(str(tmp_path / "empty"), "train")


def test_a_single_file_is_the_train_split_or_the_one_it_is_named_after(tmp_path):
    file = str(write_jsonl(tmp_path / "pairs.jsonl", SFT))
    message = refusal(file, "validation")
    assert "is a single file" in message
    assert "or leave --dataset_test_split out" in message
    named = str(write_jsonl(tmp_path / "validation.jsonl.gz", SFT))
    assert load_rows(named, "validation", kind="sft") == SFT
    assert load_rows(named, "train", kind="sft") == SFT


def write_splits(folder: Path, *names: str) -> str:
    folder.mkdir()
    for name in names:
        write_jsonl(folder / f"{name}.jsonl", SFT)
    return str(folder)


def save_to_disk(folder: Path, *names: str) -> str:
    one = datasets.Dataset.from_list(SFT)
    saved = datasets.DatasetDict(dict.fromkeys(names, one)) if names else one
    saved.save_to_disk(folder)
    return str(folder)


def chat_of(*contents: Any, **call: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": c} for c in contents] + [{"role": "assistant", **call}]


CALL = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": None}}}]}
JSON, TEXT, NUMBER = datasets.Json(), datasets.Value("string"), datasets.Value("int32")
AS_DATASETS: list[tuple[Any, Any]] = [  # a feature, and the cells of three rows
    (JSON, [1, "1", {"a": [None, 0.5]}]),
    (JSON, ["x", None, ["y", 2]]),
    (datasets.List(JSON), [chat_of("a", **CALL), chat_of("b", content="c"), []]),
    (datasets.LargeList({"role": TEXT, "content": JSON}), [chat_of("a"), chat_of(["b"]), None]),
    (datasets.List(datasets.List(JSON)), [[[None, 1], [], ["a"]], [[]], [["1"]]]),
    ({"a": {"b": JSON}}, [{"a": {"b": [1]}}, {"a": {"b": None}}, {"a": None}]),
    (datasets.Sequence({"a": JSON}), [{"a": [1, "x"]}, {"a": []}, {"a": [{}]}]),
    (datasets.ClassLabel(names=["no", "yes"]), ["yes", 0, None]),
    (datasets.Translation(["de", "en"]), [{"de": "a", "en": "b"}] * 3),
    (datasets.TranslationVariableLanguages(languages=["de", "en"]), [{"de": ["a", "b"]}] * 3),
    (datasets.Array2D((1, 2), "float32"), [[[1, 2]], [[3, 4]], [[5, 6]]]),
    (datasets.Value("large_string"), ["a", "", None]),
    (datasets.Value("timestamp[us]"), [datetime(2024, 2, 29, 1, 2, 3)] * 3),
    (datasets.Value("date32"), [date(2024, 2, 29), None, date(1, 1, 1)]),
    (datasets.Value("decimal128(9, 2)"), [Decimal("1.50"), None, Decimal("-0.25")]),
    (datasets.Value("binary"), [b"\xff", None, b""]),
]


@pytest.mark.parametrize(("feature", "cells"), AS_DATASETS)
def test_rows_are_those_of_datasets(tmp_path, monkeypatch, feature, cells):
    """Of a saved folder, a parquet file, and a data set that `load_dataset` reads."""
    columns = {"prompt": ["a", "b", "c"], "cell": cells}
    features = datasets.Features({"prompt": TEXT, "cell": feature})
    data = datasets.Dataset.from_dict(columns, features=features)
    data.with_format("numpy", columns=["prompt"]).save_to_disk(tmp_path / "saved")
    (tmp_path / "hub").mkdir()
    data.to_parquet(tmp_path / "hub" / "train.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(
        sources,
        "data_files",
        lambda name, split, read=sources.data_files: (
            [] if name.endswith("hub") else read(name, split)
        ),
    )
    expected = [*data]
    for name in ("saved", "hub/train.parquet", "hub"):
        assert load_rows(str(tmp_path / name), "train", kind="prompts") == expected, name
        assert load_rows(str(tmp_path / name), "train[1:]", kind="prompts") == expected[1:], name


TURNS = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi."}]
PARTS = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": TURNS}, {"messages": PARTS}],  # contents of type Json
        [{"messages": PARTS}, {"messages": PARTS}],
        [{"messages": TURNS}, {"messages": [TURNS[0], {"role": "assistant", **CALL}, *TURNS[1:]]}],
        [{"prompt": TURNS[:1], "completion": TURNS[1:], "n": n} for n in (1, "one")],
    ],
)
def test_chats_of_a_json_file_are_those_of_every_form_that_datasets_writes(tmp_path, form, rows):
    (tmp_path / "cache").mkdir()
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    cache = str(tmp_path / "cache")
    data = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
    data.save_to_disk(tmp_path / "rows.saved")
    data.to_parquet(tmp_path / "rows.parquet")
    found = load_rows(str(tmp_path / f"rows.{form}"), "train", kind="sft")
    assert [row["prompt"] for row in found] == [TURNS[:1]] * 2
    assert [row["completion"][-1]["content"] for row in found] == ["Hi."] * 2
    assert [row.get("n") for row in found] == [row.get("n") for row in rows]


def test_a_saved_folder_that_is_not_whole_is_refused(tmp_path):
    folder = save_to_disk(tmp_path / "rows", "train", "eval")
    assert "has no split 'test'; it has ['train', 'eval']" in refusal(folder, "test")
    next((tmp_path / "rows" / "train").glob("*.arrow")).unlink()
    assert f"{folder} cannot be read by datasets: " in refusal(folder, "train")


def test_cells_that_arrow_encodes_are_those_of_the_table(tmp_path):
    cells = pyarrow.array(["x", None, "x"]).dictionary_encode()
    text = pyarrow.array(['{"a": 1}', None, "[]"], pyarrow.json_())
    table = pyarrow.table({"prompt": ["a", "b", "c"], "cell": cells, "json": text})
    for i, stores in enumerate((True, False)):  # the schema of Arrow
        pyarrow.parquet.write_table(table, tmp_path / f"{i}.parquet", store_schema=stores)
        found = load_rows(str(tmp_path / f"{i}.parquet"), "train", kind="prompts")
        assert [(row["cell"], row["json"]) for row in found] == [
            ("x", {"a": 1}),
            (None, None),
            ("x", []),
        ]


@pytest.mark.parametrize("write", [write_splits, save_to_disk])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train", "test", "validation"), "validation"),
        (("train", "test"), "test"),
        (("train",), ""),
        (("train", "test-old"), ""),
    ],
)
def test_the_split_to_evaluate_on_is_what_is_there(tmp_path, write, names, expected):
    folder = write(tmp_path / "rows", *names)
    config = tiny.train_config(dataset_name=folder)
    assert reading.held_out_split(config, folder) == expected
    for split in names:
        assert load_rows(folder, split, kind="sft") == SFT
    named = tiny.train_config(dataset_name=folder, dataset_test_split="nope")
    with pytest.raises(UserError, match="'nope'"):
        reading.held_out_split(named, folder)


def test_a_single_file_is_trained_on_without_evaluation(tmp_path, capsys):
    file = str(write_jsonl(tmp_path / "pairs.jsonl", SFT))
    config = tiny.train_config(dataset_name=file)
    assert reading.held_out_split(config, file, is_trained_on=True) == ""
    assert reading.held_out_split(config, file) == "pairs"
    train, test = load_splits(config, "sft", tiny.vocabulary())
    assert (len(train), len(test)) == (len(SFT), 0)
    note = f"{file} has no split validation or test: no evaluation on it"
    assert note in capsys.readouterr().out
    saved = save_to_disk(tmp_path / "saved")  # of one split
    assert reading.held_out_split(tiny.train_config(dataset_name=saved), saved) == ""
    assert load_rows(saved, "train[1:2]", kind="sft") == SFT[1:2]
    missing = str(tmp_path / "nope.jsonl")
    with pytest.raises(UserError, match="does not exist"):
        reading.held_out_split(tiny.train_config(dataset_name=missing), missing)


def test_num_rows_takes_the_first(tmp_path):
    file = str(write_jsonl(tmp_path / "a.jsonl", SFT))
    for num_rows, expected in ((2, SFT[:2]), (0, SFT), (99, SFT)):
        assert load_rows(file, "train", kind="sft", num_rows=num_rows) == expected
    assert len(load_rows("synthetic", "validation", kind="preference", num_rows=5)) == 5


@pytest.mark.parametrize("write", [write_splits, save_to_disk])
def test_a_run_without_a_held_out_split_names_those_that_are_there(tmp_path, capsys, write):
    folder = write(tmp_path / "rows", "train", "eval", "extra")
    config = tiny.train_config(dataset_name=folder)
    load_splits(config, "sft", tiny.vocabulary())
    told = "it has eval, extra: --dataset_test_split eval evaluates on eval"
    note = f"{folder} has no split validation or test: no evaluation on it; {told}"
    assert capsys.readouterr().out.startswith(f"{note}\n")
    with pytest.raises(UserError, match="has no split to evaluate on; it has .*--dataset_test_spl"):
        reading.evaluated_split(config, folder)
    assert "name a split by --dataset_test_split " in refusal(folder, "nope")
    named = tiny.train_config(dataset_name=folder, dataset_test_split="eval")
    assert len(load_splits(named, "sft", tiny.vocabulary())[1]) == len(SFT)


def test_files_that_are_no_rows_make_no_split_and_no_saved_folder(tmp_path):
    """What `datasets` keeps about a data set, and another tool's state."""
    folder = write_splits(tmp_path / "rows", "train", "eval")
    for name in ("dataset_infos.json", "dataset_info.json"):
        (tmp_path / "rows" / name).write_text("{}")
    assert sources.split_names(folder) == ["eval", "train"]
    (tmp_path / "rows" / "dataset_info.json").unlink()
    (tmp_path / "rows" / "state.json").write_text("{}")
    assert load_rows(folder, "train", kind="sft") == SFT


def test_shards_and_hub_ids_have_names_of_splits_too(tmp_path, monkeypatch):
    for i in range(2):
        write_parquet(tmp_path / "data" / f"dev-0000{i}-of-00002-ab12.parquet", SFT)
    write_jsonl(tmp_path / "my-rows.jsonl.gz", SFT)
    assert sources.split_names(str(tmp_path)) == ["dev", "my-rows"]
    assert sources.split_names(str(tmp_path / "my-rows.jsonl.gz")) == []
    monkeypatch.setattr(sources, "is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: [name, config])
    assert sources.split_names("a/b", "c") == ["a/b", "c"]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("sft", {"prompt": 7}, ["row 2", "'prompt'", "int"]),
        ("sft", {"completion": "absent"}, ["row 2", "'completion'", "missing", "'prompt', 'n'"]),
        ("sft", {"completion": [{"role": "user", "content": "x"}]}, ["'completion'", "both"]),
        ("sft", {"prompt": [{"role": "user", "content": "x"}]}, ["'completion'", "both"]),
        ("sft", {"prompt": [{"role": "user"}]}, ["row 2", "'prompt'", "list of messages"]),
        ("preference", {"chosen": [{"role": "user"}]}, ["row 2", "'chosen'", "messages"]),
        ("preference", {"rejected": "absent"}, ["row 2", "'rejected'", "missing"]),
        ("prompts", {"prompt": ["a"]}, ["row 2", "'prompt'", "list"]),
    ],
)
def test_the_first_bad_row_is_named(tmp_path, kind, change, words):
    good = {"prompt": "p", "n": 1}
    if kind == "sft":
        good["completion"] = "c"
    elif kind == "preference":
        good |= {"chosen": "c", "rejected": "r"}
    bad = {k: v for k, v in {**good, **change}.items() if v != "absent"}
    file = str(write_jsonl(tmp_path / "a.jsonl", [good, bad, bad]))
    message = refusal(file, "train", kind=kind)
    for word in [file, *words]:
        assert word in message, message


UNREADABLE = [
    ("a.jsonl", b'{"prompt": "p"}\n\n{"prompt": \n', "a.jsonl, from line 3 on: "),
    ("b.jsonl", b'{"prompt": "p"}\n7\n', "b.jsonl, line 2: expected named columns"),
    ("b.json", b'[{"prompt": "p"}, 3]', "b.json, row 2: expected named columns"),
    ("c.jsonl", b"\xff\xfe", "c.jsonl cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ("l.json", b'[{"prompt": "a"},\n\n{"prompt": "\xe9"}]', "can't decode byte 0xe9"),
    ("d.parquet", b"not parquet", "d.parquet cannot be read"),
    ("e.jsonl.gz", b"plain text", "e.jsonl.gz cannot be read"),
    ("e.jsonl.gz", PACKED[:-12], "e.jsonl.gz cannot be read"),
    ("e.jsonl.gz", PACKED[:20] + b"\xff\xff\xff" + PACKED[23:], "e.jsonl.gz cannot be read"),
    ("f.jsonl", b"\n", "f.jsonl has no rows"),
    ("g.csv", b"prompt\np\n", "must end in .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "told"), UNREADABLE)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    assert told in refusal(str(tmp_path / name), "train")


def test_a_date_that_python_cannot_hold_is_refused(tmp_path):
    columns = {"prompt": ["p"], "when": pyarrow.array([2**31 - 1], pyarrow.date32())}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert "a.parquet cannot be read: days=2147483647" in refusal(
        str(tmp_path / "a.parquet"), "train"
    )


def test_a_hub_id_without_a_network_fails_in_one_sentence_at_once(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits to ask again"))
    message = refusal("trl-lib/not-a-data-set", "train")
    assert "dataset_name 'trl-lib/not-a-data-set' (split 'train')" in message


def test_an_unreachable_hub_is_asked_once(monkeypatch):
    """Its libraries, left to themselves, would ask for 23 seconds."""
    asked = []

    class Session:
        def head(self, url: str, *, timeout: float) -> None:
            asked.append(url)
            raise Exception("some HTTP library's error")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    sources.is_reachable.cache_clear()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits to ask again"))
    for _ in range(2):
        assert "dataset_name 'trl-lib/not-there' (split" in refusal("trl-lib/not-there", "train")
    assert asked == ["https://huggingface.co"]
    sources.is_reachable.cache_clear()


def test_hub_rows_pass_through_the_same_checks(monkeypatch):
    asked = []

    def load_dataset(name: str, config: str | None, **how: Any) -> datasets.Dataset:
        asked.append((name, config, how))
        return datasets.Dataset.from_list([PAIR, {**PAIR, "chosen": None}, {"chosen": "c"}])

    monkeypatch.setattr(sources, "is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    choice: dict[str, Any] = {"dataset_config": "c"}
    rows = load_rows("a/b", "test", kind="preference", num_rows=1, **choice)
    assert rows == [PAIR]
    rows = load_rows("a/b", "test", kind="preference")
    assert [row["chosen"] for row in rows] == [PAIR["chosen"], "", "-"]
    first = tiny.train_config(dataset_name="first", **choice)  # they are of this one
    assert len(reading.load_rows(first, "a/b", "train", "preference")) == 3
    assert asked == [
        ("a/b", "c", {"split": "test"}),
        ("a/b", None, {"split": "test"}),
        ("a/b", None, {"split": "train"}),
    ]


def test_the_commit_of_hub_rows_is_printed_and_kept(tmp_path, monkeypatch, capsys):
    """The hub's library names the folder of its cache after it: seen in datasets 5.2."""
    data = datasets.Dataset.from_list([PAIR])
    cache = {"filename": f"/cache/a___b/default/0.0.0/{'0a' * 20}/b-train.arrow"}
    monkeypatch.setattr(datasets.Dataset, "cache_files", [cache])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    monkeypatch.setattr(sources, "is_reachable", lambda: True)
    config = tiny.train_config(dataset_name="a/b")
    for name in ("a/b", "c/d"):  # the latter is not the run's main one
        sources.rows_of.cache_clear()
        load_examples(config, name, "train", "preference", tiny.vocabulary())
        cache["filename"] = cache["filename"].replace("0a", "0b")
    assert f"a/b is of commit {'0a' * 20}\n" in capsys.readouterr().out
    save_run_files(tmp_path, config, 1)
    assert read_config(tmp_path, ENVIRONMENT)["dataset_commit"] == "0a" * 20


@pytest.mark.parametrize(
    ("split", "config", "told"),
    [
        ("validation", "main", "Unknown split \"validation\". Should be one of ['train', 'test']."),
        ("train", "zzz", "'zzz' not found. Available: ['main', 'socratic']."),
        ("train", None, "pick one among the available configs: ['main', 'socratic'] Example"),
    ],
)
def test_a_split_or_configuration_that_the_hub_lacks_lists_those_it_has(
    tmp_path, monkeypatch, split, config, told
):
    """By the sentences of `datasets`, to which a folder with a README is as a hub's data set."""
    own = ["- config_name: main\n  data_files: [{split: train, path: a}, {split: test, path: a}]"]
    own = [text.replace("path: a", "path: a.jsonl") for text in own]
    own += ["- config_name: socratic\n  data_files: a.jsonl"]
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "\n".join(own) + "\n---\n")
    write_jsonl(tmp_path / "a.jsonl", SFT)
    monkeypatch.setattr(sources, "is_reachable", lambda: True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(UserError) as caught:
        sources.rows_of(str(tmp_path), split, config)
    assert told in str(caught.value)
    assert isinstance(caught.value, sources.NoSuchSplitError) == (split == "validation")


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # The single space goes to the completions, as in prompt-completion data.
        ("Post. TL;DR: a cat", "Post. TL;DR: the dog", ("Post. TL;DR:", " a cat", " the dog")),
        # A shared beginning of a word belongs to the completions.
        ("Hi. TL;DR: another", "Hi. TL;DR: any", ("Hi. TL;DR:", " another", " any")),
        # Line breaks stay with the prompt: a completion that began with one might stop there.
        ("Q\n\nyes", "Q\n\nno", ("Q\n\n", "yes", "no")),
        # One text is the beginning of the other: a completion must not be empty.
        ("one two", "one two three", ("one", " two", " two three")),
        ("Say: it's", "Say: it is", ("Say:", " it's", " it is")),
        ("one two ", "one two three", ("one", " two ", " two three")),
        # Both go on with a space: the shared word is whole.
        ("one two", "one\tthree", ("one", " two", "\tthree")),
        (
            "Say: \ud55c\uad6d",
            "Say: \ud55c\uad6d\uc5b4",
            ("Say:", " \ud55c\uad6d", " \ud55c\uad6d\uc5b4"),
        ),
        (
            "질문: 하늘은 무슨 색입니까? 답: 파란색",
            "질문: 하늘은 무슨 색입니까? 답: 파랑",
            ("질문: 하늘은 무슨 색입니까? 답:", " 파란색", " 파랑"),
        ),
        ("\u5929\U0001f600a", "\u5929\U0001f600b", ("\u5929", "\U0001f600a", "\U0001f600b")),
        # Scripts without spaces: what is shared, but no part of a word of another script
        (
            "问：什么颜色？答：蓝色。",
            "问：什么颜色？答：绿色。",
            ("问：什么颜色？答：", "蓝色。", "绿色。"),
        ),
        (
            "阅读下面的文章。\n问：天空是什么颜色？答：蓝色。",
            "阅读下面的文章。\n问：天空是什么颜色？答：绿色。",
            ("阅读下面的文章。\n问：天空是什么颜色？答：", "蓝色。", "绿色。"),
        ),
        (
            "質問 今日の天気はどうですか。答え：晴れです。",
            "質問 今日の天気はどうですか。答え：知りません。",
            ("質問 今日の天気はどうですか。答え：", "晴れです。", "知りません。"),
        ),
        ("答：The cat", "答：This", ("答：", "The cat", "This")),
        ("用Python写blue", "用Python写black", ("用Python写", "blue", "black")),
        ("用Python写", "用Python画", ("用Python", "写", "画")),
        ("用Python写", "用Python3写", ("用", "Python写", "Python3写")),
        ("Read 天空 in blue", "Read 天空 in black", ("Read 天空 in", " blue", " black")),
        ("有12个", "有15个", ("有", "12个", "15个")),
        ("答:蓝", "答:绿", ("答:", "蓝", "绿")),
        ("他说“蓝”", "他说“绿”", ("他说“", "蓝”", "绿”")),
        ("答：蓝", "答：蓝色", ("答：", "蓝", "蓝色")),
        ("空は何色ですか。青い", "空は何色ですか。赤い", ("空は何色ですか。", "青い", "赤い")),
        ("\uff71\uff72\uff73", "\uff71\uff72\uff74", ("\uff71\uff72", "\uff73", "\uff74")),
        # Marks stay with their letters: voiced kana, half-width and not; a variant of a character
        ("あｶﾞ", "あｶｷ", ("あ", "ｶﾞ", "ｶｷ")),
        ("あか\u3099", "あかき", ("あ", "か\u3099", "かき")),
        ("天葛\U000e0100", "天葛城", ("天", "葛\U000e0100", "葛城")),
        ("ฟ้าสีอะไร ตอบ:แดง", "ฟ้าสีอะไร ตอบ:ดำ", ("ฟ้าสีอะไร ตอบ:", "แดง", "ดำ")),
        ("ท้องฟ้า", "ท้องฟาก", ("ท้อง", "ฟ้า", "ฟาก")),  # a tone mark stays with its letter
        ("สีแดง", "สีแสด", ("สี", "แดง", "แสด")),  # a vowel in front of its letter
        ("ถามน้ำ", "ถามนก", ("ถาม", "น้ำ", "นก")),
        ("ຟ້າສີແດງ", "ຟ້າສີຂາວ", ("ຟ້າສີ", "ແດງ", "ຂາວ")),
        ("မေးကောင်း", "မေးကို", ("မေး", "ကောင်း", "ကို")),
        ("មេឃពណ៌ក្រ", "មេឃពណ៌ក្ល", ("មេឃពណ៌", "ក្រ", "ក្ល")),  # a letter below a letter
    ],
)
def test_a_missing_prompt_is_the_shared_prefix(tmp_path, chosen, rejected, expected):
    file = write_jsonl(tmp_path / "a.jsonl", [{"chosen": chosen, "rejected": rejected, "n": 1}])
    (row,) = load_rows(str(file), "train", kind="preference")
    assert (row["prompt"], row["chosen"], row["rejected"]) == expected
    assert row["n"] == 1
    assert row["prompt"] + row["chosen"] == chosen
    assert row["prompt"] + row["rejected"] == rejected


def test_the_search_for_a_prompt_reads_a_text_once(monkeypatch):
    """Also where the prompt ends far from where the texts differ."""
    looked: list[int] = []
    may_end = shared_prompt.may_end
    monkeypatch.setattr(
        shared_prompt, "may_end", lambda *text: looked.append(text[-1]) or may_end(*text)
    )
    for word, prompt in (("x" * 4000, "问"), ("天" * 4000, "问 " + "天" * 4000), ("", "问")):
        looked.clear()
        texts = {"chosen": f"问 {word}a", "rejected": f"问 {word}b"}
        (row,) = schemas.standardise([texts], "preference", "rows")
        assert row["prompt"] == prompt
        assert len(looked) == len(set(looked)) <= len(texts["chosen"])


USER = [{"role": "user", "content": "Say: "}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        # TRL's rows with an implicit prompt, and the prompt in a column too
        ("preference", {"prompt": "Say:", "chosen": "Say: good", "rejected": "Say: bad"}),
        ("sft", {"prompt": "Say:", "completion": "Say: good"}),
        ("preference", {"prompt": USER, "chosen": USER + GOOD, "rejected": USER + BAD}),
        ("sft", {"prompt": USER, "completion": USER + GOOD}),
        # UltraFeedback and UltraChat: the prompt as text, the rest as messages
        ("preference", {"prompt": "Say:", "chosen": USER + GOOD, "rejected": USER + BAD}),
        ("sft", {"prompt": "Say:", "messages": USER + GOOD}),
    ],
)
def test_a_prompt_that_completions_repeat_is_cut_from_them(tmp_path, capsys, kind, row):
    """What remains is what the same row without the repetition gives."""
    file = str(write_jsonl(tmp_path / "a.jsonl", [row] * 3))
    found = load_rows(file, "train", kind=kind)
    is_text = isinstance(row["prompt"], str) and all(isinstance(v, str) for v in row.values())
    plain = {"prompt": "Say:", "chosen": " good", "rejected": " bad", "completion": " good"}
    if not is_text:
        plain = {"prompt": USER, "chosen": GOOD, "rejected": BAD, "completion": GOOD}
    for name in ("prompt", *COMPLETION_COLUMNS[kind]):
        assert [found_row[name] for found_row in found] == [plain[name]] * 3
    assert "repeat the prompt in 3 of 3 rows; it is cut from 3" in capsys.readouterr().out


def test_a_completion_that_begins_like_its_short_prompt_is_kept_with_a_note(tmp_path, capsys):
    rows = [
        {"prompt": "The", "completion": "The end"},
        {"prompt": "A long prompt", "completion": " c"},
    ]
    file = str(write_jsonl(tmp_path / "a.jsonl", rows))
    assert load_rows(file, "train", kind="sft") == rows
    assert "repeat the prompt in 1 of 2 rows; it is cut from 0" in capsys.readouterr().out


def test_a_prompt_beside_messages_that_do_not_hold_it_is_refused(tmp_path):
    row = {"prompt": "Sing:", "chosen": USER + GOOD, "rejected": USER + BAD}
    file = write_jsonl(tmp_path / "a.jsonl", [row])
    message = refusal(str(file), "train", kind="preference")
    assert "row 1: 'chosen' and 'prompt' must both be text or both be messages" in message


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "SUBREDDIT: r/tifu\n\nTITLE: t\n\nPOST: p\n\nTL;DR:"}, "tldr"),
        ({"prompt": "TITLE: t\n\nAn article.\nMore.\n\nTL;DR:"}, "cnn_dm"),
        ({"prompt": "TITLE: t\n\nThe POST: a newspaper.\n\nTL;DR:"}, "cnn_dm"),
        ({"prompt": "TITLE: t\n\nPOST: p\n\nTL;DR:"}, "other"),
        ({"prompt": "POST: p\n\nTL;DR:"}, "other"),
        ({"prompt": "Subreddits are"}, "other"),
        ({"prompt": "SUBREDDIT: r/x", "batch": "batch7"}, "tldr"),
        ({"prompt": "SUBREDDIT: r/x", "batch": "cnndm2"}, "cnn_dm"),
        ({"prompt": "Article:\nx", "batch": "batch0_cnndm"}, "cnn_dm"),
        ({"prompt": "SUBREDDIT: r/x", "batch": "cnndm0", "source": "mine"}, "mine"),
        ({"prompt": "SUBREDDIT: r/x", "batch": 3, "source": None}, "tldr"),
    ],
)
def test_row_source(row, expected):
    assert source_of(Row(row["prompt"], [], row)) == expected
    asked = [{"role": "user", "content": row["prompt"]}]  # of a chat, what the user says
    assert source_of(Row(f"<|user|>{row['prompt']}<|assistant|>", [], row, 0, asked)) == expected


def test_a_split_may_be_some_of_its_rows_as_in_datasets(tmp_path):
    """Its slices are those of a list, which `datasets` takes too."""
    rows = [{"prompt": f"row {i}"} for i in range(9)]
    file = write_jsonl(tmp_path / "train.jsonl", rows)
    for name in (str(file), str(tmp_path), "synthetic"):
        whole = load_rows(name, "train", kind="prompts", num_rows=9)
        for start, stop in ((2, 5), ("", 4), (6, "")):
            split = f"train[{start}:{stop}]"
            found = load_rows(name, split, kind="prompts", num_rows=3)
            assert found == whole[slice(start or None, stop or None)][:3], (name, split)
    own = datasets.load_dataset("json", data_files=str(file), split="train[2:5]").to_list()
    assert own == load_rows(str(file), "train[2:5]", kind="prompts")
    assert "has no rows" in refusal(str(file), "train[9:]")


def test_the_texts_of_completions_are_kept_as_the_rows_have_them(tmp_path):
    """A tokenizer may lose letters; what is cut ends where the ids do."""
    rows = [{"prompt": "p", "chosen": " Two A", "rejected": " " + "A B " * 9}]
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    file = str(tiny.write_rows(tmp_path / "train.jsonl", rows))
    config = tiny.train_config(max_completion_length=10)
    arguments = (config, file, "train", "preference", tiny.vocabulary(of=tokenizer))
    (pair,) = load_examples(*arguments, with_texts=True)
    chosen, rejected = pair.completions
    assert tokenizer.decode(chosen[:-1]) == " two a"
    assert pair.texts == [" Two A", tokenizer.decode(rejected)]
    assert len(rejected) == 10
    (plain,) = load_examples(*arguments)
    assert plain == dataclasses.replace(pair, texts=[])
