"""The two sweeps: their tables, a sentence on what matters, and a picture.

`tables.py` draws `assets/ablations.png`, the first outcome of each stage; all outcomes are in the
sweep's `plots/forest.png`.
"""

from collections import defaultdict
from dataclasses import fields
from pathlib import Path

from common.record.terminal import NOT_MEASURED
from common.report import markdown
from experiments.outcomes import about, over_seeds
from experiments.records import make
from experiments.records.chains import over
from experiments.sweep import effects as forest
from experiments.sweep.effects import Effect
from experiments.sweep.sweep_file import Variant

STAGES = {
    "reward": "reward model",
    "dpo": "DPO",
    "grpo": "GRPO",
    "updates": "GRPO, four updates a rollout",
}
RUNS = {  # of the sweep `iterative`
    "round_3": "DPO, three rounds, reference SFT",
    "round_2": "the same after two rounds",
    "round_1": "the same after one round",
    "moving_3": "DPO, three rounds, reference the round's start",
    "moving_2": "the same after two rounds",
    "once": "DPO, all pairs at once by the SFT model",
    "offline": "DPO on the data set's pairs",
}


def effects(part: str) -> list[Effect]:
    """All that was measured of a sweep."""
    found = []
    for own in make.read(f"{part}/sweep.json")["effects"]:
        variant = Variant(**{field.name: own[field.name] for field in fields(Variant)})
        values = own["by_seed"], own["base_by_seed"], own["together"].get("family", 0)
        found.append(Effect(variant, own["outcome"], *values))
    return found


def primary_effects() -> dict[str, list[Effect]]:
    """Of the ablations, by stage, what every detail changes in the stage's first outcome."""
    stages: dict[str, list[Effect]] = {}
    for effect in effects("ablations"):
        found = stages.setdefault(effect.variant.stage, [])
        if not found or found[0].outcome == effect.outcome:
            found.append(effect)
    return stages


def ablations() -> str:
    """A line per choice, below the base of its stage."""
    rows = []
    for stage, found in primary_effects().items():
        base = over_seeds(found[0].base)
        told = f"base: {about(found[0].outcome).heading}"
        rows.append([f"**{stage}**", told, base.spread, "", str(base.n)])
        for effect in found:
            cells = [effect.cell, effect.verdict]
            if not any(effect.by_seed):
                cells = ["the same numbers on every seed", ""]
            number = str(len(effect.by_seed))
            rows.append([effect.variant.detail, str(effect.variant.choice), *cells, number])
    return markdown.table(["detail", "choice", "effect [95%]", "matters?", "seeds"], rows)


def what_matters() -> str:
    """The details that the ablations tell, in a sentence."""
    found = [effect for own in primary_effects().values() for effect in own]
    clear = [effect for effect in found if effect.verdict == "yes"]
    by_detail = defaultdict(list)
    for effect in clear:
        detail = f"{effect.variant.detail} ({STAGES[effect.variant.stage]})"
        by_detail[detail].append(f"{effect.variant.choice} ({effect.difference.mean:+.1f})")
    told = "; ".join(f"{detail}: {', '.join(choices)}" for detail, choices in by_detail.items())
    details = {(effect.variant.stage, effect.variant.detail) for effect in found}
    still = sum(over_seeds(effect.by_seed, len(found)).excludes_zero for effect in clear)
    return (
        f"**Which details matter?** On the embedded task {len(by_detail)} of {len(details)}, by "
        f"{len(found[0].by_seed)} paired seeds, in points of accuracy or gold reward: {told}. "
        f"These {len(clear)} of {len(found)} choices are told with all intervals of a stage "
        f"together, {still} of them with all of the sweep ([every interval](docs/ablations.md))."
    )


def iterative() -> str:
    """A line per run: its outcomes, and the first one beside GRPO's."""
    runs = defaultdict(list)
    for effect in effects("iterative"):
        detail = effect.variant.detail
        runs[detail if detail in RUNS else f"{detail} {effect.variant.choice}"].append(effect)
    base = next(iter(runs.values()))
    rows = [
        [
            "GRPO",
            *(over(effect.base) for effect in base),
            NOT_MEASURED,
            NOT_MEASURED,
        ]
    ]
    for name in dict.fromkeys([*RUNS, *runs]):
        levels = [over(effect.values) for effect in runs[name]]
        rows.append([RUNS.get(name, name), *levels, runs[name][0].cell, runs[name][0].verdict])
    heads = [about(effect.outcome).heading for effect in base]
    beside = f"{about(base[0].outcome).label}, beside GRPO"
    return markdown.table(["run", *heads, beside, "told?"], rows)


def draw() -> Path:
    """A panel per stage, one below the other."""
    panels = {stage: {own[0].outcome: own} for stage, own in primary_effects().items()}
    return forest.draw(panels, make.ROOT / "assets" / "ablations.png")
