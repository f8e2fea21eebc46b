"""Claim: computing a prompt once for all its completions changes no number, and no gradient.

Targets: transformers' own models with eager attention on one padded row per completion, and, for a
single attention call, a dense mask written token by token. About `common.model.shared_attention`
and `common.model.shared_prefix`.
"""

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from common import batch as batching
from common import distributed, self_checks
from common.batch import Layout, PaddedBatch, SharedPrefixBatch, padded_batch, shared_prefix_batch
from common.errors import UserError
from common.forward import Policy, RewardModel
from common.model import fsdp, load, shared_attention, shared_prefix
from common.model.shared_attention import (
    branch_attention,
    range_attention,
    range_attention_backward,
)

pytestmark = pytest.mark.usefixtures("process_group")

Groups = list[tuple[int, list[int]]]  # lengths of a prompt and of its completions
CASES: dict[str, Groups] = {
    "one completion each": [(5, [4]), (1, [1]), (9, [7])],
    "pairs": [(7, [3, 5]), (1, [2, 1]), (12, [1, 6])],
    "a group": [(6, [4, 1, 7, 3])],
    "mixed": [(3, [2]), (8, [5, 1, 4]), (1, [1, 6]), (5, [3])],
}


def both_batches(
    groups: Groups, *, is_real: Sequence[bool] | None = None, seed: int = 0
) -> tuple[PaddedBatch, SharedPrefixBatch]:
    """The same completions in the same order, in both layouts.

    Padded with one row per prompt and completion, so that groups may differ in size.
    """
    prompts = [tiny.random_ids(p, seed=seed + i) for i, (p, _) in enumerate(groups)]
    completions = [
        [tiny.random_ids(c, seed=seed + 100 * i + k) for k, c in enumerate(lengths)]
        for i, (_, lengths) in enumerate(groups)
    ]
    is_real = [True] * len(groups) if is_real is None else is_real
    owner = [i for i, group in enumerate(completions) for _ in group]
    rows = [prompts[i] for i in owner], [[ids] for group in completions for ids in group]
    padded = padded_batch(*rows, 7, is_real=[is_real[i] for i in owner])
    shared = shared_prefix_batch(prompts, completions, 7, is_real=is_real)
    return padded.to(distributed.device()), shared.to(distributed.device())


def eager(lm: Any) -> Any:
    """The model with transformers' attention written as matrix products."""
    lm.set_attn_implementation("eager")
    return lm


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_gradients_close(model: nn.Module, expected: nn.Module) -> None:
    """Every parameter's, relative to its norm, or to 1 where that is smaller (bias of keys)."""
    grads, expected_grads = gradients(model), gradients(expected)
    tolerance = tiny.gradient_rounding(getattr(expected, "lm", expected))
    assert grads.keys() == expected_grads.keys()
    assert len(expected_grads) > 10
    for name, gradient in expected_grads.items():
        error = float((grads[name] - gradient).norm())
        assert error <= tolerance * max(1.0, float(gradient.norm())), name


@contextmanager
def refused(*phrases: str) -> Iterator[None]:
    with pytest.raises(UserError) as caught:
        yield
    tiny.check_sentence(caught.value, *phrases)
    assert str(caught.value).endswith("use --layout padded.")


