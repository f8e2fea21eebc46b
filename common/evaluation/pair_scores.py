"""Metrics and tables of pairs by the scores of their completions."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from common.config.stages import TrainConfig
from common.evaluation.accuracy import outcomes, preference_accuracy
from common.losses import wins
from common.record.metrics import Accumulator
from common.text.example import Example, Vocabulary


def held_out_metrics(scores: Tensor, losses: Tensor) -> dict[str, float]:
    """Metrics of N held-out pairs by their scores (N, 2), chosen first, and losses (N,)."""
    margin, loss = (scores[:, 0] - scores[:, 1]).mean(), losses.mean()
    metrics = preference_accuracy(outcomes(*scores.unbind(1))).metrics
    return metrics | {"eval_reward_margin": float(margin), "eval_loss": float(loss)}


def add_pair_metrics(
    metrics: Accumulator, rewards: Tensor, is_real: Tensor, **further: Tensor
) -> None:
    """Add the metrics of N pairs by their rewards (N, 2), implicit ones or a reward model's.

    `further` metrics (N,) come first. Where `is_real` (N,) is False a pair is filler that counts
    nowhere.
    """
    chosen, rejected = rewards.detach().unbind(-1)  # (N,) each
    columns = {
        **further,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
        "accuracy": wins(chosen, rejected),
    }
    for name, values in columns.items():
        metrics.add(name, (values * is_real).sum(), is_real.sum())


def pair_table(
    examples: Sequence[Example], scores: Tensor, vocabulary: Vocabulary, config: TrainConfig
) -> list[dict[str, Any]]:
    """Rows to print: prompt end, both completions and their scores (N, 2)."""
    table = []
    names = ("prompt", "chosen", "rejected", "chosen score", "rejected score")
    for example, score in zip(examples[: config.num_sample_prompts], scores.tolist(), strict=False):
        texts = vocabulary.tokenizer.batch_decode(example.completions, skip_special_tokens=True)
        table.append(dict(zip(names, (example.prompt, *texts, *score), strict=True)))
    return table
