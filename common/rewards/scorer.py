"""All reward functions of a run, found by name, applied to rollouts."""

import json
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainerState

from common import distributed
from common.config import CommonConfig, TrainConfig
from common.data import Example
from common.errors import UserError
from common.rewards.call import Rewards, RewardSet, is_collective
from common.rewards.functions import find_function, is_built_in
from common.sampling.sampler import Rollouts


class RewardScorer:
    """The reward functions of a run, applied to rollouts."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        tokenizer: Any,
        config: CommonConfig,
        beside: Sequence[str] = (),
    ) -> None:
        """Find and check every function; `load` reads the reward models' weights.

        Args:
            names: Built-ins with what stands behind their colon, file.py:function, which is run as
                code, and folders or hub ids of reward models.
            weights: One per name; empty for 1 each.
            tokenizer: The policy's.
            config: Of the run.
            beside: Further paths in the same tables, which short names tell apart too.

        Raises:
            UserError: a name is no function, or a folder holds no reward model.
        """

        def load_model(path: str) -> Any:
            from common.rewards.models import model_function

            return model_function(path, tokenizer, config)

        self.short = short_names([*names, *beside])  # by name
        self.tokenizer = tokenizer
        self.functions = load_reward_functions(names, weights, load_model)

    @property
    def reward_models(self) -> dict[str, Any]:
        """The functions that are reward models, by folder."""
        return {name: f for name, f in self.functions.functions.items() if is_collective(f)}

    def check_rows(self, *splits: Sequence[Example]) -> None:
        """Refuse rows that the functions cannot judge, before any model is loaded.

        Raises:
            UserError: rows differ in their columns, as `RewardSet.check_rows`, or a reward model
                cannot read messages.
        """
        first = next(chain(*splits), None)
        for example in chain(*splits):
            if first and example.columns.keys() != first.columns.keys():
                raise UserError(
                    f"row {example.row + 1} of the prompts has the columns "
                    f"{sorted(example.columns)} and row {first.row + 1} has "
                    f"{sorted(first.columns)}; give all rows the same, null where empty."
                )
        self.functions.check_rows((e.row + 1, e.columns) for e in chain(*splits))
        self.check_messages([first] if first else [])

    def check_messages(self, examples: Sequence[Example]) -> None:
        """Raise a UserError for rows of messages if a reward model cannot read such."""
        for function in self.reward_models.values():
            if examples and examples[0].messages:
                function.check_conversation(examples[0].messages)

    def load(self, mesh: DeviceMesh) -> None:
        """Load the reward models. Collective."""
        for function in self.reward_models.values():
            function.load(mesh)

    def score(
        self, examples: Sequence[Example], rollouts: Rollouts, step: int = 0, total_steps: int = 0
    ) -> Rewards:
        """Rewards of K completions of each of N prompts. Collective if a reward model takes part.

        Functions that read `trainer_state` are told that `step` of `total_steps` steps are done.

        Returns:
            As the functions' own, with `total` and `by_function` (N, K), the latter by short name;
            float32 on the host. `steps` has N*K entries.
        """
        from common.text.chat import as_answers

        num_samples = len(rollouts.has_stop) // len(examples)
        repeated = [example for example in examples for _ in range(num_samples)]  # (N*K,)
        columns = {name: [e.columns[name] for e in repeated] for name in examples[0].columns}
        columns["prompt_ids"] = [e.prompt_ids for e in repeated]
        columns["has_stop"] = rollouts.has_stop.tolist()
        texts, messages = rollouts.texts(self.tokenizer), [e.messages for e in repeated]
        rewards = self.functions(
            [e.messages or e.prompt for e in repeated],
            as_answers(texts, messages, self.tokenizer),
            rollouts.completion_ids,
            columns,
            TrainerState(global_step=step, max_steps=total_steps),
        )
        shape = (len(examples), num_samples)
        by_function = {
            self.short[n]: values.view(shape) for n, values in rewards.by_function.items()
        }
        return replace(rewards, total=rewards.total.view(shape), by_function=by_function)

    def answers(self, completions: Sequence[Any]) -> dict[str, list[str | None]]:
        """What B completions answer, by each function with an `answer(completions)`; None: nothing.

        Raises:
            UserError: it raised, or returned no list of B.
        """
        from common.rewards.call import call

        found = {}
        for name, function in self.functions.functions.items():
            if answer := getattr(function, "answer", None):
                who, every = f"`answer` of reward function {name!r}", range(len(completions))
                inputs = lambda rows: {"completions": [completions[row] for row in rows]}  # noqa: E731
                values = call(answer, inputs, every, who, "answers")
                found[self.short[name]] = [None if v is None else str(v) for v in values]
        return found

    def score_or_save(
        self,
        examples: Sequence[Example],
        rollouts: Rollouts,
        config: TrainConfig,
        step: int,
        total_steps: int,
    ) -> Rewards:
        """`score`; if that fails, save what the functions were given.

            output_dir/failed/step_00000012/rewards_rank_1/
                config.yaml       of the run
                rollouts.jsonl    a line for each prompt of this rank: its columns and completions
                traceback.txt     of a function that raised

        Only the rank whose function failed knows of it, so it writes alone.

        Raises:
            UserError: a function failed, as `RewardSet` says it, and where the completions are.
            RuntimeError: the same of a reward model.
        """
        from common.exits.failures import lost_peers
        from common.record.folder import CONFIG, save_config

        try:
            return self.score(examples, rollouts, step, total_steps)
        except (UserError, RuntimeError) as error:
            if lost_peers(error):
                raise
            made = min(step + 1, total_steps)  # behind the last step are samples to be judged
            place = f"failed/step_{made:08d}/rewards_rank_{distributed.rank()}"
            folder = Path(config.output_dir) / place
            told = f"its completions are in {folder}"
            try:
                self.save(folder, examples, rollouts)
                save_config(folder / CONFIG, config)
                if error.__cause__ is not None:
                    text = "".join(traceback.format_exception(error.__cause__))
                    (folder / "traceback.txt").write_text(text, "utf-8", "backslashreplace")
            except OSError as refusal:
                told = f"its completions were not kept: {refusal}"
            raise type(error)(f"{str(error).removesuffix('.')}; {told}.") from error

    def save(self, folder: Path, examples: Sequence[Example], rollouts: Rollouts) -> None:
        """Write a line for each prompt; an `OSError` if the disk refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = rollouts.texts(self.tokenizer)
        num_samples = len(texts) // len(examples)
        with (folder / "rollouts.jsonl").open("w", encoding="utf-8") as file:
            for n, example in enumerate(examples):
                own = slice(n * num_samples, (n + 1) * num_samples)
                line = vars(example) | {
                    "completions": texts[own],
                    "completion_ids": rollouts.completion_ids[own],
                    "has_stop": rollouts.has_stop[own].tolist(),
                }
                file.write(json.dumps(line, default=str) + "\n")  # a column may hold a date


