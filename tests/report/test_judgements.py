"""Claim: judges of two completions are told nothing of whose they are, and all must answer.

Targets: the lines of the exported file, verdicts given by hand.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny

from common.data import Example
from common.errors import UserError
from common.evaluation import completions, judges
from common.evaluation.completions import REFERENCE, Answers, Generation, Verdict
from common.flags.parser import parse
from common.report import judgements
from common.report.judgements import JudgementsConfig
from common.rewards.functions import load_from_file
from evaluate import EvaluateConfig

NUM_ROWS = 40
ANSWERS = [
    Answers(
        number,
        f"prompt {number}",
        Generation(f" own {number}", 3, True) if number % 4 else None,
        {
            "sft": Generation(f" sft {number}", 3 + number % 3, True),
            "dpo": Generation(f" dpo {number}", 4 + number % 5, True, {"gold": 0.5}),
        },
    )
    for number in range(NUM_ROWS)
]
EXAMPLES = [Example(row.id, row.prompt, [1], [], {"bonus": row.id}) for row in ANSWERS]


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    completions.write(ANSWERS, tmp_path)
    results = {"dataset": "mine", "num_pairs": 1, "win_rates": []}
    accuracy = {"accuracy": 1.0, "low": 0.2, "high": 1.0, "num_pairs": 1, "num_ties": 0}
    system = {"name": "dpo", "kind": "policy", "path": "runs/dpo/model", "accuracy": accuracy}
    (tmp_path / "results.json").write_text(json.dumps({**results, "systems": [system]}))
    return tmp_path


def run(folder: Path, *flags: str) -> None:
    judgements.main(parse(JudgementsConfig, ["--output_dir", str(folder), *flags]))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_verdicts(folder: Path, verdicts: list[Any]) -> list[str]:
    file = folder / "verdicts.jsonl"
    file.write_text("".join(json.dumps(verdict) + "\n" for verdict in verdicts))
    return ["--verdicts", str(file), "--judge", "anna"]


# ---- files ---------------------------------------------------------------------------------------


def test_an_export_names_no_system_and_favours_none(evaluation):
    run(evaluation)
    lines, keys = read(evaluation / "comparisons.jsonl"), read(evaluation / "comparisons_key.jsonl")
    assert [line["id"] for line in lines] == [key["id"] for key in keys]
    assert all(set(line) == {"id", "prompt", "first", "second"} for line in lines)
    assert len({line["id"] for line in lines}) == len(lines) == NUM_ROWS + 2 * 30
    for line, key in zip(lines, keys, strict=True):
        assert line["prompt"] == f"prompt {key['row']}"
        for side in ("first", "second"):
            word = "own" if key[side] == REFERENCE else key[side]
            assert line[side] == f" {word} {key['row']}"
    orders = Counter((key["first"], key["second"]) for key in keys)
    for a, b in (("sft", "dpo"), ("dpo", REFERENCE), ("sft", REFERENCE)):
        assert min(orders[a, b], orders[b, a]) >= 8  # of 30 or 40 fair draws
    assert [key["row"] for key in keys] != sorted(key["row"] for key in keys)


def test_the_seed_decides_the_order(tmp_path):
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        completions.write(ANSWERS, tmp_path / name)
        run(tmp_path / name, "--seed", str(seed), "--systems", "dpo", "sft", "--num_prompts", "9")
        texts.append((tmp_path / name / "comparisons.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].count("\n") == 9


def test_verdicts_come_back_as_win_rates(evaluation, capsys):
    """Anna prefers dpo, but for prompts 0 to 9, which tie, and 10 to 14, which sft wins."""
    run(evaluation, "--systems", "sft", "dpo")
    verdicts = []
    for key in read(evaluation / "comparisons_key.jsonl"):
        winner = "sft" if key["row"] < 15 else "dpo"
        side = "tie" if key["row"] < 10 else "first" if key["first"] == winner else "second"
        verdicts.append({"id": key["id"], "winner": side})
    flags = write_verdicts(evaluation, verdicts)
    for _ in range(2):  # again replaces
        run(evaluation, *flags)
        (rate, *_), rows = (
            json.loads((evaluation / "results.json").read_text())["win_rates"],
            read(evaluation / "completions.jsonl"),
        )
        assert (rate["a"], rate["b"], rate["judge"]) == ("dpo", "sft", "anna")
        assert [rate[f"num_{k}"] for k in ("wins", "ties", "losses", "not_judged")] == [
            25,
            10,
            5,
            0,
        ]
        assert rate["win_rate"] == pytest.approx(30 / 40)
        assert all(len(row["verdicts"]) == 1 for row in rows)
    assert "dpo against sft" in capsys.readouterr().out
    for file in ("report.md", "report.html"):
        assert "anna" in (evaluation / file).read_text()


BAD_VERDICTS = {
    "unknown": (lambda v: [*v, {"id": "nobody", "winner": "tie"}], "line 7: `id` is 'nobody'"),
    "doubled": (lambda v: [*v, v[0]], "line 7: .* each once"),
    "missing": (lambda v: v[2:], "no verdict on 2 of 6 comparisons"),
    "neither": (lambda v: [{**v[0], "winner": "dpo"}, *v[1:]], "line 1: .* `winner` 'dpo'"),
    "number": (
        lambda v: [{**v[0], "winner": 1}, *v[1:]],
        "`winner` '1'; .* winner first, second, tie",
    ),
    "list": (lambda v: [{**v[0], "id": ["x"]}, *v[1:]], "id of a comparison"),
    "no_winner": (lambda v: [{"id": v[0]["id"]}, *v[1:]], "line 1: .* `winner` 'None'"),
    "no_object": (lambda v: [3, *v], "line 1: `id` is 'None'"),
    "none": (lambda v: [], "no verdict on 6 of 6"),
}


@pytest.mark.parametrize("name", BAD_VERDICTS)
def test_verdicts_that_do_not_fit_are_refused_and_change_nothing(name, evaluation):
    run(evaluation, "--systems", "sft", "dpo", "--num_prompts", "6")
    keys = read(evaluation / "comparisons_key.jsonl")
    spoil, message = BAD_VERDICTS[name]
    flags = write_verdicts(evaluation, spoil([{"id": k["id"], "winner": "tie"} for k in keys]))
    before = [(evaluation / f).read_bytes() for f in ("results.json", "completions.jsonl")]
    with pytest.raises(UserError, match=message) as caught:
        run(evaluation, *flags)
    assert len(str(caught.value).split(". ")) == 1
    after = [(evaluation / f).read_bytes() for f in ("results.json", "completions.jsonl")]
    assert after == before


def test_verdicts_on_other_texts_are_refused(evaluation):
    run(evaluation)
    keys = read(evaluation / "comparisons_key.jsonl")
    flags = write_verdicts(evaluation, [{"id": k["id"], "winner": "first"} for k in keys])
    other = [*ANSWERS[:-1], Answers(39, "prompt 39", None, {**ANSWERS[0].systems})]
    completions.write(other, evaluation)
    with pytest.raises(UserError, match="has changed since comparison"):
        run(evaluation, *flags)


def test_what_cannot_be_exported_or_imported_is_refused_in_a_sentence(evaluation, tmp_path):
    flags = write_verdicts(evaluation, [])
    with pytest.raises(UserError, match="export comparisons before"):
        run(evaluation, *flags)
    with pytest.raises(UserError, match="two of sft, dpo, reference completion"):
        run(evaluation, "--systems", "ppo")
    with pytest.raises(UserError, match="two of sft, dpo"):
        run(evaluation, "--systems", "dpo")
    with pytest.raises(UserError, match="give both to import"):
        run(evaluation, "--judge", "anna")
    run(evaluation)
    with pytest.raises(UserError, match="move it away"):
        run(evaluation)
    with pytest.raises(UserError, match="a reward's name"):
        run(evaluation, *flags[:-1], "gold")
    with pytest.raises(UserError, match="is no file"):
        run(evaluation, "--verdicts", "nowhere.jsonl", "--judge", "anna")
    (evaluation / "verdicts.jsonl").write_text("{\n{}\n")
    with pytest.raises(UserError, match="line 1: not JSON"):
        run(evaluation, *flags)
    with pytest.raises(UserError, match="run evaluate.py"):
        run(tmp_path / "nothing")


def test_the_command_refuses_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["judgements.py", "--output_dir", "nowhere"])
    with pytest.raises(SystemExit) as caught:
        judgements.command()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: nowhere/completions.jsonl is not there")
    assert said.count("\n") == 1


# ---- Python functions ----------------------------------------------------------------------------


def asked(judge: Any, seed: int = 0) -> list[Answers]:
    with tiny.process_group():
        return judges.with_verdicts(ANSWERS, {"j": judge}, EXAMPLES, seed)


def test_a_judge_sees_both_orders_and_its_verdicts_are_turned_back():
    seen: list[tuple[str, str]] = []

    def prefers_dpo(prompts, completions_a, completions_b, bonus):
        assert [prompts[i] for i in (0, -1)] == [f"prompt {bonus[i]}" for i in (0, -1)]
        pairs = list(zip(completions_a, completions_b, strict=True))
        seen.extend((a.split()[0], b.split()[0]) for a, b in pairs)
        return [0.9 * ("dpo" in a) + 0.1 * ("dpo" in b) for a, b in pairs]

    found = asked(prefers_dpo)
    for row in found:
        own = {(v.a, v.b): v for v in row.verdicts}
        assert own["dpo", "sft"] == Verdict("dpo", "sft", "j", pytest.approx(0.9))
        assert len(own) == (3 if row.reference else 1)
        if row.reference:
            assert own[REFERENCE, "dpo"].a_wins == pytest.approx(0.1)
    orders = Counter(seen)
    assert set(orders) == {(a, b) for a in ("sft", "dpo", "own") for b in ("sft", "dpo", "own")} - {
        (a, a) for a in ("sft", "dpo", "own")
    }
    assert min(orders.values()) >= 7


def test_a_judge_that_prefers_what_comes_first_favours_no_system():
    found = asked(lambda prompts, completions_a, completions_b: [1] * len(prompts))
    wins = [v.a_wins for row in found for v in row.verdicts if (v.a, v.b) == ("dpo", "sft")]
    assert 10 <= sum(wins) <= 30  # of 40 fair draws


def test_a_judge_may_leave_a_prompt_out():
    def judge(prompts, completions_a, completions_b, **columns):
        return [None if k < 10 else 1 for k in columns["bonus"]]

    found = asked(judge)
    assert [len(row.verdicts) > 0 for row in found] == [row.id >= 10 for row in ANSWERS]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "returned 1 verdicts for 40 rows"),
        (None, "returned no list of verdicts"),
        ([2] * 40, "returned 2 for prompt 0"),
        ([float("nan")] * 40, "returned nan for prompt 0"),
        (["first"] * 40, "returned 'first' for prompt 0"),
    ],
)
def test_what_is_no_verdict_is_refused(answer, message):
    with pytest.raises(UserError, match=message):
        asked(lambda prompts: answer)


def test_a_judge_that_raises_is_named():
    def judge(prompts):
        raise KeyError("model")

    with pytest.raises(UserError, match="'j' raised KeyError on row 0 of the batch: there is no"):
        asked(judge)


def test_judges_are_found_by_name(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("def judge(prompts):\n    return [0.5] * len(prompts)\n")
    assert load_from_file(f"{file}:judge", "--judge_funcs")(["x"]) == [0.5]
    with pytest.raises(UserError, match="--judge_funcs has .* no function of that name"):
        load_from_file(f"{file}:other", "--judge_funcs")
    with pytest.raises(UserError, match="--judge_funcs has 'gold'; add the function"):
        load_from_file("gold", "--judge_funcs")
    with pytest.raises(UserError, match="--judge_funcs has .* each must be given once"):
        EvaluateConfig(output_dir="o", policies=["p"], judge_funcs=[f"{file}:judge"] * 2)
