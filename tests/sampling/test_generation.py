"""Claim: the sampler draws from the policy's own distribution, and a draw is a function.

Targets: transformers' `generate`, frequencies by enumeration (chi-square) and the scorer's
log-probabilities. A completion is decided by (seed, step, prompt, sample) alone. Sampling on
several ranks is in `test_fsdp`. About `common.sampling.sampler`, `common.sampling.decode` and
`common.sampling.shared`.
"""

import math
import random
from typing import Any

import pytest
import scipy.stats
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from common import distributed, noise
from common.batch import padded_batch
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp, shared_prefix
from common.model.rollout_copy import PackedLinear
from common.sampling import decode as decoding
from common.sampling import sampler as generation
from common.sampling import shared
from common.sampling.decode import Settings, inverse_cdf, restrict
from common.sampling.sampler import Rollouts, Sampler
from common.text.example import Example

pytestmark = pytest.mark.usefixtures("process_group")
STOP = 0
MANY_STOPS = tuple(range(0, 61, 6))  # rows end at many lengths
EXAMPLES = tiny.ragged_examples([(n,) for n in (9, 1, 14, 4, 9, 2, 6)])
LAYOUTS = ("shared_prefix", "padded")


def new_sampler(lm: Any, *, stop_ids: tuple[int, ...] = (STOP,), **fields: Any) -> Sampler:
    limits = {"max_completion_length": 12, "generation_batch_size": 64}
    return Sampler(Policy(lm), tiny.vocabulary(stop_ids), tiny.train_config(**(limits | fields)))


def run_decode(
    lm: Any,
    prompts: list[list[int]],
    num_samples: int,
    max_completion_length: int = 8,
    seed: int = 3,
    **options: Any,
) -> Rollouts:
    rows, samples = torch.arange(len(prompts)), range(num_samples)
    uniforms = generation.uniforms(seed, rows, samples, max_completion_length)
    options = {"stop_ids": [STOP], "pad_id": 1} | options
    with torch.no_grad():
        return Rollouts(*decoding.decode(lm, prompts, uniforms, Settings(**options)))


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return tiny.causal_lm("gpt2")


def generate(
    lm: Any, prompts: list[list[int]], stop_ids: list[int], length: int
) -> list[list[int]]:
    """Greedy completions by transformers' `generate`, one unpadded prompt at a time."""
    completions = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=distributed.device())
        output = lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=stop_ids or None,
            pad_token_id=1,
        )
        completions.append(output[0, len(prompt) :].tolist())
    return completions


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_completions_are_those_of_generate(family):
    plain = tiny.causal_lm(family, is_plain=True)
    prompts = [example.prompt_ids for example in EXAMPLES]
    endless = generate(plain, prompts, [], 12)
    assert all(len(completion) == 12 for completion in endless)
    stop_ids = [endless[0][4], endless[2][0]]  # tokens that end some rows early and not all
    expected = generate(plain, prompts, stop_ids, 12)
    lengths = {len(completion) for completion in expected}
    assert len(lengths) >= 3
    assert max(lengths) == 12
    for layout, at_once in (*((layout, n) for layout in LAYOUTS for n in (1, 64)), (LAYOUTS[0], 3)):
        sampler = new_sampler(
            plain if layout == "padded" else tiny.causal_lm(family),
            stop_ids=tuple(stop_ids),
            generation_batch_size=at_once,
            layout=layout,
        )
        rollouts = sampler.sample(EXAMPLES, temperature=0)
        assert rollouts.completion_ids == expected
        assert rollouts.has_stop.tolist() == [row[-1] in stop_ids for row in expected]


def test_greedy_logps_are_of_the_distribution_at_temperature_1(gpt2):
    rollouts = new_sampler(gpt2).sample(EXAMPLES, temperature=0)
    assert_scorer_agrees(gpt2, EXAMPLES, rollouts, num_samples=1, temperature=1.0)


def chi_square_p(observed: Tensor, probabilities: Tensor) -> float:
    """P-value of counts (K,) under probabilities (K,); cells that expect below 5 are pooled."""
    expected = probabilities.double() * observed.sum()
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(scipy.stats.chisquare(observed, expected).pvalue)


