"""A recorded sweep: its effects, and the tables of its report."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from common.report import markdown
from experiments.evidence.records import studies
from experiments.runs.sweep.effects import Effect
from experiments.runs.sweep.sweep_file import Variant


def effects(record: Mapping[str, Any]) -> list[Effect]:
    """The effects of a `sweep.json`, one of each variant and outcome."""
    return [
        Effect(
            Variant(**{field.name: values[field.name] for field in fields(Variant)}),
            values["outcome"],
            values["by_seed"],
            values["base_by_seed"],
            values["together"]["family"],
        )
        for values in record.get("effects", [])
    ]


def primary_table(name: str, *stages: str) -> str:
    """The first outcome of a sweep's stages, or of some; the base chain's line names the stage."""
    rows = []
    for title, table in stage_tables(name):
        if stages and title not in stages:
            continue
        heads, *lines = studies.cells(table)
        for detail, choice, value, *_, verdict, _ in lines:
            first = f"**{title}**: {heads[2]}" if detail == "base" else detail
            bound = verdict.replace("no larger than", "\N{LESS-THAN OR EQUAL TO}")
            rows.append([first, choice, value, bound])
    return markdown.table(["detail", "choice", "difference to the base [95%]", "matters?"], rows)


def stage_tables(name: str) -> list[tuple[str, str]]:
    """Title and table of each stage in a sweep's report."""
    _, *sections = re.split(r"(?m)^## (.+)$", studies.printed(f"{name}/report.md"))
    tables = map(str.strip, sections[1::2])
    return list(zip(sections[::2], tables, strict=True))
