"""The systems' table, the text for the terminal and the report of an evaluation."""

from pathlib import Path

from common.distributed import is_rank0
from common.evaluation.results import Results, reward_functions, reward_model
from common.evaluation.runs import folder_of_run
from common.record.run_folder import METRICS, read_training_config, short_path
from common.record.terminal import NOT_MEASURED, folded, format_cell, grid, line_width
from common.report import sections, tables
from common.report.blocks import Block, Picture, Section, Table
from common.report.conclusions import ACCURACY, compared_accuracies, conclusions, sentence
from common.report.figures import accuracies_of, held_out, summary_figures
from common.report.page import run_facts, write_page
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
NOTES = f"""\
- Intervals are 95%: Wilson's for shares, the percentile bootstrap for means. They cover the draw of
  the evaluation rows, not the seed of the training run. Systems whose intervals overlap may still
  differ: they are measured on the same rows.
- A column with the name of a reward function or of the reward model is the mean reward of the
  completions by it.
- KL is to the reference in nats per completion, length is in tokens with the stop token, stop is
  the share of completions that ended by themselves. Minutes and GB are of training.
- {NOT_MEASURED} means that it was not measured."""
NAME_WIDTH, SYSTEM_WIDTH = 22, 16  # characters of columns in the terminal


def systems_table(results: Results) -> Table:
    """The systems of `results.json`, without the columns in which nothing was measured."""
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
            f"{reward_model(results.systems)} [95% CI]": interval_cell(system.reward, 1, 2),
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
    """The systems' table with a column for each system, several of many systems; conclusions."""
    table, width = systems_table(results), line_width()
    columns = [[format_cell(cell).replace(" [", "\n[") for cell in row] for row in table.rows]
    number = max(1, (width - NAME_WIDTH) // SYSTEM_WIDTH)  # of systems in a table
    texts = []
    for start in range(0, len(columns), number):
        systems = ((column, "right") for column in columns[start : start + number])
        texts.append(grid([(table.headers, "left"), *systems], width))
    return "\n\n".join([*texts, folded(in_words(results), width)])


def in_words(results: Results) -> str:
    """The held-out rows, differences in accuracy, and win rates against the first policy."""
    lines = [f"{held_out(results).capitalize()}; intervals are 95%."]
    if accuracies := compared_accuracies(results):
        lines.append(sentence(ACCURACY, accuracies))
    rates, baseline = results.win_rates, results.win_rates[0].b if results.win_rates else ""
    for judge in dict.fromkeys(rate.judge for rate in rates):
        wins = [
            f"{rate.a} {interval_cell(rate.interval, 100, 1)}"
            for rate in rates
            if rate.judge == judge and rate.b == baseline
        ]
        if wins:
            lines.append(f"Win rate % against {baseline}, judged by {judge}: {', '.join(wins)}.")
    return "\n".join(lines)


def write_report(results: Results, output_dir: str | Path) -> list[Path]:
    """Write `report.html`, `report.md` and pictures in `plots`; returns the files, on rank 0 only.

    `output_dir` holds `completions.jsonl`. Curves are of the runs that made the systems.
    """
    if not is_rank0():
        return []
    output_dir = Path(output_dir)
    folders = {system.name: folder_of_run(system.path)[0] for system in results.systems}
    first = {folder: name for name, folder in reversed(folders.items())}  # of its checkpoints one
    trained = filter(read_training_config, folders.values())
    runs = {first[run]: run for run in trained if (run / METRICS).is_file()}
    pictures = summary_figures(results, system_colours(folders), output_dir / "plots")
    systems: list[Block] = [
        f"{held_out(results).capitalize()}.",
        systems_table(results),
        *map(Picture, pictures),
        PAIR_NOTES * bool(results.num_pairs)
        + ATTAINABLE_NOTE * (results.attainable_accuracy is not None)
        + NOTES,
    ]
    words = conclusions(results)
    blocks = [Section("What differs", [words])] if words else []
    blocks.append(Section("Systems", systems))
    if comparison := results.comparison:
        blocks.append(Section("Preference accuracy", tables.comparison_sections(comparison)))
    if generations := tables.generation_tables(results):
        blocks.append(Section("Generations", generations))
    blocks += sections.completions_section(output_dir)
    blocks += sections.run_sections(runs)
    title = f"Results on {short_path(results.dataset)}"
    facts = {"split": results.split, **run_facts(output_dir)}
    return [*write_page(output_dir, title, blocks, facts), *pictures]
