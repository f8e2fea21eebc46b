"""The systems' table, the text for the terminal and the report of an evaluation."""

from collections.abc import Sequence
from pathlib import Path

from common.distributed import is_rank0
from common.evaluation.results import Results, reward_functions
from common.evaluation.runs import folder_of_run
from common.record.run_folder import METRICS, short_path
from common.record.terminal import NOT_MEASURED, folded, format_cell, grid, line_width
from common.report import sections, tables
from common.report.blocks import Block, Picture, Section, Table
from common.report.figures import accuracies_of, held_out, summary_figures
from common.report.page import numeric, run_facts, write_page
from common.report.plots import system_colours
from common.report.tables import interval_cell

PAIR_NOTES = """\
- Accuracy is the share of held-out pairs in which a system scores the chosen completion higher; a
  pair with equal scores counts one half. The column `accuracy by` says by which score: implicit
  rewards and log-probabilities are different quantities. Where prompts have several pairs, read the
  interval over prompts in the section on preference accuracy.
"""
ATTAINABLE_NOTE = """\
- Attainable is the accuracy that no system can exceed in expectation, where the labels were drawn
  with known probabilities.
"""
READING_NOTES = f"""\
- Intervals are 95%: Wilson's for shares, the percentile bootstrap for means. They cover the draw of
  the evaluation rows, not the seed of the training run. Systems whose intervals overlap may still
  differ: they are measured on the same rows.
- KL is to the reference in nats per completion, length is in tokens with the stop token, stop is
  the share of completions that ended by themselves. Minutes and GB are of training.
- {NOT_MEASURED} means that it was not measured."""
MAX_CELL_WIDTH = 30  # characters of a line in a cell of `stacked_tables`


def systems_table(results: Results) -> Table:
    """The systems of `results.json`.

    Intervals are 95%; an en dash stands where nothing was measured, and a column of nothing else is
    left out.
    """
    functions, accuracies = reward_functions(results.systems), accuracies_of(results.systems)
    rows = []
    for system in results.systems:
        if system.kind == "reward_model" and not results.num_pairs:
            continue  # it judged, and was not judged
        accuracy, rewards = accuracies[system.name], system.rewards
        sampled = system.generations
        kl = sampled.kl if sampled else None
        row = {
            "stage": system.name,
            "accuracy % [95% CI]": interval_cell(accuracy, 100, 1),
            "accuracy by": (accuracy and system.scored_by) or NOT_MEASURED,
            "attainable": number_cell(results.attainable_accuracy, 1, scale=100),
            "gold reward [95% CI]": interval_cell(system.gold_reward, 1, 3),
            **{f"{name} [95% CI]": interval_cell(rewards.get(name), 1, 3) for name in functions},
            "RM score [95% CI]": interval_cell(system.reward, 1, 2),
            "KL": number_cell(kl.mean if kl else None, 2),
            "length": number_cell(sampled.length if sampled else None, 1),
            "stop %": number_cell(sampled.stop_rate if sampled else None, 1, scale=100),
            "minutes": number_cell(system.minutes, 1),
            "GB": number_cell(system.peak_memory_gb, 2),
        }
        rows.append(row)
    shown = [name for name in rows[0] if any(row[name] != NOT_MEASURED for row in rows)]
    return Table(shown, [[row[name] for name in shown] for row in rows])


def number_cell(value: float | None, digits: int, *, scale: float = 1) -> str:
    """A number, or an en dash."""
    return NOT_MEASURED if value is None else f"{scale * value:.{digits}f}"


def terminal_text(results: Results) -> str:
    """The systems' table and its conclusions.

    No line is longer than the terminal's: a wider table becomes several.
    """
    table = systems_table(results)
    num_keys = [*numeric(table), True].index(True)  # columns of names
    text = stacked_tables(table.headers, table.rows, num_keys)
    return f"{text}\n\n{folded(conclusions(results), line_width())}"


def stacked_tables(headers: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int) -> str:
    """A table, in several one below another where it is wider than the terminal.

    Each has the first `num_keys` columns, to the left, and some of the others, to the right. Long
    cells wrap inside their column, and heads before a bracket.
    """
    heads = [head.replace(" [", "\n[") for head in map(format_cell, headers)]
    columns = [
        [folded(text, MAX_CELL_WIDTH) for text in [head, *map(format_cell, cells)]]
        for head, *cells in zip(heads, *rows, strict=True)
    ]
    sizes = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    room = line_width() - sum(2 + size for size in sizes[:num_keys])
    groups: list[list[int]] = [[]]  # columns of each table, without the keys
    for i in range(num_keys, len(sizes)):
        if groups[-1] and sum(2 + sizes[j] for j in [*groups[-1], i]) > room + 2:
            groups.append([])
        groups[-1].append(i)
    keys = [(column, "left") for column in columns[:num_keys]]
    tables = ([*keys, *((columns[i], "right") for i in group)] for group in groups)
    return "\n\n".join(grid(each, line_width()) for each in tables)


def conclusions(results: Results) -> str:
    """The held-out rows, and win rates against the first policy, in words."""
    line = f"{held_out(results).capitalize()}; intervals are 95%."
    rates = results.win_rates
    judges = list(dict.fromkeys(rate.judge for rate in rates))
    judge = "gold" if "gold" in judges else next(iter(judges[::-1]), None)  # a judge function's
    baseline = rates[0].b if rates else None
    wins = [
        f"{rate.a} {interval_cell(rate.interval, 100, 1)}"
        for rate in rates
        if rate.judge == judge and rate.b == baseline
    ]
    won = f"Win rate % against {baseline}, judged by {judge}: {', '.join(wins)}."
    return f"{line}\n{won}" if wins else line


def write_report(results: Results, output_dir: str | Path) -> list[Path]:
    """Write `report.html`, `report.md` and pictures in `plots`; returns the files, on rank 0 only.

    `output_dir` holds `completions.jsonl`. Curves are of the runs that made the systems.
    """
    if not is_rank0():
        return []
    output_dir = Path(output_dir)
    folders = {system.name: folder_of_run(system.path)[0] for system in results.systems}
    first = {folder: name for name, folder in reversed(folders.items())}  # of its checkpoints one
    runs = {first[run]: run for run in folders.values() if (run / METRICS).is_file()}
    pictures = summary_figures(results, system_colours(folders), output_dir / "plots")
    systems: list[Block] = [
        f"{held_out(results).capitalize()}.",
        systems_table(results),
        *map(Picture, pictures),
        (PAIR_NOTES if results.num_pairs else "")
        + (ATTAINABLE_NOTE if results.attainable_accuracy is not None else "")
        + READING_NOTES,
    ]
    blocks = [Section("Systems", systems)]
    if comparison := results.comparison:
        blocks.append(Section("Preference accuracy", tables.comparison_sections(comparison)))
    if generations := tables.generation_tables(results):
        blocks.append(Section("Generations", generations))
    blocks += sections.completions_section(output_dir)
    blocks += sections.run_sections(runs)
    title = f"Results on {short_path(results.dataset)}"
    facts = {"split": results.split, **run_facts(output_dir)}
    return [*write_page(output_dir, title, blocks, facts), *pictures]
