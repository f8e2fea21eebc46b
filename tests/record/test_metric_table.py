"""Every name that a stage or the evaluation writes is in the table of `docs/metrics.md`."""

import json
import re
from dataclasses import fields
from pathlib import Path

from mistakes import STAGES
from ranks import run_stages

import evaluate
from common.config.parser import parse
from common.record.glossary import METRICS
from common.record.jsonl import read_jsonl
from experiments.stages import config_class

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "metrics.md"
IDENTITY = {"name", "kind", "path", "scored_by"}  # of a system: what it is, not what it measured
ENDS = {"low", "high", "a", "b", "judge", "first", "second"}  # of intervals and of comparisons


def table() -> dict[str, list[str]]:
    """Unit, formula and sentence of each name in the glossary."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    return {
        name.strip(): [cell.strip().replace("\\|", "|") for cell in others]
        for name, *others in cells
    }


def names_of(part: str) -> set[str]:
    """What the glossary has of `results.json`: names of a system, or of a part like win_rates."""
    found = [name.removeprefix("results: ").strip("`") for name in table() if "results: " in name]
    return {name.removeprefix(part) for name in found if name.rpartition(".")[0] + "." == part}


def test_every_metric_has_a_row_with_unit_formula_and_a_sentence() -> None:
    rows = table()
    logged = {name.strip("`"): cells for name, cells in rows.items() if "results: " not in name}
    assert list(logged) == list(METRICS)
    assert {len(cells) for cells in rows.values()} == {3}
    for name, (_, _, definition) in rows.items():
        assert definition[0].isupper() or definition[0] == "`" or definition[0].isdigit(), name
        assert definition.endswith("."), name


def test_the_page_of_symptoms_names_flags_and_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "symptoms.md").read_text()
    flags = {f.name for stage in STAGES for f in fields(config_class(stage))}
    assert set(re.findall(r"`--(\w+)", text)) <= flags
    looked_at = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")][1:]
    metrics = {name for cell in looked_at for name in re.findall(r"`([\w/<>]+)`", cell)}
    assert metrics <= set(METRICS)


def test_what_evaluation_writes_of_a_system_is_in_the_table(
    tmp_path: Path, tiny_gpt2: Path, tokenizer_folder: Path, process_group: None
) -> None:
    flags = {
        "dataset_name": "synthetic",
        "tokenizer_name_or_path": str(tokenizer_folder),
        "max_prompt_length": "128",
        "max_completion_length": "24",
    }
    training = {"model_name_or_path": str(tiny_gpt2), "max_steps": "1", "num_train_rows": "8"}
    training |= {"batch_size": "4", "num_eval_rows": "4", "output_dir": str(tmp_path / "sft")}
    run_stages([{"stage": "sft", "flags": flags | training}])
    logged = {name for line in read_jsonl(tmp_path / "sft/metrics.jsonl") for name in line}
    assert logged - {"step"} <= set(METRICS)
    flags |= {"output_dir": str(tmp_path / "eval"), "policies": str(tmp_path / "sft/model")}
    flags |= {"num_eval_rows": "8", "num_prompts": "4"}
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    arguments += ["--reward_funcs", "gold", "regex:the"]
    evaluate.main(parse(evaluate.EvaluateConfig, arguments))
    results = json.loads((tmp_path / "eval/results.json").read_text())
    (system,) = results["systems"]
    assert set(system) - IDENTITY == names_of(".")
    compared = {
        "win_rates": results["win_rates"][0],
        "comparison.differences": results["comparison"]["differences"][0],
    }
    for part, values in compared.items():
        own = {name for name in values if not name.startswith("num_")} - ENDS
        assert own == names_of(f"{part}."), part
    for name in ("report.html", "report.md", "plots/reward.png"):
        assert (tmp_path / "eval" / name).is_file()
