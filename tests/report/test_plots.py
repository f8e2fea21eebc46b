"""Figures and the report show what was recorded: the right numbers, in files that can be read.

About `common.report`.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from matplotlib.figure import Figure
from PIL import Image

from common.evaluation import records
from common.evaluation.accuracy import Interval, PreferenceAccuracy
from common.evaluation.records import BASELINES, Generation, PromptRecord
from common.evaluation.results import (
    ComparedScore,
    Comparison,
    GenerationSummary,
    Results,
    System,
    WinRate,
)
from common.record.glossary import METRICS, PREFIXES
from common.report import evaluation_report, figures, plots
from common.report.evaluation_report import systems_table, write_report
from common.report.plots import (
    PANELS,
    Line,
    Panel,
    curve_panels,
    draw_panel,
    plot_run,
    recorded_line,
)
from common.report.sections import run_sections
from common.report.tables import generation_tables

SIGNS = {"reward": 1.0, "reward/gold": -1.0}


def record(run_dir: Path, lines: list[dict[str, Any]]) -> Path:
    return tiny.write_rows(run_dir / "metrics.jsonl", lines).parent


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def ink(path: Path) -> float:
    """Share of the pixels that are not white."""
    return float((pixels(path) < 250).any(-1).mean())


def accuracy(value: float, low: float, high: float, num_ties: int = 0) -> PreferenceAccuracy:
    return PreferenceAccuracy(value, low, high, 200, num_ties)


def system(name: str, **changes: Any) -> System:
    """A policy; what is changed is of the system or of its generations."""
    means = {"length": 20.0, "stop_rate": 0.95, "kl": Interval(1.25, 1.0, 1.5)}
    means |= {key: changes.pop(key) for key in ("kl", "rewards") if key in changes}
    nothing = Interval(math.nan, None, None)
    generations = GenerationSummary(
        length_interval=nothing,
        stop_rate_interval=nothing,
        entropy=None,
        distinct_completions=1.0,
        **means,
    )
    values = {"accuracy": accuracy(0.5, 0.43, 0.57), "gold_reward": Interval(0.55, 0.5, 0.6)}
    values |= {"generations": generations, "minutes": 2.5, "peak_memory_gb": 1.234}
    return System(name, "policy", "model", **(values | changes))


@pytest.fixture
def results() -> Results:
    nothing = {"gold_reward": None, "generations": None}
    return Results(
        dataset="synthetic",
        num_pairs=200,
        attainable_accuracy=0.842,
        systems=[
            system("SFT", kl=None),
            system("Reward model", **nothing, accuracy=accuracy(0.8125, 0.75, 0.86, num_ties=3)),
        ],
    )


# --- curves ---


def test_every_panel_shows_defined_metrics_and_each_only_once() -> None:
    shown = [name for _, _, names in PANELS for name in names]
    assert len(shown) == len(set(shown))
    assert set(shown) - set(PREFIXES) <= set(METRICS)


def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 1 / s, "reward/gold": 0.1 * s} for s in range(1, 10)]
    run_dir = record(tmp_path / "run", [*lines, {"step": 9, "eval_loss": 0.2}])
    (picture,) = plot_run(run_dir)
    assert picture == run_dir / "plots" / "curves.png"
    height, width, _ = pixels(picture).shape
    assert width > height > 200  # two panels in a row
    assert 0.01 < ink(picture) < 0.5


def test_nothing_recorded_is_no_picture(tmp_path: Path) -> None:
    assert plot_run(tmp_path) == []
    assert plot_run(record(tmp_path / "run", [{"step": 1, "tokens": 5.0}])) == []


def test_other_ranks_draw_nothing(tmp_path, monkeypatch, results):
    monkeypatch.setattr(plots, "is_rank0", lambda: False)
    monkeypatch.setattr(evaluation_report, "is_rank0", lambda: False)
    assert plot_run(record(tmp_path / "run", [{"step": 1, "loss": 1.0}])) == []
    assert write_report(results, tmp_path / "eval") == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["metrics.jsonl", "run"]


def test_a_curve_reads_null_as_a_gap() -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": None}]
    curve = recorded_line(lines, "loss")
    assert curve.x == [1, 3]
    assert curve.y[0] == 2.0
    assert math.isnan(curve.y[1])


def test_a_long_curve_is_pale_below_its_moving_mean() -> None:
    axes = Figure().subplots()
    spike = [0.5 * x for x in range(90)]
    spike[10] += 7000
    draw_panel(axes, Panel("Loss", "loss", [Line("loss", range(90), spike)]))
    pale, bold = (line.get_xydata() for line in axes.get_lines())
    assert pale[:, 1].tolist() == spike
    assert bold[:, 0].tolist() == list(range(3, 87))  # means of 3 values on either side
    assert bold[4:11, 1] == pytest.approx([0.5 * x + 1000 for x in range(7, 14)])
    assert bold[11:, 1] == pytest.approx([0.5 * x for x in range(14, 87)])  # the spike is gone


def test_a_moving_mean_is_named_only_where_one_is_drawn(tmp_path: Path, monkeypatch) -> None:
    """Not by the number of records: of many steps few may have a metric, and some are exact."""
    titles: list[str] = []
    draw = plots.titled_figure
    monkeypatch.setattr(plots, "titled_figure", lambda t, *size: titles.append(t) or draw(t, *size))
    for name, number in (("loss", 3), ("loss", 60), ("learning_rate", 61), ("loss", 61)):
        lines = [{"step": s} | ({name: 1.0} if s < number else {"tokens": 1}) for s in range(99)]
        run_dir = record(tmp_path / f"{name}_{number}", lines)
        plot_run(run_dir)
        (section,) = run_sections({"run": run_dir})
        is_smoothed = (name, number) == ("loss", 61)
        assert ("moving mean" in section.blocks[0].blocks[0].caption) == is_smoothed
        assert ("moving mean" in titles.pop()) == is_smoothed


@pytest.mark.parametrize("steps", [[1], [500], [1, 2], [7, 8, 9], [0, 400]])
def test_steps_are_labelled_with_whole_numbers_that_the_axis_shows(steps: list[int]) -> None:
    axes = Figure().subplots()
    draw_panel(axes, Panel("Loss", "loss", [Line("loss", steps, [1.0] * len(steps))]))
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(float(tick).is_integer() for tick in ticks)
    assert high - low >= 1 or len(steps) > 1
    if len(steps) == 1:
        assert ticks == steps


@pytest.mark.parametrize("values", [[0.0], [1.0], [0.0, 0.01, 0.0], [0.0, 1.0], [1.0] * 80])
@pytest.mark.parametrize("unit", ["share", "share of pairs"])
def test_a_share_has_an_axis_within_0_and_1(values: list[float], unit: str) -> None:
    axes = Figure().subplots()
    draw_panel(axes, Panel("Shares", unit, [Line("clip_fraction", range(len(values)), values)]))
    low, high = axes.get_ylim()
    assert 0 <= low <= min(values) <= max(values) <= high <= 1
    assert low < high
    assert not any(line.get_clip_on() for line in axes.get_lines()), "whole at 0 and 1"


def test_accuracies_have_an_axis_within_0_and_100(results: Results) -> None:
    results.systems[0].accuracy = accuracy(1.0, 0.99, 1.0)
    results.systems[1].accuracy = accuracy(0.0, 0.0, 0.01)
    axes = Figure().subplots()
    figures.draw_accuracy(axes, results, {"SFT": "black", "Reward model": "red"})
    assert axes.get_ylim() == (0, 100)


def test_a_title_quotes_the_function_and_shows_that_its_name_goes_on() -> None:
    names = ["reward", 20 * "a" + 20 * "b", 20 * "a" + 20 * "c"]
    panels = curve_panels([{"step": 1, **{f"reward/{name}": 1.0 for name in names}}])
    titles = [panel.title for panel in panels]
    assert "Reward 'reward'" in titles
    assert sum(title.endswith("b\N{HORIZONTAL ELLIPSIS}'") for title in titles) == 1


def test_evaluations_are_drawn_with_their_intervals() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "reward": 0.1 * step} for step in range(100)]
    for step, low in ((0, 0.25), (50, None)):  # None: of a single prompt
        evaluated = {"eval_reward": 0.5, "eval_reward_low": low, "eval_reward_high": 0.75}
        lines.append({"step": step, **evaluated, "reward/a_low": 1, "eval_reward/a_low": 0.5})
    reward, function = curve_panels(lines)
    assert [line.label for line in reward.lines] == ["reward", "eval_reward"]
    assert function.title == "Reward 'a_low'"  # a name, and no end of an interval
    assert [line.label for line in function.lines] == ["reward/a_low", "eval_reward/a_low"]
    axes = Figure().subplots()
    draw_panel(axes, reward)
    bars, gap = axes.collections[0].get_segments()
    assert bars.tolist() == [[0, 0.25], [0, 0.75]]
    assert len(gap) == 0


# --- table and report ---


def test_the_table_by_hand(results: Results) -> None:
    lines = str(systems_table(results)).splitlines()
    assert len({len(line) for line in lines}) == 1  # aligned
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    sft = ["SFT", "50.0 [43.0, 57.0]", "84.2", "0.550 [0.500, 0.600]"]
    assert cells[2] == [*sft, "20.0", "95.0", "2.5", "1.23"]
    reward = ["Reward model", "81.2 [75.0, 86.0]", "84.2", "–", "–", "–", "2.5", "1.23"]
    assert cells[3] == reward
    assert len(cells[0]) == len(reward)
    assert not {"reward [95% CI]", "KL"} & set(cells[0])  # columns of nothing
    results.attainable_accuracy = None
    assert "84.2" not in str(systems_table(results))
    assert "attainable" not in str(systems_table(results))


def test_what_a_reward_function_gave_is_in_table_figure_and_numbers(results: Results) -> None:
    sft, judge = results.systems
    judge.kind = "reward_model"
    sft.gold_reward = None
    sft.generations.rewards = {
        name: Interval(mean, mean - 0.1, mean + 0.1)
        for name, mean in (("Reward model", 2.0), ("positive", 0.891), ("short", 0.25))
    }
    sft.reward = sft.generations.rewards["Reward model"]
    headers, _, row, empty = (line.split("|") for line in str(systems_table(results)).splitlines())
    names = [f"{name} [95% CI]" for name in ("positive", "short", "Reward model")]
    assert [h.strip() for h in headers[4:7]] == names
    assert {"Reward model", "positive", "short"} < {*generation_tables(results)[1].headers}
    cells = ["0.891 [0.791, 0.991]", "0.250 [0.150, 0.350]", "2.00 [1.90, 2.10]"]
    assert [c.strip() for c in row[4:7]] == cells
    assert empty[4].strip() == "–"
    axes = Figure().subplots()
    figures.draw_reward(axes, results, {"SFT": "black"})
    assert "'positive'" in axes.get_title("left") + axes.get_title()
    (dot,) = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert dot.get_ydata().tolist() == [0.891]


def test_the_report_holds_table_picture_curves_samples_and_the_ties(tmp_path, results):
    run_dir = record(tmp_path / "the run", [{"step": s, "loss": 1 / s} for s in range(1, 100)])
    tiny.write_run_config(run_dir)
    plot_run(run_dir)
    results.dataset = "/home/someone/data/pairs"
    texts = {"SFT": " One <|endoftext|>\nline", "GRPO": ""}
    systems = {name: Generation(text, 9, True) for name, text in texts.items()}
    reference = Generation(" The facts.", 3, True)
    (tmp_path / "eval").mkdir()
    made_records = [PromptRecord(0, "A post.\n\nTL;DR:", reference, systems)]
    records.write_records(records.PairScores([]), made_records, tmp_path / "eval")
    results.systems[0].path = str(run_dir / "checkpoints" / "step_00000050" / "model")
    results.systems[1].path = str(tmp_path / "none/model")
    written = write_report(results, tmp_path / "eval")
    pictures = [f"plots/{name}.png" for name in ("accuracy", "reward")]
    names = ["report.html", "report.md", *pictures]
    assert written == [tmp_path / "eval" / name for name in names]
    assert written[0].read_text().count('class="picture single"') == 3, "one below another"
    text = written[1].read_text()
    assert text.startswith("# Results on data/pairs\n")
    assert str(systems_table(results)) in text
    assert all(f"({picture})" in text for picture in pictures)
    assert "(../the%20run/plots/curves.png)" in text
    assert "none/plots" not in text
    rows = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines()]
    assert ["| SFT", "One &lt;\\|endoftext\\|> line", "9 tokens, stopped by stop token |"] in rows
    assert ["| reference", "The facts.", "3 tokens, stopped by stop token |"] in rows
    assert ["| GRPO", "*(empty)*", "9 tokens, stopped by stop token |"] in rows
    assert "84.2" in text
    assert "Attainable" in text
    assert all(ink(picture) > 0.01 for picture in written[2:])


def test_a_chain_without_gold_rewards_or_runs_is_reported(tmp_path: Path, results: Results) -> None:
    results.attainable_accuracy = None
    for each in results.systems:
        each.gold_reward = None
    _, text, *pictures = write_report(results, tmp_path)
    assert "attainable" not in text.read_text().lower()
    assert [picture.stem for picture in pictures] == ["accuracy"]
    assert all(ink(picture) > 0.005 for picture in pictures)


def test_the_summary_draws_each_system_at_its_accuracy(results: Results) -> None:
    axes = Figure().subplots()
    figures.draw_accuracy(axes, results, {"SFT": "black", "Reward model": "red"})
    dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [tuple(dot.get_xydata()[0]) for dot in dots] == [(0, 50.0), (1, 81.25)]
    levels = [line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert levels == [50.0, 84.2]
    low, high = axes.get_ylim()
    assert low < 43.0
    assert high > 86.0
    ends = [path.vertices[:, 1].tolist() for c in axes.collections for path in c.get_paths()]
    assert ends == [pytest.approx([43.0, 57.0]), pytest.approx([75.0, 86.0])]


def test_a_system_has_one_colour_in_every_picture(tmp_path, monkeypatch):
    colours = plots.system_colours(["mine", "sft", "grpo", "another", "mine"])
    assert len(set(colours.values())) == 4
    others = plots.system_colours(["grpo", "reward", "sft"])
    assert all(others[name] == colours[name] for name in ("sft", "grpo"))
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, *_, **__: drawn.append(figure))
    plot_run(record(tmp_path / "grpo", [{"step": 1, "loss": 1.0, "eval_loss": 2.0}]))
    assert drawn[0].axes[0].get_lines()[0].get_color() == colours["grpo"]


def test_steps_are_labelled_by_whole_numbers() -> None:
    lines = [Line(name, [1, 2, 3], [sign, 2 * sign, 3 * sign]) for name, sign in SIGNS.items()]
    figure = Figure()
    axes = figure.subplots()
    draw_panel(axes, Panel("Reward", "mean", lines))
    figure.canvas.draw()
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_the_terminal_shows_the_systems_and_win_rates(results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    pairs = [("DPO", "SFT", 0.625), ("SFT", "reference completion", 0.4), ("GRPO", "SFT", 0.7)]
    results.win_rates = [replace(RATE, a=a, b=b, win_rate=value) for a, b, value in pairs]
    results.win_rates += [replace(each, judge="anna") for each in results.win_rates[:1]]
    results.systems.append(system("DPO", gold_reward=Interval(0.75, None, None)))
    compared = [(BASELINES[0], 0.6), (BASELINES[1], 0.6), ("Reward model", 0.8125)]
    scores = [ComparedScore(name, accuracy(value, value, value)) for name, value in compared]
    results.comparison = Comparison(200, 200, scores, [])
    text = evaluation_report.terminal_text(results)
    table, sentences = text.split("\n\n")
    shown = systems_table(results)
    expected = []  # the words of a measure: its name, each system's value, the ends of intervals
    for name, *cells in zip(shown.headers, *shown.rows, strict=True):
        split = [cell.partition(" [") for cell in cells]
        expected += [name, *(mean for mean, _, _ in split), *(ends for _, _, ends in split)]
    head, _, *lines = table.splitlines()
    words = " ".join([head, *lines]).replace("[", "").split()
    assert words == " ".join(expected).replace("[", "").split()
    assert sentences.splitlines() == [
        "Held-out, 200 preference pairs; intervals are 95%.",
        "Win rate % against SFT, judged by gold: DPO 62.5 [50.0, 75.0], GRPO 70.0 [50.0, 75.0].",
        "Win rate % against SFT, judged by anna: DPO 62.5 [50.0, 75.0].",
    ]


@pytest.mark.parametrize("columns", ["", "80", "62"])
def test_no_line_of_the_terminal_is_longer_than_it(results, columns, monkeypatch):
    """Without a terminal 80; many systems are in several tables, each with the measures' names."""
    monkeypatch.setenv("COLUMNS", columns)
    name = "output/a quite long name of an experiment/grpo-beta-0.05-seed-17"
    reward = {"regex:" + "x" * 40: Interval(-12.5, -13.5, -11.5)}
    of_model = Interval(-0.06, -0.29, 0.19)
    results.systems += [system(name, rewards=reward), system("sft", reward=of_model)]
    lines = evaluation_report.terminal_text(results).splitlines()
    assert 56 < max(map(len, lines)) <= int(columns or 80)
    num_tables = sum({*line} == {"-"} for line in lines)
    assert num_tables > 1
    assert sum(line.startswith("length  ") for line in lines) == num_tables
    for row in systems_table(results).rows[::3]:
        for word in " ".join(row).split():
            assert word in "\n".join(lines), word


