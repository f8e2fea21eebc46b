"""Sections of a report about runs, from what their folders hold: curves, samples over training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.evaluation.completions import FILE
from common.losses import kl_estimate
from common.record.folder import SAMPLES
from common.record.jsonl import read_jsonl
from common.record.terminal import format_cell, format_number
from common.report.blocks import (
    Block,
    Completion,
    Curves,
    Frame,
    Sample,
    SampleBrowser,
    Section,
    Token,
)
from common.report.plots import Records, curve_panels

Row = Mapping[str, Any]
MOST_PROMPTS = 20  # of an evaluation
MOST_FRAMES = 8  # moments of a run, evenly spread: enough to see a change, and the page stays small
MOST_COMPLETIONS = 8  # of a prompt at a moment
LOGP, LOG_RATIO, KL, ADVANTAGE = (
    "log-probability",
    "log(policy / reference)",
    "KL by k3",
    "advantage",
)


def completions_section(results: Mapping[str, Any], output_dir: Path) -> list[Section]:
    """Every system's completion of the first held-out prompts, with what it was worth.

    From `completions.jsonl` in the folder; without it, from the samples in `results.json`.
    """
    lines = read_jsonl(output_dir / FILE)[:MOST_PROMPTS]
    found = [(row["prompt"], {"reference": row["reference"], **row["systems"]}) for row in lines]
    for sample in [] if lines else results.get("samples", []):
        texts = {"reference": sample.get("reference"), **sample["completions"]}
        own = {name: {"completion": t} for name, t in texts.items() if t is not None}
        found.append((sample["prompt"], own))
    samples = [
        Sample(prompt, [Frame("", [measured(name, own) for name, own in answers.items() if own])])
        for prompt, answers in found
    ]
    caption = "The first held-out prompts, completed by every policy."
    return [Section("Completions", [SampleBrowser(samples, caption)])] if samples else []


def measured(name: str, generation: Row) -> Completion:
    """A line's completion by a system, with its rewards, KL and length."""
    values = {**(generation.get("rewards") or {}), "KL": generation.get("kl")}
    notes = [f"{k} {format_number(v)}" for k, v in values.items() if v is not None]
    if generation.get("num_tokens") is not None:
        notes.append(f"{generation['num_tokens']} tokens")
        notes.append(f"stopped by {'stop token' if generation['stopped'] else 'length limit'}")
    return Completion(name, generation["completion"], ", ".join(notes))


# --- runs ---


def curves_section(run_dirs: Mapping[str, Path], records: Mapping[str, Records]) -> list[Section]:
    """What each run logged, its `records`, under its name; [] if none logged anything."""
    found: dict[str, Block] = {}
    for name, run in run_dirs.items():
        panels, picture = curve_panels(records[name]), run / "plots/curves.png"
        if panels:
            found[name] = Curves(panels, picture=picture if picture.is_file() else None)
    return by_run("Training curves", found)


def samples_section(run_dirs: Mapping[str, Path]) -> list[Section]:
    """What each run wrote for its fixed prompts while it trained; [] if none did."""
    records = {name: read_jsonl(run / SAMPLES) for name, run in run_dirs.items()}
    found = {name: training_browser(rows) for name, rows in records.items() if rows}
    return by_run("Completions over training", found)


def by_run(title: str, found: Mapping[str, Block]) -> list[Section]:
    """A section with one for each run; none without any."""
    sections = [Section(name, [block]) for name, block in found.items()]
    return [Section(title, sections)] if sections else []


def training_browser(records: Sequence[Row]) -> SampleBrowser:
    """The rows of `samples.jsonl` by prompt and step."""
    steps = list(dict.fromkeys(record["step"] for record in records))
    shown = spread(steps, MOST_FRAMES)
    by_prompt: dict[str, dict[int, list[Row]]] = {}
    for record in records:
        if record["step"] in shown:
            moments = by_prompt.setdefault(str(record.get("prompt", "")), {})
            moments.setdefault(record["step"], []).append(record)
    samples = [
        Sample(prompt, [Frame(f"step {step}", completions(rows)) for step, rows in moments.items()])
        for prompt, moments in by_prompt.items()
    ]
    caption = "Fixed prompts at the steps where the run took samples."
    if len(shown) < len(steps):
        caption = f"Fixed prompts at {len(shown)} of the {len(steps)} steps with samples."
    if any(len(rows) > MOST_COMPLETIONS for m in by_prompt.values() for rows in m.values()):
        caption += f" The first {MOST_COMPLETIONS} completions of each."
    return SampleBrowser(samples, caption + colour_note(records))


