"""What every system scores on one fixed set of pairs: computed, in memory, as `scores.jsonl`.

One line is one pair: dataset, split, row, prompt_sha256 (equal for equal prompts), source,
confidence, margin and label_probability (null where the row has none), chosen_tokens,
rejected_tokens, and two mappings from a system's name to its [chosen, rejected] scores: `rewards`,
whose difference is meant as the log odds of the label, and `scores`, which only put in order. Every
number of `comparison` in `results.json` follows from that file alone (`comparison.compare`).
"""

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError, gist
from common.evaluation.intervals import Floats, Numbers, finite_vector

if TYPE_CHECKING:
    from common.config import CommonConfig
    from common.data import Example
    from common.evaluation.score import ImplicitReward
    from common.rewards.models import RewardModelFunction

RATIOS = ("implicit_reward", "log_ratio", "log_ratio_per_token")
POLICY_SCORES = (*RATIOS, "logp", "logp_per_token")
BASELINES = ("longer wins", "shorter wins", "ROUGE-L wins", "random guess")
LARGEST = float(np.finfo(np.float64).max)  # a whole number in JSON may be larger


@dataclass
class PairScores:
    """N pairs with the scores (N, 2), chosen first, of every system: a name is in one mapping."""

    pairs: list[dict[str, Any]]  # what a line says of each, but for the scores
    rewards: dict[str, Floats] = field(default_factory=dict)  # differences are log odds
    scores: dict[str, Floats] = field(default_factory=dict)  # the order is what counts

    @property
    def systems(self) -> dict[str, Floats]:
        """All scores, rewards first."""
        return self.rewards | self.scores

    def add(self, name: str, scores: Floats, *, are_log_odds: bool) -> None:
        """Add a system; a RuntimeError if a score is not finite."""
        finite_vector(scores.ravel())
        (self.rewards if are_log_odds else self.scores)[name] = scores

    def add_policy(self, name: str, read: Mapping[str, Floats], *, has_scale: bool) -> None:
        """Add a policy's scores by `policy_scores`; whether implicit rewards have their scale."""
        for reading, scores in read.items():
            are_log_odds = reading == "implicit_reward" and has_scale
            self.add(f"{name} {reading}", scores, are_log_odds=are_log_odds)


