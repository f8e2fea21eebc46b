"""bfloat16 in one process computes the bits of FSDP.

Losses, norms, parameters and moments agree for every kind of model, and what is exported, saved,
sampled from and computed in float32 is the float32 parameters. About `common.model.bfloat16`.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import hash_of, launch, state_hashes, whole
from torch import Tensor, nn

from common import distributed
from common.batch import padded_batch, shared_prefix_batch
from common.checkpoint import layout
from common.forward import Policy, RewardModel
from common.model import fsdp, lora, optim
from common.model.rollout_copy import RolloutCopy

pytestmark = pytest.mark.usefixtures("process_group")

PAD_ID = 60
EXAMPLES = tiny.ragged_examples([(9, 4, 2), (1, 1, 7), (14, 3, 3), (5, 6, 2)])
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2"},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "padded": {"family": "gpt2", "layout": "padded"},
    "recomputed": {"family": "llama", "gradient_checkpointing": True},
    "compiled": {"family": "gpt2", "compile": "true"},
    "reward": {"family": "gpt2", "is_reward": True},
    "lora": {"family": "gpt2", "lora_r": 4},
    "lora on bfloat16": {"family": "llama", "lora_r": 4, "is_rounded": True},
    "lora recomputed": {"family": "llama", "lora_r": 4, "gradient_checkpointing": True},
    "lora reward": {"family": "llama", "lora_r": 4, "is_reward": True, "is_rounded": True},
}


def new_module(
    family: str,
    *,
    with_fsdp: bool,
    is_reward: bool = False,
    is_rounded: bool = False,
    tie_word_embeddings: bool = False,
    compile: str = "false",
    **fields: Any,
) -> tuple[Any, Any]:
    """A module as a stage makes it, and its config. With FSDP it is not compiled: that is slow."""
    fields |= {"bf16": True, "learning_rate": 0.01, "compile": "false" if with_fsdp else compile}
    config = tiny.train_config(**fields)
    shape = {"tie_word_embeddings": True} if tie_word_embeddings else {}
    make = tiny.classifier if is_reward else tiny.causal_lm
    lm = make(family, is_plain=True, **shape)
    if is_rounded:
        lm.bfloat16().float()
    if config.lora_r:
        lora.add_adapters(lm, "unused", config)
    heads = [lm.score] if is_reward else []
    module: Any = (RewardModel if is_reward else Policy)(lm)
    shard = tiny.shard_with_fsdp if with_fsdp else fsdp.shard
    if not distributed.is_rank0():
        module.to("meta")
    module = shard(module, config, distributed.mesh(), float32_modules=heads)
    assert bool(fsdp.fsdp_units(module)) == with_fsdp
    return module, config


def micro_batches(config: Any) -> list[Any]:
    make = padded_batch if config.layout == "padded" else shared_prefix_batch
    halves = (EXAMPLES[:2], EXAMPLES[2:])
    return [make([e.prompt_ids for e in h], [e.completions for e in h], PAD_ID) for h in halves]


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    output = module(batch)
    return output.square().mean() if isinstance(output, Tensor) else -output.token_logps.sum() / 20


def train(module: Any, config: Any, steps: int) -> Iterator[Any]:
    """Losses and norms of steps of two micro-batches each, then parameters and moments."""
    optimizer = optim.build_optimizer(module, config)
    for step in range(steps):
        for i, batch in enumerate(micro_batches(config)):
            fsdp.reduce_gradients_in_next_backward(module, i == 1)
            loss = loss_of(module, batch)
            loss.backward()
            yield loss.detach()
        yield optim.clip_and_step(optimizer, config, step, steps)["grad_norm"]
    with torch.no_grad():
        yield loss_of(module, micro_batches(config)[0])
    fsdp.reshard(module)
    for parameter in module.parameters():
        yield whole(parameter.detach())
        yield from (whole(v) for v in optimizer.state.get(parameter, {}).values())


@pytest.mark.parametrize("name", CASES)
def test_training_has_the_bits_of_fsdp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    runs = []
    for with_fsdp in (False, True):
        module, config = new_module(with_fsdp=with_fsdp, **CASES[name])
        runs.append([*train(module, config, 4)])
    assert len(runs[0]) > 3 * 4 + 10
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "lora", "lora reward"])
def test_float32_weights_are_those_of_fsdp(name: str) -> None:
    """Those that are exported, sampled from, and used in float32 before a run goes on."""
    runs = []
    for with_fsdp in (False, True):
        module, config = new_module(with_fsdp=with_fsdp, **CASES[name])
        values = [*train(module, config, 1)]
        dtypes = [p.dtype for p in module.parameters()]
        with torch.no_grad(), fsdp.in_float32(module):
            values.append(loss_of(module, micro_batches(config)[0]))
            assert not torch.equal(values[-1], loss_of(module, micro_batches(config)[1]))
        assert [p.dtype for p in module.parameters()] == dtypes
        state = fsdp.full_state_dict(module)
        state = {key.removeprefix("lm."): value for key, value in state.items()}
        weights = lora.merged_state(module.lm, state) if config.lora_r else state
        values += [weights[key] for key in sorted(weights)]
        if isinstance(module, Policy):
            with RolloutCopy(module.lm, config).gathered(module) as sampled:
                values += [p.detach() for p in sampled.parameters()]
        runs.append([*values, *train(module, config, 1)])
    assert not torch.equal(runs[0][0], runs[0][-1])
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_references_have_the_bits_of_fsdp_also_one_that_moves() -> None:
    runs = []
    for shard in (fsdp.shard, tiny.shard_with_fsdp):
        policy, config = new_module(with_fsdp=shard is not fsdp.shard, **CASES["gpt2"])
        values = [*train(policy, config, 1)]
        for moves in (False, True):
            frozen = Policy(tiny.causal_lm("gpt2", seed=1)).requires_grad_(False)
            reference = shard(frozen, config, distributed.mesh(), moves=moves)
            values += [reference(batch).token_logps for batch in micro_batches(config)]
        for _ in range(2):
            fsdp.mix_into(reference, policy, 1e-3)  # bfloat16 would lose it
            values += [reference(batch).token_logps for batch in micro_batches(config)]
        values += [whole(p.detach()) for p in reference.parameters()]
        runs.append(values)
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_a_step_that_goes_bad_changes_nothing() -> None:
    """Likewise a forward that fails: outside of forward and backward parameters are float32."""
    runs = []
    for is_bad in (False, True):
        module, config = new_module(with_fsdp=False, **CASES["recomputed"])
        batch = micro_batches(config)[0]
        if is_bad:
            optimizer = optim.build_optimizer(module, config)
            with pytest.raises(AttributeError):
                module(None)
            assert {p.dtype for p in module.parameters()} == {torch.float32}
            (loss_of(module, batch) * torch.inf).backward()
            with pytest.raises(optim.NonFiniteError):
                optim.clip_and_step(optimizer, config, 0, 1)
            module.zero_grad()
        runs.append([*train(module, config, 2)])
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def train_or_load(output_dir: str, *, saves: bool) -> dict[str, str]:
    """Hashes of parameters and moments on this rank, trained and saved or loaded."""
    module, config = new_module(with_fsdp=distributed.world_size() > 1, **CASES["llama"])
    optimizer = optim.build_optimizer(module, config)
    if saves:
        loss_of(module, micro_batches(config)[0]).backward()
        optim.clip_and_step(optimizer, config, 0, 1)
    checkpointer = tiny.checkpointer(Path(output_dir), module, optimizer)
    checkpointer.save(1) if saves else checkpointer.load(layout.folder_of(Path(output_dir), 1))
    checkpointer.close()
    moments = {
        f"{name} {key}": hash_of(whole(value))
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return state_hashes(module) | moments


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_checkpoints_of_one_process_and_of_two_are_interchangeable(num_ranks, tmp_path):
    saved, loaded = (
        launch(train_or_load, n, tmp_path, output_dir=str(tmp_path), saves=n == num_ranks)
        for n in (num_ranks, 3 - num_ranks)
    )
    assert len(saved[0]) > 50
    assert all(state == saved[0] for state in (*saved, *loaded))
