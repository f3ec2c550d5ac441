"""What SGLang's own drafters need of the tiny fixture, and whether its DFLASH drafts the blocks that ours does.

    python -m benchmarks.sglang_drafts checkpoint --texts texts.json --out DIR     the fixture in its multimodal form
    python -m benchmarks.sglang_drafts blocks TRACES                               recorded blocks against ours

`checkpoint` writes tiny-qwen3_5 as Qwen3.5 checkpoints are published: the same text weights under
`model.language_model.`, a vision tower without weights, and a multi-token-prediction layer (`mtp.*`) that EAGLE drafts
with, trained for a minute on the very texts that are served: its trees are to be accepted now and then, not to be good.
SGLang's text-only class takes no DFLASH, nor the strategy for prefix caches that the multimodal class gets; beside it,
in DIR/text, the text-only form with the same layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

MODEL, DRAFTER = "tiny-qwen3_5", "tiny-dflash"
VISION = {  # no image is shown to it: its weights are whatever SGLang makes of them
    "depth": 1, "hidden_size": 128, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128, "patch_size": 8,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [], "model_type": "qwen3_5",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("checkpoint", "blocks"))
    parser.add_argument("traces", nargs="?", help="blocks: a folder of traces")
    parser.add_argument("--texts", default="texts.json")
    parser.add_argument("--out", help="checkpoint: the folder to write; blocks: a JSON file for the figures")
    parser.add_argument("--steps", type=int, default=150, help="checkpoint: training steps")
    parser.add_argument("--limit", type=int, default=200, help="blocks: steps to compare, evenly spaced")
    given = parser.parse_args()
    return {"checkpoint": checkpoint, "blocks": blocks}[given.what](given)


# --- the multimodal form, with a layer that predicts one token further ------------------------------------------------


def checkpoint(given) -> int:
    import torch
    from safetensors.torch import load_file, save_file

    from ddtree_check.base.resources import fixtures_dir

    source, folder = fixtures_dir() / "models" / MODEL, Path(given.out)
    weights = load_file(source / "model.safetensors")
    layer, figures = train(source, json.loads(Path(given.texts).read_text()), given.steps)
    text = json.loads((source / "config.json").read_text())
    text |= {"full_attention_interval": text["layer_types"].index("full_attention") + 1}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16",
        "text_config": text, "vision_config": VISION, "tie_word_embeddings": True, "image_token_id": 3,
        "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6,
    }  # fmt: skip
    layer = {name: x.to(torch.bfloat16) for name, x in layer.items()}
    nested = {name.replace("model.", "model.language_model.", 1): x for name, x in weights.items()}
    for place, about, held in ((folder, config, nested), (folder / "text", text, weights)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(about, indent=1))
        save_file(held | layer, place / "model.safetensors", metadata={"format": "pt"})
    print("checkpoint", folder, json.dumps(figures), flush=True)
    return 0


def train(source: Path, texts: list[dict], steps: int) -> tuple[dict, dict]:
    """Weights by their names in a checkpoint, and how often the target's own token is the first and one of four.

    The layer reads the target's last hidden state at t beside the embedding of token t + 1, and predicts token t + 2.
    """
    import torch
    from torch.nn import functional
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3_5TextModel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Qwen3_5ForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
    width, vocab = target.config.hidden_size, target.config.vocab_size
    one = Qwen3_5TextConfig(**(target.config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    parts = torch.nn.ModuleDict({
        "body": Qwen3_5TextModel(one),
        "fc": torch.nn.Linear(2 * width, width, bias=False),
        "pre_fc_norm_embedding": Qwen3_5RMSNorm(width, eps=one.rms_norm_eps),
        "pre_fc_norm_hidden": Qwen3_5RMSNorm(width, eps=one.rms_norm_eps),
    }).to(device)  # fmt: skip
    del parts["body"].embed_tokens  # the target's
    data = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([[*text["prompt"], *text["tokens"]]], device=device)
            hidden = target.model(ids).last_hidden_state
            data.append((target.model.embed_tokens(ids)[:, 1:], hidden[:, :-1], hidden[:, 1:], len(text["prompt"])))
    table = target.model.embed_tokens.weight

    def rows(embeds, hidden):
        joined = torch.cat([parts["pre_fc_norm_embedding"](embeds), parts["pre_fc_norm_hidden"](hidden)], -1)
        return parts["body"](inputs_embeds=parts["fc"](joined), use_cache=False).last_hidden_state

    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-3)
    for step in range(steps):
        embeds, hidden, right, _ = data[step % len(data)]
        wanted = (right @ table.T).argmax(-1)
        first = rows(embeds, hidden)
        again = rows(embeds[:, 1:], first[:, :-1])  # on its own output, as a tree's second level has it
        loss = functional.cross_entropy((first @ table.T).view(-1, vocab), wanted.view(-1))
        loss += functional.cross_entropy((again @ table.T).view(-1, vocab), wanted[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hits = Counter()
    with torch.no_grad():
        for embeds, hidden, right, prompt in data:
            top = (rows(embeds, hidden) @ table.T).topk(4).indices[0, prompt:]
            wanted = (right @ table.T).argmax(-1)[0, prompt:, None]
            hits += Counter(first=int((top[:, :1] == wanted).sum()), four=int((top == wanted).sum()), all=len(top))
    named = {f"mtp.{name.removeprefix('body.')}": x.detach().cpu().contiguous()
             for name, x in parts.state_dict().items()}  # fmt: skip
    return named, {
        "loss": float(loss.detach()),
        "first": hits["first"] / hits["all"],
        "in_four": hits["four"] / hits["all"],
    }


# --- the same block? --------------------------------------------------------------------------------------------------


def blocks(given) -> int:
    """The share of recorded blocks that our drafter proposes for the same context, whole and token by token.

    Where a block differs first, ours must have two tokens nearly as good: the margin is in nats, between our first and
    the token that SGLang drafted, and the noise beside it is how far our own logits move from float32 to bfloat16.
    """
    import numpy as np

    from ddtree_check.engines import dflash
    from ddtree_check.engines.registry import load_engine
    from ddtree_check.trace.read import read_trace

    found, live = {}, {}
    for folder in sorted({path.parent for path in Path(given.traces).rglob("*.safetensors")}):
        trace = read_trace(folder)
        dtype = trace.header.dtype
        for name in (dtype, "float32"):
            if name not in live:
                engine = load_engine("transformers", MODEL, dtype=name)
                live[name] = engine, dflash.load(DRAFTER, engine)
        steps = [step for step in trace.steps if step.tree.is_chain and len(step.tree) > 1]
        steps = (
            [steps[at * len(steps) // given.limit] for at in range(given.limit)] if len(steps) > given.limit else steps
        )
        equal = tokens = same = 0
        margins, noise = [], []
        for step in steps:
            theirs = list(step.tree.tokens[1:])
            rows = {name: marginals(*live[name], step, len(theirs)) for name in {dtype, "float32"}}
            ours = rows[dtype].argmax(-1).tolist()
            first = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
            equal += first is None
            tokens, same = tokens + len(theirs), same + sum(a == b for a, b in zip(ours, theirs, strict=True))
            if first is not None:
                margins.append(float(rows[dtype][first].max() - rows[dtype][first, theirs[first]]))
                noise.append(float(np.abs(rows[dtype][first] - rows["float32"][first]).max()))
        explained = sum(margin <= 2 * wide for margin, wide in zip(margins, noise, strict=True))
        found[str(folder)] = {
            "dtype": dtype, "blocks": len(steps), "equal": equal, "tokens": tokens, "equal_tokens": same,
            "other": len(margins), "within_rounding": explained, "largest_margin": max(margins, default=None),
            "largest_rounding": max(noise, default=None), "margins": sorted(margins)[-20:],
        }  # fmt: skip
        print(json.dumps(found[str(folder)]), flush=True)
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1))
    return 0 if found else 1


def marginals(engine, drafter, step, length: int):
    """Our log probabilities [length, vocabulary] for the block behind a step's root."""
    engine.read_features(drafter.spec.layers)
    return drafter.marginals(engine, engine.prefill(step.prompt_tokens).features, step.tree.tokens[0], length)


if __name__ == "__main__":
    sys.exit(main())
