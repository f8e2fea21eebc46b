"""The planner counts what is there: parameters, optimiser, activations, caches, per rank.

The targets are worked out by hand from the sizes of a model, or counted on a real one: what its
autograd graph keeps in a real forward pass, what a real sampler's cache holds, what peft adds.
Whether the sum is what a run takes is measured by `assets/recipes/plans/against_run.py`. About
`experiments.plan`.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tiny
import torch

from assets.recipes.ladder import tables as ladder
from common.batch import MAKERS
from common.config.dpo import DPOConfig
from common.config.grpo import GRPOConfig
from common.config.stages import TrainConfig
from common.errors import UserError
from common.forward import Policy
from common.model import fsdp, lora
from common.sampling.graphs import StepGraphs
from common.sampling.shared import SharedDecoder
from experiments.plan import __main__ as command
from experiments.plan import activations, memory
from experiments.plan import work as workload
from train_reward import RewardConfig
from train_sft import SFTConfig

WIDTH, LAYERS, HEADS, VOCABULARY, POSITIONS = 32, 2, 4, 61, 96
# Of a GPT-2 block: qkv, output, up, down, their biases, two norms.
BLOCK = 12 * WIDTH**2 + (3 + 1 + 4 + 1) * WIDTH + 4 * WIDTH
ROOT = (VOCABULARY + POSITIONS) * WIDTH + 2 * WIDTH
NUMBERS = LAYERS * BLOCK + ROOT
GRPO: dict[str, Any] = {"config": GRPOConfig, "reward_funcs": ["gold"]}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config .json of each family, without weights."""
    folder = tmp_path_factory.mktemp("shapes")
    for family in tiny.FAMILIES:
        fields = tiny.model_config(family).to_dict()
        (folder / f"{family}.json").write_text(json.dumps(fields))
    return folder


def run_of(
    shapes: Path,
    family: str = "gpt2",
    *,
    config: Any = SFTConfig,
    on_gpu: bool = False,
    **flags: Any,
):
    """The plan of a stage, on a CPU by default."""
    needed = {
        "output_dir": "unused",
        "model_name_or_path": str(shapes / f"{family}.json"),
        "max_prompt_length": 40,
        "max_completion_length": 10,
        "num_sample_prompts": 0,
    }
    return workload.make_run(config(**(needed | flags)), on_gpu=on_gpu)


