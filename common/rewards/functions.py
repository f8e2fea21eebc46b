"""The built-in reward functions; functions found by name, and called.

Their signature is in `score`. The rewards here are computed from the text of the completion and,
some, from a column of its row. A built-in raises a ValueError for a column that it cannot use,
whatever the completion is.
"""

import asyncio
import inspect
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cache, partial
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import UserError, why_missing
from common.objectives.user_files import load_from_file
from common.text import overlap, synthetic

Step = tuple[int, float]  # index in the completion of the step's last token, reward
Reward = float | Sequence[Step] | None  # None: the function does not apply to the row
RewardFunction = Callable[..., Sequence[Reward]]

ARGUMENTS = (  # of a reward function, which are no columns
    *("prompts", "completions", "completion_ids", "prompt_ids", "has_stop"),
    *("trainer_state", "log_extra", "log_metric"),
)
LARGEST = (2 - 2.0**-23) * 2.0**127  # the largest number of float32
WORD = re.compile(r"\w+")
NUMBER = r"(?P<sign>[-+\u2212$* \t]*)(?P<digits>\d[\d,]*(\.\d+)?|\.\d+)"
FINAL_ANSWER = re.compile(f"####{NUMBER}")
ONLY_A_NUMBER = re.compile(NUMBER + r"[.\s]*")


def gold(completions: Sequence[Any], facts: Sequence[Any], **columns: Any) -> list[float]:
    """Gold reward of a summary of the embedded task, in [0, 1]; see `synthetic.gold_reward`."""
    return [
        synthetic.gold_reward(text_of(text), row)
        for text, row in zip(completions, facts, strict=True)
    ]


