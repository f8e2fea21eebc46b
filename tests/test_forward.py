"""Claim: log-probabilities, entropies and rewards depend on a sequence's tokens and nothing else.

Neither padding, on any side, nor the other rows change them; GPT-2 without position ids is the
control that shows such a change. Targets: an unpadded forward pass of one row at a time over
all positions, enumeration of all completions of a small vocabulary, and transformers' own
sequence classifiers. About `common.forward`.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
import tiny
import torch
from torch import Tensor

from common import distributed
from common.batch import MAKERS, PaddedBatch, padded_batch
from common.forward import Policy, ReferenceStates, RewardModel
from common.model import fsdp, shared_prefix
from common.model.projection import Head
from common.model.rollout_copy import RolloutCopy

pytestmark = pytest.mark.usefixtures("process_group")

PROMPTS = [tiny.random_ids(n, seed=n) for n in (9, 1, 17, 4)]
COMPLETIONS = [tiny.random_ids(n, seed=50 + n) for n in (5, 8, 1, 3)]


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def lm(request: pytest.FixtureRequest) -> Any:
    return tiny.causal_lm(request.param)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def classifier(request: pytest.FixtureRequest) -> Any:
    return tiny.classifier(request.param)


def usual_batch(
    prompts: list[list[int]], completions: list[list[int]], pad_id: int = 7
) -> PaddedBatch:
    """The layout of training: prompts padded on the left, completions on the right."""
    batch = padded_batch(prompts, [[completion] for completion in completions], pad_id)
    return batch.to(distributed.device())


def batches(prompts: list[list[int]], completions: list[list[int]]) -> Iterator[PaddedBatch]:
    """The same rows in the layout of training, and with any side, amount and id of padding."""
    yield usual_batch(prompts, completions)
    for side, extra, pad_id in itertools.product(("left", "right"), (0, 1, 30), (0, 60)):
        yield tiny.batch_of(prompts, completions, side=side, extra=extra, pad_id=pad_id)


def plain_logps(lm: Any, temperature: float = 1.0) -> list[Tensor]:
    """Log-probabilities (C,) of each row alone: no padding, mask or position ids."""
    rows = zip(PROMPTS, COMPLETIONS, strict=True)
    with torch.no_grad():
        return [tiny.plain_logps(lm, *row, temperature) for row in rows]


def assert_rows_close(
    values: Tensor, batch: PaddedBatch, expected: list[Tensor], tolerance: float
) -> None:
    for row, target in zip(tiny.per_row(values, batch.completion_mask), expected, strict=True):
        torch.testing.assert_close(row.double(), target.double(), rtol=0, atol=tolerance)


# ---- policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_token_logps_equal_a_forward_without_padding_whatever_side_and_amount(lm, temperature):
    expected, limit = plain_logps(lm, temperature), tiny.rounding(lm, temperature)
    for batch in batches(PROMPTS, COMPLETIONS):
        with torch.no_grad():
            scores = Policy(lm)(batch, temperature=temperature)
        assert scores.token_logps.dtype == torch.float32
        assert (scores.token_logps[~batch.completion_mask] == 0).all()
        assert (scores.entropy == 0).all()  # not asked for
        assert_rows_close(scores.token_logps, batch, expected, limit)


def test_gpt2_without_position_ids_is_wrong_under_left_padding():
    """The control: what the position ids are there for."""
    lm = tiny.causal_lm("gpt2")
    expected = plain_logps(lm)
    forward = lm.forward
    lm.forward = lambda position_ids, **inputs: forward(**inputs)
    for side, is_wrong in (("left", True), ("right", False)):
        batch = tiny.batch_of(PROMPTS, COMPLETIONS, side=side)
        with torch.no_grad():
            logps = tiny.per_row(Policy(lm)(batch).token_logps, batch.completion_mask)
        gap = max(float((a - b).abs().max()) for a, b in zip(logps, expected, strict=True))
        assert (gap > 0.05) == is_wrong


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_total_probability_by_enumeration(temperature):
    """All 5**3 completions: probabilities sum to 1, and their entropy follows by the chain rule."""
    vocab_size, length, prompt = 5, 3, [2, 4, 1]
    policy = Policy(tiny.causal_lm("gpt2", vocab_size=vocab_size))
    completions = [list(ids) for ids in itertools.product(range(vocab_size), repeat=length)]
    with torch.no_grad():
        scores = policy(
            usual_batch([prompt] * len(completions), completions, 0),
            temperature=temperature,
            with_entropy=True,
        )
    logps = scores.token_logps.sum(-1).double().cpu()  # (125,)
    assert abs(float(logps.exp().sum()) - 1) < 1e-5
    joint_entropy = -(logps.exp() * logps).sum()
    # H(Y) = E_Y[sum_t H(Y_t | Y_<t)]
    expected_entropy = (logps.exp() * scores.entropy.sum(-1).double().cpu()).sum()
    torch.testing.assert_close(expected_entropy, joint_entropy, rtol=0, atol=1e-5)
    first = logps.view(vocab_size, -1).exp().sum(-1)  # (V,) marginal of the first token
    torch.testing.assert_close(
        scores.entropy[0, 0].double().cpu(), -(first * first.log()).sum(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("bias", [False, True])
def test_the_kl_to_a_reference_is_the_enumerated_one(lm, bias):
    reference = tiny.causal_lm("llama", seed=3)
    if bias:
        head = reference.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, head.out_features))
    batch = usual_batch(PROMPTS, COMPLETIONS)
    with torch.no_grad():
        hidden = Policy(reference)(batch, with_hidden=True).hidden
        states = ReferenceStates(hidden, Head.of(reference))
        kl = Policy(lm)(batch, temperature=0.7, reference=states).kl
        rows = zip(PROMPTS, COMPLETIONS, strict=True)
        expected = [tiny.enumerated_kl(lm, reference, *row, 0.7) for row in rows]
    assert (kl[~batch.completion_mask] == 0).all()
    assert_rows_close(kl, batch, expected, 1e-4)
    assert min(float(row.max()) for row in expected) > 0.1


def test_entropy_is_masked_and_carries_its_gradient(lm):
    """Target: the gradient of the entropies of one unpadded row at a time, by autograd."""
    batch = usual_batch(PROMPTS, COMPLETIONS)
    lm.zero_grad()
    scores = Policy(lm)(batch, temperature=0.8, with_entropy=True)
    assert (scores.entropy[~batch.completion_mask] == 0).all()
    (scores.entropy * 0.3).sum().backward()
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    lm.zero_grad()
    expected = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([prompt + completion], device=distributed.device())
        logits = lm(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / 0.8
        probabilities = torch.softmax(logits, -1)  # (C, V)
        entropy = -(probabilities * probabilities.log()).sum(-1)
        (entropy.sum() * 0.3).backward()
        expected.append(entropy.detach().cpu())
    assert_rows_close(scores.entropy.detach(), batch, expected, tiny.rounding(lm, 0.8))
    for name, parameter in lm.named_parameters():
        scale = float(parameter.grad.norm())
        assert scale > 0 or "k_proj.bias" in name, name  # a bias of all keys changes no softmax
        error = float((gradients[name] - parameter.grad).norm())
        assert error <= tiny.gradient_rounding(lm) * max(scale, 1.0), name
    lm.zero_grad()


def test_bfloat16_logits_are_normalised_in_float32():
    lm = tiny.causal_lm("gpt2").bfloat16()
    batch = usual_batch(PROMPTS, COMPLETIONS)
    with torch.no_grad():
        scores = Policy(lm)(batch)
        logits = lm(
            batch.input_ids,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.position_ids,
            logits_to_keep=batch.completion_mask.shape[1] + 1,
        ).logits[:, :-1]  # (B, C, V)
    assert logits.dtype == torch.bfloat16
    assert scores.token_logps.dtype == torch.float32
    expected = torch.log_softmax(logits.double(), -1)
    expected = expected.gather(-1, batch.completion_ids[..., None])[..., 0] * batch.completion_mask
    torch.testing.assert_close(scores.token_logps.double(), expected, rtol=0, atol=1e-5)


def test_bfloat16_log_probs_are_precise_where_logits_are_large():
    """GPT-2's logits lie near -100, where neighbouring bfloat16 numbers are 0.5 apart."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, 500, bias=False)
    hidden = torch.randn(40, 64, generator=generator) + 1
    with torch.no_grad():
        head.weight.copy_(torch.randn(500, 64, generator=generator) * 0.2 - 100 / 64)
    head, hidden = head.bfloat16(), hidden.bfloat16()
    exact = (hidden.double() @ head.weight.double().T).log_softmax(-1)
    control = (head(hidden).float().log_softmax(-1) - exact).abs()  # cast behind the projection
    head.__class__ = fsdp.Float32Head
    assert (head(hidden).log_softmax(-1) - exact).abs().max() < 1e-4
    assert control.mean() > 0.05
    assert control.max() > 0.2


