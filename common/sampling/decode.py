"""Drawing completions one token at a time, from uniform numbers that decide every token.

A token is drawn by inverse CDF, so a completion does not depend on the batch that drew it: up to
the rounding of a matrix product in a batch of another shape, for which `draw_token` leaves little
room.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from common import padding
from common.batch import on_device
from common.errors import UserError
from common.padding import cut_at_stop
from common.sampling.graphs import StepGraphs
from common.sampling.shared import SharedDecoder

DROP_FRACTION = 0.25  # finished rows leave the cache in groups: each removal copies it whole
CHECK_EVERY = 8  # tokens on a GPU: the host waits for it to see which rows have finished


def inverse_cdf(logps: Tensor, uniforms: Tensor) -> Tensor:
    """The tokens (B,) whose interval of the cumulative distribution holds the uniform numbers.

    Of log-probabilities (B, V) and float64 numbers (B,) in (0, 1). A token of probability 0 is
    never drawn.
    """
    return by_weights(logps.double().exp(), uniforms)


def by_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`inverse_cdf` of weights (B, V) that are in proportion to the probabilities."""
    cumulative = weights.double().cumsum(-1)  # (B, V)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]  # their sum need not be 1
    tokens: Tensor = torch.searchsorted(cumulative, target).squeeze(-1)
    return tokens.clamp_(max=weights.shape[-1] - 1)


