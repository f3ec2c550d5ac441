"""Keep torch from computing in fewer digits than it is asked to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Leave float64 tensors alone where the library casts to float32 inside norms, gates and softmaxes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
            elif func is torch.Tensor.type and args[1:] == (torch.float32,):
                return args[0]
            elif kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
            elif func is torch.Tensor.matmul and args[1].dtype == torch.float32:
                args = (args[0], args[1].double())  # positions, which older rotary embeddings make float32
        return func(*args, **kwargs)


@contextlib.contextmanager
def ieee() -> Iterator[None]:
    """Compute float32 as float32: cuDNN's convolutions would take TF32 by themselves, three digits of noise."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def dtype_name(dtype: torch.dtype) -> str:
    """Return 'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")
