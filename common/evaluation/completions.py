"""What every system answered to every prompt, what was measured of it, and `completions.jsonl`.

One line of the file per prompt: `id` (its row among the prompts), `prompt`, `reference` (the row's
own completion, null where it has none), `systems` (by name), `verdicts` (of judges that compare two
completions), `prompt_ids`, as the policies read it, and `further`, by system the samples behind the
first, which is the one that is compared and shown. `measure` looks at them, with the models; every
number about generations in `results.json` is a function of the file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from common.evaluation.intervals import mean_over_prompts, share_over_prompts

if TYPE_CHECKING:
    from common.config import CommonConfig
    from common.data import Example
    from common.evaluation.config import EvaluateConfig
    from common.padding import AnyBatch
    from common.rewards.score import RewardFunctions
    from common.sampling.sampler import Rollouts
    from common.scoring import Policy
    from common.text.example import Vocabulary

FILE = "completions.jsonl"
REFERENCE = "reference completion"  # the name under which a row's own completion is compared
MEANS = ("kl", "rouge_1", "rouge_2", "rouge_l")


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
    completion_ids: list[int] = field(default_factory=list)  # stop token included: what KL is of
    answers: dict[str, str | None] = field(default_factory=dict)  # by a judge that finds one in it


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
    further: dict[str, list[Generation]] = field(default_factory=dict)

    def of(self, name: str) -> Generation | None:
        """The first completion of a system, or the row's own; None if there is none."""
        return self.reference if name == REFERENCE else self.systems.get(name)

    def all_of(self, name: str) -> list[Generation]:
        """All completions of a system, or the row's own."""
        first = self.of(name)
        return [first, *self.further.get(name, [])] if first else []

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
    references: Mapping[int, Generation] | None = None,
) -> list[Answers]:
    """The lines of the file, of N*K completions by system; references by the place of a prompt."""
    answers = []
    for i, example in enumerate(prompts):
        own = {}
        for name, generations in by_system.items():
            k = len(generations) // len(prompts)
            own[name] = generations[i * k : (i + 1) * k]
        systems = {name: first for name, (first, *_) in own.items()}
        line = (example.row, example.prompt, (references or {}).get(i), systems)
        further = {name: rest for name, (_, *rest) in own.items() if rest}
        answers.append(Answers(*line, prompt_ids=example.prompt_ids, further=further))
    return answers


def write(answers: Sequence[Answers], output_dir: Path) -> None:
    """Write the file, atomically. Rank 0 only."""
    from common.record.jsonl import json_line, write_atomically

    write_atomically(output_dir / FILE, (json_line(asdict(row)) for row in answers))


def read(output_dir: Path) -> list[Answers]:
    """What `write` wrote; [] without the file."""
    from common.record.jsonl import read_jsonl

    answers = []
    for line in read_jsonl(output_dir / FILE):
        line["reference"] = line["reference"] and Generation(**line["reference"])
        line["systems"] = {name: Generation(**own) for name, own in line["systems"].items()}
        line["verdicts"] = [Verdict(**verdict) for verdict in line["verdicts"]]
        further = line["further"].items()
        line["further"] = {name: [Generation(**one) for one in own] for name, own in further}
        answers.append(Answers(**line))
    return answers


# ---- the completions of each prompt --------------------------------------------------------------


def sample(
    policy: "Policy",
    prompts: Sequence["Example"],
    vocabulary: "Vocabulary",
    config: "EvaluateConfig",
    title: str,
) -> "Rollouts":
    """`num_generations` completions of each prompt, prompt-major. Collective."""
    from common.sampling.vllm.sampler import new_sampler

    max_new_tokens = config.max_new_tokens or config.max_completion_length
    of_sampler = replace(config, max_completion_length=max_new_tokens)
    sampler = new_sampler(policy, vocabulary, of_sampler)
    return sampler.sample_shared(
        prompts, title=title, num_samples=config.num_generations, temperature=config.temperature
    )