def length(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Minus the number of tokens, stop token included: its weight is the price of a token."""
    return [-float(len(ids)) for ids in completion_ids]


def overlong(limits: str) -> RewardFunction:
    """0 up to a number of tokens, from there falling to -1 at another (DAPO, eq. 13)."""
    match = re.fullmatch(r"(\d+)-(\d+)", limits)
    first, last = map(int, match.groups()) if match else (0, 0)
    if first >= last:
        raise UserError(f"overlong:{limits} must be tokens that rise, as overlong:40-56.")
    return lambda completion_ids, **columns: [
        max(-1.0, min(0.0, (first - len(ids)) / (last - first))) for ids in completion_ids
    ]


def gsm8k(
    completions: Sequence[Any], answer: Sequence[str | float | None], **columns: Any
) -> list[float | None]:
    """1 if the number behind the last `####` is that of the column `answer`, else 0.

    The data set's own form of a final answer (Cobbe et al. 2021, section 2); as in their code what
    follows the number does not count. Numbers are compared by value: 1,000 is 1000, $18.00 is 18.
    An `answer` is a number, or a text that is one or ends in `#### number`; None: does not apply.
    """
    return [
        None if right is None else float(final_number(text_of(text)) == expected_number(str(right)))
        for text, right in zip(completions, answer, strict=True)
    ]


def final_answers(completions: Sequence[Any]) -> list[str | None]:
    """The number behind the last `####` of each, equal ones as equal texts."""
    numbers = (final_number(text_of(completion)) for completion in completions)
    texts = [None if n is None else f"{n or Decimal(0):f}" for n in numbers]  # -0 as 0
    return [text.rstrip("0").rstrip(".") if text and "." in text else text for text in texts]


gsm8k.answer = final_answers  # type: ignore[attr-defined]


def final_number(text: str) -> Decimal | None:
    """The number behind the last `####` of a text; None where there is none."""
    _, mark, answer = text.rpartition("####")
    return value_of(FINAL_ANSWER.match(mark + answer))


def expected_number(answer: str) -> Decimal:
    """The number that an `answer` of a row is, or ends in."""
    value = value_of(ONLY_A_NUMBER.fullmatch(answer.rpartition("####")[2]))
    if value is None:
        raise ValueError(f"the column 'answer' holds {answer[:60]!r}, which names no number")
    return value


def value_of(match: re.Match[str] | None) -> Decimal | None:
    """The value of a matched `NUMBER`."""
    if match is None:
        return None
    value = Decimal(match["digits"].replace(",", ""))
    return -value if set(match["sign"]) & {"-", "\u2212"} else value


def matching(kind: str, pattern: str) -> RewardFunction:
    """1 where a pattern of Python's `re` matches, else 0; . matches line breaks too.

    `regex`: anywhere in the completion; `format`: the whole of it, white space around it aside.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(
            f"reward_funcs has {kind}:{pattern}, which is no pattern: {error}."
        ) from None
    find, trim = (compiled.fullmatch, str.strip) if kind == "format" else (compiled.search, str)
    return lambda completions, **columns: [
        float(find(trim(text_of(text))) is not None) for text in completions
    ]


def count(text: str) -> RewardFunction:
    """Number of times that a character (or a longer text) occurs in the completion."""
    return lambda completions, **columns: [float(text_of(c).count(text)) for c in completions]


def rouge_l(column: str) -> RewardFunction:
    """ROUGE-L F1 against a reference in that column of the row; None where the column is None.

    Words are runs of letters and digits in lower case, of any alphabet (`rouge-score`, which
    evaluation reports, knows a-z only).
    """

    def judge(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        pairs = zip(completions, columns[column], strict=True)
        return [
            None if r is None else overlap.rouge_l(text_of(c), text_of(r), WORD) for c, r in pairs
        ]

    judge.columns = (column,)  # type: ignore[attr-defined]
    return judge


def text_of(value: Any) -> str:
    """A text as it is, or the contents of its messages."""
    return value if isinstance(value, str) else "\n".join(m.get("content") or "" for m in value)


BUILT_IN: dict[str, RewardFunction] = {"gold": gold, "length": length, "gsm8k": gsm8k}
WITH_ARGUMENT: dict[str, Callable[[str], RewardFunction]] = {
    "regex": partial(matching, "regex"),
    "format": partial(matching, "format"),
    "rouge_l": rouge_l,
    "count": count,
    "overlong": overlong,
}
KINDS = (*BUILT_IN, *(f"{name}:..." for name in WITH_ARGUMENT), "path/to/file.py:function")


def is_built_in(name: str) -> bool:
    """Whether a name in `reward_funcs` stands for a function of this module."""
    return name in BUILT_IN or name.partition(":")[0] in WITH_ARGUMENT


def is_reward_model(name: str) -> bool:
    """Whether a name in `reward_funcs` stands for a model, not for a function."""
    return not is_built_in(name) and re.search(r"\.py(:|\Z)", name) is None


def find_function(name: str) -> RewardFunction | None:
    """The function of that name, None if it is a model's folder or hub id; else a UserError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_built_in(name):
        kind, _, argument = name.partition(":")
        if not argument:
            raise UserError(f"reward_funcs has {name!r}; say of what: {kind}:<argument>.")
        return WITH_ARGUMENT[kind](argument)
    if not is_reward_model(name):
        return load_from_file(name)
    if not os.path.isdir(name) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is None:
        raise UserError(
            f"reward_funcs has {name!r}, which is no folder and no built-in function"
            f"{why_missing(name)}; give {', '.join(KINDS)}, or a reward model's folder or hub id "
            "(owner/name)."
        )
    return None


# ---- calling one ---------------------------------------------------------------------------------


def is_collective(function: RewardFunction) -> bool:
    """Whether ranks have to call it equally often, as a sharded model."""
    return bool(getattr(function, "is_collective", False))


def needed_columns(function: RewardFunction) -> list[str]:
    """The columns of a row that a function cannot be called without."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
    return [*getattr(function, "columns", ()), *(n for n in needed if n not in ARGUMENTS)]


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The one loop of all calls: a lock or client that a user's file holds belongs to its loop."""
    return asyncio.new_event_loop()


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine: in a notebook, whose thread runs a loop, from another thread."""
    run = event_loop().run_until_complete
    if asyncio._get_running_loop() is None:
        return run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run, coroutine).result()


def call_once(
    function: Callable[..., Any], arguments: Mapping[str, Any], num_rows: int, title: str, noun: str
) -> list[Any]:
    """Call a user's function, once, for one value of each row; a coroutine is waited for.

    It gets those of the arguments that it takes. The UserError for another number of values has
    the function's `title`, and the `noun` for its values.
    """
    if not num_rows:
        return []
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    values = function(**{k: v for k, v in arguments.items() if takes_all or k in parameters})
    values = awaited(values) if inspect.iscoroutine(values) else values
    listed = list(values)
    if isinstance(values, Mapping | Set | str) or len(listed) != num_rows:
        raise UserError(
            f"{title} returned {len(listed)} {noun} for {num_rows} rows; it must return a list "
            "with one for each."
        )
    return listed


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
