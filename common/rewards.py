"""Reward functions: found by name, weighted, summed, and checked for what they return.

A reward function has TRL's signature

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

with one entry per completion: texts, token ids, and the columns of the data set row that each
completion belongs to; all are passed by name. None means that the function does not apply to the
row.
"""

import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from common import synthetic
from common.config import UserError
from common.rows import ARGUMENTS, OWN_COLUMNS

RewardFunction = Callable[..., Sequence[float | None]]

BUILT_IN: dict[str, RewardFunction] = {"gold": synthetic.gold}
LARGEST = torch.finfo(torch.float32).max  # of what a function may return
CHOICE_COLUMN = "reward_funcs"  # in a row: the names of the functions that apply to it


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
        for name, function in self.functions.items():
            for parameter in inspect.signature(function).parameters.values():
                is_needed = parameter.default is parameter.empty and parameter.kind in (
                    parameter.POSITIONAL_OR_KEYWORD,
                    parameter.KEYWORD_ONLY,
                )
                if is_needed and parameter.name not in (*ARGUMENTS, *OWN_COLUMNS, *columns):
                    raise UserError(
                        f"reward function {name!r} needs the column {parameter.name!r}, and the "
                        f"rows have {', '.join(map(repr, columns)) or 'no further columns'}; "
                        "change reward_funcs or dataset_name."
                    )

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Score B completions; each rank scores its own, without a collective.

        Args:
            prompts: B texts.
            completions: B texts.
            completion_ids: B lists of token ids, up to and including the first stop token.
            columns: For each column of the data set B values. In a row with a value in the column
                `reward_funcs` (a name or a list of names) only those functions apply.

        Returns:
            The weighted sum over the functions that apply, (B,) float32, and the unweighted rewards
            of each function by name, (B,) float32, nan where it does not apply.

        Raises:
            RuntimeError: A function raised, or returned the wrong number of values or one that is
                no finite number, or none applies to a row; names the function and the row of the
                batch (counted from 0). To find it, a function that raised is called on single rows.
        """
        assert len(prompts) == len(completions) == len(completion_ids)
        assert all(len(values) == len(prompts) for values in columns.values())
        arguments = dict(zip(ARGUMENTS, (prompts, completions, completion_ids), strict=True))
        choices = self._choices(columns.get(CHOICE_COLUMN, [None] * len(prompts)))
        total = torch.zeros(len(prompts))  # (B,)
        applies = torch.zeros(len(prompts), dtype=torch.bool)  # (B,)
        per_function = {}
        for (name, function), weight in zip(self.functions.items(), self.weights, strict=True):
            chosen = torch.tensor([name in names for names in choices])  # (B,)
            # Ranks have to call a sharded model equally often, whatever their rows ask for.
            asked = torch.ones_like(chosen) if is_collective(function) else chosen
            rows = asked.nonzero().flatten().tolist()
            rewards = torch.full((len(prompts),), math.nan)  # (B,)
            if rows:
                rewards[rows] = _call(name, function, {**columns, **arguments}, rows)
            rewards[~chosen] = math.nan
            total += weight * rewards.nan_to_num(0.0)
            applies |= ~rewards.isnan()
            per_function[name] = rewards
        if not applies.all():
            row = int((~applies).nonzero()[0])
            raise RuntimeError(
                f"no reward function applies to row {row} of the batch: "
                f"{', '.join(choices[row])} returned None."
            )
        return total, per_function

    def _choices(self, values: Sequence[Any]) -> list[list[str]]:
        """The names of the functions that each row asks for: all of them where it names none."""
        choices = []
        for row, value in enumerate(values):
            names = [value] if isinstance(value, str) else list(value or self.functions)
            for name in names:
                if name not in self.functions:
                    raise RuntimeError(
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
        names: `gold` (the embedded task's true reward), `path/to/file.py:function`, or the folder
            or hub id of a reward model.
        weights: One for each name; None weighs all with 1.
        load_reward_model: Makes a reward function of a model's folder or hub id (rewards.py is a
            lower layer than scoring).

    Raises:
        UserError: No names, a name twice or that is nothing of the above, weights that do not fit.
    """
    if not names:
        raise UserError(
            "reward_funcs is empty; give `gold`, `path/to/file.py:function` or a reward model."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"reward_funcs names {twice[0]!r} twice; give it once, with a weight.")
    weights = [1.0] * len(names) if weights is None else list(weights)
    if len(weights) != len(names) or not all(math.isfinite(weight) for weight in weights):
        raise UserError(
            f"reward_weights is {weights}; it must hold {len(names)} finite numbers, one for each "
            f"of reward_funcs ({', '.join(names)})."
        )
    functions = {name: _find_function(name) for name in names}
    for name, function in functions.items():
        if function is None:
            if load_reward_model is None:
                raise UserError(
                    f"reward_funcs has {name!r}, and only {', '.join(BUILT_IN)} and "
                    "path/to/file.py:function can be used here."
                )
            functions[name] = load_reward_model(name)
    return RewardSet({name: f for name, f in functions.items() if f is not None}, weights)


