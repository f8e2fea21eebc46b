"""Completions that could not be rewarded are kept, with what the function raised.

    output_dir/failed/step_00000012/rewards_rank_1/
        config.yaml       of the run
        rollouts.jsonl    the prompts that rank 1 had, each with its columns and its completions
        traceback.txt     of a function that raised

Only the rank whose function failed knows of it, so it writes alone.
"""

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import distributed
from common.config import TrainConfig, UserError
from common.data import Example
from common.exits import failures
from common.record.folder import CONFIG, save_config
from common.rewards.scorer import RewardScorer
from common.sampling.sampler import Rollouts


@contextmanager
def kept(
    scorer: RewardScorer,
    examples: Sequence[Example],
    rollouts: Rollouts,
    config: TrainConfig,
    step: int,
    total_steps: int,
) -> Iterator[None]:
    """Around the call of the reward functions: if it fails, keep what they were given.

    Args:
        scorer: of the run, for the completions' texts.
        examples: N prompts of this rank.
        rollouts: their N*K completions.
        config: of the run.
        step: that is being made, counted from 0.
        total_steps: of the run.

    Raises:
        UserError: a function failed, as `RewardSet` says it, and where the completions are.
        RuntimeError: the same of a reward model.
    """
    try:
        yield
    except (UserError, RuntimeError) as error:
        if failures.lost_peers(error):
            raise
        made = min(step + 1, total_steps)  # behind the last step there are samples to be judged
        place = f"failed/step_{made:08d}/rewards_rank_{distributed.rank()}"
        folder = Path(config.output_dir) / place
        told = str(error).removesuffix(".")
        try:
            keep(folder, scorer, examples, rollouts)
            save_config(folder / CONFIG, config)
            if error.__cause__ is not None:
                text = "".join(traceback.format_exception(error.__cause__))
                (folder / "traceback.txt").write_text(text, "utf-8", "backslashreplace")
        except OSError as refusal:
            raise type(error)(f"{told}; its completions were not kept: {refusal}") from error
        raise type(error)(f"{told}; its completions are in {folder}.") from error


def keep(
    folder: Path, scorer: RewardScorer, examples: Sequence[Example], rollouts: Rollouts
) -> None:
    """Write a line for each prompt; an `OSError` if the disk refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = rollouts.texts(scorer.tokenizer)
    num_samples = len(texts) // len(examples)
    with (folder / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for n, example in enumerate(examples):
            places = range(n * num_samples, (n + 1) * num_samples)
            line = {
                "row": example.row,
                "prompt": example.prompt,
                "messages": example.messages,
                "prompt_ids": example.prompt_ids,
                "columns": example.columns,
                "completions": [texts[i] for i in places],
                "completion_ids": [rollouts.completion_ids[i] for i in places],
                "has_stop": [bool(rollouts.has_stop[i]) for i in places],
            }
            file.write(json.dumps(line, default=str) + "\n")  # a column may hold a date
