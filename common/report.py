"""The table and the Markdown report of a chain of runs, from what evaluation recorded.

`results.json` holds `dataset`, `num_pairs`, `attainable_accuracy` (None where it is not known),
`systems` (one mapping each: name, accuracy, accuracy_by_source, gold_reward, reward, kl, length,
stop_rate, minutes, peak_memory_gb; None where not measured) and `samples` (prompt, reference,
completions by system).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import comparison_tables
from common.distributed import is_rank0
from common.plots import summary_figure
from common.terminal import NOT_MEASURED, markdown_table


def results_table(results: Mapping[str, Any]) -> str:
    """The systems of `results.json` as a table for the terminal that is Markdown too.

    Intervals are 95%; an en dash stands where nothing was measured.
    """
    headers = ["stage", "accuracy % [95% CI]", "attainable", "gold reward [95% CI]"]
    headers += ["RM score [95% CI]", "KL", "length", "stop %", "minutes", "GB"]
    attainable = results.get("attainable_accuracy")
    rows = [
        [
            system["name"],
            _accuracy(system.get("accuracy")),
            _cell(attainable, "{:.1f}", scale=100),
            _interval(system.get("gold_reward"), "{:.3f}"),
            _interval(system.get("reward"), "{:.2f}"),
            _cell((system.get("kl") or {}).get("mean"), "{:.2f}"),
            _cell(system.get("length"), "{:.1f}"),
            _cell(system.get("stop_rate"), "{:.1f}", scale=100),
            _cell(system.get("minutes"), "{:.1f}"),
            _cell(system.get("peak_memory_gb"), "{:.2f}"),
        ]
        for system in results["systems"]
    ]
    return markdown_table(headers, rows)


def _cell(value: float | None, number: str, scale: float = 1) -> str:
    return NOT_MEASURED if value is None else number.format(scale * value)


def _interval(
    interval: Mapping[str, float] | None, number: str, key: str = "mean", scale: float = 1
) -> str:
    if not interval:
        return NOT_MEASURED
    value, low, high = (number.format(scale * interval[part]) for part in (key, "low", "high"))
    return f"{value} [{low}, {high}]"


def _accuracy(interval: Mapping[str, float] | None) -> str:
    return _interval(interval, "{:.1f}", "accuracy", scale=100)


def chain_report(
    results: Mapping[str, Any], run_dirs: Mapping[str, Path], output_dir: str | Path
) -> list[Path]:
    """Write `report.md` and `plots/summary.png` for a chain of runs that was evaluated.

    Args:
        results: what `results.json` holds.
        run_dirs: folder of each stage's run by the stage's name; folders without records are fine.
        output_dir: where the report goes; links to curves are relative to it.

    Returns:
        The files written, none on other ranks than 0.
    """
    if not is_rank0():
        return []
    output_dir = Path(output_dir)
    picture = summary_figure(results, run_dirs, output_dir / "plots" / "summary.png")
    sections = [
        f"# Results on {results['dataset']}",
        f"Held-out, {results['num_pairs']:,} preference pairs.",
        results_table(results),
        "![Accuracy, reward and training curves](plots/summary.png)",
        *(_comparison_sections(results) or _source_section(results["systems"])),
        *_curves_section(run_dirs, output_dir),
        *_samples_section(results.get("samples", [])),
        *_reading_section(results),
    ]
    report = output_dir / "report.md"
    report.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return [report, picture]


def _comparison_sections(results: Mapping[str, Any]) -> list[str]:
    """The systems on the same pairs, and their calibration, where evaluation compared them."""
    comparison = results.get("comparison")
    if not comparison:
        return []
    sections = []
    for table in comparison_tables.tables(comparison):
        sections += [f"## {table.title}", markdown_table(table.headers, table.rows), table.note]
    picture = "![Predicted against observed](plots/calibration.png)"
    return [*sections, picture] if comparison["calibration"] else sections


def _source_section(systems: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accuracy by the source of the rows, where there is more than one source."""
    by_source = {system["name"]: system.get("accuracy_by_source") or {} for system in systems}
    sources = sorted({source for parts in by_source.values() for source in parts})
    if len(sources) < 2:
        return []
    rows = [
        [name, *(_accuracy(parts.get(source)) for source in sources)]
        for name, parts in by_source.items()
    ]
    return ["## Accuracy by source", markdown_table(["stage", *sources], rows)]


def _curves_section(run_dirs: Mapping[str, Path], output_dir: Path) -> list[str]:
    curves = {name: Path(run) / "plots" / "curves.png" for name, run in run_dirs.items()}
    links = [
        f"- [{name}]({Path(os.path.relpath(path, output_dir)).as_posix().replace(' ', '%20')})"
        for name, path in curves.items()
        if path.exists()
    ]
    return ["## Training curves", "\n".join(links)] if links else []


def _samples_section(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    sections = ["## Samples"] if samples else []
    for number, sample in enumerate(samples, start=1):
        texts = {"*reference*": sample.get("reference"), **sample["completions"]}
        rows = [[name, _one_line(text)] for name, text in texts.items() if text is not None]
        fence = "`" * 4 if "```" in sample["prompt"] else "`" * 3
        sections += [
            f"### Prompt {number}",
            f"{fence}text\n{sample['prompt']}\n{fence}",
            _text_table(["system", "completion"], rows),
        ]
    return sections


def _one_line(text: str) -> str:
    """Text for a Markdown cell: no line break, and `<` shown rather than read as HTML."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split()) or "*(empty)*"


def _text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of prose: not padded, since no terminal is as wide as a completion."""
    lines = [headers, ["---"] * len(headers), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _reading_section(results: Mapping[str, Any]) -> list[str]:
    ties = [
        f"{system['name']} {system['accuracy']['num_ties']}"
        for system in results["systems"]
        if system.get("accuracy")
    ]
    notes = [
        "Accuracy is the share of held-out pairs in which a system scores the chosen completion "
        "higher: a reward model by its score, a policy by beta log(pi / ref), the reference "
        "itself by its log-probability. A pair with equal scores counts one half. Ties: "
        f"{', '.join(ties) or 'none'}.",
        "Intervals are 95%: Wilson's for accuracy, the percentile bootstrap for means. They cover "
        "the draw of the evaluation rows, not the seed of the training run. Two systems whose "
        "intervals are apart differ; if the intervals overlap they may still differ, since both "
        "are measured on the same rows.",
        "KL is to the reference in nats per completion, length is in tokens with the stop token, "
        "stop is the share of completions that ended by themselves. Minutes and GB are the wall "
        "time and the peak memory of training.",
    ]
    attainable = results.get("attainable_accuracy")
    if attainable is not None:
        notes.insert(
            1,
            f"Attainable is {100 * attainable:.1f}%: the labels were drawn with known "
            "probabilities, and no system can be right more often in expectation.",
        )
    dash = f"{NOT_MEASURED} means that it was not measured."
    return ["## How to read this", "\n".join(f"- {note}" for note in [*notes, dash])]
