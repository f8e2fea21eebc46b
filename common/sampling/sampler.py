"""Sampling: a prompt's keys and values made and kept once, noise a function of what is sampled.

A token is drawn by inverse CDF at uniform numbers hashed from (seed, step, prompt, sample,
position), so a completion does not depend on the rank or batch that drew it: up to the rounding of
a matrix product in a batch of another shape, for which `draw_token` leaves little room.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from common import distributed, noise, padding
from common.config import CommonConfig
from common.data import Example
from common.model import replica
from common.record.terminal import progress_bar, show_status
from common.sampling import token_records
from common.sampling.decode import CopyingDecoder, SharedDecoder

DROP_FRACTION = 0.25  # finished rows leave the cache in groups: each removal copies it whole


@dataclass
class Rollouts:
    """Completions of N prompts, K each, prompt-major, cut after their first stop token."""

    completion_ids: list[list[int]] = field(default_factory=list)  # (N*K, ragged)
    token_logps: list[list[float]] = field(default_factory=list)  # (N*K, ragged) nats, float32
    has_stop: list[bool] = field(default_factory=list)  # False: stopped by the length limit

    @property
    def lengths(self) -> Tensor:
        """(N*K,) int64, tokens of each completion."""
        return torch.tensor([len(ids) for ids in self.completion_ids])

    def extend(self, other: "Rollouts") -> None:
        """Append another batch of prompts."""
        self.completion_ids += other.completion_ids
        self.token_logps += other.token_logps
        self.has_stop += other.has_stop

    def numbered(self, num_prompts: int) -> Tensor:
        """(N, K) int64: a number for each completion, the same for the same tokens."""
        numbers: dict[tuple[int, ...], int] = {}
        found = [numbers.setdefault(tuple(ids), len(numbers)) for ids in self.completion_ids]
        return torch.tensor(found).view(num_prompts, -1)

    def texts(self, tokenizer: Any) -> list[str]:
        """The completions as text, without the stop token."""
        return [
            tokenizer.decode(ids[:-1] if stopped else ids)
            for ids, stopped in zip(self.completion_ids, self.has_stop, strict=True)
        ]


def draw(logps: Tensor, uniforms: Tensor) -> Tensor:
    """The token whose interval of the cumulative distribution holds the uniform number.

    Args:
        logps: (B, V) float32 log-probabilities.
        uniforms: (B,) float64 in (0, 1).

    Returns:
        (B,) ids; a token of probability 0 is never drawn.
    """
    cumulative = logps.double().exp().cumsum(-1)  # (B, V)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]  # the sum is 1 only up to rounding
    tokens: Tensor = torch.searchsorted(cumulative, target).squeeze(-1)
    return tokens.clamp_(max=logps.shape[-1] - 1)


def draw_token(logps: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a block of about sqrt(V) neighbouring tokens, then a token of the block.

    The distribution is that of `draw`. But a rounding error in the logits moves every boundary of a
    cumulative distribution, and another token is drawn when a uniform number lies in between. Here
    it meets 2 sqrt(V) boundaries, not V: between models that 50 steps on 1 and on 2 ranks made (V =
    1024) 2e-6 of the tokens change, not 2e-5. One pass over the vocabulary instead of a cumulative
    sum in float64 is also quicker: 10 times on a CPU with V = 50257.

    Args:
        logps: (B, V) float32 log-probabilities.
        uniforms: (B, 2) float64 in (0, 1), independent.

    Returns:
        (B,) ids; a token of probability 0 is never drawn.
    """
    size = math.isqrt(logps.shape[-1] - 1) + 1
    blocks = nn.functional.pad(logps, (0, -logps.shape[-1] % size), value=-math.inf)
    blocks = blocks.view(len(logps), -1, size)  # (B, V / size, size)
    block = draw(blocks.logsumexp(-1), uniforms[:, 0])  # (B,)
    inside = blocks[torch.arange(len(logps), device=logps.device), block]  # (B, size)
    return block * size + draw(inside, uniforms[:, 1])


def restrict(logps: Tensor, top_k: int, top_p: float) -> Tensor:
    """Log-probabilities (B, V), -inf where a token may not be drawn; not normalised again.

    Args:
        logps: (B, V).
        top_k: only the k most likely tokens; 0 for all.
        top_p: only the fewest tokens, most likely first, that hold this share (Holtzman et al.
            2020); 1 for all.
    """
    if 0 < top_k < logps.shape[-1]:
        threshold = logps.topk(top_k, -1).values[:, -1:]
        logps = logps.masked_fill(logps < threshold, -math.inf)
    if top_p < 1:
        ordered, tokens = logps.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # share of the more likely
        logps = logps.scatter(-1, tokens, ordered.masked_fill(before >= top_p, -math.inf))
    return logps


