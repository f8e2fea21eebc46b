"""Claim: under LoRA a reward model trains its adapters and its head, and leaves both to peft.

Whole runs of the stage: what moved, what peft computes with the exported adapter on the base,
and that a resumed run is the one that never stopped.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import launch, run_stages
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from common.checkpoint import export, hf_folder, layout
from common.record.jsonl import read_jsonl

FLAGS: dict[str, Any] = {
    "dataset_test_split": "",
    "num_sample_prompts": 0,
    "max_prompt_length": 32,
    "max_completion_length": 16,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "max_steps": 4,
    "save_steps": 2,
    "lora_r": 4,
    "lora_alpha": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    """A base, pairs, and runs: one on one rank, one on two, and the first resumed in its middle."""
    folder = tmp_path_factory.mktemp("lora_reward")
    tiny.causal_lm("gpt2", vocab_size=300, is_plain=True).save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    rows = [
        {"prompt": f"Post {i}.\nTL;DR:", "chosen": f" it is {i}", "rejected": " nothing"}
        for i in range(6)
    ]
    tiny.write_rows(folder / "pairs.jsonl", rows)
    paths = {
        "model_name_or_path": str(folder / "base"),
        "dataset_name": str(folder / "pairs.jsonl"),
    }

    def job(name: str, **flags: Any) -> dict[str, Any]:
        own = {"output_dir": str(folder / name)}
        return {"stage": "reward", "flags": FLAGS | paths | own | flags}

    saved = str(layout.folder_of(folder / "one", 2))
    again = job("again", resume_from_checkpoint=saved)
    own_pad = copy.deepcopy(tiny.tokenizer())
    own_pad.add_special_tokens({"pad_token": "<|padding|>"})
    own_pad.save_pretrained(folder / "own_pad")
    padded = job("padded", tokenizer_name_or_path=str(folder / "own_pad"), max_steps=2)
    run_stages([job("one"), again, padded])  # in this process: quicker than a launch
    launch(run_stages, 2, folder, jobs=[job("two", micro_batch_size=1)])
    return folder


def series(folder: Path, name: str, metric: str) -> list[float]:
    return [line[metric] for line in read_jsonl(folder / name / "metrics.jsonl")]


def test_adapters_and_head_are_trained_and_nothing_else(folder: Path):
    base = load_file(folder / "base" / "model.safetensors")
    trained = load_file(folder / "one" / "model" / "model.safetensors")
    adapter = load_file(folder / "one" / "adapter" / "adapter_model.safetensors")
    head = adapter.pop("base_model.model.score.weight")
    assert torch.equal(head, trained["score.weight"])
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapter}
    assert len(adapted) == 2 * 4  # layers of two blocks
    for name, tensor in trained.items():
        if name != "score.weight":
            moved = not torch.equal(tensor, base[name])
            assert moved == (name.removesuffix(".weight") in adapted), name


def test_peft_computes_the_exported_reward_model_from_base_and_adapter(folder: Path):
    from peft import PeftModel

    plain = AutoModelForSequenceClassification.from_pretrained(folder / "one" / "model").eval()
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    ids = torch.tensor([tiny.random_ids(9, seed=1, vocab_size=300)])
    with torch.no_grad():
        untrained = base.eval()(input_ids=ids).logits
        theirs = PeftModel.from_pretrained(base, folder / "one" / "adapter").eval()
        found = theirs(input_ids=ids).logits
        expected = plain(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untrained).abs() > 0.01


def test_two_ranks_train_as_one_does(folder: Path):
    one, two = (series(folder, name, "loss") for name in ("one", "two"))
    assert len(set(one)) == 4
    assert two == pytest.approx(one, rel=1e-4)


def test_a_resumed_run_is_the_one_that_never_stopped(folder: Path):
    assert series(folder, "again", "loss") == series(folder, "one", "loss")[2:]
    files = [folder / name / "model" / "model.safetensors" for name in ("one", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_exported_checkpoint_is_the_run_s_own_model_and_adapter(folder: Path, tmp_path: Path):
    """With the head, and the row of a pad token that the base does not have."""
    checkpoint = layout.folder_of(folder / "padded", 2)
    export.main(export.ExportConfig(checkpoint=str(checkpoint), output_dir=str(tmp_path)))
    for part in ("model", "adapter"):
        exported = hf_folder.read_settings(tmp_path / part)
        assert exported == hf_folder.read_settings(folder / "padded" / part)
    trained = load_file(tmp_path / "model" / "model.safetensors")
    assert len(trained["transformer.wte.weight"]) == 301