def spread(values: Sequence[int], number: int) -> list[int]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= number:
        return list(values)
    return [values[round(i * (len(values) - 1) / (number - 1))] for i in range(number)]


def completions(rows: Sequence[Row]) -> list[Completion]:
    """The first completions that a run wrote for a prompt, and the pairs that it trains on."""
    found: list[Completion] = []
    for number, row in enumerate(rows[:MOST_COMPLETIONS], start=1):
        if "completion" in row:
            label = f"completion {number}" if len(rows) > 1 else "completion"
            found.append(completion(label, row["completion"], note_of(row), row_tokens(row)))
        for side in ("chosen", "rejected"):
            tokens = row_tokens(row, f"{side}_")
            if side in row or tokens:
                text = row.get(side) or "".join(token.text for token in tokens)
                score = row.get(f"{side} score")
                note = "" if score is None else f"score {format_number(score)}"
                found.append(completion(side, text, note, tokens))
    return found


def note_of(row: Row) -> str:
    """The columns of a row that are neither texts of the sample nor lists."""
    hidden = ("step", "prompt", "completion", "chosen", "rejected")
    shown = {k: v for k, v in row.items() if k not in hidden and not isinstance(v, list | dict)}
    return ", ".join(f"{name} {format_cell(value)}" for name, value in shown.items())


def completion(label: str, text: str, note: str, tokens: Sequence[Token]) -> Completion:
    """A completion; where its tokens have a log-ratio to the reference, their sum is noted."""
    ratios = [token.values[LOG_RATIO] for token in tokens if LOG_RATIO in token.values]
    parts = [note, f"{LOG_RATIO} {format_number(sum(ratios))}" if ratios else ""]
    return Completion(label, str(text), ", ".join(filter(None, parts)), tokens)


def row_tokens(row: Row, prefix: str = "") -> list[Token]:
    """The tokens of a row of `samples.jsonl` with what is known of them; [] in an older file.

    Args:
        row: With `tokens`, `token_logps`, and perhaps `ref_token_logps` (nats) and `advantage`.
        prefix: Of those names: "chosen_" or "rejected_" for the completions of a pair.
    """
    texts, logps = row.get(f"{prefix}tokens"), row.get(f"{prefix}token_logps")
    if not texts or not logps or len(texts) != len(logps):
        return []
    columns: dict[str, list[float]] = {}
    ref_logps = row.get(f"ref_{prefix}token_logps")
    if ref_logps and len(ref_logps) == len(texts):
        pair = (torch.tensor(logps), torch.tensor(ref_logps))
        columns[LOG_RATIO] = kl_estimate(*pair, estimator="k1").tolist()
        if not prefix:  # an estimate of the KL only where the policy itself drew the tokens
            columns[KL] = kl_estimate(*pair, estimator="k3").tolist()
    advantage = row.get("advantage")
    if not prefix and isinstance(advantage, float) and math.isfinite(advantage):
        columns[ADVANTAGE] = [advantage] * len(texts)
    columns[LOGP] = logps
    values = zip(*columns.values(), strict=True)
    return [
        Token(text, dict(zip(columns, of_token, strict=True)))
        for text, of_token in zip(texts, values, strict=True)
    ]


def colour_note(records: Sequence[Row]) -> str:
    """What the colours mean, where there are any."""
    names = {name for record in records for name in record}
    if not any(name.endswith("token_logps") for name in names):
        return ""
    note = " Colours, in nats per token: the log-probability under the policy"
    if any(name.startswith("ref_") for name in names):
        note += "; its log-ratio to the reference, blue where the policy likes the token better"
    if "ref_token_logps" in names:
        note += "; the estimate k3 of the KL"
    if "advantage" in names:
        note += "; and, of the whole completion, the advantage"
    return note + "."
