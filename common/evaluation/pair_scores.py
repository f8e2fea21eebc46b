"""What every system scores on one fixed set of pairs, in memory and as `scores.jsonl`.

One line is one pair: dataset, split, row, prompt_sha256 (equal for equal prompts), source,
confidence, margin and label_probability (null where the row has none), chosen_tokens,
rejected_tokens, and two mappings from a system's name to its [chosen, rejected] scores: `rewards`,
whose difference is meant as the log odds of the label, and `scores`, which only put in order. Every
number of `comparison` in `results.json` follows from that file alone (`comparison.compare`).
"""

import hashlib
import itertools
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common import noise
from common.data import Example
from common.errors import UserError, gist
from common.record.jsonl import json_line, read_jsonl, write_atomically
from common.text import overlap
from common.text.truncate import split_prompt

Scores = NDArray[np.float64]  # (N, 2), chosen and rejected
IDENTITY = ("dataset", "split", "row")
RATIOS = ("implicit_reward", "log_ratio", "log_ratio_per_token")
LARGEST = float(np.finfo(np.float64).max)  # a whole number in JSON may be larger
POLICY_SCORES = (*RATIOS, "logp", "logp_per_token")
BASELINES = (
    "longer wins",
    "shorter wins",
    "ROUGE-L wins",
    "random guess",
)  # as no folder is called


@dataclass
class PairScores:
    """N pairs with the scores of every system, whose names are told apart over both mappings.

    Attributes:
        pairs: What a line says of each pair, but for the scores.
        rewards: (N, 2) by system: the difference is meant as the log odds of the label.
        scores: (N, 2) by system: the order is what counts.
    """

    pairs: list[dict[str, Any]]
    rewards: dict[str, Scores] = field(default_factory=dict)
    scores: dict[str, Scores] = field(default_factory=dict)

    @property
    def systems(self) -> dict[str, Scores]:
        """All scores, rewards first."""
        return self.rewards | self.scores

    def add_policy(self, name: str, read: Mapping[str, Scores], beta: float | None) -> None:
        """Add a policy's scores as `policy_scores` gives them; beta tells the scale of one."""
        for reading, scores in read.items():
            is_reward = reading == "implicit_reward" and beta is not None
            (self.rewards if is_reward else self.scores)[f"{name} {reading}"] = scores


def describe_pairs(
    examples: Sequence[Example], dataset: str, split: str, margin_column: str = ""
) -> list[dict[str, Any]]:
    """What `scores.jsonl` says of each pair.

    Raises:
        UserError: a row has no number in its `margin_column`, or no probability in its column
            `label_probability`; null is one that is not known. Or no row has the column.
    """
    if margin_column and not any(margin_column in example.columns for example in examples):
        raise UserError(f"--margin_column is {margin_column!r}, a column that no pair has.")
    return [
        {
            "dataset": dataset,
            "split": split,
            "row": example.row,
            "prompt_sha256": hashlib.sha256(example.prompt.encode()).hexdigest(),
            "source": example.source,
            "confidence": confidence(example.columns),
            "margin": number_between(example, margin_column, -LARGEST, LARGEST),
            "label_probability": number_between(example, "label_probability", 0, 1),
            "chosen_tokens": len(example.completions[0]),
            "rejected_tokens": len(example.completions[1]),
        }
        for example in examples
    ]


def confidence(columns: Mapping[str, Any]) -> float | None:
    """The annotator's confidence: a column of that name, or in `extra`, as in OpenAI's rows."""
    extra = columns.get("extra")
    inside = extra.get("confidence") if isinstance(extra, Mapping) else None
    found = [columns.get("confidence"), columns.get("extra.confidence"), inside]
    return next((value for value in map(number, found) if value is not None), None)


def number(value: Any) -> float | None:
    """A number as it is, None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None


def number_between(example: Example, column: str, low: float, high: float) -> float | None:
    """A row's number in a column, None where it has none; a UserError for anything else there."""
    value = example.columns.get(column)
    found = number(value)
    if value is not None and (found is None or not low <= found <= high):
        raise UserError(
            f"row {example.row + 1} of the pairs has {reprlib.repr(value)} in its column "
            f"{column!r}; it must be a number from {low:g} to {high:g}, or null if not known."
        )
    return found


def policy_scores(
    names: Sequence[str],
    logps: Scores,
    ref_logps: Scores | None,
    lengths: NDArray[np.int64],
    beta: float | None,
) -> dict[str, Scores]:
    """One policy read in several ways, from one forward pass.

    implicit_reward: beta log(pi / ref) (Rafailov et al. 2023, eq. 5), without a beta as log_ratio;
    log_ratio: log(pi / ref); logp: log pi; `_per_token`: the same divided by the completion's
    length (the reward of SimPO, Meng et al. 2024, eq. 4, is logp_per_token times beta).

    Args:
        names: Some of `POLICY_SCORES`.
        logps: (N, 2) log-probabilities of the completions, nats.
        ref_logps: The reference's; None for the reference itself, whose ratios are 0 everywhere:
            it has logp in the place of them.
        lengths: (N, 2) tokens of the completions.
        beta: Of the implicit reward, None where it is not known.
    """
    known = {"logp": logps, "logp_per_token": logps / lengths}
    if ref_logps is None:
        kept = [name for name in names if name not in RATIOS]
        names = kept if kept == list(names) else ["logp", *kept]
    else:
        ratios = logps - ref_logps
        known |= {"log_ratio": ratios, "log_ratio_per_token": ratios / lengths}
        known["implicit_reward"] = (beta or 1.0) * ratios
    return {name: known[name] for name in dict.fromkeys(names)}


