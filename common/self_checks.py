"""Checks of the loaded model and data that refuse to train on something wrong.

Each is a property that must hold whatever the weights are, and takes a second or less. Collective:
every rank runs them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common import distributed
from common.config import CommonConfig, TrainConfig
from common.data import Example
from common.errors import UserError
from common.losses import kl_estimate, preference_loss
from common.model import fsdp
from common.padding import AnyBatch, padded_batch, shared_prefix_batch
from common.scoring import RewardModel, sequence_scores

# Rounding of one token's log-probability in nats, or of a reward, by bf16. The signs of rounding
# errors are random: a sum over T tokens may be off by sqrt(T) times as much.
TOLERANCE = {False: 1e-3, True: 0.1}
# Tokens of the longest sequence looked at: seconds on a CPU. What rotary embeddings do beyond is
# known from the config (`checks.max_positions`).
MAX_LENGTH = 256


def only_tokens_matter(
    model: nn.Module, config: CommonConfig, *, is_projected: bool = False
) -> None:
    """What a model says of a sequence is a function of its tokens.

    Its score is the same when it is computed once more; beside a far longer sequence, which pads it
    on both sides; and with a prompt computed once for several completions, which is looked at also
    without `self_check`. `is_projected`: hidden states are projected apart from the model also if
    padded.

    Raises:
        UserError: chance, padding or sharing a prompt changes it, or the model scales or caps its
            logits: another model, or another layout, is needed.
    """
    name, is_shared = type(model.lm).__name__, config.layout == "shared_prefix"
    is_reward_model = isinstance(model, RewardModel)
    vocab_size = model.lm.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    room = config.max_prompt_length + config.max_completion_length
    longest = max(9, min(room, config.micro_batch_tokens // 3, MAX_LENGTH) - 5)
    ids = [(7 * i + 1) % vocab_size for i in range(longest)]
    pairs = ([ids[:5], ids[:9]], [[ids[:3], ids[:5]], [ids[2:6], ids[:2]]])
    one = TOLERANCE[config.bf16]  # of the reward of a sequence, or of one token
    limit = one * math.sqrt(5)
    padded = scores(model, padded_batch(*pairs, 0))  # (4,)
    if config.self_check:
        gap = float((padded - scores(model, padded_batch(*pairs, 0))).abs().max())
        noise = f"a batch scored twice differs by {gap:.3g}: {name} adds noise"
        refuse_unless(gap <= limit, noise, UserError)
        short = ([ids[:5], ids[4:9]], [[ids[5:8]], [ids[1:4]]])  # of the same length
        long = ([*short[0], ids], [*short[1], [ids[:5]]])
        alone, beside = (scores(model, padded_batch(*rows, 0)) for rows in (short, long))
        gap = float((alone - beside[:2]).abs().max())
        refuse_unless(
            gap <= one * (1 if is_reward_model else math.sqrt(3)),
            f"padding changes the score of a sequence by {gap:.3g}: {name} ignores position_ids or "
            "attention_mask",
            UserError,
        )
    if is_shared:
        gap = float((padded - scores(model, shared_prefix_batch(*pairs, 0))).abs().max())
        if not gap <= limit:
            raise UserError(
                f"a prompt computed once for several completions changes the scores of {name} by "
                f"{gap:.3g}; use --layout padded."
            )
    if (is_shared or is_projected) and not is_reward_model:
        remedy = "--layout padded" if is_shared else "--kl_estimator k2 or k3"
        refuse_changed_logits(model, padded_batch(*pairs, 0), remedy)


def scores(model: nn.Module, batch: AnyBatch) -> Tensor:
    """Scores (B,) of whole completions. Collective."""
    with torch.no_grad():
        result = sequence_scores(model, batch.to(distributed.device()))
    fsdp.reshard(model)
    return result


def refuse_changed_logits(model: nn.Module, batch: AnyBatch, remedy: str) -> None:
    """Raise a UserError for a policy whose logits are not what its head puts out. Collective.

    The head is made to put out a large number everywhere, so that no cap can be missed.
    """
    lm: Any = model.lm
    logits: list[Tensor] = []
    head = lm.get_output_embeddings()
    hooks = [
        head.register_forward_hook(lambda head, inputs, output: torch.full_like(output, 1024.0)),
        lm.register_forward_hook(lambda lm, inputs, output: logits.append(output.logits)),
    ]
    scores(model, batch)
    for hook in hooks:
        hook.remove()
    if not bool((logits[0] == 1024.0).all()):
        raise UserError(f"{type(lm).__name__} scales or caps its logits; use {remedy}.")


def stop_token_is_trained(
    examples: Sequence[Example], stop_ids: Sequence[int], config: TrainConfig
) -> None:
    """Raise unless turns that were not cut end in a stop token, which the mask counts."""
    if not (config.self_check and config.require_stop_token):
        return
    looked_at = examples[:256]
    ends = [(e, end - 1) for e in looked_at for _, end in e.answers]
    ended = [(e, place) for e, place in ends if e.completions[0][place] in stop_ids]
    if not ended:
        raise UserError(
            f"none of the first {len(looked_at)} training completions ends in a stop token, so "
            "that stopping would not be trained: all are longer than --max_completion_length "
            f"{config.max_completion_length}; raise it, or say --require_stop_token false where "
            "completions are cut by design."
        )
    example, place = ended[0]
    rows = ([example.prompt_ids], [example.completions], stop_ids[0])
    mask = padded_batch(*rows, trained=[example.trained]).completion_mask
    refuse_unless(bool(mask[0, place]), "the stop token is outside the loss")


def equal_across_ranks(name: str, parameter: Tensor) -> None:
    """The bits of a sharded parameter, once gathered, are those of every rank.

    Raises a RuntimeError if not, as of a head made after sharding.
    """
    value = parameter.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    spread = distributed.all_reduce_max(value) + distributed.all_reduce_max(-value)
    refuse_unless(not bool(spread.any()), f"{name} differs between ranks")


def dpo_starts_at_ln_2(logps: Tensor, ref_logps: Tensor) -> None:
    """A policy that equals its reference has the DPO loss ln 2, whatever beta and smoothing are.

    Both are (N, 2), of pairs before the first step. Raises RuntimeError if it has not.
    """
    losses = preference_loss(*logps.unbind(-1), *ref_logps.unbind(-1), beta=1.0)
    loss = float(losses.mean())
    refuse_unless(
        abs(loss - math.log(2)) <= 1e-3,  # also in bfloat16: the same sums on both sides
        f"the first DPO loss is {loss:.5f}, not ln 2: policy and reference differ",
    )


def sampler_equals_trainer(
    policy: nn.Module,
    batch: AnyBatch,  # B completions that the sampler has just drawn
    sampled_logps: Tensor,  # (B, C) recorded while sampling
    ref_token_logps: Tensor | None,  # (B, C) of the reference; None if it is another model
    config: TrainConfig,
    temperature: float,  # of sampling
) -> None:
    """Before the first update, sampler, trainer and reference are one distribution.

    So the ratio to the sampling-time policy is 1, and the KL to a reference that was loaded from
    the same weights is 0. Raises RuntimeError if they are not.
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


def refuse_unless(
    holds: bool, message: str, kind: type[RuntimeError | UserError] = RuntimeError
) -> None:
    """Raise an error that says how to go on regardless: a UserError for what a user chose."""
    if not holds:
        raise kind(f"self-check failed: {message} (--self_check false skips this).")