def compare_policies(
    family: str,
    groups: Groups,
    temperature: float = 1.0,
    is_recomputed: bool = False,
    shape: dict[str, Any] | None = None,
    **fields: Any,
) -> None:
    """Log-probabilities, entropies, and the gradients of a function of both."""
    padded, shared = both_batches(groups, **fields)
    reference = Policy(eager(tiny.causal_lm(family, is_plain=True, **(shape or {}))))
    policy = Policy(tiny.causal_lm(family, **(shape or {})))
    if is_recomputed:
        policy.train()
        fsdp.enable_gradient_checkpointing(policy.lm)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, *padded.completion_mask.shape, generator=generator)
    weights = weights.to(distributed.device())
    outputs = []
    for model, batch in ((reference, padded), (policy, shared)):
        scores = model(batch, temperature=temperature, with_entropy=True)
        loss = (scores.token_logps * weights[0]).sum() + (scores.entropy * weights[1]).sum()
        (loss + (scores.token_logps / 4).exp().mean()).backward()
        outputs.append(scores)
    for name in ("completion_ids", "completion_mask", "is_real", "slots", "num_tokens"):
        assert torch.equal(getattr(padded, name), getattr(shared, name)), name
    tolerance = tiny.rounding(reference.lm, temperature)
    for a, b in zip(outputs[1][:3], outputs[0][:3], strict=True):  # without the hidden states
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert_gradients_close(policy, reference)


def heads(num_heads: int, num_key_value_heads: int) -> dict[str, Any]:
    shape = {"num_attention_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    return shape | {"width": 8 * num_heads}


OTHERWISE = {"temperature": 0.7, "is_recomputed": True, "is_real": [True, False, True, True]}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    *((family, heads(*n)) for family in ("llama", "qwen2") for n in ((4, 1), (6, 3), (4, 4))),
    *(("gpt2", {"n_layer": n}) for n in (1, 3)),  # the last block is shortened, be it the first
    *(("qwen2", {"num_hidden_layers": n}) for n in (1, 3)),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),  # the second layer's are halved
    ("olmo2", {}),  # has no norm before its attention: the last block is computed whole
    *tiny.SCALED,
]


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        *((family, name, {}) for family in tiny.FAMILIES for name in CASES),
        *((family, "mixed", OTHERWISE | {"seed": 3}) for family in tiny.FAMILIES),
        *((family, "mixed", {"shape": shape}) for family, shape in SHAPES),
    ],
    ids=str,
)
def test_scores_and_gradients_are_those_of_the_padded_layout(family, name, options):
    """At another temperature too, recomputed, with fillers and in other shapes."""
    compare_policies(family, CASES[name], **options)


@settings(max_examples=12, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    family=st.sampled_from(tiny.FAMILIES),
    seed=st.integers(0, 99),
)
def test_any_shape_scores_alike(groups, family, seed):
    compare_policies(family, groups, 1.3, seed=seed)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rewards_and_their_gradients_are_those_of_the_padded_layout(family):
    padded, shared = both_batches(CASES["mixed"])
    reference = RewardModel(eager(tiny.classifier(family, is_plain=True)))
    model = RewardModel(tiny.classifier(family))
    weights = torch.linspace(-1, 2, 7, device=distributed.device())
    outputs = []
    for module, batch in ((reference, padded), (model, shared)):
        rewards = module(batch)
        (rewards * weights).sum().backward()
        outputs.append(rewards)
    assert outputs[0].std() > 0.1
    torch.testing.assert_close(*outputs, rtol=0, atol=tiny.rounding(model.lm))
    assert_gradients_close(model, reference)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_in_the_padded_layout(family):
    """The layouts round apart; neither error is much the larger."""
    padded, shared = both_batches(CASES["mixed"])
    with torch.no_grad():
        exact = Policy(eager(tiny.causal_lm(family, is_plain=True)))(padded).token_logps
    errors, norms = [], []
    for batch in (padded, shared):
        lm = tiny.causal_lm(family).bfloat16()
        fsdp.use_our_modules(lm, tiny.train_config())
        logps = Policy(lm)(batch).token_logps
        assert logps.dtype == torch.float32
        errors.append(float((logps.detach() - exact).abs().mean()))
        logps.sum().backward()
        norms.append(torch.cat([g.float().flatten() for g in gradients(lm).values()]))
    assert 1e-4 < errors[0] < 0.1  # 8 bits, logits of about 10
    assert errors[1] < 2 * errors[0]
    assert float((norms[1] - norms[0]).norm()) < 0.1 * float(norms[0].norm())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_last_block_computes_what_is_read_only(family):
    """Of prompts of 7, 1 and 12 with 8, 3 and 7 tokens behind them: those, and one each before."""
    _, batch = both_batches(CASES["pairs"])
    lm = tiny.causal_lm(family)
    lengths, outputs = [], []
    for block in fsdp.blocks(lm):
        block.mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        block.register_forward_hook(lambda *args: outputs.append(args[-1]))
    with torch.no_grad():
        Policy(lm)(batch)
    assert lengths == [38, 21]
    is_read = torch.zeros(38, dtype=torch.bool)
    is_read[tail_by_hand(CASES["pairs"])] = True
    assert (outputs[1][0].cpu()[~is_read] == 0).all()
    assert (outputs[1][0].cpu()[is_read] != 0).any(-1).all()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_without_a_layout_a_model_goes_on_as_before(family):
    plain, prepared = tiny.causal_lm(family, is_plain=True), tiny.causal_lm(family)
    padded, _ = both_batches(CASES["mixed"])
    outputs = [Policy(lm)(padded).token_logps for lm in (plain, prepared)]
    assert torch.equal(*outputs)
    for logps in outputs:
        logps.sum().backward()
    assert_gradients_close(prepared, plain)
    ids = torch.tensor([tiny.random_ids(9, seed=2)], device=distributed.device())
    drawn = [
        lm.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=1)
        for lm in (plain, prepared)
    ]
    assert torch.equal(*drawn)


