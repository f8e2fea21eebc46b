"""Claim: every recipe parses with nothing ignored, and its chain of stages runs as it is written.

The stages run in order in a working directory where small stand-ins bear the names that the recipe
uses: `gpt2` is a random model of two layers, `trl-lib/tldr` a folder of twelve rows. So the names,
the columns and the folders that one stage hands to the next are the recipe's own; only the number
of steps and the batch sizes are smaller. The chain of `demo` runs in `test_replicate.py`. About
`experiments.runs.stages`, `common.config.recipes` and `experiments.sample_pairs`.
"""

import gzip
import importlib
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_origin, get_type_hints

import datasets
import pytest
import tiny
import torch
import yaml
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from common.config.parser import as_list, parse
from common.record.jsonl import read_jsonl
from common.text import sources, synthetic
from common.text.reading import load_rows
from experiments.runs.stages import ROOT, config_class

RECIPES = ROOT / "assets" / "recipes"
SCRIPTS = {stage: f"train_{stage}" for stage in ("sft", "reward", "dpo", "grpo")}
SCRIPTS |= {"pairs": "experiments.sample_pairs", "evaluate": "evaluate"}
CHAINS = ("tldr-gpt2", "tldr-gpt2-large", "tldr-pythia-1b", "scitldr")
WHOLE = ("sft", "reward", "dpo", "grpo", "evaluate")
# Whose rewards need no training
SHORT_CHAINS = {
    "count": ("sft", "grpo"),
    "distillation": ("grpo",),
    "gsm8k": ("sft", "grpo", "evaluate"),
    "one-sentence": ("grpo", "evaluate"),
}
SENTIMENT = ("sft", "pairs", "dpo", "grpo", "evaluate")
FILES = sorted(path for path in RECIPES.glob("*/*.yaml") if path.stem in SCRIPTS)
NUM_PAIRS, NUM_CNN_DM = 5, 2  # held out
TRAINING = {"max_steps": 2, "batch_size": 2, "micro_batch_size": 2}
SMALLER = {
    "sft": TRAINING,
    "reward": {**TRAINING, "num_sft_rows": 4},
    "pairs": {"batch_size": 2, "num_train_rows": 4, "num_eval_rows": 4},
    "dpo": TRAINING,
    "grpo": {"max_steps": 2, "batch_size": 1},
    "evaluate": {"num_prompts": 3, "micro_batch_size": 2},
}


