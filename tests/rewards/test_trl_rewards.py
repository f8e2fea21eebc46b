"""Claim: reward functions and reward models of TRL are read here as TRL reads them, and back.

TRL's own lines call a function on a stand-in for its trainer, a run's scorer calls the same one;
what it was given is compared, for rows of text and for conversations, and what comes out of both.
A reward model of conversations that TRL trained has TRL's scores here, ours has ours in TRL: as a
judge of pairs and of rollouts. About `common.rewards.score` and `common.rewards.models`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerState

import train_reward
from common import distributed
from common.evaluation import measure
from common.record.jsonl import read_jsonl
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts
from common.text import synthetic
from common.text.example import Example
from common.text.reading import load_examples

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed (Python 3.11 or later)")

from datasets import Dataset  # noqa: E402
from trl import RewardConfig, RewardTrainer  # noqa: E402
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


def rewards_by_trl(
    functions: list[Any],
    inputs: list[dict[str, Any]],
    texts: list[str],
    ids: list[list[int]],
    tokenizer: Any = None,
) -> torch.Tensor:
    """(B, functions), nan for None, by `GRPOTrainer._calculate_rewards` of B rows with texts."""
    prompts = [row["prompt"] for row in inputs]
    is_text = isinstance(prompts[0], str)
    completions = [t if is_text else [{"role": "assistant", "content": t}] for t in texts]
    trainer = GRPOTrainer.__new__(GRPOTrainer)  # without a model, a data set and a run
    vars(trainer).update(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[], device="cpu"),
        is_deepspeed_enabled=False,
        chat_template_kwargs={},
        state=TrainerState(global_step=3, max_steps=9),
        environments=None,
        reward_funcs=functions,
        reward_func_names=["function"] * len(functions),
        reward_processing_classes=[tokenizer] * len(functions),
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    return trainer._calculate_rewards(inputs, prompts, completions, ids)


@pytest.mark.parametrize("is_text", [True, False])
def test_a_function_is_given_what_trl_gives_it(tmp_path: Path, is_text: bool):
    (tmp_path / "judge.py").write_text(FILE)
    tokenizer = tiny.with_template(tiny.tokenizer(), tiny.CHATML)
    names = ["judge", "always"] if is_text else ["judge", "always", "thinks"]
    paths = [f"{tmp_path / 'judge.py'}:{name}" for name in names]
    lengths = {"max_prompt_length": 40, "max_completion_length": 40}
    scorer = tiny.reward_functions(paths, of=tokenizer, **lengths)

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
    rollouts = Rollouts.of(ids, [[0.0] * len(row) for row in ids], [True] * 4)
    scorer.check_rows(examples)
    scored = scorer.score(examples, rollouts, step=3, total_steps=9)
    functions = list(scorer.functions.values())
    inputs = [
        {"prompt": prompts[i // 2], **{name: values[i // 2] for name, values in COLUMNS.items()}}
        for i in range(4)
    ]
    theirs = rewards_by_trl(functions, inputs, TEXTS, ids)
    ours = torch.stack([values.flatten() for values in scored.by_function.values()], 1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours[:, 0].tolist()[:3] == [1, 1, 1]
    assert ours[3, 0].isnan()
    if not is_text:  # TRL's own `think_format_reward` takes conversations only
        assert ours[:, 2].tolist() == [1, 0, 1, 0]

    here, there = functions[0].__globals__["seen"][-2:]
    here = {key: value for key, value in here.items() if key not in ("prompt_ids", "has_stop")}
    assert here.keys() == there.keys()
    for key in here.keys() - {"trainer_state", "log_extra", "log_metric"}:
        assert here[key] == there[key], key
    states = here["trainer_state"], there["trainer_state"]
    assert [(s.global_step, s.max_steps) for s in states] == [(3, 9)] * 2
    here["log_extra"]("column", ["value"] * 4)
    here["log_metric"]("metric", 0.5)
    assert scored.log.columns == {"column": ["value"] * 4}
    assert scored.log.metrics == {"metric": [0.5]}


ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
# Pairs of messages, whose answers begin with no space: it would merge with the line break.
ROWS = [
    {name: [{"role": role, "content": row[name].strip()}] for name, role in ROLES.items()}
    for row in synthetic.make_rows("preference", "train", 12)
]


@pytest.fixture(scope="module", params=["<|im_end|>", "<|endoftext|>"])
def untrained(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose template is ChatML, with and without the eos at the end of its turns."""
    tokenizer = tiny.chatml_tokenizer(request.param)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    lm = tiny.classifier("llama", is_plain=True, **sizes)
    return Path(tiny.save(lm, tmp_path_factory.mktemp("chatml") / "model", tokenizer))


