"""The few objects of SGLang that the recorder meets, by their own names, around a model of ours or random logits."""

from __future__ import annotations

from types import SimpleNamespace as Space

import numpy as np
import torch

from ddtree_check.engines.sglang.recorder import DRAFT, FORWARD, RUN, SAMPLE, install
from ddtree_check.engines.sglang.scripted import drafts
from ddtree_check.model.wiring import FORKED
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.formats import to_links
from tests.models import VOCAB


class Mode:
    def __init__(self, verify: bool):
        self.verify = verify

    def is_target_verify(self) -> bool:
        return self.verify


class Request:
    def __init__(self, rid: str, prompt, output, req_pool_idx=None):
        self.rid, self.origin_input_ids, self.output_ids = rid, list(prompt), list(output)
        self.done, self.req_pool_idx, self.cached_tokens = False, req_pool_idx, 0

    def finished(self) -> bool:
        return self.done


class GDNAttnBackend(Space):
    """Goes by its name: its states are [heads, value, key]."""


SLOTS = 3  # of the state pool, before the requests' own


class Server:
    """Serves requests by trees: `propose` (request) gives each one's tree, `logits` (context, tree) the verify's rows.

    wiring: what an engine of ours verifies with; gate: SGLang's topk; told: what the recurrent layers are given in
    place of the tree's own links; late: results reach the requests one step later, as overlap has it; commit: (path) ->
    the node whose state is put into the request's slot, None for no commit; slot: added to the slots that are told;
    block: verifies the rows of a block, without links, as DFLASH does.
    """

    def __init__(self, options, script=None, *, engine=None, wiring=FORKED, rows=12, gate=8, told=None, late=False,
                 file=None, vocab=None, missing=(), commit=lambda path: path[-1], slot=0, block=False):  # fmt: skip
        self.hooks = {}
        install(options, script, lambda *hook: self._register(*hook, missing), file)
        self.engine, self.wiring, self.rows, self.told, self.late = engine, wiring, rows, told, late
        self.vocab = vocab or (engine.vocab_size if engine else VOCAB)
        self.backend = GDNAttnBackend(topk=gate, forward_metadata=None)
        self.commit, self.slot, self.block, self._begun = commit, slot, block, 0
        args = Space(
            model_path="tiny", speculative_algorithm="NGRAM", speculative_eagle_topk=gate, max_running_requests=4,
            speculative_num_draft_tokens=rows,
        )  # fmt: skip
        self.runner = Space(
            attn_backend=Space(linear_attn_backend=self.backend),
            dtype=getattr(engine, "dtype", torch.float32),
            server_args=args,
            model_config=Space(vocab_size=self.vocab, hf_config=Space(model_type="qwen3_5_text")),
            spec_algorithm=Space(name="NGRAM"),
            req_to_token_pool=Space(size=4, req_index_to_mamba_index_mapping=torch.arange(SLOTS, SLOTS + 9)),
            token_to_kv_pool_allocator=Space(size=20),
            decode_cuda_graph_runner=Space(capture_bs=[1, 2]),
        )
        if engine is not None:
            self._make_pool()
        self.worker = Space(model_runner=self.runner, ps=Space(tp_rank=0), draft_token_num=rows, enable_overlap=late)
        self.served, self._owed = 0, []
        self.rng = np.random.default_rng(0)

    def _register(self, target, hook, kind, missing) -> bool:
        if target not in missing:
            self.hooks[target] = hook
        return target not in missing

    @property
    def recorder(self):
        return self.hooks[RUN].__self__

    def _make_pool(self):
        """State slots in SGLang's layout: windows [layers, slots, channels, w - 1], states [.., heads, value, key]."""
        held = self.engine.contents(self.engine.prefill([1, 2]))[1]
        recurrent = [layer for layer, own in enumerate(held) if "recurrent" in own]
        conv, state = held[recurrent[0]]["conv"], held[recurrent[0]]["recurrent"].transpose(-1, -2)
        cache = Space(
            conv=[conv.new_zeros(len(recurrent), SLOTS + 9, conv.shape[1], len(conv) - 1)],
            temporal=state.new_zeros(len(recurrent), SLOTS + 9, *state.shape),
            intermediate_ssm=torch.zeros(1, 5, self.rows, 1), intermediate_conv_window=[torch.zeros(1, 5, self.rows)],
        )  # fmt: skip
        pool = self.runner.req_to_token_pool
        pool.mamba_pool = Space(mamba_cache=cache, size=SLOTS + 8)
        pool.mamba_map = {layer: row for row, layer in enumerate(recurrent)}

    def _put(self, req, context, tree, path):
        """SGLang's commit: the state of a node, into the request's slot."""
        node = self.commit(path)
        if node is None or self.engine is None:
            return
        verified = self.engine.verify(self.engine.prefill(context[:-1]), tree, self.wiring)
        held = self.engine.contents(self.engine.commit(verified, node))[1]
        pool = self.runner.req_to_token_pool
        cache, slot = pool.mamba_pool.mamba_cache, SLOTS + req.req_pool_idx
        for layer, row in pool.mamba_map.items():
            cache.conv[0][row, slot] = held[layer]["conv"][1:].T
            cache.temporal[row, slot] = held[layer]["recurrent"].transpose(-1, -2)

    def begin(self, rid, prompt) -> Request:
        """After its prefill: one token is out."""
        first = int(self.engine.prefill(prompt).logits.argmax()) if self.engine else int(self.rng.integers(self.vocab))
        self._begun += 1
        return Request(rid, prompt, [first], self._begun - 1)

    def step(self, reqs, propose, *, verify=True):
        batch = Space(reqs=reqs, forward_mode=Mode(verify), grammar_needs_sync=lambda: False)
        self._batch_propose = propose
        if RUN in self.hooks:
            return self.hooks[RUN](lambda scheduler, batch: self._run(batch), self, batch)
        return self._run(batch)

    def _context(self, req):
        return [*req.origin_input_ids, *req.output_ids, *next((new for r, new in self._owed if r is req), [])]

    def _run(self, batch):
        reqs, n = batch.reqs, self.rows
        contexts = [self._context(req) for req in reqs]
        proposed = [self._batch_propose(context) for context in contexts]
        tokens, mask = np.zeros(len(reqs) * n, np.int64), np.zeros(len(reqs) * n * n, np.int64)
        drafts(proposed, tokens, mask, n)
        self.worker.prev_accept_lens = [len(new) for _, new in self._owed] or [0] * len(reqs)
        self.worker.prev_token_ids = [t for _, new in self._owed for t in (*new, *[0] * (n - len(new)))]
        if DRAFT in self.hooks:
            self.hooks[DRAFT]((tokens, mask), self.worker, batch)
        mask = mask.reshape(-1, n, n)
        trees, links = [], []
        for at in range(len(reqs)):
            parents = [-1, *(int(np.flatnonzero(row[:place])[-1]) for place, row in enumerate(mask[at]) if place)]
            tree = padded(tokens[at * n : (at + 1) * n].tolist(), parents)
            trees.append(tree[0])
            links.append(tree[1])
        self.trees = trees
        rows = torch.cat([self._rows(context, tree) for context, tree in zip(contexts, trees, strict=True)])
        lengths = [len(context) - 1 for context in contexts]
        full = [np.concatenate([np.ones((n, p), bool), m.astype(bool)], 1) for p, m in zip(lengths, mask, strict=True)]
        batch.seq_lens = torch.tensor(lengths)
        batch.seq_lens_cpu = batch.seq_lens
        batch.spec_info = spec = Space(
            draft_token=torch.from_numpy(tokens),
            draft_token_num=n,
            positions=torch.tensor([p + int(row.sum()) - 1 for p, m in zip(lengths, mask, strict=True) for row in m]),
            custom_mask=torch.from_numpy(np.concatenate([m.ravel() for m in full])),
            retrieve_next_token=torch.from_numpy(np.stack([link[0] for link in links])),
            retrieve_next_sibling=torch.from_numpy(np.stack([link[1] for link in links])),
        )
        if self.block:
            batch.spec_info = spec = Space(draft_token=spec.draft_token, draft_token_num=n, positions=spec.positions,
                                           custom_mask=None, topk=1)  # fmt: skip
        told = np.stack([link[2] for link in links])
        if self.told is not None:
            told = self.told(told)
        open_ = self.backend.topk > 1
        self.backend.forward_metadata = Space(
            mamba_cache_indices=torch.tensor([SLOTS + req.req_pool_idx + self.slot for req in reqs]).int(),
            retrieve_next_token=torch.from_numpy(np.stack([link[0] for link in links])) if open_ else None,
            retrieve_next_sibling=torch.from_numpy(np.stack([link[1] for link in links])) if open_ else None,
            retrieve_parent_token=torch.from_numpy(told) if open_ else None,
        )
        result = Space(logits_output=Space(next_token_logits=rows), can_run_cuda_graph=False)
        if FORWARD in self.hooks:
            self.hooks[FORWARD](result, self.worker, batch, is_verify=True)
        if not batch.forward_mode.is_target_verify():
            return result
        rows[:, 0] -= 100.0  # a penalty, in place, as SGLang's sampler adds it
        best = rows.argmax(-1)
        index, lens = torch.full((len(reqs), n), -1, dtype=torch.int32), torch.zeros(len(reqs), dtype=torch.int32)
        news = []
        for at, tree in enumerate(trees):
            path = [0]
            while True:
                token = int(best[at * n + path[-1]])
                child = next((c for c in tree.children[path[-1]] if tree.tokens[c] == token), None)
                if child is None:
                    break
                path.append(child)
            index[at, : len(path)] = torch.tensor([at * n + node for node in path])
            lens[at] = len(path)
            news.append([int(best[at * n + node]) for node in path])
            self._put(reqs[at], contexts[at], tree, path)
        if SAMPLE in self.hooks:
            self.hooks[SAMPLE]((best.to(torch.int32), lens, index), spec, batch, result.logits_output)
        flat = torch.tensor([[*new, *[0] * (n - len(new))] for new in news]).flatten()
        result.accept_lens, result.next_token_ids = lens, flat
        for owner, new in self._owed:
            owner.output_ids += new
        self._owed = list(zip(reqs, news, strict=True))
        if not self.late:
            for owner, new in self._owed:
                owner.output_ids += new
            self._owed = []
        self.served += sum(map(len, news))
        return result

    def settle(self):
        for owner, new in self._owed:
            owner.output_ids += new
        self._owed = []

    def _rows(self, context, tree):
        """Logits [rows, vocabulary]; rows past the tree's hold what they hold."""
        rest = torch.randn(self.rows - len(tree), self.vocab) * 50
        if self.engine is None:
            return torch.cat([torch.randn(len(tree), self.vocab), rest])
        found = self.engine.verify(self.engine.prefill(context[:-1]), tree, self.wiring).logits.float()
        return torch.cat([found, rest])


def padded(tokens, parents):
    """The tree without its padding (children of the root with token 0 at the end), and links of all rows."""
    keep = len(tokens)
    while keep > 1 and tokens[keep - 1] == 0 and parents[keep - 1] == 0 and (tokens[:keep - 1], parents) and any(
        tokens[row] == 0 and parents[row] == 0 for row in range(1, keep - 1)
    ):  # fmt: skip
        keep -= 1
    tree = DraftTree(tuple(tokens[:keep]), tuple(parents[:keep]))
    # SGLang links padding like any other child of the root.
    links = to_links(DraftTree((None, *range(1, len(tokens))), tuple(parents)))
    return tree, (links.next_token, links.next_sibling, np.array([0, *parents[1:]]))
