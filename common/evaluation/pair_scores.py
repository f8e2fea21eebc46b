"""Scores of every system on one fixed set of pairs: computed, in memory, as `scores.jsonl`.

One line is one pair: dataset, split, row, prompt_sha256 (equal for equal prompts), source,
label_probability (null where the row has none), chosen_tokens, rejected_tokens, and `scores`, from
a system's name to its [chosen, rejected] scores. Every number of `comparison` in `results.json`
follows from that file alone (`comparison.compare`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.evaluation.intervals import Floats, finite_vector

if TYPE_CHECKING:
    from common.config import CommonConfig
    from common.data import Example
    from common.evaluation.score import ImplicitReward
    from common.rewards.models import RewardModelFunction
    from common.text.example import Vocabulary

POLICY_SCORES = ("implicit_reward", "logp_per_token")
BASELINES = ("longer wins", "shorter wins", "ROUGE-L wins", "random guess")


@dataclass
class PairScores:
    """N pairs with the scores (N, 2), chosen first, of every system."""

    pairs: list[dict[str, Any]]  # a line each, without the scores
    scores: dict[str, Floats] = field(default_factory=dict)

    def add(self, scores: Mapping[str, Floats]) -> None:
        """Add systems by name; a RuntimeError if a score is not finite."""
        for values in scores.values():
            finite_vector(values.ravel())
        self.scores |= scores


def describe_pairs(examples: Sequence["Example"], dataset: str, split: str) -> list[dict[str, Any]]:
    """The lines of `scores.jsonl`, without the scores."""
    return [
        {
            "dataset": dataset,
            "split": split,
            "row": example.row,
            "prompt_sha256": hashlib.sha256(example.prompt.encode()).hexdigest(),
            "source": example.source,
            "label_probability": example.columns.get("label_probability"),
            "chosen_tokens": len(example.completions[0]),
            "rejected_tokens": len(example.completions[1]),
        }
        for example in examples
    ]


def policy_scores(
    policy: str,
    kinds: Sequence[str],
    logps: Tensor,
    lengths: Tensor,
    implicit_rewards: Tensor | None,
) -> dict[str, Floats]:
    """Scores (N, 2) of a policy by each of some `POLICY_SCORES`, under `<policy> <kind>`.

    Args:
        policy: Its name.
        kinds: `logp_per_token` is the log-probability divided by the completion's length.
        logps: (N, 2) log-probabilities of the completions, nats.
        lengths: (N, 2) tokens of the completions.
        implicit_rewards: (N, 2) by which its loss judges (`score.ImplicitReward`); None where they
            need a reference and there is none, as for the reference itself, whose ratios are 0
            everywhere: the log-probabilities, as `logp`, take their place.
    """
    scores: dict[str, Floats] = {}
    for kind in kinds:
        if kind == "logp_per_token":
            scores[f"{policy} {kind}"] = (logps / lengths).numpy()
        elif implicit_rewards is None:
            scores[f"{policy} logp"] = logps.numpy()
        else:
            scores[f"{policy} {kind}"] = implicit_rewards.numpy()
    return scores


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
    vocabulary: "Vocabulary",
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
        return score_examples(function.model, pairs, config, vocabulary, "scoring pairs")
    rows = range(distributed.rank(), len(pairs), distributed.world_size())
    sides = [(pairs[row], ids) for row in rows for ids in pairs[row].completions]
    own = [pairs[row] for row in rows]
    texts = [text for both in completion_texts(own, vocabulary) for text in both]
    prompts: list[Any] = [example.messages or example.prompt for example, _ in sides]
    rewards = function(
        prompts,
        as_answers(texts, [example.messages for example, _ in sides], vocabulary.tokenizer),
        completion_ids=[ids for _, ids in sides],
        prompt_ids=[example.prompt_ids for example, _ in sides],
        has_stop=[ids[-1] in vocabulary.stop_ids for _, ids in sides],
        **{name: [pair.columns.get(name) for pair, _ in sides] for name in TEMPLATE_COLUMNS},
    )
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64)
    scores[list(rows)] = torch.tensor(rewards, dtype=torch.float64).view(-1, 2)
    return distributed.all_reduce_sum(scores.to(distributed.device())).cpu()


def completion_texts(pairs: Sequence["Example"], vocabulary: "Vocabulary") -> list[list[str]]:
    """The completions of every pair as text, without the stop token."""
    decode, stop_ids = vocabulary.tokenizer.decode, vocabulary.stop_ids
    return [
        [decode(ids[:-1] if ids[-1] in stop_ids else ids) for ids in pair.completions]
        for pair in pairs
    ]


def without_stop(pairs: Sequence["Example"], vocabulary: "Vocabulary") -> list["Example"]:
    """The pairs without the stop token that ends a completion, unless there is nothing else."""

    def cut(ids: list[int]) -> list[int]:
        return ids[:-1] if len(ids) > 1 and ids[-1] in vocabulary.stop_ids else ids

    return [replace(pair, completions=list(map(cut, pair.completions))) for pair in pairs]


def reward_of_run(path: str) -> "ImplicitReward":
    """The reward by which the run that wrote a policy judges pairs; of no run log(pi / ref)."""
    from common.evaluation.score import ImplicitReward

    settings = config_of_run(path)
    names = ("loss_type", "reference_free", "ld_alpha")
    is_dpo = all(name in settings for name in names)
    options = {name: settings[name] for name in names} if is_dpo else {}
    return ImplicitReward(beta=settings.get("beta") or 1.0, **options)


def reference_of_run(path: str) -> str:
    """The reference, or else the start, of the run that wrote a policy; "" where none is there."""
    from common.text.sources import is_id

    settings = config_of_run(path)
    paths = (settings.get(name) for name in ("ref_model_name_or_path", "model_name_or_path"))
    reference = next((p for p in paths if p and p != path), "")
    return reference if reference and (Path(reference).is_dir() or is_id(reference)) else ""


def config_of_run(path: str) -> dict[str, Any]:
    """The config.yaml of the run that wrote a model, empty where there is none."""
    from common.evaluation.score import run_of
    from common.record.folder import read_config

    return read_config(run_of(path)[0]) if Path(path).is_dir() else {}


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

    lines = (
        pair | {"scores": {name: own[i].tolist() for name, own in table.scores.items()}}
        for i, pair in enumerate(table.pairs)
    )
    write_atomically(path, map(json_line, lines))


def read_scores(path: Path) -> PairScores:
    """What `write_scores` wrote."""
    from common.record.jsonl import read_jsonl

    pairs = read_jsonl(path)
    lines = [pair.pop("scores") for pair in pairs]
    return PairScores(
        pairs, {name: np.array([own[name] for own in lines], float) for name in lines[0]}
    )
