import numpy as np
import pytest
import torch

from ddtree_check.flows import controls as noise
from ddtree_check.flows.controls import chain_run, forward_run, repeat_run
from ddtree_check.model.wiring import FORKED
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.paths import leaf_paths, padded_chain
from tests.models import prompt, small, tree

CASE = DraftTree((5, 17, 23, 101, 44, 150), (-1, 0, 0, 1, 2, 4))


def test_each_node_belongs_to_the_first_leaf_path_that_holds_it():
    paths = leaf_paths(CASE)
    assert [path.nodes for path in paths] == [(0, 1, 3), (0, 2, 4, 5)]
    assert [path.owned for path in paths] == [(0, 1, 2), (1, 2, 3)]


@pytest.mark.parametrize("name", ["random", "comb", "star", "chain"])
def test_owned_nodes_cover_the_tree_once(name):
    case = tree(name, 40)
    owned = [path.nodes[place] for path in leaf_paths(case) for place in path.owned]
    assert sorted(owned) == list(range(len(case)))


def test_a_sample_of_paths_takes_the_longest_first():
    case = tree("random", 40)
    (path,) = leaf_paths(case, limit=1)
    assert len(path.nodes) == max(case.depth) + 1
    assert len(leaf_paths(case, limit=1000)) == len(case.leaves)


def test_padding_repeats_the_last_token_and_keeps_the_path():
    chain = padded_chain(CASE, (0, 2, 4), 6)
    assert chain.tokens == (5, 23, 44, 44, 44, 44) and chain.is_chain


@pytest.mark.parametrize("wiring", [None, FORKED], ids=["linear", "chain"])
def test_chain_controls_are_noise_and_wide_as_the_tree(wiring):
    host = small()
    prefix = host.prefill(prompt(9))
    reference = host.decode(prefix, CASE)
    found, measured, _ = chain_run(host, prefix, CASE, reference, wiring)
    assert measured.all() and (found.max_abs < 1e-3).all()
    # The twin: against the reference of another tree the same run is far off.
    other = host.decode(prefix, DraftTree((5, 18, 24, 102, 45, 151), CASE.parents))
    assert (chain_run(host, prefix, CASE, other, wiring)[0].max_abs[1:] > 0.1).all()


def test_sampled_controls_say_which_nodes_they_measured():
    host = small()
    case, prefix = tree("random", 40), host.prefill(prompt(9))
    found, measured, _ = chain_run(host, prefix, case, host.decode(prefix, case), FORKED, limit=2)
    paths = leaf_paths(case, limit=2)
    assert set(np.flatnonzero(measured)) == {node for path in paths for node in path.nodes}
    assert (found.max_abs[measured] < 1e-3).all()


@pytest.mark.parametrize("most", [40, 8192])
def test_full_forward_passes_agree_in_any_batching(monkeypatch, most):
    monkeypatch.setattr(noise, "FORWARD_TOKENS", most)
    host = small()
    case, prefix = tree("random", 40), host.prefill(prompt(9))
    found = forward_run(host, prompt(9), case, host.decode(prefix, case))
    assert len(found) == len(case) and (found.max_abs < 1e-3).all()


def test_repeat_is_bitwise_here_and_sees_a_reference_that_moved():
    host = small()
    prefix = host.prefill(prompt(9))
    reference = host.decode(prefix, CASE)
    assert not repeat_run(host, prefix, CASE, reference).max_abs.any()
    moved = reference.clone()
    moved[4] += torch.linspace(0, 1e-3, moved.shape[1])
    assert repeat_run(host, prefix, CASE, moved).max_abs.any()
