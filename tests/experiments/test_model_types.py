"""Claim: the command that says which models are right can tell, and twenty families are.

Each is a tiny model of a kind of attention, position, head or expert, in the functions of training,
sampling and export. A family whose mask, positions or scale are lost is refused by the self-checks,
and without these its cell is wrong. About `experiments.models`.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from assets.recipes.models import shrink
from common import self_checks
from common.model import projection
from experiments.models import cells, table

pytestmark = pytest.mark.usefixtures("process_group")

SHARES = ""
REFUSED = {  # part of the sentence with which the default layout refuses a type, if it does
    "gpt2": SHARES,  # learned positions
    "opt": SHARES,  # learned positions with an offset
    "gpt_neo": "attention of its own",  # local attention
    "bloom": "attention of its own",  # biases by distance
    "llama": SHARES,  # rotary positions
    "gemma3_text": SHARES,  # windows, norms around each part
    "gemma4_text": SHARES,  # a field that differs by layer
    "gemma2": "attention of its own",  # capped scores
    "cohere2": SHARES,  # scaled logits
    "granite": SHARES,  # scaled logits, embeddings and residuals
    "gpt_oss": "attention of its own",  # sinks
    "olmo2": SHARES,  # norms behind each part
    "mixtral": SHARES,  # experts
    "deepseek_v3": "another width",  # latent keys, groups of experts
    "deepseek_v32": "attention of its own",  # sparse attention
    "nemotron": "not given the options",
    "mamba": "attention of its own",  # a recurrent state alone
    "falcon_h1": "attention of its own",  # with attention in each layer
    "qwen3_next": "attention of its own",  # linear attention in some layers
    "lfm2": "attention of its own",  # convolutions in some layers
}
SOME = ("SFT", "GRPO", "export")


@pytest.fixture
def some_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "CELLS", {name: cells.CELLS[name] for name in SOME})


def results(model_type: str, layout: str, folder: Path) -> dict[str, dict[str, Any]]:
    shrink.save(model_type, folder)
    return {each["cell"]: each for each in cells.run(str(folder), layout)}


@pytest.mark.usefixtures("some_cells")
@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_is_right_or_refused_in_a_sentence(model_type, tmp_path):
    shared = results(model_type, "shared_prefix", tmp_path)
    padded = {each["cell"]: each for each in cells.run(str(tmp_path), "padded")}
    phrase = REFUSED[model_type]
    for name in SOME:
        assert shared[name]["kind"] == ("refused" if phrase else "right"), shared[name]
        assert phrase in shared[name].get("text", "")
    if model_type == "mamba":
        assert "cannot be sampled from" in padded.pop("GRPO")["text"]
    assert {each["kind"] for each in padded.values()} == {"right"}, padded


def without(name: str, plain: Any) -> Any:
    """A model's forward that ignores an argument.

    A mask is full, not absent: without one transformers (5.23) masks by the position ids.
    """

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        value = options.pop(name, None)
        if name == "attention_mask" and value is not None:
            options[name] = torch.ones_like(value)
        return plain(self, *args, **options)

    return forward


@pytest.mark.usefixtures("some_cells")
@pytest.mark.parametrize(
    ("model_type", "kind", "ignored"),
    [("llama", LlamaForCausalLM, "attention_mask"), ("gpt2", GPT2LMHeadModel, "position_ids")],
)
def test_a_family_that_loses_mask_or_positions_is_wrong(
    model_type, kind, ignored, tmp_path, monkeypatch
):
    monkeypatch.setattr(kind, "forward", without(ignored, kind.forward))
    sft = results(model_type, "padded", tmp_path)["SFT"]
    assert sft["kind"] == "refused"
    assert "ignores position_ids or attention_mask" in sft["text"]
    monkeypatch.setattr(self_checks, "only_tokens_matter", lambda *args, **options: None)
    unchecked = results(model_type, "padded", tmp_path)
    for name in ("SFT", "export"):
        assert unchecked[name]["kind"] == "wrong", unchecked[name]
        assert unchecked[name]["value"] > 0.1


@pytest.mark.usefixtures("some_cells")
def test_a_family_whose_scale_is_ignored_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(projection.Scaling, "of", lambda config: projection.Scaling())
    assert "changes its logits" in results("granite", "shared_prefix", tmp_path)["SFT"]["text"]
    monkeypatch.setattr(self_checks, "only_tokens_matter", lambda *args, **options: None)
    unchecked = results("granite", "shared_prefix", tmp_path)
    assert unchecked["SFT"]["kind"] == "wrong", unchecked["SFT"]
    assert unchecked["SFT"]["value"] > 0.1


def test_types_that_are_no_decoders_are_named():
    assert shrink.not_a_decoder("bert") == "an encoder"
    assert shrink.not_a_decoder("bart") == "the decoder of an encoder-decoder"
    assert shrink.not_a_decoder("qwen3_5") == "text with pictures or sound"
    assert "drafter" in shrink.not_a_decoder("gemma4_assistant")
    assert not shrink.not_a_decoder("mpt")
    assert len(shrink.types()) > 120


def test_a_tiny_config_has_a_layer_of_each_kind():
    config = shrink.tiny_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert len(config.layer_types) == config.num_hidden_layers <= 4
    assert (config.hidden_size, config.sliding_window, config.vocab_size) == (64, 32, 300)


def test_the_flags_follow_from_the_cells():
    right = [
        {"layout": "padded", "cell": name, "kind": "right", "value": 1e-6} for name in cells.CELLS
    ]
    refused = [each | {"layout": "shared_prefix", "kind": "refused", "text": "x"} for each in right]
    row = {"type": "a", "results": [*refused, *right], "end": "", "seconds": 1.0}
    right[5] |= {"kind": "refused", "text": "ThisForCausalLM changes its logits."}
    page = table.page({"a": row, "b": {"type": "b", "not a decoder": "an encoder"}})
    assert "| `a` | `--layout padded` | 1e-06 | exact KL: refused (1)" in page.replace("  ", " ")
    assert "1. the model changes its logits." in page
    assert "`b` (an encoder)" in page
