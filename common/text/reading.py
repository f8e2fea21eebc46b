"""Splits as examples, from their source to token ids; and which split is held out."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common import distributed
from common.config.flags import AUTO
from common.config.stages import CommonConfig, RowsConfig, TrainConfig
from common.errors import UserError
from common.text import chat, data_report, schemas, sources, tokenise
from common.text.example import Example, Vocabulary
from common.text.schemas import RawRow, Row

HELD_OUT_SPLITS = ("validation", "test")  # of which AUTO takes the first that is there


def load_splits(
    config: RowsConfig, kind: str, vocabulary: Vocabulary
) -> tuple[Sequence[Example], Sequence[Example]]:
    """The training and the held-out examples of a command; the latter [] where there are none.

    `kind` as in `load_examples`. A pair's completions are [chosen, rejected], each with its stop
    token unless truncated. SFT on conversations prints its first row as trained. Collective.
    """
    name, split = config.dataset_name, config.dataset_train_split
    held_out = _noted_held_out_split(config, name)
    train_set = load_examples(config, name, split, kind, vocabulary, config.num_train_rows)
    if kind == "sft" and config.num_sample_prompts and train_set[0].messages:
        shown = data_report.marked(train_set[0], vocabulary.tokenizer)
        distributed.print_rank0(f"  row {train_set[0].row + 1}, [[trained]]: {shown}")
    eval_set = load_examples(config, name, held_out, kind, vocabulary, config.num_eval_rows)
    note_unused_template(train_set, vocabulary)
    return train_set, eval_set


def load_held_out_pairs(
    config: TrainConfig, dataset_name: str, vocabulary: Vocabulary
) -> Sequence[Example]:
    """Held-out pairs of a data set; [] for an empty name, or where there are none. Collective."""
    split, num_rows = _noted_held_out_split(config, dataset_name), config.num_eval_rows
    return load_examples(config, dataset_name, split, "preference", vocabulary, num_rows)


def _noted_held_out_split(config: RowsConfig, dataset_name: str) -> str:
    """The split that a run evaluates on; where none is there it says so and returns ""."""
    is_trained_on = dataset_name == config.dataset_name
    split = held_out_split(config, dataset_name, is_trained_on=is_trained_on)
    if dataset_name and config.dataset_test_split and not split:
        tried = " or ".join(HELD_OUT_SPLITS)
        hint = _other_splits(config, dataset_name, config.dataset_train_split)
        distributed.print_rank0(f"{dataset_name} has no split {tried}: no evaluation on it{hint}")
    return split


def _other_splits(config: CommonConfig, dataset_name: str, trained_on: str = "") -> str:
    """A clause with the splits that could be evaluated on, and the flag; empty without one."""
    names = sources.split_names(
        dataset_name, config.dataset_config * (dataset_name == config.dataset_name)
    )
    others = [name for name in names if name != sources.parse_split(trained_on)[0]]
    if not others:
        return ""
    return (
        f"; it has {', '.join(others)}: --dataset_test_split {others[0]} evaluates on {others[0]}"
    )


def note_unused_template(examples: Sequence[Example], vocabulary: Vocabulary) -> None:
    """Print in a line that rows of text do not use the chat template that the model has."""
    tokenizer = vocabulary.tokenizer
    texts = [example.prompt for example in examples if not example.messages]
    if texts and tokenizer.chat_template and not chat.begins_answer(texts[0], tokenizer):
        distributed.print_rank0(
            f"note: {len(texts)} of {len(examples)} rows are texts, read without the chat template "
            "that the model has; --chat_columns true makes turns of user and assistant of them"
        )


def load_examples(
    config: CommonConfig,
    dataset_name: str,
    split: str,  # see `held_out_split` for one to evaluate on
    kind: str,  # `sft`, `preference` or `prompts`
    vocabulary: Vocabulary,
    num_rows: int = 0,  # take the first rows only; 0 takes all
    *,
    with_texts: bool = False,
) -> Sequence[Example]:
    """Read, check and tokenise one split, and print what was lost; [] for an empty name or split.

    Every process does it; all have the same rows. With texts the examples keep those of their
    completions. A UserError if too many are dropped. Collective.
    """
    if not dataset_name or not split:
        return []
    if config.chat_columns and not vocabulary.tokenizer.chat_template:
        raise config.refused("chat_columns", "false for a tokenizer without a chat template")
    with distributed.together():
        raw_rows = load_rows(config, dataset_name, split, kind, num_rows)
        bar = distributed.progress_bar("rendering", len(raw_rows), unit="row", items=raw_rows)
        rows: list[Row] = []
        for number, raw in enumerate(bar):
            if isinstance(raw["prompt"], str):
                rows.append(Row.of_text(raw, kind, number))
            else:
                rows += chat.render(raw, kind, vocabulary.tokenizer, number)
        tokenised = tokenise.tokenize_rows(rows, vocabulary, config)
        distributed.print_rank0(data_report.describe(tokenised, split))
        data_report.refuse_lossy(tokenised, split, config.max_dropped_fraction)
    kept = [row for row in tokenised if not row.drop_reason]
    if not with_texts:
        return [row.example for row in kept]
    decode = vocabulary.tokenizer.decode
    return [
        replace(
            row.example,
            texts=[decode(c.ids) if c.is_truncated else c.text for c in row.completions],
        )
        for row in kept
    ]


def load_rows(
    config: CommonConfig, dataset_name: str, split: str, kind: str, num_rows: int = 0
) -> list[RawRow]:
    """Read one split, and bring every row to the schema of its kind; see `schemas.standardise`.

    With `--chat_columns` rows of text become conversations.
    """
    label, raw_rows = sources.read_split(config, dataset_name, split, kind, num_rows)
    rows = schemas.standardise(raw_rows, kind, label)
    return [schemas.as_turns(row, kind) for row in rows] if config.chat_columns else rows


def held_out_split(config: CommonConfig, dataset_name: str, *, is_trained_on: bool = False) -> str:
    """The split to evaluate on: what `--dataset_test_split` names, or `auto` finds; "" for none.

    `auto` is `validation`, else `test`, of what is there. A single file has one split: it is
    evaluated on unless the run trains on it. A UserError if what was named is not there.
    """
    split = config.dataset_test_split
    if not dataset_name or not split:
        return ""
    if dataset_name == "synthetic":
        return "validation" if split == AUTO else split
    if split != AUTO:
        sources.open_split(config, dataset_name, split)
        return split
    path = Path(os.path.expanduser(dataset_name))
    if path.is_file() and not is_trained_on:
        return path.name.split(".")[0]
    for name in HELD_OUT_SPLITS if not path.is_file() else ():
        with contextlib.suppress(sources.NoSuchSplitError):
            sources.open_split(config, dataset_name, name)
            return name
    return ""


def evaluated_split(config: CommonConfig, dataset_name: str) -> str:
    """The split of a data set to evaluate on; a UserError if there is none."""
    if split := held_out_split(config, dataset_name):
        return split
    hint = _other_splits(config, dataset_name) or "; name one by --dataset_test_split"
    raise UserError(f"{dataset_name} has no split to evaluate on{hint}.")


def has_pairs(config: CommonConfig, split: str) -> bool:
    """Whether a split's first row has a column `chosen` or `rejected`; prints a note if not."""
    name = config.dataset_name
    if name == "synthetic":
        return True
    columns = next(sources.open_split(config, name, split)[1], {})
    names = {old: new for new, old in sources.column_map_of(config, "preference").items()}
    has_one = not {"chosen", "rejected"}.isdisjoint(names.get(name, name) for name in columns)
    if not has_one:
        distributed.print_rank0(f"{name} has no columns chosen and rejected: prompts only")
    return has_one
