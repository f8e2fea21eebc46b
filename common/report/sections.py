"""Sections of a report about runs, from what their folders hold: curves, samples over training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.losses import kl_estimate
from common.record.jsonl import read_jsonl
from common.record.terminal import NOT_MEASURED, format_number
from common.report.page import (
    Completion,
    Curves,
    Frame,
    Line,
    Panel,
    Sample,
    SampleBrowser,
    Section,
    Token,
)
from common.report.plots import EXACT, PANELS, recorded, series

MOST_PROMPTS = 20  # of an evaluation
MOST_FRAMES = 8  # moments of a run, evenly spread: enough to see a change, and the page stays small
MOST_COMPLETIONS = 8  # of a prompt at a moment
LOGP, LOG_RATIO, KL, ADVANTAGE = (
    "log-probability",
    "log(policy / reference)",
    "KL by k3",
    "advantage",
)


# --- curves ---


def curves_section(run_dirs: Mapping[str, Path]) -> list[Section]:
    """What each run logged, under its name; [] if none logged anything."""
    sections = []
    for name, run in run_dirs.items():
        panels = curve_panels(read_jsonl(Path(run) / "metrics.jsonl"))
        picture = Path(run) / "plots" / "curves.png"
        if panels:
            found = picture if picture.is_file() else None
            sections.append(Section(name, [Curves(panels, picture=found)]))
    return [Section("Training curves", sections)] if sections else []


def curve_panels(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The panels of `plots.PANELS` of which the records have something."""
    panels = []
    for title, unit, names in PANELS:
        curves = {name: series(records, name) for name in recorded(records, names)}
        lines = [Line(name, *curve, exact=name in EXACT) for name, curve in curves.items()]
        if lines:
            panels.append(Panel(title, unit, lines))
    return panels


# --- what was evaluated ---


def completions_section(results: Mapping[str, Any], output_dir: Path) -> list[Section]:
    """Every system's completion of the first held-out prompts, with what it was worth.

    From `completions.jsonl` in the folder; without it, from the samples in `results.json`.
    """
    lines = read_jsonl(output_dir / "completions.jsonl")[:MOST_PROMPTS]
    samples = [
        Sample(line["prompt"], [Frame("", [_measured(name, own) for name, own in _answers(line)])])
        for line in lines
    ]
    for sample in [] if lines else results.get("samples", []):
        texts = {"reference": sample.get("reference"), **sample["completions"]}
        completions = [Completion(n, text) for n, text in texts.items() if text is not None]
        samples.append(Sample(sample["prompt"], [Frame("", completions)]))
    caption = "The first held-out prompts, completed by every policy."
    return [Section("Completions", [SampleBrowser(samples, caption)])] if samples else []


def _answers(line: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    own = [("reference", line["reference"])] if line.get("reference") else []
    return [*own, *line["systems"].items()]


def _measured(name: str, generation: Mapping[str, Any]) -> Completion:
    values = {**(generation.get("rewards") or {}), "KL": generation.get("kl")}
    notes = [f"{k} {format_number(v)}" for k, v in values.items() if v is not None]
    if generation.get("num_tokens") is not None:
        notes.append(f"{generation['num_tokens']} tokens")
        notes.append(f"stopped by {'stop token' if generation['stopped'] else 'length limit'}")
    return Completion(name, generation["completion"], ", ".join(notes))


# --- samples over training ---


def samples_section(run_dirs: Mapping[str, Path]) -> list[Section]:
    """What each run wrote for its fixed prompts while it trained; [] if none did."""
    sections = []
    for name, run in run_dirs.items():
        records = read_jsonl(Path(run) / "samples.jsonl")
        if records:
            sections.append(Section(name, [training_browser(records)]))
    return [Section("Completions over training", sections)] if sections else []


def training_browser(records: Sequence[Mapping[str, Any]]) -> SampleBrowser:
    """The rows of `samples.jsonl` by prompt and step."""
    steps = list(dict.fromkeys(record["step"] for record in records))
    shown = spread(steps, MOST_FRAMES)
    by_prompt: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for record in records:
        if record["step"] in shown:
            moments = by_prompt.setdefault(str(record.get("prompt", "")), {})
            moments.setdefault(record["step"], []).append(record)
    samples = [
        Sample(
            prompt, [Frame(f"step {step}", _completions(rows)) for step, rows in moments.items()]
        )
        for prompt, moments in by_prompt.items()
    ]
    caption = "Fixed prompts at the steps where the run took samples."
    if len(shown) < len(steps):
        caption = f"Fixed prompts at {len(shown)} of the {len(steps)} steps with samples."
    if any(len(rows) > MOST_COMPLETIONS for m in by_prompt.values() for rows in m.values()):
        caption += f" The first {MOST_COMPLETIONS} completions of each."
    return SampleBrowser(samples, caption + _colour_note(records))


def spread(values: Sequence[int], number: int) -> list[int]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= number:
        return list(values)
    return [values[round(i * (len(values) - 1) / (number - 1))] for i in range(number)]


def _completions(rows: Sequence[Mapping[str, Any]]) -> list[Completion]:
    found: list[Completion] = []
    for number, row in enumerate(rows[:MOST_COMPLETIONS], start=1):
        if "completion" in row:
            label = f"completion {number}" if len(rows) > 1 else "completion"
            found.append(_completion(label, row["completion"], row, "", _note(row)))
        for side in ("chosen", "rejected"):
            tokens = row.get(f"{side}_tokens")
            if side in row or tokens:
                text = row.get(side) or "".join(tokens or [])
                score = row.get(f"{side} score")
                note = "" if score is None else f"score {format_number(score)}"
                found.append(_completion(side, text, row, f"{side}_", note))
    return found


def _note(row: Mapping[str, Any]) -> str:
    """The columns of a row that are neither texts of the sample nor lists."""
    hidden = ("step", "prompt", "completion", "chosen", "rejected")
    parts = []
    for name, value in row.items():
        if name in hidden or isinstance(value, list | dict):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        text = NOT_MEASURED if value is None else format_number(value) if number else str(value)
        parts.append(f"{name} {text}")
    return ", ".join(parts)


def _completion(
    label: str, text: str, row: Mapping[str, Any], prefix: str, note: str
) -> Completion:
    tokens = row_tokens(row, prefix)
    ratio = _total(tokens, LOG_RATIO)
    if ratio is not None:
        note = ", ".join(filter(None, [note, f"{LOG_RATIO} {format_number(ratio)}"]))
    return Completion(label, str(text), note, tokens)


def _total(tokens: Sequence[Token], name: str) -> float | None:
    values = [token.values[name] for token in tokens if name in token.values]
    return sum(values) if values else None


def row_tokens(row: Mapping[str, Any], prefix: str = "") -> list[Token]:
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


def _colour_note(records: Sequence[Mapping[str, Any]]) -> str:
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
