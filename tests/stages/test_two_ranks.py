"""Claim: ranks with unequal work stay in step, and what is collective is the same on all of them.

One run on two processes: ranks sample different numbers of prompts, and neither waits for the other
inside the token loop; rollouts, scores and gradient norms are those of one process; a gradient that
is not finite on one rank stops both.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import launch, local
from transformers import AutoModelForCausalLM

from common import distributed, self_checks
from common.evaluation import split
from common.forward import Policy
from common.model import fsdp, optim
from common.sampling.sampler import Rollouts, Sampler

PROMPTS = tiny.ragged_examples([(n,) for n in (9, 1, 14, 4, 6)])
PAIRS = tiny.ragged_examples([(9, 4, 2), (1, 1, 7), (14, 3, 3), (4, 8, 1), (6, 2, 5)])
STOPS = list(range(0, 61, 6))
LENGTH = 10


def new_policy() -> Any:
    """A sharded policy: weights on rank 0, the meta device elsewhere, as the stages do it."""
    if distributed.is_rank0():
        lm = tiny.causal_lm("gpt2")
    else:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(tiny.model_config("gpt2"))
    return fsdp.shard(Policy(lm), tiny.train_config(), distributed.mesh())


def new_sampler(policy: Any) -> Sampler:
    config = tiny.train_config(max_completion_length=LENGTH, generation_batch_size=2)
    return Sampler(policy, tiny.vocabulary(STOPS), config)


def as_lists(rollouts: Rollouts) -> list[Any]:
    return [rollouts.completion_ids, rollouts.has_stop.tolist()]


def backward(policy: Any) -> None:
    """The same gradient on any number of ranks: each takes its share of the rows."""
    mine = PAIRS[distributed.rank() :: distributed.world_size()]
    rows = [pair.completions[0] for pair in mine]
    batch = tiny.batch_of([pair.prompt_ids for pair in mine], rows, side="left")
    policy(batch).token_logps.sum().backward()


def measure() -> dict[str, Any]:
    """Everything that is asserted below; called on every rank."""
    rank, world_size = distributed.rank(), distributed.world_size()
    policy = new_policy()
    sampler = new_sampler(policy)
    result: dict[str, Any] = {}
    # With two ranks: four prompts here, one there; then none here and two there.
    mine = PROMPTS if world_size == 1 else (PROMPTS[:4] if rank == 0 else PROMPTS[4:])
    result["own"] = as_lists(sampler.sample(mine, num_samples=3))
    result["second"] = as_lists(sampler.sample(PROMPTS[: 2 * rank]))
    result["shared"] = as_lists(sampler.sample_shared(PROMPTS, temperature=1.0, title="sampling"))
    config = tiny.train_config(micro_batch_size=2)
    result["scores"] = split.score_examples(
        policy, PAIRS, config, tiny.vocabulary(), "scoring"
    ).tolist()

    config = tiny.train_config(learning_rate=1e-9, max_grad_norm=0.5)
    optimizer = optim.build_optimizer(policy, config)
    backward(policy)
    output = optim.clip_and_step(policy, optimizer, config, 0, 1)
    result["grad_norm"] = float(output["grad_norm"])

    backward(policy)
    if rank == world_size - 1:
        local(policy.lm.transformer.wte.weight.grad)[0, 0] = torch.nan
    result["errors"] = []
    for check in (
        lambda: optim.clip_and_step(policy, optimizer, config, 1, 2),
        lambda: self_checks.equal_across_ranks("the same", torch.ones(3)),
        lambda: self_checks.equal_across_ranks("a head", torch.tensor([1.0, 2.0 + rank])),
    ):
        try:
            check()
        except RuntimeError as error:
            result["errors"].append(str(error))
    return result


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(measure, 2, Path(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    distributed.start()
    return measure()


def test_each_rank_samples_its_own_prompts(one, two):
    ids, has_stop = one["own"]
    assert two[0]["own"] == [ids[:12], has_stop[:12]]
    assert two[1]["own"] == [ids[12:], has_stop[12:]]
    assert len(ids) == 15  # 12 in four batches on one rank, 3 in one batch on the other
    assert two[0]["second"] == [[], []]
    assert two[1]["second"] == [[ids[0], ids[3]], [has_stop[0], has_stop[3]]]


def test_shared_rollouts_and_scores_are_the_same_everywhere(one, two):
    for result in two:
        assert result["shared"] == one["shared"]
        torch.testing.assert_close(
            torch.tensor(result["scores"]), torch.tensor(one["scores"]), rtol=0, atol=1e-4
        )


def test_the_gradient_norm_is_global(one, two):
    for result in two:
        assert result["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_a_gradient_that_is_not_finite_on_one_rank_stops_both(two):
    for result in two:
        assert "at step 2 the gradient norm is nan" in result["errors"][0]


def test_a_parameter_that_differs_between_ranks_is_seen_on_both(one, two):
    assert len(one["errors"]) == 1  # alone there is nothing to differ from
    for result in two:
        assert len(result["errors"]) == 2
        assert "a head differs between ranks" in result["errors"][1]
