"""Reward functions of a run: found by name, applied to rollouts, checked, weighted, summed.

A reward function has TRL's signature

    f(prompts, completions, completion_ids, **columns) -> list of rewards

with one entry per completion: texts (or lists of messages, if the rows are conversations), token
ids, and the columns of the data set row that each completion belongs to; all are passed by name. As
in TRL it also gets `trainer_state`, `log_extra` and `log_metric` (see `RewardLog`), and it may be a
coroutine. One without `**columns` gets what it names. A reward is

- a number;
- None: the function does not apply to the row;
- a list of pairs (end, reward), one per step of the completion (process supervision, DeepSeekMath
  section 4.1.3): `end` is the index in the completion of the step's last token, counted from 0.

A function that raises ends the run: a sentence names the rows, and its traceback follows.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainerState

from common import distributed
from common.advantages import StepRewards
from common.config.stages import CommonConfig
from common.errors import UserError, gist, naming, naming_rows
from common.objectives.user_files import short_names
from common.rewards.functions import (
    RewardFunction,
    as_number,
    call_once,
    find_function,
    is_built_in,
    is_collective,
    needed_columns,
    scalar,
    text_of,
)
from common.rewards.models import RewardModelFunction
from common.sampling.sampler import Rollouts
from common.text.chat import as_answers
from common.text.example import Example, Vocabulary

CHOICE_COLUMN = "reward_funcs"  # in a row: the names of the functions that apply to it


@dataclass
class RewardLog:
    """Metrics and columns that functions log about B completions, as in TRL (1.16).

    Metrics reach `metrics.jsonl` and wandb as `logged/<name>`, columns the table of samples; where
    a run has neither (pairs from rollouts, evaluation) both are dropped. Both functions raise a
    ValueError for what cannot be logged.
    """

    num_rows: int  # B
    metrics: dict[str, list[float]] = field(default_factory=dict)  # a value for each call
    columns: dict[str, list[Any]] = field(default_factory=dict)  # B values, None where none is

    def log_metric(self, name: str, value: float) -> None:
        """Log a number."""
        number = as_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}) got {value!r}; it must be a finite number")
        self.metrics.setdefault(name, []).append(number)

    def log_extra(self, rows: Sequence[int], column: str, values: Sequence[Any]) -> None:
        """Log a value for each of the rows that the function was called on."""
        cells = [*map(scalar, values)]
        if len(cells) != len(rows):
            raise ValueError(
                f"log_extra({column!r}) got {len(cells)} values for {len(rows)} completions"
            )
        logged = self.columns.setdefault(column, [None] * self.num_rows)
        for row, value in zip(rows, cells, strict=True):
            is_plain = value is None or isinstance(value, str | int | float)
            logged[row] = value if is_plain else str(value)


@dataclass
class Rewards:
    """Rewards of B completions; `by_function` by short names, of steps their sum.

    `steps` has the weighted rewards of each completion's steps, of which the total is the sum; it
    is empty if no function rewards steps. The rewards of other functions are one more step, which
    ends with the completion; those of weight 0 are none.
    """

    total: Tensor  # (B,) float32, or (N, K) of rollouts; weighted sum of the functions that apply
    by_function: dict[str, Tensor]  # of that shape and unweighted, nan where one does not apply
    steps: list[StepRewards]  # B entries, or none
    log: RewardLog  # what the functions gave to `log_extra` and `log_metric`


class RewardFunctions:
    """Named reward functions with weights."""

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Sequence[float],
        vocabulary: Vocabulary | Any = None,  # the policy's; unused on texts
        other_names: Sequence[str] = (),  # further paths in the same tables
    ) -> None:
        """Take the functions, and give each a short name that differs from all others."""
        assert len(functions) == len(weights)
        self.functions = dict(functions)
        self.weights = list(weights)
        self.vocabulary = vocabulary
        self.short_names = short_names([*functions, *other_names])  # by name

    @classmethod
    def find(
        cls,
        names: Sequence[str],  # as in `--reward_funcs`
        weights: Sequence[float],  # one per name; empty for 1 each
        vocabulary: Vocabulary,
        config: CommonConfig,
        other_names: Sequence[str] = (),
    ) -> "RewardFunctions":
        """Find and check every function; `load` reads the reward models' weights."""
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"reward_funcs names {twice[0]!r} twice; give it once, with a weight.")
        weights = list(weights) or [1.0] * len(names)
        if len(weights) != len(names):
            raise UserError(
                f"reward_weights is {weights}; it must hold one number for each of "
                f"reward_funcs ({', '.join(names)})."
            )
        by_name = {name: find_function(name) for name in names}  # all, before a model is read
        functions = {
            name: f or RewardModelFunction(name, vocabulary.tokenizer, config)
            for name, f in by_name.items()
        }
        return cls(functions, weights, vocabulary, other_names)

    @property
    def reward_models(self) -> dict[str, Any]:
        """The functions that are reward models, by folder."""
        return {name: f for name, f in self.functions.items() if is_collective(f)}

    def load(self, mesh: DeviceMesh) -> None:
        """Load the reward models. Collective."""
        for function in self.reward_models.values():
            function.load(mesh)

    # ---- before training -------------------------------------------------------------------------

    def check_rows(
        self, examples: Sequence[Example], eval_examples: Sequence[Example] = ()
    ) -> None:
        """Refuse rows that the functions cannot judge by their columns, before a model is loaded.

        A built-in that raises on an empty completion could not judge any other. Conversations must
        fit the reward models' chat templates.
        """
        first = next(chain(examples, eval_examples), None)
        needed = {name: needed_columns(f) for name, f in self.functions.items()}
        for example in chain(examples, eval_examples):
            columns, where = example.columns, f"row {example.row + 1} of the prompts"
            if first and columns.keys() != first.columns.keys():
                raise UserError(
                    f"{where} has the columns {sorted(columns)} and row {first.row + 1} has "
                    f"{sorted(first.columns)}; give all rows the same, null where empty."
                )
            arguments: dict[str, Any] = {name: [value] for name, value in columns.items()}
            arguments |= {"completions": [""], "completion_ids": [[]]}
            for name in self.choice(columns.get(CHOICE_COLUMN), where):
                missing = [column for column in needed[name] if column not in columns]
                if missing:
                    raise UserError(
                        f"reward function {name!r} needs the column {missing[0]!r}, and the rows "
                        f"have {', '.join(map(repr, columns)) or 'no further columns'}; "
                        "change reward_funcs or dataset_name."
                    )
                try:
                    if is_built_in(name):
                        self.functions[name](**arguments)
                except Exception as error:  # of many kinds: a column holds anything
                    reason = error if isinstance(error, ValueError) else gist(error)
                    raise UserError(f"{where}: {reason}, for {name!r}.") from None
        self.check_conversations([*examples, *eval_examples])

    def check_conversations(self, examples: Sequence[Example]) -> None:
        """Refuse conversations that a reward model cannot read."""
        for function in self.reward_models.values():
            function.check_conversations(examples)

    def choice(self, value: Any, where: str) -> list[str]:
        """The functions that a row asks for in its column `reward_funcs`: all if it has none."""
        all_names = list(self.functions)
        names = [value] if isinstance(value, str) else value or all_names
        if not isinstance(names, list) or any(name not in all_names for name in names):
            raise UserError(
                f"{where} has {value!r} in its column {CHOICE_COLUMN!r}; it must be a name or "
                f"a list of names that --reward_funcs has: {', '.join(all_names)}."
            )
        return names

    # ---- rewards ---------------------------------------------------------------------------------

    def score(
        self, examples: Sequence[Example], rollouts: Rollouts, step: int = 0, total_steps: int = 0
    ) -> Rewards:
        """Rewards of K completions of each of N prompts. Collective if a reward model takes part.

        A function is called once, with copies of the N*K rows and the arguments that it names;
        prompts are as the policy gets them, cut where they were too long. Its `trainer_state` says
        that `step` of `total_steps` steps are done. `total` and `by_function` are (N, K).
        """
        shape = (len(examples), len(rollouts.has_stop) // len(examples))
        repeated = [example for example in examples for _ in range(shape[1])]  # (N*K,)
        columns = {name: [e.columns[name] for e in repeated] for name in examples[0].columns}
        columns["prompt_ids"] = [e.prompt_ids for e in repeated]
        columns["has_stop"] = rollouts.has_stop.tolist()
        tokenizer, messages = self.vocabulary.tokenizer, [e.messages for e in repeated]
        rewards = self(
            [e.messages or e.prompt for e in repeated],
            as_answers(rollouts.texts(tokenizer), messages, tokenizer),
            rollouts.completion_ids,
            columns,
            TrainerState(global_step=step, max_steps=total_steps),
            f"after step {step}, {naming_rows(example.row for example in examples)}",
        )
        by_function = {name: values.view(shape) for name, values in rewards.by_function.items()}
        return replace(rewards, total=rewards.total.view(shape), by_function=by_function)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        trainer_state: Any = None,
        where: str = "in a batch",  # for messages: the step, and the rows of the data set
    ) -> Rewards:
        """Score B completions of this rank: texts, or lists of one message of the assistant.

        Their ids go up to the first stop token and include it; `columns` has B values for each. In
        a row that names functions in the column `reward_funcs` only those apply. A UserError names
        the function and the row of the batch, counted from 0; on every rank if a function raised.
        """
        texts = {"prompts": prompts, "completions": completions}
        arguments = {**columns, **texts, "completion_ids": completion_ids}
        assert all(len(values) == len(prompts) for values in arguments.values())
        values = columns.get(CHOICE_COLUMN, [None] * len(prompts))
        choices = [self.choice(value, f"row {i} of the batch") for i, value in enumerate(values)]

        def place(row: int) -> str:
            return f"{where}, from {text_of(completions[row])[:60]!r}"

        log = RewardLog(len(prompts))
        total, applies = torch.zeros(len(prompts)), torch.zeros(len(prompts), dtype=torch.bool)
        by_function, has_steps = {}, False
        steps: list[StepRewards] = [{} for _ in prompts]
        for (name, function), weight in zip(self.functions.items(), self.weights, strict=True):
            is_chosen = [name in names for names in choices]
            # Ranks have to call a sharded model equally often, whatever their rows choose.
            rows = [i for i in range(len(prompts)) if is_chosen[i] or is_collective(function)]
            title = f"reward function {name!r}"
            of_rows = inputs(arguments, rows, log) | {"trainer_state": trainer_state}
            at = place(rows[0]) if rows else where
            with distributed.together(), naming(title, at, is_ours=is_collective(function)):
                returned = call_once(function, of_rows, len(rows), title, "rewards")
            rewards = torch.full((len(prompts),), math.nan)  # (B,)
            for row, reward in zip(rows, returned, strict=True):
                if is_chosen[row] and reward is not None:
                    at = f"row {row} of the batch ({place(row)})"
                    of_steps = as_steps(reward, len(completion_ids[row]) - 1, title, at)
                    rewards[row] = sum(of_steps.values())
                    for end, value in of_steps.items() if weight != 0 else ():
                        steps[row][end] = steps[row].get(end, 0.0) + weight * value
                    has_steps |= weight != 0 and isinstance(reward, list | tuple)
            total += weight * rewards.nan_to_num(0.0)
            applies |= ~rewards.isnan()
            by_function[self.short_names[name]] = rewards
        if not applies.all():
            row = int((~applies).nonzero()[0])
            raise UserError(
                f"no reward function applies to row {row} of the batch ({place(row)}): "
                f"{', '.join(choices[row])} returned None; one must give each row a number."
            )
        return Rewards(total, by_function, steps if has_steps else [], log)

    def extracted_answers(self, completions: Sequence[Any]) -> dict[str, list[str | None]]:
        """Answers in B completions, by functions with an `answer(completions)`; None: no answer."""
        answers = {}
        for name, function in self.functions.items():
            if answer := getattr(function, "answer", None):
                title = f"`answer` of reward function {name!r}"
                arguments = {"completions": completions}
                with naming(title, "on what was sampled"):
                    values = call_once(answer, arguments, len(completions), title, "answers")
                answers[self.short_names[name]] = [None if v is None else str(v) for v in values]
        return answers


def inputs(
    arguments: Mapping[str, Sequence[Any]], rows: Sequence[int], log: RewardLog
) -> dict[str, Any]:
    """Arguments of a function for some rows: copies, which it may change."""
    of_rows = {key: [deepcopy(values[row]) for row in rows] for key, values in arguments.items()}
    return of_rows | {"log_metric": log.log_metric, "log_extra": partial(log.log_extra, rows)}


def as_steps(reward: Any, last: int, title: str, row: str) -> StepRewards:
    """A returned reward by steps, a number as that of the last token; a UserError for another."""
    is_list = isinstance(reward, list | tuple)
    steps: StepRewards = {}
    for step in reward if is_list else [(last, reward)]:
        is_pair = isinstance(step, list | tuple) and len(step) == 2
        end, value = step if is_pair else (last, None)
        number = as_number(value)
        is_token = isinstance(end, Integral) and (not is_list or 0 <= int(end) <= last)
        if number is None or not is_token:
            raise UserError(
                f"{title} returned {reward!r} for {row}; a reward must be a finite number, None, "
                "or a list of pairs, for each step the index of its last token, of 0 to "
                f"{last}, and its reward."
            )
        steps[int(end)] = steps.get(int(end), 0.0) + number
    return steps
