"""Reward functions applied to completions: called, checked for what they return, weighted, summed.

A reward function has TRL's signature

    f(prompts, completions, completion_ids, **columns) -> list of rewards

with one entry per completion: texts (or lists of messages, if the rows are conversations), token
ids, and the columns of the data set row that each completion belongs to; all are passed by name. As
in TRL it also gets `trainer_state`, `log_extra` and `log_metric` (see `Notes`), and it may be a
coroutine. One without `**columns` gets what it names. A reward is

- a number;
- None: the function does not apply to the row;
- a list of pairs (end, reward), one per step of the completion (process supervision, DeepSeekMath
  section 4.1.3): `end` is the index in the completion of the step's last token, counted from 0.
"""

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.advantages import Steps
from common.errors import LARGEST, UserError, gist, shown
from common.rewards.functions import RewardFunction, is_built_in

CHOICE_COLUMN = "reward_funcs"  # in a row: the names of the functions that apply to it

Arguments = Mapping[str, Sequence[Any]]  # B values each


@dataclass
class Notes:
    """What functions say about B completions beside rewards: TRL's (1.16) logging functions.

    Metrics reach `metrics.jsonl` and wandb as `logged/<name>`, columns the table of samples; where
    a run has neither (pairs from rollouts, evaluation) both are dropped. Both raise a ValueError
    for what cannot be logged.
    """

    num_rows: int  # B
    trainer_state: Any = None  # what functions get under that name: transformers' `TrainerState`
    metrics: dict[str, list[float]] = field(default_factory=dict)  # a value for each call
    columns: dict[str, list[Any]] = field(default_factory=dict)  # B values, None where none is said

    def log_metric(self, name: str, value: float) -> None:
        """Note a number."""
        check_name("log_metric", name)
        number = as_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}) got {value!r}; it must be a finite number")
        self.metrics.setdefault(name, []).append(number)

    def log_extra(self, rows: Sequence[int], column: str, values: Sequence[Any]) -> None:
        """Note a value for each of the rows that the function was called on."""
        check_name("log_extra", column)
        if len(values) != len(rows):
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for {len(rows)} completions"
            )
        noted = self.columns.setdefault(column, [None] * self.num_rows)
        for row, value in zip(rows, map(scalar, values), strict=True):
            is_plain = value is None or isinstance(value, str | int | float)
            noted[row] = value if is_plain else str(value)


