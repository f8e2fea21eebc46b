"""Claim: a reward is the weighted sum of the functions that apply, and a faulty one is named.

Targets are worked out by hand. A function may reward steps: process supervision (DeepSeekMath
section 4.1.3). What it logs in whole runs is in `test_samples`, what one written for TRL gets
in `test_trl_rewards`. About `common.rewards` and `common.objectives.user_files`.
"""

import asyncio
import copy
import json
import math
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from ranks import launch
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from common import distributed
from common.advantages import apply_missing_eos_penalty, penalise_steps
from common.distributed import tokenizer_threads
from common.errors import FunctionError, UserError
from common.evaluation import measure
from common.model import load
from common.objectives import user_files
from common.rewards import functions, models, score
from common.rewards.functions import is_reward_model
from common.rewards.score import RewardFunctions, RewardLog
from common.sampling.sampler import Rollouts
from common.text import synthetic
from common.text.example import Example
from common.text.reading import load_examples

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
    return [4.0] * len(prompts)

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
    ids = [[i] for i in range(num)]
    rewards = RewardFunctions(functions, weights)(prompts, completions, ids, columns)
    return rewards.total, rewards.by_function


def rows(*columns: dict[str, Any], first: int = 1) -> list[Example]:
    """Rows with these columns, numbered from `first`."""
    return [Example(n, "", [], [], row) for n, row in enumerate(columns, first - 1)]


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
    total, per_function = call({"a": constant(3, 4)}, [0.0])  # a weight of zero still applies
    assert total.tolist() == [0, 0]
    assert per_function["a"].tolist() == [3, 4]


def test_a_function_changes_nothing_that_is_trained_on():
    """It gets copies, and the next one gets what it got."""

    def wild(prompts: list, completion_ids: list, prompt_ids: list, facts: list) -> list[float]:
        for rows in (completion_ids, prompt_ids, prompts):
            rows[0].clear()
            rows.clear()
        facts[0]["k"].append(2)
        return [0.0] if facts[0]["k"] == [1, 2] else [1.0]

    inputs = {"prompts": [[{"role": "user"}]], "completions": ["c"], "completion_ids": [[5, 6]]}
    columns = {"prompt_ids": [[3, 4]], "facts": [{"k": [1]}]}
    before = copy.deepcopy((inputs, columns))
    functions = RewardFunctions({"wild": wild, "again": wild}, [1, 1])
    assert functions(**inputs, columns=columns).total.tolist() == [0]
    assert (inputs, columns) == before


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
    with pytest.raises(UserError, match="row 1 of the batch has 'c' in .* has: a, b"):
        call({"a": spy, "b": spy}, [1, 1], n=[5, 6], reward_funcs=["a", "c"])


def test_a_collective_function_is_called_on_every_row_and_once():
    sizes = []

    class Model:  # ranks that called it on fewer rows would leave the others waiting
        is_collective = True

        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            sizes.append(len(completions))
            return [float(text[1:]) for text in completions]

    functions = {"model": Model(), "b": constant(10, 10)}
    total, per_function = call(functions, [1, 1], num=3, reward_funcs=["b", "model", "b"])
    assert sizes == [3]
    assert total.tolist() == [10, 1, 10]
    assert as_list(per_function["model"]) == [None, 1, None]
    call(functions, [1, 1], num=2, reward_funcs=["b", "b"])
    assert sizes == [3, 2]


def test_numbers_of_other_libraries_are_numbers():
    total, _ = call({"a": constant(np.float32(0.5), np.bool_(True))}, [1.0])
    assert total.tolist() == [0.5, 1.0]
    total, _ = call({"a": lambda completions, **columns: torch.tensor([2.0, -1.0])}, [1.0])
    assert total.tolist() == [2.0, -1.0]


def test_a_function_without_columns_gets_what_it_names():
    def short(completions: list[str], n: list[int]) -> list[float]:
        return [len(text) + number for text, number in zip(completions, n, strict=True)]

    total, _ = call({"short": short}, [1.0], n=[1, 2], other=[3, 4])
    assert total.tolist() == [3, 4]


