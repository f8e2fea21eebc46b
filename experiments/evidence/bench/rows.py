"""Rows of the benchmark: which model is trained, on how much per step, for how many steps.

Every step of a row works on the same texts, a whole file at a time: both sides then do the same
work in every step, whatever order they read in. Only sampled completions differ.
"""

from dataclasses import dataclass
from typing import Any

MAX_PROMPT_LENGTH = 384  # tokens
MAX_COMPLETION_LENGTH = 56  # tokens, stop token included
REACH_MEMORY = 0.6  # peak memory, as a share of TRL's
LEARNING_RATE = 1e-6  # so small that samples keep their lengths
BETA = 0.04  # weight of GRPO's KL, above 0 so that the reference takes part


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-2."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    num_positions: int


SHAPES = {
    "tiny": Shape(4, 256, 4, 4096, 512),
    "gpt2-small": Shape(12, 768, 12, 50257, 1024),
    "gpt2-large": Shape(36, 1280, 20, 50257, 1024),
}
# Which kind of text rows a stage reads
KINDS = {"sft": "sft", "reward": "preference", "dpo": "preference", "grpo": "prompts"}


@dataclass(frozen=True)
class BenchRow:
    """One line of the table."""

    name: str
    stage: str  # sft, reward, dpo or grpo
    unit: str  # what is counted per second
    num_rows: int  # rows of text per step: prompts with a completion, pairs, or prompts
    steps: int
    warmup: int  # steps that are run and not counted
    reach: float | None  # speed to reach with the tiny model, in units of TRL's
    num_generations: int = 0
    with_reward_model: bool = False

    @property
    def kind(self) -> str:
        """Kind of its text rows."""
        return KINDS[self.stage]

    @property
    def data_name(self) -> str:
        """Name of its file of texts in the fixture."""
        return f"{self.kind}-{self.num_rows}"


def _grpo(
    name: str, num_rows: int, group: int, steps: int, reach: float | None, **more: Any
) -> BenchRow:
    # 64 rollouts are warm after one step, and take TRL the time of eight steps of 8.
    warmup = 1 if num_rows * group >= 64 else 2
    return BenchRow(name, "grpo", "rollouts/s", num_rows, steps, warmup, reach, group, **more)


ROWS = {
    row.name: row
    for row in (
        BenchRow("sft", "sft", "tokens/s", 16, 6, 2, 1.8),
        BenchRow("reward", "reward", "pairs/s", 8, 6, 2, 2.2),
        BenchRow("dpo-precomputed", "dpo", "pairs/s", 8, 6, 2, 3.0),
        _grpo("grpo-1x8", 1, 8, 7, 6.0),
        _grpo("grpo-1x16", 1, 16, 5, 8.0),
        _grpo("grpo-8x8", 8, 8, 3, 9.0),
        _grpo("grpo-1x64", 1, 64, 3, 11.0),
        _grpo("grpo-1x8-reward-model", 1, 8, 6, None, with_reward_model=True),
    )
}


def num_steps(row: BenchRow, model: str) -> tuple[int, int]:
    """Steps of a run, and how many of them are warm-up; fewer where a step takes minutes."""
    if model == "tiny":
        return row.steps, row.warmup
    return (2 if row.warmup == 1 else 3), 1


GPU_ROWS = {
    row.name: row
    for name, share, steps, warmup in (("gpu", 1, 6, 2), ("tiny", 16, 2, 1))
    for row in (
        BenchRow(f"{name}-sft", "sft", "tokens/s", 64 // share, steps, warmup, None),
        BenchRow(f"{name}-reward", "reward", "pairs/s", 32 // share, steps, warmup, None),
        BenchRow(f"{name}-dpo", "dpo", "pairs/s", 32 // share, steps, warmup, None),
        BenchRow(f"{name}-grpo", "grpo", "rollouts/s", 16 // share, steps, warmup, None, 8),
    )
}
EVERY_ROW = ROWS | GPU_ROWS
