"""Find where a fault enters: by channel, by layer, by kind and by dose. Extra passes, made only for a red verdict.

Four sources, each used where the engine has it:
  layers     what every layer puts out (`Engine.watch`) against plain decoding, with a floor per layer and node
  contents   what the pass would store at the node where it enters, channel by channel
  toggles    passes under other wirings: one that gives the very logits that failed says which channel read what
  shape      the same tree with one more row: if that is right, the fault belongs to a size, not to the tree
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..base.files import json_number
from ..engines.contract import walk
from ..judge.attribution import Entry, Finding
from ..judge.commit import Part, compare_contents, off, tree_floors
from ..judge.differences import measure, ulp
from ..judge.nodes import beyond, judge
from ..judge.rule import Rule
from ..model.wiring import BLANK, FORKED, Attention, Conv, Layer, Plan, State, Wiring, reads, with_edge
from ..tree.draft_tree import DraftTree
from ..tree.paths import leaf_paths, padded_chain
from .passes import attempt

KEPT = 64 << 20  # bytes of layer outputs kept at a time; more layers are looked at in several turns
CHANNELS = {"state": State, "conv": Conv, "mask": Attention, "positions": Attention}
EDGES = 24  # single wrong edges that are tried
TREND = 0.5  # rank correlation from which on a sentence mentions it
FEWEST = 5  # nodes that a rank correlation needs


def attribute(
    engine, prefix, tree: DraftTree, mode: str, wiring: Wiring | None, reference: torch.Tensor, floor: np.ndarray,
    rule: Rule, dtype: str,
) -> Finding:  # fmt: skip
    """Find where `mode` (its wiring; None for the engine's own pass along chains) leaves plain decoding.

    reference: logits [n, vocabulary] of plain decoding; floor [n] as in the verdict.
    """
    return _Hunt(engine, prefix, tree, mode, wiring, reference, floor, rule, dtype).finding()


def attribute_commit(accept, mode: str, layers: Sequence[Layer]) -> Finding:
    """Find the same for a commit (a `commit.Accept`) that failed: what it stored says it all, so no pass is made."""
    bad, path = accept.modes[mode].bad, "-".join(map(str, accept.path))
    stored = {"state": State, "conv": Conv, "keys": Attention}
    wrong = {_channel(part) for part, *_ in bad}
    channels = {
        channel: "off" if channel in wrong else "clean"
        for channel, op in stored.items()
        if channel in wrong or reads(layers, op)
    }
    if not bad:
        entry = Entry(accept.node, None, None, None)
        text = f"path {path}: what is stored is right, what the next step reads is not"
    else:
        part, _, says = next((each for each in bad if each[0].layer >= 0), bad[0])
        kind = layers[part.layer].kind if part.layer >= 0 else None
        entry = Entry(accept.node, part.layer, kind, _channel(part))
        where = f"layer {part.layer} ({_words(kind)})" if kind else "the position"
        count = len({part.layer for part, *_ in bad if part.layer >= 0})
        text = f"path {path}: enters at {where}: {says}" + (f"; {count} layers off" if count > 1 else "")
    text += "".join(f"; {_spoken(channel)} clean" for channel, state in channels.items() if state == "clean")
    return Finding(f"commit after {mode}", len(bad), entry, channels=channels, text=text)


def _channel(part: Part) -> str:
    return {"recurrent": "state", "values": "keys"}.get(part.kind, part.kind)


class _Hunt:
    """One mode of one case."""

    def __init__(self, engine, prefix, tree, mode, wiring, reference, floor, rule, dtype):
        self.engine, self.prefix, self.tree, self.mode, self.wiring = engine, prefix, tree, mode, wiring
        self.reference, self.rule, self.dtype = reference, rule, dtype
        spare = rule.rounding[dtype] * measure(reference, reference).std
        self.floor = np.where(np.isfinite(floor), floor, spare)  # a row that is not finite has none of its own
        self.layers: Sequence[Layer] = engine.layers
        self.chain = wiring is None
        self.verified, self.logits = self._run()
        self.differences = measure(reference, self.logits)
        self.bad = beyond(judge(self.differences, floor))
        self.profile: tuple[float | None, ...] = ()

    def _run(self) -> tuple[Any, torch.Tensor]:
        """Make the pass that failed once more; of chains every leaf path, without a commit."""
        if not self.chain:
            verified = self.engine.verify(self.prefix, self.tree, self.wiring)
            return verified, verified.logits
        rows = self.reference.clone()
        for path in leaf_paths(self.tree):
            chain = padded_chain(self.tree, path.nodes, len(self.tree))
            logits = self.engine.verify(self.prefix, chain, None).logits
            rows[[path.nodes[place] for place in path.owned]] = logits[list(path.owned)]
        return None, rows

    def finding(self) -> Finding:
        """Look at layers, contents, toggles, shape and dose, and put what they say into one finding."""
        if not self.bad:
            return Finding(self.mode, 0, None, text="no node is beyond its floor")
        first, growth, routed = self._by_layer()
        entry_node = min(first, key=lambda node: (first[node], node), default=self.bad[0])
        layer = first.get(entry_node)
        stored = attempt(None, lambda: self._by_contents(entry_node, layer))[0] or set()
        explained, channels, source = self._by_toggle(entry_node, self._suspects(stored, layer))
        channel = self._channel(explained, channels, stored, layer, entry_node, routed)
        if explained is None:
            channels = self._left_over(channel, layer, first)
        kind = None
        if layer is not None:
            kind = "input" if layer < 0 else "head" if layer == len(self.layers) else self.layers[layer].kind
        entry = Entry(entry_node, layer, kind, channel, source)
        shape, _ = attempt(None, self._by_shape)
        dose = self._dose()
        text = self._text(entry, growth, channels, explained, shape, dose)
        return Finding(
            self.mode, len(self.bad), entry, first, growth, channels, explained, shape, dose, text, self.profile
        )

    # By layer

    def _by_layer(self):
        """First layer beyond its floor by bad node, growth by node, and the nodes sent to other experts by layer."""
        error, over, routed = [], [], {}
        for group in attempt(None, self._groups)[0] or ():
            for layer, (size, beyond_floor, moved) in self._group(group).items():
                error.append(size)
                over.append(beyond_floor)
                routed[layer] = moved
        if not error:
            return {}, {}, {}
        error, over = np.array(error), np.array(over)  # row 0 is the input of the first layer
        typical = np.median(error[:, list(self.bad)], axis=1)
        self.profile = tuple(map(json_number, typical))
        first, growth = {}, {}
        for node in self.bad:
            # An early layer may leave its floor by chance; from where it enters on, a fault stays.
            clear = np.flatnonzero(~over[:, node])
            start = int(clear[-1]) + 1 if len(clear) else 0
            first[node] = start - 1
            if start < len(error) and error[start, node] > 0 and np.isfinite(error[[start, -1], node]).all():
                growth[node] = float(error[-1, node] / error[start, node])
        return first, growth, routed

    def _groups(self) -> list[range]:
        """Return layers in groups of which all outputs are kept at a time. Raises Unsupported if none is shown."""
        with self.engine.watch([-1]) as seen:
            self.engine.step(self.prefix, self.tree.tokens[0])
        row, last = seen.outputs[-1], len(self.layers)
        many = max(1, KEPT // (2 * len(self.tree) * row.shape[-1] * row.element_size()))
        return [range(start, min(start + many, last)) for start in range(-1, last, many)]

    def _group(self, group: range) -> dict[int, tuple[np.ndarray, np.ndarray, set[int]]]:
        """Return of each layer the error of its output, relative to the row [n], which nodes are beyond their floor,
        bool [n], and the nodes sent to other experts than under plain decoding."""
        n = len(self.tree)
        steps: dict[int, list[torch.Tensor]] = {layer: [None] * n for layer in group}
        routes: dict[tuple[int, int], torch.Tensor] = {}
        error, control = ({layer: np.zeros(n) for layer in group} for _ in range(2))
        moved: dict[int, set[int]] = {layer: set() for layer in group}
        with self.engine.watch(group) as seen:
            for node, *_ in walk(self.engine, self.prefix, self.tree):
                for layer in group:
                    steps[layer][node] = seen.outputs[layer][0]
                routes |= {(layer, node): rows[0].sort().values for layer, rows in seen.routes.items()}
            right = {layer: torch.stack(rows) for layer, rows in steps.items()}
            steps.clear()

            def compare(errors: dict, nodes: Sequence[int], places: Sequence[int]) -> None:
                nodes, places = list(nodes), list(places)
                for layer in group:
                    apart = _apart(right[layer][nodes], seen.outputs[layer][places])
                    errors[layer][nodes] = np.maximum(errors[layer][nodes], apart)
                for layer, rows in seen.routes.items() if errors is error else ():
                    for node, place in zip(nodes, places, strict=True):
                        if not torch.equal(rows[place].sort().values, routes[layer, node]):
                            moved[layer].add(node)

            if not self.chain:
                self.engine.verify(self.prefix, self.tree, self.wiring)
                compare(error, range(n), range(n))
            for path in leaf_paths(self.tree):
                nodes = [path.nodes[place] for place in path.owned]
                if self.chain:
                    self.engine.verify(self.prefix, padded_chain(self.tree, path.nodes, n), None)
                    compare(error, nodes, path.owned)
                    continue
                for wiring in (None, FORKED):
                    if self._control(path.nodes, path.owned, wiring) is not None:
                        compare(control, nodes, path.owned)
        figures = {}
        for layer in group:
            rows = right[layer].double()
            size = rows.square().mean(-1).sqrt().cpu().numpy()
            spacing = ulp(rows.abs().amax(-1), getattr(torch, self.dtype)).cpu().numpy()
            floor = self.rule.factor * control[layer] + self.rule.ulps * spacing
            if self.chain:  # other kernels than plain decoding, and nothing of their width to measure them by
                floor = np.maximum(floor, self.rule.rounding[self.dtype] * size)
            figures[layer] = error[layer] / np.maximum(size, 1e-30), ~(error[layer] <= floor), moved[layer]
        return figures

    def _control(self, path: Sequence[int], places: Sequence[int], wiring: Wiring | None):
        """Make a pass along a chain as wide as the tree; return it if it is right at these places, or None."""
        if self.engine.supports(wiring) is not None:
            return None
        verified = self.engine.verify(self.prefix, padded_chain(self.tree, path, len(self.tree)), wiring)
        nodes = [path[place] for place in places]
        differences = measure(self.reference[nodes], verified.logits[list(places)])
        return None if beyond(judge(differences, self.floor[nodes])) else verified

    # By channel

    def _suspects(self, stored: set[str], layer: int | None) -> list[str]:
        """Channels that one wrong edge could have, by what is stored."""
        if layer is None:
            return [channel for channel in CHANNELS if self._has(channel)]
        if not 0 <= layer < len(self.layers):
            return []
        here = [self.layers[layer]]
        if "conv" in stored:
            return ["conv"]
        if "recurrent" in stored:
            return [channel for channel in ("state", "conv") if reads(here, CHANNELS[channel])]
        if not reads(here, Attention):
            return ["conv"] if reads(here, Conv) else []
        return ["positions"] if "keys" in stored else ["mask"]

    def _by_toggle(self, node: int, suspects: Sequence[str]) -> tuple[str | None, dict[str, str], int | None]:
        """Return the wiring that gives what failed, the channels by it, and what `node` reads in the wrong one."""
        known, shown = self.wiring not in (None, FORKED), [channel for channel in CHANNELS if self._has(channel)]
        for wiring, whole in [(self.wiring, True)] if known else self._candidates(node, suspects):
            if not known and not self._same(wiring, None if whole else node):
                continue
            wrong = {channel for channel in shown if getattr(wiring, channel) != "tree"}
            if whole and not known:  # a channel whose rule changes nothing is as much stuck as the first one found
                wrong |= {channel for channel in shown if channel not in wrong and self._stuck(channel)}
            channels = {channel: "off" if channel in wrong else "clean" for channel in shown}
            first = next(channel for channel in shown if channel in wrong)
            return wiring.name, channels, _source(wiring.plan(self.tree), FORKED.plan(self.tree), first, node)
        return None, {}, None

    def _candidates(self, node: int, suspects: Sequence[str]) -> Iterator[tuple[Wiring, bool]]:
        """Yield wirings to try, and whether each must explain every node or `node` alone."""
        flat = [channel for channel in CHANNELS if self._has(channel)]
        blank = [channel for channel in ("state", "conv") if self._has(channel)]
        if not self.chain:
            for channel in flat:
                yield Wiring(f"{channel}=flat", **{channel: "flat"}), True
            if len(blank) == 2:
                yield Wiring("state=flat,conv=flat", state="flat", conv="flat"), True
            yield Wiring(",".join(f"{channel}=flat" for channel in flat), **dict.fromkeys(flat, "flat")), True
        for channel in blank:
            yield _edge(f"{channel} from zeros", [channel], 0, BLANK), True
        if len(blank) == 2:
            yield _edge("state and conv from zeros", blank, 0, BLANK), True
        if self.chain or node == 0:
            return
        parent, depth = self.tree.parents[node], self.tree.depth[node]
        near = [node - 1, self.tree.parents[parent], -1, BLANK]
        sources = {
            "state": [source for source in (*near, *range(node)) if source != parent],
            "mask": [parent, *range(node)],
            "positions": [depth + 1, depth - 1, node],
        }
        sources["conv"] = sources["state"]
        for channel in suspects:
            for source in list(dict.fromkeys(sources[channel]))[:EDGES]:
                yield _edge(f"{channel} of node {node} alone", [channel], node, source), False

    def _has(self, channel: str) -> bool:
        if channel == "positions":
            ops = (op for layer in self.layers for branch in layer.branches for op in branch)
            return any(isinstance(op, Attention) and op.positional for op in ops)
        return reads(self.layers, CHANNELS[channel])

    def _same(self, wiring: Wiring, node: int | None) -> bool:
        """Return whether a pass under `wiring` gives the logits that failed, at every node or at one."""
        if self.engine.supports(wiring) is not None:
            return False
        tree, rows = self.tree, slice(None)
        if self.chain:
            path = next(path for path in leaf_paths(tree) if self.bad[0] in path.nodes)
            tree, rows = padded_chain(tree, path.nodes, len(tree)), list(path.nodes)
        logits = self.engine.verify(self.prefix, tree, wiring).logits[: len(self.logits[rows])]
        within = measure(self.logits[rows], logits).max_abs <= self.floor[rows]
        return bool(within.all() if node is None else within[node])

    def _stuck(self, channel: str) -> bool:
        """Return whether the rule of this channel changes nothing in the pass that failed, though it must."""
        if self.chain:
            return False
        wiring = Wiring("toggle", **{channel: "flat"})
        return bool(torch.equal(self.engine.verify(self.prefix, self.tree, wiring).logits, self.logits))

    # By what is stored

    def _by_contents(self, node: int, layer: int | None) -> set[str]:
        """Return the channels of one layer that a commit of `node` would leave wrong."""
        if layer is None or not 0 <= layer < len(self.layers):
            return set()
        path, right = self.tree.path(node), self.prefix
        for token in self.tree.path_tokens(node):
            _, right = self.engine.step(right, token)
        reference = self.engine.contents(right)

        def parts(verified, last: int) -> list[Part]:
            stored = self.engine.contents(self.engine.commit(verified, last))
            return compare_contents(reference, stored, getattr(torch, self.dtype))

        wirings = (FORKED,) if self.chain else (FORKED, None)
        chains = (self._control(path, range(len(path)), wiring) for wiring in wirings)
        controls = [parts(chain, len(path) - 1) for chain in chains if chain is not None]
        if self.chain:
            whole = self.engine.verify(self.prefix, padded_chain(self.tree, path, len(path)), None)
            stored = parts(whole, len(path) - 1)
        else:
            stored = parts(self.verified, node)
        wrong = off(stored, tree_floors(stored, controls, self.rule, self.dtype))
        return {part.kind for part, _ in wrong if part.layer == layer}

    def _channel(self, explained, channels, stored, layer, node, routed) -> str | None:
        """Return the channel that the fault enters by, or None where no layer is seen."""
        if explained is not None:
            return " and ".join(channel for channel, state in channels.items() if state == "off")
        if layer is None:
            return None
        if not 0 <= layer < len(self.layers):
            return "input" if layer < 0 else "head"
        if "keys" in stored and "values" not in stored:
            stored = {*stored, "positions"}
        if node in routed.get(layer, ()):
            stored = {*stored, "routing"}
        for channel in ("conv", "recurrent", "positions", "routing"):
            if channel in stored:
                return "state" if channel == "recurrent" else channel
        ops = {type(op) for branch in self.layers[layer].branches for op in branch}
        return "mask" if ops == {Attention} else "output"

    def _left_over(self, channel, layer, first) -> dict[str, str]:
        """Return the channels that nothing enters by, as far as layers and contents tell."""
        entered = [self.layers[at] for at in first.values() if 0 <= at < len(self.layers)]
        states = {}
        for name, op in CHANNELS.items() if layer is not None else ():
            if self._has(name) and name == channel:
                states[name] = "off"
            elif self._has(name) and (not reads(entered, op) or (name == "conv" and channel == "state")):
                states[name] = "clean"
        return states

    # By shape and by dose

    def _by_shape(self) -> bool | None:
        """Return whether the tree is right with one more row, or None for a pass that is no tree's."""
        if self.chain or self.wiring != FORKED:
            return None
        free = next(token for token in range(len(self.tree) + 2) if token not in self.tree.tokens)
        wider = DraftTree((*self.tree.tokens, free), (*self.tree.parents, 0))
        logits = self.engine.verify(self.prefix, wider, FORKED).logits[: len(self.tree)]
        return not beyond(judge(measure(self.reference, logits), self.floor))

    def _dose(self) -> dict[str, dict]:
        """Return what the error of the nodes beyond their floor goes with."""
        errors = self.differences.max_abs
        nodes = [node for node in self.bad if np.isfinite(errors[node])]
        if len(nodes) < FEWEST:
            return {}
        from scipy.stats import spearmanr

        ranks = {child: rank for kids in self.tree.children for rank, child in enumerate(kids)}
        drivers = {
            "leaked count": [self.tree.leaked[node] for node in nodes],
            "depth": [self.tree.depth[node] for node in nodes],
            "sibling rank": [ranks.get(node, 0) for node in nodes],
        }
        tests = {name: spearmanr(values, errors[nodes]) for name, values in drivers.items() if len(set(values)) > 1}
        return {
            name: {"rho": float(test.statistic), "p": float(test.pvalue), "nodes": len(nodes)}
            for name, test in tests.items()
            if np.isfinite(test.statistic)
        }

    # In words

    def _text(self, entry: Entry, growth, channels, explained, shape, dose) -> str:
        if entry.layer is None:
            where = "enters at a layer that is not seen (the engine shows no layer outputs)"
            where += f", by {_spoken(entry.channel)}," if entry.channel else ""
        elif entry.channel == "input":
            where = "enters before the first layer: the rows are not the tree's tokens,"
        elif entry.channel == "head":
            where = "enters behind the last layer (head)"
        elif entry.channel in ("mask", "positions") and not reads(
            self.layers[entry.layer : entry.layer + 1], Attention
        ):
            # The layer that it enters at stays within a coarse floor; what it feeds does not.
            where = f"is first beyond noise at layer {entry.layer} ({_words(entry.kind)}) and enters by "
            where += f"{_spoken(entry.channel)}, so at an attention layer before it,"
        else:
            where = f"enters at layer {entry.layer} ({_words(entry.kind)}, {_spoken(entry.channel)})"
        words = [f"{where} at node {entry.node}{self._read(entry)}"]
        if entry.node in growth and entry.layer is not None and 0 <= entry.layer < len(self.layers) - 1:
            verb = "grows" if growth[entry.node] >= 1 else "fades to"
            words.append(f"{verb} {growth[entry.node]:.2g} x by layer {len(self.layers) - 1}")
        clean = [channel for channel, state in channels.items() if state == "clean"]
        attention = [channel for channel in ("mask", "positions") if self._has(channel)]
        if attention and set(attention) <= set(clean):
            clean = [channel for channel in clean if channel not in attention] + ["attention"]
        words += [f"{_spoken(channel)} clean" for channel in clean]
        if explained is not None and self.wiring in (None, FORKED):
            words.append(f"the logits are those of {explained}")
        if shape:
            words.append("right with one more row: it belongs to this size (a captured step, a dispatch by size)")
        for name, figures in dose.items():
            if abs(figures["rho"]) >= TREND and figures["p"] < 0.05:
                verb = "grows" if figures["rho"] > 0 else "falls"
                words.append(f"the error {verb} with {name} (rank correlation {figures['rho']:.2f})")
        return "; ".join(words)

    def _read(self, entry: Entry) -> str:
        if entry.source is None:
            return ""
        whose = {-1: "the committed text", BLANK: "zeros"}.get(entry.source, f"node {entry.source}")
        match entry.channel.partition(" ")[0]:
            case "state":
                return f", whose state came from {whose}"
            case "conv":
                return f", whose window came from {whose}"
            case "mask":
                sees = "sees" if entry.source not in self.tree.path(entry.node) else "does not see"
                return f", which {sees} node {entry.source}"
            case "positions":
                return f", which stands at {entry.source} instead of {self.tree.depth[entry.node]}"
        return ""


def _edge(name: str, channels: Sequence[str], node: int, source: int) -> Wiring:
    """Return the right wiring but for one node of these channels."""
    return Wiring(name, **{each: lambda tree, each=each: with_edge(tree, each, node, source) for each in channels})


def _source(plan: Plan, right: Plan, channel: str, node: int) -> int | None:
    """Return what `node` reads in `channel`, if it should read something else, or None."""
    mine, theirs = getattr(plan, channel)[node], getattr(right, channel)[node]
    if channel == "mask":
        apart = np.flatnonzero(mine != theirs)
        return int(apart[0]) if len(apart) else None
    return int(mine) if mine != theirs else None


def _apart(right: torch.Tensor, rows: torch.Tensor) -> np.ndarray:
    """Return the largest |difference| of each row; inf where it is not finite."""
    difference = (right.double() - rows.double()).abs().amax(-1)
    return torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf).cpu().numpy()


def _words(kind: str | None) -> str:
    return (kind or "").replace("_", " ")


def _spoken(channel: str | None) -> str:
    return (channel or "").replace("mask", "attention mask").replace("keys", "attention")
