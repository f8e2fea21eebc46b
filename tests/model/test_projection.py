"""Claim: the fused projection gives what autograd gives through whole logits, and keeps none.

Targets: `log_softmax` and sums over the vocabulary in float64, with autograd's own gradients; the
KL divergence of two distributions that are written down; the bytes that every operation returns.
About `common.model.projection`.
"""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from common import distributed
from common.batch import padded_batch
from common.forward import Policy, ReferenceStates, RewardModel
from common.model import fsdp
from common.model.projection import Head, Scaling, TokenStatistics, token_statistics

ROWS, WIDTH, VOCAB = 11, 6, 17
OUTPUTS = ("token_logps", "entropy", "kl")


def inputs(
    *, seed: int = 0, rows: int = ROWS, vocab: int = VOCAB, with_bias: bool = True
) -> dict[str, Any]:
    """Hidden states, heads and tokens; the reference has another width than the policy."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    return {
        "hidden": draw(rows, WIDTH),
        "weight": draw(vocab, WIDTH),
        "bias": draw(vocab) if with_bias else None,
        "tokens": torch.randint(0, vocab, (rows,), generator=generator),
        "ref_hidden": draw(rows, WIDTH + 2),
        "ref_weight": 0.7 * draw(vocab, WIDTH + 2),
        "ref_bias": draw(vocab) if with_bias else None,
    }


def run(tensors: dict[str, Any], **options: Any) -> TokenStatistics:
    return token_statistics(
        tensors["hidden"],
        Head(tensors["weight"], tensors["bias"]),
        tensors["tokens"],
        **{"with_entropy": True, "ref_hidden": tensors["ref_hidden"], **options},
        ref_head=Head(tensors["ref_weight"], tensors["ref_bias"]),
    )


def target(tensors: dict[str, Any], temperature: float = 1.0) -> TokenStatistics:
    """The same in the dtype of the inputs, through whole logits and autograd."""

    def logps_of(prefix: str) -> Tensor:
        hidden, weight, bias = (tensors[prefix + name] for name in ("hidden", "weight", "bias"))
        logits = hidden @ weight.T + (0 if bias is None else bias)
        return torch.log_softmax(logits / temperature, -1)

    logps, ref_logps = logps_of(""), logps_of("ref_")
    probabilities = logps.exp()
    return TokenStatistics(
        logps[torch.arange(len(logps)), tensors["tokens"]],
        -(probabilities * logps).sum(-1),
        (probabilities * (logps - ref_logps)).sum(-1),
    )


def trainable(tensors: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Copies of another dtype, of which those of the policy get gradients."""
    copies = {}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype, copy=True)
            tensor.requires_grad_(name in ("hidden", "weight", "bias"))
        copies[name] = tensor
    return copies


def compare(used: tuple[str, ...], tensors: dict[str, Any], **options: Any) -> None:
    """Values, and gradients of a weighted sum of some outputs, against float64."""
    temperature = options.get("temperature", 1.0)
    ours, exact = trainable(tensors, torch.float32), trainable(tensors, torch.float64)
    statistics, expected = run(ours, **options), target(exact, temperature)
    generator = torch.Generator().manual_seed(9)
    for name in OUTPUTS:
        value = getattr(statistics, name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(expected, name), rtol=1e-5, atol=1e-5)
    weights = {name: torch.randn(len(tensors["tokens"]), generator=generator) for name in OUTPUTS}
    for outputs in (statistics, expected):
        sum((getattr(outputs, name) * weights[name]).sum() for name in used).backward()
    for name in ("hidden", "weight", "bias"):
        if tensors[name] is not None:
            gradient = exact[name].grad
            tolerance = 1e-5 * max(1.0, float(gradient.abs().amax()) if gradient.numel() else 0.0)
            torch.testing.assert_close(
                ours[name].grad.double(), gradient, rtol=0, atol=tolerance, msg=name
            )
    assert all(t is None or t.grad is None for n, t in ours.items() if n.startswith("ref_"))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize(
    "used", [c for n in (1, 2, 3) for c in itertools.combinations(OUTPUTS, n)], ids="+".join
)
def test_values_and_gradients_are_those_of_autograd(used, temperature, with_bias):
    """Of each output alone and of any together: what no loss uses adds nothing."""
    compare(used, inputs(with_bias=with_bias), temperature=temperature)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    vocab=st.integers(1, 30),
    chunk=st.integers(1, 100),
    used=st.sampled_from([("token_logps",), ("entropy", "kl"), OUTPUTS]),
    seed=st.integers(0, 99),
)
def test_any_shape(rows, vocab, chunk, used, seed):
    compare(used, inputs(seed=seed, rows=rows, vocab=vocab), chunk_numbers=chunk, temperature=1.7)


def test_outputs_that_were_not_asked_for_are_empty():
    tensors = trainable(inputs(), torch.float32)
    head = Head(tensors["weight"], tensors["bias"])
    plain = token_statistics(tensors["hidden"], head, tensors["tokens"])
    assert [len(values) for values in plain] == [ROWS, 0, 0]
    with_entropy = token_statistics(tensors["hidden"], head, tensors["tokens"], with_entropy=True)
    assert [len(values) for values in with_entropy] == [ROWS, ROWS, 0]
    assert torch.equal(plain.token_logps, with_entropy.token_logps)


