"""Claim: a vLLM server samples from the policy, with its current weights.

For real, on a CPU: `make test-vllm`. Servers are started by the lines in `docs/rollout_engine.md`.
Log-probabilities are within 1e-5 nats of ours in float32. About `common.sampling.vllm`.
"""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import tiny
import torch
from stand_in import StandIn
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config.grpo import GRPOConfig
from common.errors import EngineError
from common.forward import Policy
from common.sampling.sampler import Rollouts, Sampler
from common.sampling.vllm.sampler import EngineSampler
from common.sampling.vllm.server import Server
from common.sampling.vllm.weights import Weights, nccl_sender, send_in_requests

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-vllm` does that", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("process_group")
STOP = 0
EXAMPLES = tiny.ragged_examples([(5,), (9,), (13,)])
ROOT = Path(__file__).resolve().parents[2]
# Scores as far from each other as a trained model's are; vLLM's attention has heads of 32.
SHAPE: dict[str, Any] = {"width": 128, "initializer_range": 0.05}


@contextmanager
def served(model: Path, folder: Path, **changes: str) -> Iterator[str]:
    """The URL of a server that the page's lines for CPUs start, with other values of flags."""
    page = (ROOT / "docs" / "rollout_engine.md").read_text()
    (block,) = (text for text in page.split("```") if "VLLM_TARGET_DEVICE=cpu" in text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = block.removeprefix("sh\n").replace("PORT=8000", f"PORT={port}")
    lines = lines.replace("MODEL=output/demo/sft/model", f"MODEL={model}")
    lines = lines.replace("--gpu-memory-utilization 0.3", "--gpu-memory-utilization 0.1")
    for flag, value in changes.items():
        lines, number = re.subn(f"--{flag.replace('_', '-')} \\S+", rf"--{flag} {value}", lines)
        assert number == 1
    environment = ranks.environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", lines],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # seen once with vLLM 0.30, after its engine was killed
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    while True:
        try:
            Server(url, 10).call("/health", method="GET")
            return
        except EngineError:
            assert process.poll() is None
            time.sleep(0.5)


@contextmanager
def new_engine(folder: Path, family: str, mode: str, **fields: Any) -> Iterator[EngineSampler]:
    with tiny.process_group():
        lm = tiny.causal_lm(family, **SHAPE)
        lm.save_pretrained(folder / "model")
        with served(folder / "model", folder, max_model_len="36", logprobs_mode=mode) as url:
            needed = {"output_dir": "unused", "model_name_or_path": "unused"}
            needed |= {"max_prompt_length": 24, "max_completion_length": 12}
            needed |= {"generation_batch_size": 8, "reward_funcs": ["gold"], "rollout_server": url}
            config = GRPOConfig(**(needed | fields))
            yield EngineSampler(Policy(lm), tiny.vocabulary([STOP]), config)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSampler]:
    """Its head is tied to the embedding."""
    with new_engine(tmp_path_factory.mktemp("gpt2"), "gpt2", "processed_logprobs") as sampler:
        yield sampler


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSampler]:
    """Draws among 5 tokens only."""
    with new_engine(tmp_path_factory.mktemp("llama"), "llama", "raw_logprobs", top_k=5) as sampler:
        yield sampler