def test_an_attention_without_the_layout_is_refused():
    lm = tiny.causal_lm("llama")
    last = fsdp.blocks(lm)[-1].self_attn
    forward = last.forward
    last.forward = lambda *args, layout=None, **options: forward(*args, **options)
    _, batch = both_batches(CASES["pairs"])
    with torch.no_grad(), refused("LlamaAttention is not given the options of its model"):
        Policy(lm)(batch)


def row_by_hand(groups: Groups) -> list[tuple[int, int, int]]:
    """Of each token its prompt, its completion (-1: none) and its place in it, in the row's order.

    If a prompt has several completions, all completions stand behind all prompts.
    """
    has_branches = any(len(lengths) > 1 for _, lengths in groups)
    row: list[tuple[int, int, int]] = []
    behind: list[tuple[int, int, int]] = []
    for i, (prompt, lengths) in enumerate(groups):
        row += [(i, -1, t) for t in range(prompt)]
        tokens = [(i, k, t) for k, length in enumerate(lengths) for t in range(length)]
        (behind if has_branches else row).extend(tokens)
    return row + behind


def visible_by_hand(groups: Groups) -> Tensor:
    """(T, T) bool: who sees whom, written token by token."""
    tokens = row_by_hand(groups)
    visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for a, b in itertools.product(range(len(tokens)), repeat=2):
        (i, k, t), (j, m, s) = tokens[a], tokens[b]
        visible[a, b] = i == j and ((k == m and s <= t) or (m == -1 and k >= 0))
    return visible


def tail_by_hand(groups: Groups) -> Tensor:
    """Places of the last token of each prompt and of all completions."""
    is_tail = [k >= 0 or t == groups[i][0] - 1 for i, k, t in row_by_hand(groups)]
    return torch.tensor(is_tail).nonzero().flatten()


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * 0.4
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value


def layout_of(groups: Groups) -> Layout:
    batch = shared_prefix_batch(
        [[1] * prompt for prompt, _ in groups], [[[2] * c for c in cs] for _, cs in groups], 0
    )
    return batch.to(distributed.device()).layout


GROUPS = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=4
)