def test_every_forward_of_a_policy_has_the_precise_head():
    config = tiny.train_config(bf16=True)
    policy = fsdp.shard(Policy(tiny.causal_lm("llama")), config, distributed.mesh())
    assert isinstance(policy.lm.lm_head, fsdp.Float32Head)
    assert isinstance(RolloutCopy(policy.lm, config).lm.lm_head, fsdp.Float32Head)


def test_the_precise_head_carries_the_gradient_of_a_tied_embedding():
    batch = usual_batch([[1, 2, 3], [4] * 9], [[5, 6, 2, 9], [8, 3]])
    gradients = []
    for bf16 in (False, True):
        policy = Policy(tiny.causal_lm("gpt2"))
        policy = fsdp.shard(policy, tiny.train_config(bf16=bf16), distributed.mesh())
        policy(batch).token_logps.sum().backward()
        gradients.append(ranks.whole(policy.lm.transformer.wte.weight.grad))
    plain, rounded = gradients
    assert plain.norm() > 1
    assert (rounded - plain).norm() < 0.05 * plain.norm()


# ---- reward model --------------------------------------------------------------------------------


# The pad token of `tiny.classifier` is 60: these rows are without it.
PLAIN_PROMPTS = [[i % 60 for i in prompt] for prompt in PROMPTS]
PLAIN_COMPLETIONS = [[i % 60 for i in completion] for completion in COMPLETIONS]


