"""What a replication shows: values of ours and published ones, differences between stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from common.config.recipes import read_recipe
from common.report.blocks import Block, Picture, Section, Table
from experiments.runs.outcomes import Measured, about, over_seeds, seeds_interval
from experiments.runs.power import HEADERS, NOTE
from experiments.runs.sweep.effects import Effect, Effects, draw
from experiments.runs.sweep.sweep_file import Variant
from experiments.runs.sweep.typed import built


@dataclass(frozen=True)
class Published:
    """A line of `published.yaml`: a reported value of a system."""

    system: str  # as the recipe names its stage
    metric: str
    source: str
    value: float | None = None  # accuracies and rates as shares of 1
    note: str = ""


@dataclass(frozen=True)
class PublishedValues:
    """The whole file."""

    published: Sequence[Published]


def read_published(file: Path) -> list[Published]:
    """The lines of `published.yaml`; none where there is no such file."""
    if not file.is_file():
        return []
    values: PublishedValues = built(PublishedValues, read_recipe(str(file), typed=True), str(file))
    return list(values.published)


# ---- the report ----------------------------------------------------------------------------------


def differences(ours: Measured) -> Effects:
    """Each stage minus each earlier one, in runs of the same seed, by metric."""
    panels: dict[str, dict[str, list[Effect]]] = {}
    for metric in dict.fromkeys(metric for _, metric in ours):
        pairs = list(combinations([system for system, name in ours if name == metric], 2))
        for base, system in pairs:
            later, earlier = ours[system, metric], ours[base, metric]
            if seeds := [seed for seed in later if seed in earlier]:
                values = [later[seed] for seed in seeds], [earlier[seed] for seed in seeds]
                variant = Variant(system, f"compared with {base}", system)
                effect = Effect(variant, metric, *values, len(pairs))
                panels.setdefault(metric, {}).setdefault(metric, []).append(effect)
    return panels


def difference_table(panels: Effects) -> Table:
    """A row for each two stages and each metric that both have."""
    rows = [
        [about(metric).heading, effect.variant.detail, effect.variant.choice, effect.cell]
        + [*effect.power.cells(), str(effect.difference.n)]
        for metric, panel in panels.items()
        for effect in panel[metric]
    ]
    caption = (
        "Mean difference of runs of the same seed, with Student's 95% interval over seeds. One "
        "star: it excludes 0. Two stars: also when the rows of a metric hold together with 95%. "
        f"{NOTE}"
    )
    return Table(["metric", "stage", "", "mean [95%]", *HEADERS, "n"], rows, caption)


def comparison(published: Sequence[Published], ours: Measured) -> Table:
    """Our values, next to published ones if there are any, a row for each system and metric."""
    has_values = any(row.value is not None for row in published)
    sources, rows = list(dict.fromkeys(row.source for row in published)), []
    for key in dict.fromkeys([*((row.system, row.metric) for row in published), *ours]):
        outcome, cells = about(key[1]), ["", "", ""]
        reported = [
            f"{outcome.scale * row.value:.4g} ({1 + sources.index(row.source)})"
            for row in published
            if (row.system, row.metric) == key and row.value is not None
        ]
        if key in ours:
            mean = over_seeds(ours[key].values())
            interval = seeds_interval(list(ours[key].values()), is_share=outcome.is_share)
            cells = [mean.spread, interval, str(mean.n)]
        rows.append([key[0], outcome.heading, *["; ".join(reported)] * has_values, *cells])
    headers = ["system", "metric", *["published"] * has_values, "ours", "95% interval", "n"]
    note = "Numbers in brackets are those of the sources below." if has_values else ""
    return Table(headers, rows, note)


def source_lines(published: Sequence[Published]) -> list[str]:
    """The sources as a list, each with the notes on its values."""
    lines = []
    for number, source in enumerate(dict.fromkeys(row.source for row in published), start=1):
        notes = dict.fromkeys(row.note for row in published if row.source == source and row.note)
        lines.append(f"- ({number}) {source}{': ' if notes else ''}{' '.join(notes)}")
    return lines


def report(published: Sequence[Published], ours: Measured, output_dir: Path) -> list[Block]:
    """The blocks of the page; the picture is drawn into `output_dir/plots`."""
    note = (
        "Ours: mean \N{PLUS-MINUS SIGN} standard deviation over the n finished seeds, and "
        "Student's 95% interval, which covers the seed of training and not the draw of the "
        "held-out rows; of a share whose interval would leave 0 to 100 the seeds' values, in round "
        "brackets."
    )
    if published:
        note += " Published values are as their source has them, on its rows and with its judges."
    blocks: list[Block] = [note]
    blocks.append(comparison(published, ours))
    if panels := differences(ours):
        caption = "Differences of the same seed: mean, 95% interval, and each seed."
        picture = Picture(draw(panels, output_dir / "plots" / "differences.png"), caption)
        table = difference_table(panels)
        blocks.append(Section("Differences between stages, by seed", [picture, table]))
    if published:
        blocks.append(Section("Sources", ["\n".join(source_lines(published))]))
    return blocks
