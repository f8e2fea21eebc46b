"""The sweep's effects on the first outcome of each stage: their table, a sentence, a picture.

`tables.py` draws `assets/ablations.png`, one column to be read on a phone; all outcomes are in the
sweep's own `plots/forest.png`.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from common.experiments import forest
from common.experiments.forest import Effect
from common.experiments.outcomes import about, over_seeds
from common.experiments.sweep_file import Variant
from common.report import markdown
from common.report.plots import save, style, titled_figure
from tests.results import make

PART = "ablations"


def primary_effects() -> Mapping[str, Sequence[Effect]]:
    """By stage, what every detail changes in the stage's first outcome."""
    stages: dict[str, list[Effect]] = {}
    for own in json.loads((make.RECORDS / PART / "sweep.json").read_text())["effects"]:
        variant = Variant(**{field.name: own[field.name] for field in fields(Variant)})
        values = own["by_seed"], own["base_by_seed"], own["together"].get("family", 0)
        effect = Effect(variant, own["outcome"], *values)
        found = stages.setdefault(variant.stage, [])
        if not found or found[0].outcome == effect.outcome:
            found.append(effect)
    return stages


def table() -> str:
    """A line per detail, below the base of its stage."""
    rows = []
    for stage, effects in primary_effects().items():
        base = over_seeds(effects[0].base)
        told = f"base: {about(effects[0].outcome).heading}"
        rows.append([f"**{stage}**", told, base.spread, "", str(base.n)])
        for effect in effects:
            cells = [effect.cell, effect.verdict]
            if not any(effect.by_seed):
                cells = ["the same numbers on every seed", ""]
            number = str(len(effect.by_seed))
            rows.append([effect.variant.detail, str(effect.variant.choice), *cells, number])
    return markdown.table(["detail", "choice", "effect [95%]", "matters?", "seeds"], rows)


def what_matters() -> str:
    """The details that a sweep can tell, in a sentence."""
    found = [effect for effects in primary_effects().values() for effect in effects]
    matter = defaultdict(list)
    for variant in (effect.variant for effect in found if effect.verdict == "yes"):
        matter[f"{variant.detail} ({variant.stage})"].append(str(variant.choice))
    number = sum(map(len, matter.values()))
    told = "; ".join(f"{detail}: {' / '.join(choices)}" for detail, choices in matter.items())
    return (
        f"**Which details matter?** On the embedded task {number} of {len(found)}, by "
        f"{len(found[0].by_seed)} paired seeds, all intervals of a stage together: "
        f"{told} ([all of them](docs/ablations.md))."
    )


def draw() -> Path:
    """A panel per stage, one below the other; the page has the key."""
    stages = primary_effects()
    heights = [forest.PANEL_HEIGHT + forest.ROW_HEIGHT * len(own) for own in stages.values()]
    width = forest.LABEL_WIDTH + forest.PANEL_WIDTH
    with style():
        figure = titled_figure("Differences to the base, 95% intervals", width, sum(heights))
        panels = figure.subplots(len(stages), 1, height_ratios=heights, squeeze=False)
        for (axes,), (stage, effects) in zip(panels, stages.items(), strict=True):
            forest.draw_panel(axes, effects, with_labels=True)
            axes.set(title=stage, xlabel=about(effects[0].outcome).heading)
        return save(figure, make.ROOT / "assets" / f"{PART}.png", forest.DPI)