def test_rewards_equal_transformers_classifier_whatever_side_and_amount_of_padding(classifier):
    """Target: transformers' own on one unpadded row that does not hold the pad token."""
    rows = [
        torch.tensor([prompt + completion], device=distributed.device())
        for prompt, completion in zip(PLAIN_PROMPTS, PLAIN_COMPLETIONS, strict=True)
    ]
    assert not any((ids == classifier.config.pad_token_id).any() for ids in rows)
    with torch.no_grad():
        expected = torch.cat([classifier(ids).logits[0] for ids in rows])
    assert expected.std() > 0.1  # rows differ: reading another row's token would show
    for batch in batches(PLAIN_PROMPTS, PLAIN_COMPLETIONS):
        with torch.no_grad():
            rewards = RewardModel(classifier)(batch)
        assert rewards.dtype == torch.float32
        torch.testing.assert_close(rewards, expected, rtol=0, atol=tiny.rounding(classifier))


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_the_shift_of_the_config_is_added_to_a_reward(layout: str):
    batch = MAKERS[layout](PLAIN_PROMPTS, [[ids] for ids in PLAIN_COMPLETIONS], 7)
    batch = batch.to(distributed.device())
    lm = tiny.classifier("gpt2")
    shared_prefix.use_shared_prefix(lm, lm.transformer.h[-1])
    with torch.no_grad():
        plain = RewardModel(lm)(batch)
        lm.config.reward_shift = 0.5
        torch.testing.assert_close(RewardModel(lm)(batch), plain + 0.5, rtol=0, atol=0)


def test_a_padded_forward_leaves_no_hook_behind():
    policy = Policy(tiny.causal_lm("gpt2"))
    batch = usual_batch(PROMPTS, COMPLETIONS)
    with torch.no_grad():
        first = policy(batch, with_hidden=True).hidden
        policy(batch)
    assert first is not None
    modules = [*policy.modules()]
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in modules)