def gap(sampler: EngineSampler, drawn: Rollouts, temperature: float) -> float:
    """The most nats between a token's log-probability there and here."""
    ours = [
        tiny.plain_logps(sampler.policy.lm, example.prompt_ids, ids, temperature).tolist()
        for example in drawn.completed(EXAMPLES)
        for ids in example.completions
    ]
    theirs = drawn.as_lists(drawn.token_logps)
    return max(abs(one - other) for one, other in zip(chain(*ours), chain(*theirs), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_ours(gpt2, temperature):
    drawn = gpt2.sample(EXAMPLES, num_samples=40, temperature=temperature)
    assert gap(gpt2, drawn, temperature) < 1e-5
    assert 0 < drawn.has_stop.sum() < len(drawn.has_stop)
    for ids, stopped in zip(drawn.completion_ids, drawn.has_stop.tolist(), strict=True):
        assert ids.index(STOP) == len(ids) - 1 if stopped else len(ids) == 12 and STOP not in ids


def test_log_probabilities_of_a_restricted_distribution_are_those_before(llama):
    drawn = llama.sample(EXAMPLES, num_samples=12, top_k=5)
    assert gap(llama, drawn, 1.0) < 1e-5
    free = llama.sample(EXAMPLES, num_samples=12)
    assert gap(llama, free, 1.0) < 1e-5
    assert drawn.token_logps.min() > free.token_logps.min()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_most_likely_tokens_are_ours(family, request):
    sampler = request.getfixturevalue(family)
    ours = Sampler(sampler.policy, tiny.vocabulary([STOP]), sampler.config)
    drawn = sampler.sample(EXAMPLES, temperature=0)
    assert drawn.completion_ids == ours.sample(EXAMPLES, temperature=0).completion_ids
    assert gap(sampler, drawn, 1.0) < 1e-5


def test_the_same_engine_draws_the_same_completions(gpt2):
    drawn = gpt2.sample(EXAMPLES, num_samples=5).completion_ids
    assert len({tuple(ids) for ids in drawn}) > 10
    assert gpt2.sample(EXAMPLES, num_samples=5).completion_ids == drawn
    assert gpt2.sample(EXAMPLES[1:2], num_samples=5).completion_ids == drawn[5:10]
    assert gpt2.sample(EXAMPLES, num_samples=5, step=1).completion_ids != drawn


def test_more_prompts_than_a_step_of_vllm_holds(gpt2, monkeypatch):
    """With prompts in parts vLLM 0.30 ends on a CPU: seeded generators are set back there."""
    monkeypatch.setattr(gpt2.config, "generation_batch_size", 256)
    assert len(gpt2.sample(tiny.ragged_examples([(24,)] * 200)).ids) == 200


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_that_change_are_seen_at_the_next_step(family, request):
    sampler = request.getfixturevalue(family)
    before = sampler.sample(EXAMPLES, num_samples=4)
    state = {name: p.detach().clone() for name, p in sampler.policy.named_parameters()}
    with torch.no_grad():
        for parameter in sampler.policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        assert gap(sampler, sampler.sample(EXAMPLES, num_samples=4), 1.0) < 1e-5
        assert gap(sampler, before, 1.0) > 1e-2
        for name, parameter in sampler.policy.named_parameters():
            parameter.copy_(state[name])
    assert torch.equal(sampler.sample(EXAMPLES, num_samples=4).ids, before.ids)


def test_a_server_takes_weights_after_a_run_that_ended_amid_sending_some(gpt2):
    gpt2.server.call("/start_weight_update")
    assert gap(gpt2, gpt2.sample(EXAMPLES, num_samples=4), 1.0) < 1e-5


def test_weights_of_another_model_are_refused_by_name(gpt2):
    other = Weights(Policy(tiny.causal_lm("llama", **SHAPE)), torch.float32)
    other.start()
    with pytest.raises(EngineError, match="no module or parameter named 'model"):
        send_in_requests(gpt2.server, other)
    assert gap(gpt2, gpt2.sample(EXAMPLES, num_samples=4), 1.0) < 1e-5


def test_the_transport_of_vllm_is_asked_for_by_its_arguments(monkeypatch):
    from vllm.distributed.weight_transfer import factory, nccl_engine

    weights = Weights(Policy(tiny.causal_lm("gpt2")), torch.bfloat16)
    stand_in = StandIn(tiny.causal_lm("gpt2"))
    stand_in.answers["/get_world_size"] = lambda usual: {"world_size": 4}
    asked: dict[str, Any] = {}

    def send_weights() -> None:
        asked["client"].start_weight_update()
        asked["client"].update_weights({"names": ["a"]})
        asked["client"].finish_weight_update()

    def note(info: Any, **others: Any) -> Any:
        asked.update(others, info=info)
        return SimpleNamespace(send_weights=send_weights)

    monkeypatch.setattr(factory.WeightTransferTrainerFactory, "trainer_init", note)
    send = nccl_sender(Server(stand_in.url, 10), weights)
    send()
    expected = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert stand_in.calls[-3:] == expected
    info = asked["info"]
    assert (info.backend, info.rank, info.packed) == ("nccl", 0, True)
    assert (info.world_size, info.master_address) == (5, "127.0.0.1")
    weights.start()
    checked = nccl_engine.NCCLTrainerWeightTransferEngine._checked_iter(weights, weights.metadata())
    assert len(dict(checked)) == len(weights.metadata()) > 20
    stand_in.close()


STEPS = {"max_steps": 3, "logging_steps": 1, "learning_rate": 3e-3}
TASK = {
    "dataset_name": "synthetic",
    "dataset_test_split": "",
    "num_train_rows": 12,
    "num_sample_prompts": 1,
    "max_prompt_length": 128,
    "max_completion_length": 8,
    "reward_funcs": "count:e",
    "penalize_missing_eos": "false",
    "batch_size": 4,
    "num_generations": 3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    shape = tiny.model_config("gpt2", vocab_size=len(tokenizer), n_positions=192, **SHAPE)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_two_processes_train_with_the_server_of_the_page(model, tmp_path):
    with served(model, tmp_path, max_model_len="136") as url:
        for name, flags in {"whole": {}, "adapters": {"lora_r": 4}}.items():
            output_dir = tmp_path / name
            paths = {"model_name_or_path": model, "output_dir": output_dir, "rollout_server": url}
            values = TASK | STEPS | paths | flags
            words = [word for name, value in values.items() for word in (f"--{name}", value)]
            ranks.run_script(["train_grpo.py", *map(str, words)], 2, timeout=400)
            lines = ranks.untimed_lines(output_dir)
            assert [line["step"] for line in lines] == [1, 2, 3]
            assert max(abs(line["sampler_kl"]) for line in lines) < 1e-5
            assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) != lines[2]["kl"]


def test_a_server_that_is_gone_is_named(tmp_path):
    with new_engine(tmp_path, "gpt2", "processed_logprobs") as sampler:
        assert len(sampler.sample(EXAMPLES).ids) == 3
    with pytest.raises(EngineError, match=f"server {sampler.server.address} does not answer /"):
        sampler.sample(EXAMPLES)
