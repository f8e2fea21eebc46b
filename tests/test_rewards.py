"""Claim: a reward is the weighted sum of the functions that apply, and a faulty one is named.

Targets are worked out by hand. Names are checked before the first model is loaded, and nothing that
a function may return (wrong count, text, NaN, None for all) becomes a reward by accident.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common import synthetic
from common.config import UserError
from common.rewards import (
    RewardSet,
    apply_missing_eos_penalty,
    is_reward_model,
    load_reward_functions,
)

FILE = """
from dataclasses import dataclass

@dataclass
class Settings:  # dataclasses look their module up in sys.modules
    scale: int = 10

def length(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def scaled(completions, n, **columns):
    return [Settings().scale * value for value in n]

def no_columns(prompts, completions, completion_ids):
    return [0.0]

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return str(path)


def constant(*values: Any) -> Any:
    return lambda prompts, completions, completion_ids, **columns: list(values)


def call(functions: dict[str, Any], weights: list[float], num: int = 2, **columns: Any) -> Any:
    prompts = [f"p{i}" for i in range(num)]
    completions = [f"c{i}" for i in range(num)]
    return RewardSet(functions, weights)(prompts, completions, [[i] for i in range(num)], columns)


def as_list(tensor: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in tensor.tolist()]


def test_the_total_is_the_weighted_sum_of_what_applies():
    functions = {"a": constant(1, None, 3), "b": constant(10.0, 20.0, None)}
    total, per_function = call(functions, [2.0, -0.5], num=3)
    assert total.tolist() == [2 * 1 - 0.5 * 10, -0.5 * 20, 2 * 3]
    assert total.dtype == per_function["a"].dtype == torch.float32
    assert as_list(per_function["a"]) == [1, None, 3]
    assert as_list(per_function["b"]) == [10, 20, None]
    assert list(per_function) == ["a", "b"]


def test_a_function_gets_texts_ids_and_columns_by_name():
    seen: dict[str, Any] = {}

    def spy(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0, 0.0]

    call({"spy": spy}, [1.0], facts=[{"k": 1}, {"k": 2}])
    assert seen == {
        "prompts": ["p0", "p1"],
        "completions": ["c0", "c1"],
        "completion_ids": [[0], [1]],
        "facts": [{"k": 1}, {"k": 2}],
    }


def test_a_row_may_name_its_own_functions():
    seen = []

    def spy(completions: list[str], n: list[int], **columns: Any) -> list[int]:
        seen.append(completions)
        return n

    columns = {"n": [1, 2, 3, 4], "reward_funcs": ["a", ["b"], None, ["a", "b"]]}
    total, per_function = call({"a": spy, "b": constant(10, 20, 30)}, [1, 1], num=4, **columns)
    assert seen == [["c0", "c2", "c3"]]  # rows that did not ask for it are not shown to it
    assert total.tolist() == [1, 10, 3 + 20, 4 + 30]
    assert as_list(per_function["a"]) == [1, None, 3, 4]
    total, per_function = call(
        {"a": spy, "b": constant()}, [1, 1], n=[5, 6], reward_funcs=["a", "a"]
    )
    assert total.tolist() == [5, 6]
    assert as_list(per_function["b"]) == [None, None]
    with pytest.raises(RuntimeError, match=r"row 1 of the batch names .* 'c' .* there are: a, b"):
        call({"a": spy, "b": spy}, [1, 1], n=[5, 6], reward_funcs=["a", "c"])


def test_a_collective_function_is_called_on_every_row_and_once():
    sizes = []

    class Model:  # ranks that called it on fewer rows would leave the others waiting
        is_collective = True

        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            sizes.append(len(completions))
            return [float(text[1:]) for text in completions]

    functions = {"model": Model(), "b": constant(10, 10)}
    columns = {"reward_funcs": ["b", "model", "b"]}
    total, per_function = call(functions, [1, 1], num=3, **columns)
    assert sizes == [3]
    assert total.tolist() == [10, 1, 10]
    assert as_list(per_function["model"]) == [None, 1, None]
    call(functions, [1, 1], num=2, reward_funcs=["b", "b"])
    assert sizes == [3, 2]

    def broken(completions: list[str], **columns: Any) -> list[float]:
        sizes.append(len(completions))
        raise KeyError("x")

    broken.is_collective = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="'broken' raised KeyError on a batch of 2 rows: 'x'"):
        call({"broken": broken}, [1])
    assert sizes == [3, 2, 2]  # not called again to find the row


