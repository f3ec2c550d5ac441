"""What a call should give, in float64 along each node's path, and how far arithmetic in float32 may be from it.

Values come from our mixers, step by step. Beside each value runs a bound of its error (running error analysis, as in
Higham, Accuracy and Stability of Numerical Algorithms, 3.3; first order, 1 % added for the rest):

    u           2^-24: every operation of a kernel is taken to be a float32 one, rounded to nearest
    sums        n terms, added in any order: n u times the sum of the terms' absolute values
    exp, log    4 u of the result; exp also |x| u, since kernels form it as 2^(x log2 e); log near 1 also 6 u
    stored      u of the buffer's dtype at every hop, since a fork reloads what was stored; u of the output's dtype
    products    a convolution's are rounded to the inputs' dtype, as Triton does with two bf16 numbers

Numbers lost to underflow are allowed for. The bound holds for every correct kernel; what real
ones are off by is usually a tenth to a hundredth of it. A state or an input rounded once to bf16 is 50 times above it
or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..model.mixers import causal_conv, fold, gated_delta, kda, mamba2
from .forms import EPSILON, Call, ConvCall, DeltaCall, Mamba2Call

U = 2.0**-24
FUNCTION = 4  # u of the result that exp, log and division may be off by
FAST_LOG = 6  # u, absolute, of the logarithm of a number between 1/2 and 2: CUDA's __logf is off by up to 2^-21.4
SLACK = 1.01


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True, eq=False)
class Expected:
    """Of one request, float64: output and its bound [n, ...], state and its bound [n, ...], laid out as in the call.

    carry [n, 2, ...]: state and bound as the recurrence steps on from them; initial [2, ...] before the root.
    """

    output: torch.Tensor
    output_bound: torch.Tensor
    state: torch.Tensor
    state_bound: torch.Tensor
    carry: torch.Tensor
    initial: torch.Tensor


def expected(call: Call, request: int, sources: Sequence[int]) -> Expected:
    """Return the nodes of one request, row i continuing row sources[i] (-1: the committed state)."""
    law = law_of(call)
    initial = law.initial(call, request)
    inputs = law.inputs(call, request, len(sources))
    carry, out = fold(law.step(call), initial, inputs, sources)
    return Expected(out[:, 0], out[:, 1], law.lay(carry[:, 0]), SLACK * law.lay(carry[:, 1]), carry, initial)


def one_step(call: Call, request: int, node: int, carry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (state, output) of `node` from each of `carry` [m, 2, ...]: [m, ...] both, as in the call."""
    law = law_of(call)
    inputs = [x[node].expand(len(carry), *x.shape[1:]) for x in law.inputs(call, request, node + 1)]
    after, out = law.step(call)(carry, *inputs)
    return law.lay(after[:, 0]), out[:, 0]


def law_of(call: Call) -> type:
    for form, law in ((ConvCall, _Conv), (DeltaCall, _Delta), (Mamba2Call, _Mamba2)):
        if isinstance(call, form):
            return law
    raise TypeError(f"reference: {type(call).__name__} is no recurrence")


class _Law:
    """One kind. `initial` [2, *s] and `step` on [m, 2, *s]; `lay` puts states into the call's layout."""

    @classmethod
    def initial(cls, call: Call, request: int) -> torch.Tensor:
        """Return the committed state, without error; zeros where the request has no slot."""
        slot = int(call.slots[request])
        state = call.pool[slot].double().cpu() if slot >= 0 else torch.zeros(call.pool.shape[1:], dtype=torch.float64)
        return torch.stack([state.mT, torch.zeros_like(state.mT)])

    @staticmethod
    def lay(state: torch.Tensor) -> torch.Tensor:
        return state.mT


class _Conv(_Law):
    @staticmethod
    def inputs(call: ConvCall, request: int, nodes: int) -> list[torch.Tensor]:
        return [call.x[request, :nodes].double().cpu()]

    @staticmethod
    def step(call: ConvCall):
        weight = call.weight.double().cpu()
        bias = torch.zeros(len(weight)).double() if call.bias is None else call.bias.double().cpu()
        width, products = weight.shape[1], max(roundoff(call.x.dtype), U)
        out_unit = roundoff(call.x.dtype)
        one = torch.vmap(lambda window, x: causal_conv.step(window, x, weight, bias))

        def run(carry, x):
            window, y = one(carry[:, 0], x)
            seen = torch.cat([carry[:, 0], x[:, None]], 1).abs()
            total = (seen * weight.T.abs()).sum(1)
            error = total * (products + (width + 1) * U) + bias.abs() * (width + 1) * U
            if call.silu:
                steep = 1.1 * error + y.abs() * torch.sigmoid(y) * (y.abs() + FUNCTION + 3) * U
                y, error = F.silu(y), steep
            return torch.stack([window, torch.zeros_like(window)], 1), _stored(y, error, out_unit, call.x.dtype)

        return run


