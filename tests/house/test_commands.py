"""Claim: every command in the README and in `docs/` is valid, and the README's block can be pasted.

So for the other pages at the root. The pages' shell blocks are run by bash in an empty folder, with
programs that only note how they were called; a noted flag, module or make target must exist. What
is noted of the block of "Your model and your data" is run in earnest, on a tiny model and few rows.
What the pages point to is there, and the README leads to every page of `docs/`. About `README.md`
and `docs`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import tiny
from mistakes import STAGES
from packaging.requirements import Requirement
from transformers import AutoTokenizer

from common.config.parser import parse
from experiments.runs.stages import ROOT, config_class

PAGES = [*sorted(ROOT.glob("*.md"), reverse=True), *sorted(ROOT.glob("docs/*.md"))]  # README first
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
KEPT_AWAY = (".git", ".venv", "output", "data")
NOTED = ("python", "torchrun", "make", "pip", "git", "sbatch", "vllm")
NOTE = f"""#!{sys.executable}
import json, sys
with open("calls.jsonl", "a") as file:
    print(json.dumps([sys.argv[0].rpartition("/")[2], *sys.argv[1:]]), file=file)
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def paste(block: str, folder: Path, programs: Path) -> None:
    """Run a block in a folder that has the project's files."""
    for path in ROOT.iterdir():
        if path.name not in KEPT_AWAY and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv/bin/activate").touch()
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["bash", "-e", "-c", block], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def check(call: list[str], folder: Path) -> None:
    """Refuse a call whose flags, module, file or target do not exist."""
    name, *words = call
    scripts = [place for place, word in enumerate(words) if word.removesuffix(".py") in STAGES]
    if name == "make":
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
    elif words[:1] == ["-m"]:
        ours = words[1].startswith(("common.", "experiments."))
        assert not ours or importlib.util.find_spec(words[1]), words
    elif scripts:
        after = scripts[0] + (2 if name == "sbatch" else 1)  # the job's output_dir comes first
        parse(config_class(words[scripts[0]]), words[after:])
    elif name == "python" and words[0] != "-":
        assert (folder / words[0]).exists(), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_exist(page, tmp_path, monkeypatch):
    for name in NOTED:
        program(tmp_path / "programs", name, NOTE)
    monkeypatch.chdir(ROOT)
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        folder = tmp_path / str(number)
        folder.mkdir()
        paste(block, folder, tmp_path / "programs")
        for line in (folder / "calls.jsonl").read_text().splitlines():
            check(json.loads(line), folder)


def test_the_chain_ends_with_a_stage_that_fails_or_is_stopped(tmp_path):
    (block,) = (text for text in BLOCK.findall(PAGES[0].read_text()) if "|| break" in text)
    program(tmp_path / "programs", "torchrun", f"{NOTE}sys.exit('dpo' in ' '.join(sys.argv))\n")
    paste(block, tmp_path, tmp_path / "programs")
    assert (tmp_path / "calls.jsonl").read_text().count("\n") == 3  # SFT, reward model, DPO


@pytest.mark.usefixtures("without_pictures")
def test_the_lines_for_your_own_model_run_as_they_stand(tmp_path, tokenizer_folder):
    """On a random model in the place of the demo's, eight rows and one step, in this process."""
    start = tmp_path / "output/demo/sft/model"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    lm = tiny.causal_lm("gpt2", is_plain=True, vocab_size=len(tokenizer), n_positions=192)
    lm.save_pretrained(start)
    tokenizer.save_pretrained(start)
    (block,) = (text for text in BLOCK.findall(PAGES[0].read_text()) if "MODEL=" in text)
    program(tmp_path / "programs", "python", NOTE)
    paste(block, tmp_path, tmp_path / "programs")
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert len(calls) == len(STAGES)
    with tiny.working_directory(tmp_path):
        for _, script, *words in calls:
            stage = script.removesuffix(".py")
            few = ["--num_prompts", "4"] if stage == "evaluate" else ["--max_steps", "1"]
            config = parse(config_class(script), [*words, "--num_eval_rows", "8", *few])
            importlib.import_module(stage).main(config)
    assert (tmp_path / "output/mine/evaluation/report.html").exists()


# ---- make ----------------------------------------------------------------------------------------

TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def printed_by_make(*words: str) -> list[str]:
    """The lines that make prints, those of a recipe with their continuations."""
    command = ["make", "--no-print-directory", *words]  # `make test` is a make around this one
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return result.stdout.replace("\\\n", "").splitlines()


