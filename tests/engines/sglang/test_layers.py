"""What is kept of SGLang's layers, which hand on a sum in two parts and change one of them in place."""

from __future__ import annotations

import pytest
import torch

from ddtree_check.base.errors import Unsupported
from ddtree_check.engines.sglang.layers import watching


class Layer(torch.nn.Module):
    def forward(self, positions, hidden_states, residual):
        residual = hidden_states.clone() if residual is None else residual.add_(hidden_states)
        return residual * 2, residual


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x):
        residual = None
        for layer in self.layers:
            x, residual = layer(torch.arange(len(x)), hidden_states=x, residual=residual)
        return x


def test_outputs_are_the_sums_that_the_next_layer_reads():
    model, x = Model(), torch.ones(4, 2)
    with watching(model, 3, (-1, 0, 2)) as watched:
        model(x)
        first = dict(watched.outputs)
        model(2 * x)
    assert sorted(first) == [-1, 0, 2] and [float(first[layer][0, 0]) for layer in (-1, 0, 2)] == [1, 3, 27]
    assert float(watched.outputs[0][3, 1]) == 6 and watched.outputs[0].shape == (4, 2)
    watched.outputs.clear()
    model(x)
    assert not watched.outputs


def test_a_model_without_one_list_of_its_layers_is_refused():
    with (
        pytest.raises(Unsupported, match="Model has 0 lists of 5 layers, expected one to watch"),
        watching(Model(), 5, ()),
    ):
        pass
