"""Speed and quality compared with TRL: tables and pictures; by sampled token where both sample.

`assets/<part>.png` is to be read on a phone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.record.terminal import NOT_MEASURED
from common.report import markdown
from common.report.plots import COLOURS, save, style, titled_figure
from experiments.evidence.records import studies
from experiments.runs.outcomes import over
from experiments.runs.sweep.effects import DPI

AIM = "our aim"  # of `rows.py`; older records call it "goal"
LEFT_OUT = ("unit", AIM, "% of ceiling", "tokens per rollout")  # shown by the record only
STAGES = {  # by how they are judged, and the digits of that
    "sft": ("gold reward", 3),
    "reward": ("accuracy, %", 1),
    **dict.fromkeys(("dpo", "grpo", "grpo, stop token"), ("gold reward", 3)),
}
MODELS = {"bench-tiny": "4 layers, 256 wide", "bench-gpt2-small": "GPT-2 small"}
IN_BF16 = {f"{part}-bf16": f"{model}, bfloat16" for part, model in MODELS.items()}


def rows(part: str) -> list[dict[str, Any]]:
    """What was measured of each row; none without a record."""
    found: list[dict[str, Any]] = studies.read(f"{part}/results.json").get("rows", [])
    return found


def ratio(row: Mapping[str, Any]) -> float:
    """How many times TRL's speed a row has, where both sides sample per token of a completion."""
    ours, theirs = (row[side]["completion_length"] or 1 for side in ("ours", "trl"))
    return float(row["ratio"] * ours / theirs)


def table() -> str:
    """How many times TRL's speed each row has, and which share of its memory."""
    lines = []
    heads = [row["row"] for row in rows("bench-tiny")]
    for part, model in (MODELS | IN_BF16).items():
        own = {row["row"]: f"{ratio(row):.1f} ({row['memory_ratio']:.2f})" for row in rows(part)}
        if own:
            lines.append([model, *(own.get(head, NOT_MEASURED) for head in heads)])
    return markdown.table(["times TRL's speed (memory)", *heads], lines)


def quality() -> str:
    """Minutes of each stage on both sides, and how good it is."""
    found, lines = studies.read("bench-quality/results.json"), []
    for stage, (outcome, digits) in STAGES.items():
        cells = []
        for name, places in (("minutes", 1), (outcome, digits)):
            for side in ("trl", "ours"):
                values = [seed[stage][name] for seed in found[side] if stage in seed]
                cells.append(over(values, places) if values else NOT_MEASURED)
        lines.append([f"{stage}: {outcome}", *cells])
    heads = ["", "minutes: TRL", "ours", "outcome: TRL", "ours"]
    return markdown.table(heads, lines)


def against_trl(part: str) -> str:
    """The picture, and what the benchmark printed, without `LEFT_OUT`, with a ratio per token."""
    heads, *lines = studies.cells(studies.printed(f"{part}/table.md"))
    heads = [head.replace("(goal ", f"({AIM}: ").replace("goal", AIM) for head in heads]
    added = ["ratio per token", "---"]
    for row in rows(part):
        added.append(f"{ratio(row):.2f}" if row["trl"]["completion_length"] else "")
    shown = [at for at, head in enumerate(heads) if not head.startswith(LEFT_OUT)]
    table = [
        f"| {' | '.join([*(line[at] for at in shown), cell])} |"
        for line, cell in zip([heads, ["---"] * len(heads), *lines], added, strict=True)
    ]
    picture = f"![Speed compared with TRL, {MODELS[part]}](../assets/{part}.png)"
    return "\n".join([picture, "", *table])


def draw(part: str) -> Path:
    """A bar per row, with what this project aims at."""
    found = rows(part)
    ratios = [ratio(row) for row in found]
    places = range(len(found))
    with style():
        figure = titled_figure(f"Times TRL's speed: {MODELS[part]}", 5, 4.5)
        axes = figure.subplots()
        axes.barh(places, ratios, color=COLOURS[0], label="ours (GRPO per token)")
        aims = [(row["reach"], place) for place, row in enumerate(found) if row["reach"]]
        look = {"color": COLOURS[1], "markersize": 14, "markeredgewidth": 2.5, "label": AIM}
        axes.plot(*zip(*aims, strict=True), "|", **look)
        axes.axvline(1, color="black", linewidth=1, label="TRL")
        names = [f"{row['row']}  {times:.1f}" for row, times in zip(found, ratios, strict=True)]
        axes.set(yticks=places, yticklabels=names, xlabel="speed, TRL = 1")
        axes.invert_yaxis()
        axes.legend(loc="best")
        return save(figure, studies.ROOT / "assets" / f"{part}.png", DPI)


TABLES: dict[str, Callable[[], str]] = {
    "bench-tiny": partial(against_trl, "bench-tiny"),
    "bench-gpt2-small": partial(against_trl, "bench-gpt2-small"),
    "bench-sampler": partial(studies.printed, "bench-sampler/table.md"),
    "bench-quality": partial(studies.printed, "bench-quality/table.md"),
    "bench-tiny.short": table,
    "bench-quality.short": quality,
}
FIGURES = {part: partial(draw, part) for part in MODELS}
