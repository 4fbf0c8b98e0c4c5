"""Conformance suites: what every set of kernels, every rule and every table must pass.

`KernelSuite` compares kernels with the NumPy reference on poisoned memory. `RuleSuite` compares every rule with the
optimizer that it must equal. `TableMachine` is a stateful property test of whole tables against a dict. Subclass them
to test a new set of kernels, rule or tier. `FaultFS` is a disk that fails and loses power on demand.
`records_of` returns all bytes of a table's rows.
"""

from __future__ import annotations

from suites.faultfs import FaultFS
from suites.kernels import KernelSuite
from suites.rules import RULE_CASES, DenseOracle, RuleSuite
from suites.tables import ModelTable, TableMachine, records_of

__all__ = [
    "RULE_CASES",
    "DenseOracle",
    "FaultFS",
    "KernelSuite",
    "ModelTable",
    "RuleSuite",
    "TableMachine",
    "records_of",
]
