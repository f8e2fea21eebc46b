"""Malformed rows, files, models and reward files, as folders in a working directory."""

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    T5Config,
)

from common.text import synthetic

PROMPT = "TITLE: a\n\nPOST: b\n\nTL;DR:"
SFT = {"prompt": PROMPT, "completion": " c"}
PAIR = {"prompt": PROMPT, "chosen": " c", "rejected": " d"}
USER, ANSWER = {"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}
# Rows of train.jsonl in a folder of the name
ROWS: dict[str, list[Any]] = {
    "sft": [SFT] * 4,
    "pairs": [PAIR] * 4,
    # columns
    "no_completion": [{"prompt": "p"}],
    "number": [SFT, {**SFT, "completion": 3}],
    "null": [SFT, {**SFT, "prompt": None}],
    "nested": [{**SFT, "prompt": {"text": PROMPT}}],
    "texts": [{**SFT, "prompt": ["a", "b"]}],
    "nan_text": [{**SFT, "completion": float("nan")}],
    "mixed": [SFT, {**SFT, "completion": [ANSWER]}],
    "none": [],
    "null_row": [SFT, None],
    "scalar_row": [3],
    "ragged": [{"prompt": "p"}, {"prompt": "p", "length": 3}],
    "reserved": [{"prompt": "p", "completion_ids": [1]}],
    # texts
    "empty_completion": [SFT, {**SFT, "completion": ""}],
    "blank_prompt": [{**SFT, "prompt": " \n\t"}],
    "only_newlines": [{**SFT, "completion": " \n"}],
    "equal_pairs": [PAIR, {**PAIR, "chosen": " d"}],
    "only_prompt": [{**SFT, "completion": PROMPT}] * 2,
    "no_prefix": [{"chosen": "cat", "rejected": "dog"}],
    # messages
    "messages": [{**SFT, "prompt": [USER]}],
    "no_role": [{"prompt": [{"content": "p"}], "completion": [ANSWER]}],
    "content_number": [{"prompt": [{**USER, "content": 3}], "completion": [ANSWER]}],
    "no_messages": [{"prompt": [], "completion": [ANSWER]}],
    "messages_text": [{"messages": "p"}],
    "messages_null": [{"messages": [USER, {**ANSWER, "content": None}]}],
    "messages_one": [{"messages": [ANSWER]}],
    "messages_user": [{"messages": [USER, USER]}],
    "two_answers": [{"prompt": [USER], "chosen": [ANSWER, ANSWER], "rejected": [USER, ANSWER]}],
    "chat": [{"messages": [USER, ANSWER]}],  # well-formed, for a tokenizer without a template
    # other columns
    "choice": [{"prompt": "p", "reward_funcs": ["gold", "silver"]}],
    "choice_number": [{"prompt": "p", "reward_funcs": 3}],
    "choice_object": [{"prompt": "p", "reward_funcs": [{"a": 1}]}],
    "answers": [{"prompt": "p", "answer": "#### 3"}, {"prompt": "p", "answer": "#### 3 1/2"}],
    "answer_nan": [{"prompt": "p", "answer": float("nan")}],
    "short_number": [{"prompt": "p", "short": "a"}, {"prompt": "p", "short": 7}],
    "margin_nan": [{**PAIR, "margin": 1.0}, {**PAIR, "margin": float("nan")}],
    "margin_text": [{**PAIR, "margin": "large"}],
}
LINE = json.dumps(SFT).encode() + b"\n"
# Bytes of train.jsonl in a folder of the name
RAW: dict[str, bytes] = {
    "empty_file": b"",
    "cut_line": LINE + b'{"prompt": "a", "comp',
    "latin_1": LINE + '{"prompt": "café", "completion": " c"}'.encode("latin-1"),
    "utf_16": LINE.decode().encode("utf-16"),
    "half_pair": b'{"prompt": "a \\ud83d b", "completion": " c"}\n',
    "doubled_key": b'{"prompt": "a", "prompt": "b", "completion": " c"}\n',
    "deep": LINE + b'{"prompt": ' + b"[" * 100_000 + b"\n",
    "long_number": b'{"prompt": ' + b"9" * 5000 + b"}\n",
    "csv_inside": b"prompt,completion\na,b\n",
}
# A folder whose config.json is that of `policy` but for these fields
CONFIGS: dict[str, dict[str, Any]] = {
    "no_type": {"model_type": None},
    "unknown_type": {"model_type": "gpt9"},
    "unknown_dtype": {"dtype": "float99"},
    "no_layers": {"n_layer": 0},
    "no_vocabulary": {"vocab_size": -1},
    "text_size": {"n_embd": "wide"},
    "odd_heads": {"n_head": 3},
    "wider": {"n_embd": 16},
    "more_layers": {"n_layer": 2},
    "many_layers": {"n_layer": 10**6},
    "long_vocabulary": {"vocab_size": 10**400},
    "number_class": {"architectures": [3]},
    "text_class": {"architectures": "GPT2LMHeadModel"},
    "quantised": {"quantization_config": {"quant_method": "no_such_method", "bits": 4}},
}
# Folders of these names in a run's folder
FOLDERS = (
    *("metrics.jsonl", "samples.jsonl", "config.yaml", "results.json", "report.md", "report.html"),
    *("scores.jsonl", "completions.jsonl", "plots/curves.png"),
)
REWARD_FILE = """
import sys

def lengths(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def strict(prompts, completions, completion_ids, *, grade, **columns):
    return grade

def nan(completions, **columns):
    return [0.0, float("nan")] + [0.0] * (len(completions) - 2)

def huge(completions, **columns):
    return [10 ** 400] * len(completions)

def vast(completions, **columns):
    return [10 ** 5000] * len(completions)

def few(completions, **columns):
    return [1.0]

def nothing(completions, **columns):
    pass

def texts(completions, **columns):
    return ["good"] * len(completions)

def unsure(completions, **columns):
    return [None] * len(completions)

def raises(completions, **columns):
    return [1 / 0 for _ in completions]

def leaves(completions, **columns):
    sys.exit(0)

def a_dict(completions, **columns):
    return {i: 1.0 for i in range(len(completions))}

def a_set(completions, **columns):
    return {float(i) for i in range(len(completions))}

def bytes_(completions, **columns):
    return bytes(len(completions))

constant = 3
first = min
"""


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """Work in a folder with good and malformed rows, models and reward files."""
    make_rows(folder)
    make_models(folder)
    make_reward_files(folder)
    with tiny.working_directory(folder):
        yield folder


def make_rows(folder: Path) -> None:
    """Data sets, good and bad."""
    for name, rows in ROWS.items():
        (folder / name).mkdir()
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / name / "train.jsonl").write_text(text)
    for name, content in RAW.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_bytes(content)
    (folder / "both").mkdir()
    for split in ("train", "validation"):
        (folder / "both" / f"{split}.jsonl").write_bytes(LINE * 4)
    (folder / "broken.jsonl.gz").write_bytes(gzip.compress(LINE * 99)[:40])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SFT] * 9), folder / "broken.parquet")
    whole = (folder / "broken.parquet").read_bytes()
    (folder / "broken.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "rows.csv").write_text("prompt,completion\na,b\n")
    (folder / "scalar.json").write_text("3\n")
    (folder / "object.json").write_text(json.dumps({"train": [SFT]}, indent=1))
    for name in ("no_splits", "looped", "unreadable", "csv_only"):
        (folder / name).mkdir()
    (folder / "csv_only" / "train.csv").write_text("prompt,completion\na,b\n")
    (folder / "looped" / "train.jsonl").symlink_to("train.jsonl")
    (folder / "unreadable" / "train.jsonl").symlink_to("/proc/self/mem")  # also for root
    (folder / "loop").symlink_to("loop")
    (folder / "lost").symlink_to("gone")
    (folder / "a_file").write_text("")
    (folder / "occupied").mkdir()
    (folder / "occupied" / "model").write_text("")
    for name in FOLDERS:
        (folder / f"has_{name}" / name).mkdir(parents=True)
    for name in ("model.partial", "failed"):
        (folder / f"has_{name}").mkdir()
        (folder / f"has_{name}" / name).write_text("")


def make_models(folder: Path) -> None:
    """A policy, a reward model, and folders with something wrong in them."""
    tokenizer = synthetic.train_tokenizer(300)
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 64, "vocab_size": 300}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(folder / "policy")
    classifier = GPT2Config(**shape, num_labels=1, pad_token_id=1)
    GPT2ForSequenceClassification(classifier).save_pretrained(folder / "judge")
    classifier.num_labels = 2
    GPT2ForSequenceClassification(classifier).save_pretrained(folder / "two_scores")
    GPT2LMHeadModel(GPT2Config(**shape | {"vocab_size": 7})).save_pretrained(folder / "few_words")
    T5Config().save_pretrained(folder / "t5")
    BertConfig(num_labels=1).save_pretrained(folder / "bert")
    names = ("policy", "judge", "two_scores", "few_words", "t5", "bert", "words", "old_run/model")
    for name in names:
        tokenizer.save_pretrained(folder / name)
    make_weights(folder)
    make_configs(folder)
    make_tokenizers(folder)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "shape.json").write_text(json.dumps({"model_type": "gpt2", **shape}))
    typo = json.dumps({"model_type": "gpt2", "n_layr": 1})
    (folder / "typo.json").write_text(typo)
    (folder / "list.json").write_text("[]")
    (folder / "text.json").write_text("GPT-2")


