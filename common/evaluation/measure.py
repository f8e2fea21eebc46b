"""Measure systems with their models: scores of pairs, completions with rewards, KL, ROUGE."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common import data, distributed, noise
from common.batch import AnyBatch
from common.config.evaluate import EvaluateConfig
from common.config.stages import CommonConfig
from common.evaluation.accuracy import Floats
from common.evaluation.records import BASELINES, Generation
from common.evaluation.scoring import score_examples
from common.forward import Policy
from common.objectives.implicit_reward import ImplicitReward
from common.rewards.models import RewardModelFunction
from common.rewards.score import RewardFunctions
from common.sampling.sampler import Rollouts
from common.text.chat import TEMPLATE_COLUMNS, as_answers, render
from common.text.example import Example, Vocabulary
from common.text.overlap import rouge_l, rouge_n
from common.text.schemas import is_messages
from common.text.tokenise import split_prompt, tokenize_completions

# ---- pairs ---------------------------------------------------------------------------------------


def policy_scores(
    logps: Tensor,  # (N, 2), nats
    ref_logps: Tensor | None,
    pairs: Sequence[Example],
    reward: ImplicitReward,  # that of the run's training
    config: EvaluateConfig,
) -> dict[str, Floats]:
    """Scores (N, 2) of a policy on N pairs by each kind of `--policy_scores`.

    `logp_per_token` is the log-probability divided by the completion's length. Where the implicit
    reward needs a reference and there is none, as for the reference itself, whose ratios are 0
    everywhere, the log-probability takes its place, as kind `logp`.
    """
    lengths = data.completion_lengths(pairs)  # (N, 2)
    scores: dict[str, Floats] = {}
    for kind in config.policy_scores:
        if kind == "logp_per_token":
            scores[kind] = (logps / lengths).numpy()
        elif reward.needs_reference and ref_logps is None:
            scores["logp"] = logps.numpy()
        else:
            scores[kind] = reward(logps, ref_logps, lengths).numpy()
    return scores


def baselines(
    examples: Sequence[Example], texts: Sequence[Sequence[str]], seed: int
) -> dict[str, Floats]:
    """Scores (N, 2) that need no model, of N pairs and the texts of their completions.

    Tokens of the completion, and minus them; ROUGE-L F1 of the completion against the post (the
    prompt without TL;DR's header and cue); random numbers, a function of seed and row.
    """
    lengths = data.completion_lengths(examples).double().numpy()
    posts = [split_prompt(example.prompt)[1] for example in examples]
    overlaps = [
        [rouge_l(text, post) for text in pair] for post, pair in zip(posts, texts, strict=True)
    ]
    rows = torch.tensor([[example.row] for example in examples])  # (N, 1)
    seed = noise.derive_seed(seed, "random baseline")
    guess = noise.uniform(seed, rows, torch.arange(2)).numpy()
    scores = (lengths, -lengths, np.array(overlaps), guess)
    return dict(zip(BASELINES, scores, strict=True))


@distributed.together()  # one rank's rows may be unreadable
def reward_scores(
    function: RewardModelFunction,
    pairs: Sequence[Example],
    vocabulary: Vocabulary,
    config: CommonConfig,
) -> Tensor:
    """Rewards (N, 2), float64 on the host, of the completions of every pair. Collective.

    A reward model with the tokenizer of the run reads the ids as they are; another one reads the
    texts in its own tokens. Conversations are read to the end of their turn.
    """
    is_chat = any(example.messages for example in pairs)
    if function.same_ids and not is_chat:
        assert function.model is not None, "load() comes first"
        return score_examples(function.model, pairs, config, vocabulary, "scoring pairs")
    rows = range(distributed.rank(), len(pairs), distributed.world_size())
    sides = [(pairs[row], ids) for row in rows for ids in pairs[row].completions]
    pairs_of_rank = [pairs[row] for row in rows]
    texts = [text for both in completion_texts(pairs_of_rank, vocabulary) for text in both]
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


def completion_texts(pairs: Sequence[Example], vocabulary: Vocabulary) -> list[list[str]]:
    """The completions of every pair as text, without the stop token."""
    decode, stop_ids = vocabulary.tokenizer.decode, vocabulary.stop_ids
    return [
        pair.texts or [decode(ids[:-1] if ids[-1] in stop_ids else ids) for ids in pair.completions]
        for pair in pairs
    ]


# ---- completions ---------------------------------------------------------------------------------


def measure_completions(
    policy: Policy,
    reference: Policy | None,
    judges: RewardFunctions,
    prompts: Sequence[Example],
    rollouts: Rollouts,
    config: CommonConfig,
    temperature: float,
) -> list[Generation]:
    """Measurements of a policy's N*K completions of N prompts. Collective.

    The KL is log pi - log ref of completions drawn from pi. Its mean is unbiased at temperature 1;
    at another one, or without a reference, it is not measured. The entropy is that of pi at
    temperature 1 along the completions.
    """
    examples, vocabulary = rollouts.completed(prompts), judges.vocabulary
    logps, entropies = (
        score_examples(policy, examples, config, vocabulary, "scoring", score=logp_and_entropy)
        .flatten(0, 1)
        .unbind(-1)
    )  # (N*K,) each
    kl: list[float | None] = [None] * len(logps)
    if temperature == 1 and reference is not None:
        ref_logps = logps
        if reference is not policy:
            ref_logps = score_examples(
                reference, examples, config, vocabulary, "scoring"
            ).flatten()  # (N*K,)
        kl = (logps - ref_logps).tolist()
    entropy = (entropies / rollouts.lengths).tolist()
    texts, references = rollouts.texts(vocabulary.tokenizer), list(map(reference_text, prompts))
    generations = judge_completions(judges, prompts, rollouts, texts, references)
    rows = zip(generations, kl, entropy, strict=True)
    return [replace(generation, kl=k, entropy=h) for generation, k, h in rows]


def logp_and_entropy(policy: nn.Module, batch: AnyBatch) -> Tensor:
    """(B, 2): log-probability of each completion, and the sum of its tokens' entropies, nats."""
    scores = policy(batch, with_entropy=True)
    return torch.stack([scores.token_logps.sum(-1), scores.entropy.sum(-1)], dim=-1)


def reference_completions(
    judges: RewardFunctions,
    prompts: Sequence[Example],
    max_completion_length: int,
) -> dict[int, Generation]:
    """The rows' own completions, by index of the row, judged. Collective with a reward model.

    They are tokenised as for training: one longer than `max_completion_length` is cut for judges of
    single completions, and counts as not stopped; its text stays whole. Empty ones are left out.
    """
    texts = {i: text for i, e in enumerate(prompts) if (text := reference_text(e)).strip()}
    if not texts:
        return {}
    examples = [prompts[i] for i in texts]
    written = []  # as the policy would write it: in a conversation, by the chat template
    for example, text in zip(examples, texts.values(), strict=True):
        if not example.messages:
            written.append(text)
            continue
        answer = [{"role": "assistant", "content": text}]
        row = {**example.columns, "prompt": example.messages, "completion": answer}
        written += [one.completions[0] for one in render(row, "sft", judges.vocabulary.tokenizer)]
    cut = tokenize_completions(written, judges.vocabulary, max_completion_length)
    rollouts = Rollouts.of([one.ids for one in cut], [], [not one.is_truncated for one in cut])
    no_rouge = [""] * len(texts)  # ROUGE of a reference with itself is 1
    judged = judge_completions(judges, examples, rollouts, list(texts.values()), no_rouge)
    return dict(zip(texts, judged, strict=True))


def reference_text(example: Example) -> str:
    """A row's reference completion, of messages the last one; empty if it has none."""
    value: Any = example.columns.get("completion")
    if is_messages(value):
        return str(value[-1].get("content") or "")
    return value if isinstance(value, str) else ""


def judge_completions(
    judges: RewardFunctions,
    prompts: Sequence[Example],
    rollouts: Rollouts,
    texts: Sequence[str],
    references: Sequence[str],
) -> list[Generation]:
    """Completions with their rewards and ROUGE.

    Collective with a reward model. The N*K texts are recorded; ROUGE compares them with the N
    references, except empty ones.
    """
    rewards: dict[str, list[float]] = {}
    if judges.functions:
        by_function = judges.score(prompts, rollouts).by_function  # (N, K) each
        rewards = {judge: values.flatten().tolist() for judge, values in by_function.items()}
    k = len(texts) // max(1, len(prompts))
    messages = [example.messages for example in prompts for _ in range(k)]
    tokenizer = judges.vocabulary.tokenizer
    judged_texts = as_answers(rollouts.texts(tokenizer), messages, tokenizer)
    extracted = judges.extracted_answers(judged_texts)  # the answers that rewards compare
    return [
        Generation(
            completion=text,
            num_tokens=len(rollouts.completion_ids[i]),
            stopped=bool(rollouts.has_stop[i]),
            completion_ids=rollouts.completion_ids[i],
            # nan: the judge does not apply to the row
            rewards={j: None if math.isnan(r[i]) else r[i] for j, r in rewards.items()},
            answers={judge: answers[i] for judge, answers in extracted.items()},
            **rouge(text, references[i // k]),
        )
        for i, text in enumerate(texts)
    ]


def rouge(text: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L of a text; none with an empty reference."""
    if not reference.strip():
        return {}
    by_n = {f"rouge_{n}": rouge_n(text, reference, n) for n in (1, 2)}
    return by_n | {"rouge_l": rouge_l(text, reference)}