class Sampler:
    """Samples from a policy that is being trained, through a plain copy of its weights."""

    def __init__(
        self, policy: nn.Module, tokenizer: Any, stop_ids: Sequence[int], config: CommonConfig
    ) -> None:
        """Prepare the copy; `policy.lm` is the Hugging Face model."""
        self.policy = policy
        self.tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self.config = config
        self.copy = replica.RolloutCopy(policy.lm, config)

    @torch.no_grad()
    def sample(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        step: int = 0,
        report: Callable[[str], object] | None = None,
    ) -> Rollouts:
        """Complete this rank's prompts; ranks may differ in length. Collective at its start only.

        Args:
            examples: N prompts; their row numbers identify them in the noise.
            num_samples: completions per prompt, K.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: see `restrict`. The log-probabilities returned are those before restricting.
            top_p: see `restrict`.
            step: of the run; another step draws other completions.
            report: told what is happening, for a progress bar.
        """
        rollouts = Rollouts()
        with self.copy.gathered(self.policy) as lm, replica.packed(lm):
            for start, end, first, count in self.parts(examples, num_samples):
                part = examples[start:end]
                rollouts.extend(
                    decode(
                        lm,
                        [example.prompt_ids for example in part],
                        keys=torch.tensor([example.row for example in part]),
                        num_samples=count,
                        first_sample=first,
                        stop_ids=self.stop_ids,
                        max_completion_length=self.config.max_completion_length,
                        temperature=temperature,
                        top_k=top_k,
                        top_p=top_p,
                        seed=noise.derive_seed(self.config.seed, "sampling", step),
                        pad_id=self.tokenizer.pad_token_id,
                        layout=self.config.layout,
                        title=f"prompts {start + 1} to {end} of {len(examples)}",
                        report=report,
                    )
                )
        return rollouts

    def parts(
        self, examples: Sequence[Example], num_samples: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """What is decoded together: prompts start to end, and of each `count` samples from `first`.

        As many whole groups as the limits on completions and on cached tokens let in; the samples
        of a group that is too large alone come in several parts.
        """
        at_once, room = self.config.generation_batch_size, self.config.generation_cache_tokens
        own = num_samples * self.config.max_completion_length
        start = 0
        while start < len(examples):
            end, tokens = start, 0
            while end < len(examples) and (end + 1 - start) * num_samples <= at_once:
                tokens += len(examples[end].prompt_ids) + own
                if tokens > room:
                    break
                end += 1
            if end > start:
                yield start, end, 0, num_samples
            else:
                end = start + 1
                left = room - len(examples[start].prompt_ids)
                count = max(1, min(at_once, left // self.config.max_completion_length))
                for first in range(0, num_samples, count):
                    yield start, end, first, min(count, num_samples - first)
            start = end

    def sample_shared(
        self, examples: Sequence[Example], *, temperature: float, title: str
    ) -> Rollouts:
        """Complete every prompt once, shared by the ranks; each gets all, in order. Collective."""
        rank, world_size = distributed.rank(), distributed.world_size()
        mine = list(range(rank, len(examples), world_size))
        with progress_bar(title, len(mine), unit="prompt", active=distributed.is_rank0()) as bar:
            local = self.sample(
                [examples[i] for i in mine],
                temperature=temperature,
                report=lambda text: show_status(bar, f"{title}: {text}"),
            )
        shape = (len(examples), self.config.max_completion_length)
        ids, logps = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        lengths, has_stop = torch.zeros(2, len(examples), dtype=torch.long)
        for place, i in enumerate(mine):
            lengths[i] = length = len(local.completion_ids[place])
            ids[i, :length] = torch.tensor(local.completion_ids[place])
            logps[i, :length] = torch.tensor(local.token_logps[place])
            has_stop[i] = local.has_stop[place]
        ids, logps, lengths, has_stop = map(
            distributed.all_reduce_sum, (ids, logps, lengths, has_stop)
        )
        return Rollouts(
            [row[:n] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)],
            [row[:n] for row, n in zip(logps.tolist(), lengths.tolist(), strict=True)],
            has_stop.bool().tolist(),
        )

    def table(
        self,
        examples: Sequence[Example],
        rollouts: Rollouts | None = None,
        **columns: Sequence[Any],
    ) -> list[dict[str, Any]]:
        """Rows of a table of samples, and of each the tokens with what they got. Collective.

        A row has the prompt, the completion, further columns, why it stopped, and as lists, which
        are not printed, its `tokens` and their `token_logps` (nats, at the temperature sampled at;
        at 1 where the most likely token was taken).

        Args:
            examples: N prompts. Without rollouts the first `num_sample_prompts` are completed with
                their most likely tokens.
            rollouts: K completions of each, prompt-major.
            columns: one value per completion.
        """
        if rollouts is None:
            examples = examples[: self.config.num_sample_prompts]
            if not examples:
                return []  # and no weights are gathered
            rollouts = self.sample(examples, temperature=0)
        per_prompt = len(rollouts.has_stop) // max(1, len(examples))
        return [
            {
                "prompt": examples[i // per_prompt].prompt,
                "completion": text,
                **{name: values[i] for name, values in columns.items()},
                "stopped by": "stop token" if rollouts.has_stop[i] else "length limit",
                "tokens": token_records.texts(self.tokenizer, rollouts.completion_ids[i]),
                "token_logps": token_records.rounded(rollouts.token_logps[i]),
            }
            for i, text in enumerate(rollouts.texts(self.tokenizer))
        ]


def decode(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Tensor,
    num_samples: int,
    stop_ids: Sequence[int],
    max_completion_length: int,
    temperature: float,
    seed: int,
    pad_id: int,
    layout: str = "shared_prefix",
    first_sample: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    title: str = "",
    report: Callable[[str], object] | None = None,
) -> Rollouts:
    """Sample one batch: prefill the prompts once, then one token per forward for the live rows."""
    device = lm.get_input_embeddings().weight.device
    decoder: SharedDecoder | CopyingDecoder
    if layout == "shared_prefix":
        decoder = SharedDecoder(lm, prompts, num_samples, max_completion_length)
    else:
        decoder = CopyingDecoder(lm, prompts, num_samples, pad_id)
    num_rows = len(prompts) * num_samples
    uniforms = noise.uniform(  # (B, C, 2): for a block of tokens, and for the token in it
        seed,
        keys.repeat_interleave(num_samples)[:, None, None],
        (first_sample + torch.arange(num_samples)).repeat(len(prompts))[:, None, None],
        torch.arange(max_completion_length)[:, None],
        torch.arange(2),
    ).to(device)
    stops = torch.tensor(list(stop_ids), device=device)
    tokens_out = torch.full((num_rows, max_completion_length), pad_id, device=device)  # (B, C)
    logps_out = torch.zeros(num_rows, max_completion_length, device=device)  # (B, C)
    rows = torch.arange(num_rows, device=device)  # which output row each decoded row writes
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)
    logits = decoder.logits
    for position in range(max_completion_length):
        if report:
            report(f"{title}, token {position + 1} of {max_completion_length}")
        logps = torch.log_softmax(logits.float() / (temperature or 1.0), -1)  # (B', V)
        if temperature == 0:
            tokens = logps.argmax(-1)
        else:
            tokens = draw_token(restrict(logps, top_k, top_p), uniforms[rows, position])
        tokens_out[rows, position] = torch.where(finished, pad_id, tokens)
        logps_out[rows, position] = logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        finished = finished | torch.isin(tokens, stops)
        live = int((~finished).sum())
        if live == 0 or position + 1 == max_completion_length:
            break
        if live <= (1 - DROP_FRACTION) * len(rows):
            kept = (~finished).nonzero().squeeze(-1)
            decoder.keep(kept)
            rows, finished, tokens = rows[kept], finished[kept], tokens[kept]
        logits = decoder.step(tokens)
    return cut(tokens_out, logps_out, position + 1, stop_ids)


def cut(tokens: Tensor, logps: Tensor, length: int, stop_ids: Sequence[int]) -> Rollouts:
    """Keep each row up to its first stop token."""
    tokens, logps = tokens[:, :length], logps[:, :length]
    mask, has_stop = padding.cut_at_stop(tokens, stop_ids)
    lengths = mask.sum(-1).tolist()
    return Rollouts(
        [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)],
        [row[:n] for row, n in zip(logps.tolist(), lengths, strict=True)],
        has_stop.tolist(),
    )
