"""How often a right engine is called wrong, how often a wrong one is found, and from which dose on.

    python benchmarks/calibration.py alarms --dtype float32,bfloat16
    python benchmarks/calibration.py detection --trials 300
    python benchmarks/calibration.py dose
    python benchmarks/calibration.py edges --dtype bfloat16
    python benchmarks/calibration.py edges --dtype bfloat16 --engine sglang --models qwen3.6-27b --prompts 1 --nodes 16

Nodes and trees of one prompt are not independent: a prompt counts once, and every bound is the exact one (Clopper and
Pearson) with the prompt as its unit. Results are appended to --out as they come, a JSON line each; a run that was
killed goes on after them. `--part 2/8` runs every eighth trial from the second on, for a process of its own with an
--out of its own; `report` reads several, as in `--out 'reports/part*.jsonl'`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin cost more than they bring

import numpy as np
import torch
from parts import add_options, append, written
from scipy.stats import binomtest
from tabulate import tabulate
from transformers import AutoConfig

from ddtree_check.base.resources import fixtures_dir
from ddtree_check.engines.capacity import plan
from ddtree_check.engines.registry import load_engine
from ddtree_check.engines.transformers import loading
from ddtree_check.engines.transformers.engine import TransformersEngine
from ddtree_check.flows.batch import batch_runs
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.exact import exact_run
from ddtree_check.flows.job import quiet_libraries
from ddtree_check.flows.rounds import Rounds, generate
from ddtree_check.judge.commit import flat_contents
from ddtree_check.judge.differences import digests, measure
from ddtree_check.judge.exact import MOVED
from ddtree_check.judge.known import load_known
from ddtree_check.judge.rule import EXACT, Rule
from ddtree_check.judge.sampling.processing import Sampling
from ddtree_check.model.small_shapes import SHAPES
from ddtree_check.model.wiring import FORKED, Wiring
from ddtree_check.selftest import inject
from ddtree_check.selftest.inject import Faulty, Remembered, keeps
from ddtree_check.tree.accept import accept_nodes
from ddtree_check.tree.case import load_prompts
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.shapes import shape
from ddtree_check.tree.paths import leaf_paths
from ddtree_check.tree.variants import front_chain

TRAINED = ("tiny-qwen3_5", "tiny-mamba2-hybrid", "tiny-lfm2")  # of fixtures/models
DRAWN = ("qwen3_5_text", "bamba", "lfm2", "kimi_linear", "minimax", "olmo_hybrid", "falcon_h1", "qwen3")  # of tiny.py
MODELS = ",".join((*TRAINED, *DRAWN))
LOW = 8  # ids below are reserved by configurations
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


# Engines, prompts, trees


@cache
def engine_of(model: str, dtype: str, seed: int = 0):
    if model in TRAINED:
        return load_engine("transformers", str(fixtures_dir() / "models" / model), dtype=dtype, device="cpu")
    config = AutoConfig.for_model(model, **SHAPES[model])
    wanted = loading.parse_dtype(dtype, torch.float32)
    built = loading.build_random(config, dtype=wanted, device=torch.device("cpu"), seed=seed)
    return TransformersEngine(built, provenance={"name": f"tiny {model}", "weights": "random"})


@cache
def texts() -> list[tuple[str, str]]:
    files = [fixtures_dir() / "prompts" / f"{name}.jsonl" for name in ("code", "humaneval")]
    return [(prompt.id, prompt.text) for file in files for prompt in load_prompts(file)]


def items_of(model: str, count: int, nodes: int, seed: int = 0) -> Iterator[Item]:
    """So many prompts: the texts of the package for a trained model, drawn tokens and trees for a drawn one."""
    if model in TRAINED:
        tokenizer = loading.load_tokenizer(str(fixtures_dir() / "models" / model))
        for name, text in texts()[:count]:
            yield Item(name, tuple(tokenizer(text)["input_ids"])[-120:])
        return
    high = SHAPES[model]["vocab_size"] - LOW
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        tokens = tuple(rng.integers(LOW, high, int(rng.integers(2, 40))).tolist())
        root = int(rng.integers(LOW, high))
        tree = shape("random", nodes, vocab=high, seed=seed + number, root=root, exclude=range(LOW))
        yield Item(f"drawn {seed} {number}", tokens, tree)


# False alarms

SOURCES: dict[str, Callable] = {  # noise source -> (engine, settings, threads)
    "repeat": lambda engine, settings: (engine, replace(settings, seed=1), 1),
    "other batch width": lambda engine, settings: (engine, replace(settings, ar="batched"), 1),
    "other reduction order": lambda engine, settings: (Faulty(engine, around=inject.other_order), settings, 1),
    "other thread count": lambda engine, settings: (engine, settings, 2),
}


def batched_wrong(engine) -> set[str]:
    """Families whose decoding of several rows the library is known to get wrong, in the versions at hand."""
    versions = engine.describe()
    entries = [entry for entry in load_known() if entry.check == "batched"]
    return {family for entry in entries for family in entry.families if entry.covers(family, versions)}


def alarms(given, done: dict, write: Callable) -> None:
    budgets = tuple(map(int, given.nodes.split(",")))
    for dtype in given.dtype.split(","):
        for model in given.models.split(","):
            engine = engine_of(model, dtype)
            count = given.prompts if model in TRAINED else given.drawn
            for item in items_of(model, count, budgets[0]):
                for source, make in SOURCES.items() if given.part() else ():
                    if source == "other batch width" and model in batched_wrong(engine):
                        continue
                    keys = [["alarms", model, dtype, item.id, source, budget] for budget in budgets]
                    keys = keys[:1] if item.tree else keys
                    if all(tuple(key) in done for key in keys):
                        continue
                    host, settings, threads = make(engine, Settings(budgets=budgets))
                    torch.set_num_threads(threads)
                    record = check(host, [item], settings)
                    torch.set_num_threads(1)
                    ratio = (record["floor"]["systematic"] or {"ratio": None})["ratio"]
                    for key, case in zip(keys, record["cases"], strict=True):
                        write(key, _alarm_figures(case) | {"ratio": ratio})


def _alarm_figures(case: dict) -> dict:
    """What one clean run came to: alarms, and how close its nodes were to their floors, as error / control."""
    modes = {mode: case["modes"][mode]["verdict"] for mode in ("linear", "tree_forked")}
    ratios = []
    for node in case["nodes"]:
        control = max(node["controls"].get("pad", 0.0), node["controls"].get("chain", 0.0))
        floor, error = node["tree_forked"]["floor"], node["tree_forked"]["max_abs"]
        if floor:
            ulp = max(floor - 4 * control, 1e-30) / 4  # the floor is 4 controls and 4 ulps
            ratios.append(error / max(control + ulp, 1e-30))
    return {
        "modes": modes,
        "alarm": any(verdict not in ("pass", "known_failure") for verdict in modes.values())
        or bool(case["leak_law"]["outside"]),
        "nodes": len(case["nodes"]),
        "ties": case["modes"]["tree_forked"]["tie"],
        "bits": (case["exact"] or {}).get("verdict"),
        "certified": case["modes"]["tree_forked"]["certified"],
        "worst": max(ratios, default=0.0),
    }


# Detection


def _flat(text: str) -> Callable:
    wrong = Wiring.parse(text)
    return lambda engine, tree, share: (
        Faulty(engine, forked=wrong) if share == 1 else Faulty(engine, around=inject.blended(wrong, share))
    )


def _stored(source: Callable, *channels: str) -> Callable:
    return lambda engine, tree, share: Faulty(engine, commit=keeps(source, *channels, tree_only=True, share=share))


def _captured(*channels: str) -> Callable:
    def make(engine, tree, share):
        host = inject.captured(engine, *channels, share=share)
        other = shape("random", len(tree) - 1, vocab=engine.vocab_size, seed=len(tree) + tree.tokens[0], root=LOW)
        host.verify(engine.prefill(range(LOW, LOW + 9)), other, inject.FORKED)  # the step that was captured
        return host

    return make


def _own(*channels: str) -> Callable:
    """A block that starts from zeros, in the engine's own pass and in the tree."""
    wrong = inject.dropped(*channels)

    def make(engine, tree, share):
        if share == 1:
            return Faulty(engine, own=wrong, forked=wrong)
        return Faulty(engine, own=Wiring("own"), around=inject.blended(wrong, share, everywhere=True))

    return make