def test_coroutines_of_all_calls_share_a_loop():
    slot = asyncio.Semaphore(1)  # one that was waited for belongs to the loop of that time

    async def ask() -> float:
        async with slot:
            await asyncio.sleep(0)
            return 1.0

    async def slow(completions: list[str], **columns: Any) -> list[float]:
        return await asyncio.gather(*(ask() for _ in completions))

    async def in_notebook() -> Any:
        return call({"slow": slow}, [2.0], num=2)[0]

    for _ in range(2):
        assert call({"slow": slow}, [2.0], num=2)[0].tolist() == [2.0, 2.0]
        assert asyncio.run(in_notebook()).tolist() == [2.0, 2.0]


# --- what a function logs -------------------------------------------------------------------------


def scored(functions: dict[str, Any], **columns: Any) -> RewardLog:
    """The log that functions write about three completions."""
    rewards = RewardFunctions(functions, [1.0] * len(functions))
    return rewards(["p"] * 3, ["a", "bb", "ccc"], [[1], [2], [3]], columns).log


def noting(*calls: tuple[str, Any], kind: str = "log_metric") -> Any:
    def function(completions: list[str], **columns: Any) -> list[float]:
        for name, value in calls:
            columns[kind](name, value)
        return [0.0] * len(completions)

    return function


def test_every_call_adds_a_value_to_its_name():
    functions = {
        "a": noting(("right", 0.5), ("right", np.float32(1.5)), ("long", torch.tensor(3))),
        "b": noting(("right", True)),
    }
    assert scored(functions).metrics == {"right": [0.5, 1.5, 1.0], "long": [3.0]}


def test_a_column_has_a_place_for_every_completion():
    def some(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("length", [np.int64(len(text)) for text in completions])
        log_extra("parts", [tuple(text) for text in completions])
        return [0.0] * len(completions)

    notes = scored({"some": some, "other": noting()}, reward_funcs=["some", "other", "some"])
    assert notes.columns == {"length": [1, None, 3], "parts": ["('a',)", None, "('c', 'c', 'c')"]}


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("log_metric", math.nan, "got nan; it must be a finite number"),
        ("log_metric", "1", "got '1'; it must be a finite number"),
        ("log_metric", [1.0], "got [1.0]; it must be a finite number"),
        ("log_extra", [0, 0], "got 2 values for 3 completions"),
    ],
)
def test_what_cannot_be_logged_is_refused(kind: str, value: Any, reason: str):
    sentence = f"reward function 'judge' raised ValueError: {kind}('x') {reason} ("
    with pytest.raises(FunctionError, match=re.escape(sentence)):
        scored({"judge": noting(("x", value), kind=kind)})


CHAT = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "returned 1 rewards for 2 rows; it must return a list with one for each ("),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 rows"),
        ([1.0, "2"], "returned '2' for row 1"),
        ([math.nan, 1.0], "returned nan for row 0"),
        ([1.0, math.inf], "returned inf for row 1"),
        ([1.0, -1e39], "returned -1e+39 for row 1"),  # not finite in float32
        ([[1.0], 2.0], "returned [1.0] for row 0"),
        ([torch.tensor(math.nan), 2.0], "returned tensor(nan) for row 0"),
        ([torch.ones(1), 2.0], "returned tensor([1.]) for row 0"),
    ],
)
def test_a_faulty_return_value_is_named(values, words):
    with pytest.raises(UserError, match=f"'bad' {re.escape(words)}"):
        call({"good": constant(0, 0), "bad": constant(*values)}, [1, 1])


@pytest.mark.parametrize("values", [{0: 1.0, 1: 2.0}, {1.0, 2.0}, "12"])
def test_values_in_no_order_of_rows_are_refused(values):
    with pytest.raises(UserError, match="'bad' returned 2 rewards for 2 rows; it must return a li"):
        call({"bad": lambda **_: values}, [1])


def test_the_row_number_is_that_of_the_batch_also_for_a_part_of_it():
    columns = {"reward_funcs": ["a", "b", "b"]}
    with pytest.raises(UserError, match="'b' returned nan for row 2"):
        call({"a": constant(0), "b": constant(0, math.nan)}, [1, 1], num=3, **columns)


def test_an_exception_is_the_function_s_own():
    def picky(completions: list[str], **columns: Any) -> list[float]:
        return [1 / (text != "c1") for text in completions]

    where = re.escape("raised ZeroDivisionError: division by zero (in a batch, from 'c0')")
    with pytest.raises(FunctionError, match=where) as caught:
        call({"picky": picky}, [1.0], num=3)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert str(caught.value).endswith("\nZeroDivisionError: division by zero")
    with pytest.raises(FunctionError, match="'none' raised TypeError: 'NoneType' object is not it"):
        call({"none": lambda **_: None}, [1.0])


