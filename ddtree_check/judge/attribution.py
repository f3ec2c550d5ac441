"""Where the fault of a red verdict enters, in values and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Entry:
    """Where it enters first. `layer` -1 is the input of the first layer, `len(layers)` the head; None if not seen.

    channel   state, conv, mask, positions, routing, output, input or head;  source  what the node read there: a node,
    -1 for the committed text, BLANK for zeros, a position
    """

    node: int
    layer: int | None
    kind: str | None
    channel: str | None
    source: int | None = None


@dataclass(frozen=True)
class Finding:
    """What is known of one red verdict; `text` says it in one paragraph.

    first      node -> the layer from which on its output is beyond its floor
    growth     node -> how many times larger, relative to the row, its error is at the last layer than where it enters
    channels   channel -> 'off' or 'clean', those that can be told
    explained  the wiring that gives the logits that failed, node by node within the floor
    shape      with one more row the tree is right: a captured step, or a dispatch by size
    dose       what the error of the nodes beyond goes with -> rank correlation, its p value, nodes
    profile    the error of each layer's output, the first layer's input before them: median over the nodes beyond of
               largest |difference| / rms; None where that is no number
    """

    mode: str
    nodes: int
    entry: Entry | None
    first: dict[int, int] = field(default_factory=dict)
    growth: dict[int, float] = field(default_factory=dict)
    channels: dict[str, str] = field(default_factory=dict)
    explained: str | None = None
    shape: bool | None = None
    dose: dict[str, dict] = field(default_factory=dict)
    text: str = ""
    profile: tuple[float | None, ...] = ()

    def to_json(self) -> dict:
        found = asdict(self)
        for name in ("first", "growth"):  # JSON's keys are text
            found[name] = {str(node): value for node, value in found[name].items()}
        return found
