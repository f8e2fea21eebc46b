"""What every system answered to every prompt, what was measured of it, and `completions.jsonl`.

One line of the file per prompt: `id` (its row among the prompts), `prompt`, `reference` (the row's
own completion, null where it has none), `systems` (by name), `verdicts` (of judges that compare two
completions) and `prompt_ids`, as the policies read it. `measure` looks at one completion of each
prompt, with the models; every number about generations in `results.json` is a function of the file.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from common.evaluation.intervals import mean_over_prompts, share_over_prompts

if TYPE_CHECKING:
    from common.config import CommonConfig
    from common.data import Example
    from common.padding import AnyBatch
    from common.rewards.scorer import RewardScorer
    from common.sampling.sampler import Rollouts
    from common.scoring import Policy

FILE = "completions.jsonl"
REFERENCE = "reference completion"  # the name under which a row's own completion is compared
MEANS = ("kl", "rouge_1", "rouge_2", "rouge_l", "repeated_3", "copied_2", "copied_3", "copied_4")


@dataclass(frozen=True)
class Generation:
    """A completion and what was measured of it; None where it was not, or means nothing."""

    completion: str  # without the stop token
    num_tokens: int  # of the policies' tokenizer, stop token included
    stopped: bool  # False = ended by the length limit
    rewards: dict[str, float | None] = field(default_factory=dict)  # by judge
    kl: float | None = None  # log pi - log ref, nats: unbiased for KL(pi || ref) at temperature 1
    entropy: float | None = None  # of the policy at temperature 1, mean over tokens, nats
    rouge_1: float | None = None  # F1 with the row's own completion (Lin 2004)
    rouge_2: float | None = None
    rouge_l: float | None = None
    repeated_3: float | None = None  # `overlap.repeated_share` of 3 words
    copied_2: float | None = None  # `overlap.copied_share` of 2 words
    copied_3: float | None = None
    copied_4: float | None = None
    completion_ids: list[int] = field(default_factory=list)  # stop token included: what KL is of


@dataclass(frozen=True)
class Verdict:
    """What a judge of two completions says of a prompt."""

    a: str  # name of a system, or REFERENCE
    b: str
    judge: str
    a_wins: float  # probability, or 1, 0.5 (a tie) or 0


@dataclass(frozen=True)
class Answers:
    """A line of the file."""

    id: int
    prompt: str
    reference: Generation | None
    systems: dict[str, Generation]
    verdicts: list[Verdict] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)

    def of(self, name: str) -> Generation | None:
        """The completion of a system, or the row's own."""
        return self.reference if name == REFERENCE else self.systems[name]

    def pair(self, a: str, b: str) -> tuple[Generation, Generation] | None:
        """The completions of both; None unless both are there."""
        own, other = self.of(a), self.of(b)
        return (own, other) if own and other else None


def system_names(answers: Sequence[Answers]) -> list[str]:
    """The systems that answered, in order, with REFERENCE last if a row has a completion."""
    names = list(answers[0].systems) if answers else []
    return [*names, REFERENCE] if any(row.reference for row in answers) else names


# ---- the file ------------------------------------------------------------------------------------


def collect(
    prompts: Sequence["Example"],
    by_system: dict[str, list[Generation]],
    references: Sequence[Generation | None] | None = None,
) -> list[Answers]:
    """The lines of the file."""
    return [
        Answers(
            example.row,
            example.prompt,
            references[i] if references else None,
            {name: generations[i] for name, generations in by_system.items()},
            prompt_ids=example.prompt_ids,
        )
        for i, example in enumerate(prompts)
    ]


def write(answers: Sequence[Answers], output_dir: Path) -> None:
    """Write the file, atomically. Rank 0 only."""
    from common.record.jsonl import json_line, write_atomically

    write_atomically(output_dir / FILE, (json_line(asdict(row)) for row in answers))


def read(output_dir: Path) -> list[Answers]:
    """What `write` wrote; [] without the file."""
    from common.record.jsonl import read_jsonl

    return [_answers(line) for line in read_jsonl(output_dir / FILE)]


