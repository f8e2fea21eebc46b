"""Claim: nothing that a run reads is run as code unless a flag asks for it, and it leaks nothing.

Model folders, tokenizers, chat templates, recipes and rows that would write a file if
they were trusted are refused in one sentence, or read without it. A run's files and its output hold
no secret of the environment, and nobody else may change them. The code itself is searched for what
could break this. About `common.model.load` and `common.record.run_folder`.
"""

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mistakes
import pytest
import tiny
import torch
from mistakes import Refusals, arguments, change
from packaging.requirements import Requirement

from common.model import load
from experiments.runs.stages import ROOT

CODE = sorted(
    path
    for pattern in ("*.py", "common/**/*.py", "assets/**/*.py", "experiments/**/*.py")
    for path in ROOT.glob(pattern)
)
TRACE = Path("trace")  # the file that untrusted code would make


class Evil:
    """Writes the file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (TRACE,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working directory with a good policy and good rows; with a process group."""
    with mistakes.working_folder(tmp_path_factory.mktemp("security")) as folder:
        yield folder


@pytest.fixture
def refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Refusals]:
    TRACE.unlink(missing_ok=True)
    yield Refusals(monkeypatch, capsys)
    TRACE.unlink(missing_ok=True)


def copy_of(source: str, name: str) -> Path:
    shutil.rmtree(name, ignore_errors=True)
    return Path(shutil.copytree(source, name))


WEIGHTS = {"transformer.wte.weight": Evil()}
INDEX = {"metadata": {"total_size": 1}, "weight_map": {"transformer.wte.weight": "model.bin"}}