def _gates(engine, tree, share):
    return Faulty(engine, around=inject.altered("gated_delta", inject.gate_of_first_row("g", "beta", share=share)))


def _noise(engine, tree, share):
    return Faulty(engine, around=inject.branching(inject.noisy(share, modes=(inject.FORKED,))))


def _reorder(engine, tree, share):
    return inject.batched(engine, reorder=inject.left_behind(engine, "recurrent", "conv"))


def _first_state(engine, tree, share):
    return inject.batched(engine, verify=inject.states_of_first(engine, "recurrent"))


def _padding(engine, tree, share):
    return inject.batched(engine, prefill=inject.padding_run(engine, "recurrent", "conv", alone=False))


def _penalties(rule: str) -> Callable:
    return lambda engine, tree, share: Faulty(engine, processed=inject.processed(rule, "tree_forked"))


# kind, name, what makes it, models, the check that must see it. A commit is judged on a path that leaves the first
# branch; a "run" is one of several prompts, in bf16, where one prompt alone may hide the fault; noise has a size of
# its own, 1 % of every product's rms.
RUNS = (*TRAINED, "bamba", "qwen3", "falcon_h1")
KINDS = (
    ("K1", "the commit never happened", _stored(inject.before, "recurrent", "conv"), ("tiny-qwen3_5", "bamba"),
     "commit"),
    ("K2", "the state at the accepted length", _stored(inject.wired(commit="flat"), "recurrent"),
     ("tiny-qwen3_5", "bamba", "kimi_linear"), "commit"),
    ("K3", "states in row order", _flat("state=flat"), ("tiny-qwen3_5", "bamba", "minimax"), "tree"),
    ("K4", "windows in row order", _flat("conv=flat"), ("tiny-qwen3_5", "lfm2"), "tree"),
    ("K4", "windows are slices of the row buffer", _stored(inject.wired(conv="flat"), "conv"),
     ("tiny-qwen3_5", "bamba"), "commit"),
    ("K5", "a causal mask", _flat("mask=flat"), ("tiny-qwen3_5", "qwen3"), "tree"),
    ("K5", "positions by row", _flat("positions=flat"), ("tiny-qwen3_5", "qwen3"), "tree"),
    ("K5", "positions by row, in a run of prompts", _flat("positions=flat"), RUNS, "run"),
    ("K5", "the first rows of the keys are kept", _stored(inject.wired(commit="flat"), "keys"), ("tiny-qwen3_5",),
     "commit"),
    ("K6", "buffers that are one to all rows short", None, ("no model",), "plan"),
    ("K7", "the parents of the captured step", _captured("state", "conv"), ("tiny-qwen3_5", "bamba"), "tree"),
    ("K7", "the state rows of the captured step", _captured("slots"), ("tiny-qwen3_5", "bamba"), "tree"),
    ("K8", "rows are permuted, states are not", _reorder, ("qwen3_5_text", "bamba"), "reorder"),
    ("K8", "every request starts from the first one's state", _first_state, ("qwen3_5_text", "bamba"), "verify"),
    ("K9", "a cached block starts from zeros", _own("state", "conv"), ("tiny-qwen3_5", "bamba"), "linear"),
    ("K9", "the first row's gates for all rows", _gates, ("tiny-qwen3_5", "qwen3_5_text"), "linear"),
    ("K10", "left padding runs into states and windows", _padding, ("qwen3_5_text", "olmo_hybrid"), "prefill"),
    ("K12", "no penalties in verify", _penalties("none"), ("tiny-qwen3_5", "bamba"), "sampling"),
    ("K12", "penalties count the sibling's path", _penalties("sibling"), ("tiny-qwen3_5", "bamba"), "sampling"),
    ("K13", "acceptance of a text that is not plain decoding's", _flat("state=flat,conv=flat"),
     ("tiny-qwen3_5", "bamba"), "acceptance"),
    ("K11", "noise on trees, not on chains", _noise, ("tiny-qwen3_5", "bamba"), "tree"),
    ("K11", "noise on trees, not on chains, in a run of prompts", _noise, ("tiny-qwen3_5", "bamba"), "run"),
)  # fmt: skip
PROMPTS = Rule().pooled_prompts  # of a run
NATURAL = {name: 0.01 for _, name, make, *_ in KINDS if make is _noise}


