"""Every name that a stage or the evaluation writes is in the table of `docs/metrics.md`.

Every module of `common/` is in the README's tree.
"""

import ast
import json
import re
from pathlib import Path

from ranks import run_stages

import evaluate
from common.config import parse
from common.glossary import METRICS
from common.jsonl import read_jsonl
from common.metric_table import COMPARISONS, EVALUATION, FORMULAS, glossary_table

ROOT = Path(__file__).resolve().parents[1]
README, GLOSSARY = ROOT / "README.md", ROOT / "docs" / "metrics.md"
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


def test_the_readme_has_every_module_and_each_below_those_it_imports() -> None:
    """Lines of the tree; imports at the top of a module, may be of its own line."""
    place: dict[str, int] = {}
    tree = README.read_text().split("\ncommon/        at its top a module imports only modules")[1]
    for number, line in enumerate(tree.split("  experiments/")[0].splitlines()):
        for name in re.findall(r"([\w*]+)\.py", line):
            files = README.with_name("common").glob(f"{name}.py")
            place |= dict.fromkeys((file.stem for file in files), number)
    modules = {file.stem for file in README.with_name("common").glob("*.py")} - {"__init__"}
    assert set(place) == modules
    for name in modules:
        for node in ast.parse(README.with_name("common").joinpath(f"{name}.py").read_text()).body:
            imported: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module == "common":
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common."):
                imported = [str(node.module).split(".")[1]]
            assert all(place[module] <= place[name] for module in imported), (name, imported)
