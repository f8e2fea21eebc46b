"""Claim: the sampler draws from the policy's own distribution, and a draw is a function.

Greedy completions are those of transformers' `generate`; sampled ones have the frequencies that
enumeration gives (chi-square); their log-probabilities are the scorer's. A completion is
decided by (seed, step, prompt, sample) alone: not by the batch, the rank or the number of samples.
It ends with its first stop token, and the token loop contains no collective.
"""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from common import distributed, fsdp, generation, noise
from common.data import Example
from common.generation import Rollouts, Sampler, decode, draw
from common.padding import padded_batch
from common.scoring import Policy

STOP = 0
MANY_STOPS = tuple(range(0, 61, 6))  # rows end at many lengths
EXAMPLES = tiny.ragged_examples([(n,) for n in (9, 1, 14, 4, 9, 2, 6)])


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    distributed.start()


def new_sampler(
    lm: Any, *, stop_ids: tuple[int, ...] = (STOP,), generation_batch_size: int = 64, **fields: Any
) -> Sampler:
    settings = {"max_completion_length": 12} | fields
    config = tiny.train_config(generation_batch_size=generation_batch_size, **settings)
    return Sampler(Policy(lm), tiny.tokenizer(), stop_ids, config)


def run_decode(lm: Any, prompts: list[list[int]], num_samples: int, **options: Any) -> Rollouts:
    defaults = {"stop_ids": [STOP], "max_completion_length": 8, "temperature": 1.0, "seed": 3}
    defaults |= {"keys": torch.arange(len(prompts)), "pad_id": 1}
    with torch.no_grad():
        return decode(lm, prompts, num_samples=num_samples, **(defaults | options))


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return tiny.causal_lm("gpt2")


# ---- greedy --------------------------------------------------------------------------------------


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
    lm = tiny.causal_lm(family)
    prompts = [example.prompt_ids for example in EXAMPLES]
    endless = generate(lm, prompts, [], 12)
    assert all(len(completion) == 12 for completion in endless)
    stop_ids = [endless[0][4], endless[2][0]]  # tokens that end some rows early and not all
    expected = generate(lm, prompts, stop_ids, 12)
    lengths = {len(completion) for completion in expected}
    assert len(lengths) >= 3
    assert max(lengths) == 12
    for generation_batch_size in (1, 3, 64):
        sampler = new_sampler(
            lm, stop_ids=tuple(stop_ids), generation_batch_size=generation_batch_size
        )
        found = sampler.sample(EXAMPLES, temperature=0)
        assert found.completion_ids == expected
        assert found.has_stop == [row[-1] in stop_ids for row in expected]


def test_greedy_logps_are_of_the_distribution_at_temperature_1(gpt2):
    found = new_sampler(gpt2).sample(EXAMPLES, temperature=0)
    assert_scorer_agrees(gpt2, EXAMPLES, found, num_samples=1, temperature=1.0)


# ---- the distribution of the samples -------------------------------------------------------------


def chi_square_p(observed: Tensor, probabilities: Tensor) -> float:
    """P-value of counts (K,) under probabilities (K,); cells that expect below 5 are pooled."""
    expected = probabilities.double() * observed.sum()
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def test_chi_square_p_by_known_quantiles():
    # Chi-square with 1 and 4 degrees of freedom exceeds 3.841 and 9.488 with probability 0.05.
    half = math.sqrt(3.841 * 100) / 2
    found = chi_square_p(torch.tensor([50 + half, 50 - half]), torch.tensor([0.5, 0.5]))
    assert abs(found - 0.05) < 1e-4
    counts = torch.tensor([20.0, 20, 20, 20, 20])
    counts[0] += math.sqrt(9.488 * 20 / 2)
    counts[1] -= math.sqrt(9.488 * 20 / 2)
    assert abs(chi_square_p(counts, torch.full((5,), 0.2)) - 0.05) < 1e-4


