"""Runs kernels on cases and says, node by node and channel by channel, what they got wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from ..base.errors import Unsupported, UsageError
from . import reference
from .cases import Case
from .exact import Bits, exact
from .forms import Call, CommitCall, ConvCall
from .lint import Problem, lint

AXES = {  # names of a request's axes behind the node
    ("conv", "output"): ("channel",),
    ("conv", "window"): ("channel", "slot of the window"),
    ("gdn", "output"): ("head", "v"),
    ("kda", "output"): ("head", "v"),
    ("mamba2", "output"): ("head", "p"),
    ("gdn", "state"): ("head", "v", "k"),
    ("kda", "state"): ("head", "v", "k"),
    ("mamba2", "state"): ("head", "p", "n"),
}


@dataclass(frozen=True)
class Finding:
    """One wrong node of one part, at its worst channel.

    part: output, state, window, bits (moved by what the row must not read), parents (written by a conv), pool (a slot
    that had to stay, or a commit's), buffer (a row that had to stay), inputs (overwritten), call (raised, or a result
    of another shape). request, node: None where it is no node's. error: |difference|, inf for NaN. origin: where the
    bound comes from. reads: what it looks like.
    """

    kernel: str
    case: str
    part: str
    request: int | None
    node: int | None
    channel: str
    error: float
    bound: float
    origin: str
    reads: str = ""

    def __str__(self) -> str:
        where = "".join(
            f" {word} {value}" for word, value in (("request", self.request), ("node", self.node)) if value is not None
        )
        channel = f", {self.channel}" if self.channel else ""
        size = "" if self.part == "bits" else f": |error| {self.error:.3g}, bound {self.bound:.3g} ({self.origin})"
        return (
            f"{self.kernel} on {self.case}: {self.part}{where}{channel}{size}{'; ' if self.reads else ''}{self.reads}"
        )


@dataclass
class Result:
    """What one case showed: findings, the largest error of outputs and states, and of their share of the bound."""

    kernel: str
    case: Case
    findings: list[Finding] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    share: float = 0.0
    judged: int = 0
    unsupported: str = ""
    bits: Bits | None = None

    @property
    def verdict(self) -> str:
        if self.unsupported:
            return "unsupported"
        return "fail" if self.findings or self.problems else "pass"


def check(
    kernel: Callable[[Call], torch.Tensor],
    case: Case,
    *,
    device: str = "cpu",
    name: str | None = None,
    in_bits: bool = False,
) -> Result:
    """Make the case's call, run the kernel once on it, and judge everything that it wrote or had to leave alone.

    in_bits: make the further calls of the exact checks as well, if the first one could be made.
    """
    call = case.call(device)
    result = judge(kernel, call, Result(name or getattr(kernel, "__name__", "kernel"), case))
    broken = result.unsupported or result.problems or any(finding.part == "call" for finding in result.findings)
    if in_bits and not broken and (bits := exact(kernel, case, device)):
        result.bits = bits
        result.findings += [
            Finding(
                result.kernel, case.id, "bits", request, node, "", 0.0, 0.0, "exact: must keep its bits",
                f"moves with {source}",
            )
            for request, node, source in bits.moved
        ]  # fmt: skip
    return result


def judge(kernel: Callable[[Call], torch.Tensor], call: Call, result: Result) -> Result:
    """Check a call that is already made. A call that breaks a convention is refused by name, not made."""
    case = result.case
    counts = [len(tree) for tree in case.trees] + [1] * case.padded
    result.problems = lint(call, nodes=counts, padding=range(len(case.trees), case.requests))
    if result.problems:
        return result
    before = call.clone()
    try:
        out = kernel(call)
        if call.pool.is_cuda:
            torch.cuda.synchronize()
    except UsageError:
        raise
    except Unsupported as error:
        result.unsupported = str(error)
        return result
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        result.findings.append(_broken(result, "call", f"raised {text:.300}"))
        return result
    result.findings += compare(call, before, out, result)
    return result


def compare(call: Call, before: Call, out: torch.Tensor | None, result: Result) -> list[Finding]:
    """Return every difference between what a kernel left in `call`, made as `before`, and what it should have."""
    case, findings = result.case, list(_untouched(call, before, out, result))
    if isinstance(call, CommitCall):
        return findings + list(_committed(call, before, result))
    wanted = before.x if hasattr(before, "x") else before.v
    if not isinstance(out, torch.Tensor) or out.shape != wanted.shape or out.dtype != wanted.dtype:
        got = f"{out.dtype} {list(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
        findings.append(_broken(result, "call", f"returned {got}, expected {wanted.dtype} {list(wanted.shape)}"))
        return findings
    for request in range(len(case.trees)):
        findings += _request(call, before, out, request, result)
    return findings


def _request(call: Call, before: Call, out: torch.Tensor, request: int, result: Result) -> list[Finding]:
    case = result.case
    sources = case.sources(request)
    right, nodes = reference.expected(before, request, sources), len(sources)
    conv = isinstance(call, ConvCall)
    row = int(before.rows[request])
    parts = {
        "output": (out[request, :nodes], right.output, right.output_bound),
        "window" if conv else "state": (call.buffer[row, :nodes], right.state, right.state_bound),
    }
    findings: list[Finding] = []
    for part, (got, want, bound) in parts.items():
        origin = "exact: copied inputs" if part == "window" else _origin(case, part)
        error = (got.double().cpu() - want).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        result.worst[part] = max(result.worst.get(part, 0.0), float(error.max()))
        share = torch.where(error > 0, error / bound, 0.0)  # inf where an exact part differs
        if part != "window":
            result.share = max(result.share, float(share.max()))
        result.judged += error.numel()
        for node in range(nodes):
            place = int(share[node].argmax())
            if not share[node].flatten()[place] <= 1:
                index = _index(place, share[node].shape)
                channel = _named(AXES[case.kind, part], index)
                figures = float(error[node][index]), float(bound[node][index]), origin
                findings.append(Finding(result.kernel, case.id, part, request, node, channel, *figures))
    if findings:
        first = min(finding.node for finding in findings)
        why = _explain(call, before, out, request, first, sources, right, case)
        findings = [replace(finding, reads=why) if finding.node == first else finding for finding in findings]
    if conv and case.forked:
        want = torch.tensor(case.trees[request].parents)
        got = call.parents[request, :nodes].cpu()
        for node in (1 + torch.nonzero(got[1:] != want[1:]).flatten()).tolist():
            error = float(abs(int(got[node]) - int(want[node])))
            says = f"parent {int(got[node])}, expected {int(want[node])}"
            findings.append(
                Finding(result.kernel, case.id, "parents", request, node, "", error, 0.0, "exact: links", says)
            )
    return findings


def _origin(case: Case, part: str) -> str:
    stored = case.dtype if part == "output" else case.state_dtype
    hops = f", {case.state_dtype} at every hop" if case.kind != "conv" else ""
    return f"rounding of float32 operations along the path{hops}, stored as {stored}"


def _explain(call, before, out, request, node, sources, right, case) -> str:
    """Return the state that the first wrong node seems to have started from; its right one is a candidate."""
    names, carries = ["the committed state", "zeros"], [right.initial, torch.zeros_like(right.initial)]
    for other in range(node):
        names.append(f"node {other}'s state")
        carries.append(right.carry[other])
    for other in range(len(case.trees)):
        if other != request:
            names.append(f"request {other}'s committed state")
            carries.append(reference.law_of(before).initial(before, other))
    state, output = reference.one_step(before, request, node, torch.stack(carries))
    row = int(before.rows[request])
    exact = torch.full_like(state[0], torch.finfo(torch.float64).tiny)
    state_bound = exact if isinstance(call, ConvCall) else right.state_bound[node]
    tell = [(out[request, node], output, right.output_bound[node]), (call.buffer[row, node], state, state_bound)]
    source = sources[node]
    expected = "the committed state" if source < 0 else f"node {source}'s state"
    for got, candidates, bound in tell:
        far = ((got.double().cpu() - candidates).abs().nan_to_num(nan=math.inf) / bound).flatten(1).amax(1)
        best = int(far.argmin())
        if far[best] <= 4 and names[best] != expected:
            return f"starts from {names[best]}, expected {expected}"
    return ""


def _committed(call: CommitCall, before: CommitCall, result: Result) -> Iterator[Finding]:
    case = result.case
    for request in range(len(case.trees)):
        slot, row, node = (int(x[request]) for x in (before.slots, before.rows, before.nodes))
        want = before.pool[slot] if node < 0 else before.buffer[row, node].to(before.pool.dtype)
        got = call.pool[slot]
        error = (got.double() - want.double()).abs().nan_to_num(nan=math.inf).cpu()
        result.worst["pool"] = max(result.worst.get("pool", 0.0), float(error.max()))
        result.judged += error.numel()
        if float(error.max()) == 0:
            continue
        same = [
            other
            for other in range(len(case.trees[request]))
            if torch.equal(got, before.buffer[row, other].to(got.dtype))
        ]
        content = (
            f"node {same[0]}'s state" if same else "the state before" if torch.equal(got, before.pool[slot]) else ""
        )
        asked = f"node {node}'s" if node >= 0 else "the state before"
        reads = f"holds {content}, expected {asked}" if content else ""
        place = _index(int(error.argmax()), error.shape)
        channel = f"slot {slot}, {_named(('head', 'v', 'k'), place)}"
        figures = float(error[place]), 0.0, "exact: copied"
        yield Finding(result.kernel, case.id, "pool", request, node if node >= 0 else None, channel, *figures, reads)


def _untouched(call: Call, before: Call, out, result: Result) -> Iterator[Finding]:
    """Yield what the call had to leave alone, bit for bit."""
    case = result.case
    mine = {int(slot): request for request, slot in enumerate(before.slots) if slot >= 0}
    for slot in range(len(before.pool)):
        if slot in mine and isinstance(call, ConvCall | CommitCall):
            continue
        if not _same(call.pool[slot], before.pool[slot]):
            owner = f"request {mine[slot]}'s own" if slot in mine else "of no request in the batch"
            yield _moved(result, "pool", mine.get(slot), f"slot {slot}", call.pool[slot], before.pool[slot], owner)
    rows = {int(row) for row in before.rows if row >= 0}
    kept = range(case.steps, before.buffer.shape[1])
    for row in range(len(before.buffer)):
        steps = range(before.buffer.shape[1]) if row not in rows or isinstance(call, CommitCall) else kept
        for step in steps:
            now, then = call.buffer[row, step], before.buffer[row, step]
            if not _same(now, then):
                why = "a step behind the last row" if row in rows else "a row of no request in the batch"
                yield _moved(result, "buffer", None, f"row {row}, step {step}", now, then, why)
    written = {"pool", "buffer"} | ({"parents"} if isinstance(call, ConvCall) else set())
    for name, then in ((spec.name, getattr(before, spec.name)) for spec in fields(before)):
        now = getattr(call, name)
        if name in written or not isinstance(then, torch.Tensor) or _same(now, then):
            continue
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() == now.untyped_storage().data_ptr():
            continue  # computed in place, and handed back
        yield _moved(result, "inputs", None, name, now, then, "an input")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two are equal bit for bit; NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _moved(result: Result, part: str, request: int | None, channel: str, now, then, why: str) -> Finding:
    error = float((now.double() - then.double()).abs().nan_to_num(nan=math.inf).max())
    return Finding(
        result.kernel, result.case.id, part, request, None, channel, error, 0.0, "exact: must stay", f"changed: {why}"
    )  # fmt: skip


def _broken(result: Result, part: str, says: str) -> Finding:
    return Finding(result.kernel, result.case.id, part, None, None, "", math.inf, 0.0, "the call form", says)


def _index(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(x) for x in torch.unravel_index(torch.tensor(place), tuple(shape)))


def _named(axes: Sequence[str], index: Sequence[int]) -> str:
    return ", ".join(f"{axis} {place}" for axis, place in zip(axes, index, strict=True))
