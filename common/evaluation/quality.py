"""What generations are worth: rewards, KL, entropy, ROUGE, length, repetition, copying.

`measure` looks at one completion of each prompt, with the models; `summary` turns what
`completions.jsonl` then holds into means with intervals, without them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common.config import CommonConfig
from common.data import Example
from common.evaluation import score
from common.evaluation.completions import REFERENCE, Answers, Generation
from common.evaluation.intervals import mean_over_prompts, mean_over_tokens, share_over_prompts
from common.padding import AnyBatch
from common.rewards.scorer import RewardScorer
from common.sampling.sampler import Rollouts
from common.scoring import Policy
from common.text.chat import is_messages, render
from common.text.overlap import copied_share, distinct_share, repeated_share, rouge_l, rouge_n
from common.text.tokenise import tokenize_completions

MEANS = ("kl", "rouge_1", "rouge_2", "rouge_l", "repeated_3", "copied_2", "copied_3", "copied_4")


# ---- one completion of each prompt ---------------------------------------------------------------


def measure(
    policy: Policy,
    reference: Policy,
    judges: RewardScorer,
    prompts: Sequence[Example],
    rollouts: Rollouts,
    config: CommonConfig,
    temperature: float,
    pad_id: int,
) -> list[Generation]:
    """A policy's own completions, one per prompt, with all that is measured of them. Collective.

    The KL is log pi - log ref of completions drawn from pi, whose mean is unbiased at temperature 1
    and not measured at any other. The entropy is that of pi at temperature 1 along them.
    """
    sampled = [
        replace(example, completions=[ids])
        for example, ids in zip(prompts, rollouts.completion_ids, strict=True)
    ]
    own = score.score_columns(
        policy, sampled, config, pad_id, "scoring", logp_and_entropy, num_columns=2
    )[:, 0]  # (N, 2)
    kl: list[float | None] = [None] * len(prompts)
    if temperature == 1:
        ref_logps = own[:, 0]
        if reference is not policy:
            scores = score.score_examples(reference, sampled, config, pad_id, "scoring")
            ref_logps = scores[:, 0]  # (N,)
        kl = (own[:, 0] - ref_logps).tolist()
    entropy = (own[:, 1] / rollouts.lengths).tolist()
    generations = judged(judges, prompts, rollouts)
    references = [reference_text(example) for example in prompts]
    return [
        replace(with_overlaps(generation, example.prompt, text), kl=k, entropy=h)
        for generation, example, text, k, h in zip(
            generations, prompts, references, kl, entropy, strict=True
        )
    ]


def logp_and_entropy(policy: nn.Module, batch: AnyBatch) -> Tensor:
    """(B, 2): log-probability of each completion, and the sum of its tokens' entropies, nats."""
    scores = policy(batch, with_entropy=True)
    return torch.stack([scores.token_logps.sum(-1), scores.entropy.sum(-1)], dim=-1)


def reference_completions(
    judges: RewardScorer,
    prompts: Sequence[Example],
    tokenizer: Any,
    stop_id: int,
    max_completion_length: int,
) -> list[Generation | None]:
    """The rows' own completions, judged like a policy's. Collective if a reward model takes part.

    They are tokenised as for training: what is longer than `max_completion_length` is cut there for
    the judges of single completions, and then has not stopped; the text stays whole.

    Returns:
        None for a row without the column `completion`, or with nothing in it.
    """
    texts = [reference_text(example) for example in prompts]
    there = [i for i, text in enumerate(texts) if text.strip()]
    found: list[Generation | None] = [None] * len(prompts)
    if not there:
        return found
    written = [as_written(prompts[i], texts[i], tokenizer) for i in there]
    cut = tokenize_completions(written, tokenizer, stop_id, max_completion_length)
    rollouts = Rollouts(
        [completion.ids for completion in cut],
        [[0.0] * len(completion.ids) for completion in cut],
        [not completion.is_truncated for completion in cut],
    )
    examples = [prompts[i] for i in there]
    for i, generation in zip(there, judged(judges, examples, rollouts), strict=True):
        whole = replace(generation, completion=texts[i])
        found[i] = with_overlaps(whole, prompts[i].prompt, "")  # ROUGE with itself says nothing
    return found


def reference_text(example: Example) -> str:
    """A row's own completion, of messages the last one; empty if it has none."""
    value: Any = example.columns.get("completion")
    if is_messages(value):
        return str(value[-1]["content"])
    return value if isinstance(value, str) else ""


def as_written(example: Example, text: str, tokenizer: Any) -> str:
    """A completion as the policy would write it: in a conversation, by the chat template."""
    if not example.messages:
        return text
    answer = [{"role": "assistant", "content": text}]
    row = {"prompt": example.messages, "completion": answer}
    return str(render(row, ["completion"], tokenizer)["completion"])