def test_every_chain_has_its_stages():
    stages = {
        **dict.fromkeys((*CHAINS, "demo", "origin"), WHOLE),
        **SHORT_CHAINS,
        "sentiment": SENTIMENT,
        "film": ("sft", "reward", "evaluate"),
        "iterative": ("pairs",),
    }
    recipes = {path.relative_to(RECIPES).as_posix() for path in FILES}
    assert recipes == {f"{chain}/{stage}.yaml" for chain in stages for stage in stages[chain]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_key_of_a_recipe_reaches_the_config(path):
    cls = config_class(SCRIPTS[path.stem])
    config, recipe = parse(cls, ["--config", str(path)]), yaml.safe_load(path.read_text())
    types = get_type_hints(cls)
    keys = [line.split(":")[0] for line in path.read_text().splitlines() if line[:1].isalpha()]
    assert keys == list(recipe), "YAML keeps the last of two equal keys in silence"
    for key, value in recipe.items():
        parsed = getattr(config, key)
        assert as_list(parsed) == as_list(value), key
        assert isinstance(parsed, bool) == isinstance(value, bool), key  # True == 1
        assert type(parsed) is (get_origin(types[key]) or types[key]), key
    folder = "evaluation" if path.stem == "evaluate" else path.stem
    assert config.output_dir == f"output/{path.parent.name}/{folder}"


@pytest.fixture(scope="module")
def working_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a stand-in for everything that a recipe names; one process group for all."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "assets").symlink_to(ROOT / "assets", target_is_directory=True)
    smol = "HuggingFaceTB/SmolLM2-135M"
    names = ("gpt2", "gpt2-large", "EleutherAI/pythia-1b-deduped", smol, f"{smol}-Instruct")
    for name in (*names, "output/demo/sft/model", "output/demo/grpo/model"):
        save_model(folder / name)
    make_gsm8k(folder)
    make_one_sentence(folder)
    summaries, pairs = synthetic.make_rows("sft", "train", 12), []
    for row in synthetic.make_rows("preference", "train", 12):
        pairs.append({name: row[name] for name in ("prompt", "chosen", "rejected")})
    articles = [
        {
            "prompt": f"TITLE: {i}\n\n{'An article. ' * 300}\n\nTL;DR:",
            "chosen": " a",
            "rejected": " b",
        }
        for i in range(NUM_CNN_DM)
    ]
    for name in ("trl-lib/tldr", "data/scitldr"):
        rows = [{k: r[k] for k in ("prompt", "completion")} for r in summaries]
        tiny.write_rows(folder / name / "train.jsonl", rows)
        tiny.write_rows(folder / name / "validation.jsonl", rows[:4])
    for name in ("trl-lib/tldr-preference", "data/summeval_preference"):
        tiny.write_rows(folder / name / "train.jsonl", pairs)
        held_out = [*pairs[: NUM_PAIRS - NUM_CNN_DM], *articles]
        tiny.write_rows(folder / name / "validation.jsonl", held_out)
    with tiny.working_directory(folder):
        yield folder


QUESTIONS = [
    {
        "question": f"Ann has {n} apples and gets {n} more. How many are there?",
        "answer": f"There are {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n} apples.\n#### {2 * n}",
    }
    for n in range(1, 7)
]


def make_rows(recipe: str, folder: Path, *arguments: str) -> None:
    """Run a recipe's script in a folder, as a command does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["make_rows.py", *arguments])
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sources, "is_reachable", lambda: False)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        runpy.run_path(str(RECIPES / recipe / "make_rows.py"), run_name="__main__")


def make_gsm8k(folder: Path) -> None:
    """The recipe's own script on files like the data set's."""
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        text = "\n".join(map(json.dumps, QUESTIONS)).encode()
        (folder / "gsm8k" / f"{split}.jsonl.gz").write_bytes(gzip.compress(text))
    make_rows("gsm8k", folder, "--source", "gsm8k")


def make_one_sentence(folder: Path) -> None:
    """The recipe's own script on rows as those of the recipe `scitldr`."""
    abstract = "We train it. It is fast. " + "This one is too long for the text. " * 6
    row = {"prompt": f"TITLE: T\n\nPOST: {abstract.strip()}\n\nTL;DR:", "completion": " Own."}
    for split in ("train", "validation"):
        tiny.write_rows(folder / "abstracts" / f"{split}.jsonl", [row] * 6)
    make_rows("one-sentence", folder, "--source", "abstracts")


def test_scitldr_s_script_makes_the_rows_of_its_recipes(tmp_path):
    """Abstracts with the author's summary; pairs half a point apart, the better one chosen."""
    paper = {"title": "T", "source": ["One.", "Two."], "target": ["Own.", "Another's."]}
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(paper) + "\n")
    ratings = dict.fromkeys(("coherence", "consistency", "fluency"), [1.0, 3.0, 2.0])
    article = {"text": "News.", "machine_summaries": ["a", "b", "c"], **ratings}
    articles = [article | {"relevance": [1.0, 2.0, 4.0]}] * 5  # overall: 1, 2.75, 2.5
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "test.jsonl").write_text("\n".join(map(json.dumps, articles)))
    make_rows("scitldr", tmp_path, "--source", ".", "--pairs_source", "pairs")
    (row,) = load_rows(tiny.train_config(), str(tmp_path / "data/scitldr"), "validation", "sft")
    assert row == {"prompt": "TITLE: T\n\nPOST: One. Two.\n\nTL;DR:", "completion": " Own."}
    pairs = load_rows(
        tiny.train_config(), str(tmp_path / "data/summeval_preference"), "validation", "preference"
    )
    triples = {(row["chosen"], row["rejected"], row["margin"]) for row in pairs}
    assert triples == {(" b", " a", 1.75), (" c", " a", 1.5)}
    assert len(read_jsonl(tmp_path / "data/summeval_preference/train.jsonl")) == 4 * 2


