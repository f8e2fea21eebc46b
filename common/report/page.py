"""A report in two files: `report.html`, one page that needs nothing else, and `report.md`.

Whoever has something to show builds blocks and calls `write_page`; how they look is decided in
`html.py` with `page.html`, and in `markdown.py`. Nothing here computes a result.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.distributed import is_rank0
from common.record.folder import read_config, read_environment
from common.report import html, markdown
from common.report.blocks import Block


def write_page(
    output_dir: str | Path,
    title: str,
    blocks: Sequence[Block],
    facts: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write `report.html` and `report.md` of the same content; the files, none on ranks but 0.

    The same blocks and facts give the same bytes. The facts stand below the title; by default they
    are what the folder's run says of itself.
    """
    if not is_rank0():
        return []
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    facts = run_facts(output_dir) if facts is None else facts
    files = {
        output_dir / "report.html": html.page(title, facts, blocks),
        output_dir / "report.md": markdown.page(title, facts, blocks, output_dir),
    }
    for file, text in files.items():
        # A lone surrogate, which JSON may hold, is no character that a file could.
        file.write_bytes(text.encode("utf-8", "replace"))
    return list(files)


def run_facts(run_dir: Path) -> dict[str, str]:
    """Data set, seed, date and commit of a run, as far as its own files say; no clock is read."""
    config, environment = read_config(run_dir), read_environment(run_dir)
    commit, dirty, _ = (environment.get("git_commit") or "").partition("-dirty")
    facts = {
        "data set": config.get("dataset_name"),
        "split": config.get("dataset_test_split"),
        "seed": config.get("seed"),
        "started": environment.get("started"),
        "commit": commit[:10] + dirty,
        "processes": environment.get("world_size"),
        "torch": (environment.get("packages") or {}).get("torch"),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}
