"""models: names, families, and what each was measured to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from ...base.conclusion import combine
from ...base.errors import UsageError
from ...flows.job import quiet_libraries
from ...report.layout import Table, laid_out, layout, titled
from ...report.text import number
from .options import some_of
from .output import progress, show_text, width

SHOWN = {"run": ("sglang",), "untested": ("sglang (untested)",), "window by row": ("sglang (known failure)",)}


def models(
    markdown: Annotated[bool, typer.Option("--markdown", help="The families alone, as a Markdown table.")] = False,
    measure: Annotated[
        bool, typer.Option("--run", help="Run every family at a small shape, and print what was measured.")
    ] = False,
    family: Annotated[list[str] | None, typer.Option(help="With --run: only this model type; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="With --run: float32, bfloat16, float16, float64.")] = "float32",
    device: Annotated[str, typer.Option(help="With --run: cpu, cuda ...")] = "cpu",
):
    """List the short names of models, and the families whose checkpoints can be checked."""
    if measure:
        return _measure_families(family, dtype, device)
    from ...model.families import UNSUPPORTED

    if family:
        raise UsageError(f"family: got {family[0]!r} without --run, expected both")
    if markdown:
        show_text(layout(list(_model_tables())[1], style="github"))
        return 0
    refused = [f"Not supported: {name}: {why}." for name, why in UNSUPPORTED.items()]
    show_text(laid_out([*_model_tables(), *refused], width()))
    return 0


def _measure_families(chosen: list[str] | None, dtype: str, device: str) -> int:
    """Print the table of `survey`; return the worst exit code of any family."""
    from ...model.families import FAMILIES

    names, found = some_of("family", chosen, FAMILIES), []
    with progress() as show, quiet_libraries():
        from ...flows.survey import survey

        for place, name in enumerate(names):
            if show:
                show(place, len(names), name)
            found.append(survey(name, dtype=dtype, device=device))
    rows = []
    for row in found:
        layers = ", ".join(f"{count} {kind}" for kind, count in row["layers"].items())
        modes = [row["modes"][mode] for mode in ("linear", "tree_forked")]
        sizes, flips = [number(row["forked"]), number(row["unforked"])], f"{row['flips']}/{row['nodes']}"
        rows.append((row["family"], layers, *modes, *sizes, flips, ", ".join(row["channels"]), row["exit_code"]))
    headers = ("family", "layers", "linear", "forked", "forked |Δ|", "unforked |Δ|", "flips", "leaks by", "exit")
    title = (
        f"Families at a small shape, random weights, {dtype}, {device}, one drawn tree; |Δ| is the largest of a node"
    )
    show_text(titled(Table(title, headers, rows, ("layers",)), width()))
    return combine(*(row["exit_code"] for row in found))


def _model_tables() -> Iterator[Table]:
    from ...engines.sglang.seams import FAMILIES as IN_SGLANG
    from ...engines.sglang.seams import SEAMS
    from ...model.families import ALIASES, FAMILIES

    names = []
    for name, alias in ALIASES.items():
        layers, where = (alias.shape["num_hidden_layers"], "built in") if alias.shape else ("", "needs the hub")
        names.append((name, alias.hub_id, FAMILIES[alias.model_type].title, layers, where))
    yield Table(
        "Names for --model", ("name", "hub id", "family", "layers", "shape for --weights random"), names, ("family",)
    )
    rows = []
    for family in FAMILIES.values():
        kinds = sorted({stand_in.removesuffix("_update") for stand_in in family.calls.values()} - {"training_only"})
        engines = ", ".join(["transformers", *SHOWN.get(IN_SGLANG.get(family.model_type), ())])
        parts = (", ".join(family.layers), " + ".join(kinds) or "none", engines, ", ".join(family.examples))
        rows.append((family.model_type, family.title, *parts))
    headers = ("model type", "family", "layer types", "recurrent", "engines", "for example")
    yield Table(
        "Families: any checkpoint of these model types, by path or hub id",
        headers,
        rows,
        ("layer types", "for example"),
    )
    rows = [(name, seam.status, *seam.needs) for name, seam in SEAMS.items()]
    yield Table(
        "SGLang versions that engine sglang is written for", ("sglang", "status", "torch", "transformers"), rows
    )
