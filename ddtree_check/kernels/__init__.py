"""Verify kernels alone: cases for them, and a checker that names the request, the node and the channel that are wrong.

    from ddtree_check.kernels import check, suite
    for case in suite(["gdn"]):
        print(check(my_gdn, case).verdict)

`forms` says how a kernel is called, `cases` makes the calls, `lint` refuses what kernels do not guard, `reference`
gives the right answer and its bound, `check` compares. `sglang` and `plain` hold kernels in the call form.
"""

from .cases import Case, suite
from .check import Finding, Result, check
from .forms import FORMS, CommitCall, ConvCall, DeltaCall, Mamba2Call
from .lint import RULES, Problem, lint

__all__ = [
    "FORMS",
    "RULES",
    "Case",
    "CommitCall",
    "ConvCall",
    "DeltaCall",
    "Finding",
    "Mamba2Call",
    "Problem",
    "Result",
    "check",
    "lint",
    "suite",
]
