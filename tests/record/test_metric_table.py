"""Every name that a stage or the evaluation writes is in the table of `docs/metrics.md`."""

import json
from pathlib import Path

from ranks import run_stages

import evaluate
from common.config import parse
from common.record.glossary import METRICS
from common.record.jsonl import read_jsonl
from common.record.metric_table import COMPARISONS, EVALUATION, FORMULAS, glossary_table

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "metrics.md"
IDENTITY = {"name", "kind", "path"}  # of a system: what it is, not what it measured
ENDS = {"low", "high", "a", "b", "judge", "first", "second"}  # of intervals and of comparisons


def rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("| `")]


def test_every_metric_has_a_row_with_unit_and_formula() -> None:
    assert list(FORMULAS) == list(METRICS)
    table = glossary_table()
    assert len(rows(table)) == len(METRICS)
    for name in METRICS:
        assert f"\n| `{name}` | " in table
    names = [*EVALUATION, *(f"{part}.{name}" for part, own in COMPARISONS.items() for name in own)]
    for name in names:
        assert f"\n| results: `{name}` | " in table
    assert {line.replace("\\|", "").count("|") for line in table.splitlines()} == {5}


def test_the_glossary_has_the_table_as_it_is() -> None:
    assert glossary_table() in GLOSSARY.read_text()


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
    flags |= {"reward_funcs": "gold", "num_eval_rows": "8", "num_prompts": "4"}
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    evaluate.main(parse(evaluate.EvaluateConfig, arguments))
    results = json.loads((tmp_path / "eval/results.json").read_text())
    (system,) = results["systems"]
    assert set(system) - IDENTITY == set(EVALUATION)
    compared = {
        "win_rates": results["win_rates"][0],
        "comparison.differences": results["comparison"]["differences"][0],
    }
    for part, values in compared.items():
        own = {name for name in values if not name.startswith("num_")} - ENDS
        assert own == set(COMPARISONS[part]), part
    for name in ("report.html", "report.md", "plots/summary.png"):
        assert (tmp_path / "eval" / name).is_file()
