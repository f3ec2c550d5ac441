"""What the layers of one rank of SGLang put out in a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ...base.errors import Unsupported
from ..contract import Watched


@contextlib.contextmanager
def watching(model: torch.nn.Module, count: int, layers: Sequence[int]) -> Iterator[Watched]:
    """Let every pass leave what these of the model's `count` layers put out, [rows, d]; rows behind the tree's fill up.

    SGLang's layers hand on what they add and the residual beside it, which the next layer adds in the model's dtype,
    and partly in place. Raises Unsupported for a model that keeps its layers elsewhere.
    """
    watched = Watched()
    stacks = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == count]
    if len(stacks) != 1:
        raise Unsupported(f"{type(model).__name__} has {len(stacks)} lists of {count} layers, expected one to watch")

    def keep(layer: int, parts) -> None:
        hidden, *others = (x for x in parts if isinstance(x, torch.Tensor) and x.is_floating_point())
        residual = others[0] if others and others[0].shape == hidden.shape else None
        total = hidden.clone() if residual is None else hidden + residual
        watched.outputs[layer] = total.detach().flatten(0, -2)

    def keep_input(_, args, kwargs) -> None:
        keep(-1, [kwargs[name] for name in ("hidden_states", "residual") if name in kwargs] or args)

    with contextlib.ExitStack() as undo:
        for index, layer in enumerate(stacks[0]):
            if index == 0 and -1 in layers:
                undo.callback(layer.register_forward_pre_hook(keep_input, with_kwargs=True).remove)
            if index in layers:
                hook = layer.register_forward_hook(
                    lambda _, __, output, index=index: keep(index, output if isinstance(output, tuple) else (output,))
                )
                undo.callback(hook.remove)
        yield watched