def is_reward_model(name: str) -> bool:
    """Whether a name in `reward_funcs` stands for a model, not for a function."""
    return name not in BUILT_IN and re.search(r"\.py(:|\Z)", name) is None


def is_collective(function: RewardFunction) -> bool:
    """Whether ranks have to call it equally often with as many rows, as a sharded model."""
    return bool(getattr(function, "is_collective", False))


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


def _find_function(name: str) -> RewardFunction | None:
    """The function of that name, None if the name is a model's folder or hub id."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not is_reward_model(name):
        return _load_from_file(name)
    if not Path(name).is_dir() and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is None:
        raise UserError(
            f"reward_funcs has {name!r}, which is no folder; give {', '.join(BUILT_IN)}, "
            "path/to/file.py:function, or a reward model's folder or hub id."
        )
    return None


def _load_from_file(name: str) -> RewardFunction:
    """The function of `path/to/file.py:function`; runs the file."""
    file, _, function_name = name.rpartition(":")
    path = Path(file).expanduser()
    if not file or not function_name:
        raise UserError(f"reward_funcs has {name!r}; add the function: path/to/file.py:function.")
    if not path.is_file():
        raise UserError(f"reward_funcs has {name!r}, and there is no file {file!r}.")
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward_funcs has {name!r}, and {file!r} is no Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"reward_funcs has {name!r}, and running {file!r} raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward_funcs has {name!r}, and {file!r} has no function of that name.")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise UserError(
            f"reward_funcs has {name!r}, which must accept every column of the data set: "
            f"def {function_name}(prompts, completions, completion_ids, **columns)."
        )
    return cast(RewardFunction, function)


def _call(
    name: str, function: RewardFunction, arguments: Mapping[str, Sequence[Any]], rows: Sequence[int]
) -> Tensor:
    """The function's rewards of some rows of the batch, (len(rows),) float32, nan for None."""
    inputs = {key: [values[row] for row in rows] for key, values in arguments.items()}
    try:
        rewards = list(function(**inputs))
    except UserError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"reward function {name!r} raised {type(error).__name__} on "
            f"{_where_it_fails(function, inputs, rows)}: {error}"
        ) from error
    if len(rewards) != len(rows):
        raise RuntimeError(
            f"reward function {name!r} returned {len(rewards)} rewards for {len(rows)} completions."
        )
    for row, reward in zip(rows, rewards, strict=True):
        is_finite = isinstance(reward, Real) and abs(float(reward)) <= LARGEST
        if reward is not None and not is_finite:  # also refuses NaN, which compares as False
            raise RuntimeError(
                f"reward function {name!r} returned {reward!r} for row {row} of the batch; "
                "it must be a finite number or None."
            )
    return torch.tensor([math.nan if reward is None else float(reward) for reward in rewards])


def _where_it_fails(
    function: RewardFunction, inputs: Mapping[str, Sequence[Any]], rows: Sequence[int]
) -> str:
    """The first row on which a function that raised on the batch raises alone."""
    for index, row in enumerate([] if is_collective(function) else rows):
        try:
            function(**{key: [values[index]] for key, values in inputs.items()})
        except Exception:
            return f"row {row} of the batch"
    return f"a batch of {len(rows)} rows"
