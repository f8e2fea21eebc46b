"""Iterative DPO next to GRPO."""

from functools import partial

from experiments.evidence.records import sweeps

TABLES = {"iterative": partial(sweeps.primary_table, "iterative", "grpo")}
