"""Claim: every number on the page of a step is what plain transformers and arithmetic give.

One step of each stage is explained on tiny models, with another model as reference. Its numbers are
computed again, to 1e-5, without anything of `common`; a changed value and a line that is not there
are noticed. About `experiments.explain`.
"""

import ast
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common.errors import UserError
from experiments.explain import __main__ as command

ROOT = Path(__file__).resolve().parents[3]
BETA, RATE, TEMPERATURE, MAX_NORM = 0.3, 1e-3, 0.7, 0.5
CENTERING = {"reward": 0.01, "dpo": 0.0}
IDS = {"slot", "row", "label", "ids", "prompt_ids", "tokens"}
COMMON = f"--dataset_name rows --max_prompt_length 128 --max_grad_norm {MAX_NORM}"
STAGES = {
    "sft": "--model_name_or_path policy --layout padded --micro_batch_size 1",
    "reward": "--model_name_or_path judge --center_rewards_coefficient 0.01",
    "dpo": f"--model_name_or_path policy --ref_model_name_or_path other --beta {BETA}",
    "grpo": f"--model_name_or_path policy --ref_model_name_or_path other --beta {BETA} "
    f"--reward_funcs rewards.py:score --penalize_missing_eos false --temperature {TEMPERATURE} "
    "--rejection_method gumbel --max_completion_length 9 --num_candidates 4 --num_generations 2",
}
REWARDS = "def score(completion_ids, **_): return [sum(ids) % 7 / 4 for ids in completion_ids]\n"
ROWS = [
    {"prompt": f"A {word} in the park.\n\nTL;DR:", "completion": f" a {word}", "chosen": f" {word}"}
    | {"rejected": " my park is sold"}
    for word in ("boss", "friend at the office", "guitar")
]
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>')
Page = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A policy, another one, a reward model and a reward function."""
    folder = tmp_path_factory.mktemp("explained")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    shape = {"is_plain": True, "vocab_size": len(tokenizer), "n_positions": 192}
    policy, other = (tiny.causal_lm("gpt2", seed=seed, **shape) for seed in (0, 1))
    judge = tiny.classifier("gpt2", **shape)
    for name, lm in (("policy", policy), ("other", other), ("judge", judge)):
        lm.config.pad_token_id = tokenizer.pad_token_id
        tiny.save(lm, folder / name, tokenizer)
    (folder / "rewards.py").write_text(REWARDS)
    tiny.write_rows(folder / "rows/train.jsonl", ROWS)
    return folder


@pytest.fixture(scope="module", params=STAGES)
def page(request: pytest.FixtureRequest, folder: Path) -> Page:
    """The page's data, and what computes it again."""
    stage = request.param
    flags = f"{COMMON} {STAGES[stage]} --learning_rate {RATE} --seed 1".split()
    with tiny.working_directory(folder):
        text = command.write(f"train_{stage}.py", flags).read_text()
    assert len(text) < 300_000
    assert "http" not in text.replace("http-equiv", "")
    return data(text)


def data(text: str) -> Page:
    return json.loads(DATA.findall(text)[0])


def score(lm: Any, records: list[Page]) -> Tensor:
    """Log-probs (T,) of all completion tokens, or rewards (B,), by transformers alone."""
    if hasattr(lm, "score"):
        rows = [torch.tensor([record["prompt_ids"] + record["ids"]]) for record in records]
        return torch.cat([lm(input_ids=ids).logits[0] for ids in rows]).double()
    at = TEMPERATURE if "kept" in records[0] else 1.0
    return torch.cat([tiny.plain_logps(lm, r["prompt_ids"], r["ids"], at) for r in records])


