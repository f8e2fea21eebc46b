"""Rows become token ids, and what is lost on the way is counted.

`load` reads a split, renders messages, and tokenises prompts and completions apart, or takes the
result of an earlier run from the cache.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from common import distributed
from common.config import CommonConfig
from common.errors import UserError
from common.text import hub, token_cache
from common.text.chat import Conversation, Turns, render
from common.text.data_report import DataReport, progress
from common.text.example import Example
from common.text.forms import Opening, Row
from common.text.rows import (
    COMPLETION_COLUMNS,
    data_files,
    identity,
    load_rows,
    options,
    row_source,
)
from common.text.truncate import (
    CHUNK_ROWS,
    encode,
    last_line,
    leading_ids,
    shared_cues,
    split_prompt,
    truncate_prompt,
    without_leading,
)

MERGE_SAMPLE = 1000  # rows whose prompt-completion boundary is checked
SHOWN_CHARACTERS = 60  # of a truncated prompt, in the report
# Flags on which tokens depend
SETTINGS = ("max_prompt_length", "max_completion_length", "prompt_truncation", "column_map")


class _Text(NamedTuple):
    """A prompt or a completion: its text, its ids, whether tokens, or some of its cue, were cut.

    Of several turns also which ids are trained, as in `Example`, and how many turns there were.
    """

    text: str
    ids: list[int]
    is_truncated: bool
    is_cue_cut: bool = False
    trained: Sequence[list[int]] = ()
    num_turns: int = 1


def load(
    config: CommonConfig,
    dataset_name: str,
    split: str,
    kind: str,
    tokenizer: Any,
    stop_id: int,
    num_rows: int = 0,
) -> Sequence[Example]:
    """Read, check and tokenise one split, and print what was lost; `kind` as in `load_rows`.

    Raises:
        UserError: Too many rows are dropped, or all.
    """
    how = options(config, dataset_name)
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= {"data": [dataset_name, split, kind, num_rows], "stop_id": stop_id}
    of_data = partial(identity, dataset_name, split, **how)
    file = token_cache.file_for(config.token_cache_dir, tokenizer, settings, of_data)
    with distributed.host_first():
        stored = token_cache.read(file)
        if stored is None:
            notes: list[str] = []
            rows = load_rows(
                dataset_name, split, kind=kind, num_rows=num_rows, tell=notes.append, **how
            )
            texts = (render(row, COMPLETION_COLUMNS[kind], tokenizer) for row in rows)
            rows = list(progress(texts, "rendering", len(rows)))
            found, report = tokenize_rows(
                rows, tokenizer, config, kind=kind, stop_id=stop_id, split=split
            )
            report.notes = notes
            is_kept = found and len(rows) >= token_cache.MIN_ROWS
            if file and is_kept and distributed.is_first_on_host():
                token_cache.write(file, found, vars(report))
                stored = token_cache.read(file)  # in place of what was made, which takes memory
    is_on_hub = dataset_name != "synthetic" and not data_files(dataset_name, split)
    if is_on_hub and dataset_name == config.dataset_name:
        data = hub.rows_of(dataset_name, split, config.dataset_config, config.dataset_revision)
        config.dataset_commit = hub.commit_of(data)  # read above; kept with the run
    if stored is not None:
        report = DataReport(**stored.report)
    distributed.print_rank0(report)
    report.refuse_lossy(config.max_dropped_fraction)
    return found if stored is None else stored


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    config: CommonConfig,
    *,
    kind: str,
    stop_id: int,
    split: str,
) -> tuple[list[Example], DataReport]:
    """Tokenise prompts and completions apart and count what is lost.

    A completion ends at its first stop token; one is appended where there is none. What is longer
    than `max_completion_length` is cut there and then ends without a stop token. Rows are dropped
    when a prompt or a completion is blank, a pair is identical, a prompt's header alone is too
    long, or a conversation is.

    Args:
        rows: Rows of text: as `load_rows` gives them, messages rendered.
        tokenizer: A Hugging Face tokenizer, a fast one to cut the body of a prompt.
        config: The limits, and which part of a prompt is cut.
        kind: As in `load_rows`.
        stop_id: Token that ends a completion.
        split: Name for the report and for errors.

    Raises:
        UserError: A slow tokenizer and a prompt to cut.
    """
    columns = COMPLETION_COLUMNS[kind]
    report = DataReport(split=split, num_rows=len(rows))
    kept: list[Example] = []
    answers: list[list[str]] = []  # of those kept
    num_turns = 0  # of the assistant in conversations
    cut: dict[int, _Text] = {}
    tokenized = _in_chunks(rows, columns, tokenizer, stop_id, config)
    for index, (row, (prompt, *completions)) in enumerate(zip(rows, tokenized, strict=True)):
        if reason := _drop_reason(prompt, completions):
            report.dropped[reason] += 1
            report.first_dropped = report.first_dropped or index + 1
            continue
        if prompt.is_truncated:
            cut[index] = prompt
        report.num_cues_cut += prompt.is_cue_cut
        report.num_completions_truncated += sum(text.is_truncated for text in completions)
        kept.append(_example(index, row, prompt, completions, columns))
        answers.append([text.text for text in completions])
        num_turns += completions[0].num_turns if kept[-1].messages and kind == "sft" else 0

    report.num_kept, report.num_prompts_truncated = len(kept), len(cut)
    distinct = {tuple(rows[e.row][name] for name in ("prompt", *columns)) for e in kept}
    report.num_duplicates = len(kept) - len(distinct)
    report.truncated_prompt = _before_and_after(rows, cut, config.prompt_truncation)
    report.prompt_lengths = _quantiles([len(e.prompt_ids) for e in kept])
    report.completion_lengths = _quantiles([len(c) for e in kept for c in e.completions])
    report.answers = _answers(kept, num_turns) if num_turns else ""
    sample = range(0, len(kept), -(-len(kept) // MERGE_SAMPLE) or 1)
    pairs = [(kept[i].prompt, text) for i in sample for text in answers[i]]
    report.num_boundaries_checked = len(pairs)
    report.num_boundary_merges = count_boundary_merges(pairs, tokenizer)
    return kept, report


def _in_chunks(
    rows: Sequence[Row],
    columns: Sequence[str],
    tokenizer: Any,
    stop_id: int,
    config: CommonConfig,
) -> Iterator[tuple[Any, ...]]:
    """Each row's prompt and completions, by as many threads as there are cores.

    A tokenizer leaves Python to the others while it works.
    """
    texts = (row["prompt"] for row in rows)
    cues = shared_cues(text for text in texts if not isinstance(text, Conversation))

    def tokenized(start: int) -> list[tuple[Any, ...]]:
        part = rows[start : start + CHUNK_ROWS]
        prompts = _tokenize_prompts([row["prompt"] for row in part], tokenizer, config, cues)
        limit = config.max_completion_length
        completions = (
            tokenize_completions([row[c] for row in part], tokenizer, stop_id, limit)
            for c in columns
        )
        return list(zip(prompts, *completions, strict=True))

    starts = range(0, len(rows), CHUNK_ROWS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(tokenized, starts)
        yield from progress(chain.from_iterable(parts), "tokenising", len(rows))


def _tokenize_prompts(
    prompts: Sequence[str], tokenizer: Any, config: CommonConfig, cues: Mapping[str, str]
) -> list[_Text | None]:
    """Prompts that fit, bos included; None where no cut makes one fit."""
    leading = leading_ids(tokenizer)
    opening = tokenizer.decode(leading)
    room = config.max_prompt_length - len(leading)
    if room < 1:
        raise UserError(
            f"max_prompt_length is {config.max_prompt_length}, too little for more than the bos."
        )
    result: list[_Text | None] = []
    for prompt, ids in zip(prompts, encode(prompts, tokenizer), strict=True):
        if isinstance(prompt, Opening):
            bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
            start = leading or [eos if bos is None else bos]
            result.append(_Text(tokenizer.decode(start), start, False))
            continue
        may_be_cut = not isinstance(prompt, Conversation)
        prompt, ids = prompt.removeprefix(opening), without_leading(ids, leading)
        if len(ids) <= room:
            result.append(_Text(prompt, leading + ids, False))
        elif not may_be_cut:
            result.append(None)
        elif config.prompt_truncation == "start":
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


def _example(
    index: int, row: Row, prompt: _Text, completions: Sequence[_Text], columns: Sequence[str]
) -> Example:
    """A row in tokens; only a conversation has one completion of which not all is trained."""
    ids = [text.ids for text in completions]
    others = {k: v for k, v in row.items() if k not in ("prompt", *columns)}
    messages = getattr(row["prompt"], "messages", [])
    trained = [list(own) for text in completions for own in text.trained]
    return Example(index, prompt.text, prompt.ids, ids, others, row_source(row), messages, trained)


def _answers(examples: Sequence[Example], num_turns: int) -> str:
    """A line on what the completions of conversations hold of the assistant's turns."""
    chats = [e for e in examples if e.messages]
    ranges = [own for e in chats for own in e.answers]
    share = sum(end - start for start, end in ranges) / sum(len(e.completions[0]) for e in chats)
    return (
        f"  conversations: {num_turns / len(chats):.3g} answers each, {share:.0%} of the "
        f"completions' tokens; {num_turns - len(ranges)} answers lost to max_completion_length"
    )


