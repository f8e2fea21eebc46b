"""`completions.jsonl`: what every system answered to every prompt, and what was measured of it.

One line per prompt: `id` (its row among the prompts), `prompt`, `reference` (the row's own
completion, null where it has none), `systems` (by name), `verdicts` (of judges that compare two
completions) and `prompt_ids`, as the policies read it. Every number about generations in
`results.json` is a function of this file.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.record.jsonl import json_line, read_jsonl, write_atomically

FILE = "completions.jsonl"
REFERENCE = "reference completion"  # the name under which a row's own completion is compared


@dataclass(frozen=True)
class Generation:
    """A completion and what was measured of it; None where it was not, or means nothing.

    Attributes:
        completion: The text, without the stop token.
        num_tokens: Of the policies' tokenizer, stop token included.
        stopped: Whether it ended by itself: False = by the length limit.
        rewards: By judge; None where the judge does not apply to the row.
        kl: log pi - log ref of the whole completion, nats; an estimate of KL(pi || ref) at
            temperature 1, and None at any other.
        entropy: Of the policy's next-token distribution at temperature 1, mean over the
            completion's tokens, nats.
        rouge_1: F1 with the row's own completion (Lin 2004), as of ROUGE-2 and ROUGE-L.
        rouge_2: See there.
        rouge_l: See there.
        repeated_3: See `overlap.repeated_share`, of 3 words.
        copied_2: See `overlap.copied_share`, of 2 words.
        copied_3: Of 3 words.
        copied_4: Of 4 words.
        completion_ids: Of the policies' tokenizer, stop token included: what the KL is of.
    """

    completion: str
    num_tokens: int
    stopped: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    kl: float | None = None
    entropy: float | None = None
    rouge_1: float | None = None
    rouge_2: float | None = None
    rouge_l: float | None = None
    repeated_3: float | None = None
    copied_2: float | None = None
    copied_3: float | None = None
    copied_4: float | None = None
    completion_ids: list[int] = field(default_factory=list)


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


def system_names(answers: Sequence[Answers]) -> list[str]:
    """The systems that answered, in order, with REFERENCE last if a row has a completion."""
    names = list(answers[0].systems) if answers else []
    return [*names, REFERENCE] if any(row.reference for row in answers) else names


def write(answers: Sequence[Answers], output_dir: Path) -> None:
    """Write the file, atomically. Rank 0 only."""
    write_atomically(output_dir / FILE, (json_line(asdict(row)) for row in answers))


def read(output_dir: Path) -> list[Answers]:
    """What `write` wrote; [] without the file."""
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
