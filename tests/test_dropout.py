"""Claim: dropout acts in training only, on every dropout layer, with noise that a step decides."""

import pytest
import tiny
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody gives it
from torch import nn
from transformers import AutoModelForCausalLM

from common import distributed
from common.config import UserError
from common.model import dropout, fsdp
from common.model.dropout import DropoutTrainConfig
from common.scoring import Policy, sequence_scores


@pytest.fixture(scope="module", autouse=True)
def in_a_process_group():
    with tiny.process_group():
        yield


def config(**fields):
    needed = {"output_dir": "unused", "model_name_or_path": "unused", "layout": "padded"}
    return DropoutTrainConfig(**(needed | fields))


def policy(share: float) -> Policy:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(tiny.model_config("gpt2"))
    dropout.refuse_without(lm, config(dropout=share))
    fields = config(dropout=share, gradient_checkpointing=True)
    return fsdp.shard(Policy(lm), fields, distributed.mesh())


def scores(model: Policy) -> list[float]:
    batch = tiny.batch_of([[3, 4, 5]] * 3, [[6, 7, 8, 9]] * 3, side="right")
    with torch.no_grad():
        return sequence_scores(model, batch).tolist()


def test_noise_is_of_the_step_and_only_in_training():
    model = policy(0.5)
    quiet = scores(model)
    assert quiet[0] == pytest.approx(quiet[1])
    noisy = []
    for step in (0, 1, 0):
        dropout.start_step(model, config(dropout=0.5), step)
        noisy.append(scores(model))
        dropout.end_step(model, config(dropout=0.5))
        assert scores(model) == quiet
    assert noisy[0] == noisy[2] != noisy[1]
    assert len({round(value, 3) for value in noisy[0]}) == 3, "every row has noise of its own"
    dropout.start_step(model, config(dropout=0.5, seed=1), 0)
    assert scores(model) not in noisy


def test_no_dropout_leaves_the_model_as_it_is():
    model = policy(0.0)
    quiet = scores(model)
    dropout.start_step(model, config(), 0)
    assert scores(model) == quiet


def test_it_reaches_embeddings_residuals_and_attention(monkeypatch):
    model = policy(0.25)
    layers = [part for part in model.modules() if isinstance(part, nn.Dropout)]
    assert len(layers) == 1 + 2 * 3  # of the embeddings; of each block attention, and two residuals
    shares = []
    attention = F.scaled_dot_product_attention

    def listen(*args, **options):
        shares.append(options.get("dropout_p"))
        return attention(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", listen)
    dropout.start_step(model, config(dropout=0.25), 0)
    assert {layer.p for layer in layers} == {0.25}
    scores(model)
    dropout.end_step(model, config(dropout=0.25))
    scores(model)
    for block in fsdp.blocks(model):
        assert block.training, "in the other mode no activation is recomputed"
    assert shares == [0.25, 0.25, 0.0, 0.0]


def test_what_cannot_be_is_refused():
    for fields, told in (
        ({"dropout": 1.0}, "--dropout is 1.0; it must be at least 0 and below 1"),
        ({"dropout": 0.1, "layout": "shared_prefix"}, "--layout shared_prefix; it must be padded"),
        ({"dropout": 0.1, "lora_r": 4}, "--lora_r 4; one of them must be 0"),
    ):
        with pytest.raises(UserError, match=told):
            config(**fields)
    llama = AutoModelForCausalLM.from_config(tiny.model_config("llama"))
    with pytest.raises(UserError, match="must be 0 for LlamaForCausalLM, which has no dropout"):
        dropout.refuse_without(llama, config(dropout=0.1))
