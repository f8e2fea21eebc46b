"""SIGTERM for `make` reaches what it runs: a run that is left goes on beside the next one."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT = "wait: ; $(RUN) sh -c \"echo 'begun'; exec sleep 60\""


def test_a_signal_ends_what_make_runs() -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    words = ["make", "--silent", f"--eval={WAIT}", "wait"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.terminate()
    begun = time.monotonic()
    assert process.stdout.read() == b""  # ends when nobody holds the other end
    assert time.monotonic() - begun < 30
    assert process.wait(timeout=10) != 0


def test_every_recipe_that_runs_the_project_hands_signals_on() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    runs = [line for line in lines if re.match(r"\t.* -m (experiments\.|pytest)", line)]
    assert len(runs) > 5
    assert [line for line in runs if not line.startswith(("\t$(RUN) ", "\texec "))] == []
