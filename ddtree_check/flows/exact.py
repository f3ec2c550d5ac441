"""Run the exact checks of one tree on an engine: which tokens and rows move which rows, bit for bit.

Needs `prefill` and `verify` alone; `watch`, `batches`, `commit` and `contents` say more where an engine has them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ..base.errors import Unsupported
from ..engines.checked import complete
from ..judge.commit import flat_contents
from ..judge.differences import digests
from ..judge.exact import (
    CERTIFIED,
    CHANCE,
    MOVED,
    OPEN,
    Change,
    Claim,
    Edge,
    Exact,
    Law,
    Node,
    Tally,
    chance,
    differ,
    foreign,
    keeps,
    law,
)
from ..judge.rule import EXACT, Rule
from ..model.wiring import FORKED, Wiring, reached
from ..tree.draft_tree import DraftTree
from ..tree.paths import leaf_paths
from ..tree.variants import front_chain, only, other_order, retoken

PASSES = 8  # of influence, with `leaves`: at 65 rows they separate 94 % of the pairs, and a certified row reads none
NULL = 1  # chains, the longest, whose other tokens are changed before anything has moved
DRAWS = 4  # of tokens, for nodes that do not equal their chain
PATHS = 4  # chains in one draw
SOON = 8  # draws elsewhere after which a node that is mostly off there too is given up
MOST = 40  # draws to exclude chance by
ORDERS = 2  # other orders in one of these draws
TRIES = 16  # random orders of which one is chosen
LAYERS = 6  # draws that say in which layer a row leaves its chain
LOOKED = 3  # nodes that are looked into further, with `leaves`

Digests = Sequence[int | None]


def exact_run(
    engine,
    prefix,
    tree: DraftTree,
    *,
    control: Wiring | None = None,
    rows: Digests | None = None,
    control_rows: Digests | None = None,
    chains: Mapping[int, int | None] | None = None,
    prompt: Sequence[int] = (),
    how: str = "leaves",
    precise: bool = False,
    seed: int = 0,
) -> Exact:
    """Return what the exact checks say of one tree behind `prefix`.

    control: the wiring that must move exactly at the leak law's nodes; None for no control.
    rows, control_rows: `compare.digests` [n] of the forked pass and of the control's, where they were made already.
    chains: digests by node of the chain control, each path as a forked chain of the tree's width.
    prompt: tokens behind which `prefix` stands; without them requests of a batch are not varied.
    how: `leaves` bounds the passes; `all` makes one more a leaf, looks for every edge, and varies orders, requests and
    commits. precise: floors find every fault in this dtype, and rounding seldom leaves a row equal, so that `leaves`
    compares with `chains` and draws no more. Raises what the engine raises, and Unsupported for a vocabulary smaller
    than a node's children need.
    """
    return _Run(complete(engine), prefix, tree, rows, how, seed, precise).run(control, control_rows, chains, prompt)


class _Run:
    def __init__(self, engine, prefix, tree: DraftTree, rows: Digests | None, how: str, seed: int, precise: bool):
        self.engine, self.prefix, self.tree, self.all = engine, prefix, tree, how == "all"
        self.draws = 0 if precise and not self.all else DRAWS - 1
        self.rng = random.Random(f"{seed} {tree.tokens} {tree.parents}")
        self.passes: Counter[str] = Counter()
        self.began = time.perf_counter()
        self.paths = [path.nodes for path in leaf_paths(tree)]
        self.base = self.rows("tree", tree) if rows is None else rows
        self.looked = None if self.all else LOOKED
        self.null, self.null_rows = Tally(), {}  # rows of chains that moved where they must not
        self.equal = [Tally()] * len(tree)  # draws in which a node's row was its chain's
        self.moved_elsewhere: dict[int, tuple] = {}

    # Passes

    def rows(self, what: str, tree: DraftTree, wiring: Wiring = FORKED) -> Digests:
        return digests(self.verify(what, tree, wiring).logits)

    def verify(self, what: str, tree: DraftTree, wiring: Wiring = FORKED):
        self.passes[what] += 1
        return self.engine.verify(self.prefix, tree, wiring)

    def retoken(self, kept: Iterable[int] = ()) -> DraftTree:
        return retoken(self.tree, kept, self.engine.vocab_size, self.rng)

    def paths_to(self, nodes: Iterable[int], limit: int | None = PATHS) -> list[tuple[int, ...]]:
        """Return leaf paths that hold these nodes, those that hold most first; `limit` of them unless all is asked."""
        left, paths = set(nodes), []
        while left and (self.all or limit is None or len(paths) < limit):
            paths.append(max(self.paths, key=lambda path: len(left & set(path))))
            left -= set(paths[-1])
        return paths

    # The whole

    def run(self, control: Wiring | None, control_rows, chains, prompt) -> Exact:
        tree, n = self.tree, len(self.tree)
        wanted = foreign(tree, after=self.all)
        sets, separated = keeps(tree, wanted, self.rng, None if self.all else PASSES)
        if self.all:
            sets += [frozenset(path) for path in self.paths]
        changes, changed = self.influence("influence", FORKED, self.base, sets)
        for path in sorted(self.paths, key=len)[-NULL:]:
            self.add_null(path)
            self.add_null(path)
        moved = frozenset().union(*(change.moved for change in changes)) if changes else frozenset()
        counts = self.confirm(changes) if moved and not self.null.count else {}
        obeyed = None if control is None else self.control(control, control_rows, sets)
        beyond = {node for node, tally in counts.items() if chance(tally, self.null) < CHANCE}
        self.relocate(chains, beyond)
        # A place that explains what differs would hide a foreign token that the passes above left as it was.
        placed = [node for node, (*_, guilty) in self.moved_elsewhere.items() if not guilty and node not in moved]
        changes_there, trees = self.influence(
            "influence", FORKED, self.base, [frozenset(tree.path(node)) for node in placed]
        )
        if any(change.moved for change in changes_there) and not self.null.count:
            counts |= self.confirm(changes_there)
            changes, changed = changes + changes_there, changed + trees
            moved |= frozenset().union(*(change.moved for change in changes_there))
            beyond = {node for node, tally in counts.items() if chance(tally, self.null) < CHANCE}
        again = self.rows("repeat", tree)
        strays = [node for node in range(n) if differ(again[node], self.base[node])]
        others: list[str] = []
        reason = self.unclaimed(strays, others)
        guilty = moved if beyond and reason is None else frozenset()
        reads = self.edges(guilty, changes, changed)
        skipped = self.vary(prompt, others) if self.all and reason is None else {}
        suspects = {node for node in range(n) if not self.equal[node].count}
        nodes = tuple(self.node(node, guilty, moved, counts, reads, suspects) for node in range(n))
        displaced = [node for node in range(n) if tree.depth[node] != node]
        return Exact(
            nodes=nodes,
            influence=Claim(self.null, reason),
            relocation=self.relocation_claim(nodes, displaced),
            pairs=Tally(int((separated & foreign(tree)).sum()), int(foreign(tree).sum())),
            law=obeyed if reason is None else None,
            others=tuple(others),
            skipped=skipped,
            passes=dict(self.passes),
            seconds=time.perf_counter() - self.began,
        )

    def node(self, node: int, guilty, moved, counts, reads, suspects) -> Node:
        evidence = {"equal": self.equal[node], "moved": counts.get(node, Tally())}
        ancestors = self.tree.path(node)[:-1]
        if node in guilty:
            through = next((above for above in reversed(ancestors) if above in guilty), None)
            return Node(MOVED, **evidence, reads=reads.get(node, ()), through=through if node not in reads else None)
        if node in moved and not self.null.count:
            return Node(OPEN, **evidence)
        if node not in suspects:
            return Node(CERTIFIED, **evidence)
        *tallies, layer, kind, beyond = self.moved_elsewhere.get(node, (Tally(), Tally(), None, None, False))
        evidence |= dict(zip(("elsewhere", "others"), tallies, strict=True))
        blamed = [above for above in ancestors if above in self.moved_elsewhere and self.moved_elsewhere[above][-1]]
        if beyond or blamed:
            return Node(MOVED, **evidence, through=None if beyond else blamed[-1], layer=layer, kind=kind)
        return Node(OPEN, **evidence)

    def unclaimed(self, strays: list[int], others: list[str]) -> str | None:
        """Return why influence says nothing on this engine, or None; what ran before is a finding in `others`."""
        if strays:
            twice = self.rows("repeat", self.tree), self.rows("repeat", self.tree)
            apart = sum(map(differ, *twice))
            if apart:
                return f"{apart} of {len(self.tree)} rows differ where a pass is made twice"
            others.append(f"what ran before moves {len(strays)} of {len(self.tree)} rows, first node {strays[0]}")
        if self.null.count:
            return f"{self.null} rows of chains move where only tokens behind them change"
        return None

    # Influence

    def influence(self, what: str, wiring: Wiring, base: Digests, sets) -> tuple[list[Change], list[DraftTree]]:
        changes, trees = [], []
        for kept in sets:
            trees.append(self.retoken(kept))
            rows = self.rows(what, trees[-1], wiring)
            changes.append(Change(kept, frozenset(node for node in kept if differ(rows[node], base[node]))))
        return changes, trees

    def add_null(self, path: tuple[int, ...]) -> None:
        """Count the rows of a path as a chain that move where only the tokens behind it change since the last time."""
        rows = self.rows("null", front_chain(self.retoken(path), path))[: len(path)]
        if path in self.null_rows:
            self.null += Tally(sum(map(differ, rows, self.null_rows[path])), len(path))
        self.null_rows[path] = rows

    def confirm(self, changes: Sequence[Change], wiring: Wiring = FORKED) -> dict[int, Tally]:
        """Return how often nodes that moved do so again, from one draw of foreign tokens to the next.

        Their paths as chains get as many draws, whose rows must not move: an engine whose rows meet, as those of one
        expert do, is found out by them.
        """
        counts: dict[int, Tally] = {}
        for change in sorted(changes, key=lambda change: -len(change.moved))[: self.looked]:
            left = set(change.moved) - counts.keys()
            counts |= dict.fromkeys(left, Tally())
            paths, before = self.paths_to(left), None
            for draw in range(MOST if left else 0):
                self.add_null(paths[draw // 2 % len(paths)])
                rows = self.rows("confirm", self.retoken(change.kept), wiring)
                for node in left if before else ():
                    counts[node] += Tally(int(differ(rows[node], before[node])), 1)
                before = rows
                if self.null.count or all(chance(counts[node], self.null) < CHANCE for node in left):
                    break
        return counts

    def control(self, wiring: Wiring, rows: Digests | None, sets: Sequence[frozenset[int]]) -> Law | None:
        """Return what the control's passes show; each node is kept at least once where it must move, if it must."""
        reach, n = reached(wiring.plan(self.tree), self.engine.layers), len(self.tree)
        astray = {node for node in range(n) if (reach[node] & foreign(self.tree)[node]).any()}

        def served(kept: frozenset[int]) -> set[int]:
            changed = [node for node in range(n) if node not in kept]
            return {node for node in kept if node not in astray or reach[node, changed].any()}

        left, chosen = set(range(n)), []
        candidates = [*sets, *map(frozenset, self.paths)]
        while left:
            best = max(candidates, key=lambda kept: len(left & served(kept)))
            if not left & served(best):
                break
            chosen.append(best)
            left -= served(best)
        if rows is None:
            rows = self.rows("control", self.tree, wiring)
        changes, _ = self.influence("control", wiring, rows, chosen)
        obeyed = law(changes, reach)
        if obeyed.outside and not self.null.count:
            counts = self.confirm([Change(c.kept, c.moved & obeyed.outside) for c in changes], wiring)
            beyond = frozenset(node for node, tally in counts.items() if chance(tally, self.null) < CHANCE)
            obeyed = replace(obeyed, outside=beyond)
        return obeyed

    # Relocation

    def relocate(self, chains: Mapping[int, int | None] | None, guilty: set[int]) -> None:
        """Count how often each node equals its chain, until each did; nodes below `guilty` ones are as they are."""
        tree, n = self.tree, len(self.tree)
        chains = dict(chains or {})
        for path in self.paths_to(set(range(n)) - chains.keys(), None) if self.draws or not chains else ():
            chains |= zip(path, self.rows("relocation", front_chain(tree, path)), strict=False)
        self.chains = chains
        for node, row in chains.items():
            self.equal[node] += Tally(int(not differ(row, self.base[node])), 1)

        def suspects() -> set[int]:
            below = {node for node in range(n) if guilty & set(tree.path(node))}
            return {node for node in range(n) if not self.equal[node].count} - below

        for _ in range(self.draws):
            if not suspects():
                return
            same = self.draw(suspects())
            displaced = [equal for node, equal in same.items() if tree.depth[node] != node]
            if not self.all and 2 * sum(displaced) < len(displaced):
                break
        while left := suspects() if self.draws else set():
            origins = [node for node in sorted(left) if not left & set(tree.path(node)[:-1])]
            looked = [node for node in origins if node in self.moved_elsewhere]
            room = None if self.all else max(0, LOOKED - len(looked))
            if not (further := [node for node in origins if node not in looked][:room]):
                return
            self.elsewhere(further)

    def draw(self, nodes: Iterable[int]) -> dict[int, bool]:
        """Return which rows on paths to these nodes equal their chains', with new tokens everywhere."""
        fresh, same = self.retoken(), {}
        here = self.rows("relocation", fresh)
        for path in self.paths_to(nodes):
            chain = self.rows("relocation", front_chain(fresh, path))
            same |= {node: not differ(here[node], row) for node, row in zip(path, chain, strict=False)}
        for node, equal in same.items():
            self.equal[node] += Tally(int(equal), 1)
        return same

    def elsewhere(self, nodes: Sequence[int]) -> None:
        """Tell nodes whose row is wrong from those whose row any other order, or the row's own place, would move.

        A draw makes the tree, the tree in random orders, and the paths as chains. A node that never equals its chain
        at its own place is a defect once chance is excluded by how often it does at others. Where other nodes in its
        place do not equal theirs either, the place may be computed by other instructions, as the last row of a tile
        is: then it is a defect only if more than rounding enters.
        """
        tree, left, entries = self.tree, {node: (Tally(), Tally(), Tally()) for node in nodes}, {}
        for _ in range(MOST):
            if not left:
                return
            fresh = self.retoken()
            here, there = self.rows("elsewhere", fresh), []
            for _ in range(ORDERS):
                orders = [other_order(fresh, self.rng) for _ in range(TRIES)]
                moved, old = max(orders, key=lambda order: sum(self.apart_from(node, order[1]) for node in left))
                there.append((self.rows("elsewhere", moved), old))
            chains = {}
            for path in self.paths_to(left.keys() | {old[node] for _, old in there for node in left}):
                chains |= zip(path, self.rows("elsewhere", front_chain(fresh, path)), strict=False)
            for node, (at_home, away, others) in left.items():
                for rows, old in there:
                    if self.apart_from(node, old) and node in chains:
                        away += Tally(int(differ(rows[old.index(node)], chains[node])), 1)
                    if (other := old[node]) != node and other in chains and tree.depth[other] != node:
                        others += Tally(int(differ(rows[node], chains[other])), 1)
                if node in chains:
                    at_home += Tally(int(differ(here[node], chains[node])), 1)
                    self.equal[node] += Tally(int(not differ(here[node], chains[node])), 1)
                left[node] = at_home, away, others
            for node, (at_home, away, others) in list(left.items()):
                beyond, kin = (chance(at_home, tally) < CHANCE for tally in (away, others))
                away_often, others_often = (tally.of >= SOON and 2 * tally.count > tally.of for tally in (away, others))
                kin = kin or tree.depth[node] == node  # its chain stands in the same place
                if node not in entries and (others_often or (beyond and kin)):
                    entries[node] = self.entry(node)
                placed = others_often and _rounds(entries[node])
                guilty = beyond and node in entries and not placed
                if guilty or placed or away_often or at_home.count < at_home.of:
                    layer, kind, _ = entries[node] if guilty else (None, None, None)
                    self.moved_elsewhere[node] = _equal(away), _equal(others), layer, kind, guilty
                    del left[node]
        for node, (_, away, others) in left.items():
            self.moved_elsewhere[node] = _equal(away), _equal(others), None, None, False

    def apart_from(self, node: int, old: Sequence[int]) -> bool:
        """Return whether an order puts a node behind other rows, and nothing of its path in the row that it had."""
        return old.index(node) != self.tree.depth[node] and old[node] not in self.tree.path(node)

    def relocation_claim(self, nodes: Sequence[Node], displaced: Sequence[int]) -> Claim:
        figure = sum((self.equal[node] for node in displaced), Tally())
        left = [node for node in nodes if node.value == OPEN and not node.moved.count]
        if not left:
            return Claim(figure)
        looked = sum((node.elsewhere for node in left), Tally())
        text = f"rows behind other rows equal their chains in {figure} draws"
        return Claim(figure, text + (f", and in another order in {looked}" if looked.of else ""))

    # Where it enters

    def edges(self, guilty: frozenset[int], changes: Sequence[Change], trees: Sequence[DraftTree]) -> dict:
        """Return the edges of moved nodes that no moved ancestor explains; with `all`, of every moved node."""
        origins = [node for node in sorted(guilty) if self.all or not guilty & set(self.tree.path(node)[:-1])]
        edges = {}
        for node in origins[: self.looked]:
            place = next(place for place, change in enumerate(changes) if node in change.moved)
            suspects = set(range(len(self.tree))) - changes[place].kept
            for change in changes:
                if node in change.kept:  # a foreign node that it reads was changed wherever it moved, and nowhere else
                    others = set(range(len(self.tree))) - change.kept
                    narrower = suspects & others if node in change.moved else suspects - others
                    suspects = narrower or suspects
            edges[node] = self.edges_of(node, trees[place], suspects, set(range(len(self.tree))) - changes[place].kept)
        return edges

    def moves(self, node: int, changed: DraftTree, nodes: Iterable[int]) -> bool:
        rows = self.rows("edges", only(self.tree, changed, nodes))
        return differ(rows[node], self.base[node])

    def edges_of(self, node: int, changed: DraftTree, suspects: set[int], every: set[int]) -> tuple[Edge, ...]:
        """Return what a node reads: the first foreign node that it finds, or every one with `all`."""
        if self.all:
            sources = [source for source in sorted(every) if self.moves(node, changed, [source])]
            return tuple(self.edge(node, changed, source) for source in sources) or (Edge(None),)
        near = sorted(suspects, key=lambda source: (abs(node - source), source))
        if not self.moves(node, changed, near):
            near = sorted(every, key=lambda source: (abs(node - source), source))
        while len(near) > 1:
            half = (len(near) + 1) // 2
            for part in (near[:half], near[half:]):
                if self.moves(node, changed, part):
                    near = part
                    break
            else:
                return (Edge(None),)
        return (self.edge(node, changed, near[0], more=self.moves(node, changed, every - {near[0]})),)

    def edge(self, node: int, changed: DraftTree, source: int, *, more: bool = False) -> Edge:
        layer, kind, _ = self.first_layer((self.tree, node), (only(self.tree, changed, [source]), node))
        return Edge(source, more, layer, kind)

    def first_layer(self, *sides: tuple[DraftTree, int]) -> tuple[int | None, str | None, float]:
        """Return the first layer whose output differs between a row of one tree and one of another, its kind, and by
        how many eps of the output's norm. -1: what goes into the first one."""
        layers = range(-1, len(self.engine.layers))
        outputs = []
        try:
            for tree, row in sides:
                with self.engine.watch(layers) as watched:
                    self.rows("layers", tree)
                outputs.append({layer: x[row].clone() for layer, x in watched.outputs.items()})
        except Unsupported:  # without it, the edge alone is said
            return None, None, 0.0
        for layer in layers:
            if layer in outputs[0] and not torch.equal(outputs[0][layer], outputs[1][layer]):
                kind = self.engine.layers[layer].kind if layer >= 0 else None
                return layer, kind, _apart(outputs[0][layer], outputs[1][layer])
        return None, None, 0.0

    def entry(self, node: int) -> tuple[int | None, str | None, float]:
        """Return the first layer whose output differs from the chain's, its kind, and by how many eps.

        It is the middle one of a few draws; no layer where half of them or more round.
        """
        path, entries = self.tree.path(node), []
        for _ in range(LAYERS):
            fresh = self.retoken()
            entries.append(self.first_layer((fresh, node), (front_chain(fresh, path), len(path) - 1)))
            if 2 * sum(map(_rounds, entries)) >= LAYERS:
                return None, None, 0.0
        return sorted(entries, key=lambda entry: entry[2])[LAYERS // 2]

    # All else that must not matter

    def vary(self, prompt: Sequence[int], others: list[str]) -> dict[str, str]:
        """Add a sentence to `others` for each thing that matters and must not; return what could not be varied, why."""
        skipped = {}
        checks = {"orders": self.orders, "requests": lambda: self.requests(prompt), "commits": self.commits}
        for name, check in checks.items():
            try:
                others += check()
            except Unsupported as error:
                skipped[name] = str(error)
        return skipped

    def orders(self) -> list[str]:
        """Return a finding for each order of siblings in which the tree is not right."""
        last_first = _last_child_first(self.tree)
        findings = []
        for name, order in (("breadth first", "breadth"), ("depth first", "depth"), ("last child first", last_first)):
            tree, old = self.tree.reordered(order)
            if old == tuple(range(len(old))):
                continue
            chains = {new: self.chains[node] for new, node in enumerate(old) if node in self.chains}
            run = _Run(self.engine, self.prefix, tree, None, "leaves", self.rng.randrange(2**32), not self.draws)
            exact = run.run(None, None, chains, ())
            self.passes["orders"] += sum(exact.passes.values())
            if exact.verdict == "fail":
                findings.append(f"with the tree {name}, {exact.reason}")
        return findings

    def requests(self, prompt: Sequence[int]) -> list[str]:
        """Return a finding for each form of a batch in which another request's tokens move the rows of this one."""
        batches = self.engine.batches()
        if isinstance(batches, str):
            raise Unsupported(batches)
        if not prompt:
            raise Unsupported("no prompt is given that a batch could start from")
        findings = []
        for padding in ("left", "right"):
            for idle in (0, 1):
                form = {"padding": padding, "rows": len(self.tree) + 2, "idle": idle}
                first, second = (self.in_batch(batches, prompt, form) for _ in range(2))
                moved = [node for node in range(len(self.tree)) if differ(first[node], second[node])]
                if moved:
                    findings.append(
                        f"in a batch padded on the {padding}{' with an idle request' * idle}, another request's tokens "
                        f"move {len(moved)} rows, first node {moved[0]}"
                    )
        return findings

    def in_batch(self, batches, prompt: Sequence[int], form: dict) -> Digests:
        """Return the rows of the tree behind one request, in a pass beside another one of random tokens."""
        self.passes["requests"] += 1
        size = self.engine.vocab_size
        other = [self.rng.randrange(size) for _ in range(len(prompt) // 2 + 1)]
        beside = self.retoken().with_root(self.rng.randrange(size))
        prefixes = [self.prefix, self.engine.prefill(other)]
        return digests(batches.verify(prefixes, [self.tree, beside], FORKED, **form)[0].logits)

    def commits(self) -> list[str]:
        """Return a finding for each path whose commit is never that of its chain, though all its rows are."""
        apart: dict[tuple[int, ...], list[set]] = {path: [] for path in self.paths}
        left, findings = set(self.paths), []
        for _ in range(2 * DRAWS):
            fresh = self.retoken()
            verified = self.verify("commits", fresh) if left else None
            for path in sorted(left):
                chain = self.verify("commits", front_chain(fresh, path))
                pairs = zip(digests(verified.logits[list(path)]), digests(chain.logits[: len(path)]), strict=True)
                if any(differ(*pair) for pair in pairs):
                    continue
                apart[path].append(self.apart(verified, path[-1], chain, len(path) - 1))
                if not apart[path][-1]:
                    left.discard(path)
                elif len(apart[path]) == DRAWS:
                    left.discard(path)
                    always = sorted(set.intersection(*apart[path]))
                    where = f", first {always[0][1]} of layer {always[0][0]}" if always else ""
                    findings.append(f"the commit of path {'-'.join(map(str, path))} is never that of its chain{where}")
        return findings

    def apart(self, *sides) -> set[tuple[int, str]]:
        """Return the layers and channels in which two commits differ. sides: a pass and a node, twice."""
        mine, chain = (
            flat_contents(self.engine.contents(self.engine.commit(verified, node)))
            for verified, node in zip(sides[::2], sides[1::2], strict=True)
        )
        return {part for part, x in chain.items() if part not in mine or _differing(mine[part], x)}


def _differing(stored: torch.Tensor, chain: torch.Tensor) -> bool:
    """Return whether a channel of a commit is not its chain's: in bits, or beyond rounding in float32 and float64.

    A state of float32 behind rows of bf16 keeps the order of its sums, which rounds away in the rows.
    """
    if torch.equal(stored, chain):
        return False
    name = str(chain.dtype).removeprefix("torch.")
    if stored.shape != chain.shape or stored.dtype != chain.dtype or name not in EXACT:
        return True
    return not bool((stored - chain).abs().max() <= Rule().rounding[name] * chain.std())


def _apart(row: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two outputs of a layer are apart, in eps of their dtype by the norm of `other`."""
    row, wide = row.double(), other.double()
    return float((row - wide).norm() / wide.norm()) / torch.finfo(other.dtype).eps


def _rounds(entry: tuple[int | None, str | None, float]) -> bool:
    """Return whether what enters a row is no more than what other instructions in its place make.

    Those round otherwise in whichever layer it shows first. Measured in bf16, in eps of a layer's output: at most 0.45
    in a first layer and 0.17 in a later one (CPU; SGLang's row 64 of 65 at the 27B shape). One wrong edge: at least 1.7
    in a first layer, and about 0.8 later.
    """
    layer, _, size = entry
    return layer is None or (layer >= 0 and size <= (1.0 if layer == 0 else 0.2))


def _equal(differing: Tally) -> Tally:
    return Tally(differing.of - differing.count, differing.of)


def _last_child_first(tree: DraftTree) -> list[int]:
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack.extend(tree.children[order[-1]])
    return order
