"""Claim: an encoder with one label is a reward function whose rewards are transformers' logits.

A tiny BERT with random weights: each text alone through transformers, without padding, against the
function on batches of any size, on one rank and on two that have unequal numbers of texts.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import launch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedTokenizerFast,
)

from common import distributed
from common.data import Example
from common.errors import UserError
from common.model import load
from common.rewards.models import EncoderFunction, model_function
from common.rewards.score import RewardFunctions

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept", "all", "day"]
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
PROMPTS = ["the cat", "the cat", "a mat and then it slept on the mat", "it"]
COMPLETIONS = [" sat", " slept all day on the mat", " and then", ""]


def save_encoder(folder: Path, num_labels: int = 1) -> Path:
    """Random weights, wide, and a tokenizer of a few words without an eos."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=20,
        initializer_range=0.3,
        num_labels=num_labels,
    )
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def loaded(folder: str, **limits: int) -> EncoderFunction:
    config = tiny.train_config(max_prompt_length=16, max_completion_length=8, **limits)
    function = model_function(folder, tiny.tokenizer(), config)
    assert isinstance(function, EncoderFunction)
    function.load(distributed.mesh())
    return function


def measure(path: str) -> list[float]:
    """This rank's rewards: of one text on the first, of three on the second."""
    function = loaded(path, micro_batch_size=1)
    rank = distributed.rank()
    mine = slice(0, 1) if rank == 0 else slice(1, None)
    return function(PROMPTS[mine], COMPLETIONS[mine])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """Each text alone, by transformers."""
    lm = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        with torch.no_grad():
            inputs = tokenizer(prompt + completion, return_tensors="pt")
            result.append(float(lm(**inputs).logits[0, 0]))
    return result


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("limits", [{}, {"micro_batch_size": 1}, {"micro_batch_tokens": 20}])
def test_rewards_are_the_logits_of_transformers(folder: Path, expected: list[float], limits: Any):
    assert torch.tensor(expected).std() > 0.05
    found = loaded(str(folder), **limits)(PROMPTS, COMPLETIONS)
    assert found == pytest.approx(expected, abs=1e-5)


def test_ranks_with_unequal_numbers_of_texts_give_the_same(
    folder: Path, expected: list[float], tmp_path: Path
):
    first, second = launch(measure, 2, tmp_path, path=str(folder))
    assert first + second == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("process_group")
def test_equal_texts_have_equal_rewards(folder: Path):
    function = loaded(str(folder), micro_batch_size=2)
    rewards = function([PROMPTS[0]] * 3 + [PROMPTS[2]], [COMPLETIONS[1]] * 3 + [COMPLETIONS[2]])
    assert len(set(rewards[:3])) == 1


@pytest.mark.usefixtures("process_group")
def test_a_text_that_is_too_long_is_refused(folder: Path):
    with pytest.raises(
        UserError, match="is 23 tokens of the encoder .*, which has 20 positions; lower"
    ):
        loaded(str(folder))(["the cat " * 10], ["sat"])


def scorer_of(folder: Path, **fields: Any) -> RewardFunctions:
    return RewardFunctions.find([str(folder)], [], tiny.tokenizer(), tiny.train_config(**fields))


def test_rows_of_messages_are_refused(folder: Path):
    asked = [{"role": "user", "content": "2 + 2?"}]
    with pytest.raises(UserError, match="is an encoder, which reads texts, and the rows are mess"):
        scorer_of(folder).check_rows([Example(0, "2 + 2?", [5], [], {}, messages=asked)])


def test_two_labels_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="gives 2 scores to a text; a reward model gives one"):
        scorer_of(save_encoder(tmp_path, num_labels=2))


@pytest.mark.parametrize("kind", ["policy", "trunk"])
def test_an_encoder_is_no_policy_and_no_trunk(folder: Path, kind: Any):
    config = tiny.train_config(max_prompt_length=8, max_completion_length=8)
    with pytest.raises(UserError, match="is a bert model, not a causal language model"):
        load.read_model_config(str(folder), kind, tiny.tokenizer(), config)