def load_reward_functions(
    names: Sequence[str],
    weights: Sequence[float] = (),
    load_reward_model: Callable[[str], Any] = lambda path: None,
) -> RewardSet:
    """Find reward functions by name, each with its weight; without weights each has 1.

    All names are checked before `load_reward_model` makes a function of the first folder or hub id.

    Raises:
        UserError: A name twice or that is nothing of the above, or weights that do not fit.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"reward_funcs names {twice[0]!r} twice; give it once, with a weight.")
    weights = list(weights) or [1.0] * len(names)
    if len(weights) != len(names) or not all(math.isfinite(weight) for weight in weights):
        raise UserError(
            f"reward_weights is {weights}; it must hold one finite number for each of "
            f"reward_funcs ({', '.join(names)})."
        )
    found = [(name, find_function(name)) for name in names]
    return RewardSet({name: f or load_reward_model(name) for name, f in found}, weights)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """What a table calls each function or folder: as many of its last folders as tell all apart."""
    paths = list(dict.fromkeys(paths))
    for depth in range(1, 1 + max((len(Path(path).parts) for path in paths), default=0)):
        names = {path: short_name(path, depth) for path in paths}
        if len(set(names.values())) == len(paths):
            return names
    return {path: path for path in paths}


def short_name(path: str, depth: int = 1) -> str:
    """The last `depth` parts of the path of a function or model.

    `run` for `run/model`, and `run step 5` for the model of that checkpoint.
    """
    if is_built_in(path):
        return path
    if ".py:" in path:
        return path.rpartition(":")[2] if depth == 1 else path
    parts = Path(path).parts
    parts = parts[:-1] if len(parts) > 1 and parts[-1] == "model" else parts
    if len(parts) > 2 and parts[-2] == "checkpoints":
        parts = (*parts[:-3], f"{parts[-3]} step {parts[-1].removeprefix('step_').lstrip('0')}")
    return "/".join(parts[-depth:])
