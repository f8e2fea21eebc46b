"""What `--overrides` of a replication changes: flags of every stage that has them, or of one."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import yaml

from common.errors import UserError, hint

# An override of all stages leaves these where a stage takes them from earlier ones of its chain.
LINKS = ("model_name_or_path", "dataset_name")
JUDGED = {"policies", "ref_model_name_or_path"}  # in which a recipe may name the start
SFT_ROWS = ("prompts_dataset_name", "sft_dataset_name")  # which a recipe sets to SFT's data set

Recipes = dict[str, dict[str, Any]]  # flags by stage


def read_overrides(
    given: Sequence[str], recipes: Recipes, own: Recipes, known: Mapping[str, Set[str]]
) -> Recipes:
    """Flags by stage, of `flag=value` and `stage.flag=value`; `[a, b]` is a list.

    The last wins, one of a stage over one of all.

    Args:
        given: The overrides.
        recipes: Of the stages.
        own: The flags that name folders of the chain, which an override of all stages leaves.
        known: Every flag that a stage has.

    Raises:
        UserError: there is no `=`, no stage of the recipe has the flag, or it is `dataset_name` for
            stages with different data sets.
    """
    found: Recipes = {stage: {} for stage in recipes}
    # Those of one stage last; the data set of all first, as it changes other flags beside
    texts = sorted(given, key=lambda text: not text.startswith("dataset_name="))
    for text in sorted(texts, key=lambda text: "." in text.partition("=")[0]):
        name, equals, value = text.partition("=")
        stage, dot, flag = name.rpartition(".")
        takers = [s for s in recipes if flag in known[s] and stage in ("", s)]
        if not dot and flag in LINKS:
            takers = [s for s in takers if flag in recipes[s] and flag not in own[s]]
        if flag in ("seed", "output_dir"):
            raise UserError(
                f"--overrides has {text!r}; it must be another flag: --seeds and --output_dir say "
                "where each seed's runs are."
            )
        if not equals or not takers:
            every = {flag for flags in known.values() for flag in flags}
            raise UserError(
                f"--overrides has {text!r}; it must be flag=value or stage.flag=value with a flag "
                f"of {', '.join(recipes)} ({hint(flag, every)})."
            )
        is_list = value.startswith("[") and value.endswith("]")
        for taker in takers:
            found[taker][flag] = yaml.safe_load(value) if is_list else value
        if name == "model_name_or_path":
            starts = [recipes[taker][name] for taker in takers]
            for judge, recipe in recipes.items():
                found[judge] |= judged_instead(recipe | own[judge], starts, value)
        if name == "dataset_name":
            refuse_different(given, text, {taker: recipes[taker][name] for taker in takers})
            for taker, recipe in recipes.items():
                same = [f for f in SFT_ROWS if recipe.get(f) == recipes["sft"][name]]
                found[taker] |= dict.fromkeys(same, value)
    return found


def judged_instead(recipe: Mapping[str, Any], starts: Sequence[str], value: str) -> dict[str, Any]:
    """The flags in which a stage names what its chain starts from, with another start."""
    flags: dict[str, Any] = {}
    for name in JUDGED & recipe.keys():
        paths = recipe[name]
        if isinstance(paths, list):
            flags[name] = [value if path in starts else path for path in paths]
        elif paths in starts:
            flags[name] = value
    return flags


def refuse_different(given: Sequence[str], text: str, named: Mapping[str, str]) -> None:
    """Raise a UserError for one data set in the place of several, by stage, that are not given."""
    names = {override.partition("=")[0] for override in given}
    stages: dict[str, list[str]] = {}  # by data set
    for stage, value in named.items():
        if f"{stage}.dataset_name" not in names:
            stages.setdefault(value, []).append(stage)
    if len(stages) > 1:
        listed = "; ".join(f"{', '.join(own)}: {value}" for value, own in stages.items())
        raise UserError(
            f"--overrides has {text!r} for stages of the recipe that have different "
            f"data sets ({listed}); it must be stage.dataset_name= for those of one."
        )
