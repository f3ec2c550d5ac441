"""The DFlash drafter: its form, the target's features, what is refused, and a bad draft told from a bad verify."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from ddtree_check.base.errors import UsageError
from ddtree_check.base.resources import DRAFTER, EMBEDDED, fixtures_dir
from ddtree_check.engines import dflash
from ddtree_check.engines.dflash import Drafter, Network, Spec, load, spread
from ddtree_check.engines.transformers import loading
from ddtree_check.engines.transformers.engine import TransformersEngine
from ddtree_check.flows.check import Item, Settings
from ddtree_check.flows.job import Job, draft_source, run
from ddtree_check.flows.rounds import POLLUTION, Rounds, generate
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.selftest.draft_faults import DRAFT_FAULTS
from ddtree_check.tree.case import load_prompts
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.best_first import PUBLISHED, best_first, expected_accepts, published_tree
from ddtree_check.tree.drafts.marginals import surprise

FIXTURE = fixtures_dir() / "models" / DRAFTER
CONFIG = json.loads((FIXTURE / "config.json").read_text())
WIDTH = len(CONFIG["dflash_config"]["target_layer_ids"]) * CONFIG["hidden_size"]
published = pytest.mark.skipif(
    find_spec("dflash") is None, reason="needs the package dflash: pip install --no-deps dflash==0.1.0"
)


@functools.cache
def target() -> TransformersEngine:
    return TransformersEngine.load(None)


@functools.cache
def prompts() -> tuple[tuple[str, tuple[int, ...]], ...]:
    tokenizer = loading.load_tokenizer(loading.resolve(None))
    texts = load_prompts(fixtures_dir() / "prompts" / "code.jsonl")
    return tuple((prompt.id, tuple(tokenizer(prompt.text)["input_ids"])) for prompt in texts)


def reading(drafter: Drafter) -> TransformersEngine:
    target().read_features(drafter.spec.layers)
    return target()


# --- the published form ----------------------------------------------------------------------------------------------

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
SECOND = {
    "architectures": ["DFlash2DraftModel"], "conv_kernel_size": 3, "conv_group_size": 16,
    "selector_rank": 8, "selector_top_k": 4,
}  # fmt: skip


def drawn(config: Qwen3Config):
    """The package's model with drawn weights, so that every one of them matters."""
    import dflash as package

    theirs = getattr(package, config.architectures[0])(config).float().eval()
    draw = torch.Generator().manual_seed(0)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3 if weight.ndim > 1 else 1, generator=draw)
    return theirs