def check_attention(
    groups: Groups, num_key_heads: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    """For all queries and for the tails only: outputs and gradients are those of a dense mask."""
    atol = 2e-5 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    visible = visible_by_hand(groups).to(distributed.device())
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 1, 6, len(visible), 8)  # query, key, value and the gradient that comes back
    tensors = torch.randn(shape, generator=generator, dtype=dtype).to(distributed.device())
    originals = [x[:, :n] for x, n in zip(tensors, [6, num_key_heads, num_key_heads], strict=False)]
    exact = [x.double().clone().requires_grad_() for x in originals]
    layout = layout_of(groups)
    tail = tail_by_hand(groups).to(distributed.device())
    for is_tail in (False, True):
        picked = tail if is_tail else torch.arange(len(visible), device=tail.device)
        for x in exact:
            x.grad = None
        repeats = 6 // num_key_heads
        key, value = (x.repeat_interleave(repeats, 1) for x in exact[1:])
        expected = dense_attention(exact[0], key, value, visible)[:, :, picked]
        expected.backward(tensors[3, :, :, picked].double())
        inputs = [x.clone().requires_grad_() for x in originals]
        output = branch_attention(inputs[0][:, :, picked], *inputs[1:], layout, is_tail, 0.4)
        output.backward(tensors[3, :, :, picked])
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol)
        for x, target in zip(inputs, exact, strict=True):
            error = float((x.grad - target.grad).norm())
            assert error <= atol / 2 * max(1.0, float(target.grad.norm())), is_tail


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, num_key_heads=st.sampled_from([6, 2, 1]), seed=st.integers(0, 99))
def test_attention_is_that_of_a_dense_mask(groups, num_key_heads, seed):
    """Completions may be empty, and there may be none; heads may share keys."""
    check_attention(groups, num_key_heads, seed)