def next_probabilities(lm: Any, prompt: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Exact probabilities (V,) of the first token, and (V, V) of the second behind each first."""
    ids = torch.tensor([[*prompt, first] for first in range(lm.config.vocab_size)])
    with torch.no_grad():
        logits = lm(ids.to(distributed.device())).logits.double().cpu() / temperature
    return logits[0, -2].softmax(-1), logits[:, -1].softmax(-1)


def two_token_probabilities(lm: Any, prompt: list[int], temperature: float) -> Tensor:
    """Exact joint probabilities (V, V) of the first two tokens; a first stop token ends there.

    In row STOP the whole mass is in column 0: a completion that stopped has no second token.
    """
    first, second = next_probabilities(lm, prompt, temperature)
    second[STOP] = torch.eye(len(first), dtype=torch.float64)[0]
    return first[:, None] * second


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_tokens_have_the_exact_frequencies(temperature, layout):
    vocab_size, num_samples = 12, 4000
    lm = tiny.causal_lm("llama", vocab_size=vocab_size)
    prompts = [[3, 7, 1, 1], [5]]  # the second one is padded on the left
    rollouts = run_decode(
        lm,
        prompts,
        num_samples,
        max_completion_length=2,
        temperature=temperature,
        seed=11,
        layout=layout,
    )
    for i, prompt in enumerate(prompts):
        probabilities = two_token_probabilities(lm, prompt, temperature)
        counts = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
        for ids in rollouts.completion_ids[i * num_samples : (i + 1) * num_samples]:
            counts[ids[0], ids[1] if len(ids) > 1 else 0] += 1
        assert chi_square_p(counts.sum(1), probabilities.sum(1)) > 1e-3
        second, second_probabilities = counts.sum(0), probabilities.sum(0)
        assert chi_square_p(second, second_probabilities) > 1e-3
        assert chi_square_p(counts.flatten(), probabilities.flatten()) > 1e-3  # jointly
        # The test has power: these are not the frequencies of a slightly warmer policy.
        warmer = two_token_probabilities(lm, prompt, temperature * 1.2)
        assert chi_square_p(counts.flatten(), warmer.flatten()) < 1e-6


def kept_by_hand(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities (V,) of the tokens that may be drawn, added one by one from the likeliest."""
    kept = torch.zeros_like(probabilities)
    order = sorted(range(len(probabilities)), key=lambda token: -float(probabilities[token]))
    order = order[: top_k or None]
    total, so_far = float(probabilities[order].sum()), 0.0
    for token in order:
        kept[token] = probabilities[token]
        so_far += float(probabilities[token]) / total
        if so_far >= top_p:
            break
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(3, 1.0, 1.0), (0, 0.7, 1.0), (5, 0.8, 2.0)]
)
def test_restricted_tokens_have_the_exact_frequencies(top_k, top_p, temperature):
    """Of both tokens; the log-probabilities that are handed back are of the whole distribution."""
    vocab_size, num_samples, prompt = 12, 4000, [3, 7, 1, 1]
    lm = tiny.causal_lm("qwen2", vocab_size=vocab_size)
    rollouts = run_decode(
        lm,
        [prompt],
        num_samples,
        max_completion_length=2,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=5,
        stop_ids=[99],
    )
    first, second = next_probabilities(lm, prompt, temperature)
    allowed = kept_by_hand(first, top_k, top_p)
    joint = torch.stack(
        [p * kept_by_hand(q, top_k, top_p) for p, q in zip(allowed, second, strict=True)]
    )
    counts = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for (a, b), logps in zip(rollouts.completion_ids, rollouts.token_logps, strict=True):
        counts[a, b] += 1
        expected = torch.stack([first[a].log(), second[a, b].log()]).float()
        torch.testing.assert_close(logps, expected, rtol=0, atol=1e-4)
    assert 1 < (allowed > 0).sum() < vocab_size
    assert (counts[joint == 0] == 0).all()
    assert chi_square_p(counts[joint > 0], joint[joint > 0]) > 1e-3
    assert chi_square_p(counts.sum(1)[allowed > 0], allowed[allowed > 0]) > 1e-3


