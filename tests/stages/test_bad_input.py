"""Claim: what a user gets wrong ends in one clear sentence and the exit status 2.

The sentence names the field, or the file and its row, the value, and what is allowed; nothing has
been written by then, the folder of the run is not even made. One table of cases runs the stages as
a user does, but in this process: nearly all are refused before any weights are read. Some run as
real commands, alone and under torchrun, where the sentence is printed once. The malformed things
themselves are in `bad_things.py`.
"""

import errno
import gzip
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_things
import pytest
import torch
from refusals import STAGES, Refusals, arguments, check_sentence
from safetensors.torch import load_file, save_file

from common import launch, self_checks
from common.checkpoint import export
from common.errors import UserError
from common.exits import signals
from common.flags.parser import parse
from common.model import load
from common.record import folder as run_folder
from common.record.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working directory with models, data sets and reward files; with a process group."""
    with bad_things.working_folder(tmp_path_factory.mktemp("bad_input")) as folder:
        yield folder


@pytest.fixture
def refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refusals:
    return Refusals(monkeypatch, capsys)


Case = tuple[str, dict[str, Any], list[str]]  # a stage, its flags, parts of the sentence
ROWS: list[Case] = [
    # Columns
    ("train_sft", {"dataset_name": "no_completion"}, ["row 1", "'completion' is missing"]),
    ("train_sft", {"dataset_name": "pairs"}, ["'completion' is missing", "'chosen'"]),
    ("train_dpo", {"dataset_name": "sft"}, ["'chosen' is missing"]),
    ("train_reward", {"dataset_name": "sft"}, ["'chosen' is missing"]),
    (
        "evaluate",
        {"dataset_name": "sft", "num_prompts": 0},
        ["no pairs of sft are judged", "no policy"],
    ),
    ("train_sft", {"dataset_name": "number"}, ["row 2", "'completion'", "holds int", "text"]),
    ("train_sft", {"dataset_name": "null"}, ["1 of 2 rows", "1 empty prompt", "first is row 2"]),
    ("train_sft", {"dataset_name": "nested"}, ["row 1", "'prompt' holds dict", "must be text"]),
    ("train_sft", {"dataset_name": "texts"}, ["row 1", "'prompt' holds list", "list of messages"]),
    ("train_sft", {"dataset_name": "nan_text"}, ["row 1", "'completion' holds float"]),
    ("train_sft", {"dataset_name": "mixed"}, ["row 2", "both be text or both be messages"]),
    ("train_sft", {"dataset_name": "none"}, ["train.jsonl has no rows"]),
    ("train_sft", {"dataset_name": "null_row"}, ["line 2", "an object", "found NoneType"]),
    ("train_sft", {"dataset_name": "scalar_row"}, ["line 1", "an object", "found int"]),
    ("train_grpo", {"dataset_name": "ragged"}, ["row 2", "['length']", "row 1"]),
    ("train_grpo", {"dataset_name": "reserved"}, ["row 1", "'completion_ids'", "rename it"]),
    # Texts
    ("train_sft", {"dataset_name": "empty_completion"}, ["first is row 2", "1 empty completion"]),
    ("train_sft", {"dataset_name": "blank_prompt"}, ["first is row 1", "1 empty prompt"]),
    ("train_sft", {"dataset_name": "only_newlines"}, ["first is row 1", "1 empty completion"]),
    ("train_sft", {"dataset_name": "only_prompt"}, ["first is row 1", "2 empty completion"]),
    ("train_dpo", {"dataset_name": "equal_pairs"}, ["1 of 2 rows", "1 identical pair"]),
    ("train_dpo", {"dataset_name": "no_prefix"}, ["first is row 1", "1 empty prompt"]),
    ("train_sft", {"max_prompt_length": 5}, ["4 of 4 rows", "prompt over max_prompt_length"]),
    # Messages
    ("train_sft", {"dataset_name": "messages"}, ["'completion'", "both be text or both be"]),
    ("train_sft", {"dataset_name": "no_role"}, ["row 1", "'prompt' holds list", "'role'"]),
    ("train_sft", {"dataset_name": "content_number"}, ["row 1", "'prompt' holds list"]),
    (
        "train_sft",
        {"dataset_name": "no_messages"},
        ["1 of 1 rows (1 empty prompt; the first is row 1)"],
    ),
    (
        "train_sft",
        {"dataset_name": "messages_text"},
        ["row 1", "'messages' is no list"],
    ),
    (
        "train_sft",
        {"dataset_name": "messages_null"},
        ["1 of 1 rows", "1 empty completion", "first is row 1"],
    ),
    (
        "train_sft",
        {"dataset_name": "messages_one"},
        ["1 of 1 rows (1 empty completion; the first is row 1)"],
    ),
    (
        "train_sft",
        {"dataset_name": "messages_user"},
        ["1 of 1 rows (1 empty completion; the first is row 1)"],
    ),
    ("train_dpo", {"dataset_name": "two_answers"}, ["row 1", "'chosen'", "it must be one"]),
    ("train_sft", {"dataset_name": "chat"}, ["cannot render them", "chat template"]),
    (
        "train_sft",
        {"dataset_name": "chat", "model_name_or_path": "bad_template"},
        ["cannot render them", "chat template"],
    ),
    # Other columns
    ("train_grpo", {"dataset_name": "choice"}, ["row 1", "'gold'", "--reward_funcs has"]),
    ("train_grpo", {"dataset_name": "choice_number"}, ["row 1", "has 3 in its", "list of names"]),
    ("train_grpo", {"dataset_name": "choice_object"}, ["row 1", "[{'a': 1}]", "list of names"]),
    (
        "train_grpo",
        {"dataset_name": "answers", "reward_funcs": "gsm8k"},
        ["row 2", "'answer' holds '#### 3 1/2'", "names no number", "'gsm8k'"],
    ),
    ("evaluate", {"dataset_name": "pairs", "reward_funcs": "gsm8k"}, ["needs the column 'answer'"]),
    (
        "train_grpo",
        {"dataset_name": "answer_nan", "reward_funcs": "gsm8k"},
        ["row 1", "'answer' holds 'nan'", "names no number"],
    ),
    (
        "train_grpo",
        {"dataset_name": "short_number", "reward_funcs": "rouge_l:short"},
        ["row 2", "'short' holds int", "must be text", "'rouge_l:short'"],
    ),
    (
        "train_reward",
        {"dataset_name": "margin_nan", "margin_column": "margin"},
        ["row 2", "nan", "'margin'", "finite"],
    ),
    (
        "train_reward",
        {"dataset_name": "margin_text", "margin_column": "margin"},
        ["row 1", "'large'", "'margin'", "finite"],
    ),
]
FILES: list[Case] = [
    ("train_sft", {"dataset_name": ""}, ["--dataset_name is required"]),
    ("train_sft", {"dataset_name": "nowhere/x/y"}, ["'nowhere/x/y' does not exist"]),
    ("train_sft", {"dataset_name": "gone.jsonl"}, ["'gone.jsonl' does not exist"]),
    ("train_sft", {"dataset_name": "assets/recipes"}, ["does not exist", "repository's root, "]),
    ("train_sft", {"dataset_name": "empty_file"}, ["train.jsonl has no rows"]),
    (
        "train_sft",
        {"dataset_name": "cut_line"},
        ["line 2: it is not JSON, at column 17: "],
    ),
    (
        "train_sft",
        {"dataset_name": "csv_inside"},
        ["line 1: it is not JSON, at column 1: "],
    ),
    ("train_sft", {"dataset_name": "latin_1"}, ["train.jsonl, line 2: byte 0xe9", "UTF-8"]),
    ("train_sft", {"dataset_name": "utf_16"}, ["train.jsonl, line 1: byte 0xff", "UTF-8"]),
    ("train_sft", {"dataset_name": "half_pair"}, ["row 1", "'prompt' holds \\ud83d", "surrogate"]),
    ("train_sft", {"dataset_name": "doubled_key"}, ["line 1", "'prompt' is there twice"]),
    ("train_sft", {"dataset_name": "deep"}, ["train.jsonl, line 2: ", "recursion"]),
    ("train_sft", {"dataset_name": "long_number"}, ["train.jsonl, line 1: ", "4300 digits"]),
    ("train_sft", {"dataset_name": "broken.jsonl.gz"}, ["broken.jsonl.gz cannot be read"]),
    ("train_sft", {"dataset_name": "broken.parquet"}, ["broken.parquet cannot be read"]),
    ("train_sft", {"dataset_name": "scalar.json"}, ["scalar.json, line 1", "found int"]),
    ("train_sft", {"dataset_name": "object.json"}, ["object.json, line 1: "]),
    ("train_sft", {"dataset_name": "rows.csv"}, ["'rows.csv' must end in .jsonl"]),
    ("train_sft", {"dataset_name": "csv_only"}, ["no file for the split 'train'", "no data files"]),
    ("train_sft", {"dataset_name": "no_splits"}, ["no file for the split 'train'"]),
    ("train_sft", {"dataset_name": "looped"}, ["looped/train.jsonl cannot be read", "symbolic"]),
    ("train_sft", {"dataset_name": "unreadable"}, ["unreadable/train.jsonl cannot be read"]),
    ("train_sft", {"dataset_name": "loop"}, ["--dataset_name loop", "symbolic links"]),
    ("train_sft", {"dataset_name": "lost"}, ["--dataset_name lost is a link to what is not there"]),
    ("train_sft", {"dataset_name": "x" * 5000}, ["--dataset_name xxx", "name too long"]),
    ("train_reward", {"sft_dataset_name": "loop"}, ["--sft_dataset_name loop", "symbolic links"]),
    ("evaluate", {"prompts_dataset_name": "lost"}, ["--prompts_dataset_name lost is a link"]),
    ("train_sft", {"dataset_train_split": "test"}, ["'test'", "train.jsonl"]),
    ("train_sft", {"dataset_train_split": ""}, ["--dataset_train_split is required"]),
    ("train_sft", {"dataset_test_split": "validation"}, ["'validation'", "train.jsonl"]),
    # Folders to write to
    ("train_sft", {"output_dir": ""}, ["--output_dir is required"]),
    ("train_sft", {"output_dir": "a_file"}, ["--output_dir a_file needs", "a folder"]),
    ("train_sft", {"output_dir": "a_file/run"}, ["--output_dir a_file/run needs", "a folder"]),
    ("evaluate", {"output_dir": "a_file/b/c"}, ["--output_dir a_file/b/c needs", "a folder"]),
    ("train_sft", {"output_dir": "occupied"}, ["--output_dir occupied holds a file 'model'"]),
    ("train_sft", {"output_dir": "loop"}, ["--output_dir loop", "symbolic links"]),
    ("train_sft", {"output_dir": "loop/run"}, ["--output_dir loop/run", "symbolic links"]),
    ("train_sft", {"output_dir": "lost"}, ["--output_dir lost is a link to what is not there"]),
    ("train_sft", {"output_dir": "x" * 5000}, ["--output_dir xxx", "name too long"]),
    *(
        ("evaluate", {"output_dir": f"has_{name}"}, [f"holds a folder {name!r}", "a file is to"])
        for name in bad_things.FOLDERS
    ),
    *(
        ("train_sft", {"output_dir": f"has_{name}"}, [f"holds a file {name!r}", "a folder is to"])
        for name in ("model.partial", "failed")
    ),
    ("train_sft", {"output_dir": "a_file/x\ny"}, ["--output_dir a_file/x\\ny needs"]),
    ("train_sft", {"output_dir": "a_file/\x1b[31m"}, ["--output_dir a_file/\\x1b[31m needs"]),
    ("train_sft", {"output_dir": "run\udcff"}, ["--output_dir is 'run\\udcff'", "UTF-8"]),
    ("train_sft", {"resume_from_checkpoint": "run/gone"}, ["--resume_from_checkpoint run/gone"]),
    ("train_sft", {"resume_from_checkpoint": "loop"}, ["--resume_from_checkpoint loop", "links"]),
]
MODELS: list[Case] = [
    ("train_sft", {"model_name_or_path": ""}, ["--model_name_or_path is required"]),
    ("train_sft", {"model_name_or_path": "./nowhere"}, ["'./nowhere' does not exist"]),
    *(
        (stage, {flag: f"{run}/model"}, [f"'{run}/model'", f"; {writer} {run} writes it"])
        for stage, flag, run, writer in (
            ("train_sft", "model_name_or_path", "out/sft_2", "train_sft.py with --output_dir"),
            ("train_grpo", "reward_funcs", "out/reward", "train_reward.py with --output_dir"),
            ("train_dpo", "ref_model_name_or_path", "grpo", "train_grpo.py with --output_dir"),
            ("evaluate", "policies", "out/mine", "a training script with --output_dir"),
        )
    ),
    ("train_sft", {"model_name_or_path": "assets/recipes"}, ["not exist; paths are", "'s root, "]),
    ("train_sft", {"model_name_or_path": "loop"}, ["--model_name_or_path loop", "symbolic links"]),
    ("train_sft", {"model_name_or_path": "lost"}, ["--model_name_or_path lost is a link"]),
    ("train_sft", {"model_name_or_path": "pairs"}, ["folder 'pairs' holds no tokenizer"]),
    ("train_sft", {"model_name_or_path": "old_run"}, ["'old_run'", "its subfolder 'model'"]),
    ("train_sft", {"model_name_or_path": "words"}, ["folder 'words' holds no model"]),
    ("train_sft", {"model_name_or_path": "shape.json"}, ["--tokenizer_name_or_path is required"]),
    (
        "train_sft",
        {"model_name_or_path": "list.json", "tokenizer_name_or_path": "policy"},
        ["'list.json' has no 'model_type'"],
    ),
    (
        "train_sft",
        {"model_name_or_path": "text.json", "tokenizer_name_or_path": "policy"},
        ["no model could be found at 'text.json'"],
    ),
    (
        "train_sft",
        {"model_name_or_path": "typo.json", "tokenizer_name_or_path": "policy"},
        ["'typo.json' has 'n_layr'", "no gpt2 has", "did you mean n_layer?"],
    ),
    ("train_sft", {"model_name_or_path": "no_json"}, ["'no_json'", "JSON"]),
    (
        "train_sft",
        {"model_name_or_path": "list_config"},
        ["'list_config'", "malformed"],
    ),
    ("train_sft", {"model_name_or_path": "no_type"}, ["at 'no_type'", "`model_type`"]),
    ("train_sft", {"model_name_or_path": "unknown_type"}, ["at 'unknown_type'", "gpt9"]),
    (
        "train_sft",
        {"model_name_or_path": "unknown_dtype"},
        ["'unknown_dtype'", "float99"],
    ),
    ("train_sft", {"model_name_or_path": "text_size"}, ["'text_size'", "n_embd", "expected int"]),
    ("train_sft", {"model_name_or_path": "no_layers"}, ["'no_layers'", "num_hidden_layers 0"]),
    ("train_sft", {"model_name_or_path": "many_layers"}, ["num_hidden_layers 1000000", "10,000"]),
    ("train_sft", {"model_name_or_path": "long_vocabulary"}, ["vocab_size 1000", "10,000,000"]),
    ("train_sft", {"model_name_or_path": "number_class"}, ["architectures [3]", "list of names"]),
    ("train_sft", {"model_name_or_path": "text_class"}, ["architectures 'GPT2LM", "list of names"]),
    ("train_sft", {"model_name_or_path": "no_vocabulary"}, ["'no_vocabulary'", "vocab_size -1"]),
    ("train_sft", {"model_name_or_path": "few_words"}, ["300 tokens", "'few_words'", "7"]),
    ("train_reward", {"model_name_or_path": "few_words"}, ["300 tokens", "'few_words'", "7"]),
    ("train_sft", {"model_name_or_path": "quantised"}, ["quantization_config ('no_such_method')"]),
    ("train_sft", {"model_name_or_path": "adapter"}, ["'adapter' holds an adapter", "merge it"]),
    ("train_dpo", {"ref_model_name_or_path": "adapter"}, ["'adapter' holds", "merge it"]),
    ("train_sft", {"model_name_or_path": "judge"}, ["'judge' is a reward model"]),
    ("train_sft", {"model_name_or_path": "t5"}, ["'t5' is a t5 model", "causal language model"]),
    ("train_reward", {"model_name_or_path": "t5"}, ["'t5' is a t5 model"]),
    ("train_grpo", {"reward_funcs": "bert"}, ["'bert' is a bert model", "reward function call it"]),
    ("train_dpo", {"ref_model_name_or_path": "judge"}, ["'judge' is a reward model"]),
    ("train_grpo", {"ref_model_name_or_path": "judge"}, ["'judge' is a reward model"]),
    ("train_grpo", {"reward_funcs": "policy"}, ["'policy' is not a reward model", "GPT2LMHead"]),
    ("evaluate", {"policies": "judge"}, ["'judge' is a reward model"]),
    ("evaluate", {"policies": ["policy", "lost"]}, ["--policies lost is a link"]),
    ("evaluate", {"policies": ["policy", "./policy"]}, ["'policy' and './policy'", "once"]),
    ("evaluate", {"reward_models": ["judge", "judge"]}, ["'judge' and 'judge'", "once"]),
    ("evaluate", {"policies": ["policy", ""]}, ["--policies is ['policy', '']", "empty"]),
    ("evaluate", {"reward_models": "policy"}, ["'policy' is not a reward model"]),
    ("evaluate", {"reward_models": "two_scores"}, ["'two_scores' gives 2 scores"]),
    ("evaluate", {"reward_models": ["judge", "far/away"]}, ["no model", "'far/away'"]),
    ("train_reward", {"model_name_or_path": "two_scores"}, ["'two_scores' gives 2 scores"]),
    ("train_sft", {"max_prompt_length": 60}, ["--max_prompt_length 60", "64 positions"]),
    ("train_grpo", {"max_completion_length": 60}, ["--max_completion_length 60", "64 positions"]),
    ("evaluate", {"max_prompt_length": 60}, ["--max_prompt_length 60", "64 positions"]),
    # Tokenizers
    ("train_sft", {"model_name_or_path": "no_eos"}, ["'no_eos'", "no eos token"]),
    ("train_sft", {"tokenizer_name_or_path": "no_eos"}, ["'no_eos'", "no eos token"]),
    ("train_sft", {"tokenizer_name_or_path": "cut_tokenizer"}, ["from 'cut_tokenizer'"]),
    ("train_sft", {"tokenizer_name_or_path": "odd_tokenizer"}, ["from 'odd_tokenizer'"]),
    ("train_sft", {"tokenizer_name_or_path": "text_limit"}, ["model_max_length 'x'", "positive"]),
    ("train_sft", {"stop_token": "\udcff"}, ["--stop_token is '\\udcff'", "UTF-8"]),
    ("train_sft", {"tokenizer_name_or_path": "loop"}, ["--tokenizer_name_or_path loop", "links"]),
    ("train_sft", {"stop_token": "TL;DR:"}, ["--stop_token 'TL;DR:' is", "tokens"]),
    ("train_sft", {"stop_token": ""}, ["--stop_token '' is 0 tokens"]),
]
REWARDS: list[Case] = [
    ("train_grpo", {"reward_funcs": []}, ["--reward_funcs is required"]),
    ("train_grpo", {"reward_funcs": ""}, ["--reward_funcs is ['']", "empty"]),
    ("train_grpo", {"reward_funcs": ["gold", "gold"]}, ["'gold' twice"]),
    ("train_grpo", {"reward_funcs": "silver.py:f"}, ["'silver.py:f'", "no file 'silver.py'"]),
    ("train_grpo", {"reward_funcs": "./silver"}, ["'./silver'", "no folder", "gold"]),
    ("train_grpo", {"reward_funcs": "foo"}, ["'foo'", "gold", "file.py:function", "owner/name"]),
    ("train_grpo", {"reward_funcs": "evaluate.py:f"}, ["no file", "repository's root, "]),
    ("train_grpo", {"reward_funcs": f"./{'x' * 300}"}, ["xxx", "name too long"]),
    ("train_grpo", {"reward_funcs": f"regex:({'a' * 300}"}, ["regex:(a", "no pattern"]),
    ("train_grpo", {"reward_funcs": "rewards.py"}, ["'rewards.py'", "path/to/file.py:function"]),
    ("train_grpo", {"reward_funcs": "rewards.txt:lengths"}, ["'rewards.txt:lengths'", "no folder"]),
    ("train_grpo", {"reward_funcs": "rewards.py:best"}, ["'rewards.py:best'", "no function"]),
    ("train_grpo", {"reward_funcs": "rewards.py:constant"}, ["no function of that name"]),
    ("train_grpo", {"reward_funcs": "rewards.py:first"}, ["'rewards.py:first'", "`def`"]),
    ("train_grpo", {"reward_funcs": "rewards.py:strict"}, ["'rewards.py:strict'", "'grade'"]),
    ("train_grpo", {"reward_funcs": "raises.py:f"}, ["OSError", "no disk"]),
    ("train_grpo", {"reward_funcs": "leaves.py:f"}, ["'leaves.py' raised SystemExit"]),
    ("train_grpo", {"reward_funcs": "syntax.py:f"}, ["SyntaxError", "line 1"]),
    ("train_grpo", {"reward_funcs": "count"}, ["'count'", "count:<argument>"]),
    ("train_grpo", {"reward_funcs": "regex:(a"}, ["regex:(a", "no pattern", "unterminated"]),
    ("train_grpo", {"reward_funcs": "gsm8k"}, ["'gsm8k' needs the column 'answer'"]),
    ("train_grpo", {"reward_funcs": "rouge_l:short"}, ["needs the column 'short'"]),
    ("train_grpo", {"reward_funcs": "rouge_l:prompts"}, ["needs the column 'prompts'"]),
    ("train_grpo", {"reward_funcs": "gold"}, ["'gold' needs the column 'facts'"]),
    ("evaluate", {"reward_funcs": "gold"}, ["'gold' needs the column 'facts'"]),
    (
        "train_grpo",
        {"reward_weights": [1, 2]},
        ["reward_weights is [1.0, 2.0]", "one finite"],
    ),
    ("train_grpo", {"reward_weights": "nan"}, ["--reward_weights is nan", "finite"]),
]
BEST = {"dataset_test_split": "train", "eval_steps": 2, "save_steps": 2}
FLAGS: list[Case] = [
    # Sizes
    ("train_sft", {"batch_size": -4}, ["--batch_size is -4", "above 0"]),
    ("train_sft", {"batch_size": 0}, ["--batch_size is 0", "above 0"]),
    *(
        (stage, {"batch_size": 2**31 - 1}, ["--batch_size is 2147483647", " rows", "10000"])
        for stage in ("train_sft", "train_reward", "train_dpo", "train_grpo")
    ),
    ("train_sft", {"micro_batch_size": 0}, ["--micro_batch_size is 0", "above 0"]),
    ("train_sft", {"max_completion_length": -1}, ["--max_completion_length is -1", "above 0"]),
    ("train_sft", {"num_train_rows": -1}, ["--num_train_rows is -1", "at least 0"]),
    ("train_sft", {"logging_steps": 0}, ["--logging_steps is 0", "above 0"]),
    ("train_sft", {"lora_r": -1}, ["--lora_r is -1", "at least 0"]),
    ("train_sft", {"seed": 2**63}, ["--seed is 9223372036854775808", "below"]),
    ("train_sft", {"seed": -1}, ["--seed is -1", "at least 0"]),
    ("train_grpo", {"num_generations": 1}, ["--num_generations is 1", "at least 2"]),
    (
        "train_grpo",
        {"num_candidates": 4},
        ["--num_generations is 8", "most --num_candidates, 4"],
    ),
    ("evaluate", {"max_new_tokens": 21}, ["--max_new_tokens is 21", "--max_completion_length, 20"]),
    # Numbers
    ("train_sft", {"max_steps": 0, "num_train_epochs": 0}, ["--num_train_epochs is 0.0"]),
    ("train_sft", {"max_steps": 0, "num_train_epochs": "nan"}, ["--num_train_epochs is nan"]),
    ("train_sft", {"learning_rate": "nan"}, ["--learning_rate is nan"]),
    ("train_sft", {"learning_rate": "inf"}, ["--learning_rate is inf", "finite"]),
    ("train_sft", {"max_grad_norm": "nan"}, ["--max_grad_norm is nan"]),
    ("train_sft", {"adam_beta1": 1}, ["--adam_beta1 is 1.0", "below 1"]),
    ("train_sft", {"adam_epsilon": 0}, ["--adam_epsilon is 0.0", "above 0"]),
    ("train_sft", {"weight_decay": -1}, ["--weight_decay is -1.0", "at least 0"]),
    (
        "train_sft",
        {"max_dropped_fraction": 2},
        ["--max_dropped_fraction is 2.0", "0 and at most 1"],
    ),
    ("train_grpo", {"temperature": 0}, ["--temperature is 0.0", "at least 1e-06"]),
    ("train_grpo", {"beta": -0.1}, ["--beta is -0.1", "at least 0"]),
    ("train_grpo", {"epsilon_low": -0.1}, ["--epsilon_low is -0.1", "at least 0"]),
    ("train_grpo", {"top_p": "nan"}, ["--top_p is nan", "above 0"]),
    (
        "train_grpo",
        {"sampler_correction_cap": "nan"},
        ["--sampler_correction_cap is nan", "at least 1"],
    ),
    ("train_grpo", {"missing_eos_penalty": "inf"}, ["--missing_eos_penalty is inf", "finite"]),
    ("train_dpo", {"beta": 0}, ["--beta is 0.0", "above 0"]),
    ("train_dpo", {"label_smoothing": 0.5}, ["--label_smoothing is 0.5", "below 0.5"]),
    ("evaluate", {"temperature": -1}, ["--temperature is -1.0", "at least 0"]),
    # Beyond what can be computed with
    *(
        (stage, {name: value}, [f"--{name} is ", "at most 2,147,483,64"])
        for stage, name, value in (
            ("train_sft", "ddp_timeout", 10**14),
            ("train_sft", "warmup_steps", 10**400),
            ("train_sft", "lora_alpha", 10**400),
            ("train_sft", "batch_size", 10**30),
            ("train_sft", "num_train_epochs", 1e308),
            ("train_grpo", "num_generations", 10**12),
            ("train_grpo", "dry_run_ranks", [1, 10**400]),
        )
    ),
    ("train_sft", {"seed": 10**400}, ["--seed is 1000", "...", "below 9,223,372,036,854,775,808"]),
    ("train_sft", {"max_steps": "9" * 5000}, ["--max_steps", "(...)", "--help"]),
    ("train_grpo", {"temperature": 1e-40}, ["--temperature is 1e-40", "at least 1e-06"]),
    ("evaluate", {"temperature": 1e-30}, ["--temperature is 1e-30", "0, or at least 1e-06"]),
    ("train_grpo", {"reward_weights": 1e39}, ["--reward_weights is 1e+39", "3.4e+38"]),
    ("train_grpo", {"missing_eos_penalty": -1e39}, ["--missing_eos_penalty is -1e+39", "3.4e+38"]),
    ("train_grpo", {"missing_eos_penalty": "-inf"}, ["--missing_eos_penalty is -inf", "finite"]),
    ("train_grpo", {"missing_eos_penalty": "-1e"}, ["--missing_eos_penalty", "value: '-1e'"]),
    ("train_dpo", {"beta": 1e39}, ["--beta is 1e+39", "3.4e+38"]),
    ("train_dpo", {"beta": 1e-40}, ["--beta is 1e-40", "1.18e-38"]),
    # Choices
    ("train_grpo", {"baseline": "none"}, ["--baseline", "'none'", "all", "kept"]),
    ("train_sft", {"lr_scheduler_type": "foo"}, ["--lr_scheduler_type", "'foo'", "cosine"]),
    ("train_sft", {"report_to": "paper"}, ["--report_to", "'paper'", "wandb"]),
    ("train_sft", {"prompt_truncation": "end"}, ["--prompt_truncation", "'end'", "tldr"]),
    ("train_dpo", {"loss_type": ["sigmoid", ""]}, ["--loss_type is ''", "hinge"]),
    ("train_dpo", {"loss_type": "hing"}, ["simpo (did you mean hinge?)"]),
    ("evaluate", {"policies": []}, ["nothing to evaluate"]),
    *(
        ("evaluate", flags | {name: value}, [f"--{name} has no effect", "leave it out"])
        for flags, idle in (
            ({"dataset_name": "sft"}, {"score_stop_token": False, "num_eval_rows": 2}),
            ({"score_pairs": False}, {"policy_scores": "logp_per_token"}),
            ({"score_pairs": False, "prompts_dataset_name": "sft"}, {"dataset_name": "pairs"}),
            ({"num_prompts": 0}, {"temperature": 0, "reward_funcs": "length"}),
            ({"policies": [], "reward_models": "judge"}, {"num_prompts": 2}),
            ({}, {"reshard_after_forward": False, "num_sample_prompts": 1}),
        )
        for name, value in idle.items()
    ),
    *(
        (stage, {name: value}, [f"--{name} has no effect", "leave it out"])
        for stage, idle in {
            "train_sft": {"offload_frozen": True, "lora_alpha": 64},
            "train_reward": {"offload_frozen": True, "num_sft_rows": 2, "generation_batch_size": 2},
            "train_dpo": {"num_candidates": 4, "temperature": 0.5, "missing_eos_penalty": 0},
            "train_grpo": {"max_resamples": 2, "ref_mixup_alpha": 0.5, "baseline": "kept"},
        }.items()
        for name, value in idle.items()
    ),
    *(
        (stage, {"offload_frozen": True, **flags}, ["--offload_frozen has no effect where no"])
        for stage, flags in (
            ("train_grpo", {"beta": 0}),
            ("train_grpo", {"ref_update_steps": 2}),
            ("train_grpo", {"lora_r": 2}),
            ("train_grpo", {"cpu_offload": True}),
            ("train_dpo", {"loss_type": "simpo"}),
            ("train_dpo", {"lora_r": 2}),
        )
    ),
    (
        "train_grpo",
        {"metric_for_best_model": "reward/gold", "save_steps": 1},
        ["--metric_for_best_model is reward/gold", "lengths"],
    ),
    ("evaluate", {"policy_scores": "elo"}, ["--policy_scores", "'elo'", "logp_per_token"]),
    ("evaluate", {"dataset_test_split": ""}, ["--dataset_test_split is required"]),
    ("train_sft", {"metric_for_best_model": "rewrad", "save_steps": 1}, ["rewrad", "no run logs"]),
    ("train_sft", {"metric_for_best_model": "loss"}, ["--save_steps is 0", "positive"]),
    (
        "train_sft",
        BEST | {"metric_for_best_model": "eval_loss", "save_steps": 3},
        ["--save_steps is 3", "multiple of --eval_steps 2"],
    ),
    ("train_sft", {"load_best_model_at_end": True}, ["--load_best_model_at_end is true", "false"]),
    # Contradictions
    ("train_grpo", {"distinct_candidates": "true"}, ["--distinct_candidates is true", "drawn"]),
    *(
        (stage, {"dataset_test_split": "", flag: 5}, [f"--{flag} is 5", "0 without --dataset_test"])
        for stage in ("train_sft", "train_reward", "train_dpo", "train_grpo")
        for flag in ("eval_steps", "num_eval_rows")
    ),
    ("train_sft", {"num_sample_prompts": 0, "sample_steps": 2}, ["0 without --num_sample_prompts"]),
    ("train_reward", {"sample_steps": 2}, ["--sample_steps is 2", "--eval_steps shows pairs"]),
    ("train_dpo", {"profile_steps": 9}, ["--profile_steps is 9", "3 without --profile"]),
    ("train_dpo", {"lora_target_modules": "c_fc"}, ["['c_fc']", "left out without --lora_r"]),
    ("train_sft", {"run_name": "mine"}, ["--run_name is mine", "empty without --report_to wandb"]),
    (
        "train_grpo",
        {"eval_pairs_dataset_name": "synthetic", "dataset_test_split": "train", "beta": 0},
        ["--eval_pairs_dataset_name is synthetic", "empty", "no reference"],
    ),
    *(
        (stage, BEST | {"metric_for_best_model": metric}, [metric, told])
        for stage, metric, told in (
            ("train_sft", "eval_accuracy", "must be eval_loss, or"),
            ("train_dpo", "eval_loss", "must be eval_accuracy, or"),
            ("train_grpo", "eval_kl", "must be eval_reward or"),
            ("train_grpo", "eval_accuracy", "without --eval_pairs_dataset_name"),
        )
    ),
    ("train_grpo", {"require_stop_token": "false"}, ["--require_stop_token is false", "true"]),
    *(
        (
            stage,
            {"max_completion_length": 1},
            ["none of the first", "--max_completion_length 1;", "--require_stop_token false"],
        )
        for stage in ("train_sft", "train_reward")
    ),
    ("train_sft", {"num_replicas": 2}, ["--num_replicas is 2", "1 processes"]),
    (
        "train_dpo",
        {"reference_free": "true", "ref_model_name_or_path": "old_run/model"},
        ["--ref_model_name_or_path is old_run/model", "--reference_free true"],
    ),
    (
        "train_dpo",
        {"loss_type": "simpo", "ref_model_name_or_path": "old_run/model"},
        ["--ref_model_name_or_path is old_run/model", "--loss_type simpo"],
    ),
    (
        "train_grpo",
        {"beta": 0, "ref_model_name_or_path": "old_run/model"},
        ["--ref_model_name_or_path is old_run/model", "--beta 0"],
    ),
    ("train_grpo", {"beta": 0, "kl_in": "reward"}, ["--kl_in is reward", "loss", "--beta 0"]),
    ("train_grpo", {"beta": 0, "kl_estimator": "k1"}, ["--kl_estimator is k1", "k3", "--beta 0"]),
    ("train_grpo", {"beta": 0, "kl_correction": "true"}, ["--kl_correction is true", "--beta 0"]),
    # The command line
    ("train_sft", {"learning_rte": 1}, ["'--learning_rte'", "did you mean learning_rate?"]),
    ("train_sft", {"max_step": 1}, ["'--max_step'", "did you mean max_steps?"]),
    ("train_sft", {"zzz": 1}, ["'--zzz'", "--help"]),
    ("train_sft", {"batch_size": [1, "a/r.yaml"]}, ["'a/r.yaml': ", "as --config a/r.yaml"]),
    ("train_sft", {"max_steps": "many"}, ["--max_steps", "'many'"]),
    ("train_sft", {"max_steps": 1.5}, ["--max_steps", "'1.5'"]),
    ("train_sft", {"learning_rate": "fast"}, ["--learning_rate", "'fast'"]),
    ("train_sft", {"bf16": "perhaps"}, ["--bf16", "perhaps", "true/false"]),
    ("train_sft", {"max_steps": []}, ["--max_steps", "expected one argument"]),
    ("train_sft", {"batch_size": [1, 2]}, ["'2'", "--help"]),
]
CASES = [*ROWS, *FILES, *MODELS, *REWARDS, *FLAGS]
# Found when the weights are read
WEIGHTS: dict[str, list[str]] = {
    "no_weights": ["no safetensors weights"],
    "pointer": ["no safetensors weights"],
    "cut": ["no safetensors weights"],
    "empty": ["no safetensors weights"],
    "only_bin": ["no safetensors weights", "pytorch_model.bin is a pickle", "save the model again"],
    "only_pt": ["no safetensors weights", "model.pt is a pickle"],
    "no_shards": ["no safetensors weights"],
    "broken_index": ["no safetensors weights", "malformed (there is no 'metadata')"],
    "partial": ["'transformer.h.0", "is missing, and ", " more", "of one model"],
    "more_layers": ["'transformer.h.1", "is missing, and ", " more", "of one model"],
    "wider": ["has the shape (24,) in place of (48,)", "of one model"],
    "odd_heads": ["no safetensors weights", "num_heads"],
    "nan_weight": ["nan in 'transformer.h.0.mlp.c_fc.weight'", "must be finite"],
    "inf_weight": ["-inf in 'transformer.ln_f.weight'", "must be finite"],
    "fewer_layers": ["'transformer.h.1.ln_1.weight' has no place", "of one model"],
    "int8_weight": ["'transformer.ln_f.bias' as I8", "floating-point"],
    "bool_weight": ["'transformer.ln_f.bias' as BOOL", "floating-point"],
}
# Found when completions are judged
FUNCTIONS: dict[str, list[str]] = {
    "nan": ["returned nan for row 1", "finite number"],
    "huge": ["returned 1000", "for row 0", "finite number"],
    "vast": ["returned a number of more than 4,300 digits for row 0", "finite number"],
    "few": ["returned 1 rewards for 16 rows", "one for each"],
    "nothing": ["returned no list of rewards for 16"],
    "texts": ["returned 'good' for row 0", "finite number"],
    "unsure": ["no reward function applies to row 0", "returned None"],
    "a_dict": ["returned no list of rewards for 16"],
    "a_set": ["returned no list of rewards for 16"],
    "bytes_": ["returned no list of rewards for 16"],
}
# Each line has the one before ten times: 10^8 texts
ALIASES = ", ".join(
    f"&{name} [{', '.join(['x' if name == 'a' else f'*{before}'] * 10)}]"
    for before, name in zip("_abcdefg", "abcdefgh", strict=True)
)
RECIPES: list[tuple[str, list[str]]] = [
    ("learning_rte: 1\n", ["r.yaml", "key 'learning_rte'", "mean learning_rate?"]),
    ("1: 2\n", ["r.yaml", "key '1'"]),
    ("max_steps: many\n", ["--max_steps", "'many'"]),
    ("max_steps: [1, 2]\n", ["r.yaml", "['1', '2']", "'max_steps'"]),
    ("max_steps: {a: 1}\n", ["r.yaml", "'max_steps'"]),
    ("max_steps:\n", ["r.yaml", "'max_steps'"]),
    ("bf16: 3.5\n", ["3.5"]),
    ("run_name: ~\n", ["r.yaml gives None for 'run_name'", "one value"]),
    ("bf16: off\n", ["--bf16", "expected: got off", "true/false"]),
    ("max_steps: 1:30\n", ["--max_steps", "invalid int value: '1:30'"]),
    (
        "dry_run_ranks: ['--output_dir', x]\n",
        ["gives ['--output_dir', 'x']", "'dry_run_ranks'", "dash"],
    ),
    ("lora_target_modules: ['-a']\n", ["gives ['-a'] for 'lora_target_modules'", "a dash"]),
    ("seed: 1\nbatch_size: 2\nseed: 3\n", ["r.yaml, line 3: the key 'seed' is there twice"]),
    ("a: [1\nb: 2\n", ["r.yaml is not YAML: line 2, "]),
    ("max_steps\n", ["r.yaml", "`key: value`"]),
    ("0\n", ["r.yaml", "`key: value`"]),
    ("- max_steps\n", ["r.yaml", "`key: value`"]),
    ("\ttab: 1\n", ["r.yaml is not YAML: line 1, "]),
    ("run_name: " + "[" * 5000, ["r.yaml is not YAML"]),
    ("seed: 1\n---\nseed: 2\n", ["r.yaml is not YAML: line "]),
    ("run_name: !!python/object/apply:os.getcwd []\n", ["r.yaml is not YAML: line 1, "]),
    ("run_name: \x00\n", ["r.yaml is not YAML"]),
    ("seed: !!int 3\n", ["r.yaml gives 3 for 'seed'", "one value"]),
    ("run_name: !!set {a}\n", ["r.yaml gives {'a'}", "'run_name'", "one value"]),
    ("run_name: !!binary aGVsbG8=\n", ["r.yaml gives b'hello'", "'run_name'", "one value"]),
    ("run_name: &a [*a]\n", ["r.yaml gives [[", "'run_name'", "one value"]),
    (f"run_name: [{ALIASES}]\n", ["r.yaml gives [['x', 'x'", "'run_name'", "one value"]),
    (f"max_steps: 0x{'f' * 5000}\n", ["--max_steps", "invalid int value: '0xfff"]),
]


@pytest.mark.parametrize(
    ("stage", "flags", "parts"),
    CASES,
    ids=[" ".join([s, *(f"{k}={v}"[:60] for k, v in flags.items())]) for s, flags, _ in CASES],
)
def test_bad_input_is_refused_before_weights_are_read(stage, flags, parts, refusals, monkeypatch):
    monkeypatch.setattr(load, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    message = refusals.sentence(stage, arguments(stage, flags))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("stage", ["train_sft", "train_reward"])
@pytest.mark.parametrize(("name", "parts"), WEIGHTS.items(), ids=list(WEIGHTS))
def test_weights_that_cannot_be_used_are_refused(stage, name, parts, refusals):
    message = refusals.sentence(stage, arguments(stage, {"model_name_or_path": name}))
    for part in [f"{name!r}", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("stage", "flags", "parts"),
    [
        ("train_sft", {"model_name_or_path": "extra_weight"}, ["'adapter.weight' has no place"]),
        ("train_sft", {"lora_r": 2, "lora_target_modules": "wte"}, ["has 'wte'", "c_attn, c_fc"]),
        (
            "train_sft",
            {"lora_r": 2, "model_name_or_path": "shape.json", "tokenizer_name_or_path": "policy"},
            ["is shape.json", "a config has no weights to adapt"],
        ),
    ],
    ids=str,
)
def test_what_is_found_when_the_weights_have_been_read(stage, flags, parts, refusals):
    message = refusals.sentence(stage, arguments(stage, flags))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("stage", "flags", "expected"),
    [
        ("train_sft", {}, ["Policy"]),
        ("train_reward", {}, ["RewardModel"]),
        ("train_dpo", {}, ["Policy", "Policy"]),
        ("train_dpo", {"lora_r": 2}, ["AdapterReference", "Policy"]),
        ("train_grpo", {"reward_funcs": "judge"}, ["Policy", "RewardModel", "Policy"]),
        ("evaluate", {"reward_models": "judge"}, ["RewardModel", "Policy"]),
    ],
)
def test_every_model_is_checked_before_it_is_used(
    stage, flags, expected, refusals, monkeypatch, tmp_path
):
    """The reference, reward models and what is evaluated as the policy that is trained."""
    seen: list[str] = []

    def check(model: Any, config: Any, **options: Any) -> None:
        seen.append(type(model).__name__)
        if len(seen) == len(expected):
            raise UserError("enough.")

    monkeypatch.setattr(self_checks, "only_tokens_matter", check)
    status, _ = refusals.run(stage, arguments(stage, flags | {"output_dir": tmp_path}))
    assert (status, seen) == (2, expected)


@pytest.mark.parametrize(("name", "parts"), FUNCTIONS.items(), ids=list(FUNCTIONS))
def test_what_a_reward_function_does_wrong_is_told_in_one_sentence(name, parts, refusals):
    """It is found at the first rollout: the run has begun, and no model is left behind."""
    flags = {"reward_funcs": f"rewards.py:{name}", "num_generations": 8, "output_dir": "begun"}
    status, errors = refusals.run("train_grpo", arguments("train_grpo", flags))
    assert status == 2, errors
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    check_sentence(line)
    for part in parts:
        assert part in line
    assert not Path("begun/model").exists()
    assert read_jsonl(Path("begun/metrics.jsonl")) == []


@pytest.mark.parametrize(
    ("name", "error"), [("raises", "ZeroDivisionError: division by zero"), ("leaves", "SystemExit")]
)
def test_a_reward_function_that_raises_ends_the_run_with_its_traceback(name, error, refusals):
    """Also one that calls exit(): the run must not end with the status of success."""
    flags = {"reward_funcs": f"rewards.py:{name}", "num_generations": 8, "output_dir": "begun"}
    status, errors = refusals.run("train_grpo", arguments("train_grpo", flags))
    assert status == 1
    assert re.search(rf'rewards.py", line \d+, in {name}\n(.*\n)+{error}', errors)
    assert not Path("begun/model").exists()


@pytest.mark.parametrize(("recipe", "parts"), RECIPES, ids=[text[:40] for text, _ in RECIPES])
def test_a_bad_recipe_is_refused_in_one_sentence(recipe, parts, refusals):
    Path("r.yaml").write_text(recipe)
    message = refusals.sentence("train_sft", ["--config", "r.yaml", *arguments("train_sft", {})])
    for part in parts:
        assert part in message


def test_a_recipe_that_is_not_there_or_not_named(refusals):
    message = refusals.sentence("train_sft", ["--config", "gone.yaml"])
    assert "gone.yaml cannot be read: No such file or directory." in message
    message = refusals.sentence("train_sft", ["--config", "assets/recipes/demo/sft.yaml"])
    assert f"working directory: run in the repository's root, {ROOT}." in message
    assert "sft cannot be read: Is a" in refusals.sentence("train_sft", ["--config", "sft"])
    assert "--config: expected one argument" in refusals.sentence("train_sft", ["--config"])
    Path("r.yaml").write_bytes(b"\xff\xfe\x00")
    assert "r.yaml is not YAML" in refusals.sentence("train_sft", ["--config", "r.yaml"])


# ---- where nothing can be written ----------------------------------------------------------------


def test_a_folder_that_allows_no_files_is_refused_before_weights_are_read(refusals, monkeypatch):
    """Permissions are asked for, not tried: tests may run as root, whom nothing stops."""
    monkeypatch.setattr(load, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for flags in ({}, {"output_dir": "a/b/c"}, {"output_dir": "sft"}):
        message = refusals.sentence("train_sft", arguments("train_sft", flags))
        assert f"--output_dir {flags.get('output_dir', 'run')} cannot be written: " in message


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_what_a_run_may_not_read_in_its_folder_is_refused(name, refusals, monkeypatch):
    run = Path(f"mine_{name}")
    run.mkdir()
    (run / name).touch() if "." in name else (run / name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != name)
    message = refusals.sentence("train_sft", arguments("train_sft", {"output_dir": str(run)}))
    assert f"{run / name} may not be read and written by this user" in message


@pytest.mark.parametrize(
    ("script", "flag", "value"),
    [
        ("train_sft", "model_name_or_path", "policy"),
        ("train_sft", "dataset_name", "sft"),
        ("train_grpo", "reward_funcs", "judge"),
        ("evaluate", "reward_models", "judge"),
    ],
)
def test_what_may_not_be_read_is_refused(script, flag, value, refusals, monkeypatch):
    path = value.partition(":")[0]
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place).name != path)
    message = refusals.sentence(script, arguments(script, {flag: value}))
    assert f"--{flag}: {path} may not be read by this user" in message


def test_a_link_that_a_model_cannot_replace_is_refused(refusals):
    Path("linked").mkdir()
    Path("linked/model").symlink_to("/proc")
    message = refusals.sentence("train_sft", arguments("train_sft", {"output_dir": "linked"}))
    assert "holds 'model', a link to /proc, which cannot be replaced" in message
    Path("linked/model").unlink()
    Path("linked/model").symlink_to("not_yet_there")
    run_folder.refuse_unwritable("linked")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_told_in_one_sentence(refusals):
    Path("full").mkdir()
    Path("full/config.yaml").symlink_to("/dev/full")
    Path("full/.lock").touch()  # of a run before
    for stage in ("train_sft", "evaluate"):
        message = refusals.sentence(stage, arguments(stage, {"output_dir": "full"}))
        assert "--output_dir full cannot be written: No space left on device" in message


def test_a_failure_at_the_end_is_its_place_and_its_traceback(refusals, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "late/model")

    monkeypatch.setattr(export, "save_pretrained", fail)
    status, errors = refusals.run("train_sft", arguments("train_sft", {"output_dir": "late"}))
    assert status == 1
    assert "rank 0 after step 1, the last of train_sft:\nTraceback" in errors
    assert errors.endswith("OSError: [Errno 28] No space left on device: 'late/model'\n")


# ---- what looks odd and is good ------------------------------------------------------------------


def test_the_good_input_is_not_refused(folder, monkeypatch):
    """The control: without the bad value every stage goes on to load weights."""
    for stage in STAGES:
        reaches_weights(stage, {"output_dir": "good"}, monkeypatch)


@pytest.mark.parametrize("name", ["bom", "long", "extra", "windows", "blank_lines", "doubled"])
def test_odd_but_good_rows_are_read(name, folder, monkeypatch, capsys):
    line = json.dumps(bad_things.SFT)
    words = "word after word. " * 12_000
    long = {"prompt": f"TITLE: a\n\nPOST: {words}\n\nTL;DR:", "n": words * 50}  # 10 MB, of a line
    texts = {
        "bom": "\ufeff" + f"{line}\n" * 3,
        "long": f"{line}\n{json.dumps(bad_things.SFT | long)}\n{line}\n",
        "extra": json.dumps({**bad_things.SFT, "id": 1, "n": float("nan"), "tags": [{}]}) + "\n",
        "windows": f"{line}\r\n" * 3,
        "blank_lines": f"\n{line}\n\n \n{line}\n",
        "doubled": "".join(json.dumps({**bad_things.SFT, "id": i}) + "\n" for i in (1, 1, 2)),
    }
    Path(f"{name}.jsonl").write_text(texts[name], encoding="utf-8", newline="")
    reaches_weights("train_sft", {"dataset_name": f"{name}.jsonl"}, monkeypatch)
    num_doubled = {"extra": 0, "blank_lines": 1, "long": 1}.get(name, 2)
    report = capsys.readouterr().out
    assert "rows, truncated" in report
    assert f" {num_doubled} duplicates" in report, "counted and told, not refused"
    Path(f"{name}.jsonl").unlink()


def test_a_recipe_with_a_byte_order_mark_is_read(folder, monkeypatch):
    Path("bom.yaml").write_text("\ufeffseed: 5\n", encoding="utf-8")
    reaches_weights("train_sft", {"config": "bom.yaml"}, monkeypatch)


@pytest.mark.parametrize("text", ["-1e-3", "-.001", "-0.001", "-1E-3", "-1e-03"])
def test_a_negative_number_is_a_value_however_it_is_written(text, folder):
    """By itself argparse takes a dash before an exponent for a flag."""
    config_class = importlib.import_module("train_grpo").GRPOConfig
    argv = [*arguments("train_grpo", {}), "--missing_eos_penalty", text, "--reward_weights", text]
    config = parse(config_class, argv)
    assert (config.missing_eos_penalty, config.reward_weights) == (-0.001, [-0.001])
    Path("negative.yaml").write_text(f"reward_weights: [{text}]\nmissing_eos_penalty: {text}\n")
    config = parse(config_class, ["--config", "negative.yaml", *arguments("train_grpo", {})])
    assert (config.missing_eos_penalty, config.reward_weights) == (-0.001, [-0.001])


def test_tensors_of_older_files_and_the_head_of_a_trunk_are_left_out(folder):
    """GPT-2's own file holds its masks; a reward model is made of a policy's trunk."""
    weights = load_file("policy/model.safetensors")
    shutil.copytree("policy", "older")
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.0.attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.ones(300, 8),
    }
    save_file(weights | masks, "older/model.safetensors", metadata={"format": "pt"})
    flags = {"model_name_or_path": "older"}
    for stage in ("train_sft", "train_reward"):
        module = importlib.import_module(stage)
        argv = arguments(stage, flags | {"output_dir": f"{stage}_of_older"})
        module.main(parse(getattr(module, STAGES[stage]), argv))
        assert Path(f"{stage}_of_older/model/model.safetensors").is_file()


def reaches_weights(stage: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load", lambda *_, **__: (_ for _ in ()).throw(InterruptedError))
    module = importlib.import_module(stage)
    with pytest.raises(InterruptedError):
        module.main(parse(getattr(module, STAGES[stage]), arguments(stage, flags)))


def test_paths_may_have_spaces(folder):
    """Of the rows, the model, the reward file, the recipe and the run."""
    shutil.copytree("policy", "a policy")
    shutil.copytree("sft", "some rows")
    Path("my rewards.py").write_text(bad_things.REWARD_FILE)
    Path("my recipe.yaml").write_text("reward_funcs: ['my rewards.py:lengths']\n")
    flags = {"model_name_or_path": "a policy", "dataset_name": "some rows", "output_dir": "a run"}
    argv = [*arguments("train_sft", flags), "--num_generations", "2", "--max_steps", "1"]
    module = importlib.import_module("train_grpo")
    module.main(parse(module.GRPOConfig, ["--config", "my recipe.yaml", *argv]))
    assert Path("a run/model/model.safetensors").is_file()
    assert read_jsonl(Path("a run/metrics.jsonl"))[-1]["reward/lengths"] > 0
    packed = gzip.compress(Path("some rows/train.jsonl").read_bytes())
    Path("some rows.jsonl.gz").write_bytes(packed)
    flags |= {"model_name_or_path": "a run/model", "dataset_name": "some rows.jsonl.gz"}
    flags["output_dir"] = "a second run"
    module = importlib.import_module("train_sft")
    module.main(parse(module.SFTConfig, arguments("train_sft", flags)))


def test_a_stage_run_here_leaves_signals_to_pytest(refusals):
    before = [signal.getsignal(number) for number in signals.STOPPING]
    refusals.sentence("train_sft", arguments("train_sft", {"dataset_name": "none"}))
    assert [signal.getsignal(number) for number in signals.STOPPING] == before


# ---- as real commands ----------------------------------------------------------------------------


def test_only_the_first_rank_of_a_host_speaks_unless_it_has_nothing_to_say(monkeypatch, capsys):
    """Another waits for that sentence, after which torchrun ends it; then it speaks."""
    events: list[Any] = []

    def leave(status: int) -> None:
        events.append(status)
        raise SystemExit(status)

    def sleep(seconds: float) -> None:
        assert not capsys.readouterr().err, "it spoke at once"
        events.append(seconds)

    monkeypatch.setattr(sys, "argv", ["train_sft.py", "--nonsense"])
    monkeypatch.setattr(launch, "close_and_exit", leave)
    monkeypatch.setattr(time, "sleep", sleep)
    config_class = importlib.import_module("train_sft").SFTConfig
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit):
            launch.run(lambda config: pytest.fail("it ran"), config_class)
        assert "error: unknown argument '--nonsense'" in capsys.readouterr().err
    assert events == [2, launch.PATIENCE, 2]


def run_script(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A stage as a user starts it; the hub does not answer at the address it is given."""
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **offline},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"max_stepz": 1}, "unknown argument '--max_stepz' (did you mean max_steps?)."),
        ({"model_name_or_path": "no/body"}, "no tokenizer could be loaded from 'no/body': "),
        ({"dataset_name": "no/body"}, "dataset_name 'no/body' (split 'train') is no local "),
    ],
)
def test_a_script_prints_the_sentence_alone_and_exits_with_2(flags, sentence, folder):
    result = run_script([str(ROOT / "train_sft.py"), *arguments("train_sft", flags)])
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()  # nor does a library say that it tries again
    assert line.startswith(f"error: {sentence}")
    check_sentence(line)
    assert not Path("run").exists()