def measure(
    policy: "Policy",
    reference: "Policy | None",
    judges: "RewardFunctions",
    prompts: Sequence["Example"],
    rollouts: "Rollouts",
    config: "CommonConfig",
    temperature: float,
) -> list[Generation]:
    """A policy's own completions, N*K of N prompts, with all that is measured of them. Collective.

    The KL is log pi - log ref of completions drawn from pi, whose mean is unbiased at temperature 1
    and not measured at any other, nor without a reference. The entropy is that of pi at temperature
    1 along them.
    """
    from common.evaluation.score import score_examples

    examples, vocabulary = rollouts.completed(prompts), judges.vocabulary
    own = score_examples(
        policy, examples, config, vocabulary, "scoring", score=logp_and_entropy
    ).flatten(0, 1)  # (N*K, 2)
    kl: list[float | None] = [None] * len(own)
    if temperature == 1 and reference is not None:
        ref_logps = own[:, 0]
        if reference is not policy:
            ref_logps = score_examples(
                reference, examples, config, vocabulary, "scoring"
            ).flatten()  # (N*K,)
        kl = (own[:, 0] - ref_logps).tolist()
    entropy = (own[:, 1] / rollouts.lengths).tolist()
    texts, references = rollouts.texts(vocabulary.tokenizer), list(map(reference_text, prompts))
    generations = judged(judges, prompts, rollouts, texts, references)
    rows = zip(generations, kl, entropy, strict=True)
    return [replace(generation, kl=k, entropy=h) for generation, k, h in rows]


def logp_and_entropy(policy: nn.Module, batch: "AnyBatch") -> Tensor:
    """(B, 2): log-probability of each completion, and the sum of its tokens' entropies, nats."""
    scores = policy(batch, with_entropy=True)
    return torch.stack([scores.token_logps.sum(-1), scores.entropy.sum(-1)], dim=-1)


def reference_completions(
    judges: "RewardFunctions",
    prompts: Sequence["Example"],
    max_completion_length: int,
) -> dict[int, Generation]:
    """The rows' own completions, judged like a policy's. Collective if a reward model takes part.

    They are tokenised as for training: what is longer than `max_completion_length` is cut there for
    the judges of single completions, and then has not stopped; the text stays whole.

    Returns:
        By place; without the rows that have no column `completion`, or nothing in it.
    """
    from common.sampling.sampler import Rollouts
    from common.text.chat import render
    from common.text.tokenise import tokenize_completions

    texts = {i: text for i, e in enumerate(prompts) if (text := reference_text(e)).strip()}
    if not texts:
        return {}
    examples = [prompts[i] for i in texts]
    written = []  # as the policy would write it: in a conversation, by the chat template
    for example, text in zip(examples, texts.values(), strict=True):
        answer: Any = [{"role": "assistant", "content": text}] if example.messages else text
        asked = example.messages or example.prompt
        row = {**example.columns, "prompt": asked, "completion": answer}
        written += [one.completions[0] for one in render(row, "sft", judges.vocabulary.tokenizer)]
    cut = tokenize_completions(written, judges.vocabulary, max_completion_length)
    rollouts = Rollouts.of([one.ids for one in cut], [], [not one.is_truncated for one in cut])
    no_rouge = [""] * len(texts)  # with itself says nothing
    own = judged(judges, examples, rollouts, list(texts.values()), no_rouge)
    return dict(zip(texts, own, strict=True))


def reference_text(example: "Example") -> str:
    """A row's own completion, of messages the last one; empty if it has none."""
    from common.text.chat import is_messages

    value: Any = example.columns.get("completion")
    if is_messages(value):
        return str(value[-1].get("content") or "")
    return value if isinstance(value, str) else ""