def test_restrict_by_hand():
    """Shares 0.5, 0.25, 0.125, 0.125: a share that is reached exactly needs no further token."""
    logps = torch.tensor([[0.125, 0.5, 0.125, 0.25], [0.25, 0.25, 0.25, 0.25]]).log()

    def kept(top_k: int, top_p: float) -> list[list[int]]:
        restricted = restrict(logps, top_k, top_p)
        is_kept = restricted > -torch.inf
        assert torch.equal(restricted[is_kept], logps[is_kept])  # not normalised again
        return [row.nonzero().flatten().tolist() for row in is_kept]

    assert kept(0, 1.0) == kept(4, 1.0) == kept(9, 1.0) == [[0, 1, 2, 3]] * 2
    assert kept(1, 1.0)[0] == [1]
    assert kept(2, 1.0)[0] == [1, 3]
    assert kept(0, 0.5)[0] == [1]
    assert kept(0, 0.51)[0] == [1, 3]
    assert kept(0, 0.75)[0] == [1, 3]
    assert len(kept(0, 0.8)[0]) == 3
    assert [len(row) for row in kept(0, 1e-9)] == [1, 1]  # never none
    assert [len(row) for row in kept(0, 0.5)] == [1, 2]
    # Of the two likeliest, 0.5 and 0.25, the first holds two thirds.
    assert kept(2, 0.66)[0] == [1]
    assert kept(2, 0.67)[0] == [1, 3]
    assert torch.equal(logps[1].exp(), torch.full((4,), 0.25))  # the input is left as it was


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_has_diverged_is_named_and_draws_no_token_that_is_none(layout, temperature):
    lm = tiny.causal_lm("gpt2", is_plain=layout == "padded")
    lm.get_output_embeddings().weight.data.fill_(math.nan)
    with pytest.raises(RuntimeError, match="scores that are nan"):
        run_decode(lm, [[5, 6], [7]], num_samples=2, layout=layout, temperature=temperature)


def test_draw_never_gives_a_token_of_probability_zero_and_reaches_the_ends():
    logps = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5, 0.0]).log()
    edges = [5e-324, 1e-300, 2.0**-53, 0.5, 0.5 + 2.0**-53, 1 - 2.0**-53]
    uniforms = torch.tensor(edges, dtype=torch.float64)
    uniforms = torch.cat([uniforms, noise.uniform(0, torch.arange(1000))])
    drawn = inverse_cdf(logps.expand(len(uniforms), -1), uniforms)
    assert set(drawn.tolist()) == {1, 4}
    assert drawn[:6].tolist() == [1, 1, 1, 1, 4, 4]
    certain = torch.full((1, 50), -torch.inf)
    certain[0, 49] = 0.0
    assert inverse_cdf(certain, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 49
    # float32 log-probabilities of many tokens sum to 1 up to rounding; both ends are drawn.
    num_tokens = 50_000
    logps = torch.full((2, num_tokens), math.log(1 / num_tokens) - 1e-4)  # they sum to 0.9999
    uniforms = torch.tensor([1e-12, 1 - 1e-12], dtype=torch.float64)
    assert inverse_cdf(logps, uniforms).tolist() == [0, num_tokens - 1]


def assert_scorer_agrees(
    lm: Any, examples: list[Example], rollouts: Rollouts, *, num_samples: int, temperature: float
) -> None:
    ids = rollouts.completion_ids
    groups = [ids[i : i + num_samples] for i in range(0, len(ids), num_samples)]
    batch = padded_batch([example.prompt_ids for example in examples], groups, 1)
    batch = batch.to(distributed.device())
    with torch.no_grad():
        logps = Policy(lm)(batch, temperature=temperature).token_logps
    for sampled, mask, row in zip(
        rollouts.token_logps, rollouts.mask, tiny.per_row(logps, batch.completion_mask), strict=True
    ):
        torch.testing.assert_close(sampled[mask], row, rtol=0, atol=tiny.rounding(lm, temperature))
        assert (sampled[~mask] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "shape", "temperature"),
    [
        *((family, {}, temperature) for family in tiny.FAMILIES for temperature in (1.0, 0.6)),
        *(("llama", {"num_key_value_heads": 1}, temperature) for temperature in (1.0, 0.6)),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, 0.6),
        ("gpt2", {"scale_attn_weights": False}, 1.0),
        ("gpt2", {"activation_function": "relu", "n_inner": 24}, 1.0),
        *((family, shape, 0.6) for family, shape in tiny.SCALED),
    ],
)
def test_sampled_logps_are_those_of_the_scorer(family, shape, temperature, layout):
    sampler = new_sampler(tiny.causal_lm(family, **shape), stop_ids=MANY_STOPS, layout=layout)
    rollouts = sampler.sample(EXAMPLES, num_samples=4, temperature=temperature)
    assert len({len(ids) for ids in rollouts.completion_ids}) > 5  # rows left in between
    plain = tiny.causal_lm(family, is_plain=True, **shape)
    assert_scorer_agrees(plain, EXAMPLES, rollouts, num_samples=4, temperature=temperature)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_batch_size_layout_and_companions_change_no_completion(family):
    lm = tiny.causal_lm(family)

    def sample(examples: list[Example], **fields: Any) -> Rollouts:
        sampler = new_sampler(lm, stop_ids=MANY_STOPS, **fields)
        return sampler.sample(examples, num_samples=3, step=2)

    whole = sample(EXAMPLES)
    assert len({len(ids) for ids in whole.completion_ids}) > 5
    for fields in (
        {"generation_batch_size": 1},  # the samples of a prompt come apart
        {"generation_batch_size": 7},
        {"generation_batch_size": 2},
        {"layout": "padded"},
        {"layout": "padded", "generation_batch_size": 4},
    ):
        rollouts = sample(EXAMPLES, **fields)
        assert rollouts.completion_ids == whole.completion_ids
        assert torch.equal(rollouts.has_stop, whole.has_stop)
    shuffled = list(range(len(EXAMPLES)))
    random.Random(0).shuffle(shuffled)
    rollouts = sample([EXAMPLES[i] for i in shuffled])
    for place, i in enumerate(shuffled):
        assert (
            rollouts.completion_ids[3 * place : 3 * place + 3]
            == (whole.completion_ids[3 * i : 3 * i + 3])
        )


