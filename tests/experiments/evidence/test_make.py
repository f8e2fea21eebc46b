"""Claim: a record is of a clean commit, is not made twice, and is never lost to one that failed.

The commands of all parts exist, with all their flags, and records are of them. About
`experiments.evidence.make` and `experiments.evidence.records`.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from mistakes import STAGES

from common.config.parser import parse
from common.record.jsonl import json_line, read_jsonl, write_atomically
from experiments.evidence import make, tables
from experiments.evidence.records import current, studies, texts
from experiments.evidence.records.studies import Record
from experiments.runs.stages import config_class

ADDER = (
    "import sys, pathlib\npathlib.Path(sys.argv[1], 'kept.txt').write_text('1\\n')\nprint('a')\n"
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one command, `adder.py`, and a study with a part that runs it."""
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    monkeypatch.setattr(studies, "STUDIES", tmp_path / "assets" / "recipes")
    monkeypatch.setattr(studies, "RECORDS", tmp_path / "assets" / "results")
    monkeypatch.setattr(make, "CODE", (":(glob)*.py", "common"))
    monkeypatch.setattr(tables, "write", lambda: None)
    describe(tmp_path)
    (tmp_path / ".gitignore").write_text("output/\ndata\n")
    (tmp_path / "adder.py").write_text(ADDER)
    (tmp_path / "data" / "rows").mkdir(parents=True)
    (tmp_path / "data" / "rows" / "kept.jsonl").write_text("of no use\n")
    commit(tmp_path)
    return tmp_path


def describe(tree: Path, **values: object) -> None:
    entry = {"command": "adder {out}", "keep": ["kept.txt", "printed.md"], "needs": ["data/rows"]}
    file = tree / "assets" / "recipes" / "study" / "record.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"one": {**entry, "stages": [], **values}}))


