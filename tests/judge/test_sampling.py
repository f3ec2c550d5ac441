"""Processors against slow definitions, the bounds against whatever noise can do, and B29 with its twins."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree_check.base.errors import UsageError
from ddtree_check.base.options import make
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.rounds import Rounds, generate
from ddtree_check.judge.sampling import draws as draws_module
from ddtree_check.judge.sampling.draws import Walks, holm, pearson, power, visible
from ddtree_check.judge.sampling.draws import test as draw_test
from ddtree_check.judge.sampling.processing import (
    HISTORIES,
    NONE,
    RULES,
    History,
    Sampler,
    Sampling,
    choose,
    distance,
    history,
    keep,
    log_probs,
    noise,
    process,
    raw_reach,
    scaled,
    stream,
    tv_bound,
    uncertain,
)
from ddtree_check.selftest.inject import Faulty
from ddtree_check.tree.draft_tree import DraftTree
from tests.models import engine, nan_at_the_root, prompt, small

# 0 ─┬─ 1 ── 3
#    ├─ 2 ── 4 ── 6
#    └─ 5
TREE = DraftTree((10, 11, 12, 13, 14, 15, 16), (-1, 0, 0, 1, 2, 0, 4))
WARM = Settings(budgets=(12,), sampling=Sampling(temperature=0.4, top_p=0.95), draws=1000)


def sampled(settings: Settings, draws: int | None = None, history: str = "path", **changes) -> Settings:
    """Return settings with other fields of their sampling."""
    sampling = replace(settings.sampling, **changes)
    return replace(settings, sampling=sampling, draws=settings.draws if draws is None else draws, history=history)


PENALISED = sampled(WARM, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3)
ITEMS = [Item(f"p{seed}", prompt(12, seed)) for seed in range(2)]


# --- processors -------------------------------------------------------------------------------------------------------


def by_hand(row, sampling: Sampling, past: History | None):
    """The processed distribution by its definitions, one token at a time."""
    z = {token: float(value) for token, value in enumerate(row)}
    for token in z if past else ():
        if token in past.prompt or token in past.made:
            z[token] = (
                z[token] / sampling.repetition_penalty if z[token] > 0 else z[token] * sampling.repetition_penalty
            )
        z[token] -= sampling.presence_penalty * (token in past.made)
        z[token] -= sampling.frequency_penalty * past.made.count(token)
    if not sampling.temperature:
        best = max(z, key=lambda token: (z[token], -token))
        return [float(token == best) for token in z]
    z = {token: value / sampling.temperature for token, value in z.items()}
    ranked = sorted(z.values(), reverse=True)
    if 0 < sampling.top_k < len(z):
        z = {token: value for token, value in z.items() if value >= ranked[sampling.top_k - 1]}
    weight = {token: math.exp(value - ranked[0]) for token, value in z.items()}
    total = sum(weight.values())
    above = {token: sum(w for other, w in weight.items() if z[other] > z[token]) / total for token in z}
    held = {token: w for token, w in weight.items() if sampling.top_p == 1 or above[token] < sampling.top_p}
    return [held.get(token, 0.0) / sum(held.values()) for token in range(len(row))]


SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.5, top_k=3),
    Sampling(2.0, top_p=0.7),
    Sampling(0.7, 4, 0.8, 1.3, 0.4, 0.2),
    Sampling(1.5, -1, 0.05, 0.7, -0.5),
    Sampling(0.0, repetition_penalty=2.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_processing_is_its_definition(sampling):
    rng = np.random.default_rng(3)
    for places in (0, 1, 6):  # coarse rows hold many equal logits
        row = np.round(3 * rng.normal(size=40), places)
        past = History(tuple(rng.integers(0, 40, 4)), tuple(rng.integers(0, 40, 6)))
        for one in (past, None):
            assert np.allclose(np.exp(process(row, sampling, one)), by_hand(row, sampling, one), atol=1e-12)


def test_penalties_of_presence_and_frequency_leave_the_prompt_alone():
    row = np.arange(5.0)
    past = History((3, 3), (4, 4))
    assert scaled(row, Sampling(presence_penalty=1, frequency_penalty=2), past).tolist() == [0, 1, 2, 3, -1]
    assert scaled(row, Sampling(repetition_penalty=2), past).tolist() == [0, 1, 2, 1.5, 2]
    assert scaled(-row, Sampling(repetition_penalty=2), past).tolist() == [0, -1, -2, -6, -8]
    assert scaled(row, Sampling(repetition_penalty=2), None).tolist() == row.tolist()


def test_tokens_that_are_left_out_stay_out_and_a_row_of_nothing_gives_nothing():
    row = np.array([0.0, -np.inf, 2.0, 1.0])
    assert np.exp(process(row, Sampling(1.0, top_k=3), History((1,), (1,))))[1] == 0
    for bad in (np.full(3, -np.inf), np.array([1, np.nan, 0]), np.array([1, np.inf, 0])):
        assert (
            np.isnan(process(bad, Sampling(1.0), None)).all() and choose(process(bad, Sampling(1.0), None), None) == -1
        )


WRONG = {
    "temperature": -1.0, "top_k": -2, "top_p": 0.0, "repetition_penalty": 0.0, "presence_penalty": math.nan,
    "frequency_penalty": math.inf,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_drawn_from_is_refused(name):
    with pytest.raises(UsageError, match=f"^{name.replace('_', '-')}: got"):
        Sampling(**{"temperature": 1.0, name: WRONG[name]})


@pytest.mark.parametrize(
    "given", [{"top_k": 5}, {"top_p": 0.9}, {"history": "rows"}, {"history": "x"}, {"draws": -1}], ids=str
)
def test_settings_that_would_do_nothing_are_refused(given):
    with pytest.raises(UsageError, match=next(iter(given)).replace("_", "-")):
        make(Settings, given)


HISTORY = {  # node 4 has the path 0 2 4
    "path": (0, 2, 4),
    "prompt": (0,),
    "parent": (0, 2),
    "rows": (0, 1, 2, 3, 4),
    "sibling": (0, 2, 4),
    "batch": (0, 1, 2, 3, 4, 5, 6),
}


@pytest.mark.parametrize("rule", HISTORIES)
def test_histories(rule):
    found = history(rule, TREE, 4, (1, 2), (9,))
    assert found == History((1, 2), (9, *(TREE.tokens[node] for node in HISTORY[rule])))
    assert history(NONE, TREE, 4, (1, 2)) is None and set(RULES) == {*HISTORY, NONE}
    assert [HISTORIES["sibling"](TREE, node)[-1] for node in (0, 1, 2, 5, 6)] == [0, 2, 1, 2, 6]


# --- how far noise can move a distribution ----------------------------------------------------------------------------


def _noisy(seed: int):
    """A row, the same row moved by at most some noise, and how both are sampled from."""
    rng = np.random.default_rng(seed)
    temperature = float(rng.choice([0, 0.5, 1, 2]))
    sampling = Sampling(
        temperature,
        int(rng.choice([0, 1, 3, 8])) if temperature else 0,
        float(rng.choice([1, 0.9, 0.5, 0.1])) if temperature else 1.0,
        float(rng.choice([1, 1.3, 0.8])),
        float(rng.choice([0, 0.5])),
    )
    size = int(rng.integers(2, 50))
    row = np.round(rng.choice([0.5, 3]) * rng.normal(size=size), int(rng.integers(0, 4)))
    amount = 10 ** rng.uniform(-4, 0)
    moved = row + amount * (rng.choice([-1, 1], size) if rng.random() < 0.5 else rng.uniform(-1, 1, size))
    return row, moved, sampling, History(tuple(rng.integers(0, size, 3)), tuple(rng.integers(0, size, 3)))


@given(st.integers(0, 2**32 - 1))
def test_no_noise_moves_a_distribution_further_than_its_bound(seed):
    row, moved, sampling, past = _noisy(seed)
    z, p, q = scaled(row, sampling, past), process(row, sampling, past), process(moved, sampling, past)
    reach = raw_reach(row, moved, sampling) * sampling.stretch * (1 + 1e-9) + 1e-12
    tv, kl = distance(p, q)
    assert tv <= tv_bound(z, reach, sampling) + 1e-9
    changed = np.isfinite(p) != np.isfinite(q)
    assert not (changed & ~uncertain(z, reach, sampling)).any()
    if not changed.any():
        assert kl <= reach**2 / 2 + 1e-12


def test_the_bound_is_reached_and_half_the_noise_breaks_it():
    """tanh(eta / 2) is what the worst direction does: the bound is not slack."""
    eta, z = 0.3, np.array([0.3, -0.3])
    worst = -z  # each value moved by 2 eta: from one side of even odds to the other
    tv, _ = distance(log_probs(z, z > -9), log_probs(worst, z > -9))
    assert tv == pytest.approx(math.tanh(2 * eta / 2)) == pytest.approx(tv_bound(z, 2 * eta, Sampling(1.0)))
    assert tv > tv_bound(z, eta, Sampling(1.0))


def test_a_near_tie_at_the_cut_is_explained_and_a_clear_one_is_not():
    sampling = Sampling(1.0, top_k=2)
    near, clear = np.array([2.0, 1.0, 0.999, -3]), np.array([2.0, 1.0, 0.5, -3])
    for row, explained in ((near, True), (clear, False)):
        moved = row + np.array([0, -0.002, 0.002, 0])
        cut = keep(scaled(row, sampling, None), sampling) != keep(scaled(moved, sampling, None), sampling)
        assert cut.any() == explained
        assert uncertain(row, 0.002, sampling)[1:3].all() == explained
        assert (tv_bound(row, 0.002, sampling) > 0.1) == explained
    swapped = near[[0, 2, 1, 3]]
    assert distance(process(near, sampling, None), process(swapped, sampling, None))[0] > 0.2  # and yet within noise
    assert distance(process(near, sampling, None), process(swapped, sampling, None))[1] == math.inf


# --- shared noise -----------------------------------------------------------------------------------------------------


def test_noise_belongs_to_seed_prompt_and_text():
    sampler = Sampler(Sampling(1.0), 0, (1, 2))
    same = sampler.noise((5, 6), 50)
    assert (same == Sampler(Sampling(1.0), 0, (1, 2)).noise([np.int64(5), 6], 50)).all()
    for other in (sampler.noise((5, 7), 50), Sampler(Sampling(1.0), 1, (1, 2)).noise((5, 6), 50),
                  Sampler(Sampling(1.0), 0, (1, 3)).noise((5, 6), 50)):  # fmt: skip
        assert (same != other).all()
    assert Sampler(Sampling(), 0, ()).noise((5,), 50) is None
    assert np.isfinite(same).all()


def test_the_largest_of_log_probabilities_and_noise_is_a_draw():
    log_p = process(np.array([1.0, 0.0, -1.0, 2.0]), Sampling(1.0, top_k=3), None)
    drawn = [choose(log_p, one) for one in noise(stream(0), 20000, 4)]
    counts = np.bincount(drawn, minlength=4)
    assert counts[2] == 0 and pearson(counts, np.exp(log_p)) < 13.8  # chi-square with 2 degrees, 0.1 %
    assert choose(np.log([0.5, 0.5]), np.zeros(2)) == 0  # equals: the lowest id


# --- walks and draws --------------------------------------------------------------------------------------------------


def rows(seed: int, size: int = 30, scale: float = 2.0):
    return scale * np.random.default_rng(seed).normal(size=(len(TREE), size))


def walked(p_rows, q_rows, draws: int = 0, seed: int = 0):
    walks = Walks(TREE, draws, stream(seed))
    for node in range(len(TREE)):
        walks.see(node, *(process(x[node], Sampling(1.0), None) for x in (p_rows, q_rows)))
    return walks.finish()


def test_outcomes_are_those_of_all_paths_written_out():
    a, b = rows(0), rows(1)
    p, q = (np.exp([process(row, Sampling(1.0), None) for row in x]) for x in (a, b))

    def outcomes(x):
        found = {}
        for node in range(len(TREE)):
            path = TREE.path(node)
            reach = math.prod(x[TREE.parents[step]][TREE.tokens[step]] for step in path[1:])
            kids = {TREE.tokens[kid] for kid in TREE.children[node]}
            found |= {(node, token): reach * x[node][token] for token in range(30) if token not in kids}
        return found

    mine, theirs = outcomes(p), outcomes(q)
    assert sum(mine.values()) == pytest.approx(1)
    found = walked(a, b)
    assert found.tv == pytest.approx(sum(abs(mine[key] - theirs[key]) for key in mine) / 2)
    depth = {node: len(TREE.path(node)) - 1 for node in range(len(TREE))}
    for name, x in (("ar_accepted", mine), ("accepted", theirs)):
        assert getattr(found, name) == pytest.approx(sum(depth[node] * value for (node, _), value in x.items()))


def test_draws_follow_their_own_distribution_and_not_another():
    a, b = rows(0), rows(0) + 0.3 * rows(5)
    found = walked(a, b, 4000)
    assert found.counts.sum() == 4000 and found.expected.sum() == pytest.approx(1) == found.own.sum()
    own = draw_test([("x", found.own, found.counts)], 499, stream(1))
    other = draw_test([("x", found.expected, found.counts)], 499, stream(1))
    assert own.p > 0.01 and other.p == 1 / 500 and other.clusters == {"x": 1 / 500}


def test_a_sampler_that_is_off_is_seen_on_right_logits(monkeypatch):
    """Noise of half the size draws too many likely tokens."""
    monkeypatch.setattr(draws_module, "noise", lambda *given: noise(*given) / 2)
    found = walked(rows(0), rows(0), 2000)
    assert draw_test([("x", found.own, found.counts)], 499, stream(1)).p == 1 / 500


def test_false_alarms_are_as_rare_as_they_should_be():
    a = rows(0)
    ps = []
    for seed in range(200):
        found = walked(a, a, 100, seed)
        ps.append(draw_test([("x", found.expected, found.counts)], 99, stream(seed, "t")).p)
    # 200 runs at 5 %: at most 20 alarms in 99.9 % of right tests; far too few would be no test either.
    assert 2 <= sum(p <= 0.05 for p in ps) <= 20


def test_stated_power_is_what_simulation_gives():
    p = np.full(20, 0.05)
    q = p + 0.06 / 20 * np.tile([1, -1], 10) * 2  # total variation 0.06, all bins alike: the hardest direction
    stated = power(1000, 19, 0.06, 0.05)
    rng = stream(3)
    seen = np.mean([draw_test([("x", p, rng.multinomial(1000, q))], 99, rng).p <= 0.05 for _ in range(150)])
    assert seen == pytest.approx(stated, abs=0.12) and 0.3 < stated < 0.95
    assert power(1000, 19, visible(1000, 19, 0.05), 0.05) == pytest.approx(0.9) and visible(5, 19, 0.05) is None


def test_an_outcome_that_ar_excludes_is_never_chance():
    assert pearson(np.array([9, 1]), np.array([1.0, 0.0])) == np.inf
    assert draw_test([("x", np.array([1.0, 0.0]), np.array([9, 1]))], 99, stream(0)).p == 0.01
    assert draw_test([("x", np.array([np.nan, 0.0]), np.array([9, 1]))], 99, stream(0)).p == 0.01


def test_holm():
    assert holm({"a": 0.004, "b": 0.3, "c": 0.02}, 0.05) == ["a", "c"]
    assert holm({"a": 0.03, "b": 0.03}, 0.05) == []


# --- the whole flow ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm():
    return check(small(), ITEMS, PENALISED)


def test_a_right_engine_draws_what_ar_draws(warm):
    assert warm["exit_code"] == 0
    for mode in ("linear", "tree_forked"):
        found = warm["sampling"]["modes"][mode]
        assert found["max_tv"] < 1e-4 and not found["wrong"] and found["draws"]["verdict"] == "pass"
        assert found["moved"] == pytest.approx(0, abs=1e-5) and found["alarm"] is None
        for case in warm["cases"]:
            walk = case["modes"][mode]["sampled"]["acceptance"]
            assert not (walk["wrong_accept"] or walk["wrong_reject"] or walk["wrong_bonus"])
            for node in case["nodes"]:
                assert node[mode]["sampled"]["tv"] <= node[mode]["sampled"]["bound"] + 1e-9
                assert node[mode]["sampled"]["choice"] == node["ar"]["choice"]
    assert json.loads(json.dumps(warm, allow_nan=False)) == warm


def test_the_control_draws_something_else(warm):
    found = warm["sampling"]["modes"]["tree_unforked"]
    assert found["median_tv"] > 0.05 and found["draws"]["verdict"] == "not ar's" and not found["wrong"]
    assert found["draws"]["p_own"] > 0.01 and found["expected_accepted"] is None and found["alarm"]


def test_greedy_runs_carry_no_sampling_and_are_as_before():
    record = check(small(), ITEMS[:1], Settings(budgets=(8,)))
    assert "sampling" not in record and "sampled" not in record["cases"][0]["nodes"][0]["tree_forked"]


def processed_by(rule: str, *modes: str):
    """Logit processors of an engine that count another history in these modes."""

    def processed(mode, tree, nodes, logits, sampling, prompt_tokens, made):
        rules = [rule if mode in modes else "path"] * len(nodes)
        past = [history(one, tree, node, prompt_tokens, made) for one, node in zip(rules, nodes, strict=True)]
        raw = logits.double().numpy()
        return torch.tensor(np.stack([process(x, sampling, one) for x, one in zip(raw, past, strict=True)])).float()

    return processed


def differs(tree: DraftTree, rule: str, prompt_tokens) -> list[int]:
    """Nodes where a rule counts something else than the path does, as far as a penalty can show it."""
    found = []
    for node in range(len(tree)):
        right, wrong = history("path", tree, node, prompt_tokens), history(rule, tree, node, prompt_tokens)
        if wrong is None or sorted(right.made) != sorted(wrong.made):
            found.append(node)
    return found


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "path"])
def test_b29_raw_logits_pass_and_the_history_of_penalties_is_named(rule):
    settings = sampled(PENALISED, top_p=1.0, draws=0)
    host = Faulty(small(), processed=processed_by(rule, "tree_forked"))
    record = check(host, ITEMS[:1], settings)
    case = record["cases"][0]
    tree = DraftTree.from_json(case["tree"])
    expected = differs(tree, rule, ITEMS[0].tokens)
    found = case["modes"]["tree_forked"]["sampled"]
    assert found["wrong"] == expected and rule in found["histories"] and record["exit_code"] == 1
    assert all(node["tree_forked"]["verdict"] in ("pass", "tie") for node in case["nodes"])
    reason = case["modes"]["tree_forked"]["reason"]
    assert reason.startswith("raw pass, processed fail: ") and f"first node {expected[0]}" in reason
    assert case["modes"]["linear"]["verdict"] == "pass"
    if rule != NONE:
        assert expected[0] > 0 or rule in ("batch", "parent")
    assert found["histories"] == [rule] or rule == "sibling"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b29_an_engine_whose_own_processors_are_right_passes(dtype):
    record = check(Faulty(small(dtype), processed=processed_by("path")), ITEMS, PENALISED)
    assert record["exit_code"] == 0 and not record["sampling"]["modes"]["tree_forked"]["wrong"]


def test_b29_penalties_left_out_of_linear_too():
    host = Faulty(small("bfloat16"), processed=processed_by(NONE, "linear", "tree_forked"))
    record = check(host, ITEMS[:1], sampled(PENALISED, draws=0))
    assert all(found["draws"] is None for found in record["sampling"]["modes"].values())
    for mode in ("linear", "tree_forked"):
        assert record["cases"][0]["modes"][mode]["reason"].startswith(
            "raw pass, processed fail: its penalties are not applied, first node "
        )


def test_a_cut_that_another_k_makes_is_no_history():
    def processed(mode, tree, nodes, logits, sampling, prompt_tokens, made):
        return processed_by("path")(mode, tree, nodes, logits, replace(sampling, top_k=7), prompt_tokens, made)

    record = check(Faulty(small(), processed=processed), ITEMS[:1], sampled(PENALISED, top_k=8, top_p=1.0, draws=0))
    reason = record["cases"][0]["modes"]["tree_forked"]["reason"]
    assert record["exit_code"] == 1 and "no history of its penalties explains it" in reason


def test_a_shift_of_whole_rows_matters_to_a_repetition_penalty_alone():
    """Log probabilities given as logits: no raw difference, but x / theta is another number."""
    for settings, code in ((PENALISED, 1), (sampled(PENALISED, repetition_penalty=1.0), 0)):
        host = Faulty(small(), linear=lambda logits: logits - 30)
        record = check(host, ITEMS[:1], replace(settings, draws=0))
        assert record["exit_code"] == code
        assert ("whole rows are shifted, by -30" in str(record["cases"][0]["modes"]["linear"]["reason"])) == (code == 1)


def test_the_controls_history_is_a_setting_and_named():
    record = check(small(), ITEMS[:1], sampled(PENALISED, top_p=1.0, draws=0, history="rows"))
    assert record["exit_code"] == 0
    assert (
        "the history of its penalties is all rows before it" in record["cases"][0]["modes"]["tree_unforked"]["reason"]
    )


def test_bf16_draws_differ_by_rounding_alone_and_do_not_fail():
    record = check(small("bfloat16"), ITEMS, sampled(PENALISED, draws=2000))
    assert record["exit_code"] == 0
    for case in record["cases"]:
        assert all(
            n["tree_forked"]["sampled"]["tv"] <= n["tree_forked"]["sampled"]["bound"] + 1e-9 for n in case["nodes"]
        )


def test_a_sampler_that_is_off_is_a_defect_of_the_run(monkeypatch):
    monkeypatch.setattr(draws_module, "noise", lambda *given: noise(*given) / 2)
    record = check(small(), ITEMS, sampled(WARM, temperature=2.0))
    assert record["exit_code"] == 1
    assert any("its draws do not follow its own distribution" in reason for reason in record["verdict"]["reasons"])


def test_greedy_with_penalties_has_no_draws_and_is_judged():
    settings = Settings(budgets=(16,), sampling=Sampling(presence_penalty=3.0))
    assert check(small(), ITEMS, settings)["exit_code"] == 0
    record = check(Faulty(small(), processed=processed_by("prompt", "tree_forked")), ITEMS, settings)
    assert record["sampling"]["modes"]["tree_forked"]["draws"] is None
    found = [case["modes"]["tree_forked"]["sampled"] for case in record["cases"]]
    assert any(one["wrong"] for one in found) == (record["exit_code"] == 1)


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [WARM, PENALISED], ids=["warm", "penalised"])
def test_rounds_under_shared_noise_give_ars_sampled_text(settings):
    host = engine("qwen3_5_text")
    found = generate(host, ITEMS[1:], settings, Rounds(4, plain=2))
    for mode in ("linear", "tree_forked"):
        assert found["summary"][mode]["off"] == 0 and found["summary"][mode]["same_text"] == 1
    assert found["summary"]["tree_unforked"]["off"] > 0 == found["summary"]["tree_unforked"]["same_text"]
    other = generate(host, ITEMS[1:], replace(settings, seed=1), Rounds(2, ("linear",)))
    texts = [run["prompts"][0]["modes"]["linear"]["tokens"] for run in (found, other)]
    assert texts[0][: len(texts[1])] != texts[1]


def test_rounds_without_the_penalties_of_ar_are_off_though_their_logits_are_right():
    host = Faulty(small(), processed=processed_by(NONE, "tree_forked"))
    settings = sampled(PENALISED, presence_penalty=-6.0)  # a token of the text comes again
    found = generate(host, ITEMS[:1], settings, Rounds(3, ("linear", "tree_forked")))
    assert found["exit_code"] == 1 and found["summary"]["tree_forked"]["off"] > 0 == found["summary"]["linear"]["off"]
    first = found["summary"]["tree_forked"]["first"]
    assert first["max_abs"] < first["floor"] and not first["tie"]


def test_logits_that_are_not_finite_are_off_and_no_tie():
    host = Faulty(small(), logits=nan_at_the_root)
    found = generate(host, ITEMS[:1], WARM, Rounds(1, ("tree_forked",)))
    assert found["exit_code"] == 1 and found["summary"]["tree_forked"]["ties"] == 0
    record = check(host, ITEMS[:1], replace(WARM, budgets=(4,)))
    assert record["exit_code"] == 1 and record["sampling"]["modes"]["linear"]["max_tv"] is None
    json.dumps(record["sampling"], allow_nan=False)