def save_model(folder: Path) -> None:
    """Two layers of width 32 that stop after some ten tokens."""
    tokenizer = synthetic.train_tokenizer()
    if folder.name.endswith("Instruct"):
        tokenizer.chat_template = tiny.TURNS
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": len(tokenizer)}
    lm = GPT2LMHeadModel(GPT2Config(**shape, eos_token_id=eos, bos_token_id=eos))
    with torch.no_grad():  # logits are w . (n + b): the bias b makes one token likely everywhere
        direction = lm.lm_head.weight[eos]
        lm.transformer.ln_f.bias += (
            math.log(len(tokenizer) / 10) * direction / direction.square().sum()
        )
    tiny.save(lm, folder, tokenizer)


def run_stage(chain: str, stage: str, **flags: int) -> None:
    arguments = [f"--{name}={value}" for name, value in (SMALLER[stage] | flags).items()]
    recipe = str(RECIPES / chain / f"{stage}.yaml")
    config = parse(config_class(SCRIPTS[stage]), ["--config", recipe, *arguments])
    importlib.import_module(SCRIPTS[stage]).main(config)


FEW_ROWS = {"num_train_rows": 6, "num_eval_rows": 6}
FEW_ROLLOUTS = {"num_generations": 4, "generation_batch_size": 4, **FEW_ROWS}


@pytest.mark.usefixtures("without_pictures", "few_resamples")
@pytest.mark.parametrize("chain", CHAINS)
def test_two_steps_of_every_stage_run(chain, working_directory):
    for stage in WHOLE:
        run_stage(chain, stage)
    for stage in ("sft", "reward", "dpo", "grpo"):
        records = read_jsonl(working_directory / f"output/{chain}/{stage}/metrics.jsonl")
        assert records[-1]["step"] == 2
        assert all(math.isfinite(r["loss"]) for r in records if "loss" in r)
        assert any("loss" in r for r in records)
        assert (working_directory / f"output/{chain}/{stage}/model/model.safetensors").is_file()
    check_results(working_directory / "output" / chain / "evaluation", chain)


@pytest.mark.usefixtures("without_pictures", "few_resamples")
@pytest.mark.parametrize("chain", SHORT_CHAINS)
def test_two_steps_of_a_chain_with_rewards_that_are_functions(chain, working_directory):
    flags = {"sft": FEW_ROWS, "grpo": FEW_ROLLOUTS, "evaluate": {}}
    for stage in SHORT_CHAINS[chain]:
        run_stage(chain, stage, **flags[stage])
    folder = working_directory / "output" / chain
    records = read_jsonl(folder / "grpo" / "metrics.jsonl")
    assert records[-1]["step"] == 2
    rewards = {name for record in records for name in record if name.startswith("reward/")}
    recipe = yaml.safe_load((RECIPES / chain / "grpo.yaml").read_text())
    functions = {name.split("reward.py:")[-1] for name in recipe["reward_funcs"]}
    assert rewards == {f"reward/{name}" for name in functions}
    if "evaluate" in SHORT_CHAINS[chain]:
        results = json.loads((folder / "evaluation" / "results.json").read_text())
        names = [Path(recipe["model_name_or_path"]).name, *SHORT_CHAINS[chain][:-1]]
        assert [system["name"] for system in results["systems"]] == names
        for system in results["systems"]:
            (judge,) = system["rewards"]
            assert judge in functions