def test_a_row_to_which_nothing_applies_is_an_error():
    with pytest.raises(UserError, match="applies to row 1 of the batch .*: a, b returned None"):
        call({"a": constant(1, None), "b": constant(None, None)}, [1, 0])


# --- names ----------------------------------------------------------------------------------------


def test_gold_scores_the_embedded_task():
    facts = synthetic.make_rows("sft", "train", 1)[0]["facts"]
    whole = " my {who} {event} my {thing} at the {place} and I want {wish}.".format(**facts)
    rewards = tiny.reward_functions(["gold"])
    rewards.check_rows(rows({"facts": facts}))
    scores = rewards(["p"] * 3, [whole, " nothing", whole], [[1]] * 3, {"facts": [facts] * 3})
    assert scores.total.tolist() == [1.0, 0.0, 1.0]


def test_facts_without_one_of_them_are_refused_by_its_name():
    with pytest.raises(UserError, match="row 1 of the prompts: there is no 'who', for 'gold'"):
        tiny.reward_functions(["gold"]).check_rows(rows({"facts": {}}))


def test_answers_are_texts_of_those_functions_that_say_them():
    def says(**_: Any) -> list[float]:
        return [0.0, 0.0, 0.0]

    says.answer = lambda completions: [7, None, completions[2]]  # type: ignore[attr-defined]
    functions = RewardFunctions({"says": says, "silent": constant(1, 1, 1)}, [1, 1])
    assert functions.extracted_answers(["a", "b", "c"]) == {"says": ["7", None, "c"]}


def test_a_column_of_another_length_is_an_error_of_the_caller():
    functions = RewardFunctions({"one": constant(1, 1)}, [1])
    for columns in ({"facts": ["a"]}, {"facts": ["a", "b", "c"]}):
        with pytest.raises(AssertionError):
            functions(["p", "q"], ["a", "b"], [[1], [1]], columns)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_classifier_that_transformers_saved_gives_its_own_logits(tmp_path, process_group, family):
    """In bfloat16, without a word of this project in its folder."""
    lm = tiny.classifier(family, vocab_size=300, is_plain=True, pad_id=1).to(torch.bfloat16)
    folder = tiny.save(lm, tmp_path / "judge")
    texts = ["my key is lost", " the key", " a dog is lost too"]
    # As it is read with the model: with a Qwen2 transformers puts its normaliser in front
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt, *ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    lengths = {"max_prompt_length": 20, "max_completion_length": 20}
    scorer = tiny.reward_functions([folder], of=tokenizer, **lengths)
    scorer.load(distributed.mesh())
    rollouts = Rollouts.of(ids, [[0.0] * len(row) for row in ids], [True, True])
    rewards = scorer.score([Example(0, texts[0], prompt, [], {})], rollouts).total[0]
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = [plain(torch.tensor([prompt + row])).logits[0, 0] for row in ids]
    torch.testing.assert_close(rewards, torch.stack(expected), rtol=0, atol=1e-5)
    assert abs(rewards[0] - rewards[1]) > 1e-2


def judged(name: str, *completions: str, **columns: list[Any]) -> list[float | None]:
    """Rewards of completions by the function of that name, as texts and as messages."""
    rewards = tiny.reward_functions([name])
    ids = [[1]] * len(completions)
    of_texts = rewards(["p"] * len(completions), completions, ids, columns).total
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    of_messages = rewards([CHAT] * len(completions), messages, ids, columns).total
    assert as_list(of_texts) == as_list(of_messages)
    return as_list(of_texts)


def test_length_is_minus_the_number_of_tokens():
    rewards = tiny.reward_functions(["length"], [0.5])(["p"] * 2, ["a", "b"], [[5, 6, 0], [0]], {})
    assert rewards.by_function["length"].tolist() == [-3, -1]
    assert rewards.total.tolist() == [-1.5, -0.5]


def test_a_completion_that_is_too_long_is_punished_softly():
    """DAPO eq. 13 with at most 10 tokens and a buffer of 4."""
    function = functions.find_function("overlong:6-10")
    ids = [[0] * number for number in (1, 6, 7, 8, 9, 10, 11)]
    assert function(completion_ids=ids) == [0, 0, -0.25, -0.5, -0.75, -1, -1]


