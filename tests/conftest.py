"""Fixtures that several test files share: a tokenizer and tiny models, made once."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import tiny
from hypothesis import settings
from ranks import TINY_GPT2

from common.evaluation import intervals
from common.report import plots
from common.text import synthetic

# The same cases in every run: a failure that is found is found by everybody.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of one, unless there is one already."""
    with tiny.process_group():
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded task's tokenizer as a folder: reading it is quicker than training it again."""
    folder = tmp_path_factory.mktemp("tokenizer")
    synthetic.train_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config .json of a GPT-2 of 2 layers and width 32: a stage draws random weights for it."""
    path = tmp_path_factory.mktemp("model") / "tiny-gpt2.json"
    path.write_text(json.dumps(TINY_GPT2))
    return path


@pytest.fixture(scope="session")
def start_flags(tiny_gpt2: Path, tokenizer_folder: Path) -> dict[str, str]:
    """Flags of a stage that starts from a tiny GPT-2 of random weights."""
    return {"model_name_or_path": str(tiny_gpt2), "tokenizer_name_or_path": str(tokenizer_folder)}


@pytest.fixture
def without_pictures() -> Iterator[None]:
    """Stages draw no curves: they have their own tests, and take longer than a few steps."""
    with mock.patch.object(plots, "plot_run"):
        yield


@pytest.fixture
def few_resamples() -> Iterator[None]:
    """Enough resamples of a bootstrap for a simulation of many samples, or for a short run."""
    with mock.patch.object(intervals, "NUM_RESAMPLES", 400):
        yield
