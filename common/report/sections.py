"""Sections of a report about runs, from what their folders hold: curves, samples over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.evaluation import records
from common.evaluation.records import Generation
from common.losses import kl_estimate
from common.record.jsonl import read_jsonl
from common.record.run_folder import SAMPLES
from common.record.terminal import format_cell, format_number
from common.report.blocks import Block, Completion, Picture, Sample, SampleBrowser, Section

Row = Mapping[str, Any]
MOST_PROMPTS = 20  # of an evaluation
MOST_FRAMES = 8  # moments of a run, evenly spread: enough to see a change, and the page stays small
MOST_COMPLETIONS = 8  # of a prompt at a moment
# Columns that are not in a completion's note
TEXTS = ("step", "prompt", "completion", "chosen", "rejected")
COLOUR_NOTE = (
    " Colours, in nats per token: the log-probability under the policy; its log-ratio to the "
    "reference, blue where the policy likes the token better; the estimate k3 of the KL; and, of "
    "the whole completion, the advantage. Each where the run has it."
)
LOGP, LOG_RATIO = "log-probability", "log(policy / reference)"
KL, ADVANTAGE = "KL by k3", "advantage"


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
    curves: dict[str, Block] = {}
    browsers: dict[str, Block] = {}
    for name, run in runs.items():
        picture = run / "plots" / "curves.png"
        if picture.is_file():
            curves[name] = Picture(picture, "Bold on pale: the moving mean.")
        if rows := read_jsonl(run / SAMPLES):
            browsers[name] = training_browser(rows)
    return [
        Section(title, [Section(name, [block]) for name, block in by_run.items()])
        for title, by_run in (("Training curves", curves), ("Completions over training", browsers))
        if by_run
    ]


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
    caption = "Fixed prompts at the steps where the run took samples."
    if len(shown) < len(steps):
        caption = f"Fixed prompts at {len(shown)} of the {len(steps)} steps with samples."
    if any(len(rows) > MOST_COMPLETIONS for m in by_prompt.values() for rows in m.values()):
        caption += f" The first {MOST_COMPLETIONS} completions of each."
    if any(name.endswith("token_logps") for record in records for name in record):
        caption += COLOUR_NOTE
    return SampleBrowser(samples, caption)


def training_texts(rows: Sequence[Row]) -> list[Completion]:
    """Completions for the report from the rows of one prompt at one step of `samples.jsonl`.

    They are the run's samples, or chosen and rejected of a pair. The other columns of a row are
    noted, and of tokens the sum of their log-ratios.
    """
    completions: list[Completion] = []
    for number, row in enumerate(rows[:MOST_COMPLETIONS], start=1):
        other = {k: v for k, v in row.items() if k not in TEXTS and not isinstance(v, list | dict)}
        for name in ("completion", "chosen", "rejected"):
            is_sampled = name == "completion"
            tokens, values = row_tokens(row, "" if is_sampled else f"{name}_")
            if name in row or (tokens and not is_sampled):  # of pairs there may be tokens only
                text = str(row.get(name, "".join(tokens)))
                score = {"score": row[f"{name} score"]} if f"{name} score" in row else {}
                notes = dict(other) if is_sampled else score
                if LOG_RATIO in values:
                    notes[LOG_RATIO] = sum(values[LOG_RATIO])
                note = ", ".join(f"{k} {format_cell(v)}" for k, v in notes.items())
                label = f"{name} {number}" if is_sampled and len(rows) > 1 else name
                completions.append(Completion(label, text, note, tokens, values))
    return completions


def row_tokens(row: Row, prefix: str = "") -> tuple[list[str], dict[str, list[float]]]:
    """The tokens of a row of `samples.jsonl`, and values of each; nothing in an older file.

    Of a completion of a pair, the names in the row have the prefix "chosen_" or "rejected_".
    """
    texts, logps = row.get(f"{prefix}tokens"), row.get(f"{prefix}token_logps")
    if not texts or not logps:
        return [], {}
    columns: dict[str, list[float]] = {}
    if ref_logps := row.get(f"ref_{prefix}token_logps"):
        policy, reference = torch.tensor(logps), torch.tensor(ref_logps)
        columns[LOG_RATIO] = kl_estimate(policy, reference, estimator="k1").tolist()
        if not prefix:  # an estimate of the KL only where the policy itself drew the tokens
            columns[KL] = kl_estimate(policy, reference, estimator="k3").tolist()
    if not prefix and isinstance(row.get("advantage"), float):  # or a text: a user's column
        columns[ADVANTAGE] = [row["advantage"]] * len(texts)
    columns[LOGP] = logps
    return texts, columns
