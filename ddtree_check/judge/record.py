"""The record of judged cases (docs/record.md): plain JSON that every view is made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ..base.files import json_number, json_values, record_head
from ..model.wiring import Attention, Conv, Layer, State, reads
from ..tree.paths import leaves_first_branch
from . import figures
from .case import Outcome
from .conclude import conclude
from .exact import summary
from .nodes import CONTROL, judged_as, systematic
from .reactions import Reaction

SCHEMA = "ddtree-check/1"
OUTLIER = 10  # times the error of linear and forked, at the median node, before ar is called the outlier


def make_record(
    outcomes: Sequence[Outcome], layers: Sequence[Layer], settings, environment: dict, model: dict,
    reactions: Sequence[Reaction] = (),
) -> dict:  # fmt: skip
    """Return the record of a run: settings, environment and model as given, the cases, and one verdict."""
    dtype, rule = judged_as(environment), settings.rule
    above = systematic(map(_pooled, outcomes), rule, dtype)
    accepts = [accept for outcome in outcomes for accept in outcome.accepts or ()]
    verdict = conclude(
        [outcome.results for outcome in outcomes], [outcome.leak for outcome in outcomes], rule, dtype,
        settings.require, accepts, reactions, above, recurrent=reads(layers, State, Conv),
    )  # fmt: skip
    controls = {
        name: _largest(np.max(each.controls[name]) for each in outcomes if name in each.controls)
        for name in ("forward", "pad", "chain")
    }
    record = record_head(SCHEMA, environment) | {
        "model": model | {"layers_by_kind": _layer_kinds(layers)},
        "settings": settings.to_json(),
        "floor": {
            "rule": "max_abs > factor * max(controls) + ulps * ulp(dtype at the row's max |logit|)",
            "factor": rule.factor,
            "ulps": rule.ulps,
            "controls": {
                name: error for name, error in controls.items() if any(name in outcome.controls for outcome in outcomes)
            },
            "library_unforked": _largest(outcome.library_unforked for outcome in outcomes),
            "batched_against_strict": _largest(outcome.batched for outcome in outcomes),
            "systematic": above and above.to_json(),
        },
        "cases": [_case_json(outcome) for outcome in outcomes],
        "oracle": _oracle(outcomes),
        "leakage": _leakage(outcomes),
        "coverage": _coverage(layers, outcomes),
        "exact": summary([outcome.bits for outcome in outcomes if outcome.bits]),
        "sensitivity": [reaction.to_json() for reaction in reactions],
    }
    return verdict.into(record)


def _pooled(outcome: Outcome) -> tuple:
    """Return a case as `systematic` takes it: only a linear that passed is a control, and only of what was judged."""
    trusted = ("pad", "chain") if outcome.results["linear"].verdict == "pass" else ("chain",)
    judged = outcome.results["tree_forked"].verdicts
    controls = [outcome.controls[name] for name in trusted if judged and name in outcome.controls]
    return outcome.case.prompt_tokens, outcome.case.tree, outcome.differences.get("tree_forked"), controls


def _case_json(outcome: Outcome) -> dict:
    tree, leak, nodes, modes = outcome.case.tree, outcome.leak, [], {}
    for node in range(len(tree)):
        entry = figures.entry(figures.FACTS, outcome, node)
        entry["controls"] = {name: values[node] for name, values in outcome.controls.items()}
        entry["exact"] = outcome.bits and outcome.bits.nodes[node].to_json()
        for mode, errors in outcome.exact.items():
            entry.setdefault("oracle", {})[mode] = errors[node]
        for mode in outcome.results:
            if mode not in outcome.differences:
                entry[mode] = dict.fromkeys(figures.names(figures.FIGURES))
                continue
            entry[mode] = figures.entry(figures.FIGURES, outcome, node, mode)
            if mode in outcome.sampled:
                entry["ar"]["choice"] = int(outcome.sampled[mode].ar_choice[node])
                entry[mode]["sampled"] = outcome.sampled[mode].node_json(node)
        nodes.append(entry)
    for mode, result in outcome.results.items():
        modes[mode] = figures.entry(figures.RESULTS, outcome, mode)
        if mode in outcome.sampled:
            modes[mode]["sampled"] = outcome.sampled[mode].mode_json(tree, result.verdicts)
    return {
        **outcome.case.to_json(),
        "nodes": json_values(nodes),
        "modes": json_values(modes),
        "acceptance": outcome.acceptance,
        "ties": outcome.ties.to_json(),
        "leak_law": {
            "contaminated": sorted(leak.contaminated),
            "near": sorted(leak.near),
            "still": sorted(leak.still),
            "outside": sorted(leak.outside),
            "clean_bitwise_equal": leak.clean_equal,
        },
        "exact": outcome.bits and outcome.bits.to_json(),
        "commit": None if outcome.accepts is None else [accept.to_json() for accept in outcome.accepts],
        "attribution": {mode: finding.to_json() for mode, finding in outcome.attribution.items()},
    }


def _oracle(outcomes: Sequence[Outcome]) -> dict | None:
    """Return median and largest absolute error of ar and each mode over all nodes, and whether ar is the outlier."""
    if not outcomes[0].exact:
        return None
    names = [mode for mode in outcomes[0].exact if all(mode in outcome.exact for outcome in outcomes)]
    errors = {mode: np.concatenate([outcome.exact[mode] for outcome in outcomes]) for mode in names}
    figures = {
        mode: {"median_abs": json_number(np.median(error)), "max_abs": json_number(np.max(error))}
        for mode, error in errors.items()
    }
    outlier = False
    if {"linear", "tree_forked"} <= errors.keys():
        others = np.maximum(errors["linear"], errors["tree_forked"])
        # Two runs that agree with the oracle and not with ar: then ar is what is off, not they.
        outlier = bool(np.median(errors["ar"]) > OUTLIER * np.median(others))
    return {**figures, "ar_is_the_outlier": outlier}


def _leakage(outcomes: Sequence[Outcome]) -> dict:
    """Return the headline: what not forking did, over the cases in which it was run (`rounds`)."""
    dirty = sum(len(outcome.leak.contaminated) for outcome in outcomes)
    run = [outcome for outcome in outcomes if CONTROL in outcome.differences]
    kl = [outcome.differences[CONTROL].kl[sorted(outcome.leak.contaminated)] for outcome in run if dirty]
    walks = [outcome.acceptance[CONTROL] for outcome in run]
    return {
        "nodes": sum(len(outcome.case.tree) for outcome in outcomes),
        "contaminated": dirty,
        "flipped": sum(outcome.results[CONTROL].count("flip") for outcome in outcomes),
        "median_kl": json_number(np.median(np.concatenate(kl))) if kl and sum(map(len, kl)) else 0.0,
        "rounds": len(run),
        "rounds_changed": sum(bool(w["wrong_accept"] or w["wrong_reject"] or w["wrong_bonus"]) for w in walks),
        "wrong_accept_per_round": sum(len(walk["wrong_accept"]) for walk in walks) / max(1, len(run)),
    }


def _coverage(layers: Sequence[Layer], outcomes: Sequence[Outcome]) -> dict:
    """Return what the run exercised; a fault in what it did not exercise would not have been seen."""
    trees = [outcome.case.tree for outcome in outcomes]
    paths = [outcome.acceptance["ar"]["path"] for outcome in outcomes]
    side = sum(map(leaves_first_branch, trees, paths))
    return {
        "cases": len(outcomes),
        "nodes": sum(map(len, trees)),
        "branch_nodes": sum(sum(len(kids) > 1 for kids in tree.children) for tree in trees),
        "contaminated": sum(len(outcome.leak.contaminated) for outcome in outcomes),
        "near": sum(len(outcome.leak.near) for outcome in outcomes),
        "near_moved": sum(len(outcome.leak.near - outcome.leak.still) for outcome in outcomes),
        "accepted_two_or_more": sum(len(path) > 2 for path in paths),
        "side_branch_accepts": side,
        "rejections": sum(bool(tree.children[path[-1]]) for tree, path in zip(trees, paths, strict=True)),
        "commits": sum(len(outcome.accepts or ()) for outcome in outcomes),
        "commits_aside": sum(accept.aside for outcome in outcomes for accept in outcome.accepts or ()),
        "layers": _layer_kinds(layers),
    }


def _layer_kinds(layers: Sequence[Layer]) -> dict[str, int]:
    """Return how many operations of each kind the layers have."""
    ops = [op for layer in layers for branch in layer.branches for op in branch]
    names = {Conv: "conv", Attention: "attention"}
    return dict(Counter(names.get(type(op)) or (op.kind if isinstance(op, State) else "") for op in ops))


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the largest of what was measured, or None if nothing was."""
    largest = max((float(value) for value in values if value is not None), default=None)
    return None if largest is None else json_number(largest)
