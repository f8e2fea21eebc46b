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
    files = {
        "report.html": html.page(title, facts, blocks),
        "report.md": markdown.page(title, facts, blocks, output_dir),
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