def recompute(page: Page, lm: Any, ref: Any) -> dict[str, Any]:
    """All numbers of a page by level and name, from nothing but its ids and its uniform draws."""
    stage, every = page["stage"], page["completions"]
    trained = [record for record in every if record.get("kept", True)]
    sizes = torch.tensor([len(record["ids"]) for record in trained])
    owner = torch.arange(len(trained)).repeat_interleave(sizes)  # (T,)
    num_tokens, num = len(owner), len(trained) if stage in ("sft", "grpo") else len(trained) // 2
    number: dict[str, Any] = {"step denominator": num_tokens if stage == "sft" else num}

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(trained)).double().index_add(0, owner, values)

    scores, wanted = score(lm, trained), torch.ones(len(trained)).double()
    if stage == "sft":
        number["token token_loss"] = -scores
        loss = -scores.sum() / num_tokens
    elif stage == "grpo":
        rewards = torch.tensor([sum(r["ids"]) % 7 / 4 for r in every]).double().view(2, -1)
        draws = torch.tensor([record["draw"] for record in every]).double().view(2, -1)
        mean, std, keys = rewards.mean(1), rewards.std(1), rewards / 0.5 - (-draws.log()).log()
        kept = keys >= keys.topk(2).values[:, 1:]
        wanted = ((rewards - mean[:, None]) / (std[:, None] + 1e-4))[kept]
        refs, ratio = score(ref, trained).detach(), (scores - scores.detach()).exp()
        kl, term = (refs - scores).expm1() - (refs - scores), -ratio * wanted[owner]
        mean_loss = total(term + BETA * kl) / sizes
        loss = mean_loss.mean()
        number |= {"prompt mean": mean, "prompt std": std, "completion reward": rewards}
        number |= {"completion key": keys, "completion kept": kept, "completion draw": draws}
        number |= {"completion advantage": wanted, "completion mean_loss": mean_loss}
        number |= {"token ref_logp": refs, "token ratio": ratio, "token kl": kl}
        number |= {"token policy_term": term, "token token_loss": term + BETA * kl}
        number["token clipped"] = 0 * refs
        number["token sampler_logp"] = score(lm, every)
    else:
        ref_sums = total(score(ref, trained).detach()) if stage == "dpo" else 0 * scores.detach()
        beta, sums = (BETA, total(scores)) if stage == "dpo" else (1.0, scores)
        gaps = (sums - ref_sums)[::2] - (sums - ref_sums)[1::2]
        chance, penalty = (beta * gaps).sigmoid(), (sums[::2] + sums[1::2]) ** 2
        loss = (-chance.log() + CENTERING[stage] * penalty).mean()
        names = ("reward", "difference") if stage == "reward" else ("sum_logp", "logit")
        number |= {
            f"completion {names[0]}": sums,
            f"pair {names[1]}": gaps,
            "pair pair_loss": -chance.log(),
        }
        number |= {"pair probability": chance, "pair gradient_weight": beta * (1 - chance)}
        extra = {"pair penalty": penalty, "pair margin": 0 * gaps}
        number |= extra if stage == "reward" else {"completion sum_ref_logp": ref_sums}
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), MAX_NORM)
    torch.optim.AdamW(lm.parameters(), lr=RATE, weight_decay=0.0).step()
    number |= {"step loss": loss, "step grad_norm": norm, "step learning_rate": RATE}
    number["step clip_factor"] = min(1.0, MAX_NORM / float(norm))
    later = score(lm, trained).detach()
    if stage == "grpo":
        number["token kl_after"] = (refs - later).expm1() - (refs - later)
    if stage in ("reward", "dpo"):
        sums = total(later) if stage == "dpo" else later
        grown = (sums - ref_sums)[::2] - (sums - ref_sums)[1::2]
        number |= {f"pair {names[1]}_after": grown, "pair moved_as_wanted": grown > gaps}
    if stage == "reward":
        return number | {"completion reward_after": later}
    change = later - scores.detach()
    number |= {"token logp": scores, "token logp_after": later, "token change": change}
    number |= {
        "completion completion_logp": total(scores),
        "completion factor": total(change).exp(),
    }
    number["completion completion_logp_after"] = total(later)
    if stage != "dpo":
        number["completion moved_as_wanted"] = total(change) * wanted > 0
    return number


def columns(page: Page) -> dict[str, Tensor]:
    numbers: dict[str, list[float]] = {}
    for level in ("completion", "pair", "prompt", "step"):
        records = [page["step"]] if level == "step" else page[f"{level}s"]
        for record in records:
            tokens = record.get("tokens", {})
            for name, values in tokens.items():
                numbers.setdefault(f"token {name}", []).extend(map(float, values))
            for name in record.keys() - IDS:
                numbers.setdefault(f"{level} {name}", []).append(float(record[name]))
    return {name: torch.tensor(values).double() for name, values in numbers.items()}


