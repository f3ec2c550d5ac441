"""Triton's interpreter, made good enough to run kernels on a CPU as a GPU would; the kernels' text stays untouched.

Seen with triton 3.8.0. Each function below mends one thing and says what goes wrong without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

import numpy as np

from ..base.errors import UsageError

VARIABLE = "TRITON_INTERPRET"


@functools.cache
def prepare() -> None:
    """Turn the interpreter on and mend it, once in a process; before any kernel is imported.

    Raises UsageError if triton is missing, or was imported with the interpreter off.
    """
    if "triton" in sys.modules and os.environ.get(VARIABLE) != "1":
        raise UsageError(f"interpreter: triton was imported without it, expected {VARIABLE}=1 in the environment")
    os.environ[VARIABLE] = "1"
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError as error:
        raise UsageError(
            f"interpreter: triton cannot be imported ({error}); make test-kernels installs it, or pip install triton"
        ) from None
    _device_context()
    _comparisons(interpreter, tl)
    _bfloat16(interpreter, tl)
    _inner_calls(interpreter, tl)


def _device_context() -> None:
    """Give torch.cpu a `device`; launchers write `with torch.get_device_module(x.device).device(index)`."""
    import torch

    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda index: contextlib.nullcontext()


def _comparisons(interpreter, tl) -> None:
    """Make comparisons int1: they keep their operands' dtype, so that masks made from scalars become int64."""
    builder = interpreter.InterpreterBuilder

    def int1(plain):
        def compare(self, lhs, rhs):
            return interpreter.TensorHandle(plain(self, lhs, rhs).data.astype(bool), tl.int1)

        return compare

    for name, member in list(vars(builder).items()):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, int1(member))


def _bfloat16(interpreter, tl) -> None:
    """Compute bf16 in float32: it is kept as uint16, computed with as if it were integers, rounded upwards at a tie, or
    not at all. Here it is computed with in float32 and rounded to nearest even, as hardware does."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_binary, plain_unary = builder.binary_op, builder.unary_op
    plain_cast, plain_convert = builder.cast_impl, builder.create_fp_to_fp

    def wide(x):
        return handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def narrow(x):
        return handle(narrowed(x.data), tl.bfloat16)

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return plain_binary(self, lhs, rhs, op)
        result = op(wide(lhs).data, wide(rhs).data)
        return handle(result, tl.int1) if result.dtype == bool else handle(narrowed(result), tl.bfloat16)

    def unary_op(self, x, op):
        return narrow(plain_unary(self, wide(x), op)) if x.dtype.scalar == tl.bfloat16 else plain_unary(self, x, op)

    def cast(plain):
        def run(self, source, target, *rest):
            if tl.bfloat16 not in (source.dtype.scalar, target.scalar) or source.dtype.scalar == target.scalar:
                return plain(self, source, target, *rest)
            number = wide(source).data
            if target.scalar == tl.bfloat16:
                return handle(narrowed(number), tl.bfloat16)
            return handle(number.astype(interpreter._get_np_dtype(target)), target.scalar)

        return run

    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.cast_impl, builder.create_fp_to_fp = cast(plain_cast), cast(plain_convert)


def widen(bits: np.ndarray) -> np.ndarray:
    """Return bf16 bits uint16 as float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrowed(numbers: np.ndarray) -> np.ndarray:
    """Return numbers as bf16 bits uint16, rounded to nearest, ties to even; NaN stays NaN."""
    numbers = np.array(numbers, dtype=np.float32)
    bits = numbers.view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _inner_calls(interpreter, tl) -> None:
    """The language is replaced again at every call of an inner function, which costs a fifth of the time. Here what an
    inner call replaces stays so until the outermost one puts everything back."""
    plain, active = interpreter._patch_lang, []

    class Outermost(interpreter._LangPatchScope):
        def restore(self):
            active.clear()
            super().restore()

    def patch(function):
        modules = {
            name for name in ("tl", "core") for value in function.__globals__.values() if value is LANGUAGES[name]
        }
        if not active:
            active.extend([Outermost(), set()])
        scope, done = active
        outer = not done
        if not modules <= done:
            scope._changes += plain(function)._changes
            done |= modules
        return scope if outer else interpreter._LangPatchScope()

    LANGUAGES = {"tl": tl, "core": tl.core}
    interpreter._patch_lang = patch