def draw_token(logps: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a block of about sqrt(V) neighbouring tokens, then a token of the block.

    The distribution is that of `inverse_cdf`. But a rounding error in the logits moves every
    boundary of a cumulative distribution, and another token is drawn when a uniform number lies in
    between. Here it meets 2 sqrt(V) boundaries, not V: between models that 50 steps on 1 and on 2
    ranks made (V = 1024) 2e-6 of the tokens change, not 2e-5. One pass over the vocabulary instead
    of a cumulative sum in float64 is also quicker: 10 times on a CPU with V = 50257.

    Of log-probabilities (B, V) and independent float64 numbers (B, 2) in (0, 1).
    """
    size = math.isqrt(logps.shape[-1] - 1) + 1
    weights = nn.functional.pad(logps.exp(), (0, -logps.shape[-1] % size))
    blocks = weights.view(len(logps), -1, size)  # (B, V / size, size)
    block = by_weights(blocks.sum(-1), uniforms[:, 0])  # (B,)
    inside = blocks[torch.arange(len(logps), device=logps.device), block]  # (B, size)
    tokens = block * size + by_weights(inside, uniforms[:, 1])
    return tokens.clamp(max=logps.shape[-1] - 1)  # of scores that are nan the last, for `decode`


def restrict(logps: Tensor, top_k: int, top_p: float) -> Tensor:
    """Log-probabilities (B, V), -inf where a token may not be drawn; not normalised again.

    May be drawn: the `top_k` most likely tokens (0 for all), and of these the fewest, most likely
    first, that hold the share `top_p` (Holtzman et al. 2020).
    """
    if 0 < top_k < logps.shape[-1]:
        threshold = logps.topk(top_k, -1).values[:, -1:]
        logps = logps.masked_fill(logps < threshold, -math.inf)
    if top_p < 1:
        ordered, tokens = logps.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # share of the more likely
        logps = logps.scatter(-1, tokens, ordered.masked_fill(before >= top_p, -math.inf))
    return logps


class CopyingDecoder:
    """The plain way: transformers' cache, a padded prompt's keys and values for every sample."""

    def __init__(
        self, lm: Any, prompts: Sequence[Sequence[int]], num_samples: int, pad_id: int
    ) -> None:
        """Prefill N prompts, padded on the left; `logits` (N*K, V) follow them.

        A UserError for a model without attention, as Mamba, or with another forward for one token.
        """
        module = sys.modules[type(lm).__module__]
        classes = [each for each in vars(module).values() if isinstance(each, type)]
        defined = [each for each in classes if each.__module__ == module.__name__]
        special = [each for each in defined if issubclass(each, DynamicCache)]  # as of MiniMax
        self.cache = special[0]() if special else DynamicCache(config=lm.config)
        accepted = inspect.signature(lm.forward).parameters
        self.cache_name = "past_key_values" if "past_key_values" in accepted else ""
        # transformers 5.24 renames it to cache, as a few models call a cache of another kind.
        if "cache" in accepted and re.search(r"\bCache\b", str(accepted["cache"].annotation)):
            self.cache_name = "cache"
        layers = self.cache.layers
        has_attention = special or any(isinstance(layer, DynamicLayer) for layer in layers)
        if not (self.cache_name and has_attention):
            raise UserError(
                f"{type(lm).__name__} keeps no keys and values and cannot be sampled from; train "
                "it with --num_sample_prompts 0, and not by GRPO."
            )
        limits = (getattr(module, "time_step_limit", (0.0,)) for module in lm.modules())
        if any(limit[0] > 0 for limit in limits):  # Nemotron-H in transformers 5.23
            raise UserError(
                f"{type(lm).__name__} limits its time steps in a whole text, not token by token, "
                "so that what it samples differs from what is trained; train it with "
                "--num_sample_prompts 0, and not by GRPO."
            )
        device = lm.get_input_embeddings().weight.device
        ids, mask = (on_device(x, device) for x in padding.left_pad(prompts, pad_id))  # (N, P)
        positions = padding.position_ids(mask)  # (N, P)
        self.lm = lm
        self.is_padded = len(set(map(len, prompts))) > 1
        logits = self.forward(ids, mask, positions)  # (N, V)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)  # (B,)
        # Layers with linear attention have no `batch_repeat_interleave`, nor `batch_select_indices`
        # (transformers 5.23); all have the other. MiniMax's cache does not reorder its states.
        self.select = self.cache.batch_select_indices if special else self.cache.reorder_cache
        self.select(rows)
        self.logits, self.mask, self.positions = logits[rows], mask[rows], positions[rows, -1:]

    def forward(self, input_ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Logits (B, V) that follow the last token."""
        logits: Tensor = self.lm(
            input_ids=input_ids,
            attention_mask=mask.long() if self.is_padded else None,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        ).logits
        return logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token (B',) to every row; logits (B', V) of the next."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], -1)
        self.positions = self.positions + 1
        return self.forward(tokens[:, None], self.mask, self.positions)

    def keep(self, kept: Tensor) -> Tensor:
        """Drop the other rows; takes indices on the host, and returns them on the device."""
        kept = on_device(kept, self.mask.device)
        self.mask, self.positions = self.mask[kept], self.positions[kept]
        self.select(kept)
        return kept


# Called as tokens are drawn, with the part of the completions that they are: 1 for a whole one
Report = Callable[[float], object]


@dataclass(frozen=True)
class Settings:
    """Settings by which every completion of a run is sampled."""

    stop_ids: Sequence[int]  # a completion ends with the first of them
    pad_id: int
    layout: str = "shared_prefix"
    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_k: int = 0  # see `restrict`; log-probabilities are those before restricting
    top_p: float = 1.0
    graphs: StepGraphs | None = None  # of the shared layout, which later calls replay


def rows_to_keep(finished: Tensor, num_rows: int, position: int) -> Tensor | None:
    """Indices on the host of the rows that stay in the batch; None for all of them.

    `finished` (B',) has an entry for each row in the batch, which began with `num_rows`. Rows are
    dropped if at least `DROP_FRACTION` of them can be. On a CPU all finished rows are dropped. On a
    GPU the host checks every `CHECK_EVERY` tokens, and keeps num_rows / 2, / 4, ... rows, finished
    ones among them, so that there are few shapes.
    """
    is_on_cpu = finished.device.type == "cpu"
    if not is_on_cpu and (position + 1) % CHECK_EVERY:
        return None
    finished = finished.cpu()
    live = int((~finished).sum())
    size = live if is_on_cpu or live == 0 else num_rows
    while size > 1 and (size + 1) // 2 >= live:
        size = (size + 1) // 2
    if size > (1 - DROP_FRACTION) * len(finished):
        return None
    return finished.int().argsort(stable=True)[:size].sort().values


def decode(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    uniforms: Tensor,
    settings: Settings,
    report: Report = lambda num_completions: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample one batch: prefill the prompts once, then one token per forward for the live rows.

    The `uniforms` of `draw_token`, (N*K, C, 2) in (0, 1), prompt-major, say how many samples of
    each of N prompts are drawn, and of how many tokens at most. Returns, of B = N*K completions on
    the host, ids (B, C) and a mask (B, C), True up to and including the first stop token; their
    log-probabilities (B, C) in nats, 0 behind; has_stop (B,). A RuntimeError if scores are nan.
    """
    device = lm.get_input_embeddings().weight.device
    num_rows, max_length = uniforms.shape[:2]
    num_samples = num_rows // len(prompts)
    decoder: Any
    if settings.layout == "shared_prefix":
        decoder = SharedDecoder(lm, prompts, num_samples, max_length, settings.graphs)
    else:
        decoder = CopyingDecoder(lm, prompts, num_samples, settings.pad_id)
    uniforms = on_device(uniforms, device)
    stops = on_device(torch.tensor(list(settings.stop_ids)), device)
    ids = torch.full((num_rows, max_length), settings.pad_id, device=device)  # (B, C)
    token_logps = torch.zeros(num_rows, max_length, device=device)  # (B, C)
    rows = torch.arange(num_rows, device=device)  # which output row each decoded row writes
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)
    logits = decoder.logits
    for position in range(max_length):
        scores = logits.float()  # (B', V)
        if settings.temperature not in (0, 1):
            scores = scores / settings.temperature
        logps = torch.log_softmax(scores, -1)
        if settings.temperature == 0:
            tokens = logps.argmax(-1)
        else:
            allowed = restrict(logps, settings.top_k, settings.top_p)
            tokens = draw_token(allowed, uniforms[rows, position])
        ids[rows, position] = torch.where(finished, settings.pad_id, tokens)
        token_logps[rows, position] = logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        finished = finished | torch.isin(tokens, stops)
        kept = rows_to_keep(finished, num_rows, position)
        is_last = position + 1 == max_length or (kept is not None and len(kept) == 0)
        report(num_rows * (max_length - position if is_last else 1) / max_length)
        if is_last:
            break
        if kept is not None:
            kept = decoder.keep(kept)
            rows, finished, tokens = rows[kept], finished[kept], tokens[kept]
        logits = decoder.step(tokens)
    ids, token_logps = ids.cpu(), token_logps.cpu()
    if token_logps.isnan().any():
        raise RuntimeError("the model that samples gives scores that are nan: it has diverged.")
    mask, has_stop = cut_at_stop(ids, settings.stop_ids)
    return ids, mask, token_logps.masked_fill(~mask, 0.0), has_stop
