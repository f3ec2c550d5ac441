"""kernels: verify kernels alone, against float64 along each node's path."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated

import typer

from ...base.conclusion import ExitCode, combine
from ...base.errors import UsageError
from ...base.options import split_words
from ...base.words import counted
from ...report.layout import Table, laid_out
from ...report.text import number, plain
from .options import some_of
from .output import progress, show_text, width

BUILT_IN = {name: f"ddtree_check.kernels.{name}" for name in ("sglang", "plain")}
SHOWN = 8  # failed cases in full


def kernels(
    module: Annotated[
        str,
        typer.Argument(
            help="sglang, plain, or a module with functions conv, gdn, kda, mamba2, commit (any of them); "
            "MODULE:FUNCTION with --kind for one.",
            show_default=False,
        ),
    ],
    kind: Annotated[
        str | None, typer.Option(help="Only these: conv, gdn, kda, mamba2, commit. Default: all it has.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Inputs/state, such as float32/float32,bfloat16/bfloat16. Default: those and float16/float16."
        ),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Only these families of cases, as the table names them.")] = None,
    size: Annotated[str, typer.Option(help="small, or large: heads of 128 x 128.")] = "small",
    rows: Annotated[int, typer.Option(help="Further cases with this many rows, such as 65 (0: none).")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    exact: Annotated[str, typer.Option(help="leaves: further calls, compared bit for bit; or off.")] = "leaves",
):
    """Check verify kernels alone: every node's output and state against float64 along its path."""
    some_of("exact", (exact,), ("off", "leaves"))
    if rows < 0:
        raise UsageError(f"rows: got {rows}, expected 0 or more")
    if device == "cpu" and module != "plain" and importlib.util.find_spec("triton"):
        from ...kernels import interpreter

        interpreter.prepare()  # before the module imports triton
    found = _functions(module, None if kind is None else split_words(kind))
    from ...kernels.cases import PAIRS, suite
    from ...kernels.check import check

    _check_device(device)
    pairs = PAIRS if dtype is None else tuple(_pair(word) for word in split_words(dtype))
    cases = list(suite(tuple(found), pairs, size=size, long=rows))
    wanted = some_of("family", None if family is None else split_words(family), (case.family for case in cases))
    cases = [case for case in cases if case.family in wanted]
    results = []
    with progress() as show:
        for place, case in enumerate(cases):
            if show:
                show(place, len(cases), case.id)
            results.append(check(found[case.kind], case, device=device, name=case.kind, in_bits=exact != "off"))
    code = combine(*(ExitCode.of(result.verdict) for result in results))
    show_text(_report(module, results, device, size, code))
    return code


def _functions(module: str, kinds: tuple[str, ...] | None) -> dict:
    """Return {kind: function}. Raises UsageError for what cannot be imported or is not there."""
    from ...kernels import FORMS

    some_of("kind", kinds, FORMS)
    name, _, function = module.partition(":")
    if function and (kinds is None or len(kinds) != 1):
        raise UsageError(f"kernels: {module} names one function, expected --kind with one of {', '.join(FORMS)}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a kernel in the working directory, as `python -m` would find it
    try:
        loaded = importlib.import_module(BUILT_IN.get(name, name))
    except UsageError:
        raise
    except Exception as error:  # the author's module: whatever stops its import is theirs to read, in one line
        raise UsageError(
            f"kernels: {name} cannot be imported ({type(error).__name__}: {error}); "
            "expected sglang, plain or a module on the path"
        ) from None
    names = {kinds[0]: function} if function else {kind: kind for kind in kinds or FORMS}
    found = {kind: getattr(loaded, name) for kind, name in names.items() if callable(getattr(loaded, name, None))}
    missing = [name for kind, name in names.items() if kind not in found]
    if not found or (missing and (kinds or function)):
        raise UsageError(f"kernels: {name} has no function {' or '.join(missing)}; docs/kernels.md has the call form")
    return found


def _pair(word: str) -> tuple[str, str]:
    inputs, _, state = word.partition("/")
    return inputs, state or inputs


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"device: {device!r} cannot be used ({reason}); expected cpu, or cuda with a GPU") from None


def _report(module: str, results: list, device: str, size: str, code: ExitCode) -> str:
    from ...judge.exact import Tally

    groups: dict[tuple[str, str, str], list] = {}
    for result in results:
        case = result.case
        wiring = case.family if case.forked else f"{case.family}, unforked"
        groups.setdefault((case.kind, f"{case.dtype}/{case.state_dtype}", wiring), []).append(result)
    lines = []
    for (kind, pair, family), group in groups.items():
        worst = {part: max(r.worst.get(part, 0.0) for r in group) for part in ("output", "state", "window", "pool")}
        state = next((worst[part] for part in ("state", "window", "pool") if any(part in r.worst for r in group)), None)
        judged = any(r.worst for r in group)
        output, share = "", ""
        if judged and kind != "commit":
            output, share = _figure(worst["output"]), _share(max(r.share for r in group))
        verdict = "fail" if any(r.verdict == "fail" for r in group) else group[0].verdict
        equal = sum((r.bits.certified for r in group if r.bits), Tally())
        state = _figure(state) if judged and state is not None else ""
        lines.append((kind, pair, family, output, state, share, str(equal) if equal.of else "", verdict))
    title = f"Kernels of {module}, {device}, {size} sizes: largest |error| against float64 along each node's path"
    headers = ("kernel", "inputs/state", "cases", "output", "state or window", "of its bound", "as a chain", "verdict")
    blocks = [Table(title, headers, lines)]
    wrong = [_first(result) for result in results if result.verdict == "fail"]
    refused = dict.fromkeys(f"{r.kernel}: unsupported: {r.unsupported}" for r in results if r.unsupported)
    refused |= dict.fromkeys(
        f"{r.kernel}: influence is not claimed: {r.bits.influence.reason}"
        for r in results
        if r.bits and not r.bits.influence.claimed
    )
    blocks += [plain(text) for text in [*wrong[:SHOWN], *refused]]
    if len(wrong) > SHOWN:
        blocks.append(
            f"... and {counted(len(wrong) - SHOWN, 'more case')}; --kind, --dtype and --family narrow the run"
        )
    judged = sum(result.judged for result in results)
    failed = sum(result.verdict == "fail" for result in results)
    ran = f"{counted(len(results), 'case')}, {failed} failed, {judged:,} numbers judged"
    blocks.append(f"verdict: {code.text} ({ran}), exit code {code}")
    return laid_out(blocks, width())


def _first(result) -> str:
    """Return the first wrong node of a failed case, and how many findings there are besides."""
    if result.problems:
        return f"{result.kernel} on {result.case.id}: {result.problems[0]}"
    first = min(result.findings, key=lambda f: (not f.reads, f.node is None, f.node or 0))
    more = len(result.findings) - 1
    return f"{first}{f' (and {more} more)' if more else ''}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if value <= 1 else "over" if value == float("inf") else f"{value:.2g} times"


def _figure(value: float) -> str:
    return number(None if value == float("inf") else value)