def two_token_probabilities(lm: Any, prompt: list[int], temperature: float) -> Tensor:
    """Exact joint probabilities (V, V) of the first two tokens; a first stop token ends there.

    In row STOP the whole mass stands at column 0: a completion that stopped has no second token.
    """
    vocab_size = lm.config.vocab_size
    ids = torch.tensor([[*prompt, first] for first in range(vocab_size)])
    with torch.no_grad():
        logits = lm(ids.to(distributed.device())).logits.double().cpu()  # (V, P+1, V)
    first = torch.softmax(logits[0, -2] / temperature, -1)
    second = torch.softmax(logits[:, -1] / temperature, -1)
    second[STOP] = torch.eye(vocab_size, dtype=torch.float64)[0]
    return first[:, None] * second


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_tokens_have_the_exact_frequencies(temperature):
    vocab_size, num_samples = 12, 4000
    lm = tiny.causal_lm("llama", vocab_size=vocab_size)
    prompts = [[3, 7, 1, 1], [5]]  # the second one is padded on the left
    rollouts = run_decode(
        lm, prompts, num_samples, max_completion_length=2, temperature=temperature, seed=11
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


def test_samples_of_a_prompt_are_independent():
    """The first tokens of neighbouring samples, and first and second tokens, do not repeat.

    With a flat distribution over 4 tokens each of the 16 pairs has probability 1/16.
    """
    lm = tiny.causal_lm("gpt2", vocab_size=4)
    with torch.no_grad():
        lm.transformer.wte.weight.zero_()  # every logit is 0
    rollouts = run_decode(lm, [[1, 2]], 4000, max_completion_length=2, stop_ids=[9])
    ids = torch.tensor(rollouts.completion_ids)  # (4000, 2)
    uniform = torch.full((16,), 1 / 16)
    for pairs in (ids[:, 0] * 4 + ids[:, 1], ids[::2, 0] * 4 + ids[1::2, 0]):
        assert chi_square_p(torch.bincount(pairs, minlength=16).double(), uniform) > 1e-3


# ---- draw ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-12, 0.1, 1.0, 3.0]), min_size=1, max_size=9),
    uniform=st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_draw_inverts_the_cumulative_distribution(weights, uniform):
    total = sum(weights)
    if total == 0:
        weights, total = [*weights, 1.0], 1.0
    probabilities = torch.tensor(weights, dtype=torch.float64) / total
    logps = probabilities.log().float()[None]
    token = int(draw(logps, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0
    below = sum(weights[:token]) / total
    assert below - 1e-6 <= uniform <= below + weights[token] / total + 1e-6


def test_draw_never_gives_a_token_of_probability_zero():
    logps = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5, 0.0]).log()
    edges = [5e-324, 1e-300, 2.0**-53, 0.5, 0.5 + 2.0**-53, 1 - 2.0**-53]
    uniforms = torch.tensor(edges, dtype=torch.float64)
    uniforms = torch.cat([uniforms, noise.uniform(0, torch.arange(1000))])
    drawn = draw(logps.expand(len(uniforms), -1), uniforms)
    assert set(drawn.tolist()) == {1, 4}
    assert drawn[:6].tolist() == [1, 1, 1, 1, 4, 4]
    certain = torch.full((1, 50), -torch.inf)
    certain[0, 49] = 0.0
    assert draw(certain, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == 49


def test_draw_reaches_the_ends_though_the_probabilities_do_not_sum_to_1():
    """float32 log-probabilities of many tokens sum to 1 up to rounding; both ends are drawn."""
    num_tokens = 50_000
    logps = torch.full((2, num_tokens), math.log(1 / num_tokens) - 1e-4)  # they sum to 0.9999
    uniforms = torch.tensor([1e-12, 1 - 1e-12], dtype=torch.float64)
    assert draw(logps, uniforms).tolist() == [0, num_tokens - 1]


# ---- log-probabilities ---------------------------------------------------------------------------


def assert_scorer_agrees(
    lm: Any, examples: list[Example], rollouts: Rollouts, *, num_samples: int, temperature: float
) -> None:
    ids = rollouts.completion_ids
    groups = [ids[i : i + num_samples] for i in range(0, len(ids), num_samples)]
    batch = padded_batch([example.prompt_ids for example in examples], groups, 1)
    batch = batch.to(distributed.device())
    with torch.no_grad():
        logps = Policy(lm)(batch, temperature=temperature).token_logps
    for found, row in zip(
        rollouts.token_logps, tiny.per_row(logps, batch.completion_mask), strict=True
    ):
        torch.testing.assert_close(torch.tensor(found), row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logps_are_those_of_the_scorer(family, temperature):
    lm = tiny.causal_lm(family)
    sampler = new_sampler(lm, stop_ids=MANY_STOPS)
    rollouts = sampler.sample(EXAMPLES, num_samples=4, temperature=temperature)
    assert len({len(ids) for ids in rollouts.completion_ids}) > 5  # rows left in between
    assert_scorer_agrees(lm, EXAMPLES, rollouts, num_samples=4, temperature=temperature)


# ---- a completion is a function of (seed, step, prompt, sample) ----------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_batch_size_and_companions_change_no_completion(family):
    lm = tiny.causal_lm(family)

    def sample(examples: list[Example], **fields: Any) -> Rollouts:
        sampler = new_sampler(lm, stop_ids=MANY_STOPS, **fields)
        return sampler.sample(examples, num_samples=3, step=2)

    whole = sample(EXAMPLES)
    assert len({len(ids) for ids in whole.completion_ids}) > 5
    for generation_batch_size in (1, 4, 7, 1000):
        found = sample(EXAMPLES, generation_batch_size=generation_batch_size)
        assert found.completion_ids == whole.completion_ids
        assert found.has_stop == whole.has_stop
    shuffled = list(range(len(EXAMPLES)))
    random.Random(0).shuffle(shuffled)
    found = sample([EXAMPLES[i] for i in shuffled])
    for place, i in enumerate(shuffled):
        assert (
            found.completion_ids[3 * place : 3 * place + 3]
            == (whole.completion_ids[3 * i : 3 * i + 3])
        )


def test_more_samples_keep_the_first_ones(gpt2):
    few, many = (new_sampler(gpt2).sample(EXAMPLES, num_samples=n) for n in (2, 5))
    for i in range(len(EXAMPLES)):
        assert few.completion_ids[2 * i : 2 * i + 2] == many.completion_ids[5 * i : 5 * i + 2]


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


@contextmanager
def pretend_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "rank", lambda: rank)
        patch.setattr(distributed, "world_size", lambda: world_size)
        yield


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_the_prompts_and_all_get_the_same_rollouts(gpt2, monkeypatch, world_size):
    """Every rank's contributions to the sums are recorded, added up, and handed to each rank."""
    sampler = new_sampler(gpt2, stop_ids=MANY_STOPS)
    alone = sampler.sample(EXAMPLES)
    contributions: list[list[Tensor]] = []

    def record(tensor: Tensor) -> Tensor:
        contributions[-1].append(tensor.clone())
        return tensor

    for rank in range(world_size):
        contributions.append([])
        with pretend_rank(monkeypatch, rank, world_size):
            monkeypatch.setattr(distributed, "all_reduce_sum", record)
            sampler.sample_shared(EXAMPLES, temperature=1.0, title="sampling")
    sums = [sum(parts) for parts in zip(*contributions, strict=True)]
    for rank in range(world_size):
        answers = iter(sums)
        with pretend_rank(monkeypatch, rank, world_size):
            monkeypatch.setattr(distributed, "all_reduce_sum", lambda _, a=answers: next(a))
            shared = sampler.sample_shared(EXAMPLES, temperature=1.0, title="sampling")
        assert shared.completion_ids == alone.completion_ids
        assert shared.has_stop == alone.has_stop
        for found, expected in zip(shared.token_logps, alone.token_logps, strict=True):
            assert found == pytest.approx(expected, abs=1e-5)


# ---- where a completion ends ---------------------------------------------------------------------


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
        rollouts.completion_ids, rollouts.token_logps, rollouts.has_stop, strict=True
    ):
        assert 1 <= len(ids) == len(logps) <= length
        assert not any(token in stop_ids for token in ids[:-1])
        assert has_stop == (ids[-1] in stop_ids)
        assert has_stop or len(ids) == length
    assert {True, False} == set(rollouts.has_stop)


def test_stopping_does_not_change_what_was_drawn_before(gpt2):
    """Completions with a stop token are prefixes of the ones without, whoever left the batch."""
    prompts = [example.prompt_ids for example in EXAMPLES]
    endless = run_decode(gpt2, prompts, 6, stop_ids=[1000], max_completion_length=20)
    assert not any(endless.has_stop)
    stopping = run_decode(gpt2, prompts, 6, stop_ids=MANY_STOPS, max_completion_length=20)
    for short, long in zip(stopping.completion_ids, endless.completion_ids, strict=True):
        assert len(long) == 20
        assert long[: len(short)] == short


def test_decoding_ends_when_every_row_has_stopped(gpt2, monkeypatch):
    """No forward pass after the last row's stop token, and finished rows leave the batch."""
    rows_per_forward = []
    forward = gpt2.forward

    def counted(**inputs: Any) -> Any:
        rows_per_forward.append(len(inputs["input_ids"]))
        return forward(**inputs)

    monkeypatch.setattr(gpt2, "forward", counted)
    prompts = [example.prompt_ids for example in EXAMPLES]
    rollouts = run_decode(gpt2, prompts, 8, stop_ids=MANY_STOPS, max_completion_length=80)
    assert all(rollouts.has_stop)
    assert rows_per_forward[0] == len(prompts)  # a prompt is prefilled once for all its samples
    assert rows_per_forward[1] <= len(prompts) * 8
    assert len(rows_per_forward) == max(map(len, rollouts.completion_ids))
    assert rows_per_forward[-1] < 6
    assert rows_per_forward[1:] == sorted(rows_per_forward[1:], reverse=True)


def test_texts_leave_out_the_stop_token_only(gpt2):
    tokenizer = tiny.tokenizer()
    words = tokenizer(" lost the key", add_special_tokens=False)["input_ids"]
    rollouts = Rollouts([[*words, STOP], words], [[0.0]] * 2, [True, False])
    assert rollouts.texts(tokenizer) == [" lost the key"] * 2


def test_the_table_shows_why_a_row_stopped(gpt2):
    sampler = new_sampler(gpt2, num_sample_prompts=2)
    greedy = sampler.table(EXAMPLES)
    assert [row["prompt"] for row in greedy] == ["prompt 0", "prompt 1"]
    completed = sampler.sample(EXAMPLES[:2], temperature=0)
    assert [row["completion"] for row in greedy] == completed.texts(tiny.tokenizer())
    rollouts = Rollouts([[4, STOP], [4], [5, STOP], [6]], [[0.0]] * 4, [True, False, True, False])
    table = sampler.table(EXAMPLES[:2], rollouts, reward=[1.0, 2.0, 3.0, 4.0])
    assert [row["prompt"] for row in table] == ["prompt 0"] * 2 + ["prompt 1"] * 2
    assert [row["reward"] for row in table] == [1.0, 2.0, 3.0, 4.0]
    assert [row["stopped by"] for row in table] == ["stop token", "length limit"] * 2


# ---- the copy that is sampled from ---------------------------------------------------------------


COLLECTIVES = [
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"),
    *("reduce_scatter_tensor", "reduce_scatter", "all_to_all", "all_to_all_single", "gather"),
    *("scatter", "reduce", "barrier", "broadcast_object_list", "monitored_barrier", "send", "recv"),
]


def test_the_token_loop_has_no_collective(monkeypatch):
    """Sampling from a sharded policy: one gather for all batches, then plain tensors only."""
    lm = tiny.causal_lm("llama")
    config = tiny.train_config(generation_batch_size=2, max_completion_length=6)
    expected = new_sampler(tiny.causal_lm("llama"), **{"max_completion_length": 6}).sample(EXAMPLES)
    policy = fsdp.shard(Policy(lm), config, distributed.mesh())
    sampler = Sampler(policy, tiny.tokenizer(), [STOP], config)
    num_gathers, num_decodes = [], []
    gathered, plain_decode = sampler.copy.gathered, generation.decode

    def counted_gather(policy: Any) -> Any:
        num_gathers.append(1)
        return gathered(policy)

    def guarded_decode(lm: Any, *args: Any, **options: Any) -> Rollouts:
        num_decodes.append(1)
        assert not fsdp.fsdp_units(lm)
        assert not any(isinstance(p, DTensor) for p in lm.parameters())
        with monkeypatch.context() as patch:
            for module in (dist, dist.distributed_c10d):
                for name in COLLECTIVES:
                    patch.setattr(module, name, forbidden)
            return plain_decode(lm, *args, **options)

    monkeypatch.setattr(sampler.copy, "gathered", counted_gather)
    monkeypatch.setattr(generation, "decode", guarded_decode)
    rollouts = sampler.sample(EXAMPLES)
    assert rollouts.completion_ids == expected.completion_ids
    assert (len(num_gathers), len(num_decodes)) == (1, 4)
    assert sampler.sample([]).completion_ids == []  # a rank without prompts joins the gather
    assert (len(num_gathers), len(num_decodes)) == (2, 4)


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("a collective inside the token loop")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_copy_follows_the_policy_and_is_freed(family):
    """After an update the next rollout is drawn from the new weights; between them no storage."""
    lm = tiny.causal_lm(family, tie_word_embeddings=True)
    policy = fsdp.shard(Policy(lm), tiny.train_config(), distributed.mesh())
    sampler = Sampler(policy, tiny.tokenizer(), [STOP], tiny.train_config(max_completion_length=6))
    before = sampler.sample(EXAMPLES).completion_ids
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    after = sampler.sample(EXAMPLES)
    fresh = tiny.causal_lm(family, tie_word_embeddings=True)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(1.3)
    expected = new_sampler(fresh, max_completion_length=6).sample(EXAMPLES)
    assert after.completion_ids == expected.completion_ids != before
    assert all(p.is_meta for p in sampler.copy.replica.parameters())
    replica = sampler.copy.replica
    assert replica.get_output_embeddings().weight is replica.get_input_embeddings().weight
    assert not any(p.is_meta for p in policy.parameters())