def test_numbers_of_other_libraries_are_numbers():
    total, _ = call({"a": constant(np.float32(0.5), True)}, [1.0])
    assert total.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 completions"),
        ([1.0, "2"], "returned '2' for row 1"),
        ([math.nan, 1.0], "returned nan for row 0"),
        ([1.0, math.inf], "returned inf for row 1"),
        ([1.0, -1e39], "returned -1e+39 for row 1"),  # not finite in float32
        ([[1.0], 2.0], "returned [1.0] for row 0"),
        ([torch.tensor(1.0), 2.0], "returned tensor(1.) for row 0"),
    ],
)
def test_a_faulty_return_value_is_named(values, words):
    with pytest.raises(RuntimeError) as caught:
        call({"good": constant(0, 0), "bad": constant(*values)}, [1, 1])
    assert "'bad'" in str(caught.value)
    assert words in str(caught.value)


def test_the_row_number_is_that_of_the_batch_also_for_a_part_of_it():
    columns = {"reward_funcs": ["a", "b", "b"]}
    with pytest.raises(RuntimeError, match="'b' returned nan for row 2"):
        call({"a": constant(0), "b": constant(0, math.nan)}, [1, 1], num=3, **columns)


def test_an_exception_names_function_row_and_cause():
    def picky(completions: list[str], **columns: Any) -> list[float]:
        return [1 / (text != "c1") for text in completions]

    with pytest.raises(
        RuntimeError, match="'picky' raised ZeroDivisionError on row 1 of"
    ) as caught:
        call({"picky": picky}, [1.0], num=3)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def moody(completions: list[str], **columns: Any) -> list[float]:
        if len(completions) > 1:
            raise KeyError("many")
        return [0.0]

    with pytest.raises(RuntimeError, match="'moody' raised KeyError on a batch of 2 rows"):
        call({"moody": moody}, [1.0])
    with pytest.raises(RuntimeError, match="'none' raised TypeError"):
        call({"none": lambda **_: None}, [1.0])


def test_a_row_to_which_nothing_applies_is_an_error():
    with pytest.raises(RuntimeError, match="applies to row 1 of the batch: a, b returned None"):
        call({"a": constant(1, None), "b": constant(None, None)}, [1, 0])


def test_a_weight_of_zero_still_applies():
    total, per_function = call({"a": constant(3, 4)}, [0.0])
    assert total.tolist() == [0, 0]
    assert per_function["a"].tolist() == [3, 4]


# --- names ----------------------------------------------------------------------------------------


def test_gold_scores_the_embedded_task():
    facts = synthetic.make_rows("sft", "train", 1)[0]["facts"]
    whole = " my {who} {event} my {thing} at the {place} and I want {wish}.".format(**facts)
    rewards = load_reward_functions(["gold"])
    rewards.check_columns({"facts": facts})
    completions = [whole, " nothing", whole]
    total, _ = rewards(["p"] * 3, completions, [[1]] * 3, {"facts": [facts] * 3})
    assert total.tolist() == [1.0, 0.0, 1.0]


def test_functions_of_a_file_are_found(file):
    rewards = load_reward_functions([f"{file}:length", f"{file}:scaled"], [1, 0.5])
    columns = {"n": [1, 2], "other": ["x", "y"]}
    total, per_function = rewards(["p", "q"], ["a", "b"], [[1, 2], [3]], columns)
    assert total.tolist() == [2 + 0.5 * 10, 1 + 0.5 * 20]
    assert list(per_function) == [f"{file}:length", f"{file}:scaled"]