def judged(
    judges: RewardScorer, prompts: Sequence[Example], rollouts: Rollouts
) -> list[Generation]:
    """The completions with their rewards. Collective if a reward model takes part."""
    by_judge: dict[str, Tensor] = {}
    if judges.functions.functions:
        _, by_judge = judges(prompts, rollouts)  # (N, 1) each
    rewards = {judge: values.flatten().tolist() for judge, values in by_judge.items()}
    return [
        Generation(
            completion=text,
            num_tokens=len(rollouts.completion_ids[i]),
            stopped=rollouts.has_stop[i],
            completion_ids=rollouts.completion_ids[i],
            # nan: the judge does not apply to the row
            rewards={j: None if math.isnan(own[i]) else own[i] for j, own in rewards.items()},
        )
        for i, text in enumerate(rollouts.texts(judges.tokenizer))
    ]


def with_overlaps(generation: Generation, prompt: str, reference: str) -> Generation:
    """Add the words that a completion shares with a reference, with itself and with its prompt."""
    text, has_reference = generation.completion, bool(reference.strip())
    return replace(
        generation,
        rouge_1=rouge_n(text, reference, 1).f1 if has_reference else None,
        rouge_2=rouge_n(text, reference, 2).f1 if has_reference else None,
        rouge_l=rouge_l(text, reference).f1 if has_reference else None,
        repeated_3=repeated_share(text, 3),
        copied_2=copied_share(text, prompt, 2),
        copied_3=copied_share(text, prompt, 3),
        copied_4=copied_share(text, prompt, 4),
    )


# ---- over all prompts ----------------------------------------------------------------------------


def collect(
    prompts: Sequence[Example],
    by_system: dict[str, list[Generation]],
    references: Sequence[Generation | None],
) -> list[Answers]:
    """The lines of `completions.jsonl`."""
    return [
        Answers(
            example.row,
            example.prompt,
            references[i],
            {name: generations[i] for name, generations in by_system.items()},
            prompt_ids=example.prompt_ids,
        )
        for i, example in enumerate(prompts)
    ]


def summary(answers: Sequence[Answers], name: str) -> dict[str, Any]:
    """Means over the prompts of what a system answered, or of the rows' own completions.

    Args:
        answers: Lines of `completions.jsonl`.
        name: A system, or REFERENCE.

    Returns:
        `length` (tokens) and `stop_rate` as numbers, and with intervals as `length_interval` and
        `stop_rate_interval`; `rewards` by judge if there is any, `entropy` (nats per token, mean
        over tokens) and the MEANS as intervals, None where nothing was measured;
        `distinct_completions`, a share.
    """
    rows = [(row.prompt, own) for row in answers if (own := row.of(name)) is not None]
    prompts, generations = [prompt for prompt, _ in rows], [own for _, own in rows]
    lengths = [own.num_tokens for own in generations]
    length = mean_over_prompts(lengths, prompts)
    stop_rate = share_over_prompts([float(own.stopped) for own in generations], prompts)
    assert length is not None, name
    assert stop_rate is not None, name
    judges = dict.fromkeys(judge for own in generations for judge in own.rewards)
    found = {
        "length": length["mean"],
        "length_interval": length,
        "stop_rate": stop_rate["mean"],
        "stop_rate_interval": stop_rate,
        "entropy": mean_over_tokens([own.entropy for own in generations], lengths, prompts),
        "distinct_completions": distinct_share([own.completion for own in generations]),
    }
    if judges:
        found["rewards"] = {
            judge: mean_over_prompts([own.rewards.get(judge) for own in generations], prompts)
            for judge in judges
        }
    for key in MEANS:
        found[key] = mean_over_prompts([getattr(own, key) for own in generations], prompts)
    return found


def with_summaries(
    systems: Sequence[dict[str, Any]], answers: Sequence[Answers], judges: RewardScorer
) -> list[dict[str, Any]]:
    """The rows of `results.json` with what is known of the systems' generations.

    `gold_reward` and `reward` are two of the `rewards`: of the function `gold`, and of the first
    reward model.
    """
    shown = {
        "gold_reward": judges.short.get("gold"),
        "reward": next((judges.short[path] for path in judges.reward_models), None),
    }
    rows = []
    for system in systems:
        name = system["name"]
        if answers and name in answers[0].systems:
            system = system | summary(answers, name)
            if "rewards" in system:
                system |= {key: system["rewards"].get(judge) for key, judge in shown.items()}
        rows.append(system)
    return rows


def reference_summary(answers: Sequence[Answers]) -> dict[str, Any] | None:
    """`summary` of the rows' own completions, None where there are none."""
    return summary(answers, REFERENCE) if any(row.reference for row in answers) else None