class _Delta(_Law):
    @staticmethod
    def inputs(call: DeltaCall, request: int, nodes: int) -> list[torch.Tensor]:
        q, k, v, a, b = (x[request, :nodes].double().cpu() for x in (call.q, call.k, call.v, call.a, call.b))
        repeats = v.shape[1] // q.shape[1]
        q, k = (x.repeat_interleave(repeats, 1) for x in (q, k))
        norms = [(x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (q, k)]
        log_decay, decay_error = _log_decay(call, a)
        beta_error = (b.abs() + FUNCTION + 2) * U * torch.sigmoid(b)
        return [q / norms[0] * call.scale, k / norms[1], v, log_decay, torch.sigmoid(b), decay_error, beta_error]

    @staticmethod
    def step(call: DeltaCall):
        step = kda.step if call.per_channel else gated_delta.step
        one = torch.vmap(torch.vmap(step))
        width = call.q.shape[-1]
        unit = (width / 2 + FUNCTION + 2) * U  # of a normalised and scaled q or k: its sum of squares, root, quotient
        stored, out_unit = roundoff(call.buffer.dtype), roundoff(call.q.dtype)

        def run(carry, q, k, v, log_decay, beta, decay_error, beta_error):
            before, error = carry[:, 0], carry[:, 1]
            after, out = one(before, q, k, v, log_decay, beta)
            q, k = q.abs(), k.abs()
            wide = lambda x: x[..., None] if call.per_channel else x[..., None, None]  # noqa: E731
            decay = wide(log_decay.exp())
            error = decay * error + (decay * before).abs() * (
                wide(decay_error) + (wide(log_decay.abs()) + FUNCTION + 1) * U
            )
            decayed = (decay * before).abs()
            seen = torch.einsum("nhk,nhkv->nhv", k, decayed)  # bounds |k^T a S|
            seen_error = torch.einsum("nhk,nhkv->nhv", k, error) + seen * (unit + (width + 1) * U)
            missing = v.abs() + seen
            update = beta[..., None] * missing
            update_error = beta[..., None] * (seen_error + 3 * U * missing) + beta_error[..., None] * missing
            error = error + k[..., None] * update_error[..., None, :]
            error = error + k[..., None] * update[..., None, :] * (unit + 2 * U) + after.abs() * U
            exact = torch.einsum("nhk,nhkv->nhv", q, after.abs())
            out_error = torch.einsum("nhk,nhkv->nhv", q, error) + exact * (unit + (width + 2) * U)
            kept = torch.stack([after, error + after.abs() * stored + _tiny(call.buffer.dtype)], 1)
            return kept, _stored(out, out_error, out_unit, call.q.dtype)

        return run


class _Mamba2(_Law):
    @classmethod
    def initial(cls, call: Call, request: int) -> torch.Tensor:
        return super().initial(call, request).mT  # [p, n] on both sides

    @staticmethod
    def lay(state: torch.Tensor) -> torch.Tensor:
        return state

    @staticmethod
    def inputs(call: Mamba2Call, request: int, nodes: int) -> list[torch.Tensor]:
        x, dt, b, c = (x[request, :nodes].double().cpu() for x in (call.x, call.dt, call.B, call.C))
        repeats = x.shape[1] // b.shape[1]
        step, step_error = _softplus(dt, call.dt_bias.double().cpu())
        return [x, step, b.repeat_interleave(repeats, 1), c.repeat_interleave(repeats, 1), step_error]

    @staticmethod
    def step(call: Mamba2Call):
        a, d = call.A.double().cpu(), call.D.double().cpu()
        one = torch.vmap(torch.vmap(mamba2.step))
        width = call.B.shape[-1]
        stored, out_unit = roundoff(call.buffer.dtype), roundoff(call.x.dtype)

        def run(carry, x, dt, b, c, dt_error):
            before, error = carry[:, 0], carry[:, 1]
            after, out = one(before, x, dt, a.expand(dt.shape), b, c, d.expand(dt.shape))
            power = dt * a
            decay_error = a.abs() * dt_error + (2 * power.abs() + FUNCTION + 1) * U
            wide = lambda x: x[..., None, None]  # noqa: E731
            decay = wide(power.exp())
            written = (x[..., None] * b[..., None, :]).abs()
            error = decay * error + (decay * before).abs() * wide(decay_error)
            error = error + written * wide(dt_error + 3 * U * dt) + after.abs() * U
            sums = torch.einsum("nhps,nhs->nhp", after.abs(), c.abs())
            skip = (d[:, None] * x).abs()
            out_error = torch.einsum("nhps,nhs->nhp", error, c.abs()) + (sums + skip) * (width + 3) * U
            kept = torch.stack([after, error + after.abs() * stored + _tiny(call.buffer.dtype)], 1)
            return kept, _stored(out, out_error, out_unit, call.x.dtype)

        return run


def _softplus(raw: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softplus(raw + shift) and its bound: kernels' log(1 + exp(x)) loses what 1 + exp(x) rounds away."""
    x = raw + shift
    value = torch.logaddexp(x, torch.zeros_like(x))
    grows = torch.sigmoid(x)  # how much of an error in x or exp(x) arrives
    return value, U * (1 + FAST_LOG + grows * (2 * x.abs() + FUNCTION) + FUNCTION * value)


def _log_decay(call: DeltaCall, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amount, shift = call.A_log.double().cpu(), call.dt_bias.double().cpu()
    if call.per_channel:
        amount = amount[:, None]
    rate, rate_unit = amount.exp(), (amount.abs() + FUNCTION + 1) * U
    if call.lower_bound is None:
        steps, error = _softplus(a, shift)
        return -rate * steps, rate * error + rate * steps * (rate_unit + U)
    power = rate * (a + shift)
    gate = torch.sigmoid(power)
    error = gate * (1 - gate) * power.abs() * (rate_unit + 2 * U) + gate * (power.abs() + FUNCTION + 3) * U
    return call.lower_bound * gate, abs(call.lower_bound) * error


def _stored(value: torch.Tensor, error: torch.Tensor, unit: float, dtype: torch.dtype) -> torch.Tensor:
    """Return [m, 2, ...]: a value as it is stored, and its bound."""
    return torch.stack([value, SLACK * (error + value.abs() * unit + _tiny(dtype))], 1)


def _tiny(dtype: torch.dtype) -> float:
    """Return what underflow may take: float32 ones may be flushed to zero, halves keep subnormal numbers."""
    info = torch.finfo(dtype)
    return max(torch.finfo(torch.float32).tiny, info.tiny * info.eps)