def test_models_are_loaded_by_the_callable_that_is_given_and_last(tmp_path, file):
    folder = tmp_path / "reward" / "model"
    folder.mkdir(parents=True)
    loaded = []

    def load(name: str) -> Any:
        loaded.append(name)
        return constant(7.0)

    names = [str(folder), f"{file}:length", "hub/model"]
    total, _ = load_reward_functions(names, load_reward_model=load)(["p"], ["c"], [[1, 2]], {})
    assert loaded == [str(folder), "hub/model"]
    assert total.tolist() == [7 + 2 + 7]
    assert [is_reward_model(name) for name in names] == [True, False, True]
    assert not is_reward_model("gold")
    with pytest.raises(UserError, match="no function of that name"):
        load_reward_functions([*names, f"{file}:nope"], load_reward_model=load)
    assert len(loaded) == 2


@pytest.mark.parametrize(
    ("names", "weights", "words"),
    [
        ([], None, "reward_funcs is empty"),
        (["gold", "gold"], None, "names 'gold' twice"),
        (["gold"], [1.0, 2.0], "reward_weights is [1.0, 2.0]; it must hold 1 finite"),
        (["gold"], [math.nan], "reward_weights is [nan]"),
        (["hub/model"], None, "only gold and path/to/file.py:function can be used here"),
        (["no/such/folder"], None, "which is no folder"),
        (["./no_folder"], None, "which is no folder"),
        (["nope.py:f"], None, "there is no file 'nope.py'"),
        (["{file}"], None, "add the function"),
        (["{file}:"], None, "add the function"),
        (["{file}:nope"], None, "no function of that name"),
        (["{file}:constant"], None, "no function of that name"),
        (["{file}:no_columns"], None, "**columns"),
    ],
)
def test_a_bad_name_or_weight_is_refused_in_one_sentence(file, names, weights, words):
    names = [name.replace("{file}", file) for name in names]
    with pytest.raises(UserError) as caught:
        load_reward_functions(names, weights)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith(".")
    for name in names:
        assert name in message


def test_a_file_that_fails_is_named_with_its_cause(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"bad\.py' raised ZeroDivisionError: division by zero"):
        load_reward_functions([f"{tmp_path / 'bad.py'}:f"])
    (tmp_path / "worse.py").write_text("def f(:\n")
    with pytest.raises(UserError, match="SyntaxError"):
        load_reward_functions([f"{tmp_path / 'worse.py'}:f"])
    (tmp_path / "lines.py").write_text("raise ValueError('two\\nlines')\n")
    with pytest.raises(UserError, match="ValueError: two lines"):
        load_reward_functions([f"{tmp_path / 'lines.py'}:f"])


def test_a_missing_column_is_refused_before_anything_is_sampled(file):
    rewards = load_reward_functions([f"{file}:length", f"{file}:scaled"])
    rewards.check_columns({"n": 1, "other": 2})
    with pytest.raises(UserError, match="scaled' needs the column 'n', .* rows have 'other';"):
        rewards.check_columns({"other": 2})
    with pytest.raises(UserError, match="needs the column 'facts'.* have no further columns"):
        load_reward_functions(["gold"]).check_columns({})


# --- missing stop token ---------------------------------------------------------------------------


def test_the_penalty_replaces_the_reward_of_what_did_not_stop():
    rewards = torch.tensor([[0.5, -3.0], [2.0, 0.25]])
    has_stop = torch.tensor([[True, False], [False, True]])
    penalised = apply_missing_eos_penalty(rewards, has_stop, -1.0)
    assert penalised.tolist() == [[0.5, -1.0], [-1.0, 0.25]]
    assert penalised.dtype == torch.float32
    assert apply_missing_eos_penalty(rewards, has_stop, 0.0).tolist() == [[0.5, 0.0], [0.0, 0.25]]
    assert torch.equal(apply_missing_eos_penalty(rewards, has_stop, None), rewards)
    assert rewards.tolist() == [[0.5, -3.0], [2.0, 0.25]]