def marked(example: Example, tokenizer: Any) -> str:
    """A row decoded from its ids, with what is trained in [[]]; long parts without their middle."""
    (ids,) = example.completions
    last, parts = 0, [example.prompt_ids]
    for start, end in example.answers:
        parts += [ids[last:start], ids[start:end]]
        last = end
    found = ""
    for i, text in enumerate(map(tokenizer.decode, parts)):
        is_long = len(text) > 2 * SHOWN_CHARACTERS
        shown = f"{text[:SHOWN_CHARACTERS]} ... {text[-SHOWN_CHARACTERS:]}" if is_long else text
        line = repr(shown)[1:-1]
        found += f"[[{line}]]" if i and i % 2 == 0 else line
    return found


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
    return f"row {index + 1}'s prompt {verb} {before!r}, now {after!r}"


def tokenize_completions(
    completions: Sequence[str], tokenizer: Any, stop_id: int, max_length: int
) -> list[_Text]:
    """Completions that end in the first stop token they have, in an appended one, or cut short.

    So does the last of several turns; of those before it all is there that the template writes.
    """
    stop_text = tokenizer.decode([stop_id])
    # The text is cut, not only the ids: GPT-2 has a token for two line breaks, which a stop at one
    # would miss. Where the text is not that of the token (SentencePiece bytes), the ids decide.
    if not stop_text or encode([stop_text], tokenizer) != [[stop_id]]:
        stop_text = ""
    texts = [text.parts[-1] if isinstance(text, Turns) else text for text in completions]
    if stop_text:
        texts = [text.split(stop_text, 1)[0] for text in texts]
    result = []
    for whole, text, ids in zip(completions, texts, encode(texts, tokenizer), strict=True):
        if stop_id in ids:
            ids = ids[: ids.index(stop_id)]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        ids = [*ids, stop_id]
        if isinstance(whole, Turns):
            result.append(_tokenize_turns(whole, ids, tokenizer, stop_text, max_length))
        else:
            result.append(_Text(text, ids[:max_length], len(ids) > max_length))
    return result


