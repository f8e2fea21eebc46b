"""Fixtures that several test files share: a tokenizer and tiny models, made once."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import tiny
from hypothesis import Phase, settings
from ranks import TINY_GPT2

from common.evaluation import intervals
from common.report import plots
from common.text import synthetic

TESTS = Path(__file__).resolve().parent
# Each takes over 2.5 seconds of a CPU: `make check` leaves them out. A few more do, and are kept,
# since they show the numbers of whole stages, objectives, layouts, rewards or the sampler.
SLOW = (
    "checkpoint/test_checkpoint.py",
    "checkpoint/test_faults.py",
    "checkpoint/test_resume.py",
    "checkpoint/test_save_minutes.py",
    "checkpoint/test_shards.py",
    "config/test_config.py",
    "evaluation/test_comparison.py",
    "evaluation/test_evaluation.py",
    "evaluation/test_generation_quality.py",
    "evaluation/test_win_rates.py",
    "experiments/evidence/test_benchmark_fixture.py",
    "experiments/evidence/test_film_tables.py",
    "experiments/evidence/test_gpu_bench.py",
    "experiments/evidence/test_optimum.py",
    "experiments/evidence/test_tables.py",
    "experiments/explain/test_explain.py",
    "experiments/plan/test_planner.py",
    "experiments/runs/test_film.py",
    "experiments/runs/test_many_runs.py",
    "experiments/runs/test_overoptimization.py",
    "experiments/runs/test_recipes.py",
    "experiments/runs/test_replicate.py",
    "experiments/runs/test_stages.py",
    "experiments/runs/test_sweep.py",
    "experiments/test_model_types.py",
    "experiments/test_pairs.py",
    "grpo/test_grpo.py",
    "grpo/test_names.py",
    "house/test_commands.py",
    "house/test_security.py",
    "model/test_bfloat16.py",
    "model/test_compile.py",
    "model/test_folders_of_others.py",
    "model/test_fsdp.py",
    "model/test_lora.py",
    "model/test_models.py",
    "model/test_shard_gradients.py",
    "pairs/test_dpo.py",
    "record/test_metrics.py",
    "report/test_report_page.py",
    "report/test_samples.py",
    "rewards/test_trl_rewards.py",
    "sampling/test_engine.py",
    "shutdown/test_failures.py",
    "shutdown/test_signals.py",
    "stages/test_device.py",
    "stages/test_from_python.py",
    "stages/test_invariance.py",
    "stages/test_mistakes.py",
    "test_many_nodes.py",
    "test_run.py",
    "test_self_checks.py",
    "text/test_differences.py",
    "text/test_synthetic.py",
    "text/test_templates.py",
)

# The same cases in every run: a failure that is found is found by everybody.
settings.register_profile("fixed", derandomize=True, deadline=None)
# Used by `tests.mutants`: stop at the first failure, without shrinking it.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("no_shrinking", settings.get_profile("fixed"), phases=PHASES)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files in SLOW")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Slow files are not even imported; None: as pytest decides."""
    is_slow = collection_path in {TESTS / name for name in SLOW}
    return True if is_slow and config.getoption("--quick") else None


def pytest_collection() -> None:
    """What is imported stays: no collection of garbage looks at it, now or later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


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
