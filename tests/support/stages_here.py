"""Stages of a driver in this process, which has imported torch already: a second a stage."""

import importlib

from common.checkpoint import hf_folder
from common.report import plots
from experiments.runs import stages
from experiments.runs.stages import Stage


def run_here(stage: Stage) -> None:
    """Run a stage as `stages.run` does, without a child and pictures. Patches are not run."""
    assert stage.patch is None
    if stages.is_finished(stage):
        return
    module = importlib.import_module(stage.script.removesuffix(".py").replace("/", "."))
    made_by = stages.description(stage)
    draw, plots.plot_run = plots.plot_run, lambda folder: []
    try:
        module.main(hf_folder.with_folders(stages.config_of(stage)))
    finally:
        plots.plot_run = draw
    stages.write_mark(stage.output_dir, made_by)