def test_seed_step_prompt_and_sample_each_change_the_completion(gpt2):
    def sample(seed: int = 0, step: int = 0) -> list[list[int]]:
        twin = Example(99, "", EXAMPLES[0].prompt_ids, [], {})  # the same prompt in another row
        sampler = new_sampler(gpt2, seed=seed)
        return sampler.sample([EXAMPLES[0], twin], num_samples=2, step=step).completion_ids

    base = sample()
    assert sample() == base
    assert len({tuple(ids) for ids in base}) == 4  # two rows, two samples
    for other in (sample(seed=1), sample(step=1)):
        assert all(a != b for a, b in zip(base, other, strict=True))


@pytest.mark.parametrize("stop_ids", [(12, STOP), MANY_STOPS])
def test_completions_end_with_their_first_stop_token(gpt2, stop_ids):
    prompts = [example.prompt_ids for example in EXAMPLES]
    length = 20
    # pad_id is a stop token, as for GPT-2: what pads a finished row must not count.
    rollouts = run_decode(
        gpt2, prompts, 6, stop_ids=stop_ids, max_completion_length=length, pad_id=stop_ids[0]
    )
    assert len(rollouts.completion_ids) == len(prompts) * 6
    for ids, logps, has_stop in zip(
        rollouts.completion_ids, rollouts.token_logps, rollouts.has_stop.tolist(), strict=True
    ):
        assert 1 <= len(ids) <= length
        assert (logps[: len(ids)] < 0).all()
        assert (logps[len(ids) :] == 0).all()
        assert not any(token in stop_ids for token in ids[:-1])
        assert has_stop == (ids[-1] in stop_ids)
        assert has_stop or len(ids) == length
    assert {True, False} == set(rollouts.has_stop.tolist())