@published
@pytest.mark.parametrize(
    "changes, bound",
    [
        pytest.param({}, 0, id="dflash"),
        pytest.param(SLIDING, 0, id="sliding"),
        pytest.param({"is_causal": True}, 0, id="causal"),
        pytest.param({"attention_bias": True}, 0, id="biases"),
        pytest.param(SECOND, 1e-4, id="dflash2"),  # adds its kernels in another order: 3.5e-5 where rows have std 1
    ],
)
def test_the_network_is_the_packages(changes, bound):
    three = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    config = Qwen3Config.from_dict(CONFIG | three | changes)
    torch.manual_seed(0)
    theirs, ours = drawn(config), Network(config, Spec.read(config, "drawn")).eval()
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if not k.startswith(dflash.SELECTOR)})
    features, block, positions = torch.randn(1, 20, WIDTH), torch.randn(1, 16, 128), torch.arange(36)[None]
    with torch.no_grad():
        right = theirs(position_ids=positions, noise_embedding=block, target_hidden=features)
        found = ours(features, block, positions)
        other = ours(features, block, positions + torch.arange(36) // 20)  # the block one position late
    assert (found - right).abs().max() <= bound
    assert (other - right).abs().max() > 0.01


@published
def test_marginals_are_those_of_the_packages_own_loop():
    """Features, block, head and scale as the package's generate puts them together, on the embedded model."""
    from dflash import DFlashDraftModel, extract_context_feature

    drafter = load(DRAFTER, target())
    config = Qwen3Config.from_dict(CONFIG | {"output_multiplier": 0.7, "final_logit_softcapping": 20.0})
    spec = Spec.read(config, DRAFTER)
    assert (spec.output_scale, spec.softcap) == (0.7, 20.0)
    ours = Drafter(drafter.network, spec, DRAFTER)
    theirs = DFlashDraftModel(config).float().eval()
    theirs.load_state_dict(drafter.network.state_dict())
    engine, tokens = reading(ours), torch.tensor([prompts()[0][1]])
    prefix = engine.prefill(tokens[0].tolist())
    root = int(prefix.logits.argmax())
    with torch.no_grad():
        states = engine.model(tokens, output_hidden_states=True).hidden_states
        context = extract_context_feature(states, theirs.target_layer_ids)
        block = torch.tensor([[root] + [theirs.mask_token_id] * 15])
        embedded = engine.model.get_input_embeddings()(block)
        positions = torch.arange(tokens.shape[1] + 16)[None]
        hidden = theirs(position_ids=positions, noise_embedding=embedded, target_hidden=context)[:, -15:]
        right = theirs.compute_logits(hidden, engine.model.lm_head).log_softmax(-1)[0].numpy()
    assert np.abs(ours.marginals(engine, prefix.features, root, 15) - right).max() < 1e-4
    assert np.abs(drafter.marginals(engine, prefix.features, root, 15) - right).max() > 0.1  # without scale and cap


@published
def test_layers_that_a_checkpoint_does_not_name():
    from dflash.model import build_target_layer_ids

    for total in (8, 24, 64):
        for own in (1, 2, 3, 5, 8):
            assert spread(total, own) == build_target_layer_ids(total, own)


def test_sharded_and_second_checkpoints_load(tmp_path):
    weights = load_file(FIXTURE / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (tmp_path / dflash.INDEX).write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "evil.Model"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code was run')")
    one, other = load(str(tmp_path), target()), load(DRAFTER, target())
    assert all(torch.equal(a, b) for a, b in zip(one.network.parameters(), other.network.parameters(), strict=True))


# --- the target's features -------------------------------------------------------------------------------------------


def test_features_come_from_the_engines_own_passes():
    drafter = load(DRAFTER, target())
    engine, (_, tokens) = reading(drafter), prompts()[0]
    calls = []
    hook = engine.model.register_forward_pre_hook(lambda *_: calls.append(1))
    prefix = engine.prefill(tokens)
    root = int(prefix.logits.argmax())
    tree = DraftTree((root, 7, 8, 9, 10), (-1, 0, 0, 1, 2))
    forked, flat = (engine.verify(prefix, tree, wiring) for wiring in (FORKED, UNFORKED))
    _, stepped = engine.step(prefix, root)
    hook.remove()
    assert len(calls) == 4  # no pass but those
    layers = [layer + 1 for layer in drafter.spec.layers]

    def forward(path):
        with torch.no_grad():
            states = engine.model(torch.tensor([[*tokens, *path]]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], -1)

    assert (prefix.features - forward(())).abs().max() < 1e-3
    assert (stepped.features[-1] - forward((root,))[-1]).abs().max() < 1e-3
    wrong = []
    for node in range(len(tree)):
        right = forward(tree.path_tokens(node))[-1]
        assert (forked.features[node] - right).abs().max() < 1e-3, node
        wrong.append(bool((flat.features[node] - right).abs().max() > 0.1))
    assert wrong == [False, False, True, True, True]
    engine.read_features(())
    assert engine.prefill(tokens).features is None


# --- what does not fit -----------------------------------------------------------------------------------------------


def nested(**changes):
    return {"dflash_config": CONFIG["dflash_config"] | changes}


UNFIT = [  # what is changed, and the line that it leads to
    pytest.param({"block_size": 1}, "block_size is 1, expected a whole number of at least 2", id="block-size"),
    pytest.param(nested(mask_token_id=1024), "mask_token_id is 1024, expected a token of the target", id="mask-token"),
    pytest.param(nested(target_layer_ids=[1, 3, 8]), "target_layer_ids holds 8, expected layers", id="layer-ids"),
    pytest.param({"vocab_size": 512}, "vocab_size is 512, expected the target's 1024", id="vocabulary"),
    pytest.param({"hidden_size": 64}, "hidden_size is 64, expected the target's 128", id="hidden-size"),
    pytest.param({"num_target_layers": 64}, "num_target_layers is 64, expected the target's 8", id="target-layers"),
    pytest.param({"architectures": ["Qwen3ForCausalLM"]}, "its class is Qwen3ForCausalLM, expected DFlash", id="class"),
    pytest.param(nested(mask_token_id=None), "mask_token_id is None, expected a whole number", id="no-mask-token"),
    pytest.param(nested(target_layer_ids=[1, 7]), "target_layer_ids holds 7, expected layers but", id="last-layer"),
    pytest.param(
        nested(target_layer_ids=[1, 3]), rf"fc.weight is \[128, {WIDTH}\], expected \[128, 256\]", id="features"
    ),
    pytest.param({"num_hidden_layers": 2}, "its weights are off: it holds layers.2", id="layer-too-many"),
    pytest.param({"num_hidden_layers": 7}, "its weights are off: it lacks layers.6", id="layer-missing"),
    pytest.param({"num_hidden_layers": "three"}, "cannot be read", id="no-number"),
]


@pytest.mark.parametrize("changes, line", UNFIT)
def test_an_unfit_checkpoint_is_one_clear_line(changes, line, tmp_path):
    shutil.copy(FIXTURE / "model.safetensors", tmp_path)
    changes = {k: v for k, v in changes.items()} | ({"layer_types": None} if "num_hidden_layers" in changes else {})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(UsageError, match=line) as caught:
        load(str(tmp_path), target())
    assert "\n" not in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize(
    "kind, line", [("nan", "is not finite"), ("cut", "holds a corrupt safetensors file"), ("none", "it has no model")]
)
def test_unfit_weights_are_one_clear_line(kind, line, tmp_path):
    shutil.copy(FIXTURE / "config.json", tmp_path)
    weights = load_file(FIXTURE / "model.safetensors")
    weights["fc.weight"][0, 0] = torch.nan
    if kind != "none":
        save_file(weights, tmp_path / "model.safetensors")
    if kind == "cut":
        (tmp_path / "model.safetensors").write_bytes((FIXTURE / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UsageError, match=line):
        load(str(tmp_path), target())


def test_no_such_drafter():
    with pytest.raises(UsageError, match=r"no drafter '/no/such'.*--draft self"):
        load("/no/such", target())
    with pytest.raises(UsageError, match="no default drafter"):
        load(None, target())
    drafter = load(DRAFTER, target())
    right = torch.zeros(4, WIDTH)
    for features, length in ((None, 3), (torch.zeros(4, 7), 3), (right, 16), (right, 0)):
        with pytest.raises(ValueError, match="dflash"):
            drafter.marginals(target(), features, 5, length)


def test_the_embedded_model_drafts_with_its_drafter():
    assert draft_source(Job()) == draft_source(Job(model=EMBEDDED)) == "dflash"
    assert draft_source(Job(model="tiny-lfm2")) == draft_source(Job(weights="random")) == "self"
    assert draft_source(Job(settings={"acceptance": 0.5})) == "self"
    assert draft_source(Job(draft="ngram")) == "ngram"
    size = sum(path.stat().st_size for path in FIXTURE.iterdir())
    assert size <= 2_000_000


# --- a bad drafter is no bad verify ----------------------------------------------------------------------------------


def decode(make=lambda drafter: drafter, chosen=slice(2), rounds=3, modes=("linear", "tree_forked"), budget=12) -> dict:
    drafter = make(load(DRAFTER, target()))
    items = [Item(name, tokens, drafter=drafter) for name, tokens in prompts()[chosen]]
    settings = Settings(draft="dflash", budgets=(budget,))
    return generate(reading(drafter), items, settings, Rounds(rounds=rounds, modes=modes))


@functools.cache
def clean(count=2, rounds=3) -> dict:
    return decode(chosen=slice(count), rounds=rounds, modes=("linear", "tree_forked", "tree_unforked"))


def test_the_n_gram_draft_beside_it_has_the_same_form():
    """A chain beside a chain, a tree beside a tree: in the first round, what a run of that draft accepts."""
    chosen = slice(3, 6)  # an n-gram draft fits two of these
    items = [Item(name, tokens) for name, tokens in prompts()[chosen]]
    found = {}
    for mode in ("linear", "tree_forked"):
        run = generate(target(), items, Settings(draft="ngram", budgets=(12,)), Rounds(rounds=1, modes=(mode,)))
        own = [prompt["modes"][mode]["rounds"][0]["ar_accepted"] for prompt in run["prompts"]]
        beside = decode(chosen=chosen, rounds=1, modes=(mode,))["prompts"]
        found[mode] = [prompt["modes"][mode]["rounds"][0]["drafter"]["ngram"] for prompt in beside]
        assert found[mode] == own
    assert sum(found["tree_forked"]) > sum(found["linear"]) > 0


def test_a_leaked_verify_pollutes_the_drafter():
    found = clean()["summary"]
    assert found["tree_forked"]["off"] == found["linear"]["off"] == 0
    assert found["tree_forked"]["drafter"]["polluted"] == found["linear"]["drafter"]["polluted"] == 0
    polluted = found["tree_unforked"]["drafter"]
    assert polluted["polluted"] > 0 and polluted["says"] == POLLUTION


def drafter_side(found: dict, right: dict) -> None:
    """Verify passes, the text is the same, acceptance is lower, and the report says whose fault it is."""
    for mode in ("linear", "tree_forked"):
        mine, theirs = found["summary"][mode], right["summary"][mode]
        assert mine["off"] == 0 and mine["same_text"] == mine["texts"]
        assert mine["accepted_per_round"] < theirs["accepted_per_round"]
        assert theirs["drafter"]["surprised"] < 3
    says = found["summary"]["tree_forked"]["drafter"]["says"]
    assert says.startswith("low acceptance is drafter-side")
    assert not (right["summary"]["tree_forked"]["drafter"]["says"] or "").startswith("low acceptance")


def test_a_shifted_block_is_drafter_side():
    drafter_side(decode(DRAFT_FAULTS["shifted block"]), clean())


@pytest.mark.slow
@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_draft_faults_are_drafter_side(fault):
    drafter_side(decode(DRAFT_FAULTS[fault], chosen=slice(8), rounds=20), clean(count=8, rounds=20))


def test_surprise_is_zero_on_average_and_sees_a_wrong_draft():
    draw = np.random.default_rng(0)
    table = np.log(draw.dirichlet([0.3] * 6, size=3))
    other = np.log(draw.dirichlet([0.3] * 6, size=3))
    parts, wrong = [], []
    for _ in range(2000):
        tokens = [int(draw.choice(6, p=np.exp(row))) for row in table]
        stop = next((k + 1 for k, token in enumerate(tokens) if token != int(table[k].argmax())), 3)
        parts.append(surprise(table, tokens[:stop]))
        wrong.append(surprise(other, tokens[:stop]))
    for found, low, high in ((parts, -3, 3), (wrong, 10, np.inf)):
        excess, variance = np.sum(found, axis=0)
        assert low < excess / variance**0.5 < high


def test_expected_accepts_on_paper():
    table = np.log([[0.5, 0.25, 0.25], [0.6, 0.3, 0.1]])
    tree = DraftTree((9, 0, 1, 0), (-1, 0, 0, 1))
    assert expected_accepts(table, tree) == pytest.approx(0.5 + 0.25 + 0.3)


# --- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, nodes, depth, at_root",
    [("eagle", 25, 5, 4), ("medusa", 63, 4, 10), ("token-recycling", 80, 6, 8)],
)
def test_published_trees(name, nodes, depth, at_root):
    table = np.log(np.random.default_rng(1).dirichlet([1] * 40, size=8)).astype(np.float32)
    tree = published_tree(table, name, root=3)
    assert (len(tree) - 1, max(tree.depth), len(tree.children[0])) == (nodes, depth, at_root)
    assert tree == tree.reordered("breadth")[0]
    ranks = [np.argsort(-row, kind="stable").tolist() for row in table]
    words = PUBLISHED[name].split()
    for node, word in enumerate(words, start=1):
        path = [ranks[place][int(rank)] for place, rank in enumerate(word)]
        assert list(tree.path_tokens(node)[1:]) == path
    shallow = published_tree(table[:2, :3], name)
    assert max(shallow.depth) == 2 and max(map(len, shallow.children)) <= 3
    with pytest.raises(ValueError, match="'oak', expected one of eagle"):
        published_tree(table, "oak")


def test_a_published_tree_and_a_trace_run(tmp_path):
    record = run(Job(limit=1, tree="eagle"))
    (case,) = record["cases"]
    assert case["id"].endswith("/eagle") and len(case["nodes"]) == 26
    assert record["exit_code"] in (0, 2) and record["model"]["drafter"]["name"] == DRAFTER
    assert all(case["modes"][mode]["verdict"] == "pass" for mode in ("linear", "tree_forked"))
    trace = {"accepted_indices": [0], "node_token_ids": [5, 9, 11], "node_depths": [1, 1, 2], "parents": [-1, 0, 0, 2]}
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(trace) + "\n")
    (case,) = run(Job(limit=1, draft=f"recorded:{file}"))["cases"]
    assert [node["parent"] for node in case["nodes"]] == [-1, 0, 0, 2]
    assert [node["token"] for node in case["nodes"]][1:] == [5, 9, 11]


# --- the reference's definitions, written down again -----------------------------------------------------------------


def built(table: np.ndarray, budget: int, root: int) -> DraftTree:
    """Best-first by its definition, no heap: of all nodes that may come next, the most probable; ties by ranks."""
    count = min(budget, table.shape[1])
    order = [sorted(range(table.shape[1]), key=lambda token, row=row: (-row[token], token))[:count] for row in table]
    chosen: dict[tuple[int, ...], int] = {(): 0}
    tokens, parents = [root], [-1]
    while len(tokens) <= budget:
        following = [(*path, 0) for path in chosen if len(path) < len(table)]
        following += [(*path[:-1], path[-1] + 1) for path in chosen if path and path[-1] + 1 < count]
        following = [path for path in following if path not in chosen]
        if not following:
            break

        def weight(path):
            total = 0.0
            for row, ranked, rank in zip(table, order, path, strict=False):
                total += float(row[ranked[rank]])
            return total

        path = min(following, key=lambda path: (-weight(path), path))
        chosen[path] = len(tokens)
        tokens.append(order[len(path) - 1][path[-1]])
        parents.append(chosen[path[:-1]])
    return DraftTree(tuple(tokens), tuple(parents))


def walked(tree: DraftTree, argmax) -> tuple[list[int], int]:
    """From the root on to the child that carries the target's token; the first token without one is the bonus."""
    path, table = [0], {(p, t): n for n, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    while (node := table.get((path[-1], int(argmax[path[-1]])))) is not None:
        path.append(node)
    return path, int(argmax[path[-1]])


def test_builder_and_walk_follow_the_definitions_on_1000_marginals():
    from ddtree_check.tree.accept import greedy_walk

    draw = np.random.default_rng(7)
    deep = 0
    for case in range(1000):
        depths, vocab = int(draw.integers(1, 16)), int(draw.integers(2, 40))
        logits = draw.normal(size=(depths, vocab)) * draw.choice([0.3, 1, 3])
        if case % 5 == 0:
            logits = np.round(logits)  # ties
        table = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
        budget = int(draw.integers(1, 25))
        tree = best_first(table, budget, root=3)
        assert tree == built(table, budget, 3), case
        argmax = draw.integers(0, vocab, size=len(tree))
        for node in range(len(tree)):  # mostly a child, so that walks go on
            if tree.children[node] and draw.random() < 0.9:
                argmax[node] = tree.tokens[draw.choice(tree.children[node])]
        walk = greedy_walk(tree, argmax)
        assert (list(walk.path), walk.bonus) == walked(tree, argmax), case
        deep += len(walk.path) > 2
    assert deep > 250  # 280 walks of two nodes or more


@pytest.mark.parametrize("fault", ["layers", "rows"])
def test_the_definition_is_not_met_by_a_faulty_builder(fault):
    table = np.log(np.random.default_rng(2).dirichlet([1] * 12, size=6)).astype(np.float32)
    wrong = table[::-1] if fault == "layers" else np.roll(table, 1, axis=1)
    assert best_first(wrong, 20, root=3) != built(table, 20, 3)


def test_a_drafter_of_a_smaller_block_drafts_less():
    drafter = load(DRAFTER, target())
    small = replace(drafter, spec=replace(drafter.spec, block_size=4))
    prefix = reading(small).prefill(prompts()[0][1])
    assert small.length == 3
    assert small.marginals(target(), prefix.features, 5, 3).shape == (3, 1024)