@pytest.mark.parametrize("name", CASES)
def test_attention_in_float64_is_that_precise(name):
    check_attention(CASES[name], num_key_heads=2, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_s_kernel_in_float32_is_called_as_it_is_meant(name, monkeypatch):
    """By a stand-in for the kernel that knows its conventions: padded log-sums, and its masks."""
    monkeypatch.setattr(shared_attention, "is_on_cpu", lambda query: False)
    monkeypatch.setattr(shared_attention, "aten", EfficientAttention)
    check_attention(CASES[name], num_key_heads=2)


class EfficientAttention:
    """`_efficient_attention_forward` and `_backward` of a GPU, by products of matrices."""

    @staticmethod
    def weights(query: Tensor, key: Tensor, kind: int, scale: float) -> Tensor:
        """Scores (H, queries, keys) of a range; the mask of kind 2 ends at the last key."""
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool)
        hidden = hidden.triu(1 + len(key) - len(query)) if kind == 2 else ~hidden
        return scores.masked_fill(hidden, -torch.inf)

    @classmethod
    def _efficient_attention_forward(cls, query, key, value, bias, *args: Any, scale: float) -> Any:
        query_ends, key_ends, longest, _, dropout, kind, with_log_sum = args
        assert (bias, dropout, with_log_sum) == (None, 0.0, True)
        output = torch.full_like(query, torch.nan)
        shape = len(query_ends) - 1, query.shape[2], -(-longest // 32) * 32
        log_sum = query.new_full(shape, torch.nan)
        for s, (q, k) in enumerate(cls.ranges(query_ends, key_ends)):
            scores = cls.weights(query[0, q], key[0, k], kind, scale)
            output[0, q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[0, k])
            log_sum[s, :, : q.stop - q.start] = scores.logsumexp(-1)
        return output, log_sum, None, None, longest, longest

    @classmethod
    def _efficient_attention_backward(
        cls, grad, query, key, value, *args: Any, scale: float
    ) -> Any:
        _, output, query_ends, key_ends, longest, _, log_sum, _, _, _, kind, _ = args
        assert log_sum.shape[2] == -(-longest // 32) * 32
        grads = [torch.full_like(x, torch.nan) for x in (query, key, value)]
        for s, (q, k) in enumerate(cls.ranges(query_ends, key_ends)):
            sums = log_sum[s, :, : q.stop - q.start, None]
            shares = (cls.weights(query[0, q], key[0, k], kind, scale) - sums).exp()
            delta = (grad[0, q] * output[0, q]).sum(-1).t()[..., None]
            toward = torch.einsum("qhd,khd->hqk", grad[0, q], value[0, k]) - delta
            toward = toward * shares * scale
            grads[0][0, q] = torch.einsum("hqk,khd->qhd", toward, key[0, k])
            grads[1][0, k] = torch.einsum("hqk,qhd->khd", toward, query[0, q])
            grads[2][0, k] = torch.einsum("hqk,qhd->khd", shares, grad[0, q])
        return *grads, None

    @staticmethod
    def ranges(query_ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
        pairs = [itertools.pairwise(ends.tolist()) for ends in (query_ends, key_ends)]
        return [(slice(*q), slice(*k)) for q, k in zip(*pairs, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 12, 264])
def test_a_gpu_s_kernels_take_the_arguments(dtype, width, monkeypatch):
    """By torch's own checks of shapes, which need no GPU; results lie as compiled code expects."""
    kernels = CheckedKernels()
    monkeypatch.setattr(shared_attention, "aten", kernels)
    batch = shared_prefix_batch([[1] * 5, [2]], [[[3], [4, 5]], [[6]]], 0).to("meta")
    layout, num_tokens = batch.layout, batch.input_ids.shape[1]
    tensors = torch.randn(3, 2, num_tokens, width, dtype=dtype, device="meta")
    query, key, value = tensors.transpose(1, 2)  # heads first in memory, as GPT-NeoX leaves them
    options = {"ends": [layout.segment_ends] * 2, "longest": [layout.longest] * 2}
    options |= {"is_causal": True, "scaling": 0.4}
    inputs = [query, key, value]
    for operator in (range_attention, range_attention_backward):
        results = operator._init_fn(inputs, **options)
        expected = operator(inputs, **options)  # of a meta tensor: by `register_fake`
        for x, target in zip(results, expected, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (target.shape, target.dtype, target.stride())
        inputs = [results[0], *inputs, *results]
    kind = "flash" if dtype == torch.bfloat16 and width == 8 else "efficient"
    assert kernels.called == [f"_{kind}_attention_forward", f"_{kind}_attention_backward"]


class CheckedKernels:
    """A GPU's kernels of attention, called with tensors without values and checked arguments."""

    KINDS = {"int": int, "float": float, "bool": bool, "Tensor": Tensor}
    KINDS |= {"Optional[int]": int, "Optional[Tensor]": (Tensor, type(None))}

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(torch.ops.aten, name).default

        def call(*args: Any, scale: float) -> Any:
            self.called.append(name)
            for value, argument in zip(args, kernel._schema.arguments, strict=False):
                assert isinstance(value, self.KINDS[str(argument.type)]), argument.name
            if name == "_efficient_attention_backward":  # torch 2.13's meta kernel has no `out`
                return *map(torch.empty_like, args[1:4]), None
            return kernel(*args, scale=scale)

        return call


@pytest.mark.parametrize(
    "groups", [[(4, [0, 0]), (3, [0, 0])], [(4, [2, 0, 1]), (3, [1, 0])], [(4, [0]), (3, [2])]]
)
def test_a_completion_may_be_empty(groups):
    """A text that is no token of the reward model, cut off before its stop token."""
    padded, shared = both_batches(groups)
    with torch.no_grad():
        expected = RewardModel(tiny.classifier("gpt2", is_plain=True))(padded)
        model = RewardModel(tiny.classifier("gpt2"))
        rewards = model(shared)
    assert expected.std() > 0.1
    torch.testing.assert_close(rewards, expected, rtol=0, atol=tiny.rounding(model.lm))


def test_gradients_of_a_prompt_s_keys_are_summed_in_float32():
    """Under bfloat16 512 equal ones, each rounded as it is, are 256 times two of them."""
    grads = {}
    for num_branches in (2, 512):
        layout = layout_of([(5, [3] * num_branches)])
        torch.manual_seed(0)
        prompt, branch = torch.randn(3, 1, 2, 5, 8), torch.randn(3, 1, 2, 3, 8)
        row = torch.cat([prompt, branch.repeat(1, 1, 1, num_branches, 1)], 3).bfloat16()
        query, key, value = (x.requires_grad_() for x in row.to(distributed.device()).unbind())
        output = branch_attention(query, key, value, layout, False, 0.4)
        output[:, :, 5:].float().square().sum().backward()
        grads[num_branches] = key.grad[:, :, :5], value.grad[:, :, :5]
    for few, many in zip(grads[2], grads[512], strict=True):
        assert few.abs().max() > 0.1
        torch.testing.assert_close(many / 256, few, rtol=1e-2, atol=1e-6)


def test_large_scores_neither_overflow_nor_vanish():
    """Where one of the two softmaxes holds all the weight."""
    groups: Groups = [(4, [3, 2]), (2, [1, 4])]
    visible = visible_by_hand(groups).to(distributed.device())
    query, key, value = torch.randn(3, 1, 2, len(visible), 8).to(distributed.device())
    weights = torch.randn(1, 2, len(visible), 8, dtype=torch.float64)
    inputs = [(60 * query).requires_grad_(), key.requires_grad_(), value.requires_grad_()]
    expected = dense_attention(*(x.double() for x in inputs), visible)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    output = branch_attention(*inputs, layout_of(groups), False, 0.4)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-4)
    grads = torch.autograd.grad((output.double() * weights).sum(), inputs)
    for gradient, target in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(gradient, target, rtol=1e-4, atol=2e-3)


def test_a_shared_row_by_hand():
    """Prompt 5 6 with completions 8 and 9 3; prompt 7 with completion 4 2."""
    batch = shared_prefix_batch([[5, 6], [7]], [[[8], [9, 3]], [[4, 2]]], 0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 2, 2, 3, 1, 2]]
    assert batch.completion_ids.tolist() == [[8, 0], [9, 3], [4, 2]]
    assert batch.completion_mask.tolist() == [[True, False], [True, True], [True, True]]
    assert batch.predictors.tolist() == [1, 1, 4, 2, 6]
    assert batch.token_index.tolist() == [0, 2, 3, 4, 5]
    assert batch.last.tolist() == [3, 5, 7]
    layout = batch.layout
    assert layout.segment_ends.tolist() == [0, 2, 3, 4, 6, 8]
    assert layout.tail.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert layout.tail_ends.tolist() == [0, 1, 2, 3, 5, 7]
    assert layout.prompt_ends.tolist() == [0, 2, 3]
    assert layout.group_ends.tolist() == [0, 3, 5]
    assert (layout.num_branch, layout.longest, layout.largest) == (5, 4, 3)
    assert int(batch.num_tokens) == 5


@pytest.mark.parametrize("first_layer", [0, 1])
def test_a_window_shorter_than_a_completed_prompt_is_refused(first_layer):
    """One as long as it hides nothing; the prompts of a row together may be longer."""
    fields = {"use_sliding_window": True, "max_window_layers": first_layer}
    _, batch = both_batches([(6, [3, 2]), (4, [1, 2]), (8, [1])])
    policies = [
        Policy(tiny.causal_lm("qwen2", sliding_window=window, **fields)) for window in (9, 8)
    ]
    with torch.no_grad():
        logps = policies[0](batch).token_logps
        torch.testing.assert_close(logps, Policy(tiny.causal_lm("qwen2"))(batch).token_logps)
        with refused("a window of 8 tokens", "completion has 9"):
            policies[1](batch)


def test_a_window_that_is_too_short_is_refused_before_weights_are_read(tmp_path):
    config = tiny.model_config("qwen2", sliding_window=40, use_sliding_window=True)
    config.save_pretrained(tmp_path)
    fields = {"max_prompt_length": 36, "max_completion_length": 8}
    read = functools.partial(load.read_model_config, str(tmp_path), "trunk", None)
    read(tiny.train_config(**fields, layout="padded"))
    read(tiny.train_config(**(fields | {"max_prompt_length": 32})))
    with refused("has a window of 40 tokens"):
        read(tiny.train_config(**fields))
    # A window of 0 is none: as Qwen2-MoE writes it, unless it uses one.
    config = tiny.model_config("qwen2_moe", moe_intermediate_size=16, num_experts=2)
    assert config.sliding_window == 0
    config.save_pretrained(tmp_path)
    read(tiny.train_config(**fields))
    shared_prefix.refuse_unsupported(SimpleNamespace(longest=44), {"sliding_window": 0})


LLAMA_4 = {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2}


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("bloom", "BloomForCausalLM", {"n_layer": 1}),
        ("gemma2", "Gemma2ForCausalLM", {}),  # caps scores
        ("gpt_oss", "GptOssForCausalLM", {}),  # has attention sinks
        ("llama4_text", "Llama4ForCausalLM", LLAMA_4),
    ],
)
def test_an_attention_that_sdpa_cannot_compute_is_refused_in_the_shared_layout(family, name, shape):
    lm = tiny.causal_lm(family, is_plain=True, **shape)
    with refused(f"{name} has an attention of its own"):
        shared_prefix.use_shared_prefix(lm, fsdp.blocks(lm)[-1])
    if family == "llama4_text":
        self_checks.only_tokens_matter(Policy(lm), tiny.train_config(**LENGTHS, layout="padded"))