def test_a_character_is_counted():
    assert judged("count:e", "Here", "HERE", "the eel:e") == [2, 0, 4]
    assert judged("count::", "a:b:c", "abc") == [2, 0]


def test_a_pattern_is_found_anywhere_and_a_format_is_that_of_the_whole_text():
    texts = ("so 42", "42", " 42\n", "4\n2", "x42")
    assert judged(r"regex:\b\d+$", *texts) == [1, 1, 1, 1, 0]
    assert judged(r"format:\d+", *texts) == [0, 1, 1, 0, 0]
    assert judged(r"format:4.2", *texts) == [0, 0, 0, 1, 0]  # . is a line break too
    assert judged("regex:a:b", "a:b", "ab") == [1, 0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so 6 * 3 = 18\n#### 18", "<<6*3=18>>18 eggs\n#### 18", 1),
        ("#### 18", "18", 1),
        ("#### 18", 18, 1),
        ("#### 18", 18.0, 1),
        ("####18", "#### 18", 1),
        ("#### 1,080", "#### 1080", 1),
        ("#### 109200000", "#### 109,200,000", 1),
        ("#### -5", "#### -5", 1),
        ("#### \u22125", "#### -5", 1),
        ("#### 5", "#### -5", 0),
        ("#### +5", "#### 5", 1),
        ("#### $18", "#### 18", 1),
        ("#### -$18", "#### -18", 1),
        ("#### $-18", "#### -18", 1),
        ("#### 18.", "#### 18", 1),
        ("#### 18.00", "#### 18", 1),
        ("#### 0.5", "#### .5", 1),
        ("#### 0.50.", "#### 0.5", 1),
        ("#### 1.8", "#### 18", 0),
        ("#### 18 dollars", "#### 18", 1),
        ("#### 50%", "#### 50", 1),
        ("#### **18**", "#### 18", 1),
        ("#### 0", "#### 0", 1),
        ("#### 17\n#### 18", "#### 18", 1),  # the last one counts
        ("#### 18\n#### 17", "#### 18", 0),
        ("#### 18\n####", "#### 18", 0),
        ("#### 5 million", "#### 5", 1),  # what follows does not count
        ("#### x = 18", "#### 18", 0),
        ("#### \n18", "#### 18", 0),
        ("The answer is 18", "#### 18", 0),
        ("", "#### 18", 0),
        ("#### 18", None, None),
    ],
)
def test_final_answers_are_compared_as_numbers(completion, answer, expected):
    columns = {"answer": [answer, "#### 7"]}
    rewards = tiny.reward_functions(["gsm8k"])
    rewards.check_rows(rows({"answer": answer}))
    values = rewards.functions["gsm8k"](completions=[completion, "#### 7"], **columns)
    assert list(values) == [expected, 1.0]


def test_an_answer_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="holds 'a half'"):
        judged("gsm8k", "#### 1", "#### 2", answer=["1", "a half"])
    rewards = tiny.reward_functions(["gsm8k", "length"])
    for answer in ("#### 18", 18, 1.5, None):
        rewards.check_rows(rows({"answer": answer}))
    for answer in ("a half", "#### 3 1/2", math.nan, True, "x" * 1000):
        with pytest.raises(
            UserError, match="row 7 of the prompts: .* names no number, for 'gsm8k'"
        ) as caught:
            rewards.check_rows(rows({"answer": answer}, first=7))
        assert len(str(caught.value)) < 200
    rewards.check_rows(rows({"answer": "a half", "reward_funcs": ["length"]}))  # not asked for


def test_the_reference_of_rouge_l_is_a_column_of_text_or_messages():
    references = ["the cat", [{"role": "assistant", "content": "a dog"}]]
    assert judged("rouge_l:summary", "the cat", "a cat", summary=references) == [1, 0.5]
    rewards = tiny.reward_functions(["rouge_l:summary"])
    assert rewards.functions["rouge_l:summary"](completions=["a"], summary=[None]) == [None]
    with pytest.raises(UserError, match="'rouge_l:summary' needs the column 'summary'"):
        rewards.check_rows(rows({"answer": "x"}))


def test_functions_of_a_file_are_found(file):
    names = [f"{file}:length", f"{file}:scaled", f"{file}:no_columns"]
    rewards = tiny.reward_functions(names, [1, 0.5, 1])(
        ["p", "q"], ["a", "b"], [[1, 2], [3]], {"n": [1, 2], "other": ["x", "y"]}
    )
    assert rewards.total.tolist() == [2 + 0.5 * 10 + 4, 1 + 0.5 * 20 + 4]
    assert list(rewards.by_function) == ["length", "scaled", "no_columns"]