def wrong(page: Page, expected: dict[str, Any]) -> list[str]:
    shown = columns(page)
    assert shown.keys() == expected.keys()
    # The exponential of a sum over tokens, each to 1e-5, is off relatively as the sum is.
    longest = max(len(record["ids"]) for record in page["completions"])
    rtol = {"completion factor": 1e-5 * longest}
    targets = {name: torch.as_tensor(x).double().flatten() for name, x in expected.items()}
    for numbers in (shown, targets):  # the root of a penalty is off as two rewards are
        if "pair penalty" in numbers:
            numbers["pair penalty"] = numbers["pair penalty"].sqrt() / 2
    return [
        name
        for name, values in shown.items()
        if not torch.allclose(values, targets[name], rtol=rtol.get(name, 1e-5), atol=1e-5)
    ]


@pytest.fixture(scope="module")
def expected(page: Page, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if page["stage"] == "reward" else AutoModelForCausalLM
    start, ref = ("judge", "judge") if page["stage"] == "reward" else ("policy", "other")
    return recompute(page, *(kind.from_pretrained(folder / name).eval() for name in (start, ref)))


def test_plain_transformers_gives_every_number(page, expected):
    assert wrong(page, expected) == []


def test_a_changed_number_is_noticed(page, expected):
    """Every single one, by a thousandth of its size, or by a thousandth if it is small."""
    records = [*page["completions"], *page["pairs"], *page["prompts"], page["step"]]
    for record in [*records, *(r["tokens"] for r in page["completions"])]:
        for name in record.keys() - IDS - {"tokens"}:
            kept = record[name]
            number = kept[-1] if isinstance(kept, list) else kept
            changed = number + 1e-3 * max(1.0, abs(number))
            record[name] = [*kept[:-1], changed] if isinstance(kept, list) else changed
            assert len(wrong(page, expected)) == 1, name
            record[name] = kept
    assert wrong(page, expected) == []


def test_a_run_without_further_candidates_is_shown_without_rejection_sampling(folder):
    """It has the run's own settings, and lists the few that are not."""
    (folder / "run.yaml").write_text("num_generations: 3\nbatch_size: 1\nwarmup_steps: 7\n")
    words = STAGES["grpo"].partition(" --rejection_method")[0] + " --max_completion_length 9"
    with tiny.working_directory(folder):
        flags = f"--config run.yaml {COMMON} {words} --seed 1".split()
        text = command.write("train_grpo.py", flags).read_text()
    page = data(text)
    assert page["settings"].items() >= {"candidates_per_prompt": 3, "num_generations": 3}.items()
    assert [len(page[level]) for level in ("prompts", "completions")] == [1, 3]
    changed = page["facts"]["changed for the page"]
    assert "warmup_steps 0 (run: 7)" in changed
    assert "batch_size" not in changed
    assert not {"kept", "key", "draw"} & page["quantities"].keys()
    assert "rejection" not in text.lower()


def test_every_number_has_a_formula_and_its_line(page):
    names = {name.partition(" ")[2] for name in columns(page)}
    assert names == page["quantities"].keys()
    for place in [*page["quantities"].values(), *page["boxes"]]:
        assert is_there(place), place
        assert not is_there({**place, "text": place["text"][1:]}), place


def is_there(place: Page) -> bool:
    """Whether a function of the name is in the file and has the line, which has the code."""
    text, name = (ROOT / place["file"]).read_text(), place["function"].rpartition(".")[2]
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    ranges = [slice(f.lineno - 1, f.end_lineno) for f in functions if f.name == name]
    lines = [line.strip() for of_one in ranges for line in text.splitlines()[of_one]]
    return place["text"] in lines and place["code"] in place["text"]


def test_both_layouts_hold_the_tokens_at_their_positions(page):
    """Padded, each completion with its prompt; packed, each prompt once; the stop token marked."""
    trained = [record for record in page["completions"] if record.get("kept", True)]
    prompts = {tuple(record["prompt_ids"]) for record in trained}
    of_prompts = {ids: cells(ids, "p") for ids in prompts}
    of_completions = [cells(record["ids"], "c", len(record["prompt_ids"])) for record in trained]
    packed, padded = (
        sorted(cell for view in page["layouts"][name] for cell in shown(view))
        for name in ("shared_prefix", "padded")
    )
    assert packed == sorted(chain(*of_prompts.values(), *of_completions))
    copies = [of_prompts[tuple(record["prompt_ids"])] for record in trained]
    assert padded == sorted(chain(*copies, *of_completions))
    for view in page["layouts"]["padded"]:
        assert len(view["kinds"]) == view["shape"][0] * view["shape"][1]


def cells(ids: list[int], kind: str, start: int = 0) -> list[tuple[int, int, str]]:
    """Id, position and kind of tokens in a row; id 0 ends a completion."""
    is_stop = [kind == "c" and i == len(ids) - 1 and token == 0 for i, token in enumerate(ids)]
    return [(t, start + i, "s" if is_stop[i] else kind) for i, t in enumerate(ids)]


def shown(view: Page) -> list[tuple[int, int, str]]:
    """The same of a layout, without padding."""
    every = zip(view["ids"], view["positions"], view["kinds"], strict=True)
    return [cell for cell in every if cell[2] != "-"]


MINE = """
import torch

def squared(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, *, beta=0.1):
    return (chosen_logps - rejected_logps - ref_chosen_logps + ref_rejected_logps - 1) ** 2

def plain(logps, advantages, mask, *, power=1.0):
    return torch.where(mask, -logps * advantages, 0.0), {"weight": torch.ones_like(logps)}

def raw(rewards):
    return rewards - rewards.mean(1, keepdim=True)
"""


@pytest.mark.parametrize(
    ("stage", "flags", "name", "left_out"),
    [
        ("dpo", "--loss_type mine.py:squared", "pair_loss", {"probability", "gradient_weight"}),
        ("grpo", "--policy_objective mine.py:plain", "policy_term", {"ratio", "clipped"}),
        ("grpo", "--advantages mine.py:raw", "advantage", {"mean", "std"}),
    ],
)
def test_a_user_s_file_is_shown_without_a_formula(stage, flags, name, left_out, folder):
    (folder / "mine.py").write_text(MINE)
    with tiny.working_directory(folder):
        words = f"{COMMON} {STAGES[stage]} {flags} --seed 1".split()
        page = data(command.write(f"train_{stage}.py", words).read_text())
    quantities, function = page["quantities"], flags.rpartition(":")[2]
    assert {key for key, about in quantities.items() if not about["formula"]} == {name}
    assert quantities[name]["text"].startswith(f"def {function}(")
    assert not left_out & ({*quantities} | {key.partition(" ")[2] for key in columns(page)})
    if stage == "dpo":
        losses = [pair["pair_loss"] for pair in page["pairs"]]
        assert losses == pytest.approx(
            [(pair["logit"] - 1) ** 2 for pair in page["pairs"]], rel=1e-5
        )
    elif name == "policy_term":
        for one in [one for one in page["completions"] if one["kept"]]:
            terms = [-logp * one["advantage"] for logp in one["tokens"]["logp"]]
            assert one["tokens"][name] == pytest.approx(terms, rel=1e-4)
    else:
        rewards = torch.tensor([one["reward"] for one in page["completions"]]).view(2, -1)
        expected = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
        shown = {i: one[name] for i, one in enumerate(page["completions"]) if one["kept"]}
        assert shown == pytest.approx({i: expected[i] for i in shown}, abs=1e-6)


@pytest.mark.parametrize(
    ("stage", "flag"),
    [("dpo", "loss_type ipo"), ("dpo", "loss_weights 2"), ("grpo", "advantages none")],
)
def test_an_objective_without_formulas_is_refused(stage, flag, folder):
    with tiny.working_directory(folder), pytest.raises(UserError) as error:
        command.write(f"train_{stage}.py", f"{COMMON} {STAGES[stage]} --{flag}".split())
    tiny.check_sentence(
        error.value, f"--{flag.partition(' ')[0]} is", "the page has no formulas of others"
    )