@pytest.mark.parametrize("stop_ids", [(STOP,), MANY_STOPS])
def test_every_token_reports_its_part_of_the_completions(gpt2, stop_ids):
    """In two batches, of a prompt's first 4 samples and of its last one; stops end them early."""
    parts: list[float] = []
    sampler = new_sampler(gpt2, stop_ids=stop_ids, generation_batch_size=4)
    rollouts = sampler.sample(EXAMPLES[:1], num_samples=5, report=parts.append)
    longest = [int(rollouts.lengths[rows].max()) for rows in (slice(0, 4), slice(4, 5))]
    assert len(parts) == sum(longest)
    assert parts[0] == pytest.approx(4 / 12)  # of at most 12 tokens
    assert sum(parts[: longest[0]]) == pytest.approx(4)
    assert sum(parts) == pytest.approx(5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoding_ends_when_every_row_has_stopped(family, layout):
    """No forward pass after the last row's stop token, and finished rows leave the batch."""
    lm = tiny.causal_lm(family)
    shapes = []

    def note(_: Any, args: tuple[Tensor]) -> None:
        shapes.append(tuple(args[0].shape))

    handle = lm.get_input_embeddings().register_forward_pre_hook(note)
    prompts = [example.prompt_ids for example in EXAMPLES]
    rollouts = run_decode(
        lm, prompts, 8, stop_ids=MANY_STOPS, max_completion_length=80, layout=layout
    )
    handle.remove()
    assert rollouts.has_stop.all()
    # A prompt is prefilled once for all its samples: side by side, or in a row without padding.
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    assert shapes[0] == ((len(prompts), longest) if layout == "padded" else (1, total))
    rows = [math.prod(shape) for shape in shapes[1:]]  # one token of each
    assert rows[0] <= len(prompts) * 8
    assert len(shapes) == max(map(len, rollouts.completion_ids))
    assert rows[-1] < 6
    assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("num_samples", [1, 5])
def test_the_keys_of_a_prompt_are_kept_once(family, num_samples, monkeypatch):
    """Numbers in the cache: a prompt's are as many for 1 sample as for 5, per key head."""
    caches = []
    plain_decoder = shared.SharedDecoder

    def noted(*args: Any) -> Any:
        decoder = plain_decoder(*args)
        caches.append(decoder.cache)
        return decoder

    monkeypatch.setattr(decoding, "SharedDecoder", noted)
    lm, length = tiny.causal_lm(family), 6
    prompts = [[5] * 9, [6] * 4, [7] * 9]
    run_decode(lm, prompts, num_samples, stop_ids=[99], max_completion_length=length)
    (cache,) = caches
    width = 8 * (4 if family == "gpt2" else 2)  # numbers of a token's keys in one layer
    for samples, prompt in zip(cache.sample_keys.values(), cache.prompt_keys.values(), strict=True):
        assert [tensor.numel() for tensor in prompt] == [3 * 9 * width] * 2
        assert [tensor.numel() for tensor in samples] == [3 * num_samples * length * width] * 2
    assert len(cache.prompt_keys) == 2  # layers


def test_fixed_shapes_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a graph on a GPU: keys of all columns that are filled later are masked.

    80 tokens of 6 samples, more than the first width; after 70 of them one prompt's sample stops.
    """
    lm = tiny.causal_lm("llama", max_position_embeddings=128)
    prompts = [[5, 6, 7] * 3, [6] * 4]
    with torch.no_grad():
        growing = shared.SharedDecoder(lm, prompts, 3, 80)
        monkeypatch.setattr(shared, "has_fixed_shapes", lambda device: True)
        fixed = shared.SharedDecoder(lm, prompts, 3, 80)
        tokens, widths = torch.tensor([3, 9, 11, 4, 5, 8]), set()
        for position in range(80):
            if position == 70:
                kept = torch.tensor([0, 2, 3, 4, 5])
                tokens = tokens[growing.keep(kept)]
                fixed.keep(kept)
            logits = growing.step(tokens)
            torch.testing.assert_close(fixed.step(tokens), logits, rtol=0, atol=tiny.rounding(lm))
            tokens, widths = logits.argmax(-1), widths | {fixed.cache.width}
    assert widths == {64, 80}


@pytest.fixture
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As only on a GPU: `torch.bmm` of bfloat16 numbers with a float32 result."""
    plain = torch.bmm

    def bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            plain_product = plain(a.as_subclass(Tensor).to(out_dtype), b.to(out_dtype))
        return tiny.on_gpu(plain_product)

    monkeypatch.setattr(torch, "bmm", bmm)


def one_token(
    dtype: torch.dtype, prompts: list[list[int]], scale: float, kept: list[int]
) -> tuple[Tensor, Tensor, "Operators", int]:
    """Attention of one layer for the next token of some of 3 samples of each prompt.

    Returns:
        It as on a GPU; it in float64, from the same keys; what was run; numbers of all prompts.
    """
    lm = tiny.causal_lm("llama").to(dtype)
    with torch.no_grad():
        cache = shared.SharedDecoder(lm, prompts, 3, 8).cache
    cache.keep(torch.tensor(kept))
    generator = torch.Generator().manual_seed(0)
    query = scale * torch.randn(len(kept), 4, 1, 8, generator=generator)
    key, value = torch.randn(2, len(kept), 2, 1, 8, generator=generator).to(dtype)
    cache.grow()
    cache.append()
    with Operators() as ran:
        attended = cache.attend(0, tiny.on_gpu(query.to(dtype)), key, value, 0.4)
    expected = []
    for row, i in enumerate(kept):
        n = i // 3
        seen = [tensor[n][:, : len(prompts[n])] for tensor in cache.prompt_keys[0]]  # (H', P, d)
        seen = [torch.cat([a, b[row]], 1) for a, b in zip(seen, (key, value), strict=True)]
        keys, values = (x.double().repeat_interleave(2, 0) for x in seen)  # (H, P + 1, d)
        expected.append((query[row].to(dtype).double() @ keys.mT * 0.4).softmax(-1) @ values)
    numbers = cache.prompt_keys[0][0].numel()
    return attended.as_subclass(Tensor).double(), torch.stack(expected), ran, numbers


@pytest.mark.usefixtures("products_in_float32")
@pytest.mark.parametrize(
    ("dtype", "scale", "bounds"),
    [
        (torch.float32, 1.0, (0, 1e-5)),
        (torch.bfloat16, 1.0, (0, 2e-2)),
        # Scores about 100 would be 0.25 off as bfloat16, and the attention 0.25 of itself.
        (torch.bfloat16, 60.0, (1e-2, 1e-2)),
    ],
)
@pytest.mark.parametrize("kept", [[*range(6)], [0, 1, 5]])
def test_a_token_copies_no_prompt_on_a_gpu_and_scores_are_float32(dtype, scale, bounds, kept):
    """Its products read the prompts' keys and values where they lie, and they are few."""
    prompts = [list(range(2, 42)), list(range(3, 20))]
    attended, expected, ran, num_numbers = one_token(dtype, prompts, scale, kept)
    torch.testing.assert_close(attended, expected, rtol=bounds[0], atol=bounds[1])
    assert max(ran.copied, default=0) < num_numbers
    assert ran.count <= 21


class Operators(TorchDispatchMode):
    """Counts operators that compute something, and the numbers in each copy of a tensor."""

    def __enter__(self) -> "Operators":
        self.count = 0
        self.copied: list[int] = []
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view and func.overloadpacket is not torch.ops.aten._unsafe_view
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            self.copied.append(result.numel())
        return result


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_few_numbers_of_rows_go_on_on_a_gpu(data):
    """All that have not finished, in order: on a CPU no others; elsewhere a half, a quarter ..."""
    num_rows = data.draw(st.integers(1, 70))
    sizes = [num_rows]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    num_left = data.draw(st.sampled_from(sizes))
    finished = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=num_left, max_size=num_left))
    )
    finished[data.draw(st.integers(0, num_left - 1))] = False
    live = (~finished).nonzero().squeeze(1).tolist()
    on_cpu = decoding.rows_to_keep(finished, num_rows, 0)
    on_gpu = decoding.rows_to_keep(tiny.on_gpu(finished), num_rows, decoding.CHECK_EVERY - 1)
    assert (on_cpu is None) == (len(live) > 0.75 * num_left)
    assert on_cpu is None or on_cpu.tolist() == live
    smallest = min(size for size in sizes if size >= len(live))
    kept = list(range(num_left)) if on_gpu is None else on_gpu.tolist()
    assert len(kept) == smallest or num_left == smallest
    assert kept == sorted(set(kept))
    assert set(live) <= set(kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_that_stay_though_they_have_finished_change_nothing(family, layout, monkeypatch):
    lm, prompts = tiny.causal_lm(family), [example.prompt_ids for example in EXAMPLES]
    options = {"stop_ids": MANY_STOPS, "max_completion_length": 30, "layout": layout}
    expected = run_decode(lm, prompts, 4, **options)
    plain, sizes = decoding.rows_to_keep, set()

    def as_on_a_gpu(finished: Tensor, num_rows: int, position: int) -> Tensor | None:
        sizes.add(len(finished))
        return plain(tiny.on_gpu(finished), num_rows, position)

    monkeypatch.setattr(decoding, "rows_to_keep", as_on_a_gpu)
    rollouts = run_decode(lm, prompts, 4, **options)
    assert rollouts.completion_ids == expected.completion_ids
    logps = (rollouts.token_logps, expected.token_logps)
    torch.testing.assert_close(*logps, rtol=0, atol=tiny.rounding(lm))
    assert {28} < sizes <= {28, 14, 7, 4, 2, 1}


# ---- what is decoded together --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_once", "num_samples", "expected"),
    [(64, 8, (8, 8)), (7, 3, (2, 3)), (3, 3, (1, 3)), (2, 3, (1, 2)), (1, 9, (1, 1))],
)
def test_what_is_decoded_at_once_fills_the_limit(at_once, num_samples, expected):
    config = tiny.train_config(generation_batch_size=at_once)
    assert generation.decoded_at_once(num_samples, config) == expected