def _answers(line: dict[str, Any]) -> Answers:
    reference = line["reference"]
    return Answers(
        line["id"],
        line["prompt"],
        reference and Generation(**reference),
        {name: Generation(**own) for name, own in line["systems"].items()},
        [Verdict(**verdict) for verdict in line["verdicts"]],
        line.get("prompt_ids", []),  # not in older files
    )


# ---- one completion of each prompt ---------------------------------------------------------------


def measure(
    policy: "Policy",
    reference: "Policy",
    judges: "RewardScorer",
    prompts: Sequence["Example"],
    rollouts: "Rollouts",
    config: "CommonConfig",
    temperature: float,
    pad_id: int,
) -> list[Generation]:
    """A policy's own completions, one per prompt, with all that is measured of them. Collective.

    The KL is log pi - log ref of completions drawn from pi, whose mean is unbiased at temperature 1
    and not measured at any other. The entropy is that of pi at temperature 1 along them.
    """
    from common.evaluation.score import score_examples

    sampled = [
        replace(example, completions=[ids])
        for example, ids in zip(prompts, rollouts.completion_ids, strict=True)
    ]
    arguments = (sampled, config, pad_id, "scoring")
    own = score_examples(policy, *arguments, score=logp_and_entropy, num_columns=2)[:, 0]  # (N, 2)
    kl: list[float | None] = [None] * len(prompts)
    if temperature == 1:
        ref_logps = own[:, 0]
        if reference is not policy:
            ref_logps = score_examples(reference, *arguments)[:, 0]  # (N,)
        kl = (own[:, 0] - ref_logps).tolist()
    entropy = (own[:, 1] / rollouts.lengths).tolist()
    generations = judged(judges, prompts, rollouts)
    return [
        replace(with_overlaps(generation, example.prompt, reference_text(example)), kl=k, entropy=h)
        for generation, example, k, h in zip(generations, prompts, kl, entropy, strict=True)
    ]


def logp_and_entropy(policy: nn.Module, batch: "AnyBatch") -> Tensor:
    """(B, 2): log-probability of each completion, and the sum of its tokens' entropies, nats."""
    scores = policy(batch, with_entropy=True)
    return torch.stack([scores.token_logps.sum(-1), scores.entropy.sum(-1)], dim=-1)


