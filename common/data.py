"""Rows become token ids, and token ids become each rank's batches.

`tokenize_rows` makes `Example`s and counts what it truncated and dropped; `BatchOrder` gives each
rank its rows as a function of the step; `pack` puts them into micro-batches by length. Reading and
checking the rows themselves is in `text/rows.py`, cutting a prompt in `text/truncate.py`.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from common import distributed
from common.config import CommonConfig, TrainConfig, UserError
from common.model import checks
from common.noise import permutation
from common.padding import AnyBatch, make_batch
from common.text import token_cache
from common.text.chat import Conversation, render, turn_end
from common.text.rows import COMPLETION_COLUMNS, Kind, Row, load_rows, row_source
from common.text.truncate import (
    encode,
    last_line,
    leading_ids,
    shared_cues,
    split_prompt,
    truncate_prompt,
    without_leading,
)

MOST_FILLER = 10_000  # rows of a batch that is larger than its data set
MERGE_SAMPLE = 1000  # rows whose prompt-completion boundary is checked
SHOWN_CHARACTERS = 60  # of a truncated prompt, in the report


@dataclass
class Example:
    """A prompt with its K completions as token ids.

    Attributes:
        row: Index into the rows it was made from.
        prompt: The prompt's text, after truncation.
        prompt_ids: Ids of `prompt`, never empty.
        completions: K lists of ids (sft 1, preference 2: chosen, rejected; prompts 0), each ending
            in the stop token unless it was truncated.
        columns: The row's other columns, for reward functions and reports.
        source: Where the row comes from, as `row_source` tells before truncation.
        messages: The prompt as messages, empty if the row holds text.
    """

    row: int
    prompt: str
    prompt_ids: list[int]
    completions: list[list[int]]
    columns: dict[str, Any]
    source: str = "other"
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, once, and of its completions."""
        return len(self.prompt_ids) + sum(map(len, self.completions))


@dataclass
class DataReport:
    """What became of the rows of a split. Lengths are tokens: median, 90 %, 99 %, maximum."""

    split: str
    num_rows: int
    num_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: int = 0  # its row, counted from 1
    num_prompts_truncated: int = 0
    truncated_prompt: str = ""  # the row of them that changed most, before and after
    num_cues_cut: int = 0
    num_completions_truncated: int = 0
    num_duplicates: int = 0
    num_boundary_merges: int = 0
    num_boundaries_checked: int = 0
    prompt_lengths: tuple[int, int, int, int] = (0, 0, 0, 0)
    completion_lengths: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def num_dropped(self) -> int:
        """Rows that did not become examples."""
        return self.dropped.total()

    @property
    def drop_counts(self) -> str:
        """The reasons for dropping rows, as `2 empty completion, 1 identical pair`."""
        return ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items()))

    def __str__(self) -> str:
        """Lines to print."""
        dropped = f" ({self.drop_counts})" if self.num_dropped else ""
        cues_cut = (
            f"  {self.num_cues_cut} prompts lost closing lines that others share, for which "
            "max_prompt_length leaves no room\n"
            if self.num_cues_cut
            else ""
        )
        lines = (
            f"{self.split}: {self.num_kept} of {self.num_rows} rows{dropped}, truncated "
            f"{self.num_prompts_truncated} prompts and {self.num_completions_truncated} "
            f"completions, {self.num_duplicates} duplicates\n{self.truncated_prompt}"
            f"{cues_cut}  tokens at 50/90/99/100 %: prompt {_slashed(self.prompt_lengths)}"
        )
        if self.num_boundaries_checked:
            lines += (
                f", completion {_slashed(self.completion_lengths)}; {self.num_boundary_merges} of "
                f"{self.num_boundaries_checked} would merge across the boundary"
            )
        return lines


