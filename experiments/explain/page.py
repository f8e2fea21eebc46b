"""The page of a step: its JSON, the links to formulas and lines of code, and the HTML around it."""

import inspect
import json
import re
import subprocess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from common.config.recipes import read_recipe
from common.padding import PaddedBatch
from common.record.run_folder import git_commit
from experiments.explain.trace import Trace
from experiments.stages import ROOT

FOLDER = Path(__file__).parent
STAGES = {"sft": "SFT", "reward": "Reward model", "dpo": "DPO", "grpo": "GRPO"}


def formulas(stage: str) -> dict[str, Any]:
    """The texts of a stage from `formulas.yaml`, with those of every stage."""
    texts = read_recipe(str(FOLDER / "formulas.yaml"), typed=True)
    own, every = texts[stage], texts["every"]["quantities"]
    every = {name: about for name, about in every.items() if name not in own["quantities"]}
    return {**own, "quantities": own["quantities"] | every}


def code_line(function: str, code: str = "") -> dict[str, Any]:
    """File and line of a function, or of the first line in it that holds a text.

    Raises:
        LookupError: the function has no such line any more.
    """
    target = resolve_name(function)
    lines, start = inspect.getsourcelines(target)
    code = code or f"def {target.__name__}("
    for number, line in enumerate(lines, start):
        if code in line:
            file = Path(inspect.getsourcefile(inspect.unwrap(target)) or "").resolve()
            place = {"file": file.relative_to(ROOT).as_posix(), "line": number}
            return {"function": function, "code": code, **place}
    raise LookupError(f"{function} has no line with {code!r}")


def repository() -> str:
    """Address of the commit's files on GitHub; empty without such a remote or with changes."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    url = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    name = re.fullmatch(r"(?:https://|git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?", url)
    commit = git_commit() or "-dirty"
    is_there = name and not commit.endswith("-dirty")
    return f"https://github.com/{name[1]}/blob/{commit}/" if name and is_there else ""


def with_links(numbers: dict[str, Any], trace: Trace, stage: str) -> dict[str, Any]:
    """The page's data: the numbers, where each comes from, and the boxes of the drawing."""
    texts = formulas(stage)
    records = [*numbers["completions"], *numbers["prompts"], *numbers["pairs"], numbers["step"]]
    present = {name for one in records for name in [*one, *one.get("tokens", ())]}
    layout = "padded" if isinstance(trace.batches[0], PaddedBatch) else "shared_prefix"
    quantities = {}
    for name, about in texts["quantities"].items():
        if name in present:
            place = about.pop(layout, about)
            quantities[name] = about | code_line(place["function"], place.get("code", ""))
    boxes = []
    for box in texts["flow"]:
        if calls := trace.of(box["function"].rpartition(".")[2]):
            shape = shape_at(calls[-1].result, box.get("tensor", ""))
            boxes.append({**box, "shape": box["shape"] + shape, **code_line(box["function"])})
    head = {"stage": stage, "objective": texts["objective"], "repository": repository()}
    return {**head, "quantities": quantities, "boxes": boxes, **numbers}


def shape_at(result: Any, path: str) -> str:
    """The shape of the tensor at a path in a function's result, as text; empty without one."""
    for name in path.split(".") if path else []:
        if isinstance(result, list):
            result = result[int(name)]
        else:
            result = result[name] if isinstance(result, dict) else getattr(result, name)
    shape = getattr(result, "shape", ())
    return f" = {tuple(shape)}" if len(shape) else ""


def page(content: dict[str, Any], facts: dict[str, str]) -> str:
    """The whole document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options: dict[str, Any] = {"autoescape": True, "lstrip_blocks": True, "trim_blocks": True}
    loader = FileSystemLoader(FOLDER)
    environment = Environment(loader=loader, undefined=StrictUndefined, **options)
    environment.filters["number"] = number
    embedded = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    title = f"{STAGES[content['stage']]}: one step, explained"
    template = environment.get_template("page.html")
    return template.render(title=title, facts=facts, embedded=embedded, **content)


def number(value: Any) -> str:
    """A value with few digits, as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.4g}"
        return text.replace("-", "\N{MINUS SIGN}")
    return str(value)
