"""Claim: what is sampled through a vLLM server is what the policy gives, or the run says why not.

Here the server is a stand-in with transformers' own models; `test_vllm.py` asks vLLM itself. Every
weight reaches the server before it samples, adapters merged; completions, stop rule and
log-probabilities come back in our sampler's shape; a server that is gone ends the run in a
sentence, and the run goes on from the step before. About `common.sampling.vllm`.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny
import torch
from stand_in import StandIn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import evaluate
from common.config.grpo import GRPOConfig
from common.config.parser import parse
from common.errors import EngineError, UserError
from common.forward import Policy
from common.model import lora
from common.record.jsonl import read_jsonl
from common.sampling.sampler import Sampler
from common.sampling.vllm import server
from common.sampling.vllm.sampler import EngineSampler
from experiments import sample_pairs

pytestmark = pytest.mark.usefixtures("process_group")
STOP = 0
EXAMPLES = tiny.ragged_examples([(5,), (9,), (13,)])
REQUIRED = {"output_dir": "unused", "model_name_or_path": "unused", "reward_funcs": ["gold"]}


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    started = StandIn(tiny.causal_lm("gpt2", is_plain=True))
    yield started
    started.close()


def sampler(stand_in: StandIn, lm: Any, **fields: Any) -> EngineSampler:
    lengths = {"max_prompt_length": 24, "max_completion_length": 12}
    needed = REQUIRED | lengths | {"rollout_server": stand_in.url}
    return EngineSampler(Policy(lm), tiny.vocabulary([STOP]), GRPOConfig(**(needed | fields)))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
def test_completions_are_those_of_our_sampler_in_shape_stop_rule_and_log_probabilities(
    stand_in, temperature
):
    lm = tiny.causal_lm("gpt2")
    through = sampler(stand_in, lm)
    number = 12 if temperature else 1
    drawn = through.sample(EXAMPLES, num_samples=number, temperature=temperature)
    expected = Sampler(Policy(lm), tiny.vocabulary([STOP]), through.config).sample(
        EXAMPLES, num_samples=number, temperature=temperature
    )
    for ours, theirs in zip(expected.tensors, drawn.tensors, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if temperature == 0:
        assert drawn.completion_ids == expected.completion_ids
    else:
        assert 0 < drawn.has_stop.sum() < len(drawn.has_stop)
    for ids, stopped in zip(drawn.completion_ids, drawn.has_stop.tolist(), strict=True):
        assert (STOP in ids) == stopped
        assert ids.index(STOP) == len(ids) - 1 if stopped else len(ids) == 12
    recorded = iter(drawn.as_lists(drawn.token_logps))
    for example in drawn.completed(EXAMPLES):
        for ids in example.completions:
            plain = tiny.plain_logps(lm, example.prompt_ids, ids, temperature or 1.0).tolist()
            rounding = tiny.rounding(lm, temperature or 1.0)
            assert next(recorded) == pytest.approx(plain, abs=rounding)
    assert (drawn.token_logps[~drawn.mask] == 0).all()


def test_a_completion_depends_on_seed_step_row_and_sample_and_on_nothing_else(stand_in):
    through = sampler(stand_in, tiny.causal_lm("gpt2"))
    drawn = through.sample(EXAMPLES, num_samples=5).completion_ids
    assert len({tuple(ids) for ids in drawn}) > 12  # not one seed for all
    assert through.sample(EXAMPLES, num_samples=5, step=1).completion_ids != drawn
    assert through.sample(EXAMPLES[1:2], num_samples=5).completion_ids == drawn[5:10]
    for other in ({"generation_batch_size": 2}, {"generation_batch_size": 1}):
        again = sampler(stand_in, through.policy.lm, **other)
        assert again.sample(EXAMPLES, num_samples=5).completion_ids == drawn
    other_seed = sampler(stand_in, through.policy.lm, seed=1)
    assert other_seed.sample(EXAMPLES, num_samples=5).completion_ids != drawn


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_server_has_the_current_weights(family):
    stand_in = StandIn(tiny.causal_lm(family, is_plain=True))
    lm = tiny.causal_lm(family)
    through = sampler(stand_in, lm)
    for factor in (1.0, 1.25):
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter *= factor
        stand_in.calls.clear()
        through.sample(EXAMPLES)
        for name, parameter in lm.named_parameters():
            assert torch.equal(parameter, stand_in.lm.get_parameter(name)), name
        before = ["/start_weight_update", "load_packed", "/finish_weight_update", "pack_heads"]
        assert stand_in.calls[:5] == [*before, "/reset_prefix_cache"]
    stand_in.close()


def test_adapters_are_merged_into_what_the_server_gets(stand_in):
    lm = tiny.causal_lm("gpt2")
    base = copy.deepcopy(lm.state_dict())
    lora.add_adapters(lm, "a model", tiny.train_config(lora_r=2))
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter += 0.3
    sampler(stand_in, lm, lora_r=2).sample(EXAMPLES)
    merged = lora.merged_state(lm, dict(lm.named_parameters()))
    assert all(torch.equal(w, stand_in.lm.get_parameter(name)) for name, w in merged.items())
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(stand_in.lm.get_parameter(name), base[name])


def test_a_policy_that_does_not_train_is_sent_once(stand_in):
    through = sampler(stand_in, tiny.causal_lm("gpt2").requires_grad_(False))
    for _ in range(3):
        through.sample(EXAMPLES)
    assert stand_in.calls.count("/start_weight_update") == 1


def test_large_models_are_sent_in_several_requests(stand_in, monkeypatch):
    monkeypatch.setattr("common.sampling.vllm.weights.REQUEST_BYTES", 4096)
    lm = tiny.causal_lm("gpt2")
    sampler(stand_in, lm).sample(EXAMPLES)
    assert stand_in.calls.count("load_packed") > 5
    assert all(torch.equal(p, stand_in.lm.get_parameter(n)) for n, p in lm.named_parameters())


def setting(**changes: Any) -> Any:
    def changed(usual: Any) -> Any:
        usual = copy.deepcopy(usual)
        for section, values in changes.items():
            usual["vllm_config"][section] = values and usual["vllm_config"][section] | values
        return usual

    return changed


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        (
            "/server_info",
            setting(model_config={"logprobs_mode": "raw_logprobs"}),
            "has --logprobs-mode raw_logprobs; it must be processed_logprobs",
        ),
        (
            "/server_info",
            setting(parallel_config={"worker_extension_cls": ""}, weight_transfer_config=None),
            "from a CPU the server needs --worker-extension-cls common.sampling.vllm.worker",
        ),
        ("/server_info", setting(model_config={"max_model_len": 35}), "len 35; it must be 36"),
        ("/server_info", lambda usual: {}, "answers /server_info.* without vllm_config"),
        ("/server_info", lambda usual: b"<html>", "b'<html>', which is no JSON"),
        ("/reset_prefix_cache", lambda usual: {"success": False}, "does not forget"),
    ],
)
def test_a_server_of_another_kind_is_refused(stand_in, path, change, reason):
    stand_in.answers[path] = change
    with pytest.raises(EngineError, match=reason):
        sampler(stand_in, tiny.causal_lm("gpt2")).sample(EXAMPLES)


def choice(answer: Any, **changes: Any) -> Any:
    answer["choices"][0].update(changes)
    return answer


def content(*logps: Any) -> dict[str, Any]:
    return {"content": [{"logprob": logp} for logp in logps]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda answer: b"<html>", "b'<html>', which is no JSON"),
        (lambda answer: {"error": "?"}, "what is no completion"),
        (lambda answer: {"choices": answer["choices"][1:]}, "1 completions, not 2"),
        (lambda answer: choice(answer, token_ids=[]), "what is no completion"),
        (lambda answer: choice(answer, token_ids=[5, 0]), "of 2 tokens and"),
        (lambda a: choice(a, token_ids=[5, 0], logprobs=content(-1, 0.5)), "that are none"),
        (lambda a: choice(a, token_ids=[5, 0], logprobs=content(-1, None)), "no completion"),
        (lambda a: choice(a, token_ids=[5, 6], logprobs=content(-1, -1)), "nor by its length"),
        (lambda a: choice(a, token_ids=[0, 0], logprobs=content(-1, -1)), "its first stop token"),
    ],
)
def test_nonsense_is_named(stand_in, change, reason):
    """A proxy answers with a page, another program with other numbers: the run is saved."""
    stand_in.answers["/inference/v1/generate"] = change
    with pytest.raises(EngineError, match=reason):
        sampler(stand_in, tiny.causal_lm("gpt2")).sample(EXAMPLES, num_samples=2)


def test_a_server_without_the_calls_and_one_that_is_gone_are_named(stand_in, monkeypatch):
    def not_found(self: Any) -> None:
        self.send_error(404)

    monkeypatch.setattr(stand_in.server.RequestHandlerClass, "do_GET", not_found)
    with pytest.raises(EngineError, match="answers /server_info.* with status 404"):
        sampler(stand_in, tiny.causal_lm("gpt2"))
    stand_in.close()
    with pytest.raises(EngineError, match=f"{stand_in.url} does not answer /server_info.*refused"):
        sampler(stand_in, tiny.causal_lm("gpt2"))


def test_a_restricted_distribution_needs_log_probabilities_before_it():
    assert server.logprobs_mode(GRPOConfig(**REQUIRED, top_k=3)) == "raw_logprobs"
    assert server.logprobs_mode(GRPOConfig(**REQUIRED, temperature=0.7)) == "processed_logprobs"


TASK = {
    "dataset_name": "synthetic",
    "num_train_rows": 12,
    "num_eval_rows": 4,
    "num_sample_prompts": 1,
    "max_prompt_length": 128,
    "max_completion_length": 6,
    "reward_funcs": "count:e",
}
GRPO = TASK | {
    "batch_size": 4,
    "num_generations": 3,
    "penalize_missing_eos": "false",
    "learning_rate": 1e-2,
    "max_steps": 4,
    "logging_steps": 1,
    "sample_steps": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path, tokenizer_folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(tiny_gpt2, vocab_size=len(tokenizer))
    lm = tiny.random_weights(AutoModelForCausalLM.from_config(shape), 0)
    return tiny.save(lm, tmp_path_factory.mktemp("engine") / "model", tokenizer)


@pytest.fixture
def served(model: str) -> Iterator[StandIn]:
    started = StandIn(AutoModelForCausalLM.from_pretrained(model))
    yield started
    started.close()


def ended(jobs: list[ranks.Job]) -> str:
    """Run stages on this rank; the sentence of a refusal, "" without one."""
    try:
        ranks.run_stages(jobs)
    except UserError as error:
        return str(error)
    return ""


def job(folder: Path, served: StandIn, model: str, stage: str, flags: dict[str, Any]) -> ranks.Job:
    paths = {"output_dir": str(folder), "model_name_or_path": model, "rollout_server": served.url}
    return {"stage": stage, "flags": flags | paths}


def grpo(folder: Path, served: StandIn, num_ranks: int, model: str) -> list[str]:
    jobs = [job(folder, served, model, "grpo", GRPO)]
    return ranks.launch(ended, num_ranks, folder.parent, jobs=jobs)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_server_that_dies_costs_no_step(served, model, tmp_path, num_ranks):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert grpo(whole, served, num_ranks, model) == [""] * num_ranks
    lines = ranks.untimed_lines(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert "eval_reward" in lines.pop()
    assert max(abs(line["sampler_kl"]) for line in lines) < 1e-5  # each step with its own weights
    served.calls.clear()
    requests_of_two_steps = 2 * (4 + num_ranks)  # each rank asks for the table
    served.breaks_at = requests_of_two_steps + 2  # amid the third
    sentences = grpo(broken, served, num_ranks, model)
    assert len(set(sentences)) == 1
    saved = broken / "checkpoints" / "step_00000002"
    assert sentences[0].startswith(f"the vLLM server {served.url} does not answer /inference/v1")
    assert sentences[0].endswith(f"; the same command goes on from {saved}.")
    served.breaks_at = 0
    assert grpo(broken, served, num_ranks, model) == [""] * num_ranks
    assert ranks.untimed_lines(broken)[:-1] == lines


def test_an_evaluation_that_cannot_be_sampled_costs_no_model(served, model, tmp_path):
    served.breaks_at = 5  # after the four prompts of the only step
    with pytest.raises(RuntimeError, match=r"the model is whole in .*: the vLLM server"):
        ended([job(tmp_path / "run", served, model, "grpo", GRPO | {"max_steps": 1})])
    assert (tmp_path / "run" / "model").is_dir()


def test_pairs_come_from_the_server(served, model, tmp_path):
    flags = {k: v for k, v in TASK.items() if k != "num_sample_prompts"}
    flags |= {"num_candidates": 4, "batch_size": 4, "penalize_missing_eos": "false"}
    words = ranks.arguments(job(tmp_path / "pairs", served, model, "", flags)["flags"])
    sample_pairs.main(parse(sample_pairs.PairsConfig, words))
    assert served.calls.count("/inference/v1/generate") == 12 + 4
    assert served.calls.count("/start_weight_update") == 1
    for split in ("train", "validation"):
        assert read_jsonl(tmp_path / "pairs" / f"{split}.jsonl")


def test_an_evaluation_samples_from_every_policy_by_the_server(served, model, tmp_path):
    flags = {k: v for k, v in TASK.items() if k not in ("num_train_rows", "num_sample_prompts")}
    flags |= {"output_dir": str(tmp_path / "run"), "policies": model, "num_prompts": 4}
    argv = [word for name, value in flags.items() for word in ranks.flag(name, value)]
    evaluate.main(parse(evaluate.EvaluateConfig, [*argv, "--rollout_server", served.url]))
    assert served.calls.count("/inference/v1/generate") == 4
    assert len(read_jsonl(tmp_path / "run" / "completions.jsonl")) == 4