def test_models_are_read_last(tmp_path, file, monkeypatch):
    folder = tmp_path / "reward" / "model"
    folder.mkdir(parents=True)
    loaded = []

    def load(name: str, *_: Any) -> Any:
        loaded.append(name)
        return constant(7.0)

    monkeypatch.setattr(score, "RewardModelFunction", load)
    names = [str(folder), f"{file}:length", "hub/model"]
    rewards = tiny.reward_functions(names)(["p"], ["c"], [[1, 2]], {})
    assert loaded == [str(folder), "hub/model"]
    assert rewards.total.tolist() == [7 + 2 + 7]
    assert [is_reward_model(name) for name in names] == [True, False, True]
    assert not any(map(is_reward_model, ["gold", "gsm8k", "count:e", "regex:a/b", "format:.py:f"]))
    with pytest.raises(UserError, match="no function of that name"):
        tiny.reward_functions([*names, f"{file}:nope"])
    assert len(loaded) == 2


@pytest.mark.parametrize(
    ("names", "weights", "words"),
    [
        (["gold", "gold"], [], "names 'gold' twice"),
        (["gold"], [1.0, 2.0], "reward_weights is [1.0, 2.0]; it must hold one number"),
        (["count"], [], "say of what: count:<argument>"),
        (["regex:"], [], "say of what: regex:<argument>"),
        (["regex:(a"], [], "no pattern: missing )"),
        (["format:["], [], "no pattern: unterminated character set"),
        (["words:3"], [], "which is no folder"),
        (["./no_folder"], [], "which is no folder"),
        ([f"{'no ' * 100}.py:f"], [], "there is no file 'no no"),
        (["{file}"], [], "name the function"),
        (["{file}:"], [], "name the function"),
        (["{file}:constant"], [], "no function of that name"),
    ],
)
def test_a_bad_name_or_weight_is_refused_in_one_sentence(file, names, weights, words):
    names = [name.replace("{file}", file) for name in names]
    with pytest.raises(UserError) as caught:
        tiny.reward_functions(names, weights)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    for text in (words, *names):
        assert text in message


USER_FILE = """
import csv
from helper import NAME
with open(__file__ + ".runs", "a") as runs:
    runs.write("x")
def name(number):
    return NAME + csv.__name__ + "!" * number
other = name
"""


