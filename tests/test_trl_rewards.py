"""Claim: a reward function written for TRL's GRPO is called with the same arguments here.

TRL's own lines call a function on a stand-in for its trainer, a run's scorer calls the same one;
what it was given is compared, for rows of text and for conversations, and what comes out of both.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from transformers import TrainerState

from common.data import Example
from common.generation import Rollouts
from common.reward_scoring import RewardScorer
from common.rows import OWN_COLUMNS

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed (Python 3.11 or later)")

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

TEXTS = ["<think>two</think>4", "4", "<think>a</think>5", "<think>no end"]
ASKED = [[{"role": "user", "content": text}] for text in ("2 + 2?", "2 + 3?")]
COLUMNS = {"answer": ["4", "5"], "level": [1, None]}
FILE = """
seen = []

def judge(prompts, completions, completion_ids, answer, **kwargs):
    seen.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids,
                 "answer": answer, **kwargs})
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if a == "5" and t[-1] == "d" else float(a in t) for a, t in zip(answer, texts)]

def always(completions, **kwargs):
    return [0.25] * len(completions)

def thinks(completions, **kwargs):
    from trl.rewards import think_format_reward
    return think_format_reward(completions, **kwargs)
"""


def rewards_by_trl(functions: list[Any], prompts: list[Any], ids: list[list[int]]) -> torch.Tensor:
    """(B, functions), nan for None, by `GRPOTrainer._calculate_rewards`."""
    is_text = isinstance(prompts[0], str)
    completions = [t if is_text else [{"role": "assistant", "content": t}] for t in TEXTS]
    inputs = [
        {"prompt": prompts[i // 2], **{name: values[i // 2] for name, values in COLUMNS.items()}}
        for i in range(4)
    ]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=TrainerState(global_step=3, max_steps=9),
        environments=None,
        reward_funcs=functions,
        reward_func_names=[function.__name__ for function in functions],
        reward_processing_classes=[None] * len(functions),
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    arguments = (inputs, [row["prompt"] for row in inputs], completions, ids)
    return GRPOTrainer._calculate_rewards(trainer, *arguments)


@pytest.mark.parametrize("is_text", [True, False])
def test_a_function_is_given_what_trl_gives_it(tmp_path: Path, is_text: bool):
    (tmp_path / "judge.py").write_text(FILE)
    tokenizer = tiny.tokenizer()
    names = ["judge", "always"] if is_text else ["judge", "always", "thinks"]
    paths = [f"{tmp_path / 'judge.py'}:{name}" for name in names]
    config = tiny.train_config(max_prompt_length=40, max_completion_length=40)
    scorer = RewardScorer(paths, [], tokenizer, config)

    ids = [row + [0] for row in tokenizer(TEXTS, add_special_tokens=False)["input_ids"]]
    prompts = [messages[0]["content"] if is_text else messages for messages in ASKED]
    examples = [
        Example(
            row,
            "a rendered prompt" if not is_text else prompts[row],
            [9],
            [],
            {column: values[row] for column, values in COLUMNS.items()},
            messages=[] if is_text else prompts[row],
        )
        for row in range(2)
    ]
    rollouts = Rollouts(ids, [[0.0] * len(row) for row in ids], [True] * 4)
    scorer.check_rows(examples)
    found = scorer.score(examples, rollouts, step=3, total_steps=9)
    functions = list(scorer.functions.functions.values())
    theirs = rewards_by_trl(functions, prompts, ids)
    ours = torch.stack([values.flatten() for values in found.by_function.values()], 1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours[:, 0].tolist()[:3] == [1, 1, 1]
    assert ours[3, 0].isnan()
    if not is_text:  # TRL's own `think_format_reward` takes conversations only
        assert ours[:, 2].tolist() == [1, 0, 1, 0]

    seen = functions[0].__globals__["seen"]
    here, there = seen[-2:]
    here = {key: value for key, value in here.items() if key not in OWN_COLUMNS}
    assert here.keys() == there.keys()
    for key in here.keys() - {"trainer_state", "log_extra", "log_metric"}:
        assert here[key] == there[key], key
    states = here["trainer_state"], there["trainer_state"]
    assert [(s.global_step, s.max_steps) for s in states] == [(3, 9)] * 2
    here["log_extra"]("column", ["value"] * 4)
    here["log_metric"]("metric", 0.5)
    assert found.notes.columns == {"column": ["value"] * 4}
    assert found.notes.metrics == {"metric": [0.5]}
