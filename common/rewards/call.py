"""Reward functions applied to completions: called, checked for what they return, weighted, summed.

A reward function has TRL's signature

    f(prompts, completions, completion_ids, **columns) -> list of rewards

with one entry per completion: texts (or lists of messages, if the rows are conversations), token
ids, and the columns of the data set row that each completion belongs to; all are passed by name. As
in TRL it also gets `trainer_state`, `log_extra` and `log_metric` (see `notes`), and it may
be a coroutine. One without `**columns` gets what it names. A reward is

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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import UserError, gist
from common.errors import shown
from common.rewards.functions import KINDS, RewardFunction, find_function
from common.rewards.notes import Notes, as_number
from common.text.rows import ARGUMENTS, OWN_COLUMNS, TRAINER_ARGUMENTS

CHOICE_COLUMN = "reward_funcs"  # in a row: the names of the functions that apply to it

Steps = dict[int, float]
"""Rewards of a completion's steps by the index of the step's last token."""

Answer = float | Steps | None  # of a function on a completion, checked


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
    steps: list[Steps] = field(default_factory=list)
    notes: Notes = field(default_factory=lambda: Notes(0))


class RewardSet:
    """Named reward functions with weights; calling it gives each completion its reward."""

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Sequence[float]) -> None:
        """Take the functions by name and one weight for each."""
        assert len(functions) == len(weights)
        self.functions = dict(functions)
        self.weights = list(weights)

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Refuse a data set without a column that a function needs, before any model is loaded.

        Args:
            columns: A row's columns other than the prompt, by name.

        Raises:
            UserError: Names the function and the column.
        """
        given = (*ARGUMENTS, *TRAINER_ARGUMENTS, *OWN_COLUMNS, *columns)
        for name, function in self.functions.items():
            own = getattr(function, "columns", ())  # of a built-in: none but the row's
            missing = [column for column in own if column not in columns]
            for column in (*missing, *_needed(name, function)):
                if column in missing or column not in given:
                    raise UserError(
                        f"reward function {name!r} needs the column {column!r}, and the rows have "
                        f"{', '.join(map(repr, columns)) or 'no further columns'}; "
                        "change reward_funcs or dataset_name."
                    )

    def check_row(self, number: int, columns: Mapping[str, Any]) -> None:
        """Refuse a row that a built-in function could not judge, before any model is loaded.

        Args:
            number: Of the row, counted from 1.
            columns: The row's columns other than the prompt, by name.

        Raises:
            UserError: Names the row, the function and what its column holds.
        """
        (chosen,) = self._choices([columns.get(CHOICE_COLUMN)])
        for name in chosen:
            fault = getattr(self.functions[name], "row_fault", lambda columns: "")(columns)
            if fault:
                raise UserError(f"row {number} of the prompts: {fault}, for {name!r}.")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        trainer_state: Any = None,
    ) -> Rewards:
        """Score B completions; each rank scores its own, without a collective.

        Args:
            prompts: B texts or lists of messages.
            completions: B texts or lists of one message of the assistant.
            completion_ids: B lists of token ids, up to and including the first stop token.
            columns: For each column of the data set B values. In a row with a value in the column
                `reward_funcs` (a name or a list of names) only those functions apply.
            trainer_state: What functions get under that name: transformers' `TrainerState`.

        Raises:
            UserError: A function raised, or returned the wrong number of values or one that is no
                reward, or none applies to a row; names the function and the row of the batch
                (counted from 0). To find it, a function that raised is called on single rows.
        """
        assert len(prompts) == len(completions) == len(completion_ids)
        assert all(len(values) == len(prompts) for values in columns.values())
        arguments = dict(zip(ARGUMENTS, (prompts, completions, completion_ids), strict=True))
        choices = self._choices(columns.get(CHOICE_COLUMN, [None] * len(prompts)))
        notes = Notes(len(prompts), trainer_state)
        answers = {}  # by function, of B completions
        for name, function in self.functions.items():
            chosen = [name in names for names in choices]
            # Ranks have to call a sharded model equally often, whatever their rows ask for.
            rows = [i for i, asked in enumerate(chosen) if asked or is_collective(function)]
            found = _call(name, function, {**columns, **arguments}, notes, rows)
            answers[name] = [found[row] if asked else None for row, asked in enumerate(chosen)]
        by_function = {
            name: torch.tensor([_total(answer) for answer in own]) for name, own in answers.items()
        }
        total = torch.zeros(len(prompts))  # (B,)
        applies = torch.zeros(len(prompts), dtype=torch.bool)  # (B,)
        for values, weight in zip(by_function.values(), self.weights, strict=True):
            total += weight * values.nan_to_num(0.0)
            applies |= ~values.isnan()
        if not applies.all():
            row = int((~applies).nonzero()[0])
            raise UserError(
                f"no reward function applies to row {row} of the batch: "
                f"{', '.join(choices[row])} returned None; one must give each row a number."
            )
        ends = [len(ids) - 1 for ids in completion_ids]
        return Rewards(total, by_function, self._steps(answers, ends), notes)

    def _steps(self, answers: Mapping[str, Sequence[Answer]], ends: Sequence[int]) -> list[Steps]:
        """`Rewards.steps` of completions whose last tokens are at `ends`."""
        weighted = [own for own, w in zip(answers.values(), self.weights, strict=True) if w != 0]
        if not any(isinstance(answer, dict) for own in weighted for answer in own):
            return []
        steps: list[Steps] = [{} for _ in ends]
        for own, weight in zip(answers.values(), self.weights, strict=True):
            for row, answer in enumerate(own):
                if answer is None or weight == 0:
                    continue
                rewards = answer if isinstance(answer, dict) else {ends[row]: answer}
                for end, reward in rewards.items():
                    steps[row][end] = steps[row].get(end, 0.0) + weight * reward
        return steps

    def _choices(self, values: Sequence[Any]) -> list[list[str]]:
        """The names of the functions that each row asks for: all of them where it names none."""
        choices = []
        for row, value in enumerate(values):
            names = [value] if isinstance(value, str) else list(value or self.functions)
            for name in names:
                if name not in self.functions:
                    raise UserError(
                        f"row {row} of the batch names the reward function {name!r} in its column "
                        f"{CHOICE_COLUMN!r}, and there are: {', '.join(self.functions)}."
                    )
            choices.append(names)
        return choices