# A spawned process imports a file by its name, which must not be that of another test's file
@pytest.mark.parametrize(("stem", "method"), [("spawned_rewards", "spawn"), ("json", "fork")])
def test_a_user_s_file_is_one_module_next_to_its_neighbours(tmp_path, monkeypatch, stem, method):
    """Whatever path leads to it, and if other files have the same name: a user's or Python's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_files, "USER_FOLDERS", [])
    monkeypatch.chdir(tmp_path)
    for folder in map(Path, "ab"):
        folder.mkdir()
        (folder / f"near_{stem}.py").write_text(f"NAME = {str(folder)!r}")
        (folder / f"{stem}.py").write_text(USER_FILE.replace("helper", f"near_{stem}"))
        (folder / "csv.py").write_text("raise ValueError")
        Path(f"link_{folder}.py").symlink_to(folder / f"{stem}.py")
    paths = [f"{folder}/{stem}.py:name" for folder in "ab"] + ["link_a.py:other", "link_b.py:other"]
    a, b, *others = [functions.load_from_file(path) for path in paths]
    assert others == [a, b]
    assert [Path(folder, f"{stem}.py.runs").read_text() for folder in "ab"] == ["x", "x"]
    assert [a(1), b(2)] == ["acsv!", "bcsv!!"]
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map_async(a, [1]).get(timeout=60) == ["acsv!"]
        assert method == "spawn" or pool.map_async(b, [2]).get(timeout=60) == ["bcsv!!"]


def test_a_missing_column_is_refused_before_anything_is_sampled(file):
    rewards = tiny.reward_functions([f"{file}:length", f"{file}:scaled"])
    rewards.check_rows(rows({"n": 1, "other": 2}))
    with pytest.raises(UserError, match="scaled' needs the column 'n', .* rows have 'other';"):
        rewards.check_rows(rows({"other": 2}))
    with pytest.raises(UserError, match="needs the column 'n'.* have no further columns"):
        rewards.check_rows(rows({}))


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


def ids_of_a_fork() -> list[list[int]]:
    """Token ids in a process that is forked after a run has tokenised its rows on all cores."""
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    distributed.quieten()
    tokenizer = synthetic.train_tokenizer()
    with tokenizer_threads():
        tokenizer(["a b"] * 5000)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(tokenizer, [["a b"] * 50]).get(timeout=60)["input_ids"]


def test_a_reward_function_may_fork_and_tokenise_there(tmp_path: Path):
    (ids,) = launch(ids_of_a_fork, 1, tmp_path, timeout=120)
    assert ids == [synthetic.train_tokenizer()("a b")["input_ids"]] * 50


# --- reward models of other tokenizers ------------------------------------------------------------


SHORT = {"max_prompt_length": 20, "max_completion_length": 40}


def judge_folders(root: Path) -> dict[str, tuple[str, Any]]:
    """Reward models that share a table of tokens and read texts in other ways, by name."""
    special = [("<|endoftext|>", 0)]
    bos = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=special)
    space = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), space])
    parts: dict[str, dict[str, Any]] = {
        "lower": {"normalizer": normalizers.Lowercase()},
        "plain": {},
        "bos": {"post_processor": bos},
        "words": {"pre_tokenizer": words},
    }
    folders = {}
    for seed, (name, changed) in enumerate(parts.items()):
        tokenizer = copy.deepcopy(tiny.tokenizer())
        for part, value in changed.items():
            setattr(tokenizer.backend_tokenizer, part, value)
        lm = tiny.classifier("llama", seed=seed, vocab_size=300, is_plain=True, pad_id=1)
        folders[name] = (tiny.save(lm, root / name, tokenizer), lm)
    return folders


@pytest.mark.parametrize("first", ["lower", "plain", "bos", "words"])
def test_a_judge_reads_pairs_by_its_own_tokenizer_whichever_comes_first(
    tmp_path, process_group, first
):
    """The run's tokenizer is that of the first, which may not even keep the letters."""
    rows = [
        {"prompt": f"My {dog} ran", "chosen": " Home at 10", "rejected": " to THE caf\u00e9"}
        for dog in ("dog", "CAT")
    ]
    file = tiny.write_rows(tmp_path / "train.jsonl", rows)
    folders = judge_folders(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folders[first][0])
    paths = [path for path, _ in folders.values()]
    scorer = tiny.reward_functions(paths, of=tokenizer, **SHORT)
    scorer.load(distributed.mesh())
    config, vocabulary = tiny.train_config(**SHORT), scorer.vocabulary
    pairs = load_examples(config, str(file), "train", "preference", vocabulary, with_texts=True)
    for path, lm in folders.values():
        of_judge = AutoTokenizer.from_pretrained(path)
        expected = torch.empty(2, 2)
        for i, row in enumerate(rows):
            for j, name in enumerate(("chosen", "rejected")):
                ids = of_judge(row["prompt"])["input_ids"]
                ids += [*of_judge(row[name], add_special_tokens=False)["input_ids"], 0]
                with torch.no_grad():
                    expected[i, j] = lm(torch.tensor([ids])).logits[0, 0]
        function = scorer.reward_models[path]
        scores = measure.reward_scores(function, pairs, vocabulary, config).float()
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
        assert function.reads_ids(is_chat=False) is (path == folders[first][0])
        # A bos is put in front of texts alone: the template writes a conversation's
        same = {folders[name][0] for name in ("plain", "bos")}
        assert function.reads_ids(is_chat=True) is (
            path == folders[first][0] or {path, folders[first][0]} == same
        )


@pytest.mark.parametrize("template", [None, tiny.TURNS])
def test_a_judge_without_tokens_of_the_policy_never_gets_their_ids(tmp_path, template):
    folder = judge_folders(tmp_path)["plain"][0]
    policy = tiny.with_template(tiny.chatml_tokenizer(vocab_size=300), template)
    (function,) = tiny.reward_functions([folder], of=policy, **SHORT).reward_models.values()
    assert not function.reads_ids(is_chat=False)
    assert not function.reads_ids(is_chat=True)


