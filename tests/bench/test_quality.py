"""Claim: the comparison of both chains says what was measured.

Targets: a chain's outcomes worked out by hand, the means of a table, our commands as our scripts
read them.
"""

from pathlib import Path

import pytest

from common.config.parser import parse
from experiments.bench import processes, quality
from experiments.stages import config_class


def system(gold: float, kl: float = 0.5) -> dict[str, object]:
    return {"rewards": {"gold": {"mean": gold}}, "kl": {"mean": kl}}


RUNS = {
    "sft": {"minutes": 2.0, "GB": 0.5, "saved": {}},
    "reward": {"minutes": 3.0, "GB": 0.5, "saved": {}},
    "dpo": {"minutes": 1.0, "GB": 0.5, "saved": {"a": 0.4, "b": 0.8}},
    "grpo": {"minutes": 4.0, "GB": 0.5, "saved": {"c": 1.0, "d": 2.0, "e": 3.0}},
}
JUDGED = {
    "x/sft": system(0.7),
    "x/reward": {"accuracy": {"accuracy": 0.8}},
    "x/dpo": system(0.85),
    "x/grpo": system(0.95, 3.0),
    **{"a": system(0.8), "b": system(0.89)},
    **{"c": system(0.7), "d": system(0.9), "e": system(0.93)},
}


def test_outcomes_of_a_chain():
    found = {name: quality.outcomes(name, Path("x"), RUNS, JUDGED) for name in quality.STAGES}
    assert found["sft"] == {"minutes": 2.0, "GB": 0.5, "gold reward": 0.7}
    assert found["reward"] == {"minutes": 3.0, "GB": 0.5, "accuracy, %": 80.0}
    assert found["dpo"] == {"minutes": 1.0, "GB": 0.5, "gold reward": 0.85, "KL, nats": 0.5}
    # SFT, the reward model, and GRPO to its second checkpoint
    assert found["grpo"].pop(quality.UNTIL) == 2.0 + 3.0 + 2.0
    assert found["grpo"] == {"minutes": 4.0, "GB": 0.5, "gold reward": 0.95, "KL, nats": 3.0}


def test_table_has_means_and_differences_by_seed():
    def chain(gold: float, until: float | None) -> dict[str, dict[str, float]]:
        reached = {} if until is None else {quality.UNTIL: until}
        return {stage: {} for stage in quality.STAGES} | {"dpo": {"gold reward": gold, **reached}}

    text = quality.table(
        {
            "seeds": [0, 1, 2],
            "packages": {"trl": "1.16.0"},
            "trl": [chain(0.7, None), chain(0.8, 9), chain(0.9, 7)],
            "ours": [chain(0.9, 5), chain(0.9, 4), chain(0.9, 3)],
        }
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["stage", "", "TRL 1.16.0", "ours", "ours - TRL"]
    # Student's quantile of two degrees of freedom is 4.303
    half = 4.303 * 0.1 / 3**0.5
    interval = f"[{0.8 - half:.3f}, {0.8 + half:.3f}]"
    assert rows[2][:4] == ["dpo", "gold reward", f"0.800 {interval}", "0.900"]
    assert rows[2][4].startswith("+0.100 [")
    assert rows[3][1] == quality.UNTIL
    assert rows[3][2].startswith("8.00 [")
    assert rows[3][2].endswith("(2 of 3 seeds)")
    assert rows[3][4].startswith("-4.50 [") or rows[3][4].startswith("-4.50")
    assert len(rows) == 4


def test_a_seed_is_made_anew_for_other_steps_and_on_another_commit(tmp_path, monkeypatch):
    starts, commit = [], ["a"]
    values = {"sft": {"gold reward": 0.7, "minutes": 1.0}}

    def start(words: list[str], log: Path, *, threads: int) -> None:
        starts.append(words)
        assert not (log.parent / "left").exists()
        log.parent.mkdir(parents=True)
        (log.parent / "left").write_text("of an earlier command")

    monkeypatch.setattr(quality, "FOLDER", tmp_path)
    monkeypatch.setattr(quality, "chain", lambda *_: values)
    monkeypatch.setattr(quality.processes, "run", start)
    monkeypatch.setattr(quality, "git_commit", lambda: commit[0])
    monkeypatch.setattr(quality.metadata, "version", lambda name: "1")
    expected = 0
    for now, flags, is_new in (
        *(("a", ["--max_steps=4"], True), ("a", ["--max_steps=4"], False)),
        *(("a", [], True), ("a", [], False), ("b", [], True)),
        *(("b-dirty", [], True), ("b-dirty", [], True)),
    ):
        commit[0], expected = now, expected + is_new
        monkeypatch.setattr("sys.argv", ["quality", "--seeds=5", *flags])
        quality.main()
        assert len(starts) == expected


@pytest.mark.parametrize("stage", quality.STAGES)
def test_our_commands_are_those_of_the_recipe_on_the_given_rows(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(processes.REPOSITORY)
    folder = tmp_path / "ours"
    for name in ("model", "ours/sft/model", "ours/reward/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / f"{stage}.jsonl").write_text("{}\n")
    script, *flags = quality.command("ours", stage, folder, 3, 0)
    config = parse(config_class(script), flags)
    recipe = parse(
        config_class(script), ["--config", f"{quality.RECIPES}/{stage}.yaml", "--seed", "3"]
    )
    assert config.dataset_name == str(tmp_path / f"{stage}.jsonl")
    assert config.model_name_or_path == str(
        tmp_path / ("model" if stage == "sft" else "ours/sft/model")
    )
    for name in ("batch_size", "learning_rate", "max_steps", "warmup_steps", "seed"):
        assert getattr(config, name) == getattr(recipe, name)
    _, _, own, *trl_flags = quality.command("trl", stage, folder, 3, 5)
    assert own == stage
    assert "--max_steps=5" in trl_flags