def test_one_sentence_passes_if_it_is_short_and_about_the_text(working_directory):
    file = str(working_directory / "data" / "one-sentence" / "train.jsonl")
    row = load_rows(tiny.train_config(), file, "train", "sft")[0]
    long = "This one is too long for the text."
    assert row["text"] == "T\n\n" + " ".join(["We train it. It is fast.", *[long] * 4])
    assert row["prompt"][-1]["content"].endswith(f" 8 to 16 words:\n\n{row['text']}")
    (name,) = yaml.safe_load((RECIPES / "one-sentence" / "grpo.yaml").read_text())["reward_funcs"]
    judge = tiny.reward_functions([name], [1.0])
    text = "Faster training\n\nWe propose networks which learn to train other networks quickly."
    for completion, passes in (
        ("Networks that propose other networks are trained very quickly here.", 1),
        ("networks that propose other networks are trained very quickly here.", 0),  # its beginning
        ("Networks that propose other networks are trained very quickly here", 0),  # its end
        ("We train networks. Networks that propose networks train very quickly.", 0),  # two
        ("Networks propose other networks quickly.", 0),  # too short
        (f"Networks {'on ' * 14}propose training.", 0),  # 17 words
        (f"Networks {'on ' * 13}propose training.", 1),
        ("We propose networks which learn to train other networks quickly.", 0),  # a copy
        ("Networks that propose networks are trained by networks very quickly.", 0),  # a stutter
        ("Networks that propose elephants are trained by giraffes in gardens.", 0),  # 3 of 6
        ("We do not do as it is in the one.", 0),  # says nothing
    ):
        answer = [{"role": "assistant", "content": completion}]
        scores = judge([row["prompt"]], [answer], [[1]], {"text": [text]}).total
        assert scores.tolist() == [passes], completion


CLASSIFIER = "siebert/sentiment-roberta-large-english"
GOLD = "assets/recipes/sentiment/gold.py"


@pytest.mark.usefixtures("without_pictures", "few_resamples")
def test_controlled_sentiment_from_reviews_to_the_judgement(working_directory):
    """The paper's chain: reviews, SFT, pairs that a classifier labels, DPO, and GRPO on it."""
    save_classifier(working_directory / CLASSIFIER)
    make_imdb(working_directory)
    for stage in SENTIMENT:
        flags = FEW_ROLLOUTS if stage == "grpo" else {}
        run_stage("sentiment", stage, **flags | {"num_eval_rows": 4})
    folder = working_directory / "output" / "sentiment"
    assert sorted(path.name for path in (folder / "pairs").iterdir()) == [
        "config.yaml",
        "environment.json",
        "train.jsonl",
        "validation.jsonl",
    ]
    for split in ("train", "validation"):
        pairs = load_rows(tiny.train_config(), str(folder / "pairs"), split, "preference")
        assert 0 < len(pairs) <= 4 * 6, "of four samples of four prompts, but for equal rewards"
        assert all(row["chosen_reward"] > row["rejected_reward"] for row in pairs)
        gold = tiny.reward_functions([f"{GOLD}:{CLASSIFIER}"], [1.0])
        texts = [[row[name] for row in pairs] for name in ("chosen", "rejected")]
        for completions, name in zip(texts, ("chosen_reward", "rejected_reward"), strict=True):
            prompts = [row["prompt"] for row in pairs]
            scores = gold(prompts, completions, [[1]] * len(pairs), {}).total
            target = torch.tensor([row[name] for row in pairs])
            torch.testing.assert_close(scores, target, rtol=0, atol=1e-3)
    results = json.loads((folder / "evaluation" / "results.json").read_text())
    assert {system["name"] for system in results["systems"]} == {"sft", "dpo", "grpo"}
    for system in results["systems"]:
        (reward,) = system["rewards"].values()
        assert 0 < reward["mean"] < 1