def describe_pairs(
    examples: Sequence["Example"], dataset: str, split: str, margin_column: str = ""
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
    found: list[Any] = [columns.get("confidence"), columns.get("extra.confidence"), inside]
    return next((float(value) for value in found if is_between(value, -LARGEST, LARGEST)), None)


def is_between(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number from low to high."""
    return type(value) in (int, float) and low <= value <= high


def number_between(example: "Example", column: str, low: float, high: float) -> float | None:
    """A row's number in a column, None where it has none; a UserError for anything else there."""
    value = example.columns.get(column)
    if value is None:
        return None
    if not is_between(value, low, high):
        raise UserError(
            f"row {example.row + 1} of the pairs has {reprlib.repr(value)} in its column "
            f"{column!r}; it must be a number from {low:g} to {high:g}, or null if not known."
        )
    return float(value)


def policy_scores(
    names: Sequence[str],
    logps: Floats,
    ref_logps: Floats | None,
    lengths: Numbers,
    implicit_rewards: Floats | None,
) -> dict[str, Floats]:
    """One policy read in several ways.

    implicit_reward: by which its loss judges (`losses.ImplicitReward`); log_ratio: log(pi / ref);
    logp: log pi; `_per_token`: the same divided by the completion's length.

    Args:
        names: Some of `POLICY_SCORES`.
        logps: (N, 2) log-probabilities of the completions, nats.
        ref_logps: The reference's; None for the reference itself, whose ratios are 0 everywhere,
            and where there is none: then logp takes the place of what needs them.
        lengths: (N, 2) tokens of the completions.
        implicit_rewards: (N, 2), None where they need a reference and there is none.
    """
    scores = {"logp": logps, "logp_per_token": logps / lengths}
    if implicit_rewards is not None:
        scores["implicit_reward"] = implicit_rewards
    if ref_logps is not None:
        ratios = logps - ref_logps
        scores |= {"log_ratio": ratios, "log_ratio_per_token": ratios / lengths}
    possible = [name for name in names if name in scores]
    names = possible if possible == list(names) else ["logp", *possible]
    return {name: scores[name] for name in dict.fromkeys(names)}


def baselines(
    examples: Sequence["Example"], texts: Sequence[Sequence[str]], seed: int
) -> dict[str, Floats]:
    """Scores (N, 2) that need no model, of N pairs and the texts of their completions.

    Tokens of the completion, and minus them; ROUGE-L F1 of the completion against the post (the
    prompt without TL;DR's header and cue); random numbers, a function of seed and row.
    """
    from common import data, noise
    from common.text import overlap
    from common.text.truncate import split_prompt

    lengths = data.lengths(examples)[:, 1:].double().numpy()
    posts = [split_prompt(example.prompt)[1] for example in examples]
    overlaps = [
        [overlap.rouge_l(text, post) for text in pair]
        for post, pair in zip(posts, texts, strict=True)
    ]
    rows = torch.tensor([[example.row] for example in examples])  # (N, 1)
    seed = noise.derive_seed(seed, "random baseline")
    guess = noise.uniform(seed, rows, torch.arange(2)).numpy()
    scores = (lengths, -lengths, np.array(overlaps), guess)
    return dict(zip(BASELINES, scores, strict=True))


# ---- scoring -------------------------------------------------------------------------------------


def reward_scores(
    function: "RewardModelFunction",
    pairs: Sequence["Example"],
    tokenizer: Any,
    stop_ids: Sequence[int],
    config: "CommonConfig",
) -> Tensor:
    """Rewards of both completions of every pair. Collective.

    A reward model with the tokenizer of the run reads the ids as they are; another one reads the
    texts in its own tokens. Conversations are read to the end of their turn.

    Returns:
        (N, 2) float64 on the host, the same on every rank.
    """
    from common import distributed
    from common.evaluation.score import score_examples
    from common.text.chat import TEMPLATE_COLUMNS, as_answers

    is_chat = any(example.messages for example in pairs)
    if function.same_ids and not is_chat:
        assert function.model is not None, "load() comes first"
        return score_examples(
            function.model, pairs, config, tokenizer.pad_token_id, "scoring pairs"
        )
    rows = range(distributed.rank(), len(pairs), distributed.world_size())
    sides = [(pairs[row], ids) for row in rows for ids in pairs[row].completions]
    own = [pairs[row] for row in rows]
    texts = [text for both in completion_texts(own, tokenizer, stop_ids) for text in both]
    prompts: list[Any] = [example.messages or example.prompt for example, _ in sides]
    rewards = function(
        prompts,
        as_answers(texts, [example.messages for example, _ in sides], tokenizer),
        completion_ids=[ids for _, ids in sides],
        prompt_ids=[example.prompt_ids for example, _ in sides],
        has_stop=[ids[-1] in stop_ids for _, ids in sides],
        **{name: [pair.columns.get(name) for pair, _ in sides] for name in TEMPLATE_COLUMNS},
    )
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64)
    scores[list(rows)] = torch.tensor(rewards, dtype=torch.float64).view(-1, 2)
    return distributed.all_reduce_sum(scores.to(distributed.device())).cpu()


def completion_texts(
    pairs: Sequence["Example"], tokenizer: Any, stop_ids: Sequence[int]
) -> list[list[str]]:
    """The completions of every pair as text, without the stop token."""
    return [
        [tokenizer.decode(ids[:-1] if ids[-1] in stop_ids else ids) for ids in pair.completions]
        for pair in pairs
    ]


def without_stop(pairs: Sequence["Example"], stop_ids: Sequence[int]) -> list["Example"]:
    """The pairs without the stop token that ends a completion, unless there is nothing else."""

    def cut(ids: list[int]) -> list[int]:
        return ids[:-1] if len(ids) > 1 and ids[-1] in stop_ids else ids

    return [replace(pair, completions=list(map(cut, pair.completions))) for pair in pairs]


def reward_of_run(path: str, beta: float = 0.0) -> tuple["ImplicitReward", bool]:
    """What the run that wrote a policy judges pairs by, and whether its scale is known.

    Its config.yaml says so: without one it is log(pi / ref), up to its scale. A `beta` above 0
    takes the place of the run's.

    Raises:
        UserError: the file cannot be read.
    """
    from common.evaluation.score import ImplicitReward

    settings = config_of_run(path)
    of_run = settings.get("beta")
    beta = beta or (of_run if isinstance(of_run, int | float) and of_run > 0 else 0.0)
    names = ("loss_type", "reference_free", "ld_alpha")
    is_dpo = all(name in settings for name in names)
    options = {name: settings[name] for name in names} if is_dpo else {}
    return ImplicitReward(beta=beta or 1.0, **options), beta > 0


def reference_of_run(path: str) -> str:
    """The reference, or else the start, of the run that wrote a policy; "" where none is there."""
    from common.text.hub import is_id

    settings = config_of_run(path)
    paths = (settings.get(name) for name in ("ref_model_name_or_path", "model_name_or_path"))
    reference = next((p for p in paths if p and p != path), "")
    return reference if reference and (Path(reference).is_dir() or is_id(reference)) else ""


def config_of_run(path: str) -> dict[str, Any]:
    """The config.yaml of the run that wrote a model, empty where there is none.

    Raises:
        UserError: the file cannot be read.
    """
    from common.evaluation.score import run_of
    from common.record.folder import read_config

    try:
        return read_config(run_of(path)[0]) if Path(path).is_dir() else {}
    except ValueError as error:
        raise UserError(f"{error}; it says by which reward the policy is judged.") from None


def refuse_other_tokenizer(path: str, tokenizer: Any, config: "CommonConfig") -> None:
    """Raise a UserError for a policy to which the ids of the run's tokenizer are other text."""
    from common.model.load import load_tokenizer

    has_none = Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))
    if path == config.tokenizer_path or path.endswith(".json") or has_none:
        return
    own = load_tokenizer(path, config, needs_eos=False).get_vocab()
    added = tokenizer.get_added_vocab()  # as a pad token: another run may do without
    expected = {token: i for token, i in tokenizer.get_vocab().items() if token not in added}
    if any(own.get(token) != i for token, i in expected.items()):
        raise UserError(
            f"{path!r} has another tokenizer than {config.tokenizer_path!r}; evaluate it in a run "
            "of its own."
        )


