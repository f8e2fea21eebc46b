"""Decoding from one copy of a prompt's keys and values, however many samples are drawn from it."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.batch import KeysByLayer, on_device, shared_prefix_batch
from common.model import shared_prefix
from common.model.projection import Scaling
from common.sampling.graphs import StepGraphs, has_fixed_shapes, padded_length

FIRST_WIDTH = 64  # keys of a sample that are read at first; doubled when they are full


class SharedDecoder:
    """Next-token logits of samples that attend to one copy of their prompt's keys and values."""

    def __init__(
        self,
        lm: Any,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        max_length: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        """Prefill N prompts, in one row without padding; `logits` (N*K, V) follow them.

        The model is one that `shared_prefix.use_shared_prefix` was called on. With `graphs` steps
        are replayed from them; no two decoders that are in use may have the same.
        """
        device = lm.get_input_embeddings().weight.device
        packed = shared_prefix_batch(prompts, [[]] * len(prompts), 0).to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts])  # (N,)
        self.lm = lm
        positions = lengths.repeat_interleave(num_samples)
        self.graphs = graphs
        self.cache = DecodingCache(lengths.tolist(), num_samples, max_length, device, graphs)
        self.positions = self.cache.hold("positions", on_device(positions, device))  # (B',) of next
        packed.layout.keys_by_layer = {}
        hidden = shared_prefix.last_hidden_states(
            lm, packed.input_ids, packed.position_ids, packed.layout
        )[0]  # (T, D)
        self.cache.take_prompts(packed.layout.keys_by_layer)
        last = on_device(lengths.cumsum(0) - 1, device)  # (N,)
        logits = self.project(hidden[last])  # (N, V)
        self.logits = logits.repeat_interleave(num_samples, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token (B',) to every row; logits (B', V) of the next.

        They are valid until the next step.
        """
        self.cache.grow()
        if self.graphs is None:
            return self.forward(tokens)
        return self.graphs.step(self.cache.shape, self.forward, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """The part of a step that the device computes, the same operations every time."""
        self.cache.append()
        hidden = shared_prefix.last_hidden_states(
            self.lm, tokens[:, None], self.positions[:, None], self.cache
        )[:, 0]  # (B', D)
        self.positions += 1
        return self.project(hidden)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) of hidden states (n, D)."""
        return Scaling.of(self.lm.config).apply(self.lm.get_output_embeddings()(hidden))

    def keep(self, kept: Tensor) -> Tensor:
        """Drop the other rows; takes indices on the host, and returns them on the device."""
        kept = self.cache.keep(kept)
        self.positions = self.cache.select(self.positions, kept)
        return kept


class DecodingCache:
    """Keys and values of N prompts, once each, and of the samples drawn from them so far.

    Every forward appends a token to every live sample. On a CPU it reads the keys so far. Elsewhere
    a graph is replayed, in which all shapes are fixed: it reads `width` keys and masks the rest.
    With `graphs` its tensors are in their memory.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        num_samples: int,
        max_length: int,
        device: torch.device,
        graphs: StepGraphs | None = None,
    ) -> None:
        """Start without keys of the prompts, of N lengths, which are prefilled in one row."""
        self.max_length, self.graphs = max_length, graphs
        self.length = 0  # tokens of each sample that the keys hold, with the one of this forward
        self.width = min(FIRST_WIDTH, max_length)  # keys of each sample that are read
        self.is_fixed = has_fixed_shapes(device)
        # (1,), of a sample's newest key
        self.column = self.hold("column", torch.full((1,), -1, device=device))
        self.longest = max(lengths) + max_length
        num_columns = padded_length(max(lengths), device)  # P
        index, mask = columns_of(torch.tensor(lengths), num_columns)
        self.index, self.mask = on_device(index, device), on_device(mask, device)  # (N, P)
        self.is_padded = len(set(lengths)) > 1
        # (B',) int64 on the host, the samples still decoded, out of N * K, prompt-major
        self.rows = torch.arange(len(lengths) * num_samples)
        self.num_samples = num_samples
        self.bias: Tensor | None = None  # (B', 1, 1, P + C) of scores, -inf where there is no key
        self.prompt_keys: KeysByLayer = {}  # (N, H', P, d) each
        self.sample_keys: KeysByLayer = {}  # (B', H', C, d) each
        self._place_rows()

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers that decide the shapes of all tensors of a forward."""
        num_prompts, num_columns = self.index.shape
        counts = (len(self.rows), num_prompts, self.num_samples)
        return *counts, num_columns, self.max_length, self.width

    def hold(self, name: Hashable, values: Tensor) -> Tensor:
        """The values, contiguous; with graphs copied to their memory."""
        return values.contiguous() if self.graphs is None else self.graphs.hold(name, values)

    def select(self, values: Tensor, kept: Tensor) -> Tensor:
        """Rows of a tensor; with graphs at the start of the memory that it is in."""
        rows = values[kept]
        return rows if self.graphs is None else values[: len(rows)].copy_(rows)

    def grow(self) -> None:
        """Make room for the next token."""
        self.length += 1
        if not self.is_fixed:
            self.width = self.length
        if self.length > self.width:
            self.width = min(2 * self.width, self.max_length)

    def append(self) -> None:
        """Move to the next column of the samples' keys."""
        self.column += 1
        if self.bias is not None:
            self.bias[..., self.index.shape[1] :].index_fill_(-1, self.column, 0.0)

    def keep(self, kept: Tensor) -> Tensor:
        """Drop the other rows; see `SharedDecoder.keep`."""
        self.rows = self.rows[kept]
        kept = on_device(kept, self.index.device)
        for layer, (keys, values) in self.sample_keys.items():
            self.sample_keys[layer] = self.select(keys, kept), self.select(values, kept)
        if self.bias is not None:
            self.bias = self.select(self.bias, kept)
        self._place_rows()
        return kept

    def _place_rows(self) -> None:
        """Give every row a place (n, g) in a rectangle, in which rows of a prompt are neighbours.

        `places` (B',) are flat indices into (N, G), None where the rows fill it in order. `fillers`
        (N * G,) are the rows at those places, any row where there is none. Fixed shapes have G = K.
        """
        num_prompts = len(self.index)
        owners = self.rows // self.num_samples  # (B',), ascending
        counts = torch.bincount(owners, minlength=num_prompts)
        self.group = self.num_samples if self.is_fixed else int(counts.max())
        first = counts.cumsum(0) - counts  # (N,)
        places = owners * self.group + torch.arange(len(owners)) - first[owners]
        self.places = self.fillers = None
        if len(owners) < num_prompts * self.group:
            fillers = torch.zeros(num_prompts * self.group, dtype=torch.long)
            fillers[places] = torch.arange(len(owners))
            places, fillers = (on_device(x, self.index.device) for x in (places, fillers))
            self.places = self.hold(("places", len(places)), places)
            self.fillers = self.hold(("fillers", len(fillers)), fillers)

    def take_prompts(self, keys_by_layer: KeysByLayer) -> None:
        """Take the prompts' keys and values, (1, H', T, d) each, as the prefill left them."""
        if self.is_padded or self.is_fixed:
            is_hidden = nn.functional.pad(~self.mask, (0, self.max_length), value=True)
            bias = torch.zeros(is_hidden.shape, device=is_hidden.device)
            bias = bias.masked_fill(is_hidden, float("-inf"))[:, None, None]
            self.bias = self.hold("bias", bias.repeat_interleave(self.num_samples, 0))
        for layer, (key, value) in keys_by_layer.items():
            # Contiguous: a batched product would copy them all for every token that is drawn.
            columns = (x[0].index_select(1, self.index.flatten()) for x in (key, value))
            pair = torch.stack([x.unflatten(1, self.index.shape).transpose(0, 1) for x in columns])
            if pair.device.type == "cpu":  # where `product` multiplies in float32: cast once
                pair = pair.float()
            shape = (2, len(self.rows), key.shape[1], self.max_length, key.shape[-1])
            prompt_keys, prompt_values = self.hold((layer, "prompts"), pair)
            sample_keys, sample_values = self.hold((layer, "samples"), pair.new_zeros(shape))
            self.prompt_keys[layer] = prompt_keys, prompt_values
            self.sample_keys[layer] = sample_keys, sample_values

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attention output (B', H, 1, d) of one layer for the next token of every live sample.

        Its query is (B', H, 1, d), its key and value (B', H', 1, d), which are stored.
        """
        keys, values = (stored[:, :, : self.width] for stored in self.sample_keys[layer])
        keys.index_copy_(2, self.column, key.to(keys.dtype))
        values.index_copy_(2, self.column, value.to(values.dtype))
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # (B', H', r, d)
        prompt_keys, prompt_values = self.prompt_keys[layer]  # (N, H', P, d)
        prompt_scores = product(self._by_prompt(grouped), prompt_keys.mT)  # (N, H', G r, P)
        scores = torch.cat([self._by_row(prompt_scores), product(grouped, keys.mT)], -1)
        if self.bias is None:
            scores = scores * scaling
        else:
            scores = torch.add(self.bias[..., : scores.shape[-1]], scores, alpha=scaling)
        shares = scores.softmax(-1).to(value.dtype)  # (B', H', r, P + width)
        prompt_shares, sample_shares = shares.split([prompt_keys.shape[2], keys.shape[2]], -1)
        output = self._by_row(product(self._by_prompt(prompt_shares), prompt_values))
        output.add_(product(sample_shares, values))
        return output.to(query.dtype).reshape(query.shape)

    def _by_prompt(self, values: Tensor) -> Tensor:
        """Values of rows (B', H', r, n), those of a prompt side by side: (N, H', G r, n)."""
        values = values if self.fillers is None else values[self.fillers]
        by_prompt: Tensor = values.unflatten(0, (-1, self.group)).transpose(1, 2).flatten(2, 3)
        return by_prompt

    def _by_row(self, values: Tensor) -> Tensor:
        """Values by prompt (N, H', G r, ...) as values of rows, (B', H', r, ...)."""
        values = values.unflatten(2, (self.group, -1)).transpose(1, 2).flatten(0, 1)
        return values if self.places is None else values[self.places]


def columns_of(lengths: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Columns (N, P) of N prompts, of some lengths up to P, that follow one another in a row.

    The columns of a short one are filled up with its last. The mask (N, P) is True at the others.
    """
    steps = torch.arange(num_columns)  # (P,)
    lengths = lengths[:, None]
    return lengths.cumsum(0) - lengths + steps.minimum(lengths - 1), steps < lengths


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products of (B, H, T, m) and (B, H, m, n), in float32 under bfloat16 too."""
    if a.device.type == "cpu":
        return a.float() @ b.float()
    flat = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return flat.view(*a.shape[:3], -1)