def judged(
    judges: "RewardFunctions",
    prompts: Sequence["Example"],
    rollouts: "Rollouts",
    texts: Sequence[str],
    references: Sequence[str],
) -> list[Generation]:
    """Completions with their rewards and ROUGE.

    Collective if a reward model takes part. The N*K texts are what is kept of the completions;
    ROUGE is with the N references, none with an empty one.
    """
    from common.text.chat import as_answers

    by_judge: dict[str, Tensor] = {}
    if judges.functions:
        by_judge = judges.score(prompts, rollouts).by_function  # (N, K) each
    k = len(texts) // max(1, len(prompts))
    messages = [example.messages for example in prompts for _ in range(k)]
    tokenizer = judges.vocabulary.tokenizer
    given = as_answers(rollouts.texts(tokenizer), messages, tokenizer)
    found = judges.extracted_answers(given)  # what the rewards are of
    rewards = {judge: values.flatten().tolist() for judge, values in by_judge.items()}
    return [
        Generation(
            completion=text,
            num_tokens=len(rollouts.completion_ids[i]),
            stopped=bool(rollouts.has_stop[i]),
            completion_ids=rollouts.completion_ids[i],
            # nan: the judge does not apply to the row
            rewards={j: None if math.isnan(own[i]) else own[i] for j, own in rewards.items()},
            answers={judge: own[i] for judge, own in found.items()},
            **rouge(text, references[i // k]),
        )
        for i, text in enumerate(texts)
    ]


def rouge(text: str, reference: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L of a text; none with an empty reference."""
    from common.text.overlap import rouge_l, rouge_n

    if not reference.strip():
        return {}
    by_n = {f"rouge_{n}": rouge_n(text, reference, n) for n in (1, 2)}
    return by_n | {"rouge_l": rouge_l(text, reference)}


# ---- over all prompts ----------------------------------------------------------------------------


def summary(answers: Sequence[Answers], name: str) -> dict[str, Any] | None:
    """Means over the completions of a system, or REFERENCE; None without any.

    Returns:
        `length` (tokens) and `stop_rate` as numbers, and with intervals as `length_interval` and
        `stop_rate_interval`; `rewards` by judge if there is any, `entropy` (nats per token, mean
        over tokens) and the MEANS as intervals, None where nothing was measured;
        `distinct_completions`, a share; `pass_rates` by judge that only says 0 or 1, if there is
        any, as `pass_rates.pass_rates`.
    """
    from common.text.overlap import distinct_share

    rows = [row for row in answers if row.of(name)]
    if not rows:
        return None
    prompts = [row.prompt for row in rows for _ in row.all_of(name)]
    generations = [own for row in rows for own in row.all_of(name)]
    passed = {judge: passes(rows, name, judge) for judge in checks(answers)}
    lengths = [own.num_tokens for own in generations]
    length = mean_over_prompts(lengths, prompts)
    stop_rate = share_over_prompts([float(own.stopped) for own in generations], prompts)
    assert length
    assert stop_rate
    judges = dict.fromkeys(judge for own in generations for judge in own.rewards)
    rewards = {}
    for judge in judges:
        over = share_over_prompts if judge in passed else mean_over_prompts  # as its pass@1
        rewards[judge] = over([own.rewards.get(judge) for own in generations], prompts)
    return {
        "length": length["mean"],
        "length_interval": length,
        "stop_rate": stop_rate["mean"],
        "stop_rate_interval": stop_rate,
        "entropy": mean_over_prompts([own.entropy for own in generations], prompts, lengths),
        "distinct_completions": distinct_share([own.completion for own in generations]),
        **({"rewards": rewards} if rewards else {}),
        **({"pass_rates": passed} if passed else {}),
        **{
            key: mean_over_prompts([getattr(own, key) for own in generations], prompts)
            for key in MEANS
        },
    }


def checks(answers: Sequence[Answers]) -> list[str]:
    """The judges that gave nothing but 0 and 1 to any completion."""
    values: dict[str, set[float]] = {}
    for row in answers:
        for own in (row.all_of(name) for name in (*row.systems, REFERENCE)):
            for judge, reward in ((j, r) for one in own for j, r in one.rewards.items()):
                values.setdefault(judge, set()).update(() if reward is None else (reward,))
    return [judge for judge, found in values.items() if found and found <= {0, 1}]


def passes(rows: Sequence[Answers], name: str, judge: str) -> dict[str, Any]:
    """How often a system's completions pass a check."""
    from common.evaluation.pass_rates import pass_rates

    samples = [row.all_of(name) for row in rows]
    votes = [[one.answers.get(judge) for one in own] for own in samples]
    has_votes = any(judge in one.answers for own in samples for one in own)
    rewards = [[one.rewards.get(judge) for one in own] for own in samples]
    return pass_rates(rewards, votes if has_votes else None, [row.prompt for row in rows])