def install_steps() -> dict[str, list[str]]:
    """The words behind `pip install` of every target, of each distinct step once, by its text."""
    lines = [line for target in TARGETS for line in printed_by_make("-n", "-B", target)]
    return {
        line: line.partition(" pip install ")[2].split()
        for line in lines
        if " pip install " in line
    }


def requirements_of(file: Path) -> list[str]:
    """The lines of a requirements file and of those that it names, which must exist."""
    texts = file.read_text().replace("\\\n", "").splitlines()
    lines = [text.partition(" #")[0].strip() for text in texts if text and text[0] != "#"]
    named = [line.split()[1] for line in lines if re.match(r"-[rc] ", line)]
    further = [requirement for name in named for requirement in requirements_of(file.parent / name)]
    return [re.sub(r" --hash=\S+", "", line) for line in lines if line and line[0] != "-"] + further


def test_make_alone_prints_the_targets():
    lines = printed_by_make()
    named = {line.split()[1] for line in lines if line.startswith("make ")}
    assert {*TARGETS} - {"help"} <= named
    assert lines[1].startswith("make demo")
    assert not any(line.startswith("#") for line in lines)


FILES = [path for path in ROOT.rglob("*requirements*.txt") if ".venv" not in path.as_posix()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_requirements_file_names_files_and_packages(file):
    assert [Requirement(line) for line in requirements_of(file)]


def test_every_install_step_of_make_has_its_files():
    steps = install_steps()
    files = [w for words in steps.values() for f, w in pairwise(words) if f == "-r"]
    assert {"requirements.txt", "tests/requirements.txt"} < {*files}
    assert any("bench" in file for file in files)
    for file in files:
        assert [Requirement(line) for line in requirements_of(ROOT / file)]
    lock = next(
        w for line in printed_by_make("-n", "-B", "bench") for w in line.split() if "lock" in w
    )
    assert len([Requirement(line) for line in requirements_of(ROOT / lock)]) > 50


@pytest.mark.registry
@pytest.mark.parametrize("step", install_steps(), ids=lambda step: step.partition("/bin/")[0])
def test_the_registry_serves_every_install_step(step, tmp_path):
    """A dry run, under the constraints of the lock as the Makefile writes them."""
    words = install_steps()[step]
    lines = printed_by_make("-n", "-B", *TARGETS)
    for constraints in [words[i + 1] for i, word in enumerate(words) if word == "-c"]:
        (made_by,) = {line for line in lines if line.endswith(f" > {constraints}")}
        mine = made_by.replace(constraints, str(tmp_path / "constraints.txt"))
        subprocess.run(mine, shell=True, cwd=ROOT, check=True)
        words = [w.replace(constraints, str(tmp_path / "constraints.txt")) for w in words]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


# ---- links, tables and names ---------------------------------------------------------------------

ALL_PAGES = [*PAGES, *sorted(ROOT.glob("assets/**/*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in ALL_PAGES]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its fenced blocks, which must be closed."""
    text = FENCE.sub("", page.read_text())
    assert "```" not in text
    return text


def links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of each relative link and picture."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    local = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / file).resolve() if file else page, end) for file, _, end in local]


def anchors(page: Path) -> set[str]:
    """The headings as GitHub names them in a link."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=NAMES)
def test_every_link_resolves(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), (target, anchor)


@pytest.mark.parametrize("page", ALL_PAGES, ids=NAMES)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\|$\n?)+", prose(page), re.MULTILINE):
        rows = [re.sub(r"\\\|", "", row).count("|") for row in table.splitlines()]
        assert len(set(rows)) == 1, table


def test_the_readme_leads_to_every_page_and_each_begins_with_its_question() -> None:
    linked = {target for target, _ in links(ROOT / "README.md")}
    pages = set(ROOT.glob("docs/*.md"))
    assert pages
    assert pages <= linked
    for page in pages:
        assert re.fullmatch(r"# .*\?", page.read_text().splitlines()[0]), page


@pytest.mark.parametrize("page", ALL_PAGES, ids=NAMES)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    """`common/losses.py`, `test_losses.py::test_x`, `::test_y`, `assets/recipes/demo/sft.yaml`."""
    text = page.read_text()
    for name in re.findall(r"\b(?:assets|common|docs|tests)/[\w./-]+\.\w+", text):
        assert (ROOT / name).exists(), name
    file = None  # the last that was named: a bare `test_y` belongs to it
    for name, is_file in re.findall(r"\b(test_\w+)(\.py)?\b", text):
        if is_file:
            files = list((ROOT / "tests").rglob(f"{name}.py"))
            assert len(files) == 1, name
            file = files[0]
        elif file:  # before, it is a flag
            assert f"def {name}(" in file.read_text(), (file, name)
