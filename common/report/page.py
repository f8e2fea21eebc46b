"""A report in two files: `report.html`, one page that needs nothing else, and `report.md`.

Whoever has something to show builds blocks and calls `write_page`; how they look is decided in
`common/report/html.py` and `common/report/markdown.py`. Nothing here computes a result.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.distributed import is_rank0
from common.report.blocks import (
    Block,
    Completion,
    Curves,
    Frame,
    Line,
    Panel,
    Picture,
    Sample,
    SampleBrowser,
    Section,
    Table,
    Text,
    Token,
    TokenColours,
)
from common.report.escape import printable
from common.report.html import page
from common.report.markdown import markdown, without_html

__all__ = [
    "Block",
    "Completion",
    "Curves",
    "Frame",
    "Line",
    "Panel",
    "Picture",
    "Sample",
    "SampleBrowser",
    "Section",
    "Table",
    "Text",
    "Token",
    "TokenColours",
    "run_facts",
    "write_page",
]


def write_page(
    output_dir: str | Path,
    title: str,
    blocks: Sequence[Block],
    facts: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write `report.html` and `report.md` of the same content.

    No clock is read: the same blocks and facts give the same bytes.

    Args:
        output_dir: Made if it is not there.
        title: Of the page.
        blocks: In reading order.
        facts: What stands below the title; by default what the folder's run says of itself.

    Returns:
        The files written, none on other ranks than 0.
    """
    if not is_rank0():
        return []
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    facts = run_facts(output_dir) if facts is None else facts
    line = ", ".join(f"{name} {value}" for name, value in facts.items())
    parts = [f"# {without_html(title)}", without_html(line), *markdown(blocks, output_dir)]
    files = {
        "report.html": page(title, facts, blocks),
        "report.md": printable("\n\n".join(part for part in parts if part)) + "\n",
    }
    for name, text in files.items():
        # A lone surrogate, which JSON may hold, is no character that a file could.
        (output_dir / name).write_bytes(text.encode("utf-8", "replace"))
    return [output_dir / name for name in files]


def run_facts(run_dir: Path) -> dict[str, str]:
    """Data set, seed, date, commit and machine of a run, as far as its folder says.

    They come from the run's own `config.yaml` and `environment.json`, so a page that is written
    again tomorrow says the same.
    """
    import yaml

    config: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    if (run_dir / "config.yaml").is_file():
        config = yaml.safe_load((run_dir / "config.yaml").read_text()) or {}
    if (run_dir / "environment.json").is_file():
        environment = json.loads((run_dir / "environment.json").read_text())
    torch_version = (environment.get("packages") or {}).get("torch")
    facts = {
        "data set": config.get("dataset_name"),
        "split": config.get("dataset_test_split"),
        "seed": config.get("seed"),
        "started": environment.get("started"),
        "commit": _short_commit(environment.get("git_commit")),
        "processes": environment.get("world_size"),
        "torch": torch_version,
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _short_commit(commit: str | None) -> str | None:
    if commit is None:
        return None
    name, dirty, _ = commit.partition("-dirty")
    return name[:10] + dirty