class _Text(NamedTuple):
    """A prompt or a completion: its text, its ids, whether tokens, or some of its cue, were cut."""

    text: str
    ids: list[int]
    is_truncated: bool
    is_cue_cut: bool = False


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    kind: Kind,
    stop_id: int,
    max_prompt_length: int,
    max_completion_length: int,
    truncation: str,
    max_dropped_fraction: float,
    split: str,
) -> tuple[list[Example], DataReport]:
    """Tokenise prompts and completions apart and count what is lost.

    A completion ends at its first stop token; one is appended where there is none. What is longer
    than `max_completion_length` is cut there and then ends without a stop token. Rows are dropped
    when a prompt or a completion is blank, a pair is identical, a prompt's header alone is too
    long, or a conversation is.

    Args:
        rows: Rows of text: as `load_rows` gives them, messages rendered.
        tokenizer: A Hugging Face tokenizer, a fast one for `tldr`.
        kind: As in `load_rows`.
        stop_id: Token that ends a completion.
        max_prompt_length: Tokens.
        max_completion_length: Tokens, stop token included.
        truncation: `tldr` cuts the body of the prompt (`truncate_prompt`), `start` keeps the last
            tokens of the prompt, whatever they are.
        max_dropped_fraction: Refuse a split that loses more than this share of its rows.
        split: Name for the report and for errors.

    Raises:
        UserError: Too many rows dropped or none left; `tldr` without a fast tokenizer.
    """
    completion_columns = COMPLETION_COLUMNS[kind]
    prompts = _tokenize_prompts(
        [row["prompt"] for row in rows], tokenizer, max_prompt_length, truncation
    )
    texts = [
        tokenize_completions([row[c] for row in rows], tokenizer, stop_id, max_completion_length)
        for c in completion_columns
    ]
    groups = list(zip(*texts, strict=True)) if texts else [()] * len(rows)

    report = DataReport(split=split, num_rows=len(rows))
    examples: list[Example] = []
    cut: dict[int, _Text] = {}
    for index, (row, prompt, group) in enumerate(zip(rows, prompts, groups, strict=True)):
        reason = _drop_reason(prompt, group)
        if prompt is None or reason:
            report.dropped[reason] += 1
            report.first_dropped = report.first_dropped or index + 1
            continue
        report.num_prompts_truncated += prompt.is_truncated
        report.num_cues_cut += prompt.is_cue_cut
        if prompt.is_truncated:
            cut[index] = prompt
        report.num_completions_truncated += sum(completion.is_truncated for completion in group)
        ids = [completion.ids for completion in group]
        examples.append(_example(row, kind, index, prompt.text, prompt.ids, ids))

    report.num_kept = len(examples)
    report.truncated_prompt = _before_and_after(rows, cut, truncation)
    keys = {tuple(row[c] for c in ("prompt", *completion_columns)) for row in rows}
    report.num_duplicates = len(rows) - len(keys)
    report.prompt_lengths = _quantiles([len(e.prompt_ids) for e in examples])
    report.completion_lengths = _quantiles([len(c) for e in examples for c in e.completions])
    sample = examples[:: -(-len(examples) // MERGE_SAMPLE) or 1]
    pairs = [(e.prompt, completion.text) for e in sample for completion in groups[e.row]]
    report.num_boundaries_checked = len(pairs)
    report.num_boundary_merges = count_boundary_merges(pairs, tokenizer)
    _refuse_lossy(report, max_dropped_fraction)
    return examples, report


def load_examples(
    config: CommonConfig,
    dataset_name: str,
    split: str,
    kind: Kind,
    tokenizer: Any,
    stop_ids: Sequence[int],
    num_rows: int = 0,
) -> list[Example]:
    """Read, check and tokenise one split, and print what was lost; [] for an empty name.

    The embedded task has one data set, whatever the seed of the run.
    """
    if not dataset_name or not split:
        return []
    rows = load_rows(
        dataset_name,
        split,
        kind=kind,
        seed=0,
        num_rows=num_rows,
        # A configuration belongs to the data set it was given with, not to a second one.
        dataset_config=(dataset_name == config.dataset_name and config.dataset_config) or None,
    )
    rows = [_as_text(row, COMPLETION_COLUMNS[kind], tokenizer) for row in rows]
    settings: dict[str, Any] = {
        "kind": kind,
        "stop_id": stop_ids[0],
        "max_prompt_length": config.max_prompt_length,
        "max_completion_length": config.max_completion_length,
        "truncation": config.prompt_truncation,
    }
    limits: dict[str, Any] = {"max_dropped_fraction": config.max_dropped_fraction, "split": split}
    columns = ("prompt", *COMPLETION_COLUMNS[kind])
    file = token_cache.file_for(config.token_cache_dir, rows, columns, tokenizer, settings)
    stored = token_cache.read(file, rows)
    if stored:
        examples, report = _from_cache(rows, kind, *stored, **limits)
    else:
        examples, report = tokenize_rows(rows, tokenizer, **settings, **limits)
        token_cache.write(file, rows, examples, vars(report))
    distributed.print_rank0(report)
    return examples


def _as_text(row: Row, columns: Sequence[str], tokenizer: Any) -> Row:
    """The row rendered; blank messages become an empty text, without a template's words."""
    if isinstance(row["prompt"], str):
        return row
    names = ("prompt", *columns)
    blank = {n: "" for n in names if not any(m["content"].strip() for m in row[n])}
    return render(row, [name for name in columns if name not in blank], tokenizer) | blank


def _from_cache(
    rows: Sequence[Row],
    kind: Kind,
    entries: Sequence[token_cache.Entry],
    counts: dict[str, Any],
    *,
    max_dropped_fraction: float,
    split: str,
) -> tuple[list[Example], DataReport]:
    """What `tokenize_rows` would return, or raise, for the rows that these entries were made of."""
    report = DataReport(**(counts | {"split": split, "dropped": Counter(counts["dropped"])}))
    _refuse_lossy(report, max_dropped_fraction)
    return [_example(rows[entry.row], kind, *entry) for entry in entries], report


def load_splits(
    config: TrainConfig, kind: Kind, tokenizer: Any, stop_ids: Sequence[int]
) -> tuple[list[Example], list[Example]]:
    """The training and the held-out examples of a stage; the latter [] without a test split."""
    train, test = config.dataset_train_split, config.dataset_test_split
    name, rest = config.dataset_name, (kind, tokenizer, stop_ids)
    return (
        load_examples(config, name, train, *rest, num_rows=config.num_train_rows),
        load_examples(config, name, test, *rest, num_rows=config.num_eval_rows),
    )


def to_end_of_turn(
    examples: list[Example], tokenizer: Any, stop_ids: Sequence[int], model_config: Any
) -> list[Example]:
    """The examples as a reward model reads them; see `chat.TurnEnd`. Rows of text as they are.

    Raises:
        UserError: one is then longer than the model's positions.
    """
    conversations = [example for example in examples if example.messages]
    if not conversations:
        return examples
    end = turn_end(conversations[0].messages, tokenizer)
    closed = {
        e.row: replace(e, completions=[end.closed(c, c[-1] in stop_ids) for c in e.completions])
        for e in conversations
    }
    longest = max(len(e.prompt_ids) + len(c) for e in closed.values() for c in e.completions)
    limit = checks.max_positions(model_config)
    if limit is not None and longest > limit:
        raise UserError(
            f"a conversation with the end of its turn is {longest} tokens, and the model has "
            f"{limit} positions; lower --max_completion_length by {longest - limit}."
        )
    return [closed.get(example.row, example) for example in examples]


def count_boundary_merges(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> int:
    """How many (prompt, completion) pairs have other tokens when tokenised as one text.

    Such rows teach the model a split that it would not meet in running text; most often a missing
    space at the start of the completion is the cause.
    """
    prompts = encode([prompt for prompt, _ in pairs], tokenizer)
    completions = encode([completion for _, completion in pairs], tokenizer)
    joint = encode([prompt + completion for prompt, completion in pairs], tokenizer)
    return sum(p + c != j for p, c, j in zip(prompts, completions, joint, strict=True))


def _tokenize_prompts(
    prompts: Sequence[str], tokenizer: Any, max_length: int, truncation: str
) -> list[_Text | None]:
    """Prompts of at most `max_length` tokens, bos included; None where no cut makes one fit."""
    assert truncation in ("tldr", "start"), truncation
    leading = leading_ids(tokenizer)
    opening = tokenizer.decode(leading)
    room = max_length - len(leading)
    if room < 1:
        raise UserError(f"max_prompt_length is {max_length}, too little for more than the bos.")
    cues = shared_cues(text for text in prompts if not isinstance(text, Conversation))
    result: list[_Text | None] = []
    for prompt, ids in zip(prompts, encode(prompts, tokenizer), strict=True):
        may_be_cut = not isinstance(prompt, Conversation)
        prompt, ids = prompt.removeprefix(opening), without_leading(ids, leading)
        if len(ids) <= room:
            result.append(_Text(prompt, leading + ids, False))
        elif not may_be_cut:
            result.append(None)
        elif truncation == "start":
            ids = ids[-room:]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            result.append(_Text(text, leading + ids, True))
        elif not tokenizer.is_fast:
            raise UserError(
                "prompt_truncation 'tldr' needs a fast tokenizer; use 'start' with "
                f"{type(tokenizer).__name__}."
            )
        else:
            own = cues.get(last_line(prompt), "")
            endings = dict.fromkeys((own, last_line(own), ""))  # as much as there is room for
            tries = (truncate_prompt(prompt, tokenizer, room, ending) for ending in endings)
            text, ids = next(filter(None, tries), ("", []))
            is_cue_cut = not text.endswith(split_prompt(prompt, own)[2])
            result.append(_Text(text, leading + ids, True, is_cue_cut) if text else None)
    return result


def _before_and_after(rows: Sequence[Row], cut: Mapping[int, _Text], truncation: str) -> str:
    """A line that shows the side at which prompts were cut, of the row that changed most there."""
    part = slice(SHOWN_CHARACTERS) if truncation == "start" else slice(-SHOWN_CHARACTERS, None)
    verb = "began with" if truncation == "start" else "ended in"
    shown = {i: (rows[i]["prompt"][part], text.text[part]) for i, text in cut.items()}
    changed = [i for i, (before, after) in shown.items() if before != after]
    if not changed:
        return ""
    index = min(changed, key=lambda i: len(os.path.commonprefix([s[::-1] for s in shown[i]])))
    before, after = shown[index]
    return f"  row {index + 1}'s prompt {verb} {before!r}, now {after!r}\n"


def tokenize_completions(
    completions: Sequence[str], tokenizer: Any, stop_id: int, max_length: int
) -> list[_Text]:
    """Completions that end in the first stop token they have, in an appended one, or cut short."""
    stop_text = tokenizer.decode([stop_id])
    # The text is cut, not only the ids: GPT-2 has a token for two line breaks, which a stop at one
    # would miss. Where the text is not that of the token (SentencePiece bytes), the ids decide.
    if stop_text and encode([stop_text], tokenizer) == [[stop_id]]:
        completions = [text.split(stop_text, 1)[0] for text in completions]
    result = []
    for text, ids in zip(completions, encode(completions, tokenizer), strict=True):
        if stop_id in ids:
            ids = ids[: ids.index(stop_id)]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        ids = [*ids, stop_id]
        result.append(_Text(text, ids[:max_length], len(ids) > max_length))
    return result


def _drop_reason(prompt: _Text | None, completions: Sequence[_Text]) -> str:
    """Why a row cannot be used, empty if it can."""
    if prompt is None:
        return "prompt over max_prompt_length"
    if not prompt.text.strip():
        return "empty prompt"
    if any(not completion.text.strip() for completion in completions):
        return "empty completion"
    if len(completions) == 2 and completions[0].ids == completions[1].ids:
        return "identical pair"
    return ""


def _example(
    row: Row, kind: Kind, index: int, prompt: str, prompt_ids: list[int], ids: list[list[int]]
) -> Example:
    """The example of a row, with what tokenising leaves as it is."""
    tokenized = ("prompt", *COMPLETION_COLUMNS[kind])
    columns = {k: v for k, v in row.items() if k not in tokenized}
    messages = getattr(row["prompt"], "messages", [])
    return Example(index, prompt, prompt_ids, ids, columns, row_source(row), messages)


def _refuse_lossy(report: DataReport, max_dropped_fraction: float) -> None:
    """Raise a UserError if too few rows are left."""
    fraction = report.num_dropped / report.num_rows
    if fraction > max_dropped_fraction or fraction == 1:
        raise UserError(
            f"split {report.split!r} would lose {report.num_dropped} of {report.num_rows} rows "
            f"({report.drop_counts}; the first is row {report.first_dropped}) and "
            f"max_dropped_fraction is {max_dropped_fraction}; "
            "clean the data or change the length limits or max_dropped_fraction."
        )


def _quantiles(lengths: Sequence[int]) -> tuple[int, int, int, int]:
    """Median, 90 %, 99 % and maximum: the smallest length that the share does not exceed."""
    if not lengths:
        return (0, 0, 0, 0)
    ordered = sorted(lengths)
    median, p90, p99, longest = (
        ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90, 99, 100)
    )
    return median, p90, p99, longest


def _slashed(numbers: Sequence[int]) -> str:
    return "/".join(map(str, numbers))


class HasTokens(Protocol):
    """What is put in order: a row, or rows that stay together."""

    @property
    def num_tokens(self) -> int:
        """Its tokens."""


class BatchOrder:
    """Which rows a rank works on at a step: a function of (seed, step), not a state.

    Each epoch is a fresh permutation of all rows. A batch never reaches into the next epoch: the
    last one is filled up with None, so that every rank always holds `batch_size / world_size`
    entries. The ranks' entries together do not depend on their number. With `lengths` long and
    short rows are dealt out evenly, so that ranks do not wait for each other.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        seed: int,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        lengths: Sequence[int] = (),
    ) -> None:
        """Set up the order.

        Args:
            num_rows: Rows of an epoch.
            batch_size: Rows of a step over all ranks, a multiple of `world_size`.
            seed: Seed of the permutations.
            rank: This process.
            world_size: Number of processes.
            shuffle: False keeps the rows in their order, for evaluation.
            lengths: of each row, in tokens; empty deals the rows out without looking at it.
        """
        assert num_rows > 0
        assert batch_size > 0
        assert batch_size % world_size == 0, f"batch_size {batch_size} over {world_size} ranks"
        assert 0 <= rank < world_size
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.lengths = lengths
        self._epoch_order: tuple[int, list[int]] = (-1, [])  # the last epoch asked for

    @classmethod
    def of_training(cls, config: TrainConfig, examples: Sequence[HasTokens]) -> "BatchOrder":
        """The order in which this process trains on the examples.

        Raises:
            UserError: the global batch cannot be shared evenly, or is nearly all filler.
        """
        rank, world_size = distributed.rank(), distributed.world_size()
        if config.batch_size % world_size != 0:
            raise UserError(
                f"--batch_size is {config.batch_size}, which {world_size} processes cannot share "
                f"evenly; make it a multiple of {world_size}."
            )
        most = max(MOST_FILLER, len(examples))
        if config.batch_size > most:
            raise UserError(
                f"--batch_size is {config.batch_size}, and there are {len(examples)} rows to take "
                f"a batch of; lower it to {most} or less."
            )
        lengths = [example.num_tokens for example in examples]
        return cls(
            len(examples),
            config.batch_size,
            seed=config.seed,
            rank=rank,
            world_size=world_size,
            lengths=lengths,
        )

    def total_steps(self, config: TrainConfig) -> int:
        """Steps of a run: `max_steps`, or what `num_train_epochs` come to."""
        return config.max_steps or math.ceil(config.num_train_epochs * self.steps_per_epoch)

    def epochs(self, num_steps: int) -> float:
        """Passes over the rows that `num_steps` steps make."""
        return num_steps / self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every row once."""
        return -(-self.num_rows // self.batch_size)

    def rows(self, step: int) -> list[int | None]:
        """This rank's rows at a step (counted from 0); None stands for a row of weight 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        batch: list[int | None] = [*self._order(epoch)[start : start + self.batch_size]]
        if self.lengths:
            batch.sort(key=lambda row: self.lengths[row or 0])
        batch += [None] * (self.batch_size - len(batch))
        if not self.lengths:
            return batch[self.rank :: self.world_size]
        # Dealt out like cards, every other round in reverse: 0 1 2 2 1 0 0 1 2 ...
        rounds = [batch[i : i + self.world_size] for i in range(0, len(batch), self.world_size)]
        return [cards[:: 1 - 2 * (i % 2)][self.rank] for i, cards in enumerate(rounds)]

    def rows_until(self, num_steps: int) -> list[int]:
        """The rows that the first steps see, on all ranks, in ascending order."""
        if num_steps >= self.steps_per_epoch:
            return list(range(self.num_rows))
        return sorted(self._order(0)[: num_steps * self.batch_size])

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            epoch = 0
        if self._epoch_order[0] != epoch:
            rows = list(range(self.num_rows))
            order = permutation(self.num_rows, self.seed, epoch) if self.shuffle else rows
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]


@dataclass
class Piece:
    """Completions of one prompt that go through a forward pass together.

    Attributes:
        prompt_ids: Never empty.
        completions: K lists of ids.
        places: Where the caller keeps what belongs to each, K numbers; empty in a filler.
        weight: What it counts as in `micro_batch_size`.
    """

    prompt_ids: list[int]
    completions: list[list[int]]
    places: list[int]
    weight: int = 1


def cut_group(
    prompt_ids: list[int],
    completions: list[list[int]],
    places: list[int],
    config: CommonConfig,
) -> list[Piece]:
    """A prompt with its completions in as few pieces of about equal size as the limits allow."""
    num_pieces = 0
    while True:
        num_pieces += 1
        size = -(-len(places) // num_pieces)
        parts = [slice(start, start + size) for start in range(0, len(places), size)]
        pieces = [
            Piece(prompt_ids, completions[part], places[part], len(places[part])) for part in parts
        ]
        if size == 1 or all(fits([piece], config) for piece in pieces):
            return pieces


def cost(pieces: Sequence[Piece], layout: str) -> int:
    """Tokens that a forward pass over these pieces computes, padding included."""
    if layout == "shared_prefix":
        return sum(len(piece.prompt_ids) + sum(map(len, piece.completions)) for piece in pieces)
    longest = max(len(piece.prompt_ids) for piece in pieces)
    longest += max(len(ids) for piece in pieces for ids in piece.completions)
    return longest * sum(len(piece.completions) for piece in pieces)


def fits(pieces: Sequence[Piece], config: CommonConfig) -> bool:
    """Whether the pieces may share a forward pass."""
    weight = sum(piece.weight for piece in pieces)
    within_budget = cost(pieces, config.layout) <= config.micro_batch_tokens
    return weight <= config.micro_batch_size and within_budget


def pack(
    pieces: Sequence[Piece], config: CommonConfig, num_completions: int = 1
) -> list[list[Piece]]:
    """Put pieces together, the longest first, until a limit is reached. Collective.

    Every rank gets as many packs: a rank that has fewer of its own gets some that hold a filler,
    the shortest possible prompt with `num_completions` completions, which count nowhere.
    """
    packs: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -cost([piece], config.layout)):
        if packs and fits([*packs[-1], piece], config):
            packs[-1].append(piece)
        else:
            packs.append([piece])
    num_packs = torch.tensor(len(packs))
    missing = int(distributed.all_reduce_max(num_packs)) - len(packs)
    return packs + [[Piece([0], [[0]] * num_completions, [])]] * missing


def collate(pieces: Sequence[Piece], layout: str, pad_id: int) -> AnyBatch:
    """The pieces as one batch, a piece's completions next to each other."""
    return make_batch(
        layout,
        [piece.prompt_ids for piece in pieces],
        [piece.completions for piece in pieces],
        pad_id,
        is_real=[bool(piece.places) for piece in pieces],
        places=[p for piece in pieces for p in piece.places or [0] * len(piece.completions)],
    )


def micro_batches(
    examples: Sequence[Example],
    rows: Sequence[int | None],
    config: CommonConfig,
    pad_id: int,
) -> list[AnyBatch]:
    """This rank's rows of a step, packed by length; as many batches on every rank. Collective.

    The completions of a row stay together; completion k of row n has the place n * K + k. A row
    that is None counts nowhere.
    """
    num_completions = len(examples[0].completions)
    assert num_completions > 0, "prompts without completions have no loss"
    pieces = [
        Piece(
            examples[row].prompt_ids,
            examples[row].completions,
            list(range(row * num_completions, (row + 1) * num_completions)),
        )
        for row in rows
        if row is not None
    ]
    packs = pack(pieces, config, num_completions)
    return [collate(part, config.layout, pad_id) for part in packs]


def one_of_each_prompt(examples: Sequence[Example], number: int) -> list[Example]:
    """The first example of each of so many prompts, for tables: the others would show it again."""
    firsts: dict[str, Example] = {}
    for example in examples:
        firsts.setdefault(example.prompt, example)
    return list(firsts.values())[:number]


def row_numbers(examples: Sequence[Example]) -> torch.Tensor:
    """(rows,) int64, where each example was in its data set: some rows may have been dropped."""
    return torch.tensor([example.row for example in examples])


def prompts(
    examples: Sequence[Example], rows: Sequence[int | None]
) -> tuple[list[Example], torch.Tensor]:
    """This rank's prompts of a step, and which are real, (N,) bool.

    The first example stands in for a row that is None: it is sampled from, so that every rank makes
    as many forward passes, and counts nowhere.
    """
    real = torch.tensor([row is not None for row in rows])
    return [examples[row or 0] for row in rows], real