@pytest.mark.parametrize("option", shared_prefix.UNSUPPORTED)
def test_further_options_of_an_attention_are_refused(option):
    x = torch.randn(1, 2, 10, 8)
    layout = layout_of([(4, [3, 2]), (1, [])])
    with refused(f"asks for {option!r}"):
        shared_prefix.attend(torch.nn.Identity(), x, x, x, None, layout=layout, **{option: 1.0})


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_deep_copy_computes_with_its_own_last_block(family):
    lm = tiny.causal_lm(family)
    copied = copy.deepcopy(lm)
    with torch.no_grad():
        for parameter in fsdp.blocks(copied)[-1].parameters():
            parameter.zero_()
    _, batch = both_batches(CASES["pairs"])
    with torch.no_grad():
        changed, unchanged = Policy(copied)(batch), Policy(lm)(batch)
    assert float((changed.token_logps - unchanged.token_logps).abs().max()) > 0.1


def test_attention_is_never_left_to_cudnn():
    """It is preferred on new GPUs, and gives NaN gradients where a row sees nothing."""
    distributed.start()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


LENGTHS = {"max_prompt_length": 60, "max_completion_length": 8}
CONFIG = tiny.train_config(**LENGTHS)


def refused_layout(module: nn.Module) -> None:
    with refused("changes the scores of"):
        self_checks.only_tokens_matter(module, CONFIG)
    self_checks.only_tokens_matter(module, tiny.train_config(**LENGTHS, layout="padded"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("broken", ["position_ids", "predictors", "last", "layout"])
def test_layouts_agree_refuses_a_wrong_row(family, broken, monkeypatch):
    """Positions that count the row, a shift by one, a look at the other completion."""

    def wrong(*args: Any) -> SharedPrefixBatch:
        batch = batching.shared_prefix_batch(*args)
        if broken == "position_ids":
            batch.position_ids = torch.arange(batch.input_ids.shape[1]).clamp(max=95)[None]
        elif broken == "layout":
            batch.layout.segment_ends = batch.layout.segment_ends[[0, -1]]
            batch.layout.tail_ends = batch.layout.tail_ends[[0, -1]]
        else:
            setattr(batch, broken, getattr(batch, broken) - 1)
        return batch

    monkeypatch.setattr(self_checks, "shared_prefix_batch", wrong)
    is_reward_model = broken == "last"
    make, module = (tiny.classifier, RewardModel) if is_reward_model else (tiny.causal_lm, Policy)
    refused_layout(module(make(family)))


def test_heads_that_a_gpu_does_not_take_are_refused():
    """By what sdpa's own checks ask of its fused kernels (torch 2.13, sdp_utils.cpp)."""
    for dtype, width, words in (
        (torch.float32, 10, ("10 wide", "multiples of 4")),
        (torch.bfloat16, 12, ("12 wide", "multiples of 8")),
    ):
        query: Any = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 2, 5, width))
        with pytest.raises(UserError) as caught:
            shared_prefix.refuse_head_width(query)
        tiny.check_sentence(caught.value, *words)
        query.shape = (1, 2, 5, 64)
        shared_prefix.refuse_head_width(query)


