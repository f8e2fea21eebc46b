"""Checks of the loaded model and data that refuse to train on something wrong.

Each is a property that must hold whatever the weights are, and takes a second or less. Collective:
every rank runs them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common import distributed, fsdp
from common.config import CommonConfig, TrainConfig, UserError
from common.data import Example
from common.losses import kl_estimate, preference_loss
from common.padding import AnyBatch, padded_batch, shared_prefix_batch
from common.scoring import RewardModel, sequence_scores

# Rounding of one token's log-probability in nats, or of a reward, by bf16. The signs of rounding
# errors are random: a sum over T tokens may be off by sqrt(T) times as much.
TOLERANCE = {False: 1e-3, True: 0.1}


def padding_invariance(model: nn.Module, example: Example, pad_id: int, bf16: bool) -> None:
    """The score of a sequence does not change when a longer one stands beside it.

    Its prompt is then padded on the left and its completion on the right.

    Raises:
        RuntimeError: it does, as for GPT-2 without position ids.
    """
    prompt = example.prompt_ids
    completion = example.completions[0] if example.completions else prompt[-4:]
    half_prompt = prompt[len(prompt) // 2 :]
    half_completion = completion[: (len(completion) + 1) // 2]
    alone = padded_batch([half_prompt], [[half_completion]], pad_id)
    beside = padded_batch([half_prompt, prompt], [[half_completion], [completion]], pad_id)
    with torch.no_grad():
        device = distributed.device()
        difference = (
            sequence_scores(model, alone.to(device)) - sequence_scores(model, beside.to(device))[:1]
        )
    fsdp.reshard(model)
    num_summed = 1 if isinstance(model, RewardModel) else len(half_completion)
    refuse_unless(
        float(difference.abs().max()) <= TOLERANCE[bf16] * math.sqrt(num_summed),
        f"padding changes the score of a sequence by {float(difference.abs().max()):.3g}: "
        "the model ignores position_ids or attention_mask",
    )


def layouts_agree(model: nn.Module, config: CommonConfig) -> None:
    """Prompts computed once give the scores of the padded layout, which transformers computes.

    Raises:
        UserError: they do not, as for a model that scales or caps its logits.
    """
    if config.layout == "padded":
        return
    vocab_size = model.lm.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    prompts = [[(7 * i + 1) % vocab_size for i in range(length)] for length in (5, 9)]
    completions = [[prompts[0][:3], prompts[1][:5]], [prompts[1][2:6], prompts[0][:2]]]
    with torch.no_grad():
        padded, shared = (
            sequence_scores(model, make(prompts, completions, 0).to(distributed.device()))
            for make in (padded_batch, shared_prefix_batch)
        )
    fsdp.reshard(model)
    difference = float((padded - shared).abs().max())
    if not difference <= TOLERANCE[config.bf16] * math.sqrt(5):
        raise UserError(
            f"a prompt computed once for several completions changes the scores of "
            f"{type(model.lm).__name__} by {difference:.3g}; use --layout padded."
        )


def stop_token_is_trained(
    examples: Sequence[Example], stop_ids: Sequence[int], config: TrainConfig
) -> None:
    """Completions that were not truncated end in a stop token, and the mask counts it.

    Raises:
        UserError: no completion ends in a stop token, and the data was not said to be so.
        RuntimeError: the mask leaves it out.
    """
    if not (config.self_check and config.require_stop_token):
        return
    looked_at = examples[:256]
    ended = [e for e in looked_at if e.completions[0][-1] in stop_ids]
    if not ended:
        raise UserError(
            f"none of the first {len(looked_at)} training completions ends in a stop token, so "
            "that stopping would not be trained: all are longer than --max_completion_length "
            f"{config.max_completion_length}; raise it, or say --require_stop_token false where "
            "completions are cut by design."
        )
    batch = padded_batch([ended[0].prompt_ids], [[ended[0].completions[0]]], stop_ids[0])
    counted = bool(batch.completion_mask[0, len(ended[0].completions[0]) - 1])
    refuse_unless(counted, "the stop token is outside the loss")


def equal_across_ranks(name: str, parameter: Tensor) -> None:
    """A sharded parameter has the same bits on every rank once it is gathered.

    Raises:
        RuntimeError: it has not, as for a head made after sharding.
    """
    value = parameter.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    spread = distributed.all_reduce_max(value) + distributed.all_reduce_max(-value)
    refuse_unless(not bool(spread.any()), f"{name} differs between ranks")


def dpo_starts_at_ln_2(logps: Tensor, ref_logps: Tensor) -> None:
    """A policy that equals its reference has the DPO loss ln 2, whatever beta and smoothing are.

    Args:
        logps: (N, 2) of pairs under the policy before its first step.
        ref_logps: (N, 2) under the reference.

    Raises:
        RuntimeError: reference and policy are not scored alike.
    """
    losses = preference_loss(*logps.unbind(-1), *ref_logps.unbind(-1), beta=1.0)  # (N,)
    loss = float(losses.mean())
    refuse_unless(
        abs(loss - math.log(2)) <= 1e-3,  # also in bfloat16: the same sums on both sides
        f"the first DPO loss is {loss:.5f}, not ln 2: policy and reference differ",
    )


def first_rollout(
    policy: nn.Module,
    batch: AnyBatch,
    sampled_logps: Tensor,
    ref_token_logps: Tensor | None,
    config: TrainConfig,
    temperature: float,
) -> None:
    """Before the first update, sampler, trainer and reference are one distribution.

    So the ratio to the sampling-time policy is 1, and the KL to a reference that was loaded from
    the same weights is 0.

    Args:
        policy: scored again here, as in the update.
        batch: B completions that the sampler has just drawn.
        sampled_logps: (B, C) recorded while sampling.
        ref_token_logps: (B, C) of the reference; None if it is another model.
        config: `bf16` widens the tolerance.
        temperature: of sampling.

    Raises:
        RuntimeError: they are not.
    """
    with torch.no_grad():
        logps = policy(batch, temperature=temperature).token_logps  # (B, C)
    fsdp.reshard(policy)
    num_tokens = batch.completion_mask.sum().clamp(min=1)
    tolerance = 0.05 if config.bf16 else 1e-3  # nats per token
    gap = float(((sampled_logps - logps) * batch.completion_mask).abs().sum() / num_tokens)
    refuse_unless(gap <= tolerance, f"sampler and trainer differ by {gap:.3g} nats per token")
    if ref_token_logps is not None:
        kl = float(kl_estimate(logps, ref_token_logps).abs().sum() / num_tokens)
        refuse_unless(kl <= tolerance, f"the first KL to the reference is {kl:.3g} nats per token")


def refuse_unless(holds: bool, message: str) -> None:
    """Raise a RuntimeError that says how to go on regardless."""
    if not holds:
        raise RuntimeError(f"self-check failed: {message} (--self_check false skips this).")