def commit(folder: Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return make.git("rev-parse", "HEAD")


def record_of(name: str) -> Record:
    record = studies.read_record(name)
    assert record
    return record


def what_changed() -> str:
    recording = studies.recordings()["one"]
    changed = studies.what_changed(recording, record_of("one"))
    assert (f"; since then {changed} have changed" in tables.source(recording)) == bool(changed)
    return changed


def test_a_record_is_of_the_last_commit_of_code(tree: Path):
    code = make.code_commit()
    for page in ("README.md", "tests/test_page.py", "assets/results/one/record.json"):
        (tree / page).parent.mkdir(parents=True, exist_ok=True)
        (tree / page).write_text("{}\n")
        assert make.code_commit() == code
    commit(tree)
    assert make.code_commit() == code
    (tree / "common").mkdir()
    (tree / "common" / "new.py").touch()
    with pytest.raises(SystemExit, match=r"commit or undo first:\n\?\? common/"):
        make.code_commit()
    assert commit(tree) == make.code_commit() != code


def test_what_is_recorded_is_not_made_again(tree, capsys, monkeypatch):
    assert make.main(["one"]) == 0
    record = record_of("one")
    assert record.git_commit == make.code_commit()
    assert record.commands == ["adder output/one"]
    rows = hashlib.sha256(b"of no use\n").hexdigest()
    assert record.inputs == {"data/rows": {"kept.jsonl": rows}}
    assert (studies.RECORDS / "one" / "printed.md").read_text() == "a\n"
    assert make.main([]) == 0
    assert "one: recorded" in capsys.readouterr().out
    describe(tree, command="adder {out} more")
    assert make.main(["study"]) == 0
    assert record_of("one").commands == ["adder output/one more"]
    (tree / "adder.py").write_text(ADDER.replace("'1", "'2"))
    commit(tree)
    assert make.main([]) == 0
    assert (studies.RECORDS / "one" / "kept.txt").read_text() == "2\n"


def test_a_record_is_of_this_code_while_trajectories_and_recipes_are_the_same(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    golden, recipe = tree / "tests" / "golden" / "sft.json", tree / "assets" / "recipes" / "a.yaml"
    for file, text in (
        (golden, '{"sft": {"seed": 0, "loss": [1.5]}}'),
        (recipe, "beta: 1  # tried: 2"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    describe(tree, command="adder {out} assets/recipes/a.yaml", stages=["sft"])
    monkeypatch.setattr(make, "CODE", (*make.CODE, "assets/recipes"))
    first = commit(tree)
    make.main([])
    (tree / "adder.py").write_text(f"# read me\n{ADDER}")
    recipe.write_text("beta: 1")
    commit(tree)
    make.main([])
    assert f"one: recorded on {first[:10]}" in capsys.readouterr().out
    assert what_changed() == ""
    recipe.write_text("beta: 2")
    assert what_changed() == "the settings"
    golden.write_text('{"new": {}, "sft": {"seed": 0, "loss": [1.5], "tolerance": {}}}')
    assert what_changed() == "the settings"
    golden.write_text('{"sft": {"seed": 0, "loss": [1.25]}}')
    assert what_changed() == "the golden trajectories"
    commit(tree)
    make.main([])
    assert record_of("one").git_commit == make.code_commit()
    assert what_changed() == ""


def test_the_commit_is_what_runs_whatever_is_edited_meanwhile(tree: Path):
    commit_of_code = make.code_commit()
    of_commit = make.worktree(commit_of_code)
    (tree / "adder.py").write_text("raise SystemExit(3)\n")
    assert make.make(studies.recordings()["one"], commit_of_code, of_commit)
    assert (of_commit / "data" / "rows").exists()


def test_a_failed_start_leaves_the_record_and_adds_its_time(tree, capsys, monkeypatch):
    make.main([])
    old = record_of("one")
    (tree / "adder.py").write_text("raise SystemExit(3)\n")
    commit(tree)
    assert make.main([]) == 1
    assert "failed with status 3" in capsys.readouterr().out
    (tree / "adder.py").write_text("print('kept nothing')\n")
    commit(tree)
    with pytest.raises(FileNotFoundError, match=r"nothing is kept\.txt"):
        make.main([])
    assert record_of("one") == old
    out = make.worktree(make.code_commit()) / "output" / "one"
    make.write_json(out / make.STARTS, [60.0, 120.0])
    (out / "kept.txt").touch()  # of an earlier start
    assert make.main([]) == 0
    record = record_of("one")
    assert record.starts == 3
    assert 3 <= record.minutes < 3.5


def test_only_a_part_that_takes_a_gpu_sees_one(tree: Path, monkeypatch: pytest.MonkeyPatch):
    (tree / "adder.py").write_text(
        "import os, pathlib, sys\npathlib.Path(sys.argv[1], 'kept.txt').touch()\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    commit(tree)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(make, "accelerator", lambda _: {"gpu": "H"})
    for takes_gpu, seen, name in ((False, "", None), (True, "3", "H")):
        describe(tree, command=f"adder {{out}} {name}", takes_gpu=takes_gpu)
        assert make.main([]) == 0
        assert studies.printed("one/printed.md") == seen
        assert record_of("one").gpu == name


def test_a_part_that_lacks_an_input_is_left_out(tree: Path, capsys: pytest.CaptureFixture[str]):
    (tree / "data" / "rows").rename(tree / "elsewhere")
    assert make.main([]) == 0
    assert "left out, since data/rows is not there" in capsys.readouterr().out
    assert studies.read_record("one") is None


def test_a_part_whose_environment_is_not_made_is_left_out(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    describe(tree, python=".venv-other/bin/python")
    assert make.main([]) == 0
    assert "left out, since .venv-other/bin/python is not there" in capsys.readouterr().out


def test_the_code_of_a_record_imports_no_other_test():
    paths = {path for recording in PARTS.values() for path in recording.code}
    assert paths
    modules = {path.removesuffix(".py").replace("/", ".") for path in paths}
    files = [studies.ROOT / path for path in paths]
    files += studies.ROOT.glob("experiments/**/*.py")
    for file in files:
        text = file.read_text()
        imported = re.findall(r"^\s*from (tests\.[\w.]+) import", text, re.MULTILINE)
        assert set(imported) <= modules, file


PARTS = studies.recordings()


@pytest.mark.parametrize("recording", PARTS.values(), ids=lambda each: each.name)
def test_a_record_is_of_the_command_of_its_part(recording: studies.Recording):
    if record := studies.read_record(recording.name):
        assert current.is_same_command(record.commands, recording.words)
        assert not current.is_same_command(record.commands, f"{recording.words} --seed 1")
        assert not current.is_same_command([], recording.words)


@pytest.mark.parametrize("recording", PARTS.values(), ids=lambda each: each.name)
def test_a_part_comes_after_those_that_it_needs(recording: studies.Recording):
    names = list(PARTS)
    for path in recording.needs:
        if path.startswith("output/"):
            assert names.index(path.split("/")[1]) < names.index(recording.name)


class ParsedError(BaseException):
    """Every word of a command was understood."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", [recording.words for recording in PARTS.values()])
def test_every_command_can_be_run_today(command, monkeypatch):
    def parse_known_args(parser, *arguments):
        options, strays = parse_words(parser, *arguments)
        if not strays:
            raise ParsedError
        return options, strays

    module, *words = command.split()
    assert importlib.util.find_spec(module)
    assert all((studies.ROOT / word).exists() for word in words if word.startswith("assets/"))
    if module in STAGES:
        parse(config_class(f"{module}.py"), words)
    elif words:  # a module without flags would start its work
        parse_words = argparse.ArgumentParser.parse_known_args
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        monkeypatch.setattr("sys.argv", [module, *words])
        with pytest.raises(ParsedError):
            runpy.run_module(module, run_name="__main__")


def test_of_completions_some_texts_and_every_reward_are_kept(tmp_path: Path):
    for seed in (0, 1):
        completion = {
            "completion": "a\u2028b",
            "num_tokens": 3,
            "rewards": {"gold": float(seed)},
            "stopped": not seed,
        }
        file = tmp_path / "out" / f"seed_{seed}" / "evaluation" / "completions.jsonl"
        for folder in (file.parent, tmp_path / "new" / f"seed_{seed}" / "evaluation"):
            folder.mkdir(parents=True)
        further = {"sft": [completion | {"stopped": True}]}
        row = {"prompt": "p", "reference": None, "systems": {"sft": completion}}
        lines = [{"id": n, **row, "further": further} for n in range(4)]
        write_atomically(file, map(json_line, lines))
    texts.keep_completions(tmp_path / "out", tmp_path / "new")
    samples = read_jsonl(tmp_path / "new" / "samples.jsonl")
    assert [line["id"] for line in samples] == [0, 1, 2]
    assert samples[0]["systems"]["sft"]["completion"] == "a\u2028b"
    kept = read_jsonl(tmp_path / "new" / "seed_1" / "evaluation" / texts.REWARDS)
    completion = [{"rewards": {"gold": 1.0}, "stopped": stopped} for stopped in (False, True)]
    assert kept == [{"sft": completion}] * 4
