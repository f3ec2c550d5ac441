"""The prompts of a black-box run: both servers decode them, the reference scores what came, and `judge` concludes."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ..base.errors import Unsupported, UsageError
from ..base.files import record_head
from ..base.journal import append_journal, resume_journal
from ..tree.case import Prompt
from .api import Api, Completion, Failed
from .judge import Rule, conclude, positions

SCHEMA = "ddtree-check/server/1"
FORCE = ("auto", "echo", "steps")
BLIND = (
    "only tokens that were emitted: rejected branches and the tree itself stay unseen",
    "only the likeliest tokens of a position, not the whole vocabulary",
    "no states and no layers: a wrong commit shows only in the text that follows",
    "whether the server speculated at all: look at its own acceptance figures",
)


@dataclass(frozen=True)
class Settings:
    """tokens: to decode for each prompt; top: likeliest tokens to compare; repeats: how often each server decodes a
    prompt; force: how the reference scores a text: echo (one request), steps (one a token), auto (echo if it can)."""

    tokens: int = 64
    top: int = 5
    repeats: int = 2
    force: str = "auto"

    def __post_init__(self):
        for name in ("tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected a number of at least 1")
        if self.top < 2:
            raise UsageError(f"top: got {self.top}, expected at least 2: a margin needs a second token")
        if self.force not in FORCE:
            raise UsageError(f"force: got {self.force!r}, expected one of {', '.join(FORCE)}")


def run_servers(
    server: Api,
    reference: Api,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    rule: Rule | None = None,
    concurrency: int = 4,
    journal: str | None = None,
    progress: Callable | None = None,
) -> dict:
    """Return the record of a run: `concurrency` prompts run at once, and one that fails is `not_run`.

    journal: a file of finished prompts; a run that was killed goes on after them, and asks again for what was not run.
    Raises UsageError and Unsupported.
    """
    if concurrency < 1:
        raise UsageError(f"concurrency: got {concurrency}, expected a number of at least 1")
    if server.url == reference.url:
        raise UsageError(f"reference-url: got {reference.url} twice, expected the same model without speculation")
    for prompt in prompts:
        if prompt.text is None:
            raise UsageError(f"prompt {prompt.id}: got token ids, expected text: the servers tokenise it themselves")
    rule = rule or Rule()
    where = {
        "base_url": server.url,
        "model": server.start(),
        "reference_url": reference.url,
        "reference_model": reference.start(),
    }
    head = {"schema": SCHEMA, "settings": asdict(settings), "servers": where}
    finished = {} if journal is None else resume_journal(journal, head, lambda line: conclude([line], rule))
    done = {name: line for name, line in finished.items() if line["reason"] is None}
    todo = [prompt for prompt in prompts if done.get(prompt.id, {}).get("prompt") != prompt.text]
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        tasks = {pool.submit(_prompt, server, reference, prompt, settings): prompt for prompt in todo}
        try:
            for task in concurrent.futures.as_completed(tasks):
                line = task.result()
                if journal is not None:
                    append_journal(journal, line)
                done[line["id"]] = line
                if progress:
                    progress(len(done), len(prompts), line["id"])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            server.close()
            reference.close()
            raise
    found = conclude([done[prompt.id] for prompt in prompts], rule)
    return record_head(SCHEMA, where) | {
        "settings": asdict(settings) | {"rule": asdict(rule)},
        "cannot_see": list(BLIND),
        **found,
    }


def _prompt(server: Api, reference: Api, prompt: Prompt, settings: Settings) -> dict:
    empty = {"own": [], "changed": {"reference": 0, "tokens": 0}, "control": [], "runs": []}
    try:
        return {"id": prompt.id, "prompt": prompt.text, "reason": None} | measure(server, reference, prompt, settings)
    except Failed as error:
        return {"id": prompt.id, "prompt": prompt.text, "reason": str(error)} | empty


def measure(server: Api, reference: Api, prompt: Prompt, settings: Settings) -> dict:
    """Measure a prompt: {"own": the reference's |differences| to itself, "changed": how many of the tokens that it
    decodes are not its first when forced, "control": the |differences| of the two servers on forced text, "runs"}.

    A run: {"tokens", "same_text", "positions", "ending"}; ending is set where it stopped and the reference goes on.
    """
    text, asked = prompt.text, (settings.tokens, settings.top)
    plain = [reference.complete(text, *asked) for _ in range(settings.repeats)]
    drafted = [server.complete(text, *asked) for _ in range(settings.repeats)]
    scores: dict[tuple, list] = {}

    def forced(run: Completion, by: Api = reference) -> list:
        key = (by is reference, run.tokens)
        if key not in scores:
            scores[key] = score(by, text, run, settings)
        return scores[key]

    repeated = [positions(run, forced(run)) for run in plain]
    own = [position.delta for row in repeated for position in row]
    once = [p for row in {run.tokens: row for run, row in zip(plain, repeated, strict=True)}.values() for p in row]
    changed = {"reference": sum(position.regret > 0 for position in once), "tokens": len(once)}
    for run in plain[1:]:  # once more, as long as it says the same
        same = _common(plain[0].tokens, run.tokens)
        own += [position.delta for position in positions(run, [(top, None) for top, _ in _tops(plain[0])[: same + 1]])]
    control = []
    if settings.force != "steps" and drafted[0].tokens:
        try:
            there = score(server, text, drafted[0], settings, echo=True)
        except Unsupported:  # it cannot echo: nothing says that it serves the same model
            there = []
        for (mine, _), (theirs, _) in zip(forced(drafted[0]), there, strict=False):
            control += [abs(mine[word] - theirs[word]) for word in mine.keys() & theirs.keys()]
    runs = []
    for run in drafted:
        found = positions(run, forced(run))
        runs.append(
            {
                "tokens": len(run.tokens),
                "same_text": run.text == plain[0].text,
                "first": None if run.text == plain[0].text else _common(run.tokens, plain[0].tokens),
                "positions": [position.to_json() for position in found],
                "ending": _ending(run, plain[0]),
            }
        )
    return {"own": own, "changed": changed, "control": control, "runs": runs}


def _ending(run: Completion, plain: Completion) -> dict | None:
    """Return where a run stopped though the reference goes on, as a position: what ended the text is no token of it."""
    n = len(run.tokens)
    if not run.ended or n >= len(plain.tokens) or plain.tokens[:n] != run.tokens:
        return None
    order = sorted(plain.tops[n].values(), reverse=True)
    margin = order[0] - order[1] if len(order) > 1 else 0.0
    return {"token": None, "chosen": plain.tokens[n], "delta": None, "regret": margin, "margin": margin, "cut": True}


def score(api: Api, prompt: str, run: Completion, settings: Settings, *, echo: bool | None = None) -> list:
    """Return (top, log-probability of the token) of the run's tokens after the same text, where it is cut alike.

    Raises Unsupported for `echo` where the server has none.
    """
    if echo or settings.force != "steps":
        try:
            return _echoed(api, prompt, run, settings)
        except Unsupported:
            if echo or settings.force == "echo":
                raise
    return _stepped(api, prompt, run, settings)


def _echoed(api: Api, prompt: str, run: Completion, settings: Settings) -> list:
    """Score in one request: the text is the prompt, and one token more, since not every server takes 0."""
    if not run.tokens:
        return []
    whole = api.complete(prompt + run.text, 1, settings.top, echo=True)
    count, n = len(whole.tokens), len(run.tokens)
    if count <= n or not any(whole.tops[:-1]):
        raise Unsupported(f"{api.what}: {api.url} does not give the log-probabilities of a prompt (echo)")
    start = next((at for at in (count - n - 1, count - n) if whole.tokens[at : at + n] == run.tokens), None)
    if start is None:  # cut into other tokens somewhere: comparable up to there
        start = run.prompt_tokens if run.prompt_tokens is not None else _prompt_length(whole, prompt)
    same = _common(whole.tokens[start:], run.tokens)
    found = list(zip(whole.tops, whole.logprobs, strict=True))[start : start + same]
    return list(itertools.takewhile(lambda entry: entry[0], found))


def _stepped(api: Api, prompt: str, run: Completion, settings: Settings) -> list:
    """Score in a request a token."""
    found = []
    for place, token in enumerate(run.tokens):
        one = api.complete(prompt + "".join(run.tokens[:place]), 1, settings.top)
        counts = (run.prompt_tokens, one.prompt_tokens)
        if None not in counts and counts[1] != counts[0] + place:
            break  # cut into other tokens
        if not one.tops or not one.tops[0]:
            break
        found.append((one.tops[0], one.tops[0].get(token)))
    return found


def _tops(run: Completion) -> list[tuple[dict[str, float], float | None]]:
    """Return (top, log-probability of the token) up to the first position without any."""
    return list(itertools.takewhile(lambda entry: entry[0], zip(run.tops, run.logprobs, strict=True)))


def _prompt_length(whole: Completion, prompt: str) -> int:
    """Return how many tokens the prompt is, by the length of their text."""
    lengths = itertools.accumulate(map(len, whole.tokens), initial=0)
    return next((place for place, length in enumerate(lengths) if length >= len(prompt)), len(whole.tokens))


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return how many tokens two texts have in common at their start."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