def test_the_table_shows_texts_without_the_stop_token_and_why_a_row_stopped(gpt2):
    words = tiny.tokenizer()(" lost the key", add_special_tokens=False)["input_ids"]
    rollouts = Rollouts.of([[*words, STOP], words], [], [True, False])
    assert rollouts.texts(tiny.tokenizer()) == [" lost the key"] * 2
    sampler = new_sampler(gpt2)
    greedy = sampler.table(EXAMPLES[:2])
    assert [row["prompt"] for row in greedy] == ["prompt 0", "prompt 1"]
    completed = sampler.sample(EXAMPLES[:2], temperature=0)
    assert [row["completion"] for row in greedy] == completed.texts(tiny.tokenizer())
    rollouts = Rollouts.of([[4, STOP], [4], [5, STOP], [6]], [], [True, False, True, False])
    table = sampler.table(EXAMPLES[:2], rollouts, reward=[1.0, 2.0, 3.0, 4.0])
    assert [row["prompt"] for row in table] == ["prompt 0"] * 2 + ["prompt 1"] * 2
    assert [row["reward"] for row in table] == [1.0, 2.0, 3.0, 4.0]
    assert [row["stopped by"] for row in table] == ["stop token", "length limit"] * 2


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_second_phase_under_bfloat16_draws_what_the_first_drew(family):
    """Packing gives up the copy's weights; the next phase fills it in the same dtypes."""
    config = tiny.train_config(bf16=True, max_completion_length=8)
    policy = fsdp.shard(Policy(tiny.causal_lm(family)), config, distributed.mesh())
    sampler = Sampler(policy, tiny.vocabulary([STOP]), config)
    dtypes = {name: p.dtype for name, p in sampler.copy.lm.named_parameters()}
    first, second, third = (sampler.sample(EXAMPLES, num_samples=3) for _ in range(3))
    assert first.completion_ids == second.completion_ids == third.completion_ids
    assert torch.equal(first.token_logps, third.token_logps)
    assert {name: p.dtype for name, p in sampler.copy.lm.named_parameters()} == dtypes


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_packed_layer_with_a_bias_of_another_dtype():
    layer = torch.nn.Linear(8, 5).to(torch.bfloat16)
    layer.weight = torch.nn.Parameter(layer.weight.float())
    inputs = torch.randn(3, 8)
    expected = torch.nn.functional.linear(inputs, layer.weight, layer.bias.float())
    torch.testing.assert_close(PackedLinear(layer)(inputs), expected)


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
    "olmo_hybrid": LINEAR,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": CONV,
    "lfm2_moe": CONV | EXPERTS | {"num_dense_layers": 1},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_padding_and_sampling_of_a_model_with_convolution_or_recurrent_states(family):
    """Prompts of several lengths, with finished rows dropped from the cache; float32."""
    lm = tiny.causal_lm(family, is_plain=True, **HYBRIDS[family])
    policy, prompts = Policy(lm), [tiny.random_ids(n, seed=n) for n in (3, 17, 9)]
    uniforms = generation.uniforms(3, torch.arange(3), range(4), 12)
    settings = Settings(MANY_STOPS, 1, layout="padded")
    ids, mask, logps, _ = decoding.decode(lm, prompts, uniforms, settings)
    completions = [[row[kept].tolist()] for row, kept in zip(ids, mask, strict=True)]
    assert len({len(row[0]) for row in completions}) > 2
    repeated = [prompt for prompt in prompts for _ in range(4)]
    # Besides D products, a state sums up to 17 + 12 tokens; the delta rule sums what it reads again
    tolerance = tiny.rounding(lm) * (1 + 2 * 29 / lm.config.hidden_size)
    with torch.no_grad():
        together = policy(padded_batch(repeated, completions, 1)).token_logps  # (12, C)
        for row, (prompt, completion) in enumerate(zip(repeated, completions, strict=True)):
            alone = policy(padded_batch([prompt], [completion], 1)).token_logps[0]
            for scores in (together[row], logps[row]):
                torch.testing.assert_close(scores[: len(alone)], alone, rtol=0, atol=tolerance)
    with pytest.raises(UserError, match="--layout padded"):
        shared_prefix.use_shared_prefix(lm, fsdp.blocks(lm)[-1])


