"""Claim: every exercise changes one line that is there, and its row is of a metric that is logged.

`test_tables.py` compares `docs/reading.md` with the questions and with the record. About
`assets/recipes/exercises/exercises.py`.
"""

import ast
import sys
from dataclasses import replace

import pytest

from assets.recipes.exercises import exercises
from assets.recipes.exercises.exercises import COMMANDS, EXERCISES, ROOT, Exercise
from common.config.parser import parse
from common.errors import UserError
from common.record.glossary import METRICS
from experiments.evidence.records.studies import cells, printed
from experiments.runs.stages import config_class


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.new)
def test_the_line_is_there_once_and_the_change_is_python(exercise: Exercise):
    code = (ROOT / exercise.file).read_text()
    assert code.count(exercise.old) == 1
    assert "\n" not in exercise.old + exercise.new
    ast.parse(code.replace(exercise.old, exercise.new))
    assert set(exercise.metrics) <= set(METRICS)


def test_every_command_is_valid_and_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert {exercise.command for exercise in EXERCISES} == COMMANDS.keys()
    for command in COMMANDS.values():
        script, *words = command.split()
        parse(config_class(script), [*words, "--output_dir", "unused"])


def test_the_record_has_every_metric_of_every_exercise():
    _, *rows = cells(printed("exercises/printed.md"))
    assert [(number, name.strip("`")) for number, name, *_ in rows] == [
        (str(number), name)
        for number, exercise in enumerate(EXERCISES, start=1)
        for name in exercise.metrics
    ]


def test_a_change_is_made_in_a_copy_and_its_last_values_are_printed(tmp_path, monkeypatch, capsys):
    """Runs of a script that prints a number in a module, in the place of a stage."""
    (tmp_path / "common").mkdir()
    (tmp_path / "assets" / "recipes").mkdir(parents=True)
    (tmp_path / "common" / "number.py").write_text("NUMBER = 2\n")
    stage = (
        "import json, pathlib, sys\n"
        "from common.number import NUMBER\n"
        "run = pathlib.Path(sys.argv[2])\n"
        "run.mkdir()\n"
        "lines = ({'step': step, 'loss': NUMBER * step} for step in (1, 2))\n"
        "(run / 'metrics.jsonl').write_text(''.join(json.dumps(x) + '\\n' for x in lines))\n"
    )
    (tmp_path / "stage.py").write_text(stage)
    change = Exercise("common/number.py", "NUMBER = 2", "NUMBER = 5", "stage", ("loss",), "Why?")
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    monkeypatch.setattr(exercises, "EXERCISES", [change])
    monkeypatch.setattr(exercises, "COMMANDS", {"stage": "stage.py"})
    words = ["--models", str(tmp_path), "--output_dir", str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "argv", ["exercises", *words])
    for name in ("sft", "reward"):
        with pytest.raises(UserError, match=f"which has no {name}/model; `make demo` writes it"):
            exercises.main()
        (tmp_path / name / "model").mkdir(parents=True)
    exercises.main()
    assert capsys.readouterr().out.splitlines()[2:] == ["| 1 | `loss` | 4 | 10 |"]
    assert (tmp_path / "kept" / "1" / "metrics.jsonl").read_text().count("loss") == 2
    assert (tmp_path / "common" / "number.py").read_text() == "NUMBER = 2\n"
    # Another change: one that is not there once is refused
    monkeypatch.setattr(exercises, "EXERCISES", [replace(change, new="NUMBER = 6")])
    exercises.main()
    assert capsys.readouterr().out.splitlines()[2:] == ["| 1 | `loss` | 4 | 12 |"]
    monkeypatch.setattr(exercises, "EXERCISES", [replace(change, old="NUMBER = 3")])
    with pytest.raises(SystemExit, match="number.py must have this once: NUMBER = 3"):
        exercises.main()
