"""Completions in records: the scores of all, the texts of one seed."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.record.jsonl import json_line, read_jsonl, write_atomically
from common.text.overlap import ngrams

REWARDS = "rewards.jsonl"
NUM_SAMPLES = 3
FIRST_WORDS = 8  # of a completion, for the share of distinct ones: long texts repeat more


def keep_completions(folder: Path, new: Path) -> None:
    """Keep some texts of the first seed, and of all completions their rewards and stops."""
    files = sorted(folder.glob("seed_*/evaluation/completions.jsonl"))
    texts = read_jsonl(files[0])[:NUM_SAMPLES]
    write_atomically(new / "samples.jsonl", map(json_line, texts))
    for file in files:
        lines = [
            {
                name: [
                    {key: completion[key] for key in ("rewards", "stopped")}
                    for completion in (first, *line["further"].get(name, ()))
                ]
                for name, first in line["systems"].items()
            }
            for line in read_jsonl(file)
        ]
        rewards = new / file.relative_to(folder).with_name(REWARDS)
        write_atomically(rewards, map(json_line, lines))


def keep_measured(folder: Path, new: Path, *, with_texts: bool) -> None:
    """Keep the values of all measured completions, and their texts on request."""
    for file in sorted(folder.glob("seed_*/frontier/seed_*/measured/*.json")):
        record = kept(json.loads(file.read_text()), with_texts=with_texts)
        write_atomically(new / file.relative_to(folder), [json.dumps(record) + "\n"])


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
