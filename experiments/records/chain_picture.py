"""What a chain's systems are worth in one picture: accuracy above reward, to be read on a phone.

`tables.py` draws `assets/<part>.png` of seed 0, whose tables are beside it on the pages.
"""

from pathlib import Path
from typing import Any

from common.report.figures import draw_accuracy, draw_reward, held_out
from common.report.plots import save, style, system_colours, titled_figure
from experiments.records import make
from experiments.sweep.effects import DPI

PARTS = ("demo", "scitldr")
SCORES = ("{}", "{} implicit_reward", "{} logp")  # what a system's accuracy is of, the first it has


def draw(part: str, results: dict[str, Any]) -> Path:
    """Draw `results.json`; accuracy gets its intervals over prompts, some with several pairs."""
    compared = {own["name"]: own["accuracy"] for own in results["comparison"]["systems"]}
    for system in results["systems"]:
        names = [score.format(system["name"]) for score in SCORES]
        over_prompts = next(compared[name] for name in names if name in compared)
        system["accuracy"] |= {end: over_prompts[f"prompt_{end}"] for end in ("low", "high")}
    colours = system_colours(system["name"] for system in results["systems"])
    with style():
        figure = titled_figure(held_out(results).capitalize(), 5, 6.6)
        above, below = figure.subplots(2, 1)
        draw_accuracy(above, results, colours)
        draw_reward(below, results, colours)
        return save(figure, make.ROOT / "assets" / f"{part}.png", DPI)
