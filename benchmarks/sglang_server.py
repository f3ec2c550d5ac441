"""SGLang's own server over a matrix of its settings, recorded by the plugin, judged by the transformers engine.

    python -m benchmarks.sglang_server texts --out texts.json          what the fixture writes: for scripted trees
    python -m benchmarks.sglang_server serve SETTING --texts texts.json --out DIR      one setting: starts sgl.Engine
    python -m benchmarks.sglang_server judge DIR [--limit N]           a verdict for each folder of traces under DIR
    python -m benchmarks.sglang_server table DIR                       the table of docs/sglang-server.md

`serve` needs SGLang and a GPU, and ddtree-check installed (its entry point is how SGLang finds the plugin); `texts` and
`judge` need the transformers engine; they meet in files, so each may run in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

MODEL = "tiny-qwen3_5"
BASE = {  # of sgl.Engine
    "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": "triton", "linear_attn_backend": "triton",
    "sampling_backend": "pytorch", "grammar_backend": "none", "mem_fraction_static": 0.85, "max_total_tokens": 20000,
    "max_running_requests": 8, "max_mamba_cache_size": 64, "page_size": 1, "skip_server_warmup": True,
    "log_level": "warning", "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 17,
    "speculative_ngram_max_bfs_breadth": 8, "json_model_override_args": '{"full_attention_interval": 4}',
    "cuda_graph_max_bs_decode": 8,
}  # fmt: skip
EAGER = {"disable_cuda_graph": True, "disable_radix_cache": True, "disable_overlap_schedule": True}
SHAPES = [  # scripted trees of up to 17 rows: side branches, rejections, the first branch; and of up to 65
    {"shape": "comb", "nodes": 16}, {"shape": "random", "nodes": 16, "seed": 1}, {"shape": "kary", "nodes": 14},
    {"shape": "random", "nodes": 16, "seed": 2}, {"shape": "comb", "nodes": 16, "accept": "first"},
    {"shape": "random", "nodes": 12, "seed": 3}, {"shape": "kary", "nodes": 14, "accept": "none"},
]  # fmt: skip
DEEP = [
    {"shape": "random", "nodes": 64, "seed": 1}, {"shape": "comb", "nodes": 40}, {"shape": "kary", "nodes": 62},
    {"shape": "random", "nodes": 64, "seed": 2}, {"shape": "comb", "nodes": 24, "order": "depth"},
]  # fmt: skip
SHORT = [{"shape": "comb", "nodes": 8}, {"shape": "random", "nodes": 8, "seed": 1}, {"shape": "kary", "nodes": 6}]
BREADTH1 = {"speculative_ngram_max_bfs_breadth": 1}
SETTINGS = {  # name: (engine arguments, scripted shapes, requests, tokens a request)
    "defaults": ({}, None, 16, 96),
    "no-radix-scripted": ({"disable_radix_cache": True, "chunked_prefill_size": 64}, SHAPES, 24, 96),
    "defaults-scripted": ({"chunked_prefill_size": 64}, SHAPES, 24, 96),
    "eager-scripted": (EAGER, SHAPES, 16, 96),
    "eager-scripted-batch1": (EAGER | {"max_running_requests": 1}, SHAPES, 6, 96),
    "graphs-only": (EAGER | {"disable_cuda_graph": False, "chunked_prefill_size": 64}, SHAPES, 16, 96),
    "radix-only": (EAGER | {"disable_radix_cache": False}, SHAPES, 24, 96),
    "overlap-only": (EAGER | {"disable_overlap_schedule": False}, SHAPES, 16, 96),
    "rows65-scripted": ({"speculative_num_draft_tokens": 65}, DEEP, 12, 60),
    "prob-depth8-rows9": (
        {"speculative_ngram_match_type": "PROB", "speculative_ngram_max_trie_depth": 8,
         "speculative_num_draft_tokens": 9}, SHORT, 16, 96,
    ),
    "breadth1": (BREADTH1, None, 16, 96),
    "breadth1-eager-scripted": (EAGER | BREADTH1, SHAPES, 12, 96),
    "float16": ({"dtype": "float16"}, SHAPES, 24, 96),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", "serve", "judge", "table"))
    parser.add_argument("name", nargs="?", help="a setting, or the folder to judge")
    parser.add_argument("--texts", default="texts.json")
    parser.add_argument("--out", default="server-traces")
    parser.add_argument("--limit", type=int, default=10**9, help="steps to judge of each setting")
    parser.add_argument("--part", default="1/1", help="judge: every n-th of those steps, to share the work")
    parser.add_argument("--overhead", action="store_true", help="serve: also time recording off, at 0.05 and at 1.0")
    given = parser.parse_args()
    return {"texts": texts, "serve": serve, "judge": judge, "table": table}[given.what](given)


def texts(given) -> int:
    """Greedy continuations by the transformers engine, for 24 prompts of 20 to 150 tokens, 60 tokens each."""
    from tokenizers import Tokenizer

    from ddtree_check.engines import load_engine
    from ddtree_check.resources import fixtures_dir

    engine = load_engine("transformers", MODEL, dtype="float32")
    tokenizer = Tokenizer.from_file(str(fixtures_dir() / "models" / MODEL / "tokenizer.json"))
    entries = []
    lines = (fixtures_dir() / "prompts" / "humaneval.jsonl").read_text().splitlines()
    for at, line in enumerate(lines[:16]):
        ids = tokenizer.encode(json.loads(line)["text"]).ids[: 150 - 8 * at]
        entries.append(ids)
        if at % 2:  # shares a prefix with the one before
            entries.append([*ids[: len(ids) // 2], *entries[-2][:12]])
    found = []
    for ids in entries[:24]:
        prefix, tokens = engine.prefill(ids), []
        logits = prefix.logits
        for _ in range(60):
            tokens.append(int(logits.argmax()))
            logits, prefix = engine.step(prefix, tokens[-1])
        found.append({"prompt": ids, "tokens": tokens})
    Path(given.out).write_text(json.dumps(found))
    return 0


def serve(given) -> int:
    args, shapes, requests, length = SETTINGS[given.name]
    args = BASE | args
    folder = Path(given.out).resolve() / given.name
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads(Path(given.texts).read_text())
    options = {"folder": str(folder / "traces"), "rate": 1.0, "top": 64 if given.overhead else 0, "max_mb": 400}
    if shapes:
        (folder / "script.json").write_text(json.dumps({"trees": shapes, "texts": known}))
        options["trees"] = str(folder / "script.json")
    _toml(folder / "record.toml", options)
    os.environ["DDTREE_CHECK_RECORD"] = str(folder / "record.toml")
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = args["dtype"]
    import sglang as sgl

    from ddtree_check.resources import fixtures_dir

    found = {"setting": given.name, "args": args, "scripted": bool(shapes)}
    begun = time.monotonic()
    try:
        from sglang.srt.server_args import ServerArgs

        found["unknown_args"] = sorted(args.keys() - ServerArgs.__dataclass_fields__.keys())
        args = {name: value for name, value in args.items() if name not in found["unknown_args"]}
        engine = sgl.Engine(model_path=str(fixtures_dir() / "models" / MODEL), **args)
        found["up_s"] = round(time.monotonic() - begun, 1)
        ids = [entry["prompt"] for entry in known[:requests]]
        sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        out = engine.generate(input_ids=ids, sampling_params=sampling)
        # Once more, longer by what was written, so that a prefix cache has something to hit.
        again = [[*prompt, *one["output_ids"][:24]] for prompt, one in zip(ids[::3], out[::3], strict=True)]
        engine.generate(input_ids=again, sampling_params=sampling | {"max_new_tokens": 24})
        found["texts_equal"] = sum(
            one["output_ids"][:60] == entry["tokens"][:length] for one, entry in zip(out, known, strict=False)
        )
        found["requests"] = len(ids) + len(again)
        print(given.name, "served", found, flush=True)
        if given.overhead:
            found["overhead"] = overhead(engine, folder, options, ids, length)
        time.sleep(3)  # the writer catches up
        engine.shutdown()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    (folder / "served.json").write_text(json.dumps(found, indent=1))
    print(given.name, json.dumps({name: found.get(name) for name in ("up_s", "error", "overhead", "texts_equal")}))
    return 0 if "error" not in found else 1


def overhead(engine, folder: Path, options: dict, ids: list, length: int) -> dict:
    """Tokens a second of the same requests at each rate, rounds of them interleaved."""
    rates, seen = (0.0, 0.05, 1.0), {}
    sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    for turn in range(3):
        for rate in rates:
            _toml(folder / "record.toml", options | {"rate": rate})
            time.sleep(1.2)
            engine.generate(input_ids=[[7, 8, 9]], sampling_params=sampling | {"max_new_tokens": 2})
            begun = time.monotonic()
            out = engine.generate(input_ids=ids, sampling_params=sampling)
            took = time.monotonic() - begun
            seen.setdefault(str(rate), []).append(round(sum(len(one["output_ids"]) for one in out) / took, 1))
            print("rate", rate, "turn", turn, seen[str(rate)][-1], flush=True)
    return seen


def _toml(path: Path, options: dict) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    part.replace(path)


def judge(given) -> int:
    from ddtree_check.check import Settings
    from ddtree_check.engines import load_engine
    from ddtree_check.engines.trace import TraceEngine
    from ddtree_check.replay import judge_trace, wrong_parents

    live: dict = {}
    for served in sorted(Path(given.name).rglob("served.json")):
        folder = served.parent
        found = json.loads(served.read_text())
        for traces in sorted((folder / "traces").glob("rank*")):
            if not any(traces.glob("*.safetensors")):
                continue
            engine = TraceEngine.load(traces)
            dtype = engine.header.dtype
            if dtype not in live:
                live[dtype] = load_engine("transformers", MODEL, dtype=dtype)
            steps = engine.trace.steps
            lies = Counter(str(wrong_parents(step, None))[:60] for step in steps)
            part, parts = map(int, given.part.split("/"))
            every, steps = len(steps), chosen(steps, given.limit)[part - 1 :: parts]
            begun = time.monotonic()
            record = judge_trace(engine, Settings(require=("tree_forked",)), reference=live[dtype], steps=steps)
            row = summary(record, steps) | {"recorded": every, "told": lies}
            row |= {"judge_s": round(time.monotonic() - begun, 1), "all": exercised(engine.trace.steps)}
            (folder / f"judged{part}.json").write_text(json.dumps(found | row, indent=1))
            (folder / f"record{part}.json").write_text(json.dumps(record))
            failed = {case["id"] for case in record["cases"] if case["modes"]["tree_forked"]["verdict"] == "fail"}
            for step in [step for step in steps if step.id in failed][:20]:
                (folder / "failed").mkdir(exist_ok=True)
                shutil.copy(step.file, folder / "failed")
            print(found["setting"], json.dumps(row)[:600], flush=True)
    return 0


def side(step) -> bool:
    """Whether the accepted path leaves the first branch somewhere."""
    first = {0, *(kids[0] for kids in step.tree.children if kids)}
    return step.accepted is not None and not first.issuperset(step.accepted)


def chosen(steps, limit: int) -> list:
    """At most `limit` steps, evenly spaced, side-branch accepts up to four in five of them."""
    kinds = [[step for step in steps if side(step)], [step for step in steps if not side(step)]]
    wanted = min(len(kinds[0]), max(limit * 4 // 5, limit - len(kinds[1])))
    kept = []
    for kind, count in zip(kinds, (wanted, limit - wanted), strict=True):
        count = min(count, len(kind))
        kept += [kind[at * len(kind) // count] for at in range(count)]
    return sorted(kept, key=lambda step: step.file.name)


def exercised(steps) -> dict:
    return {
        "steps": len(steps),
        "side_accepts": sum(map(side, steps)),
        "batches": Counter(len(step.source["batch"]) for step in steps),
        "roots_in_text": sum(step.source["root_in_text"] for step in steps),
        "masks_agree": sum(
            [step.source["mask_parents"][row] for row, node in enumerate(one.nodes) if node > 0]
            == [one.nodes.index(parent) for parent in step.tree.parents[1:]]
            for step in steps for one in step.passes if "mask_parents" in step.source
        ),
    }  # fmt: skip


def summary(record: dict, steps) -> dict:
    """The row of a setting: what was exercised, and what came of it."""
    cases = record["cases"]
    verdicts = Counter(case["modes"]["tree_forked"]["verdict"] for case in cases)
    nodes = [node for case in cases for node in case["nodes"] if node["parent"] >= 0]
    reasons = [case["modes"]["tree_forked"]["reason"] for case in cases if case["modes"]["tree_forked"]["reason"]]
    bad = [node["tree_forked"]["verdict"] for node in nodes if node["tree_forked"]["verdict"] in ("leak", "flip")]
    return {
        "steps": len(steps),
        "trees": sum(not step.tree.is_chain for step in steps),
        "graph_steps": sum(bool(step.source.get("graph")) for step in steps),
        "largest_batch": max(len(step.source["batch"]) for step in steps),
        "nodes": len(nodes),
        "contaminated": sum(not node["clean"] for node in nodes) / max(1, len(nodes)),
        "accepted": sum(len(step.accepted or (0,)) - 1 for step in steps),
        "side_accepts": sum(map(side, steps)),
        "verdicts": dict(verdicts),
        "bad_nodes": Counter(bad),
        "worst": max(((node["tree_forked"]["max_abs"] or 0) / node["tree_forked"]["floor"] for node in nodes
                      if node["tree_forked"]["floor"]), default=None),
        "exit_code": record["exit_code"],
        "reasons": [reason[:300] for reason, _ in Counter(reasons).most_common(2)],
        "first_bad": next((case["id"] for case in cases if case["modes"]["tree_forked"]["verdict"] == "fail"), None),
        "control": record["verdict"]["modes"]["tree_unforked"],
        "notes": record["trace"]["notes"],
    }  # fmt: skip


def table(given) -> int:
    print("| setting | steps | trees | contaminated | side-branch accepts | verdict | steps that fail | cause |")
    print("|---|---|---|---|---|---|---|---|")
    for path in sorted(Path(given.name).rglob("served.json")):
        found = json.loads(path.read_text())
        parts = [json.loads(part.read_text()) for part in sorted(path.parent.glob("judged*.json"))]
        if not parts:
            print(f"| {found['setting']} | 0 | | | | not run | | {found.get('error', 'nothing recorded')} |")
            continue
        steps, trees, side, nodes = (
            sum(part[name] for part in parts) for name in ("steps", "trees", "side_accepts", "nodes")
        )
        dirty = sum(part["contaminated"] * part["nodes"] for part in parts) / max(1, nodes)
        failed = sum(part["verdicts"].get("fail", 0) for part in parts)
        others = sum((Counter(part["verdicts"]) for part in parts), Counter())
        verdict = "fail" if failed else "pass" if side >= 50 and others["pass"] == steps else "not exercised"
        cause = next((part["reasons"][0] for part in parts if part["reasons"]), "") if verdict != "pass" else ""
        print(
            f"| {found['setting']} | {steps} of {parts[0]['recorded']} | {trees} | {dirty:.0%} | {side} | {verdict} | "
            f"{failed} | {cause} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