def _tokenize_turns(
    turns: Turns, last: list[int], tokenizer: Any, stop_text: str, max_length: int
) -> _Text:
    """A conversation behind its prompt, with the ids of its last turn: an answer ends as that does.

    Its stop token is trained also where the template's {% generation %} leaves it out, and what
    follows the stop token is read only. What follows the last trained id is left out.
    """
    parts: list[str] = []
    for answer, read in zip(turns.parts[:-1:2], turns.parts[1::2], strict=True):
        stop = (answer + read).find(stop_text, 0, len(answer + stop_text)) if stop_text else -1
        end = len(answer) if stop < 0 else stop + len(stop_text)
        parts += [(answer + read)[:end], (answer + read)[end:]]
    ids: list[int] = []
    ends = [0]
    for own in [*encode(parts, tokenizer), last]:
        ids += own
        ends.append(len(ids))
    found = list(zip(ends[::2], ends[1::2], strict=True))
    trained = [[a, min(b, max_length)] for a, b in found if a < min(b, max_length)]
    ids, is_cut = ids[: trained[-1][1] if trained else 0], len(ids) > max_length
    return _Text(turns, ids, is_cut, False, trained, sum(a < b for a, b in found))


def _drop_reason(prompt: _Text | None, completions: Sequence[_Text]) -> str:
    """Why a row cannot be used, empty if it can."""
    if prompt is None:
        return "prompt over max_prompt_length"
    if not prompt.text.strip():
        return "empty prompt"
    if any(not completion.text.strip() for completion in completions):
        return "empty completion"
    if not all(completion.ids for completion in completions):
        return "no answer within max_completion_length"
    if len(completions) == 2 and completions[0].ids == completions[1].ids:
        return "identical pair"
    return ""


def count_boundary_merges(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> int:
    """How many (prompt, completion) pairs have other tokens when tokenised as one text.

    Such rows teach the model a split that it would not meet in running text; most often a missing
    space at the start of the completion is the cause.
    """
    prompts = encode([prompt for prompt, _ in pairs], tokenizer)
    completions = encode([completion for _, completion in pairs], tokenizer)
    joint = encode([prompt + completion for prompt, completion in pairs], tokenizer)
    return sum(p + c != j for p, c, j in zip(prompts, completions, joint, strict=True))


def _quantiles(lengths: Sequence[int]) -> list[int]:
    """Median, 90 %, 99 % and maximum: the smallest length that the share does not exceed."""
    ordered = sorted(lengths) or [0]
    return [ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90, 99, 100)]