def check_name(function: str, name: Any) -> None:
    """Raise a ValueError for what cannot stand in files and tables."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"{function} got the name {name!r}; it must be a text of one line")


@dataclass
class Rewards:
    """What the reward functions of a run say of B completions.

    Attributes:
        total: Weighted sum over the functions that apply; (B,) float32, or (N, K) of rollouts.
        by_function: Each function's own rewards by name, unweighted: of that shape, nan where it
            does not apply. Of a function that rewards steps, their sum.
        steps: The weighted rewards of each completion's steps, B entries, of which the total is the
            sum; empty if no function rewards steps. The rewards of other functions are one more
            step, which ends with the completion; those of weight 0 are none.
        notes: What the functions gave to `log_extra` and `log_metric`.
    """

    total: Tensor
    by_function: dict[str, Tensor]
    steps: list[Steps]
    notes: Notes


class RewardSet:
    """Named reward functions with weights; calling it gives each completion its reward."""

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Sequence[float]) -> None:
        """Take the functions by name and one weight for each."""
        assert len(functions) == len(weights)
        self.functions = dict(functions)
        self.weights = list(weights)

    def check_rows(self, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Refuse rows, numbered from 1, whose columns the functions cannot judge by.

        A built-in that raises on an empty completion could not judge any other.

        Raises:
            UserError: a row names a function that is not there, or has not what its functions need.
        """
        needed = {name: needed_columns(name, f) for name, f in self.functions.items()}
        for number, columns in rows:
            where = f"row {number} of the prompts"
            given = {name: [value] for name, value in columns.items()}
            given |= {"completions": [""], "completion_ids": [[]]}
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
                        self.functions[name](**given)
                except Exception as error:  # of many kinds: a column holds anything
                    told = error if isinstance(error, ValueError) else gist(error)
                    raise UserError(f"{where}: {told}, for {name!r}.") from None

    def choice(self, value: Any, where: str) -> list[str]:
        """The functions that a row asks for in its column `reward_funcs`: all if it has none."""
        known = list(self.functions)
        names = [value] if isinstance(value, str) else value or known
        if not isinstance(names, list) or any(name not in known for name in names):
            raise UserError(
                f"{where} has {shown(value)} in its column {CHOICE_COLUMN!r}; it must be a name or "
                f"a list of names that --reward_funcs has: {', '.join(known)}."
            )
        return names

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Arguments,
        trainer_state: Any = None,
    ) -> Rewards:
        """Score B completions of this rank: texts, or lists of one message of the assistant.

        Their ids go up to the first stop token and include it; `columns` has B values for each. In
        a row that names functions in the column `reward_funcs` only those apply.

        Raises:
            UserError: A function raised, or returned the wrong number of values or one that is no
                reward, or none applies to a row; names the function and the row of the batch
                (counted from 0). To find it, a function that raised is called on single rows.
        """
        texts = {"prompts": prompts, "completions": completions}
        arguments = {**columns, **texts, "completion_ids": completion_ids}
        assert all(len(values) == len(prompts) for values in arguments.values())
        values = columns.get(CHOICE_COLUMN, [None] * len(prompts))
        choices = [self.choice(value, f"row {i} of the batch") for i, value in enumerate(values)]
        notes = Notes(len(prompts), trainer_state)
        total, applies = torch.zeros(len(prompts)), torch.zeros(len(prompts), dtype=torch.bool)
        by_function, has_steps = {}, False
        steps: list[Steps] = [{} for _ in prompts]
        for (name, function), weight in zip(self.functions.items(), self.weights, strict=True):
            asked = [name in names for names in choices]
            # Ranks have to call a sharded model equally often, whatever their rows ask for.
            rows = [i for i, is_asked in enumerate(asked) if is_asked or is_collective(function)]
            answers, are_steps = ask(name, function, arguments, notes, rows)
            by_function[name] = own = torch.full((len(prompts),), math.nan)  # (B,)
            for i, answer in answers.items():
                if asked[i]:
                    own[i] = sum(answer.values())
                    for end, reward in answer.items() if weight != 0 else ():
                        steps[i][end] = steps[i].get(end, 0.0) + weight * reward
            total += weight * own.nan_to_num(0.0)
            applies |= ~own.isnan()
            has_steps |= are_steps and weight != 0
        if not applies.all():
            row = int((~applies).nonzero()[0])
            raise UserError(
                f"no reward function applies to row {row} of the batch: "
                f"{', '.join(choices[row])} returned None; one must give each row a number."
            )
        return Rewards(total, by_function, steps if has_steps else [], notes)


def is_collective(function: RewardFunction) -> bool:
    """Whether ranks have to call it equally often, as a sharded model."""
    return bool(getattr(function, "is_collective", False))


# ---- calling a function that a user wrote --------------------------------------------------------


def needed_columns(name: str, function: RewardFunction) -> list[str]:
    """The columns of a row that a function cannot be called without."""
    from common.text.rows import ARGUMENTS

    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # as for some functions of C
        raise UserError(
            f"reward function {name!r} does not tell its arguments; it must be made with `def`."
        ) from None
    needed = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
    return [*getattr(function, "columns", ()), *(n for n in needed if n not in ARGUMENTS)]


def ask(
    name: str, function: RewardFunction, arguments: Arguments, notes: Notes, rows: Sequence[int]
) -> tuple[dict[int, Steps], bool]:
    """The rewards of a function by row, where it applies, and whether it rewards steps.

    A number is one step, which ends with the completion.
    """
    is_chat = isinstance(next(iter(arguments["completions"]), ""), list)
    who = f"reward function {name!r}" + (", given lists of messages," if is_chat else "")
    rewards = call(function, partial(inputs, arguments, notes), rows, who, "rewards")
    answers = {}
    for row, reward in zip(rows, rewards, strict=True):
        try:
            if reward is not None:
                answers[row] = as_steps(reward, len(arguments["completion_ids"][row]) - 1)
        except ValueError as error:
            raise UserError(
                f"{who} returned {shown(reward)} for row {row} of the batch; {error}."
            ) from None
    return answers, any(isinstance(reward, list | tuple) for reward in rewards)