def load_reward_functions(
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    load_reward_model: Callable[[str], RewardFunction] | None = None,
) -> RewardSet:
    """Find reward functions by name; all names are checked before the first model is loaded.

    `path/to/file.py:function` runs the user's own file as Python code.

    Args:
        names: Built-ins of `reward_functions`, `path/to/file.py:function`, or the folder or hub id
            of a reward model.
        weights: One for each name; None weighs all with 1.
        load_reward_model: Makes a reward function of a model's folder or hub id (rewards.py is a
            lower layer than scoring).

    Raises:
        UserError: No names, a name twice or that is nothing of the above, weights that do not fit.
    """
    if not names:
        raise UserError(
            "reward_funcs is empty; give a built-in, `path/to/file.py:function` or a reward model."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"reward_funcs names {twice[0]!r} twice; give it once, with a weight.")
    weights = [1.0] * len(names) if weights is None else list(weights)
    if len(weights) != len(names) or not all(math.isfinite(weight) for weight in weights):
        raise UserError(
            f"reward_weights is {weights}; it must hold one finite number for each of "
            f"reward_funcs ({', '.join(names)})."
        )
    functions = {name: find_function(name) for name in names}
    for name, function in functions.items():
        if function is None:
            if load_reward_model is None:
                raise UserError(
                    f"reward_funcs has {name!r}, and only {', '.join(KINDS)} can be used here."
                )
            functions[name] = load_reward_model(name)
    return RewardSet({name: f for name, f in functions.items() if f is not None}, weights)