def baselines(
    examples: Sequence[Example], texts: Sequence[Sequence[str]], seed: int
) -> dict[str, Scores]:
    """Scores (N, 2) that need no model.

    Tokens of the completion, and minus them; ROUGE-L F1 of the completion against the post (the
    prompt without TL;DR's header and cue); random numbers, a function of seed and row.

    Args:
        examples: N pairs.
        texts: Their two completions.
        seed: Of the random numbers.
    """
    lengths = token_counts(examples).astype(np.float64)
    posts = [split_prompt(example.prompt)[1] for example in examples]
    overlaps = [
        [overlap.rouge_l(text, post).f1 for text in pair]
        for post, pair in zip(posts, texts, strict=True)
    ]
    rows = torch.tensor([[example.row] for example in examples])  # (N, 1)
    seed = noise.derive_seed(seed, "random baseline")
    guess = noise.uniform(seed, rows, torch.arange(2)).numpy()
    scores = (lengths, -lengths, np.array(overlaps), guess)
    return dict(zip(BASELINES, scores, strict=True))


def token_counts(examples: Sequence[Example]) -> NDArray[np.int64]:
    """(N, 2) tokens of the completions, stop token included."""
    return np.array([[len(ids) for ids in example.completions] for example in examples])


def write_scores(path: Path, table: PairScores) -> None:
    """Write `scores.jsonl`, atomically; numbers are exact."""

    def line(i: int, pair: dict[str, Any]) -> str:
        rewards = {name: scores[i].tolist() for name, scores in table.rewards.items()}
        scores = {name: scores[i].tolist() for name, scores in table.scores.items()}
        return json_line({**pair, "rewards": rewards, "scores": scores})

    write_atomically(path, itertools.starmap(line, enumerate(table.pairs)))


def read_scores(path: Path) -> PairScores:
    """What `write_scores` wrote.

    Raises:
        UserError: the file is not there, is empty or holds other lines.
    """
    try:
        lines = read_jsonl(path)
    except RuntimeError as error:
        raise UserError(f"{gist(error)}; it must be the scores.jsonl of an evaluation.") from None
    if not lines:
        raise UserError(f"{path} holds no scores; name the scores.jsonl of an evaluation.")
    try:
        parts = [
            {name: stacked(lines, kind, name) for name in lines[0][kind]}
            for kind in ("rewards", "scores")
        ]
        pairs = [
            {name: line[name] for name in lines[0] if name not in ("rewards", "scores")}
            for line in lines
        ]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} is no scores.jsonl of an evaluation: a line lacks a system's two scores."
        ) from None
    return PairScores(pairs, *parts)


def stacked(lines: Sequence[Mapping[str, Any]], kind: str, name: str) -> Scores:
    """(N, 2) scores of one system; a ValueError if a line has others than two."""
    scores = np.array([line[kind][name] for line in lines], dtype=np.float64)
    if scores.shape != (len(lines), 2):
        raise ValueError(f"shape {scores.shape}")
    return scores


def read_others(table: PairScores, files: Sequence[str]) -> dict[str, PairScores]:
    """What other evaluations scored, by file.

    Raises:
        UserError: a file holds no scores, or those of other pairs.
    """
    others = {file: read_scores(Path(file)) for file in files}
    for file, other in others.items():
        refuse_other_pairs(table, other, file)
    return others


def add_others(table: PairScores, others: Mapping[str, PairScores]) -> None:
    """Add the systems of other evaluations, without the baselines.

    One whose name is taken gets its evaluation's folder behind it, or the file.
    """
    for file, other in others.items():
        for kind, systems in ((table.rewards, other.rewards), (table.scores, other.scores)):
            for name, scores in systems.items():
                if name in BASELINES:
                    continue
                forms = (name, f"{name} ({Path(file).parent.name})", f"{name} ({file})")
                kind[next(form for form in forms if form not in table.systems)] = scores


def refuse_other_pairs(table: PairScores, other: PairScores, file: str) -> None:
    """Raise a UserError unless both tables are of the same rows in the same order."""
    mine, theirs = ([[p.get(k) for k in IDENTITY] for p in t.pairs] for t in (table, other))
    if mine != theirs:
        shared = len({json.dumps(key) for key in mine} & {json.dumps(key) for key in theirs})
        raise UserError(
            f"--scores_from {file} has {len(theirs)} pairs, of which {shared} are among the "
            f"{len(mine)} of this run; it must have the same pairs in the same order."
        )
