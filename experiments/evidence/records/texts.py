"""The completions of an evaluation in a record: the scores of all, the texts of one seed."""

from pathlib import Path

from common.evaluation.records import COMPLETIONS, read_completions
from common.record.jsonl import json_line, read_jsonl, write_atomically

REWARDS = "rewards.jsonl"
NUM_SAMPLES = 3


def keep_completions(folder: Path, new: Path) -> None:
    """Keep some texts of the first seed, and of all completions their rewards and stops."""
    files = sorted(folder.glob(f"seed_*/evaluation/{COMPLETIONS}"))
    texts = read_jsonl(files[0])[:NUM_SAMPLES]
    write_atomically(new / "samples.jsonl", map(json_line, texts))
    for file in files:
        lines = [
            {
                name: [{"rewards": g.rewards, "stopped": g.stopped} for g in prompt.all_of(name)]
                for name in prompt.systems
            }
            for prompt in read_completions(file.parent)
        ]
        rewards = new / file.relative_to(folder).with_name(REWARDS)
        write_atomically(rewards, map(json_line, lines))