def is_collective(function: RewardFunction) -> bool:
    """Whether ranks have to call it equally often with as many rows, as a sharded model."""
    return bool(getattr(function, "is_collective", False))


def equal_for_equal(texts: Sequence[Hashable], rewards: Tensor) -> list[float]:
    """The rewards (B,) of a model, the first one for all equal texts.

    A score is rounded by what stands beside it in the batch. Equal completions must not differ by
    that: GRPO would divide the difference by itself and train on it.
    """
    first: dict[Hashable, float] = {}
    values = zip(texts, rewards.tolist(), strict=True)
    return [first.setdefault(text, reward) for text, reward in values]


def eos_penalty(config: Any) -> float | None:
    """The penalty that a config with `missing_eos_penalty` asks for, None for none."""
    return config.missing_eos_penalty if config.penalize_missing_eos else None


def apply_missing_eos_penalty(rewards: Tensor, has_stop: Tensor, penalty: float | None) -> Tensor:
    """Replace the reward of completions that did not stop (Huang et al. 2024, the "EOS trick").

    It is replaced, not lowered: a reward model was never trained on texts that break off.

    Args:
        rewards: Any shape, usually (B,).
        has_stop: The same shape, bool, True where the completion has a stop token.
        penalty: The reward of a completion without one, in units of the reward; None changes
            nothing.

    Returns:
        The shape of `rewards`.
    """
    assert rewards.shape == has_stop.shape
    assert has_stop.dtype == torch.bool
    return rewards if penalty is None else torch.where(has_stop, rewards, penalty)


def penalise_steps(
    steps: Sequence[Steps], ends: Sequence[int], has_stop: Sequence[bool], penalty: float | None
) -> list[Steps]:
    """`apply_missing_eos_penalty` where steps are rewarded: the penalty is the only step.

    Args:
        steps: Of B completions.
        ends: Index of each completion's last token.
        has_stop: Whether each completion has a stop token.
        penalty: As there.
    """
    rows = zip(steps, ends, has_stop, strict=True)
    return [own if stop or penalty is None else {end: penalty} for own, end, stop in rows]


def _needed(name: str, function: RewardFunction) -> list[str]:
    """The arguments that a function cannot be called without."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # as for some functions of C
        raise UserError(
            f"reward function {name!r} does not tell its arguments; it must be made with `def`."
        ) from None
    return [p.name for p in parameters if p.kind in by_name and p.default is p.empty]


def _call(
    name: str,
    function: RewardFunction,
    arguments: Mapping[str, Sequence[Any]],
    notes: Notes,
    rows: Sequence[int],
) -> dict[int, Answer]:
    """The function's checked answers on some rows of the batch, by row; not called for none."""
    if not rows:
        return {}
    try:
        rewards = call_by_name(function, _copies(arguments, rows) | notes.arguments(rows), name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # exit() would end the run with the status of success
        # A reward model is no code of the user's.
        kind = RuntimeError if is_collective(function) else UserError
        where = _where_it_fails(function, arguments, notes, rows)
        is_text = isinstance(arguments["completions"][0], str)
        given = "" if is_text else "; its prompts and completions were lists of messages"
        raise kind(
            f"reward function {name!r} raised {type(error).__name__} on {where}: {gist(error)}"
            f"{_line(function, error)}{given}."
        ) from error
    rewards = one_for_each(
        rewards, len(rows), f"reward function {name!r}", "rewards", "completions"
    )
    answers = {}
    for row, reward in zip(rows, rewards, strict=True):
        try:
            answers[row] = _checked(reward, len(arguments["completion_ids"][row]))
        except ValueError as error:
            raise UserError(
                f"reward function {name!r} returned {shown(reward)} for row {row} of the batch; "
                f"{error}."
            ) from None
    return answers


def one_for_each(
    values: list[Any] | None, number: int, function: str, what: str, rows: str
) -> list[Any]:
    """The values that a user's function returned; a UserError if they are no list of so many."""
    if values is None or len(values) != number:
        found = "no list of" if values is None else len(values)
        raise UserError(
            f"{function} returned {found} {what} for {number} {rows}; it must return a list with "
            "one for each."
        )
    return values


def _copies(arguments: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> dict[str, Any]:
    """The arguments of these rows, for a function to change: the trainer goes on with its own."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(inner) for key, inner in value.items()}
        return [copied(inner) for inner in value] if isinstance(value, list) else value

    return {key: [copied(values[row]) for row in rows] for key, values in arguments.items()}


@contextmanager
def _put_back(name: str) -> Iterator[None]:
    """Around a function of the user's: what is global, and would change the training, stays.

    Random numbers are not: no stage draws from a global generator while it trains.

    Raises:
        UserError: it cannot be put back; names the function.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    has_grad, num_threads = torch.is_grad_enabled(), torch.get_num_threads()
    has_group = torch.distributed.is_initialized()
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))  # found also if it is moved
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)  # no stage sets one
        torch.set_grad_enabled(has_grad)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        os.fchdir(folder)
        os.close(folder)
        if has_group and not torch.distributed.is_initialized():
            raise UserError(f"the function {name!r} ended the process group of the run.")