def test_a_model_without_attention_is_not_sampled_from():
    lm = tiny.causal_lm("mamba", is_plain=True)
    with pytest.raises(UserError, match="MambaForCausalLM keeps no keys and values"):
        decoding.CopyingDecoder(lm, [[1, 2]], 1, 0)


def test_one_layer_that_limits_its_time_steps_is_enough_not_to_be_sampled_from():
    """As some layers of Nemotron-H do, in transformers 5.23; others have a limit of 0."""
    lm = tiny.causal_lm("gpt2", is_plain=True)
    first, second = lm.transformer.h
    first.time_step_limit, second.time_step_limit = (0.0, 1.0), (0.0, math.inf)
    decoding.CopyingDecoder(lm, [[1, 2]], 1, 0)
    second.time_step_limit = (0.001, 0.1)
    with pytest.raises(UserError, match="GPT2LMHeadModel limits its time steps"):
        decoding.CopyingDecoder(lm, [[1, 2]], 1, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_token_is_drawn_without_another_forward(layout: str) -> None:
    """The first one's scores are those of the prompts: six tokens take five further forwards."""
    lm, calls = tiny.causal_lm("gpt2"), []
    lm.transformer.ln_f.register_forward_hook(lambda *_: calls.append(1))
    run_decode(lm, [[1, 2, 3]], 2, 6, stop_ids=[-1], layout=layout)
    assert len(calls) == 6


def test_log_probabilities_of_a_bfloat16_model_are_of_float32() -> None:
    """The softmax itself in bfloat16 would round to three digits."""
    lm = tiny.causal_lm("gpt2").bfloat16()
    drawn = run_decode(lm, [[1, 2, 3]], 4, 1, layout="padded")
    with torch.no_grad():
        logps = lm(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].float().log_softmax(-1)
    expected = logps[drawn.ids[:, 0]]
    torch.testing.assert_close(drawn.token_logps[:, 0], expected, rtol=0, atol=1e-5)


def test_the_chance_of_a_token_is_taken_in_float64() -> None:
    """A uniform number between its bounds in float32 and in float64 draws another token."""
    logps = torch.tensor([[-0.7, -0.9, -1.1]]).log_softmax(-1)
    bounds = [values.double().cumsum(-1) for values in (logps.double().exp(), logps.exp())]
    exact, rounded = (float(bound[0, 0] / bound[0, -1]) for bound in bounds)
    assert exact != rounded
    number = torch.tensor([(exact + rounded) / 2], dtype=torch.float64)
    assert inverse_cdf(logps, number).item() == int(number.item() > exact)


def test_a_cache_without_keys_and_values_is_not_sampled_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the model takes one by the usual name, as some without attention do."""
    monkeypatch.setattr(decoding, "DynamicLayer", type("OtherLayer", (), {}))
    with pytest.raises(UserError, match="GPT2LMHeadModel keeps no keys and values"):
        decoding.CopyingDecoder(tiny.causal_lm("gpt2", is_plain=True), [[1, 2]], 1, 0)
