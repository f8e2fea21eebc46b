"""Checks of the loaded model and data that refuse to train on something wrong.

Each is a property that must hold whatever the weights are, and takes a second or less. Collective:
every rank runs them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common import distributed
from common.batch import AnyBatch, padded_batch, shared_prefix_batch
from common.config.stages import CommonConfig, TrainConfig
from common.errors import UserError
from common.forward import CompletionScores, RewardModel
from common.losses import precise
from common.model import fsdp
from common.model.projection import Scaling
from common.objectives.preference.sigmoid import sigmoid
from common.text.example import Example, Vocabulary

# Nats per token, or of a reward, that float32 sums in another order may differ by.
FLOAT32_ROUNDING = 1e-3
# Under bf16 a correct model may differ by so many times what moving its embeddings by one unit in
# the last place changes. Pretrained models differ by 0.2 to 1, a wrong mask or position by over 5.
BF16_FACTOR = 3.0
# Tokens of the longest sequence looked at: seconds on a CPU. What rotary embeddings do beyond is
# known from the config (`checks.max_positions`).
MAX_LENGTH = 128
Ids = list[list[int]]  # of several texts
SKIP = "(--self_check false skips this)"


def only_tokens_matter(
    model: nn.Module,  # a `Policy` or `RewardModel`, sharded or not
    config: CommonConfig,
    *,
    is_projected: bool = False,  # hidden states are projected apart from the model also if padded
    seed: int = 0,  # of the random tokens
) -> None:
    """Check that scores depend on a sequence's tokens alone.

    Sequences of random tokens get the same log-probabilities, or rewards, when they are scored
    twice; next to a far longer one, which pads them on both sides; before another last token; and
    when a prompt is computed once for several completions. Mean differences are compared with what
    rounding does (`rounding_limit`). Under bf16 what is trained is checked in float32 first. A
    UserError if one of them changes scores, or the model its logits in another way: another model,
    or another layout, is needed.
    """
    if not config.self_check:
        return
    if config.bf16 and any(p.requires_grad for p in model.parameters()):
        exact = replace(config, bf16=False)
        with fsdp.in_float32(model):
            only_tokens_matter(model, exact, is_projected=is_projected, seed=seed)
    name, is_shared = type(model.lm).__name__, config.layout == "shared_prefix"
    prompts, completions = probe(model.lm, config, seed)
    short = padded_batch(prompts[1:], completions[1:], 0)  # of equal lengths: without padding
    try:
        alone = scores(model, short)  # (B, C) or (B,)
    except RuntimeError as error:
        if config.bf16 and "dtype" in str(error):  # OpenAI's GPT, Inkling 2 in transformers 5.23
            reason = f"{name} multiplies float32 by bfloat16 in its code"
            raise UserError(f"{reason}; train it with --bf16 false.") from None
        raise
    limit = rounding_limit(model, short, config, alone)

    def refuse(batch: AnyBatch, cause: str, reason: str, tokens: slice = slice(None)) -> None:
        """Refuse other scores of the short sequences, which are the last in the batch."""
        short_of_batch = scores(model, batch)[-len(alone) :]
        missing = short_of_batch.shape[-1] - alone.shape[-1] if alone.dim() == 2 else 0
        expected = nn.functional.pad(alone, (0, missing))  # padding of completions has no score
        gap = float((short_of_batch - expected)[..., tokens].abs().sum()) / alone.numel()
        by = f"by {gap:.3g} (rounding: {limit:.3g} at most)"
        if not gap <= limit:
            changes = f"{cause} changes the scores of {name} {by}"
            raise UserError(f"self-check failed: {changes}: {reason}.")

    refuse(short, "chance", f"it adds noise {SKIP}")
    padded = padded_batch(prompts, completions, 0)
    refuse(padded, "padding", f"it ignores position_ids or attention_mask {SKIP}")
    if not isinstance(model, RewardModel):
        others = [[[*ids[:-1], prompts[0][0]] for ids in group] for group in completions[1:]]
        later = padded_batch(prompts[1:], others, 0)
        refuse(later, "a later token", f"it is not causal, as an encoder {SKIP}", slice(-1))
        if is_shared or is_projected:
            remedy = "--layout padded" if is_shared else "--kl_estimator k2 or k3"
            refuse_changed_logits(model, short, remedy)
    if is_shared:
        cause = "a prompt computed once for several completions"
        refuse(shared_prefix_batch(prompts, completions, 0), cause, "use --layout padded")


def probe(lm: Any, config: CommonConfig, seed: int) -> tuple[Ids, list[Ids]]:
    """Random prompts with 1, 1, 2 and 3 completions: the first long, the others of 4 tokens.

    The completions have 8 tokens, that of the long prompt has 10.
    """
    room = min(config.max_prompt_length + config.max_completion_length, MAX_LENGTH)
    longest = max(6, min(room, config.micro_batch_tokens // 7) - 10)
    generator = torch.Generator().manual_seed(seed)
    layers = lm.get_input_embeddings(), lm.get_output_embeddings()
    vocab_size = min(layer.weight.shape[0] for layer in layers if layer is not None)

    def tokens(number: int) -> list[int]:
        return torch.randint(vocab_size, (number,), generator=generator).tolist()

    prompts = [tokens(longest), tokens(4), tokens(4), tokens(4)]
    return prompts, [[tokens(10)], *([tokens(8) for _ in range(k)] for k in (1, 2, 3))]


def scores(model: nn.Module, batch: AnyBatch, **options: Any) -> Tensor:
    """Log-probabilities (B, C) of a policy, or rewards (B,), not compiled. Collective."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        output = model(batch.to(distributed.device()), **options)
    fsdp.reshard(model)
    result: Tensor = output.token_logps if isinstance(output, CompletionScores) else output
    return result