def call_by_name(
    function: Callable[..., Any], inputs: Mapping[str, Any], name: str
) -> list[Any] | None:
    """Call a function with what it takes; a coroutine is waited for. None: it gave no list.

    Raises:
        UserError: it changed what cannot be put back; names it.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs = {key: value for key, value in inputs.items() if key in parameters}
    with _put_back(name):
        answers: Any = function(**inputs)
        answers = asyncio.run(answers) if inspect.iscoroutine(answers) else answers
    # A dict or a set has no order that a list of completions could follow.
    is_list = isinstance(answers, Iterable) and not isinstance(answers, Mapping | Set | str | bytes)
    return list(answers) if is_list else None


def _line(function: RewardFunction, error: BaseException) -> str:
    """Where in its file a function raised, as ` (rewards.py, line 7)`: no traceback is printed."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if lines else ""


def _checked(reward: Any, num_tokens: int) -> Answer:
    """A returned reward as a number, as steps, or None.

    Raises:
        ValueError: it is nothing of these.
    """
    if reward is None:
        return None
    if not isinstance(reward, list | tuple):
        return _finite(reward)
    steps: Steps = {}
    for step in reward:
        if not isinstance(step, list | tuple) or len(step) != 2:
            raise ValueError(
                "the reward of a step must be a pair (index of its last token, reward)"
            )
        end, value = step
        if not isinstance(end, Integral) or not 0 <= int(end) < num_tokens:
            raise ValueError(f"a step must end at 0 to {num_tokens - 1}, a token of the completion")
        steps[int(end)] = steps.get(int(end), 0.0) + _finite(value)
    return steps


def _finite(value: Any) -> float:
    """A finite number as float; else a ValueError."""
    number = as_number(value)
    if number is None:
        raise ValueError("a reward must be a finite number, None, or a list of steps")
    return number


def _total(answer: Answer) -> float:
    """The reward of a completion: of steps their sum, nan for None."""
    if answer is None:
        return math.nan
    return sum(answer.values()) if isinstance(answer, dict) else answer


def _where_it_fails(
    function: RewardFunction,
    arguments: Mapping[str, Sequence[Any]],
    notes: Notes,
    rows: Sequence[int],
) -> str:
    """The first row on which a function that raised on the batch raises alone."""
    for row in [] if is_collective(function) else rows:
        try:
            call_by_name(function, _copies(arguments, [row]) | notes.arguments([row]), "")
        except (Exception, SystemExit):
            return f"row {row} of the batch"
    return f"a batch of {len(rows)} rows"
