r"""One real optimiser step, number by number, as one page.

    python -m experiments.explain train_grpo.py --config assets/recipes/demo/grpo.yaml \
        --output output/explain/grpo.html

The script's own `main` runs for one step on two prompts or rows; what its functions are called with
and return is what the page shows. What follows the script are its own flags, which may also name
another model and other rows. The settings are those of the run with these flags but for a few that
keep the page small, which it lists. `--seed` picks the two rows among the first `num_train_rows`.
Other objectives than the four papers' own are refused: the page has no formulas for them. Your own
file is shown: what it computes has its line of code in the place of a formula.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name

from common import distributed
from common.config.parser import parse
from common.record.environment import git_commit
from common.record.terminal import run_command
from experiments.explain.numbers import explain
from experiments.explain.page import formulas, page, refuse_others, settings_of, with_places
from experiments.explain.trace import trace_step
from experiments.runs.stages import config_class

SCRIPTS = ("train_sft.py", "train_reward.py", "train_dpo.py", "train_grpo.py")
# The most that a recipe may have (0: all rows); flags of the command line come after them
SMALL = {"batch_size": 2, "warmup_steps": 0, "num_train_rows": 64, "num_sample_prompts": 0}
# One update, no evaluation, and nothing that is kept.
FORCED = "--dataset_test_split= --resume_from_checkpoint none --report_to none"
FORCED_OF_STAGE = {"grpo": "--num_iterations 1 --num_minibatches 1 --eval_pairs_dataset_name="}


def main() -> None:
    """Run the step and write the page."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=text, allow_abbrev=False, prog="experiments.explain"
    )
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--output", help="the page (default: output/explain/STAGE.html)")
    args, flags = parser.parse_known_args()
    output = write(args.script, flags, args.output)
    print(f"{output}: {output.stat().st_size / 1000:.0f} kB")


def write(script: str, flags: list[str], output: str | None = None) -> Path:
    """Write the page of a script's first step with these flags; returns the file."""
    stage = script.removeprefix("train_").removesuffix(".py")
    forced = f"{FORCED} {FORCED_OF_STAGE.get(stage, '')}".split()
    with tempfile.TemporaryDirectory() as folder:
        run, output_dir = config_class(script), ["--output_dir", folder]
        asked = parse(run, [*flags, *output_dir])
        small = [f"--{k}={most}" for k, most in SMALL.items() if not 0 < getattr(asked, k) <= most]
        config = parse(run, [*small, *flags, *forced, *output_dir])
        texts, yours = formulas(stage, config)
        refuse_others(config, texts, yours)
        functions = ["common.model.load.load_vocabulary", *texts["also"]]
        functions += [box["function"] for box in texts["flow"]]
        distributed.start()
        trace = trace_step(resolve_name(f"train_{stage}.main"), config, functions)
    content = with_places(explain(trace, config, stage, yours), trace, texts)
    settings = settings_of(config, texts["settings"])
    if "kept" not in content["quantities"]:
        settings = {k: v for k, v in settings.items() if not k.startswith("rejection_")}
    commit, _, changed = (git_commit() or "unknown").partition("-")
    content["facts"] = {
        "command": " ".join(["python -m experiments.explain", script, *flags]),
        "model": config.model_name_or_path,
        "seed": str(config.seed),
        "commit": commit[:10] + (", with changes" if changed else ""),
        "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
        "changed for the page": ", ".join(
            f"{name} {vars(config)[name]!r} (run: {value!r})"
            for name, value in asdict(asked).items()
            if vars(config)[name] != value
        ),
    }
    content |= {name: texts[name] for name in ("title", "objective")}
    content |= {"stage": stage, "settings": settings}
    file = Path(output or f"output/explain/{stage}.html")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(content), encoding="utf-8")
    return file


if __name__ == "__main__":
    run_command(main)
