"""Claim: the operations of a step are counted from the model that trains, sharded or not.

The formulas of a forward pass are held against sums by hand and torch's counter in
`test_benchmark_fixture.py`, and against plans here. About `common.record.flops`.
"""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from common import distributed
from common.forward import Policy
from common.model import fsdp, lora
from common.record import flops
from common.record.flops import Decoder
from experiments.plan import footprint

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("lora_r", [0, 2])
def test_a_model_that_trains_has_the_sizes_of_its_plan(family: str, lora_r: int) -> None:
    """A plan sees queries and keys at the attention; here the config has their widths."""
    config = tiny.train_config(lora_r=lora_r)
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(tiny.model_config(family))
    expected = footprint.measure(planned, config)
    lm = tiny.causal_lm(family)
    if lora_r:
        flops_of_base = flops.decoder_of(lm, fsdp.blocks(lm))
        lora.add_adapters(lm, "base", config)
        assert flops.decoder_of(lm, fsdp.blocks(lm)) == flops_of_base
    policy = tiny.shard_with_fsdp(Policy(lm), config, distributed.mesh())
    found = flops.decoder_of(policy.lm, fsdp.blocks(policy.lm))
    assert found is not None
    for field in fields(Decoder):
        assert getattr(found, field.name) == getattr(expected, field.name), field.name


def test_a_shape_with_other_names_or_experts_has_no_sizes() -> None:
    lm = tiny.causal_lm("gpt2")
    lm.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=32))
    assert flops.decoder_of(lm, fsdp.blocks(lm)) is None
    lm = tiny.causal_lm("llama")
    fsdp.blocks(lm)[0].experts = torch.nn.Parameter(torch.zeros(2, 4, 4))
    assert flops.decoder_of(lm, fsdp.blocks(lm)) is None
