"""The benchmark's fixture: random GPT-2 models, a tokenizer and texts in the shape of TL;DR.

Everything follows from a seed: nothing is downloaded. Prompts are normally distributed in length
(mean 267 tokens, standard deviation 80, clipped to [32, 384]) and so are responses (35, 11.5, at
most 56 with the eos). A file of n rows takes the n middle quantiles of these distributions in
random order, so that a small file has their mean and spread too.

    python -m experiments.evidence.bench.fixture --model tiny --folder output/bench/tiny/fixture
"""

import argparse
import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from experiments.evidence.bench.rows import (
    EVERY_ROW,
    MAX_COMPLETION_LENGTH,
    MAX_PROMPT_LENGTH,
    SHAPES,
    Shape,
)

EOS, PAD = "<|endoftext|>", "<|pad|>"
EOS_ID, PAD_ID = 0, 1
EOS_PROBABILITY = 1 / 50  # per sampled token: 34 tokens on average, a third is cut at 56
PROMPT_LENGTHS = (NormalDist(267, 80), 32, MAX_PROMPT_LENGTH)
RESPONSE_LENGTHS = (NormalDist(35, 11.5), 2, MAX_COMPLETION_LENGTH)  # one word and the eos at least
NUM_CALIBRATION_PROMPTS = 8
VERSION = 2  # a fixture of another version on disk is built anew


def words_of(shape: Shape) -> list[str]:
    """A word for each token but eos and pad, with the space before it."""
    return [f" w{number}" for number in range(2, shape.vocabulary)]


def make_tokenizer(shape: Shape) -> Any:
    """A tokenizer of exactly `shape.vocabulary` tokens: eos 0, pad 1, and a token for each word.

    A text is split before every space, so that a prompt and a completion tokenised apart are the
    tokens of both joined.
    """
    ids = {token: number for number, token in enumerate([EOS, PAD, *words_of(shape)])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS, PAD])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=shape.num_positions,
        clean_up_tokenization_spaces=False,
    )


def stratified_lengths(
    distribution: NormalDist, low: int, high: int, num: int, rng: random.Random
) -> list[int]:
    """The middle of each of `num` equally likely parts of a distribution, clipped, shuffled."""
    quantiles = [distribution.inv_cdf((i + 0.5) / num) for i in range(num)]
    lengths = [min(high, max(low, round(quantile))) for quantile in quantiles]
    rng.shuffle(lengths)
    return lengths


def make_rows(kind: str, num_rows: int, words: Sequence[str], seed: int) -> list[dict[str, str]]:
    """Rows of text; a completion has one word less than tokens, since the trainers append the eos.

    Args:
        kind: `sft` (prompt, completion), `preference` (prompt, chosen, rejected) or `prompts`.
        num_rows: How many.
        words: Of one token each.
        seed: Another one gives other words, and the same lengths in another order.
    """
    rng = random.Random(f"{seed} {kind} {num_rows}")
    columns = {"sft": ["completion"], "preference": ["chosen", "rejected"], "prompts": []}[kind]
    lengths = {"prompt": stratified_lengths(*PROMPT_LENGTHS, num_rows, rng)}
    for column in columns:
        with_eos = stratified_lengths(*RESPONSE_LENGTHS, num_rows, rng)
        lengths[column] = [length - 1 for length in with_eos]
    return [
        {column: "".join(rng.choices(words, k=lengths[column][i])) for column in lengths}
        for i in range(num_rows)
    ]


def model_config(shape: Shape) -> Any:
    """A GPT-2 without dropout."""
    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.num_positions,
        n_embd=shape.width,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def make_policy(shape: Shape, prompts: Sequence[Sequence[int]], seed: int) -> Any:
    """A random GPT-2 whose samples stop with a probability of about 1/50 per token."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(model_config(shape)).eval()
    tilt_towards_eos(model, prompts)
    return model


def tilt_towards_eos(model: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Make eos as likely as `EOS_PROBABILITY` on average, through the bias of the last LayerNorm.

    The head is the embedding matrix W, so a bias of c w / |w|^2 there, with w the row of eos, adds
    exactly c to the logit of eos at every position, and c (w_j . w) / |w|^2 to that of token j: a
    fraction of about c / sqrt(width), since rows of a random matrix are nearly orthogonal. c is
    found by correcting the log-odds of eos a few times.
    """
    row = model.transformer.wte.weight[EOS_ID].detach()  # (D,)
    direction = row / row.square().sum()
    with torch.no_grad():
        per_shift = model.transformer.wte.weight @ direction  # (V,), 1 for eos
        logits = completion_logits(model, prompts)  # (tokens, V)
        shift = 0.0
        for _ in range(5):
            mean = (logits + shift * per_shift).softmax(-1)[:, EOS_ID].mean()
            shift += math.log(EOS_PROBABILITY / (1 - EOS_PROBABILITY)) - mean.logit().item()
        shift = round(shift, 2)  # the same on machines that round otherwise
        model.transformer.ln_f.bias.copy_(shift * direction)


def completion_logits(model: Any, prompts: Sequence[Sequence[int]]) -> Any:
    """Logits (tokens, V) of the last `MAX_COMPLETION_LENGTH` positions of each prompt."""
    kept = {"logits_to_keep": MAX_COMPLETION_LENGTH, "use_cache": False}
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids]), **kept).logits[0] for ids in prompts])


def make_reward_model(shape: Shape, seed: int) -> Any:
    """A random GPT-2 with a head of one label, of variance 1 / (width + 1)."""
    torch.manual_seed(seed)
    config = model_config(shape)
    config.num_labels = 1
    model = GPT2ForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight, std=(shape.width + 1) ** -0.5)
    return model


def build(name: str, folder: Path, seed: int = 0) -> None:
    """Write models, tokenizer, texts and `fixture.json`, unless they are there already.

    `policy` and `reward_model` are folders as `save_pretrained` writes them; a text file of n rows
    is `data/<kind>-n.jsonl`.
    """
    shape = SHAPES[name]
    record = {"model": name, "shape": asdict(shape), "seed": seed, "version": VERSION}
    stamp = folder / "fixture.json"
    if stamp.exists() and json.loads(stamp.read_text())["made_from"] == record:
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    tokenizer, words = make_tokenizer(shape), words_of(shape)
    lengths = {}
    for row in EVERY_ROW.values():
        texts = make_rows(row.kind, row.num_rows, words, seed)
        lengths[row.data_name] = {  # of all but prompts with the eos
            column: [text[column].count(" ") + (column != "prompt") for text in texts]
            for column in texts[0]
        }
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        (folder / "data" / f"{row.data_name}.jsonl").write_text(lines)

    texts = make_rows("prompts", NUM_CALIBRATION_PROMPTS, words, seed + 1)
    prompts = [tokenizer(text["prompt"])["input_ids"] for text in texts]
    policy = make_policy(shape, prompts, seed)
    probability = completion_logits(policy, prompts).softmax(-1)[:, EOS_ID].mean().item()
    assert abs(probability / EOS_PROBABILITY - 1) < 0.1, probability
    for name, model in (("policy", policy), ("reward_model", make_reward_model(shape, seed + 2))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    content = {"made_from": record, "eos_probability": probability, "lengths": lengths}
    stamp.write_text(json.dumps(content) + "\n")


def main() -> None:
    """Build a fixture from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    build(arguments.model, arguments.folder)


if __name__ == "__main__":
    main()