def _trial(engine, item: Item, make: Callable, share: float, by: str) -> bool | None:
    """Whether the check saw it; None where the fault changes nothing there, such as a chain."""
    tree = item.tree
    if by == "plan":
        rng = np.random.default_rng(len(item.tokens) + 97 * tree.tokens[0])
        budgets = {name: int(rng.integers(1, 65)) for name in "abc"[: int(rng.integers(1, 4))]}
        rows = sum(budget + 1 for budget in budgets.values())
        return bool(plan(budgets, {"rows": {"total": int(rng.integers(rows))}}))
    if by in ("reorder", "verify", "prefill"):
        other = replace(item, id="beside", tokens=item.tokens[::-1][: max(1, len(item.tokens) - 3)])
        settings = Settings(require=("tree_forked",), controls=2, attribute=False)
        found = batch_runs(make(engine, tree, share), [item, other], settings, (2,))["findings"]
        return any(one["check"] == by and one["verdict"] == "fail" for one in found)
    if by == "sampling":
        settings = Settings(
            controls=2, attribute=False, sampling=Sampling(temperature=0.8, repetition_penalty=1.3), draws=20
        )
        (case,) = check(make(engine, tree, share), [item], settings)["cases"]
        return case["modes"]["tree_forked"]["verdict"] == "fail"
    if by == "acceptance":
        settings = Settings(budgets=(len(tree) - 1,))
        rounds = Rounds(rounds=12, modes=("tree_forked",))
        summary = generate(make(engine, tree, share), [replace(item, tree=None)], settings, rounds)["summary"]
        found = summary["tree_forked"]
        # A text that the leak did not touch in so few rounds has nothing to withhold.
        return found["accepted_per_round"] is None if found["off"] or found["same_text"] < found["texts"] else None
    if by == "commit":
        node = next(node for node, pattern in accept_nodes(tree, ("branch",)).items())
        if not _stores_otherwise(engine, make(engine, tree, 1.0), item, node):
            return None
        settings = Settings(accept=(str(node),), controls=2, attribute=False)
    else:
        settings = Settings(controls=2, attribute=False)
    record = check(make(engine, tree, share), [item], settings)
    (case,) = record["cases"]
    if by == "commit":
        return case["commit"][0]["modes"]["tree_forked"]["verdict"] == "fail"
    return case["modes"]["linear" if by == "linear" else "tree_forked"]["verdict"] == "fail"


