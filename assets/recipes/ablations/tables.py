"""The ablations: the first outcomes of each stage, a sentence on what matters, and a picture.

All outcomes are in the sweep's `plots/forest.png`.
"""

import textwrap
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from experiments.evidence.records import studies, sweeps
from experiments.runs.outcomes import over_seeds
from experiments.runs.sweep.effects import Effect, Effects
from experiments.runs.sweep.effects import draw as draw_effects

STAGES = {
    "reward": "reward model",
    "dpo": "DPO",
    "grpo": "GRPO",
    "updates": "GRPO, four updates a rollout",
}


def primary_effects() -> Effects:
    """The effects in the first outcome of each stage."""
    stages: dict[str, dict[str, list[Effect]]] = {}
    for effect in sweeps.effects(studies.read("ablations/sweep.json")):
        panels = stages.setdefault(effect.variant.stage, {effect.outcome: []})
        if effect.outcome in panels:
            panels[effect.outcome].append(effect)
    return stages


def what_matters() -> str:
    """The details that matter by the ablations, in a sentence."""
    panels = [panel for by_outcome in primary_effects().values() for panel in by_outcome.values()]
    every = [effect for panel in panels for effect in panel]
    clear = [effect for effect in every if effect.verdict == "yes"]
    by_detail = defaultdict(list)
    for effect in clear:
        detail = f"{effect.variant.detail} ({STAGES[effect.variant.stage]})"
        by_detail[detail].append(f"{effect.variant.choice} ({effect.difference.mean:+.1f})")
    listed = "; ".join(f"{detail}: {', '.join(choices)}" for detail, choices in by_detail.items())
    details = {(effect.variant.stage, effect.variant.detail) for effect in every}
    still = sum(over_seeds(effect.by_seed, len(every)).excludes_zero for effect in clear)
    sentences = (
        f"**Which details matter?** On the demo's task {len(by_detail)} of {len(details)} do, by "
        f"{len(every[0].by_seed)} paired seeds, in points of accuracy or gold reward: {listed}. "
        f"These {len(clear)} of {len(every)} choices are significant after correcting for all "
        f"tests of a stage, {still} of them for all tests."
    )
    return textwrap.fill(sentences, 120, break_long_words=False, break_on_hyphens=False)


def draw() -> Path:
    """A panel per stage, one below the other."""
    return draw_effects(primary_effects(), studies.ROOT / "assets" / "ablations.png")


TABLES: dict[str, Callable[[], str]] = {
    "ablations": partial(sweeps.primary_table, "ablations"),
    "ablations.short": what_matters,
}
FIGURES = {"ablations": draw}