@pytest.mark.parametrize("is_special", [False, True])
def test_a_judge_with_a_word_that_the_policy_lacks_reads_texts_by_its_own(tmp_path, is_special):
    """A special token is in no text."""
    judge = copy.deepcopy(tiny.tokenizer())
    judge.add_tokens([AddedToken("hello", special=is_special)])
    lm = tiny.classifier("llama", vocab_size=301, is_plain=True, pad_id=1)
    folder = tiny.save(lm, tmp_path / "judge", judge)
    scorer = tiny.reward_functions([folder], of=tiny.tokenizer(), **SHORT)
    (function,) = scorer.reward_models.values()
    assert function.reads_ids(is_chat=False) is is_special
    assert function.reads_ids(is_chat=True) is is_special


def test_conversations_that_a_judge_cannot_render_are_found_before_it_is_loaded(tmp_path):
    """A row of each form is rendered; the sentence names the row and the reward model."""
    refusal = "{{ raise_exception('System role not supported') }}"
    strict = f"{{% if messages[0].role == 'system' %}}{refusal}{{% endif %}}{tiny.TURNS}"
    folders = judge_folders(tmp_path)
    path = folders["plain"][0]
    policy = tiny.with_template(tiny.tokenizer(), tiny.TURNS)
    asked: dict[str, Any] = {"role": "user", "content": "Why?"}
    chats = [
        Example(i, "", [5], [], {"tools": None}, messages=[asked | {"content": f"Why {i}?"}])
        for i in range(3)
    ]
    system = [{"role": "system", "content": "Be brief."}, asked]
    odd = {
        "System role": (strict, Example(3, "", [5], [], {"tools": None}, messages=system)),
        "No tools": (
            "{% if tools %}{{ raise_exception('No tools') }}{% endif %}" + tiny.TURNS,
            Example(3, "", [5], [], {"tools": [{"name": "search"}]}, messages=[asked]),
        ),
        "alternate": (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + tiny.TURNS,
            Example(3, "", [5], [], {"tools": None}, messages=[asked, asked]),
        ),
    }
    for words, (template, example) in odd.items():
        tiny.with_template(tiny.tokenizer(), template).save_pretrained(path)
        scorer = tiny.reward_functions([path], of=policy, **SHORT)
        scorer.check_rows(chats, chats)
        for rows in ((chats, [example]), ([*chats, example], [])):
            with pytest.raises(UserError) as caught:
                scorer.check_rows(*rows)
            tiny.check_sentence(caught.value, words, "row 4, by", f"the reward model {path!r}")
        with pytest.raises(UserError, match=words):
            scorer.check_conversations([example])
    # One that reads the policy's ids renders nothing
    policy.save_pretrained(path)
    tiny.reward_functions([path], of=policy, **SHORT).check_rows(chats, [odd["System role"][1]])
    # One that has no template, and other tokens, cannot read a conversation
    scorer = tiny.reward_functions([folders["lower"][0]], of=policy, **SHORT)
    with pytest.raises(UserError, match=f"row 1, .*{folders['lower'][0]}"):
        scorer.check_rows(chats)


@pytest.mark.parametrize(("family", "shards"), [("llama", False), ("gpt2", False), ("opt", True)])
@pytest.mark.usefixtures("process_group")
def test_a_config_that_says_no_number_of_labels_leaves_it_to_the_head(tmp_path, family, shards):
    """There transformers takes 2, which it does not write either."""
    shape: dict[str, Any] = {"vocab_size": 300, "is_plain": True, "pad_id": 1}
    if family == "opt":
        shape |= {"ffn_dim": 32, "word_embed_proj_dim": 16}
    lm = tiny.classifier(family, **shape)
    size = {"max_shard_size": "10KB"} if shards else {}

    def kind_of(num_labels: int, *absent: str) -> Any:
        lm.config.num_labels = num_labels
        lm.num_labels = num_labels
        lm.score = torch.nn.Linear(lm.score.in_features, num_labels, bias=False)
        folder = tmp_path / f"{num_labels} {len(absent)}"
        lm.save_pretrained(folder, **size)
        assert len([*folder.glob("*.safetensors")]) > 1 or not shards
        fields = json.loads((folder / "config.json").read_text())
        fields = {name: value for name, value in fields.items() if name not in absent}
        (folder / "config.json").write_text(json.dumps(fields))
        tiny.tokenizer().save_pretrained(folder)
        return tiny.reward_functions([str(folder)], **SHORT).reward_models

    names = ("num_labels", "id2label", "label2id")
    kind_of(1)
    (function,) = kind_of(1, *names).values()
    function.load(distributed.mesh())
    assert torch.equal(function.model.lm.score.weight, lm.score.weight)
    for absent in ((), names):
        with pytest.raises(UserError, match="gives 2 scores to a text, not one"):
            kind_of(2, *absent)


