"""Sections of a report about runs, from what their folders hold: curves, samples over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.evaluation import records
from common.evaluation.records import Generation
from common.record.jsonl import read_jsonl
from common.record.run_folder import SAMPLES
from common.record.terminal import format_cell, format_number
from common.report.blocks import Block, Completion, Picture, Sample, SampleBrowser, Section
from common.report.plots import has_moving_means

Row = Mapping[str, Any]
MOST_PROMPTS = 20  # of an evaluation
MOST_FRAMES = 8  # moments of a run, evenly spread: enough to see a change, and the page stays small
MOST_COMPLETIONS = 8  # of a prompt at a moment
# Columns that are not in a completion's note
TEXTS = ("step", "prompt", "completion", "chosen", "rejected")


def completions_section(output_dir: Path) -> list[Section]:
    """Every system's completion of the first held-out prompts, with its measurements."""
    samples = []
    for row in records.read_completions(output_dir)[:MOST_PROMPTS]:
        generations = {"reference": row.reference, **row.systems}
        completions = [measured(name, each) for name, each in generations.items() if each]
        samples.append(Sample(row.prompt, {"": completions}))
    caption = "The first held-out prompts, completed by every policy."
    return [Section("Completions", [SampleBrowser(samples, caption)])] if samples else []


def measured(name: str, generation: Generation) -> Completion:
    """A system's completion with its rewards, KL and length."""
    values = {**generation.rewards, "KL": generation.kl}
    notes = [f"{k} {format_number(v)}" for k, v in values.items() if v is not None]
    stop = "stop token" if generation.stopped else "length limit"
    notes += [f"{generation.num_tokens} tokens", f"stopped by {stop}"]
    return Completion(name, generation.completion, ", ".join(notes))


# --- runs ---


def run_sections(runs: Mapping[str, Path]) -> list[Section]:
    """The curves of each run, and what it wrote for its fixed prompts in training."""
    curves: list[Block] = []
    browsers: list[Block] = []
    for name, run in runs.items():
        picture = run / "plots" / "curves.png"
        if picture.is_file():
            note = " Bold on pale: the moving mean." if has_moving_means(run) else ""
            curves.append(Section(name, [Picture(picture, f"Metrics by optimiser step.{note}")]))
        if rows := read_jsonl(run / SAMPLES):
            browsers.append(Section(name, [training_browser(rows)]))
    titles = {"Training curves": curves, "Completions over training": browsers}
    return [Section(title, blocks) for title, blocks in titles.items() if blocks]


def training_browser(records: Sequence[Row]) -> SampleBrowser:
    """The rows of `samples.jsonl` by prompt and step."""
    steps = list(dict.fromkeys(record["step"] for record in records))
    indices = np.linspace(0, len(steps) - 1, min(len(steps), MOST_FRAMES))
    shown = [steps[round(index)] for index in indices]
    by_prompt: dict[str, dict[int, list[Row]]] = {}
    for record in records:
        if record["step"] in shown:
            moments = by_prompt.setdefault(str(record.get("prompt", "")), {})
            moments.setdefault(record["step"], []).append(record)
    samples = [
        Sample(prompt, {f"step {step}": training_texts(rows) for step, rows in moments.items()})
        for prompt, moments in by_prompt.items()
    ]
    caption = f"Fixed prompts at {len(shown)} of the {len(steps)} steps with samples"
    return SampleBrowser(samples, f"{caption}: the first {MOST_COMPLETIONS} completions of each.")


def training_texts(rows: Sequence[Row]) -> list[Completion]:
    """The run's samples of one prompt at one step, or chosen and rejected; other columns noted."""
    completions: list[Completion] = []
    for number, row in enumerate(rows[:MOST_COMPLETIONS], start=1):
        if "completion" in row:
            label = f"completion {number}" if len(rows) > 1 else "completion"
            notes = {k: v for k, v in row.items() if k not in TEXTS}
            completions.append(Completion(label, str(row["completion"]), noted(notes)))
        for name in ("chosen", "rejected"):
            if name in row:
                score = {"score": row[f"{name} score"]}
                completions.append(Completion(name, str(row[name]), noted(score)))
    return completions


def noted(values: Row) -> str:
    """Values in a line; lists, as a user's file may hold, are left out."""
    shown = {k: v for k, v in values.items() if not isinstance(v, list | dict)}
    return ", ".join(f"{k} {format_cell(v)}" for k, v in shown.items())
