"""server: two servers of one model, with and without speculation, through their completions API alone."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from ...base.errors import UsageError
from .options import JsonFile, Limit, Prompts, Quiet
from .output import finish


def server(
    base_url: Annotated[str, typer.Option(help="The server that speculates, such as http://localhost:30000/v1.")],
    reference_url: Annotated[str, typer.Option(help="The same model in a server that does not.")],
    model: Annotated[str | None, typer.Option(help="Its name in both servers. Default: the first each lists.")] = None,
    prompts: Prompts = None,
    limit: Limit = None,
    tokens: Annotated[int, typer.Option(help="Tokens to decode for each prompt.")] = 64,
    top: Annotated[int, typer.Option(help="Likeliest tokens to compare at each position.")] = 5,
    repeats: Annotated[int, typer.Option(help="How often each server decodes a prompt.")] = 2,
    force: Annotated[
        str, typer.Option(help="How the reference scores a text: echo, steps (a request a token), or auto.")
    ] = "auto",
    concurrency: Annotated[int, typer.Option(help="Prompts that are asked for at once.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds for a whole answer.")] = 120.0,
    retries: Annotated[int, typer.Option(help="Attempts after the first, with growing pauses.")] = 4,
    api_key_env: Annotated[str | None, typer.Option(help="The environment variable that holds the key.")] = None,
    journal: Annotated[
        str | None, typer.Option(help="File of finished prompts; a killed run goes on after them.")
    ] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
):
    """Decode the same prompts on a server with speculation and on one without, score the texts on the latter, and tell
    ties from divergence. Sees emitted tokens only: no tree, no states, no layers."""
    given = {name: value for name, value in locals().items() if name not in ("json", "quiet", "journal")}
    from ...flows.job import Job, Output, select_prompts
    from ...server.api import Api
    from ...server.run import Settings, run_servers

    if timeout <= 0:
        raise UsageError(f"timeout: got {timeout:g}, expected seconds, more than 0")
    if retries < 0:
        raise UsageError(f"retries: got {retries}, expected 0 or more")
    key = None
    if api_key_env is not None and not (key := os.environ.get(api_key_env)):
        raise UsageError(f"api-key-env: {api_key_env} is not set, expected a variable that holds the key")
    settings = Settings(tokens, top, repeats, force)
    chosen = [prompt for _, prompt in select_prompts(Job(prompts=prompts, limit=limit))]
    common = {"model": model, "key": key, "timeout": timeout, "retries": retries}
    ours, theirs = Api("base-url", base_url, **common), Api("reference-url", reference_url, **common)
    command = _command(given | {"base_url": ours.url, "reference_url": theirs.url})

    def run(show) -> dict:
        more = {"concurrency": concurrency, "journal": journal, "progress": show}
        return run_servers(ours, theirs, chosen, settings, **more) | {"command": command}

    try:
        return finish(run, Output(json=json, quiet=quiet))
    finally:
        ours.close()
        theirs.close()


def _command(given: dict[str, object]) -> str:
    """Return the command line that runs this again."""
    words = ["ddtree-check", "server"]
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
