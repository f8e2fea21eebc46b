"""The completions of an evaluation in a record: the scores of all, the texts of one seed."""

from pathlib import Path

from common.record.jsonl import json_line, read_jsonl, write_atomically

REWARDS = "rewards.jsonl"
NUM_SAMPLES = 3


def keep_completions(folder: Path, new: Path) -> None:
    """Keep some texts of the first seed, and of all completions their rewards and stops."""
    files = sorted(folder.glob("seed_*/evaluation/completions.jsonl"))
    texts = read_jsonl(files[0])[:NUM_SAMPLES]
    write_atomically(new / "samples.jsonl", map(json_line, texts))
    for file in files:
        lines = [
            {
                name: [
                    {key: completion[key] for key in ("rewards", "stopped")}
                    for completion in (first, *line["further"].get(name, ()))
                ]
                for name, first in line["systems"].items()
            }
            for line in read_jsonl(file)
        ]
        rewards = new / file.relative_to(folder).with_name(REWARDS)
        write_atomically(rewards, map(json_line, lines))
