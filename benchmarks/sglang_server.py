"""SGLang's own server over a matrix of its settings, recorded by the plugin, judged by the transformers engine.

    python -m benchmarks.sglang_server texts --out texts.json          what the fixture writes: for scripted trees
    python -m benchmarks.sglang_server serve SETTING --texts texts.json --out DIR      one setting: starts sgl.Engine
    python -m benchmarks.sglang_server judge DIR [--limit N]           a verdict for each folder of traces under DIR
    python -m benchmarks.sglang_server table DIR                       the table of docs/sglang-server.md
    python -m benchmarks.sglang_server cause DIR                       from which state requests behind a hit went on

Settings of the multimodal class, EAGLE and DFLASH also want `--checkpoint`: see benchmarks/sglang_drafts.py.
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
FEW = {"chunked_prefill_size": 256, "watchdog_timeout": 1200}  # few prefill graphs; kernels may compile for long
# What SGLang keeps of recurrent states for its prefix cache: each 32 tokens of what is written, so that there are hits.
TRACKED = FEW | {"mamba_track_interval": 32}
MULTIMODAL = {
    "model_path": "CHECKPOINT", "enable_multimodal": False, "json_model_override_args": "{}",
    "mm_attention_backend": "sdpa",
}  # fmt: skip
TEXT = {"model_path": "MODEL", "json_model_override_args": BASE["json_model_override_args"]}
EAGLE = MULTIMODAL | {
    "speculative_algorithm": "EAGLE", "speculative_draft_model_path": "CHECKPOINT", "speculative_num_steps": 4,
    "speculative_eagle_topk": 4,
}  # fmt: skip
DFLASH = MULTIMODAL | {
    "speculative_algorithm": "DFLASH", "speculative_draft_model_path": "DRAFTER", "speculative_num_draft_tokens": 16,
}  # fmt: skip
NAME = "Qwen3_5ForCausalLM"  # the text-only class, missing in two lists of SGLang 0.5.17
SETTINGS = {  # name: (engine arguments, scripted shapes, requests, tokens a request)
    "defaults": ({}, None, 16, 96),
    "no-radix-scripted": ({"disable_radix_cache": True, "chunked_prefill_size": 64}, SHAPES, 24, 96),
    "defaults-scripted": ({"chunked_prefill_size": 64}, SHAPES, 24, 96),
    "eager-scripted": (EAGER, SHAPES, 16, 96),
    "eager-scripted-batch1": (EAGER | {"max_running_requests": 1}, SHAPES, 6, 96),
    "graphs-only": (EAGER | {"disable_cuda_graph": False, "chunked_prefill_size": 64}, SHAPES, 16, 96),
    "radix-only": (EAGER | {"disable_radix_cache": False}, SHAPES, 24, 96),
    "overlap-only": (EAGER | {"disable_overlap_schedule": False}, SHAPES, 16, 96),
    "rows65-scripted": (FEW | {"speculative_num_draft_tokens": 65}, DEEP, 12, 60),
    "prob-depth8-rows9": (
        {"speculative_ngram_match_type": "PROB", "speculative_ngram_max_trie_depth": 8,
         "speculative_num_draft_tokens": 9}, SHORT, 16, 96,
    ),
    "breadth1": (BREADTH1, None, 16, 96),
    "breadth1-eager-scripted": (EAGER | BREADTH1, SHAPES, 12, 96),
    "float16": ({"dtype": "float16"}, SHAPES, 24, 96),
    # The prefix cache of the text-only class: as it is, told the strategy that the multimodal class gets, put into
    # SGLang's lists by name, and that class itself.
    "prefix": (TRACKED, None, 16, 96),
    "prefix-extra-buffer": (TRACKED | {"mamba_radix_cache_strategy": "extra_buffer"}, None, 16, 96),
    "prefix-listed": (TRACKED | {"LISTED": NAME}, None, 16, 96),
    "prefix-multimodal": (TRACKED | MULTIMODAL, None, 16, 96),
    "eagle": (FEW | EAGLE, None, 24, 96),
    "eagle-eager": (FEW | EAGLE | EAGER, None, 24, 96),
    "eagle-text": (FEW | EAGLE | {"model_path": "TEXT", "speculative_draft_model_path": "TEXT"}, None, 16, 96),
    "dflash": (FEW | DFLASH, None, 24, 96),
    "dflash-eager": (FEW | DFLASH | EAGER, None, 24, 96),
    "dflash-text": (FEW | DFLASH | TEXT, None, 1, 8),  # refused: the text-only class shows its layers' outputs to none
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", "serve", "judge", "table", "cause"))
    parser.add_argument("name", nargs="?", help="a setting, or the folder to judge")
    parser.add_argument("--texts", default="texts.json")
    parser.add_argument("--out", default="server-traces")
    parser.add_argument("--checkpoint", help="serve: the folder that benchmarks.sglang_drafts wrote")
    parser.add_argument("--states", action="store_true", help="serve: also record what each commit left")
    parser.add_argument("--limit", type=int, default=10**9, help="steps to judge of each setting")
    parser.add_argument("--rounds", type=int, default=10**9, help="judge: a request's first verifies alone, so many")
    parser.add_argument("--device", default="auto", help="judge, cause: where transformers runs")
    parser.add_argument("--part", default="1/1", help="judge: every n-th of those steps, to share the work")
    parser.add_argument("--overhead", action="store_true", help="serve: also time recording off, at 0.05 and at 1.0")
    given = parser.parse_args()
    return {"texts": texts, "serve": serve, "judge": judge, "table": table, "cause": cause}[given.what](given)


def texts(given) -> int:
    """Greedy continuations by the transformers engine, for 24 prompts of 20 to 150 tokens, 60 tokens each."""
    from tokenizers import Tokenizer

    from ddtree_check.base.resources import fixtures_dir
    from ddtree_check.engines.registry import load_engine

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
    import traceback

    args, shapes, requests, length = SETTINGS[given.name]
    args = {"model_path": "MODEL"} | BASE | args
    folder = Path(given.out).resolve() / given.name
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads(Path(given.texts).read_text())
    options = {"folder": str(folder / "traces"), "rate": 1.0, "top": 64 if given.overhead else 0, "max_mb": 1500}
    options["states"] = given.states
    if shapes:
        (folder / "script.json").write_text(json.dumps({"trees": shapes, "texts": known}))
        options["trees"] = str(folder / "script.json")
    _toml(folder / "record.toml", options)
    os.environ["DDTREE_CHECK_RECORD"] = str(folder / "record.toml")
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = args["dtype"]
    from ddtree_check.base.resources import fixtures_dir

    models = fixtures_dir() / "models"
    places = {"MODEL": str(models / MODEL), "DRAFTER": str(models / "tiny-dflash"), "CHECKPOINT": given.checkpoint}
    places["TEXT"] = f"{given.checkpoint}/text"
    args = {name: places.get(value, value) if isinstance(value, str) else value for name, value in args.items()}
    found = {"setting": given.name, "args": args, "scripted": bool(shapes)}
    begun = time.monotonic()
    try:
        import sglang as sgl
        from sglang.srt.arg_groups import overrides
        from sglang.srt.server_args import ServerArgs

        if listed := args.pop("LISTED", None):  # settled in this process, before SGLang starts its others
            overrides._MAMBA_RADIX_CACHE_ARCHS |= {listed}
            overrides._MAMBA_EXTRA_BUFFER_ARCHS |= {listed}

        found["unknown_args"] = sorted(args.keys() - ServerArgs.__dataclass_fields__.keys())
        args = {name: value for name, value in args.items() if name not in found["unknown_args"]}
        engine = sgl.Engine(**args)
        found["up_s"] = round(time.monotonic() - begun, 1)
        ids = [entry["prompt"] for entry in known[:requests]]
        sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        out = engine.generate(input_ids=ids, sampling_params=sampling)
        # Once more, longer by what was written, so that a prefix cache has something to hit.
        every = 1 if given.name.startswith("prefix") else 3
        again = [[*prompt, *one["output_ids"][:24]] for prompt, one in zip(ids[::every], out[::every], strict=True)]
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
        traceback.print_exc()
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
    from ddtree_check.engines.recorded import TraceEngine
    from ddtree_check.engines.registry import load_engine
    from ddtree_check.flows.check import Settings
    from ddtree_check.flows.replay import judge_trace, wrong_parents

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
                live[dtype] = load_engine("transformers", MODEL, dtype=dtype, device=given.device)
            steps = engine.trace.steps
            lies = Counter(str(wrong_parents(step, None))[:60] for step in steps)
            mode = "tree_forked" if any(step.of("tree_forked") for step in steps) else "linear"
            part, parts = map(int, given.part.split("/"))
            first = [step for step in steps if (step.round or 0) < given.rounds]
            every, steps = len(steps), chosen(first, given.limit)[part - 1 :: parts]
            begun = time.monotonic()
            record = judge_trace(engine, Settings(require=(mode,)), reference=live[dtype], steps=steps)
            row = summary(record, steps, mode) | {"recorded": every, "told": lies}
            row |= {"judge_s": round(time.monotonic() - begun, 1), "all": exercised(engine.trace.steps)}
            (folder / f"judged{part}.json").write_text(json.dumps(found | row, indent=1))
            (folder / f"record{part}.json").write_text(json.dumps(record))
            failed = {case["id"] for case in record["cases"] if case["modes"][mode]["verdict"] == "fail"}
            failed |= {case["id"] for case in record["cases"] if "fail" in commits(case, mode)}
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
    """At most `limit` steps, evenly spaced: the first rounds behind a prefix hit up to half of them, and of the others
    side-branch accepts up to four in five."""
    hits = [step for step in steps if step.source.get("cached_tokens") and (step.round or 0) < 3]
    hits = [hits[at * len(hits) // (limit // 2)] for at in range(limit // 2)] if len(hits) > limit // 2 else hits
    held = {step.id for step in hits}
    steps, limit = [step for step in steps if step.id not in held], limit - len(hits)
    kinds = [[step for step in steps if side(step)], [step for step in steps if not side(step)]]
    wanted = min(len(kinds[0]), max(limit * 4 // 5, limit - len(kinds[1])))
    kept = hits
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
        "prefix_hits": Counter(step.source.get("cached_tokens", 0) for step in steps if step.round == 0),
        "other_slots": sum(step.source.get("own_slot", step.source.get("slot")) != step.source.get("slot")
                           for step in steps),
        "masks_agree": sum(
            [step.source["mask_parents"][row] for row, node in enumerate(one.nodes) if node > 0]
            == [one.nodes.index(parent) for parent in step.tree.parents[1:]]
            for step in steps for one in step.passes if "mask_parents" in step.source
        ),
    }  # fmt: skip


def commits(case: dict, mode: str) -> list[str]:
    """Verdicts on what the commits of a case left."""
    return [found["modes"][mode]["verdict"] for found in case.get("commit") or () if mode in found["modes"]]


def summary(record: dict, steps, mode: str) -> dict:
    """The row of a setting: what was exercised, and what came of it."""
    cases, hit = record["cases"], {step.id: step.source.get("cached_tokens", 0) for step in steps}
    verdicts = Counter(case["modes"][mode]["verdict"] for case in cases)
    nodes = [node for case in cases for node in case["nodes"] if node["parent"] >= 0]
    reasons = [case["modes"][mode]["reason"] for case in cases if case["modes"][mode]["reason"]]
    bad = [node[mode]["verdict"] for node in nodes if node[mode]["verdict"] in ("leak", "flip")]

    def largest(behind: bool) -> float | None:
        found = [node[mode] for case in cases if bool(hit[case["id"]]) == behind for node in case["nodes"]]
        return max((one["max_abs"] / one["floor"] for one in found if one["max_abs"] and one["floor"]), default=None)

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
        "mode": mode,
        "worst": {"no hit": largest(False), "behind a hit": largest(True)},
        "behind_a_hit": Counter(case["modes"][mode]["verdict"] for case in cases if hit[case["id"]]),
        "commits": Counter(verdict for case in cases for verdict in commits(case, mode)),
        "commit_reasons": [reason[:200] for reason, _ in Counter(
            str(found["modes"][mode]["reason"]) for case in cases for found in case.get("commit") or ()
            if mode in found["modes"] and found["modes"][mode]["verdict"] != "pass"
        ).most_common(3)],
        "exit_code": record["exit_code"],
        "reasons": [reason[:300] for reason, _ in Counter(reasons).most_common(2)],
        "first_bad": next((case["id"] for case in cases if case["modes"][mode]["verdict"] == "fail"), None),
        "control": record["verdict"]["modes"]["tree_unforked"],
        "notes": record["trace"]["notes"],
    }  # fmt: skip


def table(given) -> int:
    names = ("setting", "steps", "trees", "contaminated", "side-branch accepts", "verdict", "steps that fail",
             "worst node / floor", "commits", "cause")  # fmt: skip
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for path in sorted(Path(given.name).rglob("served.json")):
        found = json.loads(path.read_text())
        parts = [json.loads(part.read_text()) for part in sorted(path.parent.glob("judged*.json"))]
        if not parts:
            print(f"| {found['setting']} | 0 | | | | not run | | | | {found.get('error', 'nothing recorded')} |")
            continue
        steps, trees, side, nodes = (
            sum(part[name] for part in parts) for name in ("steps", "trees", "side_accepts", "nodes")
        )
        dirty = sum(part["contaminated"] * part["nodes"] for part in parts) / max(1, nodes)
        failed = sum(part["verdicts"].get("fail", 0) for part in parts)
        others = sum((Counter(part["verdicts"]) for part in parts), Counter())
        asked = side >= 50 or parts[0]["mode"] == "linear"  # a block has no side branch
        verdict = "fail" if failed else "pass" if asked and others["pass"] == steps else "not exercised"
        worst = max((value for part in parts for value in part["worst"].values() if value), default=float("nan"))
        left = sum((Counter(part["commits"]) for part in parts), Counter())
        cause = next((part["reasons"][0] for part in parts if part["reasons"]), "") if verdict != "pass" else ""
        print(
            f"| {found['setting']} | {steps} of {parts[0]['recorded']} | {trees} | {dirty:.0%} | {side} | {verdict} | "
            f"{failed} | {worst:.2f} | {', '.join(f'{count} {name}' for name, count in left.items())} | {cause} |"
        )
    return 0


def cause(given) -> int:
    """For each first step behind a prefix hit: how far its root's logits are from those behind the right state, and
    from those behind the state that the cached request had one or two verifies later, with the right keys and values.

    In std of the row. The state is cached by a step of the scheduler that may run beside the next verify.
    """
    from ddtree_check.engines.recorded import tensor
    from ddtree_check.engines.registry import load_engine
    from ddtree_check.trace.read import read_trace

    live, found = {}, []
    for folder in sorted({path.parent for path in Path(given.name).rglob("traces/rank*/*.safetensors")}):
        trace = read_trace(folder)
        if trace.header.dtype not in live:
            live[trace.header.dtype] = load_engine("transformers", MODEL, dtype=trace.header.dtype, device=given.device)
        engine = live[trace.header.dtype]
        rounds = {(step.request, step.round): step for step in trace.steps}
        donors = {step.prompt_tokens: step for step in trace.steps if step.round == 0}
        for step in trace.steps:
            cached = step.source.get("cached_tokens", 0)
            donor = donors.get(step.prompt_tokens[:cached])
            if step.round != 0 or not cached or donor is None or donor is step:
                continue
            (one,) = step.of("tree_forked")
            theirs = tensor(one.arrays["logits"])[one.nodes.index(0)].float()
            errors, ahead = [], []
            for verify in range(3):
                prefix = engine.prefill(step.prompt_tokens[:cached])
                if ahead:
                    far = engine.prefill([*step.prompt_tokens[:cached], *ahead])
                    for layer, kind in enumerate(engine.config.layer_types):
                        if kind == "linear_attention":
                            prefix.cache.layers[layer] = far.cache.layers[layer]
                for token in (*step.prompt_tokens[cached:], step.tree.tokens[0]):
                    logits, prefix = engine.step(prefix, token)
                ours = logits.float().to(theirs.device)
                off = (theirs - theirs.mean()) - (ours - ours.mean())
                errors.append(round(float(off.abs().max() / ours.std()), 4))
                after = rounds.get((donor.request, verify))
                if after is None or after.accepted is None:
                    break
                ahead += [after.tree.tokens[node] for node in after.accepted]
            found.append({"step": step.id, "cached": cached, "suffix": len(step.prompt_tokens) - cached, "off": errors})
            print(json.dumps(found[-1]), flush=True)
    Path(given.name, "cause.json").write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