def reward_trainer(folder: Path, output_dir: Path) -> RewardTrainer:
    args = RewardConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    return RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder),
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


def pair_scores_by_trl(trainer: RewardTrainer) -> torch.Tensor:
    """(N, 2), chosen and rejected, of what TRL's collator makes of the pairs."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        return trainer.model.eval()(**batch).logits.view(2, -1).T


def judge_of(folder: Path, tokenizer: Any) -> tuple[RewardFunctions, Any]:
    """A loaded scorer of one reward model for a policy with that tokenizer, and a config."""
    config = tiny.train_config(max_prompt_length=300, max_completion_length=120)
    vocabulary = tiny.vocabulary([tokenizer.eos_token_id], tokenizer)
    scorer = RewardFunctions.find([str(folder)], [], vocabulary, config)
    distributed.start()
    scorer.load(distributed.mesh())
    return scorer, config


def pair_scores_here(folder: Path) -> torch.Tensor:
    """(N, 2), as `evaluate.py` has them."""
    scorer, config = judge_of(folder, AutoTokenizer.from_pretrained(folder))
    file = tiny.write_rows(folder.parent / "train.jsonl", ROWS)
    (function,) = scorer.reward_models.values()
    pairs = load_examples(config, str(file), "train", "preference", scorer.vocabulary)
    return measure.reward_scores(function, pairs, scorer.vocabulary, config).float()


def test_a_reward_model_that_trl_trained_judges_pairs_as_in_trl(untrained: Path, tmp_path: Path):
    trainer = reward_trainer(untrained, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    expected, limit = pair_scores_by_trl(trainer), tiny.rounding(trainer.model)
    torch.testing.assert_close(pair_scores_here(tmp_path / "trained"), expected, rtol=0, atol=limit)


def test_a_reward_model_trained_here_judges_pairs_as_in_trl(untrained: Path, tmp_path: Path):
    """The scores that its run wrote, of what was in memory, and those of its folder in TRL."""
    for split in ("train", "validation"):
        tiny.write_rows(tmp_path / "pairs" / f"{split}.jsonl", ROWS)
    train_reward.main(
        train_reward.RewardConfig(
            output_dir=str(tmp_path / "run"),
            model_name_or_path=str(untrained),
            dataset_name=str(tmp_path / "pairs"),
            max_prompt_length=300,
            max_completion_length=120,
            num_sample_prompts=len(ROWS),
            batch_size=4,
            max_steps=2,
            learning_rate=1e-3,
        )
    )
    trainer = reward_trainer(tmp_path / "run" / "model", tmp_path)
    expected = pair_scores_by_trl(trainer)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    scores = [[row["chosen score"], row["rejected score"]] for row in samples]
    limit = tiny.rounding(trainer.model)
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("ending", ["stops", "breaks off"])
@pytest.mark.parametrize("vocab_size", [1024, 300])
def test_a_reward_model_judges_rollouts_as_in_trl(untrained: Path, ending: str, vocab_size: int):
    """Also one that broke off, whose turn TRL closes, and one without a word."""
    of_judge = AutoTokenizer.from_pretrained(untrained)
    scorer, _ = judge_of(untrained, tiny.chatml_tokenizer(of_judge.eos_token, vocab_size))
    (function,) = scorer.reward_models.values()
    assert function.same_ids is (vocab_size == 1024)
    tokenizer, texts = scorer.vocabulary.tokenizer, [row["chosen"][0]["content"] for row in ROWS]
    texts[:2] = ["", " "]
    end = tokenizer("<|im_end|>\n" if tokenizer.eos_token == "<|endoftext|>" else "")["input_ids"]
    end = [*end, tokenizer.eos_token_id] if ending == "stops" else []
    ids = [row + end for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    prompts = [row["prompt"] for row in ROWS]
    turn = {"tokenize": False, "add_generation_prompt": True}
    asked = tokenizer([tokenizer.apply_chat_template(p, **turn) for p in prompts])["input_ids"]
    examples = [Example(i, "", asked[i], [], {}, messages=prompts[i]) for i in range(len(ROWS))]
    has_stop = [ending == "stops"] * len(ROWS)
    rewards = scorer.score(examples, Rollouts.of(ids, [], has_stop)).total.flatten()

    lm = AutoModelForSequenceClassification.from_pretrained(untrained)
    lm.config.pad_token_id = of_judge.pad_token_id
    expected = rewards_by_trl([lm], [{"prompt": p} for p in prompts], texts, ids, of_judge)
    torch.testing.assert_close(rewards, expected[:, 0], rtol=0, atol=1e-5)