def _stores_otherwise(engine, host, item: Item, node: int) -> bool:
    """Whether the whole fault changes what is stored at all: the rows of an accepted path may stand in order."""
    verified = engine.verify(engine.prefill(item.tokens), item.tree, FORKED)
    right, wrong = (flat_contents(one.contents(one.commit(verified, node))) for one in (engine, host))
    return any(not torch.equal(x, wrong[key]) for key, x in right.items())


def _drafted(model: str, dtype: str, count: int, nodes: int, seed: int) -> Iterator[tuple[object, Item]]:
    """Prompts with a drawn tree that branches, and an engine that remembers what they share."""
    engine = engine_of(model, dtype)
    for number, item in enumerate(items_of(model, count, nodes, seed)):
        tree = item.tree or shape(
            "random", nodes, vocab=engine.vocab_size - LOW, seed=seed + number, root=LOW + number, exclude=range(LOW)
        )
        if tree.is_chain or all(parent == 0 for parent in tree.parents[1:]):
            continue
        yield engine, replace(item, tokens=item.tokens[-60:], tree=tree)


def chosen_kinds(given) -> list[tuple]:
    return [row for row in KINDS if given.kinds is None or row[0] in given.kinds.split(",")]


def detection(given, done: dict, write: Callable) -> None:
    for kind, name, make, models, by in chosen_kinds(given):
        dtypes = given.dtype.split(",")
        if by == "run":
            _runs(kind, name, make, models, given, done, write)
            continue
        combinations = sum(len(other[3]) for other in KINDS if other[0] == kind and other[4] != "run") * len(dtypes)
        for model in models:
            share = -(-given.trials // combinations) + 1
            for dtype in dtypes:
                host = model if model != "no model" else "qwen3_5_text"
                for engine, item in _drafted(host, dtype, share, int(given.nodes), 7):
                    key = ["detection", kind, name, model, dtype, item.id]
                    if given.part() and tuple(key) not in done:
                        seen = _trial(Remembered(engine), item, make, NATURAL.get(name, 1.0), by)
                        write(key, {"seen": seen})


def _runs(kind: str, name: str, make: Callable, models, given, done: dict, write: Callable) -> None:
    """--runs runs of several prompts on each model. Texts come again with other trees; their run is one unit."""
    for model in (model for model in models if model in given.models.split(",")):
        for number in range(given.runs if "bfloat16" in given.dtype else 0):
            again, unit = divmod(number, len(texts()) // PROMPTS if model in TRAINED else given.runs)
            key = ["detection", kind, name, model, "bfloat16", f"run {unit}#{again}"]
            if not given.part() or tuple(key) in done:
                continue
            every = list(_drafted(model, "bfloat16", (unit + 1) * PROMPTS, int(given.nodes), 7 + 1000 * again))
            engine, items = every[0][0], [item for _, item in every[-PROMPTS:]]
            host = make(engine, items[0].tree, NATURAL.get(name, 1.0))
            verdict = check(host, items, Settings(attribute=False))["verdict"]
            write(key, {"seen": verdict["modes"]["tree_forked"] == "fail"})


def dose(given, done: dict, write: Callable) -> None:
    """The injected error from 0 up, a factor of 10 ** (1/2) a step: the share of prompts where the verdict turns."""
    doses = [0.0, *np.logspace(-8, 0, 17).tolist()]
    for kind, name, make, models, by in chosen_kinds(given):
        if "positions" in name or by not in ("tree", "linear", "commit"):  # there, or not there
            continue
        for dtype in given.dtype.split(","):
            for engine, item in _drafted(models[0], dtype, given.trials, int(given.nodes), 11):
                remembered = Remembered(engine)
                for share in doses:
                    key = ["dose", kind, name, models[0], dtype, item.id, f"{share:.3g}"]
                    if tuple(key) not in done:
                        write(key, {"seen": _trial(remembered, item, make, share, by)})


# One wrong edge

EDGES = {
    "state of the grandparent": ("state", lambda t, i: t.parents[t.parents[i]] if t.parents[i] >= 0 else None),
    "state of the previous row": ("state", lambda t, i: i - 1 if t.parents[i] != i - 1 else None),
    "window of the grandparent": ("conv", lambda t, i: t.parents[t.parents[i]] if t.parents[i] >= 0 else None),
    "mask misses the parent": ("mask", lambda t, i: t.parents[i]),
    "mask sees one stranger": ("mask", lambda t, i: next((j for j in range(i) if j not in t.path(i)), None)),
    "position one too far": ("positions", lambda t, i: t.depth[i] + 1),
}


def _served(given, dtype: str):
    """SGLang with one model: a path, or a built-in shape with random weights; the embedded one by default."""
    model = None if given.models == MODELS else given.models
    weights = "real" if model is None or "/" in model else "random"
    return load_engine("sglang", model, weights=weights, dtype=dtype, rows=int(given.nodes) + 1)


def edges(given, done: dict, write: Callable) -> None:
    """One wrong edge, in one channel, at one node, for every node of one tree in turn: by its floor, and in bits."""
    for dtype in given.dtype.split(","):
        engine = engine_of("tiny-qwen3_5", dtype) if given.engine == "transformers" else _served(given, dtype)
        for item in items_of("tiny-qwen3_5", min(given.prompts, 3), 32):
            (case,) = check(engine, [item], Settings(budgets=(int(given.nodes),), exact="off"))["cases"]
            tree, prefix = DraftTree.from_json(case["tree"]), engine.prefill(item.tokens)
            floor = np.array([node["tree_forked"]["floor"] for node in case["nodes"]])
            reference, right = engine.decode(prefix, tree), digests(engine.verify(prefix, tree, FORKED).logits)
            chains = {}
            for path in leaf_paths(tree):
                rows = digests(engine.verify(prefix, front_chain(tree, path.nodes), FORKED).logits)
                chains |= zip(path.nodes, rows, strict=False)
            for name, (channel, source) in EDGES.items():
                for node in range(1, len(tree)):
                    key = ["edges", f"{name}{', in every tree' * given.rows}", dtype, item.id, node]
                    if (wrong := source(tree, node)) is None or not given.part() or tuple(key) in done:
                        continue
                    wiring = inject.moved_edge(channel, node, wrong, None if given.rows else tree.parents)
                    if given.engine == "sglang" and channel in ("state", "conv"):  # it has one list of parents for both
                        wiring = replace(wiring, state=getattr(wiring, channel), conv=getattr(wiring, channel))
                    host = Faulty(engine, forked=wiring)
                    logits = host.verify(prefix, tree, FORKED).logits
                    seen, rows = measure(reference, logits), digests(logits)
                    found = bool(seen.max_abs[node] > floor[node])
                    exact = exact_run(host, prefix, tree, rows=rows, chains=chains, precise=dtype in EXACT)
                    write(key, {
                        "seen": found, "tie": bool(seen.changed[node]) and not found,
                        "changed": rows[node] != right[node], "bits": node in exact.of(MOVED),
                        "passes": sum(exact.passes.values()),
                    })  # fmt: skip


# What it came to


def report(done: dict) -> None:
    tables = (
        ("alarms", _alarm_table), ("alarms", _pooled_table), ("detection", _detection_table), ("dose", _dose_table),
        ("edges", _edge_table),
    )  # fmt: skip
    for name, table in tables:
        mine = {key[1:]: value for key, value in done.items() if key[0] == name}
        if mine:
            print(f"{table(mine)}\n")


def bound(found: int, tried: int) -> tuple[float, float]:
    """The exact 95 % interval of a share, one-sided where it is 0 or 1."""
    side = {0: "less", tried: "greater"}.get(found, "two-sided")
    interval = binomtest(found, tried, alternative=side).proportion_ci(0.95, method="exact")
    return interval.low, interval.high


def _alarm_table(done: dict) -> str:
    rows, every = [], {}
    for (model, dtype, prompt, *_), value in done.items():
        every.setdefault((model, dtype), []).append((prompt, value))
        every.setdefault(("all", dtype), []).append((f"{model} {prompt}", value))
        every.setdefault(("all", "both"), []).append((f"{model} {prompt}", value))
    for (model, dtype), runs in sorted(every.items(), key=lambda entry: (entry[0][0] == "all", entry[0])):
        prompts = {prompt for prompt, _ in runs}
        alarmed = {prompt for prompt, value in runs if value["alarm"]}
        worst = np.array([value["worst"] for _, value in runs])
        rows.append(
            (
                model, dtype, len(runs), sum(value["nodes"] for _, value in runs), len(prompts), len(alarmed),
                f"{bound(len(alarmed), len(prompts))[1]:.2%}", sum(value["ties"] for _, value in runs),
                sum(value["bits"] == "fail" for _, value in runs), sum(value["certified"] or 0 for _, value in runs),
                *(f"{np.quantile(worst, q):.2f}" for q in QUANTILES),
            )
        )  # fmt: skip
    headers = (
        "model",
        "dtype",
        "case-runs",
        "nodes",
        "prompts",
        "alarmed",
        "true share below",
        "ties",
        "off in bits",
        "certified",
    )
    headers += tuple(f"worst q{q:g}" for q in QUANTILES)
    head = "False alarms; worst: largest error of a case's nodes / (control + ulp), the alarm is above 4"
    return f"{head}\n{tabulate(rows, headers, 'github', disable_numparse=True)}"


def _pooled_table(done: dict) -> str:
    """Runs of as many prompts as the pooled rule asks for, in the order in which they were run and drawn at random."""
    rows, every, rng = [], {}, np.random.default_rng(0)
    for (model, dtype, _, source, _), value in done.items():
        if value["ratio"] is not None:
            every.setdefault((model, dtype), {}).setdefault(source, []).append(np.log(value["ratio"]))
    for key, sources in sorted(every.items()):
        prompts = np.concatenate(list(sources.values()))
        whole = [np.reshape(logs[: len(logs) // PROMPTS * PROMPTS], (-1, PROMPTS)) for logs in sources.values()]
        runs = np.concatenate(whole).mean(1)
        drawn = np.concatenate([rng.choice(logs, (2000, PROMPTS)) for logs in sources.values()]).mean(1)
        largest = [f"{np.exp(np.max(found, initial=-np.inf)):.2f}" for found in (prompts, runs, drawn)]
        alarmed = int((runs > np.log(Rule().pooled)).sum())
        rows.append((*key, len(prompts), len(runs), alarmed, f"{np.exp(prompts.mean()):.2f}", *largest))
    headers = (
        "model",
        "dtype",
        "case-runs with noise",
        f"runs of {PROMPTS}",
        "alarmed",
        "ratio",
        "largest of a case-run",
    )
    headers += ("of a run", f"of {len(SOURCES) * 2000} drawn runs")
    head = f"The pooled rule: errors of tree_forked / of its controls; the alarm is above {Rule().pooled:g}"
    return f"{head}\n{tabulate(rows, headers, 'github', disable_numparse=True)}"


def _detection_table(done: dict) -> str:
    every: dict[tuple, dict[str, list[bool]]] = {}
    for (kind, name, model, dtype, prompt), value in done.items():
        if value["seen"] is not None:
            for key in ((kind, name, dtype), (kind, "all of the kind", "both")):
                unit = f"{model} {prompt.partition('#')[0]}"
                every.setdefault(key, {}).setdefault(unit, []).append(value["seen"])
    rows = []
    for (kind, name, dtype), prompts in sorted(every.items(), key=lambda entry: (int(entry[0][0][1:]), entry[0][1:])):
        trials = [seen for found in prompts.values() for seen in found]
        whole = sum(all(found) for found in prompts.values())
        low, _ = bound(whole, len(prompts))
        rows.append((kind, name, dtype, f"{sum(trials)} of {len(trials)}", f"{np.mean(trials):.1%}", f"{low:.1%}"))
    headers = ("kind", "fault", "dtype", "found", "share", "prompts where all were found, at least")
    return f"Detection at natural size\n{tabulate(rows, headers, 'github', disable_numparse=True)}"


def _dose_table(done: dict) -> str:
    every: dict[tuple, dict[float, list[bool]]] = {}
    for (kind, name, model, dtype, _, share), value in done.items():
        if value["seen"] is not None:
            every.setdefault((kind, name, model, dtype), {}).setdefault(float(share), []).append(value["seen"])
    rows = []
    for key, curve in sorted(every.items(), key=lambda entry: (int(entry[0][0][1:]), entry[0][1:])):
        shares = {share: np.mean(seen) for share, seen in sorted(curve.items())}
        first = next((share for share, part in shares.items() if part > 0), None)
        half = next((share for share, part in shares.items() if part >= 0.5), None)
        sure = next((share for share in shares if all(p == 1 for s, p in shares.items() if s >= share)), None)
        cells = ("-" if share is None else f"{share:.2g}" for share in (first, half, sure))
        rows.append((*key, len(next(iter(curve.values()))), f"{shares.get(0.0, 0):.0%}", *cells))
    headers = ("kind", "fault", "model", "dtype", "prompts", "found at 0", "smallest found", "half found", "all from")
    title = "Dose: share of the natural error (K11: noise / rms of every product)"
    return f"{title}\n{tabulate(rows, headers, 'github', disable_numparse=True)}"


def _edge_table(done: dict) -> str:
    every: dict[str, dict[str, list[dict]]] = {}
    for (name, dtype, *_), value in done.items():
        every.setdefault(name, {}).setdefault(dtype, []).append(value)
    dtypes = sorted({dtype for found in every.values() for dtype in found})
    rows = []
    for name, found in every.items():
        rows.append((name, *(cell for dtype in dtypes for cell in _edge_cells(found.get(dtype, [])))))
    words = ("by the floor", "called a tie", "in bits", "by either", "that change no bit")
    headers = ("one wrong edge", *(f"{dtype}, {word}" for dtype in dtypes for word in words))
    return tabulate(rows, headers, "github", disable_numparse=True)


def _edge_cells(found: list[dict]) -> tuple[object, ...]:
    """Return counts of one edge. What changes no bit of the node's row is no fault there and is counted apart."""
    real = [value for value in found if value["changed"]]
    shares = [sum(map(judge, real)) for judge in (
        lambda value: value["seen"], lambda value: value["tie"], lambda value: value["bits"],
        lambda value: value["seen"] or value["bits"],
    )]  # fmt: skip
    return *(f"{share} of {len(real)}" for share in shares), len(found) - len(real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    runs = {"alarms": alarms, "detection": detection, "dose": dose, "edges": edges, "report": lambda *_: None}
    parser.add_argument("what", choices=runs, nargs="?", default="report")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--models", default=MODELS, help="edges with SGLang: a name or a path")
    parser.add_argument("--engine", default="transformers", choices=("transformers", "sglang"), help="of edges")
    parser.add_argument("--prompts", type=int, default=172, help="texts for each trained model")
    parser.add_argument("--drawn", type=int, default=60, help="drawn prompts for each drawn model")
    parser.add_argument("--runs", type=int, default=60, help="of several prompts, for each model where one may hide it")
    parser.add_argument("--kinds", help="faults of these kinds alone, such as K3,K9")
    parser.add_argument("--nodes", help="draft nodes of a tree, 12, of edges 32; alarms: a tree for each number")
    parser.add_argument("--rows", action="store_true", help="edges: wrong in this row of every tree, not of one alone")
    parser.add_argument("--trials", type=int, default=300, help="of each kind; prompts of each dose curve")
    add_options(parser, "reports/calibration.jsonl")
    given = parser.parse_args()
    given.nodes = given.nodes or ("32" if given.what == "edges" else "12")
    done = {tuple(entry["key"]): entry["value"] for entry in written(given.out)}

    def write(key: list, value: dict) -> None:
        done[tuple(key)] = value
        append(given.out, {"key": key, "value": value})

    started = time.perf_counter()
    torch.set_num_threads(1)
    with quiet_libraries():
        runs[given.what](given, done, write)
    report(done)
    seconds = time.perf_counter() - started
    print(f"rule: {Rule().factor:g} controls + {Rule().ulps:g} ulps; {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