def test_bfloat16_inputs_are_projected_in_float32():
    rounded = trainable(inputs(seed=4), torch.bfloat16)
    upcast = trainable(
        {n: t if t is None else t.detach() for n, t in rounded.items()}, torch.float32
    )
    from_bfloat16, expected = run(rounded, temperature=0.8), run(upcast, temperature=0.8)
    for a, b in zip(from_bfloat16, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    for outputs in (from_bfloat16, expected):
        sum((values * values).sum() for values in outputs).backward()
    for name in ("hidden", "weight", "bias"):
        assert rounded[name].grad.dtype == torch.bfloat16
        assert torch.equal(rounded[name].grad, upcast[name].grad.bfloat16())


def test_logits_far_from_0_lose_nothing():
    """GPT-2's lie near -100, and one may be far above the others."""
    tensors = inputs()
    tensors["bias"] = tensors["bias"] - 100
    tensors["ref_bias"] = tensors["ref_bias"] + 300
    compare_loosely = trainable(tensors, torch.float32)
    for a, b in zip(run(compare_loosely), target(trainable(tensors, torch.float64)), strict=True):
        # 300 and its logarithm of a sum are each rounded to 3e-5.
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-4)
    tensors["hidden"] = 200 * tensors["hidden"]  # one token has all the probability
    statistics = run(trainable(tensors, torch.float32))
    assert all(values.isfinite().all() for values in statistics)
    assert statistics.entropy.abs().max() < 1e-3


class Products(TorchDispatchMode):
    """Notes each product of float32 matrices: with a vocabulary or not, and a GPU's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS and args[-1].dtype == torch.float32:
            shapes = {size for argument in args for size in argument.shape}
            matrix = "head" if shapes & {VOCAB, tiny.model_config("llama").vocab_size} else "rest"
            self.seen.append((matrix, torch.backends.cuda.matmul.fp32_precision))
        return func(*args, **(kwargs or {}))


PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk_numbers", [0, 3 * VOCAB])  # kept, and made again in backward
def test_the_vocabulary_head_multiplies_in_tf32_under_bfloat16_alone(dtype, chunk_numbers) -> None:
    tensors = trainable(inputs(), dtype)
    with Products() as products:
        statistics = run(tensors, chunk_numbers=chunk_numbers)
        forward = len(products.seen)
        sum(values.sum() for values in statistics).backward()
    precision = "tf32" if dtype == torch.bfloat16 else "none"
    chunks = 4 if chunk_numbers else 1
    assert forward == 2 * chunks
    # In backward the reference's logits, both gradients, and the logits where none are kept.
    num_products = forward + (4 if chunk_numbers else 3) * chunks
    assert products.seen == [("head", precision)] * num_products
    assert torch.backends.cuda.matmul.fp32_precision == "none"


@pytest.mark.usefixtures("process_group")
def test_of_a_model_under_bfloat16_only_the_vocabulary_head_multiplies_in_tf32() -> None:
    """The reward head has float32 operands."""
    config, mesh = tiny.train_config(bf16=True, layout="padded"), distributed.mesh()
    batch = padded_batch([[1, 2, 3]], [[[5, 6, 2, 9]]], 7).to(distributed.device())
    policy = fsdp.shard(Policy(tiny.causal_lm("llama", is_plain=True)), config, mesh)
    head = Head(policy.lm.lm_head.weight.detach(), None)
    with Products() as products, torch.no_grad():
        policy(batch, reference=ReferenceStates(policy(batch, with_hidden=True).hidden, head))
    assert products.seen == [("head", "tf32")] * 3
    reward = RewardModel(tiny.classifier("llama", is_plain=True))
    reward = fsdp.shard(reward, config, mesh, float32_modules=[reward.lm.score])
    with Products() as products, torch.no_grad():
        reward(batch)
    assert products.seen == [("rest", "none")]


def peak_bytes(rows: int, vocab: int, chunk_numbers: int, with_kl: bool) -> tuple[int, int]:
    """Most bytes allocated in forward and backward, and what is held between the two."""
    tensors = trainable(inputs(rows=rows, vocab=vocab), torch.float32)
    options: dict[str, Any] = {"chunk_numbers": chunk_numbers, "temperature": 0.8}
    head = Head(tensors["weight"], tensors["bias"])

    def forward() -> Tensor:
        if with_kl:
            return sum(values.sum() for values in run(tensors, **options))
        return token_statistics(tensors["hidden"], head, tensors["tokens"], **options)[0].sum()

    peaks = []
    for passes in ("forward", "both"):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = forward()
            if passes == "both":
                loss.backward()
        events = profiler.profiler.kineto_results.events()
        in_order = sorted(events, key=lambda event: event.start_ns())
        sizes = [event.nbytes() for event in in_order if event.name() == "[memory]"]
        totals = list(itertools.accumulate(sizes))
        peaks.append(totals[-1] if passes == "forward" else max(totals))
        del loss
    return peaks[1], peaks[0]


@pytest.mark.parametrize("with_kl", [False, True])
def test_memory_does_not_grow_with_rows_times_vocabulary(with_kl):
    vocab, rows_at_once = 2000, 4
    chunk = rows_at_once * vocab
    logits_bytes = 4 * 400 * vocab
    few, many = (peak_bytes(rows, vocab, chunk, with_kl) for rows in (40, 400))
    per_row = 4 * 40 * 360  # 40 numbers for each further row: a few vectors of the width
    for large, small in zip(many, few, strict=True):
        assert large < small + per_row < logits_bytes / 5
    whole = peak_bytes(400, vocab, 400 * vocab, with_kl)  # the control: small batches keep theirs
    assert min(whole) >= logits_bytes


def test_what_a_config_says_of_its_logits_is_multiplied_up() -> None:
    config = SimpleNamespace(logit_scale=0.25, lm_head_multiplier=6.0, logits_scaling=4.0)
    assert Scaling.of(config) == (0.375, 0.0)
    assert Scaling.of(SimpleNamespace(logit_scale=None, final_logit_softcapping=30.0)) == (1, 30)