@pytest.mark.parametrize("stage", ["train_sft", "train_reward", "train_dpo", "train_grpo"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", pickle.dumps(WEIGHTS)),
        ("pytorch_model.bin", WEIGHTS),  # as torch packs them
        ("model.pt", Evil()),
        ("model.safetensors", WEIGHTS),
        ("model.bin", WEIGHTS),  # which the index of the safetensors names
    ],
)
def test_a_pickle_is_not_loaded(stage, name, content, refusals):
    folder = copy_of("judge" if stage == "train_reward" else "policy", "evil")
    (folder / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        torch.save(content, folder / name)
    if name == "model.bin":
        (folder / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    message = refusals.sentence(stage, arguments(stage, {"model_name_or_path": "evil"}))
    assert "no safetensors weights could be loaded from 'evil'" in message
    assert not TRACE.exists()


def test_a_pickle_beside_good_weights_is_left_alone(refusals):
    folder = copy_of("policy", "evil")
    for name in ("training_args.bin", "optimizer.pt", "pytorch_model.bin", "tokenizer.pkl"):
        torch.save(Evil(), folder / name)
    torch.save(Evil(), "evil/scheduler.pt")
    flags = {"model_name_or_path": "evil", "output_dir": "beside"}
    assert refusals.status("train_sft", arguments("train_sft", flags)) == 0
    assert not TRACE.exists()


def test_the_trap_works(refusals):
    """The control: whoever unpickles it makes the file."""
    pickle.loads(pickle.dumps(Evil()))
    assert TRACE.exists()


CODE_FILE = f"""
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
Path({str(TRACE)!r}).touch()
class Config(GPT2Config): model_type = "mine"
class Model(GPT2LMHeadModel): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(*args, **kwargs): pass
"""


def code_of_a_model(folder: Path) -> None:
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change(folder / "config.json", model_type="mine", auto_map=auto_map)


def code_of_a_tokenizer(folder: Path) -> None:
    auto_map = {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}
    change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Tokenizer")


def with_code(change_folder: Callable[[Path], None], name: str) -> Path:
    folder = copy_of("policy", name)
    (folder / "code.py").write_text(CODE_FILE)
    change_folder(folder)
    return folder


@pytest.mark.parametrize("stage", ["train_sft", "evaluate"])
def test_code_of_a_model_is_not_run_without_the_flag(stage, refusals):
    with_code(code_of_a_model, "its_code")
    flag = "policies" if stage == "evaluate" else "model_name_or_path"
    flags = {flag: "its_code", "tokenizer_name_or_path": "policy"}
    message = refusals.sentence(stage, arguments(stage, flags))
    assert "'its_code'" in message
    assert "--trust_remote_code true" in message
    assert not TRACE.exists()


def test_code_of_a_model_of_a_known_type_is_left_alone(refusals):
    """Transformers has a separate class for it, and custom code for `generate` is not read."""
    folder = with_code(code_of_a_model, "its_code")
    change(folder / "config.json", model_type="gpt2")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE_FILE)
    flags = {"model_name_or_path": "its_code", "output_dir": "known"}
    status = refusals.status("train_sft", arguments("train_sft", flags))
    assert status in (0, 2)
    assert not TRACE.exists()


def test_code_of_a_tokenizer_is_not_run_without_the_flag(refusals):
    with_code(code_of_a_tokenizer, "its_code")
    flags = {"tokenizer_name_or_path": "its_code", "output_dir": "tokens"}
    assert refusals.status("train_sft", arguments("train_sft", flags)) in (0, 2)
    assert not TRACE.exists()


def test_with_the_flag_the_code_is_run(folder, refusals, tmp_path, monkeypatch):
    """The control: the refusal above is not for another reason."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with_code(code_of_a_model, "its_code")
    config = tiny.train_config(trust_remote_code=True, max_prompt_length=8, layout="padded")
    load.read_model_config("its_code", "policy", tiny.tokenizer(), config)
    assert TRACE.exists()


def test_a_chat_template_reaches_nothing_outside(refusals):
    folder = copy_of("policy", "chatty")
    steps = "cycler.__init__.__globals__['os'].system('touch trace')"
    (folder / "chat_template.jinja").write_text(f"{{{{ {steps} }}}}")
    flags = {"model_name_or_path": "chatty", "dataset_name": "chat"}
    message = refusals.sentence("train_sft", arguments("train_sft", flags))
    assert "the tokenizer cannot render them" in message
    assert not TRACE.exists()


@pytest.mark.parametrize(
    "line",
    [
        "seed: !!python/object/apply:os.system ['touch trace']",
        "seed: !!python/object/new:os.system ['touch trace']",
        "? !!python/object/apply:os.system ['touch trace']\n: 1",
    ],
)
def test_a_recipe_runs_nothing(line, refusals):
    Path("r.yaml").write_text(line)
    message = refusals.sentence("train_sft", ["--config", "r.yaml", *arguments("train_sft", {})])
    assert "r.yaml" in message
    assert not TRACE.exists()


SECRETS = {
    "WANDB_API_KEY": "5ec4e7" * 6 + "abcd",
    "HF_TOKEN": "hf_" + "SecretOfTheHub" * 2,
    "AWS_SECRET_ACCESS_KEY": "secret/of/the/cloud/0123456789",
}


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """A real run with secrets around it and wandb on, started where everybody may write."""
    flags = {"output_dir": "left", "report_to": "wandb", "save_steps": 1}
    script = [sys.executable, str(ROOT / "train_sft.py"), *arguments("train_sft", flags)]
    # Without the address of a wandb service that another test has started in this process.
    own = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environment = {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        ["sh", "-c", 'umask 0; exec "$@"', "sh", *script],
        env={**own, **environment, **SECRETS, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert b"warning: wandb" not in result.stderr
    return result


def test_no_secret_of_the_environment_is_written_or_printed(finished):
    files = [path for path in Path("left").rglob("*") if path.is_file() and not path.is_symlink()]
    places = {str(path): path.read_bytes() for path in files}
    names = {Path(name).name for name in places}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "model.safetensors"} <= names
    assert any(name.startswith("run-") for name in names), "wandb's own file"
    for place, content in {**places, "out": finished.stdout, "err": finished.stderr}.items():
        for name, secret in SECRETS.items():
            assert secret.encode() not in content, f"{name} is in {place}"


def test_nobody_else_may_change_what_a_run_wrote(finished):
    found = [Path("left"), *Path("left").rglob("*")]
    assert len(found) > 15
    open_to_all = [str(p) for p in found if not p.is_symlink() and p.stat().st_mode & 0o002]
    assert open_to_all == []


# Code that may run what it reads: modules, functions, methods and options.
UNSAFE = re.compile(
    r"""^\s*(from|import)\ (pickle|_pickle|dill|cloudpickle|joblib|marshal|shelve)\b
    | (?<![\w.])(eval|exec|compile|__import__)\(
    | \bos\.(system|popen)\( | \bsubprocess\.getoutput\(
    | \byaml\.(load|load_all|full_load|unsafe_load)\(
    | \btorch\.load\((?!.*weights_only=True)
    | \b(shell|allow_pickle|trust_remote_code)=True\b
    | \b(weights_only|use_safetensors)=False\b""",
    re.MULTILINE | re.VERBOSE,
)


def test_the_code_has_nothing_that_runs_what_it_reads():
    assert len(CODE) > 50
    assert [(path, found[0]) for path in CODE for found in UNSAFE.finditer(path.read_text())] == []


@pytest.mark.parametrize(
    ("line", "is_unsafe"),
    [
        ("import pickle", True),
        ("from pickle import loads", True),
        ("from joblib.numpy_pickle import load", True),
        ("eval('1')", True),
        ("exec(text)", True),
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("yaml.load(text, yaml.SafeLoader)", True),
        ("subprocess.run(text, shell=True)", True),
        ("os.system(text)", True),
        ("np.load(path, allow_pickle=True)", True),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", True),
        ("AutoModel.from_pretrained(path, trust_remote_code=config.trust_remote_code)", False),
        ("torch.load(path, weights_only=True)", False),
        ("yaml.safe_load(text)", False),
        ("model.eval()", False),
        ("re.compile(text)", False),
        ("subprocess.run(['git'])", False),
    ],
)
def test_the_search_finds_what_it_is_for(line, is_unsafe):
    assert bool(UNSAFE.search(line)) == is_unsafe


def test_remote_code_is_a_matter_of_one_flag():
    """Wherever transformers is told whether to trust code, the flag of the run says so."""
    uses = [
        ast.unparse(option.value)
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for option in node.keywords
        if option.arg == "trust_remote_code"
    ]
    assert set(uses) == {"config.trust_remote_code"}
    assert len(uses) >= 4


REQUIREMENTS = {
    name: [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in "#-"]
    for name in (
        *("requirements.txt", "assets/requirements-vllm.txt", "tests/requirements-vllm.txt"),
        *("tests/requirements.txt", "experiments/evidence/bench/requirements.txt"),
    )
}


@pytest.mark.parametrize("name", list(REQUIREMENTS))
def test_every_requirement_has_a_tried_version(name):
    """The packages' ranges end at the newest that was tried; what only tests use is one version."""
    version = r"\d[\w.]*"
    form = rf"[\w.-]+=={version}(; python_version (>=|<) \"[\d.]+\")?"
    if name == "requirements.txt":
        form = rf"[\w.-]+>={version},<{version}"
    assert REQUIREMENTS[name]
    assert [line for line in REQUIREMENTS[name] if not re.fullmatch(form, line)] == []


def test_the_lock_has_a_version_of_every_range_and_a_hash_for_each_of_its_own():
    lock = (ROOT / "assets" / "requirements.lock").read_text()
    locked = re.findall(r"^([\w-]+)==([\w.]+)", lock, re.MULTILINE)
    for line in REQUIREMENTS["requirements.txt"]:
        requirement = Requirement(line)
        versions = [version for name, version in locked if name == requirement.name]
        assert versions, line
        assert all(requirement.specifier.contains(version) for version in versions), line
    for entry in re.split(r"\n(?=[a-z])", lock)[1:]:
        assert "--hash=sha256:" in entry, entry