def sizes(run: workload.Run, num_ranks: int, name: str) -> dict[str, float]:
    (moment,) = (m for m in memory.moments(run.on(num_ranks)) if m.name == name)
    return moment.columns


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (3, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_shards_are_the_chunks_that_torch_makes(shapes, family, num_ranks, num_replicas):
    run = run_of(shapes, family, batch_size=num_ranks, num_replicas=num_replicas)
    at_loss = sizes(run, num_ranks, "loss")
    num_shards = num_ranks // num_replicas
    shard = sum(p.chunk(num_shards)[0].numel() for p in tiny.causal_lm(family).parameters())
    assert at_loss["parameters"] == 4 * shard
    assert at_loss["optimiser"] == 8 * shard


def test_frozen_copies_have_parameters_only(shapes: Path):
    grpo = run_of(shapes, **GRPO)
    assert sizes(grpo, 1, "loss")["parameters"] == 8 * NUMBERS
    assert sizes(grpo, 1, "loss")["optimiser"] == 8 * NUMBERS
    without = run_of(shapes, **GRPO, beta=0.0)
    assert sizes(without, 1, "loss")["parameters"] == 4 * NUMBERS


def test_under_bfloat16_what_is_frozen_takes_two_bytes(shapes: Path):
    """But a reference that moves, and a base that is float32 on disk. One process has copies."""
    grpo, copied = GRPO | {"bf16": True}, 4 + 2
    assert sizes(run_of(shapes, **grpo), 1, "loss")["parameters"] == (copied + 2) * NUMBERS
    moving = run_of(shapes, **grpo, ref_update_steps=2)
    assert sizes(moving, 1, "loss")["parameters"] == 2 * copied * NUMBERS
    assert sizes(moving, 1, "loss")["gathered"] == 0
    assert sizes(moving, 1, "gradients")["gradients"] == copied * NUMBERS + 2 * VOCABULARY * WIDTH
    offloaded = {"cpu_offload": True, "on_gpu": True}
    on_host = memory.host_bytes(run_of(shapes, **grpo, **offloaded))
    assert on_host[0] == (4 + 2 + 3 * 4) * NUMBERS
    fields = json.loads((shapes / "gpt2.json").read_text())
    for dtype, size in (("float32", copied), ("bfloat16", 2)):
        (shapes / f"gpt2-{dtype}.json").write_text(json.dumps(fields | {"dtype": dtype}))
        run = run_of(shapes, f"gpt2-{dtype}", lora_r=4, bf16=True)
        trained = run.policy.numbers(trained=True)
        assert sizes(run, 1, "loss")["parameters"] == size * NUMBERS + copied * trained


def test_a_reference_that_scores_ahead_is_gone_when_the_policy_trains(shapes: Path):
    ahead = run_of(shapes, config=DPOConfig)
    assert sizes(ahead, 1, "loss")["parameters"] == 4 * NUMBERS
    assert sizes(ahead, 1, "reference")["parameters"] == 4 * NUMBERS
    assert "optimiser" not in sizes(ahead, 1, "reference")


def test_adapters_are_those_that_peft_adds(shapes: Path):
    rank = 4
    run = run_of(shapes, lora_r=rank)
    by_hand = LAYERS * rank * (2 * WIDTH + 4 * WIDTH + 5 * WIDTH + 5 * WIDTH)  # in + out of each
    assert run.policy.numbers(trained=True) == by_hand
    lm = tiny.causal_lm("gpt2")
    settings = TrainConfig(output_dir="unused", model_name_or_path="unused", lora_r=rank)
    lora.add_adapters(lm, "unused", settings)
    assert by_hand == sum(p.numel() for p in lm.parameters() if p.requires_grad)
    assert run.policy.numbers() == sum(p.numel() for p in lm.parameters())
    at_end = sizes(run, 1, "gradients")
    assert (at_end["gradients"], at_end["optimiser"]) == (4 * by_hand, 8 * by_hand)


def test_offloading_leaves_no_shard_on_a_gpu(shapes: Path):
    flags = {"cpu_offload": True, "batch_size": 2}
    on_gpu = sizes(run_of(shapes, **flags, on_gpu=True), 2, "loss")
    assert on_gpu["parameters"] == on_gpu["optimiser"] == 0
    on_cpu = sizes(run_of(shapes, **flags), 2, "loss")
    assert on_cpu["parameters"] > 0  # there it is the same memory


@pytest.mark.parametrize(("bf16", "size"), [(False, 4), (True, 2)])
def test_gathered_units_are_in_the_compute_dtype(shapes: Path, bf16: bool, size: int):
    run = run_of(shapes, bf16=bf16, batch_size=2)
    assert sizes(run, 2, "loss")["gathered"] == size * (ROOT + 2 * BLOCK)
    assert sizes(run_of(shapes), 1, "loss")["gathered"] == 0


def test_gradients_of_several_micro_batches_are_whole(shapes: Path):
    one = run_of(shapes, batch_size=2, micro_batch_tokens=100)
    assert workload.micro_batch(one.on(2)).number == 1
    several = run_of(shapes, batch_size=8, micro_batch_tokens=100)
    assert workload.micro_batch(several.on(2)).number == 2
    head = 4 * VOCABULARY * WIDTH
    assert sizes(one, 2, "loss")["gradients"] == head
    assert sizes(several, 2, "loss")["gradients"] == 4 * NUMBERS + head


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (8, 1), (8, 2)])
def test_gradients_that_are_reduced_in_every_micro_batch_are_shards(
    shapes: Path, num_ranks: int, num_replicas: int
):
    flags = {"batch_size": 64, "micro_batch_tokens": 100, "num_replicas": num_replicas}
    whole, sharded = (run_of(shapes, **flags, shard_gradients=value) for value in (False, True))
    num_shards = num_ranks // num_replicas
    shard = sum(p.chunk(num_shards)[0].numel() for p in tiny.causal_lm("gpt2").parameters())
    for name in ("loss", "backward"):
        less = sizes(whole, num_ranks, name)["gradients"]
        less -= sizes(sharded, num_ranks, name)["gradients"]
        assert less == 4 * (NUMBERS - shard)
    # At the end the root's: whole, what they are reduced from, and the shard before it is added.
    end = sizes(sharded, num_ranks, "gradients")["gradients"]
    root = [p for p in sharded.policy.root if p.ndim == 2]
    of_root = sum(-(-len(p) // num_shards) * WIDTH for p in root) + 2 * -(-WIDTH // num_shards)
    assert end == 4 * shard + 8 * ROOT + 4 * of_root
    offloaded = run_of(shapes, **flags, shard_gradients=True, cpu_offload=True)
    offloaded = replace(offloaded, on_gpu=True)
    assert sizes(offloaded, num_ranks, "loss")["gradients"] == 4 * VOCABULARY * WIDTH
    for name in ("loss", "backward", "gradients") if num_replicas == 1 else ():
        plain = [sizes(run, 1, name)["gradients"] for run in (whole, sharded)]
        assert plain[0] == plain[1]  # one process holds all of them


def test_a_gpt2_block_keeps_what_is_worked_out_by_hand(shapes: Path):
    # Both norms' inputs and outputs, queries, keys, values, attention's output: 8 widths; of the
    # MLP before and after its activation 8; two statistics of each norm, a log-sum-exp per head.
    numbers = 16 * WIDTH + 4 + HEADS
    assert run_of(shapes).policy.block_bytes == 4 * numbers
    # Without norms' statistics, which stay float32 on a CPU only sometimes.
    rounded = run_of(shapes, bf16=True).policy
    assert rounded.block_bytes == pytest.approx(2 * numbers, rel=0.03)


def kept_by_a_real_pass(family: str, num_completions: int) -> int:
    """Bytes of the storages that the graph of a policy's scores keeps, without parameters'."""
    model = Policy(tiny.causal_lm(family)).train()
    fsdp.use_our_modules(model.lm, tiny.train_config())
    prompts = [tiny.random_ids(40, seed=n) for n in range(4)]
    completions = [
        [tiny.random_ids(10, seed=10 * n + k) for k in range(num_completions)] for n in range(4)
    ]
    batch = MAKERS["shared_prefix"](prompts, completions, 0)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = model(batch)
    del scores
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("num_completions", [1, 2])
def test_activations_are_those_that_a_real_graph_keeps(shapes, family, num_completions):
    config = SFTConfig if num_completions == 1 else DPOConfig
    run = run_of(shapes, family, config=config, batch_size=4)
    batch = workload.micro_batch(run)
    assert batch.tokens == 4 * (40 + num_completions * 10)
    planned, _ = activations.activations(run, run.policy, batch)
    # Logits, and the states that they are made of.
    logits = 4 * num_completions * 10 * (VOCABULARY + WIDTH)
    real = kept_by_a_real_pass(family, num_completions)
    assert planned + 4 * logits == pytest.approx(real, rel=0.06)


def test_a_micro_batch_is_bounded_by_tokens_and_rows(shapes: Path):
    by_tokens = workload.micro_batch(run_of(shapes, batch_size=64, micro_batch_tokens=500))
    assert (by_tokens.number, by_tokens.tokens) == (7, 500)  # ten rows of 50
    by_rows = run_of(shapes, batch_size=64, micro_batch_tokens=500, micro_batch_size=4)
    assert workload.micro_batch(by_rows) == workload.MicroBatch(16, 200, 4, 4)
    flags = {"num_generations": 8, "batch_size": 1, "micro_batch_tokens": 100}
    cut = run_of(shapes, **GRPO, **flags)  # 40 + 4 x 10 fit
    assert workload.micro_batch(cut) == workload.MicroBatch(2, 100, 1.25, 5.0)


@pytest.mark.parametrize(
    ("num_minibatches", "num_ranks", "prompts"),
    # Of 64: all of an update may be on one rank, which has 8 of them, or 64.
    [(1, 8, 8), (4, 8, 8), (16, 8, 4), (64, 8, 1), (16, 1, 4)],
)
def test_an_update_may_have_all_its_prompts_on_one_rank(
    shapes: Path, num_minibatches: int, num_ranks: int, prompts: int
):
    flags = {"num_generations": 2, "num_minibatches": num_minibatches, "batch_size": 64}
    run = run_of(shapes, **GRPO, **flags)
    # A group of 40 + 2 x 10 tokens.
    assert workload.micro_batch(run.on(num_ranks)).tokens == prompts * 60


def test_an_exact_kl_keeps_states_of_all_updates_and_the_head(shapes: Path):
    flags = GRPO | {"batch_size": 4, "num_generations": 2, "num_minibatches": 4}
    estimated, exact = (run_of(shapes, **flags, kl_estimator=kl) for kl in ("k3", "full"))
    states = 4 * WIDTH * 4 * 2 * 10  # of completions' tokens
    for num_ranks, head in ((1, 0), (2, 4 * VOCABULARY * WIDTH)):
        for name in ("reference", "loss", "backward", "rollout"):
            more = sizes(exact, num_ranks, name)["activations"]
            more -= sizes(estimated, num_ranks, name)["activations"]
            assert more == states // num_ranks + head


def test_a_gpu_holds_more_logits_at_once(shapes: Path):
    """Up to 1 GiB, a CPU up to 64 MiB; fewer rows than that have theirs only."""
    logits = []
    for on_gpu in (False, True):
        run = run_of(shapes, on_gpu=on_gpu, batch_size=2**12, micro_batch_tokens=2**16)
        policy = replace(run.policy, vocabulary=2**16)
        logits += [
            activations.logits_bytes(run, policy, batch) - 4 * WIDTH * rows
            for rows in (2560, 40960)
            for batch in [workload.MicroBatch(1, 0, 0, rows / 10)]
        ]
    assert logits == [2**26, 2**26, 4 * 2560 * 2**16, 2**30]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_cache_is_that_of_a_real_sampler(shapes: Path, bf16: bool):
    num_prompts, num_samples = 3, 16
    run = run_of(shapes, **GRPO, num_generations=num_samples, bf16=bf16)
    prompts = [tiny.random_ids(40, seed=n) for n in range(num_prompts)]
    lm = tiny.causal_lm("gpt2").to(torch.bfloat16 if bf16 else torch.float32)
    with torch.no_grad():
        cache = SharedDecoder(lm, prompts, num_samples, max_length=10).cache
    held = [
        x for keys in (cache.prompt_keys, cache.sample_keys) for pair in keys.values() for x in pair
    ]
    real = sum(tensor.numel() * tensor.element_size() for tensor in held)
    by_hand = 4 * 2 * LAYERS * WIDTH * (num_prompts * 40 + num_prompts * num_samples * 10)
    assert memory.cache_bytes(run, num_prompts, num_samples) == real == by_hand
    # On a GPU the room for samples is allocated at once; the keys from the prefill, for GPT-2 a
    # view of queries, keys and values, are still held.
    on_gpu = replace(run, on_gpu=True)
    more = 4 * LAYERS * 3 * WIDTH * num_prompts * 40
    expected = (by_hand + more) / (2 if bf16 else 1)
    assert memory.cache_bytes(on_gpu, num_prompts, num_samples) == expected


def test_what_graphs_read_stays_between_rollouts(shapes: Path):
    flags = GRPO | {"bf16": True, "batch_size": 3, "generation_batch_size": 48}
    run = run_of(shapes, **flags, num_generations=16, on_gpu=True)
    lm, graphs = tiny.causal_lm("gpt2").bfloat16(), StepGraphs()
    with torch.no_grad():
        SharedDecoder(lm, [tiny.random_ids(40, seed=n) for n in range(3)], 16, 10, graphs)
    held = [x for name, x in graphs.memory.items() if isinstance(name, tuple)]
    keys = sum(x.numel() * torch.bfloat16.itemsize for x in held)  # float32 on this CPU
    kept = {"copy": memory.copy_bytes(run), "cache": float(keys)}
    assert memory.kept_by_graphs(run) == kept
    in_update = [moment for moment in memory.moments(run) if moment.name == "loss"]
    assert [moment.columns | kept for moment in in_update] == [
        moment.columns for moment in in_update
    ]
    for other in ({"cuda_graphs": False}, {"max_completion_length": 2**26}):
        assert memory.kept_by_graphs(run.with_flags(**other)) == {}


def test_every_rank_samples_from_a_whole_copy(shapes: Path):
    flags = GRPO | {"bf16": True, "batch_size": 64, "on_gpu": True}
    run = run_of(shapes, **flags)
    whole = 2 * NUMBERS + 4 * VOCABULARY * WIDTH  # and the head in float32
    assert memory.copy_bytes(run.on(8)) == memory.copy_bytes(run.on(64)) == whole
    assert memory.copy_bytes(run_of(shapes, **flags | {"bf16": False})) == 0  # its own weights
    elsewhere = run_of(shapes, **flags, rollout_server="http://HOST:8000")
    assert "rollout" not in {moment.name for moment in memory.moments(elsewhere.on(8))}


def test_a_save_holds_a_copy_of_the_state_beside_the_step(shapes: Path):
    state = 12 * NUMBERS  # parameters and two moments
    without = replace(run_of(shapes), process_bytes=0)
    assert "save" not in {m.name for m in memory.moments(without)}
    step_bytes = max(m.total for m in memory.moments(without) if m.name != "export")
    saving = sizes(replace(run_of(shapes, save_steps=5), process_bytes=0), 1, "save")
    assert saving["checkpoint"] == state
    assert sum(saving.values()) == step_bytes + state
    assert memory.saved_bytes(run_of(shapes, save_steps=5, async_save=False)) == 0


def test_adapters_are_saved_alone_and_an_updated_reference_too(shapes: Path):
    flags = {"save_steps": 5, "batch_size": 2}
    adapters = run_of(shapes, **flags, lora_r=4)
    trained = adapters.policy.numbers(trained=True)
    assert memory.saved_bytes(adapters) == 12 * trained
    grpo = GRPO | {"ref_update_steps": 2}
    assert memory.saved_bytes(run_of(shapes, **flags, **grpo)) == 16 * NUMBERS


def test_the_host_of_a_gpu_holds_what_is_saved_and_offloaded(shapes: Path):
    flags = {"batch_size": 2, "on_gpu": True, "save_steps": 5}
    shard = sum(p.chunk(2)[0].numel() for p in tiny.causal_lm("gpt2").parameters())

    def host(**more: Any) -> list[float]:
        run = run_of(shapes, **(flags | more))
        return memory.host_bytes(run.on(2))

    export = 8 * NUMBERS
    assert host() == [0, 12 * shard, export, max(12 * shard, export)]
    assert host(save_steps=0) == [0, 0, export, export]
    held = 16 * shard  # parameters, moments and gradients
    assert host(cpu_offload=True) == [held, 12 * shard, export, held + max(12 * shard, export)]
    page = command.page(run_of(shapes, **flags), [1, 2])
    assert "GB of a rank on its host" in page


def test_operations_of_a_step(shapes: Path):
    # One layer less 10 of 12 width^2 for the prompt's tokens but the last.
    linear = 2 * (24 * WIDTH**2 * 50 - 10 * WIDTH**2 * 39)
    pairs = 2 * (50 * 51 / 2) - 39 * 40 / 2
    forward = linear + 4 * WIDTH * pairs + 2 * WIDTH * VOCABULARY * 10
    flops = workload.step_flops(run_of(shapes, batch_size=4))
    assert flops == {"forward": 4 * forward, "backward": 8 * forward}
    grpo = run_of(shapes, **GRPO, num_candidates=16)
    work = workload.step_flops(grpo)
    assert set(work) == {"forward", "backward", "sampling", "reference"}
    assert work["reference"] == work["forward"] < work["sampling"]
    again = workload.step_flops(run_of(shapes, batch_size=4, gradient_checkpointing=True))
    assert again["backward"] == 12 * forward


@pytest.fixture
def planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    def run(arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["experiments.plan", *arguments])
        command.main()
        return capsys.readouterr().out

    return run


def test_the_command_plans_and_writes_nothing(planned: Any, shapes: Path, tmp_path: Path):
    """A folder with no weights, rows that are not there: neither is read."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((shapes / "llama.json").read_text())
    output = planned(
        ["train_sft.py", "--model_name_or_path", str(model), "--dataset_name", "nowhere.jsonl"]
        + ["--max_prompt_length", "40", "--max_completion_length", "10", "--device", "cpu"]
        + ["--batch_size", "8192", "--ranks", "1", "8", "64", "4096"]
    )
    rows = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]] == ["ranks", "1", "8", "64", "4096"]
    (peak,) = [cells for label, *cells in rows if label.strip() == "peak"]
    assert all(float(cell) > 0.05 for cell in peak)  # with Python's own memory
    assert "TFLOP: forward" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert [path.name for path in model.iterdir()] == ["config.json"]


PAIRS = {"max_prompt_length": 40, "max_completion_length": 10, "batch_size": 4}


def test_each_stage_is_planned_as_what_it_is(shapes: Path):
    for flags, stage, completions, tokens in (
        ({"config": SFTConfig}, "SFT", 1, 50),
        ({"config": RewardConfig}, "reward model", 2, 60),
        ({"config": DPOConfig}, "DPO", 2, 60),
        (GRPO | {"num_generations": 8}, "GRPO", 8, 120),
    ):
        page = command.page(run_of(shapes, **PAIRS, **flags), [1, 2])
        assert f"plan of {stage}, prompts of 40 tokens with {completions} x 10" in page
        assert f"a step: 4 rows, {4 * tokens} tokens" in page
        is_scored = flags["config"] is RewardConfig
        name = "GPT2ForSequenceClassification" if is_scored else "GPT2LMHeadModel"
        assert f"trained model: {name}" in page


def test_a_reward_model_has_a_head_for_one_number(shapes: Path):
    run = run_of(shapes, config=RewardConfig, **PAIRS, num_sample_prompts=4)
    assert run.policy.numbers() == NUMBERS + WIDTH
    assert run.policy.vocabulary == VOCABULARY
    assert run.policy.head_weights == 0
    assert sizes(run, 1, "loss")["logits"] == 0
    assert {m.name for m in memory.moments(run)} == {"loss", "backward", "gradients", "export"}
    # Of several micro-batches, the embedding's gradient before it is added to the sum.
    several = run_of(shapes, config=RewardConfig, **PAIRS, micro_batch_tokens=60)
    more = sizes(several, 1, "gradients")["gradients"] - sizes(run, 1, "gradients")["gradients"]
    assert more == 4 * VOCABULARY * WIDTH
    adapters = run_of(shapes, config=RewardConfig, **PAIRS, lora_r=4)
    by_hand = LAYERS * 4 * (2 + 4 + 5 + 5) * WIDTH
    assert adapters.policy.numbers(trained=True) == by_hand + WIDTH


def test_the_command_of_the_page_runs_in_a_fresh_checkout(planned, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    blocks = r"```sh\npython -m experiments.plan ([^`]*--ranks[^`]*)```\n\n```\n([^`]*)```"
    ((arguments, table),) = re.findall(blocks, page)
    output = planned(arguments.replace("\\\n", " ").split())
    assert table in output
    assert "plan of GRPO, prompts of 512 tokens with 8 x 53" in output
    for role in ("trained model", "reference"):
        assert f"{role}: GPT2LMHeadModel, 774.0 M parameters" in output  # as OpenAI's has
    assert "reward model: GPT2ForSequenceClassification" in output


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_is_no_wider_than_the_terminal(planned, shapes, monkeypatch, width, device):
    """Ranks that do not fit have further tables, and none is left out."""
    monkeypatch.setenv("COLUMNS", str(width))
    model, ranks = str(shapes / "gpt2.json"), [str(2**n) for n in range(13)]
    flags = ["--model_name_or_path", model, "--reward_funcs", model, "--batch_size", "4096"]
    flags += ["--max_prompt_length", "40", "--max_completion_length", "10", "--device", device]
    lines = planned(["train_grpo.py", *flags, "--shard_gradients", "--ranks", *ranks]).splitlines()
    assert max(map(len, lines)) <= width
    heads = [line.split("|")[2:-1] for line in lines if line.startswith("| ranks ")]
    shown = [cell.strip() for head in heads for cell in head]
    assert shown == ranks * (3 if device == "cuda" else 2)


@pytest.mark.parametrize("kind", ["policy", "reward model"])
def test_one_folder_may_be_policy_and_reward_model(planned, tmp_path, kind):
    """The one that is not there yet has the shape of the other, and the plan says so."""
    model, of_kind = tmp_path / "model", {"policy": {}, "reward model": {"num_labels": 1}}[kind]
    held = {"policy": "GPT2LMHeadModel", "reward model": "GPT2ForSequenceClassification"}
    fields = tiny.model_config("gpt2", **of_kind).to_dict() | {"architectures": [held[kind]]}
    model.mkdir()
    (model / "config.json").write_text(json.dumps(fields))
    flags = ["--model_name_or_path", str(model), "--reward_funcs", str(model)]
    flags += ["--max_prompt_length", "40", "--max_completion_length", "10"]
    output = " ".join(planned(["train_grpo.py", *flags]).split())
    for other, role in (("policy", "trained model"), ("reward model", "reward model")):
        note = "" if other == kind else f" (of the shape of a {held[kind]})"
        assert f"{role}: {held[other]}{note}, 0.0 M parameters" in output


def test_a_mixture_of_experts_is_refused(shapes: Path, tmp_path: Path):
    fields = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 61}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path / "mixtral.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"has experts \(.*mlp.*whose memory depends on the data"):
        run_of(shapes, model_name_or_path=str(path))
    with pytest.raises(UserError, match="--layout is padded; it must be shared_prefix"):
        run_of(shapes, layout="padded")


def test_bytes_sent_are_worked_out_by_hand():
    model = SimpleNamespace(numbers=lambda ranks=1, trained=False: 10)
    flags = {"output_dir": "unused", "model_name_or_path": "unused", "reward_funcs": ["gold"]}
    config = GRPOConfig(**flags, bf16=True)
    run = workload.Run(config, model, model, (), on_gpu=True, process_bytes=0)
    with mock.patch.object(ladder, "micro_batch", return_value=SimpleNamespace(number=3)):
        # Of each 20 bytes of bfloat16 half is missing on each of two ranks: the policy's 7 times,
        # the reference's 3 times; and half of 40 bytes of float32 gradients, once or 3 times.
        assert ladder.sent_bytes(run.on(2)) == 7 * 10 + 3 * 10 + 20
        assert ladder.sent_bytes(run.on(2).with_flags(shard_gradients=True)) == 100 + 3 * 20
        assert ladder.sent_bytes(run) == 0
