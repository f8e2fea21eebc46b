"""Over-optimisation: the picture, and the number of seeds on which gold reward fell."""

from pathlib import Path

from experiments.evidence.records import studies
from experiments.runs.overoptimization.report import draw_curves, fallen

RESULTS = "overoptimization/results.json"


def turns() -> str:
    """The picture, and the number of seeds of each method on which gold reward fell."""
    picture = "![Gain in gold and proxy reward over the distance](../assets/overoptimization.png)"
    return f"{picture}\n\n{fallen(studies.read(RESULTS))}"


def draw() -> Path:
    """One column of panels, to be read on a phone."""
    path = studies.ROOT / "assets" / "overoptimization.png"
    return draw_curves(studies.read(RESULTS), path, num_columns=1, width=5)


TABLES = {"overoptimization": turns}
FIGURES = {"overoptimization": draw}
