"""Pairs scored by every system of an evaluation: reward models of any vocabulary, and policies."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import distributed
from common.config import CommonConfig, UserError, gist
from common.data import Example
from common.evaluation import score
from common.model import load
from common.rewards.encoders import EncoderFunction
from common.rewards.scorer import RewardModelFunction
from common.sampling.sampler import Rollouts
from common.text.chat import as_answers


def reward_scores(
    function: RewardModelFunction | EncoderFunction,
    pairs: Sequence[Example],
    tokenizer: Any,
    stop_ids: Sequence[int],
    config: CommonConfig,
) -> Tensor:
    """Rewards of both completions of every pair. Collective.

    A reward model with the tokenizer of the run reads the ids as they are; another one, and an
    encoder, reads the texts in its own tokens. Conversations are read to the end of their turn.

    Args:
        function: Loaded.
        pairs: N pairs.
        tokenizer: Of the run.
        stop_ids: What ends a completion.
        config: Of the run.

    Returns:
        (N, 2) float64 on the host, the same on every rank.
    """
    is_chat = any(example.messages for example in pairs)
    if isinstance(function, RewardModelFunction) and function.same_ids and not is_chat:
        assert function.model is not None, "load() comes first"
        pad_id = tokenizer.pad_token_id
        return score.score_examples(function.model, pairs, config, pad_id, "scoring pairs")
    rows = range(distributed.rank(), len(pairs), distributed.world_size())
    sides = [(pairs[row], ids) for row in rows for ids in pairs[row].completions]
    rollouts = Rollouts([ids for _, ids in sides], [], [ids[-1] in stop_ids for _, ids in sides])
    texts = rollouts.texts(tokenizer)
    prompts: list[Any] = [e.messages or e.prompt for e, _ in sides]
    completions = as_answers(texts, [example.messages for example, _ in sides], tokenizer)
    rewards = function(
        prompts,
        completions,
        completion_ids=rollouts.completion_ids,
        prompt_ids=[example.prompt_ids for example, _ in sides],
        has_stop=rollouts.has_stop,
    )
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64)
    scores[list(rows)] = torch.tensor(rewards, dtype=torch.float64).view(-1, 2)
    return distributed.all_reduce_sum(scores.to(distributed.device())).cpu()


def completion_texts(
    pairs: Sequence[Example], tokenizer: Any, stop_ids: Sequence[int]
) -> list[list[str]]:
    """The completions of every pair as text, without the stop token."""
    has_stop = [[ids[-1] in stop_ids for ids in example.completions] for example in pairs]
    return [
        Rollouts(example.completions, [], stops).texts(tokenizer)
        for example, stops in zip(pairs, has_stop, strict=True)
    ]


def without_stop(pairs: Sequence[Example], stop_ids: Sequence[int]) -> list[Example]:
    """The pairs without the stop token that ends a completion, unless there is nothing else."""
    return [
        replace(
            example,
            completions=[
                ids[:-1] if len(ids) > 1 and ids[-1] in stop_ids else ids
                for ids in example.completions
            ],
        )
        for example in pairs
    ]


def implicit_betas(policies: Sequence[str], tokenizer: Any, config: Any) -> dict[str, float | None]:
    """Beta of each policy's implicit reward: `--beta`, else that of the run that wrote the folder.

    None where neither says one: then the reward is known up to its scale.

    Raises:
        UserError: a run's config.yaml cannot be read, or a policy has another tokenizer.
    """
    for path in policies:
        refuse_other_tokenizer(path, tokenizer, config)
    return {path: config.beta or run_beta(path) for path in policies}


def run_beta(path: str) -> float | None:
    """Beta in the config.yaml beside a model's folder, None where there is none."""
    import yaml

    file = Path(path).parent / "config.yaml"
    if not (Path(path).is_dir() and file.is_file()):
        return None
    try:
        fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{file} cannot be read ({gist(error)}); give the --beta of implicit rewards."
        ) from None
    beta = fields.get("beta") if isinstance(fields, dict) else None
    return float(beta) if isinstance(beta, int | float) and beta > 0 else None


def refuse_other_tokenizer(path: str, tokenizer: Any, config: CommonConfig) -> None:
    """Raise a UserError for a policy to which the ids of the run's tokenizer are other text."""
    has_none = Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))
    if path == config.tokenizer_path or path.endswith(".json") or has_none:
        return
    own = load.read_tokenizer(path, config).get_vocab()
    added = tokenizer.get_added_vocab()  # as a pad token: another run may do without
    expected = {token: i for token, i in tokenizer.get_vocab().items() if token not in added}
    if any(own.get(token) != i for token, i in expected.items()):
        raise UserError(
            f"{path!r} has another tokenizer than {config.tokenizer_path!r}; evaluate it in a run "
            "of its own and give that run's scores.jsonl to --scores_from."
        )
