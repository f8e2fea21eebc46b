"""The forward pass, in either layout: completion log-probabilities and entropy, or rewards.

FSDP shards these wrappers. Their `forward` is the whole pass, so the root unit is gathered once per
call and the full (B, T, V) logits never exist. They return NamedTuples or tensors because FSDP
finds the tensors to hook for backward only inside containers that it can flatten.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.batch import AnyBatch, PaddedBatch, SharedPrefixBatch
from common.model.projection import Head, exact_tf32, token_statistics
from common.model.shared_prefix import last_hidden_states


class CompletionScores(NamedTuple):
    """Per-token scores of the completions in a batch; entries past a completion are 0."""

    token_logps: Tensor  # (B, C) float32, nats
    entropy: Tensor  # (B, C) float32, nats; zeros unless asked for
    kl: Tensor  # (B, C) float32, nats, exact KL to a reference; zeros unless one is given
    hidden: Tensor | None = None  # the states that predict the completions, if asked for


@dataclass
class ReferenceStates:
    """Hidden states and head of a reference, for the exact KL to it; they get no gradient."""

    hidden: Tensor  # of the same batch: (M, D'), in the padded layout (B, C, D')
    head: Head  # whole, not a shard


class Policy(nn.Module):
    """A causal language model whose forward scores completions."""

    def __init__(self, lm: Any) -> None:
        """Wrap a Hugging Face causal language model."""
        super().__init__()
        self.lm = lm

    def forward(
        self,
        batch: AnyBatch,
        *,
        temperature: float = 1.0,  # divides the logits, as in sampling
        with_entropy: bool = False,
        with_hidden: bool = False,  # for `ReferenceStates`
        reference: ReferenceStates | None = None,  # of this batch, for the KL to it
    ) -> CompletionScores:
        """Log-probability of every completion token given the tokens before it.

        Both layouts give the same numbers up to rounding, by logits in float32.
        """
        if isinstance(batch, PaddedBatch):
            return self.score_padded(batch, temperature, with_entropy, with_hidden, reference)
        # Every prompt is computed once, and its completions do not see each other; only the M
        # states that predict a token are projected
        states = last_hidden_states(self.lm, batch.input_ids, batch.position_ids, batch.layout)
        hidden = states[0, batch.predictors]  # (M, D) of (1, T, D)
        statistics = token_statistics(
            hidden,
            Head.of(self.lm),
            batch.completion_ids.flatten()[batch.token_index],
            temperature=temperature,
            with_entropy=with_entropy,
            ref_hidden=None if reference is None else reference.hidden,
            ref_head=None if reference is None else reference.head,
        )
        shape = batch.completion_mask.shape
        token_logps, entropy, kl = (
            hidden.new_zeros(shape.numel(), dtype=torch.float32)
            .index_copy(0, batch.token_index[: len(values)], values)  # empty if not asked for
            .view(shape)
            * batch.completion_mask
            for values in statistics
        )
        return CompletionScores(token_logps, entropy, kl, hidden if with_hidden else None)

    def score_padded(
        self,
        batch: PaddedBatch,
        temperature: float,
        with_entropy: bool,
        with_hidden: bool,
        reference: ReferenceStates | None,
    ) -> CompletionScores:
        """The plain path: every completion with a copy of its prompt, through the plain model.

        Position ids come from the mask in every call: without them GPT-2 counts the left padding
        as positions and is off by up to several nats (transformers 5.23 `GPT2Model`).
        """
        num_completion_tokens = batch.completion_mask.shape[1]
        projected: list[Tensor] = []  # the head's inputs
        hook = self.lm.get_output_embeddings().register_forward_pre_hook(
            lambda head, inputs: projected.append(inputs[0])
        )
        output = self.lm(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.position_ids,
            logits_to_keep=num_completion_tokens + 1,
            use_cache=False,
        )
        hook.remove()
        # The logits at position t predict token t + 1. xLSTM returns those of all tokens.
        predicting = slice(-num_completion_tokens - 1, -1)
        logits = output.logits[:, predicting].float() / temperature  # (B, C, V)
        normaliser = logits.logsumexp(-1)  # (B, C)
        of_token = logits.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)  # (B, C)
        token_logps = (of_token - normaliser) * batch.completion_mask
        entropy, kl = torch.zeros_like(token_logps), torch.zeros_like(token_logps)
        if with_entropy:
            expected = (torch.softmax(logits, -1) * logits).sum(-1)  # (B, C)
            entropy = (normaliser - expected) * batch.completion_mask
        if reference is not None:
            logps = torch.log_softmax(logits, -1)  # (B, C, V)
            # In float32 again: under bf16 FSDP casts the inputs of a forward.
            head, bias = reference.head.weight.float(), reference.head.bias
            bias = None if bias is None else bias.float()
            with exact_tf32(reference.hidden):
                output = nn.functional.linear(reference.hidden.float(), head, bias)  # (B, C, V)
            ref_logits = reference.head.scaling.apply(output)
            ref_logps = torch.log_softmax(ref_logits / temperature, -1)
            kl = (logps.exp() * (logps - ref_logps)).sum(-1) * batch.completion_mask
        hidden = projected[0][:, predicting] if with_hidden else None  # (B, C, D)
        return CompletionScores(token_logps, entropy, kl, hidden)


class RewardModel(nn.Module):
    """A sequence classifier with one label whose forward is the reward of each sequence."""

    def __init__(self, lm: Any) -> None:
        """Wrap a Hugging Face sequence classifier with a `score` head."""
        super().__init__()
        self.lm = lm
        self.shift = float(getattr(lm.config, "reward_shift", 0.0))  # 0 where it is in the weights

    def forward(self, batch: AnyBatch) -> Tensor:
        """Reward (B,), float32, read at the last real token of each sequence."""
        if isinstance(batch, SharedPrefixBatch):
            states = last_hidden_states(self.lm, batch.input_ids, batch.position_ids, batch.layout)
            last_hidden = states[0, batch.last]  # (B, D) of (1, T, D)
        else:
            hidden = self.lm.base_model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask.long(),
                position_ids=batch.position_ids,
                use_cache=False,
            ).last_hidden_state  # (B, T, D)
            columns = torch.arange(hidden.shape[1], device=hidden.device)  # (T,)
            last = (batch.attention_mask * columns).argmax(-1)  # (B,)
            last_hidden = hidden[torch.arange(len(last), device=hidden.device), last]  # (B, D)
        rewards: Tensor = self.lm.score(last_hidden.float()).squeeze(-1)  # (B,)
        return rewards.float() + self.shift


def sequence_scores(model: nn.Module, batch: AnyBatch) -> Tensor:
    """Score (B,) of whole completions: log-probability of a policy, reward of a reward model."""
    output = model(batch)
    return output.token_logps.sum(-1) if isinstance(output, CompletionScores) else output