# ---- the file ------------------------------------------------------------------------------------


def write_scores(path: Path, table: PairScores) -> None:
    """Write `scores.jsonl`, atomically; numbers are exact."""
    from common.record.jsonl import json_line, write_atomically

    kinds = {"rewards": table.rewards, "scores": table.scores}
    lines = (
        pair
        | {kind: {name: own[i].tolist() for name, own in kinds[kind].items()} for kind in kinds}
        for i, pair in enumerate(table.pairs)
    )
    write_atomically(path, map(json_line, lines))


def read_scores(path: Path) -> PairScores:
    """What `write_scores` wrote.

    Raises:
        UserError: the file is not there, is empty or holds other lines.
    """
    from common.record.jsonl import read_jsonl

    parts: list[dict[str, Floats]] = []
    try:
        pairs = read_jsonl(path)
        for kind in ("rewards", "scores"):
            lines = [pair.pop(kind) for pair in pairs]
            scores = {name: np.array([own[name] for own in lines], float) for name in lines[0]}
            parts.append({name: own.reshape(len(pairs), 2) for name, own in scores.items()})
        return PairScores(pairs, *parts)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is no scores.jsonl of an evaluation: it is not there, is empty, or a line "
            f"lacks a system's two scores ({gist(error)})."
        ) from None