def rounding_limit(
    model: nn.Module, batch: AnyBatch, config: CommonConfig, expected: Tensor, **options: Any
) -> float:
    """Mean difference per token, or of rewards, that rounding may make. Collective.

    bfloat16 has 8 bits: how far their rounding moves a token's log-probability depends on the
    model. It is measured: every number of the embeddings moves by up to one unit in the last place.
    """
    if not config.bf16:
        return FLOAT32_ROUNDING

    def perturb(embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        units = torch.rand(output.shape, generator=generator).to(output.device) * 2 - 1
        return (output.float() * (1 + 2**-8 * units)).to(output.dtype)

    hook = model.lm.get_input_embeddings().register_forward_hook(perturb)  # type: ignore
    moved = (scores(model, batch, **options) - expected).abs()
    hook.remove()
    number = batch.completion_mask.sum() if moved.dim() == 2 else torch.tensor(len(moved))
    return max(FLOAT32_ROUNDING, BF16_FACTOR * float(moved.sum()) / float(number.clamp(min=1)))


def refuse_changed_logits(model: nn.Module, batch: AnyBatch, remedy: str) -> None:
    """Raise a UserError for a policy that does something else to its head's output than `Scaling`.

    Collective. The head is made to put out small and large numbers, so that no cap is missed.
    """
    lm: Any = model.lm
    logits: list[Tensor] = []
    head = lm.get_output_embeddings()
    outputs = torch.linspace(-1024, 1024, head.weight.shape[0])  # (V,)
    hooks = [
        head.register_forward_hook(lambda _, inputs, output: 0 * output + outputs.to(output)),
        lm.register_forward_hook(lambda lm, inputs, output: logits.append(output.logits)),
    ]
    scores(model, batch)
    for hook in hooks:
        hook.remove()
    expected = Scaling.of(lm.config).apply(outputs.clone())
    rounded = logits[0].float().cpu()
    if not torch.allclose(rounded, expected.expand_as(rounded), rtol=2**-7, atol=2**-7):
        raise UserError(f"{type(lm).__name__} changes its logits in another way; use {remedy}.")


def stop_token_is_trained(
    examples: Sequence[Example], vocabulary: Vocabulary, config: TrainConfig
) -> None:
    """Raise unless completions that were not cut end in a stop token, which the mask counts."""
    if not (config.self_check and config.require_stop_token):
        return
    looked_at = examples[:256]
    ended = [e for e in looked_at if e.completions[0][-1] in vocabulary.stop_ids]
    if not ended:
        raise UserError(
            f"none of the first {len(looked_at)} training completions ends in a stop token, so "
            "that stopping would not be trained: all are longer than --max_completion_length "
            f"{config.max_completion_length}; raise it, as to the length that is printed above, or "
            "say --require_stop_token false where completions are cut by design."
        )
    pad_id = vocabulary.stop_ids[0]  # as GPT-2's: a mask made of the ids would leave it out
    batch = padded_batch([ended[0].prompt_ids], [ended[0].completions[:1]], pad_id)
    refuse_unless(bool(batch.completion_mask[0, -1]), "the stop token is outside the loss")


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
    chosen, rejected = precise(logps).unbind(-1)
    ref_chosen, ref_rejected = precise(ref_logps).unbind(-1)
    loss = float(sigmoid(chosen, rejected, ref_chosen, ref_rejected, beta=1.0).mean())
    refuse_unless(
        abs(loss - math.log(2)) <= 1e-3,  # also in bfloat16: the same sums on both sides
        f"the first DPO loss is {loss:.5f}, not ln 2: policy and reference differ",
    )


def sampler_equals_trainer(
    policy: nn.Module,
    batch: AnyBatch,  # B completions that the sampler has just drawn
    sampled_logps: Tensor,  # (B, C) recorded while sampling
    ref_token_logps: Tensor | None,  # (B, C) of the reference; None if it is another model
    config: CommonConfig,
    temperature: float,  # of sampling
) -> None:
    """Check that before the first update sampler, trainer and reference are one distribution.

    So the ratio to the sampling-time policy is 1, and the KL to a reference that was loaded from
    the same weights is 0. A RuntimeError if they differ by more than rounding does.
    """
    logps = scores(policy, batch, temperature=temperature)  # (B, C)
    limit = rounding_limit(policy, batch, config, logps, temperature=temperature)
    num_tokens = batch.completion_mask.sum().clamp(min=1)
    for name, others in (("sampler", sampled_logps), ("reference", ref_token_logps)):
        if others is not None:
            gap = float(((others - logps) * batch.completion_mask).abs().sum() / num_tokens)
            refuse_unless(
                gap <= limit,
                f"{name} and trainer differ by {gap:.3g} nats per token (rounding: {limit:.3g} at "
                "most)",
            )


def refuse_unless(holds: bool, message: str) -> None:
    """Raise an error that says how to go on regardless."""
    if not holds:
        raise RuntimeError(f"self-check failed: {message} {SKIP}.")