def test_a_model_that_is_dropped_frees_its_memory_at_once():
    """The last block as well, whose forward is another: a frozen reference must not stay behind."""
    lm = tiny.causal_lm("gpt2")
    modules = (lm, lm.transformer.h[0], lm.transformer.h[-1], lm.transformer.wte)
    dropped = [weakref.ref(module) for module in modules]
    del modules
    gc.collect()
    gc.disable()
    try:
        del lm
        assert [reference() for reference in dropped] == [None] * 4
    finally:
        gc.enable()


def test_scores_are_scaled_by_the_width_of_a_head_unless_a_model_says_otherwise() -> None:
    lm = tiny.causal_lm("gpt2")
    batch = shared_prefix_batch([[5, 6], [7]], [[[8], [9, 3]], [[4, 2]]], 0)
    expected, attend = Policy(lm)(batch).token_logps, shared_prefix.attend_by_layout
    seen: list[float] = []

    def without_scale(*args: Any) -> Tensor:
        module, query, key, value, scaling, layout, options = args
        seen.append(scaling * query.shape[-1] ** 0.5)
        return attend(module, query, key, value, None, layout, options)

    with mock.patch.object(shared_prefix, "attend_by_layout", without_scale):
        assert torch.equal(Policy(lm)(batch).token_logps, expected)
    assert seen == pytest.approx([1.0] * len(seen))
    assert seen