# --- tables of generations ---

RM = System("rm", "reward_model", "rm/model")
INTERVAL = Interval(0.5, 0.25, 0.75, 4)
RATE = WinRate("dpo", "sft", "gold", 0.625, 0.5, 0.75, 2, 1, 1, 3, -1.25, None)


def test_what_was_measured_is_shown_and_what_was_not_is_a_dash():
    generations = GenerationSummary(7.0, INTERVAL, 0.5, INTERVAL, None, 0.75, rouge_l=INTERVAL)
    references = replace(generations, rewards={"gold": INTERVAL})
    generations.rewards = {"gold": INTERVAL, "rm": None}
    systems = [RM, System("dpo", "policy", "dpo/model", generations=generations)]
    results = Results(systems=systems, reference_completions=references, win_rates=[RATE])
    quality, rewards, rates = generation_tables(results)
    shown = dict(zip(quality.headers, quality.rows[0], strict=True))
    assert (shown["ROUGE-L"], shown["length"]) == ("50.0 [25.0, 75.0]", "0.5 [0.2, 0.8]")
    assert (shown["KL"], shown["distinct %"]) == ("–", "75.0")
    assert [row[0] for row in quality.rows] == ["dpo", "reference completion"]
    assert rewards.headers == ["system", "gold", "rm"]
    assert rewards.rows[1] == ["reference completion", "0.500 [0.250, 0.750]", "–"]
    expected = ["dpo against sft", "gold", "62.5 [50.0, 75.0]", "–", "2", "1", "1", "3", "-1.2"]
    assert rates.rows == [expected]


def test_an_evaluation_without_generations_has_no_such_table():
    assert generation_tables(Results(systems=[RM])) == []
    assert generation_tables(Results()) == []