def make_weights(folder: Path) -> None:
    """Models without weights that could be used."""
    names = ("no_weights", "pointer", "partial", "cut", "empty", "only_bin", "only_pt", "no_shards")
    for name in (*names, "bin_shard", "broken_index"):
        shutil.copytree(folder / "policy", folder / name)
        (folder / name / "model.safetensors").unlink()
    whole = (folder / "policy" / "model.safetensors").read_bytes()
    # What git leaves of a large file without its LFS extension
    (folder / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com\n")
    save_file({"wte.weight": torch.zeros(300, 8)}, folder / "partial" / "model.safetensors")
    (folder / "cut" / "model.safetensors").write_bytes(whole[:-100])
    (folder / "empty" / "model.safetensors").write_bytes(b"")
    weights = load_file(folder / "policy" / "model.safetensors")
    torch.save(weights, folder / "only_bin" / "pytorch_model.bin")
    torch.save(weights, folder / "only_pt" / "model.pt")
    torch.save(weights, folder / "bin_shard" / "pytorch_model.bin")
    for name, shard in (("no_shards", "gone.safetensors"), ("bin_shard", "pytorch_model.bin")):
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
        (folder / name / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "broken_index" / "model.safetensors.index.json").write_text('{"weight_map": {}}')

    for name, odd in (
        ("nan_weight", {"transformer.h.0.mlp.c_fc.weight": torch.full((8, 32), torch.nan)}),
        ("inf_weight", {"transformer.ln_f.weight": torch.full((8,), -torch.inf)}),
        ("fewer_layers", {"transformer.h.1.ln_1.weight": torch.ones(8)}),
        ("extra_weight", {"adapter.weight": torch.ones(3)}),
        ("int8_weight", {"transformer.ln_f.bias": torch.ones(8, dtype=torch.int8)}),
        ("bool_weight", {"transformer.ln_f.bias": torch.ones(8, dtype=torch.bool)}),
    ):
        shutil.copytree(folder / "policy", folder / name)
        save_file(weights | odd, folder / name / "model.safetensors", metadata={"format": "pt"})


def make_configs(folder: Path) -> None:
    """Models whose config.json says what no model is, or what its weights are not."""
    for name, fields in CONFIGS.items():
        shutil.copytree(folder / "policy", folder / name)
        file = folder / name / "config.json"
        values = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    for name, text in (("no_json", "{"), ("list_config", "[]")):
        shutil.copytree(folder / "policy", folder / name)
        (folder / name / "config.json").write_text(text)


def make_tokenizers(folder: Path) -> None:
    """Models whose tokenizer cannot be read, lacks something, or has a text for a number."""
    names = ("no_eos", "cut_tokenizer", "odd_tokenizer", "unknown_tokenizer", "bad_template")
    for name in (*names, "text_limit"):
        shutil.copytree(folder / "policy", folder / name)
    for name, fields in (
        ("no_eos", {"eos_token": None}),
        ("text_limit", {"model_max_length": "x"}),
        ("unknown_tokenizer", {"tokenizer_class": "NoSuchTokenizer"}),
        ("bad_template", {"chat_template": "{% for %}"}),
    ):
        file = folder / name / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    for name in ("cut_tokenizer", "odd_tokenizer"):
        file = folder / name / "tokenizer.json"
        file.write_text(file.read_text()[:200] if name == "cut_tokenizer" else "[]")


def make_reward_files(folder: Path) -> None:
    """Files with reward functions."""
    (folder / "rewards.py").write_text(REWARD_FILE)
    (folder / "raises.py").write_text("raise OSError('no disk')\n")
    (folder / "leaves.py").write_text("raise SystemExit(0)\n")
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "rewards.txt").write_text(REWARD_FILE)