SPEAKS = """
def speaks(completions, log_extra, **columns):
    log_extra("note", ["half a pair \\ud83d of \xe9"] * len(completions))
    print("\\ud83d \xe9", flush=True)
    return [float(len(text)) for text in completions]
"""


def test_what_is_printed_unbuffered_is_not_kept():
    program = (
        "from common.record import terminal; terminal.keep_printing(); print('out'); os._exit(0)"
    )
    command = [sys.executable, "-u", "-c", f"import os; {program}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "out\n"


@pytest.mark.parametrize(("is_read", "plans"), [(False, True), (False, False), (True, False)])
def test_nothing_that_is_printed_ends_a_run(is_read, plans, folder, tmp_path):
    """On a terminal in ASCII, to a reader that has gone (`| true`), and halves of pairs."""
    Path("speaks.py").write_text(SPEAKS, encoding="utf-8")
    flags = {"dry_run": str(plans), "output_dir": tmp_path, "reward_funcs": "speaks.py:speaks"}
    flags |= {"num_sample_prompts": 1, "sample_steps": 1}
    reader, writer = os.pipe()
    if not is_read:
        os.close(reader)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "train_grpo.py"), *arguments("train_grpo", flags)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **ascii_only},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    os.close(writer)
    assert result.returncode == 0, result.stderr
    assert "Error" not in result.stderr  # slow machines draw a bar there
    if is_read:
        with os.fdopen(reader) as output:
            assert "\\ud83d \\xe9\n" in output.read()
    if not plans:
        assert (tmp_path / "model" / "model.safetensors").exists()
        (*_, line) = read_jsonl(tmp_path / "samples.jsonl")
        assert line["logged/note"] == "half a pair \ud83d of \xe9"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"batch_size": 3}, "--batch_size is 3, which 2 processes cannot share evenly; "),
        ({"max_stepz": 1}, "unknown argument '--max_stepz' (did you mean max_steps?)."),
        ({"dataset_name": "no/body"}, "dataset_name 'no/body' (split 'train') is no local "),
    ],
)
def test_two_processes_print_the_sentence_once(flags, sentence, folder):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = str(ROOT / "train_sft.py")
    result = run_script([*torchrun, script, *arguments("train_sft", flags)])
    assert result.returncode != 0
    assert len(re.findall(rf"^error: {re.escape(sentence)}", result.stderr, re.MULTILINE)) == 1
    *_, last, rule = result.stderr.splitlines()  # of torchrun's own summary
    assert f": error: {sentence}" in last
    assert set(rule) == {"="}
    assert "failed:" not in result.stderr.split("error: ")[0]
    assert not Path("run").exists()