def test_a_model_that_hands_no_layout_on_is_refused_unless_it_attends_one_token() -> None:
    """As where a layer calls attention by itself; a step of decoding has one query."""
    mask = torch.empty(shared_prefix.NO_MASK).fill_(0.0)
    for num_queries, width in ((2, 1), (5, 4)):
        x = torch.ones(1, 2, num_queries, width)
        with pytest.raises(UserError, match="Identity is not given the options of its model"):
            shared_prefix.attend(nn.Identity(), x, x, x, mask)
    x = torch.ones(1, 2, 1, 4)
    assert torch.equal(shared_prefix.attend(nn.Identity(), x, x, x, mask)[0], x.transpose(1, 2))


def test_a_mask_without_padding_is_left_out_on_a_cpu_alone() -> None:
    shape = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    assert shared_prefix.mask(**shape, attention_mask=torch.ones(1, 4, dtype=torch.bool)) is None
    there = torch.ones(1, 4, dtype=torch.bool, device="meta")
    kept = shared_prefix.mask(**shape, attention_mask=there, device="meta")
    assert kept is not None
    assert kept.shape == (1, 1, 4, 4)


def test_one_indexer_keeps_a_model_s_own_attention() -> None:
    lm = tiny.causal_lm("gpt2", is_plain=True)
    lm.transformer.h[1].attn.indexer = type("Indexer", (nn.Module,), {})()
    before = lm.config._attn_implementation
    assert not shared_prefix.replace_attention(lm)
    assert lm.config._attn_implementation == before
