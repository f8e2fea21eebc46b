"""A folder with good and malformed rows, models and files, and a stage run in it to its refusal."""

import copy
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from common import launch
from common.record import output_lock
from common.shutdown import failures, signals
from common.text import synthetic

STAGES = dict(ranks.STAGES.values()) | {"evaluate": "EvaluateConfig"}
BASE = {
    "output_dir": "run",
    "model_name_or_path": "policy",
    "dataset_test_split": "",
    "max_prompt_length": 40,
    "max_completion_length": 20,
    "batch_size": 2,
    "max_steps": 1,
}
DATA = {"train_sft": "sft", "train_grpo": "sft"}  # the others read pairs

PROMPT = "TITLE: a\n\nPOST: b\n\nTL;DR:"
SFT = {"prompt": PROMPT, "completion": " c"}
PAIR = {"prompt": PROMPT, "chosen": " c", "rejected": " d"}
USER, ANSWER = {"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}
SYSTEM, OTHER = {"role": "system", "content": "s"}, {"content": "d"}
# Rows of train.jsonl in a folder of the name
ROWS: dict[str, list[Any]] = {
    "sft": [SFT] * 4,
    "pairs": [PAIR] * 4,
    "chat": [{"messages": [USER, ANSWER]}],  # well-formed, for a tokenizer without a template
    "chat_pairs": [{"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | OTHER]}] * 4,
    "system": [{"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [ANSWER | OTHER]}] * 4,
    "margin_text": [{**PAIR, "margin": "large"}],
}
FILES = {
    "typo.yaml": "learning_rte: 1\n",
    "null.yaml": "run_name: null\n",
    "moved.yaml": "ref_model_name_or_path: elsewhere/sft/model\n",
    "twice.yaml": "seed: 1\nbatch_size: 2\nseed: 3\n",
    "typo.json": json.dumps({"model_type": "gpt2", "n_layr": 1}),
    "shape.json": json.dumps({"model_type": "gpt2", "n_layer": 1}),
    "saved_run/checkpoints/step_00000001/manifest.json": "{}",
    "saved_run/checkpoints/step_00000009/manifest.json": "{}",
    "rewards.py": """
def lengths(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def raises(completions, **columns):
    return [1 / 0 for _ in completions]

def leaves(completions, **columns):
    raise SystemExit(0)
""",
}


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """Work in a folder with good and malformed rows, models and files."""
    for name, rows in ROWS.items():
        tiny.write_rows(folder / name / "train.jsonl", rows)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    make_models(folder)
    with tiny.working_directory(folder):
        yield folder


def make_models(folder: Path) -> None:
    """A policy, a reward model, and folders with something wrong in them."""
    tokenizer = synthetic.train_tokenizer(300)
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 64, "vocab_size": 300}
    torch.manual_seed(0)
    policy = GPT2LMHeadModel(GPT2Config(**shape))
    policy.save_pretrained(folder / "policy")
    policy.save_pretrained(folder / "old_run" / "model")
    classifier = GPT2Config(**shape, num_labels=1, pad_token_id=1)
    GPT2ForSequenceClassification(classifier).save_pretrained(folder / "judge")
    GPT2LMHeadModel(GPT2Config(**shape | {"vocab_size": 7})).save_pretrained(folder / "few_words")
    other_types = ("t5", "vit", "qwen2_audio")
    for name in other_types:
        AutoConfig.for_model(name).save_pretrained(folder / name)
    for name in ("policy", "judge", "few_words", "words", "old_run/model", *other_types):
        tokenizer.save_pretrained(folder / name)
    for name in ("partial", "only_bin", "no_eos", "quantised"):
        shutil.copytree(folder / "policy", folder / name)
    save_file({"wte.weight": torch.zeros(300, 8)}, folder / "partial" / "model.safetensors")
    weights = load_file(folder / "policy" / "model.safetensors")
    torch.save(weights, folder / "only_bin" / "pytorch_model.bin")
    (folder / "only_bin" / "model.safetensors").unlink()
    make_chat_models(folder, policy)
    change(folder / "no_eos" / "tokenizer_config.json", eos_token=None)
    change(folder / "quantised" / "config.json", quantization_config={"quant_method": "gptq"})


def make_chat_models(folder: Path, policy: Any) -> None:
    """Policies of one base with chat marks, and a reward model that refuses a system turn."""
    policy.resize_token_embeddings(302, mean_resizing=False)
    marks = ["<|im_start|>", "<|im_end|>"]
    for name, template in {"chatml": tiny.CHATML, "turns": tiny.TURNS, "swapped": None}.items():
        tokenizer = synthetic.train_tokenizer(300)
        added = marks[::-1] if name == "swapped" else marks
        tokenizer.add_special_tokens({"additional_special_tokens": added})
        tiny.save(policy, folder / name, tiny.with_template(tokenizer, template))
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
    shutil.copytree(folder / "judge", folder / "strict")
    strict_tokenizer = tiny.with_template(tiny.tokenizer(), strict + tiny.TURNS)
    strict_tokenizer.save_pretrained(folder / "strict")
    shutil.copytree(folder / "judge", folder / "padded")
    padded_tokenizer = copy.deepcopy(tiny.tokenizer())  # others share it
    padded_tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    padded_tokenizer.save_pretrained(folder / "padded")


def change(file: Path, **fields: Any) -> None:
    """Give fields of a JSON file other values."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def arguments(stage: str, flags: dict[str, Any]) -> list[str]:
    values = {**BASE, "dataset_name": DATA.get(stage, "pairs")}
    if stage == "train_grpo":
        values["reward_funcs"] = "rewards.py:lengths"
    if stage == "evaluate":
        values = {**values, "policies": "policy", "dataset_test_split": "train"}
        values = {k: v for k, v in values.items() if k not in ("batch_size", "max_steps")}
    return [word for item in (values | flags).items() for word in ranks.flag(*item)]


class Refusals:
    """Runs a stage in this process, as its command does, to the sentence with which it refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setattr(launch, "close_and_exit", sys.exit)

    def status(self, stage: str, argv: list[str]) -> int:
        """Exit status of a run that may come to its end: then 0."""
        module = importlib.import_module(stage)
        self.monkeypatch.setattr(sys, "argv", [f"{stage}.py", *argv])
        self.monkeypatch.setattr(dist, "destroy_process_group", lambda *_: None)
        # A run before this one has left its steps.
        self.monkeypatch.setattr(failures, "_progress", None)
        # Else a signal to pytest would not end it, but stop every run of the tests after this one.
        self.monkeypatch.setattr(signals, "listen", lambda *_, **__: None)
        try:
            launch.run(module.main, getattr(module, STAGES[stage]))
        except SystemExit as ended:
            return int(ended.code)
        return 0

    def run(self, stage: str, argv: list[str]) -> tuple[int, str]:
        self.capsys.readouterr()
        return self.status(stage, argv), self.capsys.readouterr().err

    def sentence(self, stage: str, argv: list[str]) -> str:
        """The one sentence, with nothing written."""
        before = everything()
        status, errors = self.run(stage, argv)
        assert status == 2, errors
        assert "Traceback" not in errors
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        tiny.check_sentence(line)
        assert everything() == before
        return line


def everything() -> dict[str, tuple[int, int]]:
    """Size and time of all that is in the working directory, but for locks, which mean nothing."""
    entries = {}
    for parent, folders, files in os.walk("."):
        for name in {*folders, *files} - {output_lock.NAME}:
            status = os.lstat(os.path.join(parent, name))
            entries[os.path.join(parent, name)] = (status.st_size, status.st_mtime_ns)
    return entries