def reference_completions(
    judges: "RewardScorer",
    prompts: Sequence["Example"],
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
    from common.sampling.sampler import Rollouts
    from common.text.chat import render
    from common.text.tokenise import tokenize_completions

    def as_written(example: "Example") -> str:
        """As the policy would write it: in a conversation, by the chat template."""
        text = reference_text(example)
        if not example.messages:
            return text
        answer = [{"role": "assistant", "content": text}]
        row = {"prompt": example.messages, "completion": answer}
        return str(render(row, ["completion"], tokenizer)["completion"])

    found: list[Generation | None] = [None] * len(prompts)
    there = [i for i, example in enumerate(prompts) if reference_text(example).strip()]
    if not there:
        return found
    examples = [prompts[i] for i in there]
    written = list(map(as_written, examples))
    cut = tokenize_completions(written, tokenizer, stop_id, max_completion_length)
    rollouts = Rollouts.of([one.ids for one in cut], [], [not one.is_truncated for one in cut])
    generations = judged(judges, examples, rollouts)
    for i, example, generation in zip(there, examples, generations, strict=True):
        whole = replace(generation, completion=reference_text(example))
        found[i] = with_overlaps(whole, example.prompt, "")  # ROUGE with itself says nothing
    return found


def reference_text(example: "Example") -> str:
    """A row's own completion, of messages the last one; empty if it has none."""
    from common.text.chat import is_messages

    value: Any = example.columns.get("completion")
    if is_messages(value):
        return str(value[-1]["content"])
    return value if isinstance(value, str) else ""


def judged(
    judges: "RewardScorer", prompts: Sequence["Example"], rollouts: "Rollouts"
) -> list[Generation]:
    """The completions with their rewards. Collective if a reward model takes part."""
    by_judge: dict[str, Tensor] = {}
    if judges.functions.functions:
        by_judge = judges.score(prompts, rollouts).by_function  # (N, 1) each
    rewards = {judge: values.flatten().tolist() for judge, values in by_judge.items()}
    return [
        Generation(
            completion=text,
            num_tokens=len(rollouts.completion_ids[i]),
            stopped=bool(rollouts.has_stop[i]),
            completion_ids=rollouts.completion_ids[i],
            # nan: the judge does not apply to the row
            rewards={j: None if math.isnan(own[i]) else own[i] for j, own in rewards.items()},
        )
        for i, text in enumerate(rollouts.texts(judges.tokenizer))
    ]


def with_overlaps(generation: Generation, prompt: str, reference: str) -> Generation:
    """Add the words that a completion shares with a reference, with itself and with its prompt."""
    from common.text.overlap import copied_share, repeated_share, rouge_l, rouge_n

    text = generation.completion
    found = {f"copied_{n}": copied_share(text, prompt, n) for n in (2, 3, 4)}
    found["repeated_3"] = repeated_share(text, 3)
    if reference.strip():
        found |= {f"rouge_{n}": rouge_n(text, reference, n).f1 for n in (1, 2)}
        found["rouge_l"] = rouge_l(text, reference).f1
    return replace(generation, **found)  # type: ignore[arg-type]


# ---- over all prompts ----------------------------------------------------------------------------


def summary(answers: Sequence[Answers], name: str) -> dict[str, Any]:
    """Means over the prompts of what a system answered, or of the rows' own completions.

    Args:
        answers: Lines of the file.
        name: A system, or REFERENCE.

    Returns:
        `length` (tokens) and `stop_rate` as numbers, and with intervals as `length_interval` and
        `stop_rate_interval`; `rewards` by judge if there is any, `entropy` (nats per token, mean
        over tokens) and the MEANS as intervals, None where nothing was measured;
        `distinct_completions`, a share.
    """
    from common.text.overlap import distinct_share

    rows = [(row.prompt, own) for row in answers if (own := row.of(name)) is not None]
    prompts, generations = [prompt for prompt, _ in rows], [own for _, own in rows]
    lengths = [own.num_tokens for own in generations]
    length = mean_over_prompts(lengths, prompts)
    stop_rate = share_over_prompts([float(own.stopped) for own in generations], prompts)
    assert length is not None, name
    assert stop_rate is not None, name
    judges = dict.fromkeys(judge for own in generations for judge in own.rewards)
    rewards = {
        judge: mean_over_prompts([own.rewards.get(judge) for own in generations], prompts)
        for judge in judges
    }
    return {
        "length": length["mean"],
        "length_interval": length,
        "stop_rate": stop_rate["mean"],
        "stop_rate_interval": stop_rate,
        "entropy": mean_over_prompts([own.entropy for own in generations], prompts, lengths),
        "distinct_completions": distinct_share([own.completion for own in generations]),
        **({"rewards": rewards} if rewards else {}),
        **{
            key: mean_over_prompts([getattr(own, key) for own in generations], prompts)
            for key in MEANS
        },
    }


def with_summaries(
    systems: Sequence[dict[str, Any]], answers: Sequence[Answers], judges: "RewardScorer"
) -> list[dict[str, Any]]:
    """The rows of `results.json` with what is known of the systems' generations.

    `gold_reward` and `reward` are two of the `rewards`: of the function `gold`, and of the first
    reward model.
    """
    model = next(iter(judges.reward_models), "")
    shown = {"gold_reward": judges.short.get("gold"), "reward": judges.short.get(model)}
    rows = []
    for system in systems:
        if answers and system["name"] in answers[0].systems:
            system = system | summary(answers, system["name"])
            if "rewards" in system:
                system |= {key: system["rewards"].get(judge) for key, judge in shown.items()}
        rows.append(system)
    return rows


def reference_summary(answers: Sequence[Answers]) -> dict[str, Any] | None:
    """`summary` of the rows' own completions, None where there are none."""
    return summary(answers, REFERENCE) if any(row.reference for row in answers) else None
