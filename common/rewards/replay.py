"""Completions that could not be rewarded are kept, and the functions called on them again.

    output_dir/failed/step_00000012/rewards_rank_1/
        config.yaml       of the run
        rollouts.jsonl    the prompts that rank 1 had, each with its columns and its completions
        steps.json        which step of how many

Only the rank whose function failed knows of it, so it writes alone, and no state of the model is
kept: `--replay` of that folder loads none, and calls the reward functions on the same completions.
"""

import json
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import distributed
from common.config import REWARD_REPLAY, TrainConfig, UserError, save_config
from common.data import Example
from common.exits import failures, signals
from common.record.jsonl import read_jsonl
from common.rewards.scorer import RewardScorer
from common.sampling.sampler import Rollouts

STEPS = "steps.json"  # for functions that read `trainer_state`


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
            steps = {"step": step, "total_steps": total_steps}
            (folder / STEPS).write_text(json.dumps(steps) + "\n")
            save_config(folder / "config.yaml", config)
        except OSError as refusal:
            raise type(error)(f"{told}; its completions were not kept: {refusal}") from error
        shown = shlex.quote(str(folder))
        raise type(error)(
            f"{told}; this script with only --config {shown}/config.yaml --replay {shown} calls "
            "the functions on the same completions again."
        ) from error


def keep(
    folder: Path, scorer: RewardScorer, examples: Sequence[Example], rollouts: Rollouts
) -> None:
    """Write a line for each prompt; an `OSError` if the disk refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = rollouts.texts(scorer.tokenizer)
    num_samples = len(texts) // len(examples)
    with (folder / REWARD_REPLAY).open("w", encoding="utf-8") as file:
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
                "has_stop": [rollouts.has_stop[i] for i in places],
            }
            file.write(json.dumps(line, default=str) + "\n")  # a column may hold a date


def read(folder: Path) -> tuple[list[Example], Rollouts]:
    """The prompts and completions that `keep` wrote."""
    examples, rollouts = [], Rollouts()
    for line in read_jsonl(folder / REWARD_REPLAY):
        examples.append(
            Example(
                row=line["row"],
                prompt=line["prompt"],
                prompt_ids=line["prompt_ids"],
                completions=[],
                columns=line["columns"],
                messages=line["messages"],
            )
        )
        rollouts.completion_ids += line["completion_ids"]
        rollouts.has_stop += line["has_stop"]
    return examples, rollouts


def replay(scorer: RewardScorer, config: TrainConfig) -> None:
    """Call the functions on what was kept; does nothing in any other run. Collective.

    Raises:
        UserError: a function failed again; what it raised is printed with its traceback.
        RuntimeError: the same of a reward model.
        Stopped: it did not.
    """
    folder = Path(config.replay)
    if not config.replay or not (folder / REWARD_REPLAY).is_file():
        return
    scorer.load(distributed.mesh(config.num_replicas))
    examples, rollouts = read(folder)
    try:
        scorer.score(examples, rollouts, **json.loads((folder / STEPS).read_text()))
    except (UserError, RuntimeError) as error:
        if error.__cause__ is not None and distributed.is_rank0():
            traceback.print_exception(error.__cause__)
        raise
    raise signals.Stopped(
        f"replayed: the reward functions judge all {len(rollouts.has_stop)} completions."
    )
