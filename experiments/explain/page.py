"""The page of a step: its JSON with formulas and lines of code, and the HTML around it."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from string import Formatter
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.batch import PaddedBatch
from common.config.parser import as_list
from common.config.recipes import read_recipe
from common.objectives.find import Function, load_once, split_settings
from experiments.explain.trace import Trace
from experiments.runs.stages import ROOT

FOLDER = Path(__file__).parent


def formulas(stage: str, config: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The texts of a stage from `formulas.yaml`, and names of the user's functions by flag.

    What a user's function computes is without a formula; what only the function in its place has
    is left out.
    """
    texts = read_recipe(str(FOLDER / "formulas.yaml"), typed=True)
    quantities = texts[stage]["quantities"] | texts["every"]["quantities"]
    texts, yours = {**texts[stage], "quantities": quantities}, dict[str, str]()
    for flag, about in texts.get("yours", {}).items():
        names = [split_settings(text)[0] for text in as_list(getattr(config, flag))]
        if len(names) != 1 or ".py:" not in names[0]:
            continue
        function = inspect.unwrap(load_once(names[0], f"--{flag}"))
        yours[flag], place = function.__name__, f"{function.__module__}.{function.__qualname__}"
        for name in about["without"]:
            del quantities[name]
        for quantity in quantities.values():
            if quantity["function"] == about["instead"]:  # computed for the page
                quantity |= {"function": f"experiments.explain.numbers.{stage}", "code": ""}
        by = f"by {names[0]}"
        quantities[about["computes"]] |= {"about": by, "formula": "", "paper": "", "code": ""}
        quantities[about["computes"]]["function"] = place
        for box in texts["flow"]:
            if box["function"] == about["instead"]:
                box |= {"function": place, "about": by, "tensor": ""}
        texts["also"] = [place if name == about["instead"] else name for name in texts["also"]]
    return texts, yours


def refuse_others(config: Any, texts: dict[str, Any], yours: Mapping[str, str]) -> None:
    """Raise a UserError for values, and settings of built-in objectives, without a formula."""
    named: dict[str, list[str]] = {function.flag: [] for function in objectives_of(config)}
    for function in objectives_of(config):
        named[function.flag].append(function.name)
        for name, value in texts.get("only_settings", {}).items():
            if function.is_built_in and function.settings.get(name, value) != value:
                raise config.refused(function.flag, f"with {name}={value}, as the page's formulas")
    for name, value in texts["only"].items():
        given = named.get(name, getattr(config, name))
        if name not in yours and as_list(given) != as_list(value):
            raise config.refused(name, f"{value}: the page has no formulas of others")


def settings_of(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Values of a config by name, and the settings of its objectives that are not off."""
    settings = {name: getattr(config, name) for name in names}
    for function in objectives_of(config):
        settings |= {name: value for name, value in function.settings.items() if value != math.inf}
    return settings


def objectives_of(config: Any) -> list[Function]:
    """The functions of objectives that a config names."""
    kinds = getattr(config, "objective_kinds", ())
    named = [(kind, text) for kind in kinds for text in as_list(getattr(config, kind.flag))]
    return [kind.function_of(text) for kind, text in named]


def code_line(function: str, code: str = "") -> dict[str, str]:
    """File and text of a function's head, or of the first line in it that holds `code`."""
    target = inspect.unwrap(resolve_name(function))
    code = code or f"def {target.__name__}("
    path = Path(target.__code__.co_filename).resolve()
    file = (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()
    text = next((line for line in inspect.getsourcelines(target)[0] if code in line), "")
    assert text, f"{function} has no line with {code!r}"
    return {"function": function, "code": code, "file": file, "text": text.strip()}


def with_places(numbers: dict[str, Any], trace: Trace, texts: dict[str, Any]) -> dict[str, Any]:
    """The page's data: the numbers, where each comes from, and the boxes of the drawing."""
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
        calls = trace.of(box["function"].rpartition(".")[2])
        if calls and box.pop("with", None) in (None, *quantities):
            path = f"0{box.pop('tensor', '')}"
            result, _ = Formatter().get_field(path, [calls[-1].result], {})
            shape = getattr(result, "shape", ())
            if len(shape):
                box["shape"] += f" = {tuple(shape)}"
            boxes.append(box | code_line(box["function"]))
    return {"quantities": quantities, "boxes": boxes, **numbers}


def page(content: dict[str, Any]) -> str:
    """The whole document."""
    options: dict[str, Any] = {"autoescape": True, "lstrip_blocks": True, "trim_blocks": True}
    loader = FileSystemLoader(FOLDER)
    environment = Environment(loader=loader, undefined=StrictUndefined, **options)
    environment.filters["number"] = number
    embedded = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    template = environment.get_template("page.html")
    return template.render(embedded=embedded, **content)


def number(value: float) -> str:
    """A value with few digits, as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    is_whole = float(value).is_integer() and abs(value) < 1e6
    text = f"{value:.0f}" if is_whole else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")
