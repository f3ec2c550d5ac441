"""Where a fault enters: by channel, by layer, by kind and by dose. Extra passes, made only once a verdict is red.

Four sources, each used where the engine has it:
  layers     what every layer puts out (`Engine.watch`) against plain decoding, with a floor per layer and node
  contents   what the pass would store at the node where it enters, channel by channel
  toggles    passes under other wirings: one that gives the very logits that failed says which channel read what
  shape      the same tree with one more row: if that is right, the fault belongs to a size, not to the tree
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..base.errors import Unsupported
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

KEPT = 64 << 20  # bytes of layer outputs held at a time; more layers are seen in several turns
CHANNELS = {"state": State, "conv": Conv, "mask": Attention, "positions": Attention}
EDGES = 24  # single wrong edges that are tried
TREND = 0.5  # rank correlation from which on a sentence mentions it
FEWEST = 5  # nodes that a rank correlation needs


def attribute(
    engine, prefix, tree: DraftTree, mode: str, wiring: Wiring | None, reference: torch.Tensor, floor: np.ndarray,
    rule: Rule, dtype: str,
) -> Finding:  # fmt: skip
    """Looks for where `mode` (its wiring; None for the engine's own pass along chains) leaves plain decoding.

    reference: logits [n, vocabulary] of plain decoding; floor [n] as in the verdict.
    """
    return _Hunt(engine, prefix, tree, mode, wiring, reference, floor, rule, dtype).finding()


def attribute_commit(accept, mode: str, layers: Sequence[Layer]) -> Finding:
    """The same for a commit (a `commit.Accept`) that failed: what it stored says it all, so no pass is made."""
    found = accept.modes[mode]
    name = f"commit after {mode}"
    path = "-".join(map(str, accept.path))
    parts = [(part, says) for part, _, says in found.bad]
    named = {_channel(part) for part, _ in parts}
    channels = {
        channel: "off" if channel in named else "clean"
        for channel in ("state", "conv", "keys")
        if channel in named or reads(layers, {"state": State, "conv": Conv, "keys": Attention}[channel])
    }
    if not parts:
        entry = Entry(accept.node, None, None, None)
        text = f"path {path}: what is stored is right, what the next step reads is not"
    else:
        (part, says) = next(((p, s) for p, s in parts if p.layer >= 0), parts[0])
        kind = layers[part.layer].kind if part.layer >= 0 else None
        entry = Entry(accept.node, part.layer, kind, _channel(part))
        where = f"layer {part.layer} ({_words(kind)})" if kind else "the position"
        count = len({p.layer for p, _ in parts if p.layer >= 0})
        text = f"path {path}: enters at {where}: {says}"
        text += f"; {count} layers off" if count > 1 else ""
    text += "".join(f"; {_said(channel)} clean" for channel, state in channels.items() if state == "clean")
    return Finding(name, len(found.bad), entry, channels=channels, text=text)


def _channel(part: Part) -> str:
    kind = part.channel.partition(".")[0]
    return {"recurrent": "state", "values": "keys"}.get(kind, kind)


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
        self.found = measure(reference, self.logits)
        self.bad = beyond(judge(self.found, floor))
        self.profile: tuple[float | None, ...] = ()

    def _run(self) -> tuple[Any, torch.Tensor]:
        """The pass that failed, once more; of chains every leaf path, without a commit."""
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
        if not self.bad:
            return Finding(self.mode, 0, None, text="no node is beyond its floor")
        first, growth, routed = self._by_layer()
        entry_node, layer = self._enters(first)
        stored = _or_nothing(lambda: self._by_contents(entry_node, layer), set())
        explained, channels, source = self._by_toggle(entry_node, self._suspects(stored, layer))
        channel = self._channel(explained, channels, stored, layer, entry_node, routed)
        if explained is None:
            channels = self._left_over(channel, stored, layer, first)
        kind = None
        if layer is not None:
            kind = "input" if layer < 0 else "head" if layer == len(self.layers) else self.layers[layer].kind
        entry = Entry(entry_node, layer, kind, channel, source)
        shape = _or_nothing(self._by_shape, None)
        dose = self._dose()
        text = self._text(entry, growth, channels, explained, shape, dose)
        return Finding(
            self.mode, len(self.bad), entry, first, growth, channels, explained, shape, dose, text, self.profile
        )

    # By layer

    def _by_layer(self):
        """First layer beyond its floor by bad node, growth by node, and the nodes sent to other experts by layer."""
        error, over, routed = [], [], {}
        for group in _or_nothing(lambda: list(self._groups()), ()):
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

    def _groups(self) -> Iterator[range]:
        with self.engine.watch([-1]) as seen:
            self.engine.step(self.prefix, self.tree.tokens[0])
        row = seen.outputs[-1]
        held = 2 * len(self.tree) * row.shape[-1] * row.element_size()
        many = max(1, KEPT // held)
        last = len(self.layers)
        for start in range(-1, last, many):
            yield range(start, min(start + many, last))

    def _group(self, group: range) -> dict[int, tuple[np.ndarray, np.ndarray, set[int]]]:
        n = len(self.tree)
        right: dict[int, list[torch.Tensor]] = {layer: [None] * n for layer in group}
        routes: dict[tuple[int, int], torch.Tensor] = {}
        with self.engine.watch(group) as seen:
            for node, *_ in walk(self.engine, self.prefix, self.tree):
                for layer in group:
                    right[layer][node] = seen.outputs[layer][0]
                    if layer in seen.routes:
                        routes[layer, node] = seen.routes[layer][0]
            rights = {layer: torch.stack(rows) for layer, rows in right.items()}
            right.clear()
            error = {layer: np.zeros(n) for layer in group}
            control = {layer: np.zeros(n) for layer in group}
            moved: dict[int, set[int]] = {layer: set() for layer in group}

            def compare(found: dict, nodes: Sequence[int], places: Sequence[int]) -> None:
                for layer in group:
                    apart = _apart(rights[layer][list(nodes)], seen.outputs[layer][list(places)])
                    found[layer][list(nodes)] = np.maximum(found[layer][list(nodes)], apart)

            def compare_routes(nodes: Sequence[int], places: Sequence[int]) -> None:
                for layer in seen.routes:
                    for node, place in zip(nodes, places, strict=True):
                        mine, theirs = seen.routes[layer][place], routes[layer, node]
                        if not torch.equal(mine.sort().values, theirs.sort().values):
                            moved[layer].add(node)

            if not self.chain:
                self.engine.verify(self.prefix, self.tree, self.wiring)
                compare(error, range(n), range(n))
                compare_routes(range(n), range(n))
            for path in leaf_paths(self.tree):
                nodes = [path.nodes[place] for place in path.owned]
                if self.chain:
                    self.engine.verify(self.prefix, padded_chain(self.tree, path.nodes, n), None)
                    compare(error, nodes, path.owned)
                    compare_routes(nodes, path.owned)
                    continue
                for wiring in (None, FORKED):
                    if self._control(path.nodes, path.owned, wiring) is not None:
                        compare(control, nodes, path.owned)
        wide = getattr(torch, self.dtype)
        found = {}
        for layer in group:
            rows = rights[layer].double()
            size = rows.square().mean(-1).sqrt().cpu().numpy()
            spacing = ulp(rows.abs().amax(-1), wide).cpu().numpy()
            floor = self.rule.factor * control[layer] + self.rule.ulps * spacing
            if self.chain:  # other kernels than plain decoding, and nothing of their width to measure them by
                floor = np.maximum(floor, self.rule.rounding[self.dtype] * size)
            found[layer] = error[layer] / np.maximum(size, 1e-30), ~(error[layer] <= floor), moved[layer]
        return found

    def _control(self, path: Sequence[int], places: Sequence[int], wiring: Wiring | None):
        """A pass along a chain as wide as the tree, if it is right at these places of the path; else None."""
        if self.engine.supports(wiring) is not None:
            return None
        verified = self.engine.verify(self.prefix, padded_chain(self.tree, path, len(self.tree)), wiring)
        nodes = [path[place] for place in places]
        found = measure(self.reference[nodes], verified.logits[list(places)])
        return None if beyond(judge(found, self.floor[nodes])) else verified

    def _enters(self, first: dict[int, int]) -> tuple[int, int | None]:
        if not first:
            return self.bad[0], None
        node = min(first, key=lambda node: (first[node], node))
        return node, first[node]

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
        """The wiring that gives what failed, the channels by it, and what `node` reads in the one that is off."""
        known = self.wiring not in (None, FORKED)
        for wiring, whole in [(self.wiring, True)] if known else self._candidates(node, suspects):
            if not known and not self._same(wiring, None if whole else node):
                continue
            plan, right = self._plans(wiring, node)
            wrong = {channel for channel in CHANNELS if getattr(wiring, channel) != "tree" and self._has(channel)}
            if whole and not known:  # a channel whose rule changes nothing is as much stuck as the first one found
                wrong |= {
                    channel
                    for channel in CHANNELS
                    if self._has(channel) and channel not in wrong and self._stuck(channel, wrong)
                }
            channels = {channel: "off" if channel in wrong else "clean" for channel in CHANNELS if self._has(channel)}
            (channel, *_) = sorted(wrong, key=list(CHANNELS).index)
            return wiring.name, channels, _source(plan, right, channel, node)
        return None, {}, None

    def _candidates(self, node: int, suspects: Sequence[str]) -> Iterator[tuple[Wiring, bool]]:
        """Wirings to try, and whether each must explain every node or `node` alone."""
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
        """Whether a pass under `wiring` gives the logits that failed, at every node or at one."""
        if self.engine.supports(wiring) is not None:
            return False
        if not self.chain:
            logits, rows = self.engine.verify(self.prefix, self.tree, wiring).logits, slice(None)
        else:
            path = next(path for path in leaf_paths(self.tree) if self.bad[0] in path.nodes)
            chain = padded_chain(self.tree, path.nodes, len(self.tree))
            logits = self.engine.verify(self.prefix, chain, wiring).logits[: len(path.nodes)]
            rows = list(path.nodes)
        apart = measure(self.logits[rows], logits).max_abs
        return bool((apart <= self.floor[rows]).all()) if node is None else bool(apart[node] <= self.floor[node])

    def _stuck(self, channel: str, others: set[str]) -> bool:
        """Whether the rule of this channel changes nothing in the pass that failed, though it must."""
        rules = dict.fromkeys(others, "flat") | {channel: "flat"}
        if self.chain or "flat" not in rules.values():
            return False
        wiring = Wiring("toggle", **{channel: "flat"})
        same = self.engine.verify(self.prefix, self.tree, wiring).logits
        return bool(torch.equal(same, self.logits))

    def _plans(self, wiring: Wiring, node: int) -> tuple[Plan, Plan]:
        return wiring.plan(self.tree), FORKED.plan(self.tree)

    # By what is stored

    def _by_contents(self, node: int, layer: int | None) -> set[str]:
        """Channels of one layer that a commit of `node` would leave wrong."""
        if layer is None or not 0 <= layer < len(self.layers):
            return set()
        path = self.tree.path(node)
        right = self.prefix
        for step in path:
            _, right = self.engine.step(right, self.tree.tokens[step])
        reference = self.engine.contents(right)
        wide, controls = getattr(torch, self.dtype), []
        for wiring in (FORKED,) if self.chain else (FORKED, None):
            if (chain := self._control(path, range(len(path)), wiring)) is not None:
                stored = self.engine.contents(self.engine.commit(chain, len(path) - 1))
                controls.append(compare_contents(reference, stored, wide))
        if self.chain:
            own = self.engine.verify(self.prefix, padded_chain(self.tree, path, len(path)), None)
            stored = self.engine.commit(own, len(path) - 1)
        else:
            stored = self.engine.commit(self.verified, node)
        parts = compare_contents(reference, self.engine.contents(stored), wide)
        controls = controls or [[replace(part, error=0.0) for part in parts]]
        wrong = off(parts, tree_floors(parts, controls, self.rule, self.dtype))
        return {part.kind for part, _ in wrong if part.layer == layer}

    def _channel(self, explained, channels, stored, layer, node, routed) -> str | None:
        if explained is not None:
            wrong = [channel for channel, state in channels.items() if state == "off"]
            return " and ".join(wrong)
        if layer is None:
            return None
        if layer < 0:
            return "input"
        if layer == len(self.layers):
            return "head"
        if "conv" in stored:
            return "conv"
        if "recurrent" in stored:
            return "state"
        if "keys" in stored and "values" not in stored:
            return "positions"
        if node in routed.get(layer, ()):
            return "routing"
        ops = {type(op) for branch in self.layers[layer].branches for op in branch}
        return "mask" if ops == {Attention} else "output"

    def _left_over(self, channel, stored, layer, first) -> dict[str, str]:
        """Channels that nothing enters by, as far as layers and contents tell."""
        if layer is None:
            return {}
        found = {}
        entered = {self.layers[at] for at in first.values() if 0 <= at < len(self.layers)}
        for name, op in CHANNELS.items():
            if not self._has(name):
                continue
            if name == channel:
                found[name] = "off"
            elif not reads(list(entered), op) or (name == "conv" and channel == "state"):
                found[name] = "clean"
        return found

    # By shape and by dose

    def _by_shape(self) -> bool | None:
        if self.chain or self.wiring != FORKED:
            return None
        free = next(token for token in range(len(self.tree) + 2) if token not in self.tree.tokens)
        wider = DraftTree((*self.tree.tokens, free), (*self.tree.parents, 0))
        logits = self.engine.verify(self.prefix, wider, FORKED).logits[: len(self.tree)]
        return not beyond(judge(measure(self.reference, logits), self.floor))

    def _dose(self) -> dict[str, dict]:
        """What the error of the nodes beyond their floor goes with."""
        nodes = [node for node in self.bad if np.isfinite(self.found.max_abs[node])]
        if len(nodes) < FEWEST:
            return {}
        from scipy.stats import spearmanr

        ranks = {child: rank for kids in self.tree.children for rank, child in enumerate(kids)}
        drivers = {
            "leaked count": [self.tree.leaked[node] for node in nodes],
            "depth": [self.tree.depth[node] for node in nodes],
            "sibling rank": [ranks.get(node, 0) for node in nodes],
        }
        found = {}
        for name, values in drivers.items():
            if len(set(values)) > 1:
                result = spearmanr(values, self.found.max_abs[nodes])
                if np.isfinite(result.statistic):
                    found[name] = {"rho": float(result.statistic), "p": float(result.pvalue), "nodes": len(nodes)}
        return found

    # In words

    def _text(self, entry: Entry, growth, channels, explained, shape, dose) -> str:
        if entry.layer is None:
            where = "enters at a layer that is not seen (the engine shows no layer outputs)"
            where += f", by {_said(entry.channel)}," if entry.channel else ""
        elif entry.channel == "input":
            where = "enters before the first layer: the rows are not the tree's tokens,"
        elif entry.channel == "head":
            where = "enters behind the last layer (head)"
        elif entry.channel in ("mask", "positions") and not reads(
            self.layers[entry.layer : entry.layer + 1], Attention
        ):
            # The layer that it enters at stays within a coarse floor; what it feeds does not.
            where = f"is first beyond noise at layer {entry.layer} ({_words(entry.kind)}) and enters by "
            where += f"{_said(entry.channel)}, so at an attention layer before it,"
        else:
            where = f"enters at layer {entry.layer} ({_words(entry.kind)}, {_said(entry.channel)})"
        words = [f"{where} at node {entry.node}{self._read(entry)}"]
        if entry.node in growth and entry.layer is not None and 0 <= entry.layer < len(self.layers) - 1:
            verb = "grows" if growth[entry.node] >= 1 else "fades to"
            words.append(f"{verb} {growth[entry.node]:.2g} x by layer {len(self.layers) - 1}")
        clean = [channel for channel, state in channels.items() if state == "clean"]
        attention = [channel for channel in ("mask", "positions") if self._has(channel)]
        if attention and set(attention) <= set(clean):
            clean = [channel for channel in clean if channel not in attention] + ["attention"]
        words += [f"{_said(channel)} clean" for channel in clean]
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


def _or_nothing(look: Callable, nothing):
    """What a look tells; nothing where the engine refuses the pass that it needs."""
    try:
        return look()
    except Unsupported:
        return nothing


def _edge(name: str, channels: Sequence[str], node: int, source: int) -> Wiring:
    """The right wiring but for one node of these channels."""

    def rule(channel: str):
        return lambda tree: with_edge(tree, channel, node, source)

    return Wiring(name, **{channel: rule(channel) for channel in channels})


def _source(plan: Plan, right: Plan, channel: str, node: int) -> int | None:
    """What `node` reads in `channel`, if that is not what it should read."""
    mine, theirs = getattr(plan, channel)[node], getattr(right, channel)[node]
    if channel == "mask":
        apart = np.flatnonzero(mine != theirs)
        return int(apart[0]) if len(apart) else None
    return int(mine) if mine != theirs else None


def _apart(right: torch.Tensor, found: torch.Tensor) -> np.ndarray:
    """Largest |difference| of each row; inf where it is not finite."""
    difference = (right.double() - found.double()).abs().amax(-1)
    return torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf).cpu().numpy()


def _words(kind: str | None) -> str:
    return (kind or "").replace("_", " ")


def _said(channel: str | None) -> str:
    return (channel or "").replace("mask", "attention mask").replace("keys", "attention")
