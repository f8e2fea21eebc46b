"""Text and log-probabilities (nats) of every token in a table of samples.

They show where a policy has moved from its reference: the log-ratio of a token is `token_logps -
ref_token_logps`, and a report colours the text by it. Computed for the few prompts of a table only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from common import data, distributed
from common.config.stages import CommonConfig
from common.data import Example
from common.model import fsdp
from common.text.example import Vocabulary

NUM_DECIMALS = 5  # of a log-probability in a file that people open


def texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as decoded alone; a character of several tokens is shown as not decodable."""
    return [tokenizer.decode([token]) for token in ids]


def rounded(logps: Sequence[float]) -> list[float]:
    """The values with `NUM_DECIMALS` decimals."""
    return [round(value, NUM_DECIMALS) for value in logps]


@torch.no_grad()
def token_logps(
    model: nn.Module,
    examples: Sequence[Example],
    config: CommonConfig,
    vocabulary: Vocabulary,
    temperature: float = 1.0,
) -> list[list[float]]:
    """Log-probability of every completion token of a policy or reference, rounded. Collective.

    Every rank has the same N prompts with K completions each, and computes all of them: they are
    few. Returns (N*K, ragged) nats, prompt-major.
    """
    groups: list[data.PromptGroup] = []
    all_logps: list[list[float]] = []
    for example in examples:
        slots = list(range(len(all_logps), len(all_logps) + len(example.completions)))
        groups += data.cut_group(example.prompt_ids, example.completions, slots, config)
        all_logps += [[] for _ in slots]
    for packed in data.pack_micro_batches(groups, config):
        batch = data.collate(packed, config, vocabulary.pad_id)
        logps = model(batch.to(distributed.device()), temperature=temperature).token_logps.cpu()
        for row, slot in enumerate(batch.slots.tolist()):
            if batch.is_real[row]:
                all_logps[slot] = rounded(logps[row, batch.completion_mask[row]].tolist())
    if groups:
        fsdp.reshard(model)
    return all_logps


def pair_columns(
    examples: Sequence[Example],
    logps: Sequence[list[float]],
    ref_logps: Sequence[list[float]] | None,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """Columns of a table about N pairs: tokens and log-probabilities of chosen and rejected.

    `logps` and, with a reference, `ref_logps` are (2N, ragged), as `token_logps` gives them.
    """
    columns: dict[str, Any] = {}
    for k, name in enumerate(("chosen", "rejected")):
        columns[f"{name}_tokens"] = [
            texts(vocabulary.tokenizer, e.completions[k]) for e in examples
        ]
        columns[f"{name}_token_logps"] = list(logps[k::2])
        if ref_logps is not None:
            columns[f"ref_{name}_token_logps"] = list(ref_logps[k::2])
    return columns
