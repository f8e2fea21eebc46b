"""The tables of docs/memory.md are what the planner says."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from common.grpo.config import GRPOConfig
from experiments.plan import ladder
from experiments.plan.work import Run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def test_the_page_is_what_the_planner_says():
    """After a change of the planner: `python -m experiments.plan.ladder --into docs/memory.md`."""
    page = PAGE.read_text()
    tables = ladder.page(ladder.STAGES_ON_PAGE)
    assert page.endswith(f"\n{tables}\n")
    assert all(f"--{name}" in page for name in ladder.COMMON)


def test_bytes_sent_are_worked_out_by_hand():
    model = SimpleNamespace(numbers=lambda ranks=1, trained=False: 10)
    flags = {"output_dir": "unused", "model_name_or_path": "unused", "reward_funcs": ["gold"]}
    config = GRPOConfig(**flags, bf16=True)
    run = Run(config, model, model, (), on_gpu=True, process_bytes=0)
    with mock.patch.object(ladder, "micro_batch", return_value=SimpleNamespace(number=3)):
        # Of each 20 bytes of bfloat16 half is missing on each of two ranks: the policy's 7 times,
        # the reference's 3 times; and half of 40 bytes of float32 gradients, once or 3 times.
        assert ladder.sent_bytes(run.on(2)) == 7 * 10 + 3 * 10 + 20
        assert ladder.sent_bytes(run.on(2).with_flags(shard_gradients=True)) == 100 + 3 * 20
        assert ladder.sent_bytes(run) == 0