def test_an_encoder_is_no_model_of_any_kind(tmp_path: Path):
    """As a reward model it is refused before its tokenizer is read, which may have no eos."""
    BertConfig(num_labels=1).save_pretrained(tmp_path)
    config = tiny.train_config()
    with pytest.raises(UserError, match="is a bert model, "):
        models.RewardModelFunction(str(tmp_path), tiny.tokenizer(), config)
    for kind in ("policy", "trunk"):
        with pytest.raises(UserError, match="is a bert model, not a causal language model"):
            load.read_model_config(str(tmp_path), kind, tiny.tokenizer(), config)


# --- step rewards ---------------------------------------------------------------------------------


def score_lengths(functions: dict[str, Any], weights: list[float], lengths: list[int]) -> Any:
    ids = [[7] * length for length in lengths]
    texts = [f"c{i}" for i in range(len(lengths))]
    return RewardFunctions(functions, weights)(texts, texts, ids, {})


def test_the_reward_of_a_completion_is_the_sum_of_its_steps_and_0_without_one():
    scored = score_lengths({"s": constant([(1, 0.25), (3, 1.0)], [(0, -2)], [])}, [2.0], [4, 1, 3])
    assert scored.steps == [{1: 0.5, 3: 2.0}, {0: -4.0}, {}]
    assert scored.by_function["s"].tolist() == [1.25, -2.0, 0.0]
    assert scored.total.tolist() == [2.5, -4.0, 0.0]


def test_another_function_s_reward_is_a_step_that_ends_with_the_completion():
    functions = {
        "s": constant([(1, 0.25), (1, 0.75), (3, 1.0)], [(0, 3.0)], None),
        "a": constant(10, 20, 30),
        "watched": constant(5, 5, 5),
    }
    rewards = score_lengths(functions, [1.0, 0.5, 0.0], [4, 2, 3])
    assert rewards.steps == [{1: 1.0, 3: 6.0}, {0: 3.0, 1: 10.0}, {2: 15.0}]
    assert rewards.total.tolist() == [sum(steps.values()) for steps in rewards.steps]
    assert rewards.by_function["s"].tolist()[:2] == [2.0, 3.0]
    assert math.isnan(rewards.by_function["s"][2])


def test_a_function_that_is_only_watched_adds_no_step():
    """A step of reward 0 would move the mean of all steps."""
    functions = {"s": constant([(0, 1.0)]), "watched": constant(5), "also": constant([(1, 9.0)])}
    rewards = score_lengths(functions, [1.0, 0.0, 0.0], [3])
    assert rewards.steps == [{0: 1.0}]
    assert rewards.by_function["also"].tolist() == [9.0]
    functions = {"watched": constant([(1, 1.0)], [(0, 3.0)]), "a": constant(10, 20)}
    rewards = score_lengths(functions, [0.0, 1.0], [4, 2])
    assert rewards.steps == []
    assert rewards.total.tolist() == [10.0, 20.0]


@pytest.mark.parametrize(
    "steps",
    [
        [(3, 1.0)],
        [(-1, 1.0)],
        [(0.5, 1.0)],
        [(0, math.nan)],
        [(0, None)],
        [(0, "1")],
        [(0, 1.0, 2.0)],
        [0, 1.0],
        (0, 1.0),  # a step where a list of steps is due
    ],
)
def test_a_faulty_step_names_function_and_row(steps):
    sentence = "'bad' returned .* for row 1 of the batch .* its last token, of 0 to 2, and its rew"
    with pytest.raises(UserError, match=sentence):
        score_lengths({"good": constant(0, 0), "bad": constant([(0, 1.0)], steps)}, [1, 1], [3, 3])


def test_a_completion_that_did_not_stop_has_the_penalty_as_its_only_step():
    steps = [{0: 1.0, 2: 3.0}, {1: 5.0}]
    assert penalise_steps(steps, [4, 1], [False, True], -1.0) == [{4: -1.0}, {1: 5.0}]
    assert penalise_steps(steps, [4, 1], [False, True], None) == steps
