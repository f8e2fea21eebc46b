"""Claims: two hosts compute what one does, and a host that is cut off ends the run on both.

The hosts are network namespaces of this machine with a cable between them (`tests/many_nodes.py`).
Losses, gradient norms and exported weights of two hosts with a process each are those of one host
with two, under plain FSDP and under HSDP. When the second host is cut off amid a run, both end
within the timeouts that were set, each with its traceback; the same command, but for the timeout,
then resumes from the checkpoint, and its weights are those of a run that nobody disturbed.
"""

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import many_nodes
import pytest
from many_nodes import (
    CUT_IN,
    STEPS,
    TwoHosts,
    cut_amid_run,
    grpo_command,
    grpo_flags,
    make_inputs,
    run_stages_on_both,
    weights_hash,
)
from ranks import untimed_lines

RUNS = [("sft", 1), ("sft", 2), ("grpo", 2)]
DDP_TIMEOUT = 20  # seconds that a rank waits; a busy machine may take ten to start both
# Packets are sent again for about 25 s: so long torchrun waits for a host that does not answer.
TCP_RETRIES2, GIVEN_UP = 6, 25


@pytest.mark.parametrize("differs", ["", "metrics", "weights", "status"])
def test_the_full_comparison_fails_if_anything_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, differs: str
) -> None:
    """With stand-ins for what it runs and reads."""
    steps = [{"step": step} for step in range(1, STEPS + 1)]

    def read(kind: str, run: Path) -> Any:
        is_odd = kind == differs and run.parent.name == "two" and run.name == "dpo_2"
        return {"metrics": steps[: -1 if is_odd else None], "weights": str(is_odd)}[kind]

    cut = many_nodes.Cut([0 if differs == "status" else 1, 1], [1.0, 2.0], ["", ""])
    hosts = MagicMock()
    hosts.return_value.__exit__.return_value = False
    for name, stand_in in {
        "TwoHosts": hosts,
        "run_stages_on_both": lambda *_: None,
        "cut_amid_run": lambda *_, **__: cut,
        "untimed_lines": partial(read, "metrics"),
        "weights_hash": partial(read, "weights"),
    }.items():
        monkeypatch.setattr(many_nodes, name, stand_in)
    monkeypatch.setattr(sys, "argv", ["many_nodes"])
    assert many_nodes.main() == (1 if differs else 0)


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    try:
        both = TwoHosts(TCP_RETRIES2).__enter__()
    except OSError as error:
        pytest.skip(f"two hosts need root and network namespaces: {error}")
    yield both
    both.__exit__()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("many_nodes")


@pytest.fixture(scope="module")
def flags(hosts: TwoHosts, folder: Path, tiny_gpt2: Path, tokenizer_folder: Path) -> dict[str, Any]:
    """Of every run; the undisturbed ones have been made."""
    flags = make_inputs(folder, tiny_gpt2, tokenizer_folder)
    run_stages_on_both(hosts, folder, flags, RUNS)
    return flags


@pytest.mark.parametrize(("stage", "num_replicas"), RUNS)
def test_two_hosts_compute_what_one_does(
    folder: Path, flags: dict[str, Any], stage: str, num_replicas: int
) -> None:
    one, two = (folder / name / f"{stage}_{num_replicas}" for name in ("one", "two"))
    assert [line["step"] for line in untimed_lines(two)] == list(range(1, STEPS + 1))
    assert untimed_lines(two) == untimed_lines(one)  # digit by digit
    assert any(line["grad_norm"] > 1e-3 for line in untimed_lines(one))
    assert weights_hash(two) == weights_hash(one)


def test_a_host_that_is_cut_off_ends_the_run_which_then_resumes(
    hosts: TwoHosts, folder: Path, flags: dict[str, Any]
) -> None:
    run = folder / "cut_off"
    changes = {"output_dir": run, "save_steps": 1}
    flags = grpo_flags(folder, flags) | changes | {"ddp_timeout": DDP_TIMEOUT, "num_replicas": 2}
    cut = cut_amid_run(hosts, folder, flags, limit=GIVEN_UP + 60)
    assert 0 not in cut.statuses
    assert cut.seconds[0] < DDP_TIMEOUT + 15
    assert cut.seconds[1] < GIVEN_UP + 15
    for rank, log in enumerate(cut.logs):
        assert f"rank {rank} at step {CUT_IN} of train_grpo:\nTraceback" in log
        assert re.search(r"^RuntimeError: .*/gloo/", log, re.MULTILINE)
    assert [line["step"] for line in untimed_lines(run)] == list(range(1, CUT_IN))

    patient = flags | {"ddp_timeout": 300}  # a busy machine may take long to draw and export
    hosts.run(grpo_command(patient), 2, folder=folder)
    undisturbed = folder / "one" / "grpo_2"
    assert untimed_lines(run) == untimed_lines(undisturbed)
    assert weights_hash(run) == weights_hash(undisturbed)
