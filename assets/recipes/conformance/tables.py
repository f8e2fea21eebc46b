"""The table that the command prints."""

from functools import partial

from experiments.evidence.records.studies import printed

TABLES = {"conformance": partial(printed, "conformance/printed.md")}
