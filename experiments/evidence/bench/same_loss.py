"""Whether both sides compute the same on the same rows, where TRL is right; prints the numbers.

    python -m experiments.evidence.bench.same_loss --model tiny --fixture FOLDER

SFT, reward model and DPO: the loss of a first step over a file of 32 rows, from the runs that are
also timed (DPO against another model than the policy: against itself the loss is ln 2 whatever the
code does). GRPO: log-probabilities of given completions of one prompt, so that nothing is padded on
the left. With left padding TRL passes no position ids, and GPT-2 counts the padding: that
difference is printed as well.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from common.forward import Policy
from common.padding import padded_batch
from experiments.evidence.bench import our_stages, processes
from experiments.evidence.bench.fixture import EOS_ID, PAD_ID
from experiments.evidence.bench.rows import CHECKS, MAX_COMPLETION_LENGTH, ROWS, SHAPES
from experiments.evidence.bench.trl_stages import make_trainer

RELATIVE_TOLERANCE = 1e-4
LOGP_TOLERANCE = 1e-4  # nats; a log-probability is about -8 on a random model
NUM_COMPLETIONS = 4


def make_completions(vocabulary: int, seed: int) -> list[list[int]]:
    """Random completions of different lengths, each with its eos."""
    rng = random.Random(seed)
    lengths = rng.sample(range(5, MAX_COMPLETION_LENGTH), NUM_COMPLETIONS)
    return [[*rng.choices(range(2, vocabulary), k=n - 1), EOS_ID] for n in lengths]


def plain_logps(lm: Any, prompt: list[int], completion: list[int]) -> Any:
    """Log-probabilities (C,) by one forward of a single row without any padding."""
    with torch.no_grad():
        logits = lm(torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logps = logits[len(prompt) - 1 : -1].float().log_softmax(-1)  # (C, V)
    return logps.gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)


def logp_differences(fixture: Path, folder: str) -> dict[str, tuple[float, float]]:
    """Largest distance of TRL's and of our log-probabilities from plain forwards, in nats."""
    trainer = make_trainer(ROWS["grpo-8x8"], fixture, 1, folder)
    lm = trainer.model.eval()
    path = fixture / "data" / f"{ROWS['grpo-8x8'].data_name}.jsonl"
    texts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    prompts = sorted((trainer.processing_class(text)["input_ids"] for text in texts), key=len)
    groups = {
        "one prompt": prompts[:1],
        "two prompts, padded on the left": [prompts[0], prompts[-1]],
    }
    differences = {}
    for title, group in groups.items():
        completions = [make_completions(lm.config.vocab_size, seed) for seed in range(len(group))]
        batch = padded_batch(group, completions, PAD_ID)
        rows = [(p, c) for p, some in zip(group, completions, strict=True) for c in some]
        plain = [plain_logps(lm, prompt, completion) for prompt, completion in rows]
        width = batch.completion_mask.shape[1]
        with torch.no_grad():
            theirs = trainer._get_per_token_logps_and_entropies(
                lm, batch.input_ids, batch.attention_mask.long(), width
            )[0]  # (B, C)
            ours = Policy(lm)(batch).token_logps  # (B, C)
        differences[title] = tuple(
            max(
                (logps[: len(row)] - row).abs().max().item()
                for logps, row in zip(side, plain, strict=True)
            )
            for side in (theirs, ours)
        )
    return differences


def main() -> None:
    """Print pairs of numbers; fail where they differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--fixture", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    fixture, threads, lines, failed = arguments.fixture, arguments.threads, [], []
    with tempfile.TemporaryDirectory() as folder:
        for row in CHECKS.values():
            logs = Path(folder, row.name)
            theirs = processes.run_trl(row, fixture, 1, logs / "trl", threads=threads)["loss"]
            ours = our_stages.run_row(row, fixture, 1, logs / "ours", threads=threads)["loss"]
            distance = abs(ours - theirs) / abs(theirs)
            lines.append(f"{row.stage}: TRL {theirs:.7f}, ours {ours:.7f}, relative {distance:.1e}")
            failed += [row.stage] * (distance > RELATIVE_TOLERANCE)
        differences = logp_differences(fixture, folder)
    for title, (theirs, ours) in differences.items():
        lines.append(
            f"grpo log-probs, {title}: furthest from unpadded forwards, "
            f"TRL {theirs:.1e} nats, ours {ours:.1e}"
        )
        failed += ["grpo"] * (ours > LOGP_TOLERANCE)
    failed += ["grpo"] * (differences["one prompt"][0] > LOGP_TOLERANCE)
    print("same loss:", *lines, sep="\n  ")
    if failed:
        raise SystemExit(f"TRL and ours differ in: {', '.join(sorted(set(failed)))}")


if __name__ == "__main__":
    main()
