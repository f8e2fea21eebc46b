"""Measured completions as the records keep them: a policy of a seed is `METHOD/SETTING.json`.

Next to the values of the experiment a record has the log-probs of the completions under the model
that SFT started from, and shares of distinct words.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.evaluation.records import Generation, PromptRecord, read_completions
from common.record.jsonl import write_atomically
from common.record.run_folder import read_config
from common.text.overlap import ngrams
from experiments.runs.overoptimization.curves import Values
from experiments.runs.overoptimization.runs import read_measured
from experiments.runs.overoptimization.summary import Measured

FIRST_WORDS = 8  # of a completion, for the share of distinct ones: long texts repeat more
ARRAYS = ("gold", "proxy", "log_ratio", "lengths", "fluency")


@dataclass
class Recorded(Measured):
    """A measured policy as a record keeps it."""

    lengths: Values  # (P, K) tokens, the stop token included
    fluency: Values  # (P, K) log-prob per token under the model that SFT started from, nats
    prompts: list[str]  # P, or none
    texts: list[list[str]]  # P, K, or none
    distinct: dict[str, list[float]]  # of "first" and "best" texts: words and pairs, as shares

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Recorded":
        """The policy of a record's JSON."""
        values = {f.name: record[f.name] for f in fields(cls)}
        return cls(**values | {name: np.array(record[name], np.float64) for name in ARRAYS})


# ---- what is kept --------------------------------------------------------------------------------


def keep_values(folder: Path, new: Path, *, with_texts: bool = False) -> None:
    """Keep the values of all measured completions, and their texts on request."""
    for frontier in sorted(folder.glob("seed_*/frontier")):
        config = read_config(frontier)
        (seed,) = config["seeds"]
        points = json.loads((frontier / "results.json").read_text(encoding="utf-8"))["points"]
        policies = [(p["method"], p["setting"]) for p in points if p["method"] != "best_of_n"]
        for name, parts in (("pool", [("pool", 0)]), ("policies", policies)):
            evaluation, skipped = frontier / f"seed_{seed}" / name, int(name == "policies")
            prompts = read_completions(evaluation)
            measured = read_measured(evaluation, config["missing_eos_penalty"])
            of_parts = list(measured.items())[skipped:]  # the first of the policies is SFT
            for (method, setting), (system, policy) in zip(parts, of_parts, strict=True):
                drawn = [prompt.all_of(system) for prompt in prompts]
                record = vars(policy) | {
                    "lengths": [[each.num_tokens for each in row] for row in drawn],
                    "fluency": fluency(prompts, drawn, config["fluency_model"]),
                    "prompts": [prompt.prompt for prompt in prompts],
                    "texts": [[each.completion for each in row] for row in drawn],
                }
                text = json.dumps(kept(record, with_texts=with_texts), default=np.ndarray.tolist)
                of_seed = new / evaluation.parent.relative_to(folder) / "measured"
                write_atomically(of_seed / method / f"{setting:g}.json", [text + "\n"])


keep_texts = partial(keep_values, with_texts=True)


def kept(record: dict[str, Any], *, with_texts: bool) -> dict[str, Any]:
    """The JSON that a record keeps for a measured policy.

    `distinct` has the shares of distinct words and pairs of words: among the first completions of
    each prompt, and among those with its highest proxy reward.
    """
    best = np.argmax(record["proxy"], axis=1)
    chosen = {
        "first": [texts[0] for texts in record["texts"]],
        "best": [texts[k] for texts, k in zip(record["texts"], best, strict=True)],
    }
    shares = {name: [distinct(texts, n) for n in (1, 2)] for name, texts in chosen.items()}
    return record | {"distinct": shares} | ({} if with_texts else {"prompts": [], "texts": []})


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams in the first words of all texts, as a share (Li et al. 2016)."""
    counts = sum((ngrams(text.split()[:FIRST_WORDS], n) for text in texts), Counter())
    return len(counts) / counts.total()


@cache
def language_model(path: str) -> Any:
    """The frozen model of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


def fluency(
    prompts: Sequence[PromptRecord], drawn: Sequence[Sequence[Generation]], path: str
) -> list[list[float]]:
    """Log-probs per token of K completions of each prompt under a model, nats."""
    lm = language_model(path)

    def of(prompt_ids: list[int], ids: list[int]) -> float:
        with torch.no_grad():
            logits = lm(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
        return float(logps.mean())

    rows = zip(prompts, drawn, strict=True)
    return [[of(prompt.prompt_ids, each.completion_ids) for each in row] for prompt, row in rows]
