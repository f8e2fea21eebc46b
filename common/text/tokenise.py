"""Rows as token ids, with counts of what was dropped and truncated.

`load_examples` reads a split, renders messages, and tokenises prompts and completions apart.
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from common import distributed
from common.config.stages import CommonConfig
from common.errors import UserError
from common.text import shared_rows
from common.text.chat import render
from common.text.data_report import DataReport
from common.text.example import Example, Vocabulary
from common.text.reading import load_rows
from common.text.rows import Row
from common.text.truncate import (
    CHUNK_ROWS,
    closing_cue,
    encode,
    leading_ids,
    truncate_prompt,
    without_leading,
)

MERGE_SAMPLE = 1000  # rows whose prompt-completion boundary is checked
SHOWN_CHARACTERS = 60  # of each end of a long text in `marked`


class _Text(NamedTuple):
    """A prompt or a completion, as it is trained."""

    text: str
    ids: list[int]  # none of a prompt that no cut makes fit
    num_tokens: int  # before the cut, with bos or stop token

    @property
    def is_truncated(self) -> bool:
        return len(self.ids) < self.num_tokens


def load_examples(
    config: CommonConfig,
    dataset_name: str,
    split: str,  # see `reading.held_out_split` for one to evaluate on
    kind: str,  # `sft`, `preference` or `prompts`
    vocabulary: Vocabulary,
    num_rows: int = 0,  # take the first rows only; 0 takes all
) -> Sequence[Example]:
    """Read, check and tokenise one split, and print what was lost; [] for an empty name or split.

    The first process of each machine does it, and shares many rows with the others. Collective.

    Raises:
        UserError: Too many rows are dropped, or all.
    """
    if not dataset_name or not split:
        return []

    def read() -> list[Example]:
        raw_rows = load_rows(config, dataset_name, split, kind, num_rows)
        bar = distributed.progress_bar("rendering", len(raw_rows), unit="row", items=raw_rows)
        rows = [
            row
            for number, raw in enumerate(bar)
            for row in render(raw, kind, vocabulary.tokenizer, number)
        ]
        with distributed.tokenizer_threads():
            examples, report = tokenize_rows(rows, vocabulary, config, split)
        if kind == "sft":
            report.num_conversations = len({row.number for row in rows if row.messages})
        distributed.print_rank0(report)
        report.refuse_lossy(config.max_dropped_fraction)
        return examples

    return shared_rows.run_once_per_host(read)


def tokenize_rows(
    rows: Sequence[Row],
    vocabulary: Vocabulary,  # with a fast tokenizer, to cut the body of a prompt
    config: CommonConfig,
    split: str,  # its name in the report and in errors
) -> tuple[list[Example], DataReport]:
    """Tokenise prompts and completions separately; count what is dropped and truncated.

    A completion ends at its first stop token; one is appended where there is none. What is longer
    than `max_completion_length` is cut there and then ends without a stop token. Rows are dropped
    when a prompt or a completion is blank, a pair is identical, a prompt's header alone is too
    long, or a conversation is, or its template leaves out part of the answer.

    Raises:
        UserError: No prompt has the cue that was asked for.
    """
    cue = config.prompt_cue.replace("\\n", "\n")
    if cue and not any(closing_cue(row.prompt, cue) for row in rows):
        raise UserError(f"--prompt_cue is {cue!r}, in which no prompt of split {split!r} ends.")
    limits = {"prompt": config.max_prompt_length, "completion": config.max_completion_length}
    report = DataReport(split, len(rows), limits)
    examples: list[Example] = []
    boundaries: list[list[tuple[str, str]]] = []  # prompt and completion, as tokenised, per example
    remaining = iter(distributed.progress_bar("tokenising", len(rows), unit="row", items=rows))
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        prompts = _tokenize_prompts(chunk, vocabulary.tokenizer, config, cue)
        texts = [text for row in chunk for text in row.completions]
        encoded = iter(tokenize_completions(texts, vocabulary, config.max_completion_length))
        for row, prompt in zip(chunk, prompts, strict=True):
            completions = list(islice(encoded, len(row.completions)))
            reason = _drop_reason(row, prompt, completions)
            if not reason.startswith("empty"):
                report.lengths["prompt"].append(prompt.num_tokens)
                report.lengths["completion"] += [text.num_tokens for text in completions]
            if reason:
                report.dropped[reason] += 1
                report.first_dropped = report.first_dropped or row.number + 1
                continue
            report.num_completions += len(completions)
            report.num_prompts_truncated += prompt.is_truncated
            report.num_completions_truncated += sum(text.is_truncated for text in completions)
            examples.append(
                Example(
                    row=row.number,
                    prompt=prompt.text,
                    prompt_ids=prompt.ids,
                    completions=[text.ids for text in completions],
                    columns=row.columns,
                    source=row.source,
                    messages=row.messages,
                )
            )
            boundaries.append([(prompt.text, completion.text) for completion in completions])
    report.num_kept = len(examples)
    every = -(-len(boundaries) // MERGE_SAMPLE) or 1
    sample = [boundary for of_row in boundaries[::every] for boundary in of_row]
    report.num_boundaries_checked = len(sample)
    report.num_boundary_merges = count_boundary_merges(sample, vocabulary.tokenizer)
    return examples, report


def _tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    config: CommonConfig,
    cue: str,  # that a flag gives; see `closing_cue`
) -> list[_Text]:
    """Prompts that fit, without ids where no cut makes one fit: a text with the tokenizer's bos.

    A conversation is the tokens of its template's text, as in `apply_chat_template`.
    """
    leading = leading_ids(tokenizer)
    opening = tokenizer.decode(leading)
    room = config.max_prompt_length - len(leading)
    result: list[_Text] = []
    for row, ids in zip(rows, encode([row.prompt for row in rows], tokenizer), strict=True):
        if row.messages:
            fits = len(ids) <= config.max_prompt_length
            result.append(_Text(row.prompt, ids if fits else [], len(ids)))
            continue
        prompt, ids = row.prompt.removeprefix(opening), without_leading(ids, leading)
        whole = leading + ids
        if len(ids) > room and config.prompt_truncation == "start":
            ids = ids[len(ids) - room :]
            prompt = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        elif len(ids) > room:
            shorter = truncate_prompt(prompt, tokenizer, room, closing_cue(prompt, cue))
            prompt, ids = shorter or (prompt, [])
        result.append(_Text(prompt, leading + ids if ids else [], len(whole)))
    return result


def marked(example: Example, tokenizer: Any) -> str:
    """A row decoded from its ids, the trained completion in [[]]; long texts are shortened."""
    shown = []
    for text in map(tokenizer.decode, (example.prompt_ids, *example.completions)):
        is_long = len(text) > 2 * SHOWN_CHARACTERS
        short = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}" if is_long else text
        shown.append(repr(short)[1:-1])
    prompt, completion = shown
    return f"{prompt}[[{completion}]]"


def tokenize_completions(
    completions: Sequence[str], vocabulary: Vocabulary, max_length: int
) -> list[_Text]:
    """Completions that end in the first stop token they have, in an appended one, or cut short."""
    tokenizer, stop_ids = vocabulary.tokenizer, vocabulary.stop_ids
    # The text is cut, not only the ids: GPT-2 has a token for two line breaks, which a stop at one
    # would miss. Where the text is not that of the token (SentencePiece bytes), the ids decide.
    ids_of_stops = {tokenizer.decode([stop_id]): stop_id for stop_id in stop_ids}
    stops = [t for t, i in ids_of_stops.items() if t and encode([t], tokenizer) == [[i]]]
    pattern = re.compile("(" + ("|".join(map(re.escape, stops)) or "(?!)") + ")")
    split = [pattern.split(text, maxsplit=1) for text in completions]  # at the first stop's text
    result = []
    encoded = encode([text for text, *_ in split], tokenizer)
    for (text, *stop), ids in zip(split, encoded, strict=True):
        last = ids_of_stops[stop[0]] if stop else stop_ids[0]
        if not set(stop_ids).isdisjoint(ids):
            end = next(i for i, token in enumerate(ids) if token in stop_ids)
            ids, last = ids[:end], ids[end]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        ids = [*ids, last]
        result.append(_Text(text, ids[:max_length], len(ids)))
    return result


def _drop_reason(row: Row, prompt: _Text, completions: Sequence[_Text]) -> str:
    """The reason to drop a row, empty if there is none."""
    reasons = {
        "empty prompt": not prompt.text.strip(),
        "prompt over max_prompt_length": not prompt.ids,
        "answer left out in part by the chat template": row.is_partial,
        "empty completion": any(not completion.text.strip() for completion in completions),
        "identical pair": len(completions) == 2 and completions[0].ids == completions[1].ids,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def count_boundary_merges(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> int:
    """Number of (prompt, completion) pairs with other tokens when tokenised as one text.

    Such rows teach the model a split that it would not meet in running text; most often a missing
    space at the start of the completion is the cause.
    """
    prompts = encode([prompt for prompt, _ in pairs], tokenizer)
    completions = encode([completion for _, completion in pairs], tokenizer)
    joint = encode([prompt + completion for prompt, completion in pairs], tokenizer)
    return sum(p + c != j for p, c, j in zip(prompts, completions, joint, strict=True))