def as_steps(reward: Any, last: int) -> Steps:
    """A returned reward by steps, a number as the last token's; a ValueError if it is no reward."""
    is_list = isinstance(reward, list | tuple)
    steps: Steps = {}
    for step in reward if is_list else [(last, reward)]:
        if not isinstance(step, list | tuple) or len(step) != 2:
            raise ValueError(
                "the reward of a step must be a pair (index of its last token, reward)"
            )
        end, number = step[0], as_number(step[1])
        if is_list and not (isinstance(end, Integral) and 0 <= int(end) <= last):
            raise ValueError(f"a step must end at 0 to {last}, a token of the completion")
        if number is None:
            raise ValueError("a reward must be a finite number, None, or a list of steps")
        steps[int(end)] = steps.get(int(end), 0.0) + number
    return steps


def inputs(arguments: Arguments, notes: Notes, rows: Sequence[int]) -> dict[str, Any]:
    """What a function is given of these rows: copies, since the trainer goes on with its own."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(inner) for key, inner in value.items()}
        return [copied(inner) for inner in value] if isinstance(value, list) else value

    return {
        **{key: [copied(values[row]) for row in rows] for key, values in arguments.items()},
        "trainer_state": notes.trainer_state,
        "log_metric": notes.log_metric,
        "log_extra": partial(notes.log_extra, rows),
    }


def call(
    function: Callable[..., Any],
    inputs: Callable[[Sequence[int]], Mapping[str, Any]],
    rows: Sequence[int],
    who: str,
    what: str,
) -> list[Any]:
    """What a user's function says of some rows, a value for each; a coroutine is waited for.

    It gets what it takes of the `inputs` of the rows. Errors call it `who`, and its values `what`.

    Raises:
        UserError: it raised (a RuntimeError if it is a model's), returned no value for each row, or
            ended the process group. A function that raised is called on single rows, to name the
            first that it fails on.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def answers(some: Sequence[int]) -> list[Any] | None:
        given, has_group = inputs(some), torch.distributed.is_initialized()
        with put_back():
            found = function(**{k: v for k, v in given.items() if takes_all or k in parameters})
            found = asyncio.run(found) if inspect.iscoroutine(found) else found
        if has_group and not torch.distributed.is_initialized():
            raise UserError(f"{who} ended the process group of the run.")
        # A dict or a set has no order that a list of completions could follow.
        is_list = isinstance(found, Iterable) and not isinstance(found, Mapping | Set | str | bytes)
        return list(found) if is_list else None

    try:
        values = answers(rows) if rows else []
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # exit() would end the run with the status of success
        where, is_model = f"a batch of {len(rows)} rows", is_collective(function)
        for row in [] if is_model else rows:
            try:
                answers([row])
            except (Exception, SystemExit):
                where = f"row {row} of the batch"
                break
        kind = RuntimeError if is_model else UserError
        raised = f"{who} raised {type(error).__name__} on {where}"
        raise kind(f"{raised}: {gist(error)}{line_of(function, error)}.") from error
    if values is None or len(values) != len(rows):
        found = "no list of" if values is None else len(values)
        raise UserError(
            f"{who} returned {found} {what} for {len(rows)} rows; it must return a list with one "
            "for each."
        )
    return values


@contextmanager
def put_back() -> Iterator[None]:
    """Around a user's function: what is global, and would change the training, stays as it is.

    Random numbers do not: no stage draws from a global generator while it trains.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    num_threads = torch.get_num_threads()
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))  # found also if it was removed
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)  # no stage sets one
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


def line_of(function: Callable[..., Any], error: BaseException) -> str:
    """Where in its file a function raised, as ` (rewards.py, line 7)`: no traceback is printed."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if lines else ""


def as_number(value: Any) -> float | None:
    """A finite number, also one of numpy or in a tensor, as float; None for anything else."""
    value = scalar(value)
    is_number = isinstance(value, Real)
    if not is_number or not abs(value) <= LARGEST:  # False for NaN; 10^400 does not fit a float
        return None
    return float(value)


def scalar(value: Any) -> Any:
    """The Python number in a scalar of numpy or torch; anything else as it is."""
    is_scalar = isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0
    return value.item() if is_scalar else value
