"""The report of over-optimisation, made of `results.json` alone."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.evaluation.intervals import interval_cell
from common.record.terminal import format_cell
from common.report.blocks import Block, Picture, Section, Table
from common.report.page import write_page
from experiments.overoptimization.plots import (
    SETTINGS,
    TITLES,
    Results,
    draw_curves,
    draw_frontier,
    series_of,
)

FIT_NOTE = (
    "R_bon(d) = d (alpha - beta d) for best of n, R_rl(d) = d (alpha - beta log d) for the others "
    "(Gao et al. 2022), least squares on the gain in gold of every seed and setting. Intervals: "
    "bootstrap over seeds and, within each, over prompts. With few seeds they say little about the "
    "next seed. A peak beyond the longest distance is extrapolated."
)


def write(results: Results, output_dir: Path) -> list[Path]:
    """Write `plots/*.png`, `report.html` and `report.md`; returns the files."""
    curves = draw_curves(results, output_dir / "plots" / "overoptimization.png")
    frontier = draw_frontier(results, output_dir / "plots" / "frontier.png")
    settings = results["settings"]
    seeds = ", ".join(str(start["seed"]) for start in results["seeds"])
    facts = {"data set": settings["dataset_name"], "gold": settings["gold"], "seeds": seeds}
    caption = (
        "Gain over the SFT policy in standard deviations of its own samples. Gold solid, proxy "
        "dashed; seeds thin, their mean thick."
    )
    dots = Picture(frontier, "Dots are single seeds, lines their mean.")
    blocks: list[Block] = [
        summary(results),
        Picture(curves, caption),
        Section("Who turned", [turns_table(results)]),
        Section("Reward-KL frontier", [dots, means_table(results)]),
        Section("Fitted curves", [fits_table(results), FIT_NOTE]),
        Section("Where each seed began", [starts_table(results)]),
        Section("How to read this", [notes(settings)]),
    ]
    return [curves, frontier, *write_page(output_dir, "Over-optimisation", blocks, facts)]


def summary(results: Results) -> str:
    """One line for each method: in how many seeds gold fell while the proxy rose."""
    lines = []
    for method in (fit["method"] for fit in results["fits"]):
        turns = [turn for turn in results["turns"] if turn["method"] == method]
        both = sum(turn["turned"] and turn["proxy_rose"] for turn in turns)
        gold = ", ".join(f"{turn['gold_change']['mean']:+.3f}" for turn in turns)
        proxy = ", ".join(f"{turn['proxy_change']['mean']:+.2f}" for turn in turns)
        seeds = f"of {len(turns)} seeds"
        line = (
            f"gold fell while the proxy rose in {both} {seeds} (from the best setting to the "
            f"last one gold {gold}, proxy {proxy})."
        )
        if all(turn["peak"] == turn["last"] for turn in turns):
            line = f"gold was best at the last setting in {len(turns)} {seeds}: nothing turned."
        lines.append(f"- **{TITLES[method]}**: {line}")
    how = "A change counts if its 95% interval lies apart from 0."
    return "\n".join(lines) + f"\n\n{how}"


def turns_table(results: Results) -> Table:
    """A row for each method and seed."""
    headers = ["method, seed", "best setting", "last setting", "sqrt KL, best to last"]
    headers += ["change in gold [95% CI]", "change in proxy [95% CI]"]
    rows = [
        [
            f"{TITLES[turn['method']]}, {turn['seed']}",
            *(f"{SETTINGS[turn['method']]} {turn[which]:g}" for which in ("peak", "last")),
            f"{turn['peak_distance']:.2f} to {turn['last_distance']:.2f}",
            interval_cell(turn["gold_change"], 1, 3, sign="+"),
            interval_cell(turn["proxy_change"], 1, 2, sign="+"),
        ]
        for turn in results["turns"]
    ]
    caption = (
        "From the setting with the largest gold reward to the last one. That setting is looked for "
        "on every other prompt, and the changes are measured on those between: the largest of "
        "several means is too large by chance."
    )
    return Table(headers, rows, caption)


def means_table(results: Results) -> Table:
    """Every setting, mean over the seeds."""
    columns = {"kl": ".2f", "gold": ".3f", "gold_gain": "+.3f", "proxy_gain": "+.2f"}
    headers = ["method", "setting", "KL", "gold", "gold gain", "proxy gain"]
    rows = []
    for method in (fit["method"] for fit in results["fits"]):
        means = {name: series_of(results, method, name).mean(0) for name in columns}
        for k, setting in enumerate(series_of(results, method, "setting")[0]):
            numbers = [f"{means[name][k]:{form}}" for name, form in columns.items()]
            rows.append([TITLES[method], f"{SETTINGS[method]} {setting:g}", *numbers])
    return Table(headers, rows, "Mean over the seeds; each seed is in results.json.")


def fits_table(results: Results) -> Table:
    """A row for each method; an end of an interval that is None is infinite."""
    headers = ["method", "form", "alpha [95% CI]", "beta [95% CI]", "peak at d [95% CI]"]
    headers += ["longest d", "rmse of bon", "rmse of rl"]
    rows = []
    for fit in results["fits"]:
        found = [fit[name] or {} for name in ("alpha", "beta", "peak")]
        ends = [{k: math.inf if v is None else v for k, v in own.items()} for own in found]
        fitted = [interval_cell(own, 1, 3, "value") for own in ends]
        rmse = [f"{fit['rmse_of_forms'][form]:.3f}" for form in ("bon", "rl")]
        rest = [*fitted, f"{fit['longest_distance']:.2f}", *rmse]
        rows.append([TITLES[fit["method"]], fit["form"], *rest])
    return Table(headers, rows, "d = sqrt(KL) in sqrt(nats), rewards in units of the gold judge.")


def starts_table(results: Results) -> Table:
    """The SFT policy and the proxy of each seed."""
    headers = ["seed", "gold of SFT [95% CI]", "SD of gold", "SD of proxy"]
    headers += ["proxy against gold (r)", "proxy's accuracy % on held-out pairs [95% CI]"]
    rows = [
        [
            str(start["seed"]),
            interval_cell(start["gold"], 1, 3),
            f"{start['gold_std']:.3f}",
            f"{start['proxy_std']:.2f}",
            format_cell(start["judges_correlation"]),
            interval_cell(start["proxy_accuracy"], 100, 1, "accuracy"),
        ]
        for start in results["seeds"]
    ]
    return Table(headers, rows, "r: correlation over completions of the same prompt.")


def notes(settings: Mapping[str, Any]) -> str:
    """What was measured and what its limits are."""
    return (
        f"- The proxy saw {settings['num_proxy_pairs']} pairs, others for each seed. All four "
        "methods optimise it; none sees the gold judge.\n"
        f"- Measured on {settings['num_prompts']} held-out prompts: best of n from "
        f"{max(settings['best_of'])} samples of each, with the mean over all subsets of n; "
        f"other policies by {settings['num_samples']} completions of each.\n"
        "- KL of best of n is log n - (n - 1) / n, an upper bound: completions that come more "
        "than once make the true one smaller. Of the others it is the mean of log pi - log "
        "SFT over the policy's own completions.\n"
        "- Intervals in tables are bootstrap intervals over the prompts of one seed, those of "
        "the fits over seeds and prompts. A fall counts if its interval lies below 0."
    )