def make_imdb(folder: Path) -> None:
    """The recipe's own script on an archive of a few reviews."""
    for split, sentiment in product(("train", "test"), ("pos", "neg")):
        (folder / "aclImdb" / split / sentiment).mkdir(parents=True)
        for n in range(6):
            text = f"A {sentiment} film,<br /><br />number {n} of the {split} ones, and short."
            (folder / "aclImdb" / split / sentiment / f"{n}_1.txt").write_text(text)
    script = RECIPES / "sentiment" / "make_rows.py"
    command = [sys.executable, str(script), "--source", "aclImdb", "--tokenizer", "no/model"]
    offline = {"HF_HUB_OFFLINE": "1", "PATH": ""}
    gone = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=offline, check=False
    )
    assert gone.returncode == 1
    assert gone.stderr.startswith("error: ")
    assert gone.stderr.count("\n") == 1
    assert "local copies are given by --source FOLDER --tokenizer FOLDER." in gone.stderr
    make_rows("sentiment", folder, "--source", "aclImdb", "--tokenizer", "gpt2-large")
    rows = load_rows(tiny.train_config(), str(folder / "data" / "imdb"), "train", "sft")
    assert len(rows) == 12
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2-large")
    for row in rows:
        assert "film, number" in row["prompt"] + row["completion"]
        assert 2 <= len(tokenizer(row["prompt"])["input_ids"]) <= 8


def save_classifier(folder: Path) -> None:
    """A random encoder with the labels and the tokenizer that a classifier of sentiment has."""
    tokenizer = synthetic.train_tokenizer()
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"intermediate_size": 32, "vocab_size": len(tokenizer), "initializer_range": 0.3}
    labels = {
        "id2label": {0: "NEGATIVE", 1: "POSITIVE"},
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
    }
    config = BertConfig(**shape, **labels, num_labels=2, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    tiny.save(BertForSequenceClassification(config), folder, tokenizer)


def test_rows_of_gsm8k_are_conversations_with_a_final_answer(working_directory):
    file = str(working_directory / "data" / "gsm8k" / "train.jsonl")
    rows = load_rows(tiny.train_config(), file, "train", "sft")
    assert [row["prompt"][-1]["content"] for row in rows] == [q["question"] for q in QUESTIONS]
    (answer,) = rows[2]["completion"]
    assert answer == {"role": "assistant", "content": "There are 3 + 3 = 6 apples.\n#### 6"}
    recipe = yaml.safe_load((RECIPES / "gsm8k" / "grpo.yaml").read_text())
    rewards = tiny.reward_functions(recipe["reward_funcs"], recipe["reward_weights"])
    completions = [row["completion"] for row in rows]
    columns = {"answer": [row["answer"] for row in rows[:-1]] + ["#### 0"]}
    scores = rewards([row["prompt"] for row in rows], completions, [[1]] * len(rows), columns)
    torch.testing.assert_close(scores.total, torch.tensor([1.1] * (len(rows) - 1) + [0.1]))


def test_policies_are_evaluated_without_any_judge(working_directory):
    """Length and stop rate need no reward; a policy alone is not its own reference: no KL."""
    save_model(working_directory / "alone" / "model")
    flags = ["--output_dir=judged_by_none", "--num_prompts=3", "--num_eval_rows=4"]
    flags += ["--max_prompt_length=128", "--max_completion_length=48"]
    config = parse(config_class("evaluate"), [*flags, "--policies", "alone/model"])
    importlib.import_module("evaluate").main(config)
    (system,) = json.loads(Path("judged_by_none/results.json").read_text())["systems"]
    assert (system["name"], system["kl"]) == ("alone", None)
    assert system["scored_by"] == "logp"
    assert system["length"] > 0
    assert not system["rewards"]
    assert Path("judged_by_none/report.md").is_file()


def check_results(folder: Path, chain: str) -> None:
    results = json.loads((folder / "results.json").read_text())
    systems = {system["name"]: system for system in results["systems"]}
    base = {"SmolLM2-135M-Instruct"} if chain == "scitldr" else set()
    assert set(systems) == {"sft", "dpo", "grpo", "reward"} | base
    assert results["num_pairs"] == NUM_PAIRS
    by_source = {"tldr": NUM_PAIRS - NUM_CNN_DM, "cnn_dm": NUM_CNN_DM}
    for system in results["comparison"]["systems"]:
        num_pairs = {
            n: of_source["num_pairs"] for n, of_source in system["accuracy_by"]["source"].items()
        }
        assert num_pairs == by_source
    assert (folder / "report.md").is_file()
