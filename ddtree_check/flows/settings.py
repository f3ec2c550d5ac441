"""What a run does and to what: the settings, the prompts, and whether a model can take them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ..base.errors import UsageError, usage_errors
from ..base.options import VERBS, check_options, group, option
from ..judge.exact import HOW
from ..judge.nodes import CONTROL, MODES
from ..judge.rule import Rule
from ..judge.sampling.processing import DECODING, RULES, Sampling
from ..model.wiring import FORKED, UNFORKED, Wiring, wirings
from ..tree.accept import PATTERN, is_pattern
from ..tree.case import Case, check_vocab
from ..tree.draft_tree import DraftTree
from ..tree.drafts.best_first import LARGEST, ORDERS, PUBLISHED
from ..tree.drafts.recorded import Marginals
from ..tree.token_ids import token_ids

DRAFTS = ("self", "ngram", "recorded", "dflash")
LENGTH = 15  # positions of a draft block of 16
SHADOW = "shadow"


@group("Draft trees")
class Drafting:
    """How trees are drafted, one for each budget. order: heap is as built."""

    budgets: tuple[int, ...] = option(
        (16, 64), "Draft nodes per tree, one tree for each number.", "N,...", least=1, most=LARGEST
    )
    acceptance: float = option(
        0.7, "Share of depths where draft self ranks the target's token first.", "SHARE", later=True,
        holds=lambda value: 0 <= value <= 1, expects="a share from 0 to 1",
    )  # fmt: skip
    length: int = option(
        LENGTH, "Positions that are drafted, at most.", "N", least=1, most=LARGEST, later=True, verbs=DECODING
    )
    candidates: int | None = option(
        None, "Tokens offered at each depth. Default: as many as the budget.", "N", least=1, later=True
    )
    order: str = option(
        "heap", "Flat order of a tree's nodes: heap, breadth or depth.", "ORDER", choices=ORDERS, later=True
    )
    seed: int = option(
        0, "Seed of draft self, of draws and of random weights.", "N", later=True,
        holds=lambda value: 0 <= value < 2**63, expects="a number from 0 to 2**63 - 1",
    )  # fmt: skip


@group("Checks", later=True, verbs="compare")
class Checks:
    """What is checked, and which modes decide.

    controls   leaf paths that the chain control and the full forward passes run, those that hold most nodes
    accept     see `accept.accept_nodes`
    attribute  whose faults to look for: True every failing mode's, the control's too, False none, None a required
               mode's
    """

    require: tuple[str, ...] = option(
        ("linear", "tree_forked"), "Modes that decide the exit code.", "MODE,...", choices=MODES, later=False,
        verbs=DECODING,
    )  # fmt: skip
    accept: tuple[str, ...] = option(
        (), f"Commit these paths and check the state: {PATTERN}.", "PATH,...", holds=is_pattern, expects=PATTERN
    )
    ar: str = option("strict", "strict, a node at a time, or batched, a level.", "HOW", choices=("strict", "batched"))
    controls: int | None = option(
        None, "Leaf paths that the controls run. Default: all; 16 under draft dflash.", "N", least=1
    )
    wiring: str | None = option(
        None, "What the unforked control reads wrong, such as conv=flat. Default: states and windows.", "WIRING"
    )
    attribute: bool | None = option(
        None, "Look for where every failing mode goes wrong, the control too. Default: the required modes."
    )
    exact: str = option(
        "leaves", "What must not change a bit: off, leaves with few passes, or all with every edge, order and commit.",
        "HOW", choices=HOW,
    )  # fmt: skip
    vocab_size: int | None = option(
        None, "Tokens; logits after them are padding. Default: the model's.", "N", least=2, verbs=VERBS
    )


@group("Sampling", later=True)
class Draws:
    """What is checked of sampling. history: one of sampling.RULES; draws: walks from each tree and mode."""

    history: str = option(
        "path", f"What the unforked control's penalties count: {', '.join(RULES)}. Default: path, which is right.",
        "RULE", choices=RULES, verbs=DECODING,
    )  # fmt: skip
    draws: int = option(
        500, "Walks drawn from each tree and tested against ar; 0 for none.", "N", least=0, verbs="compare"
    )


@dataclass(frozen=True)
class Settings(Drafting, Checks, Draws):
    """What a run does. Everything in it is in the record, so that the run can be made again.

    draft  one of DRAFTS;  shape  a published static tree by name, in place of budgets. Raises UsageError.
    """

    draft: str = option("self", "", choices=DRAFTS, verbs=())
    shape: str | None = option(None, "", choices=PUBLISHED, verbs=())
    sampling: Sampling = field(default_factory=Sampling)
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self):
        check_options(self)
        if self.history != "path" and not self.sampling.penalises:
            raise UsageError(f"history: got {self.history!r}, expected a penalty that counts it")
        if self.wiring is not None:
            with usage_errors():
                wrong = Wiring.parse(self.wiring)
            channels = ("state", "conv", "mask", "positions")
            if "flat" not in {getattr(wrong, channel) for channel in channels}:
                expected = f"a wrong rule for one of {', '.join(channels)}, '=flat'"
                raise UsageError(f"wiring: got {self.wiring!r}, expected {expected}")

    @property
    def control(self) -> Wiring:
        """The wiring that runs as tree_unforked."""
        return UNFORKED if self.wiring is None else Wiring.parse(self.wiring)

    def to_json(self) -> dict:
        """Return the settings as JSON, flat: the names of sampling stand among the others."""
        flat = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return flat.pop("sampling") | flat


@dataclass(frozen=True)
class Mode:
    """How a mode verifies and by which wiring it commits; None is the engine's own pass along the first branch."""

    verify: Wiring | None
    commit: Wiring | None


ROUND_MODES = {
    **{mode: Mode(wirings()[mode], wirings()[mode]) for mode in MODES},
    "leaky_verify": Mode(UNFORKED, FORKED),  # the leak reaches the text by the logits alone
    "leaky_commit": Mode(FORKED, UNFORKED),  # by the stored state alone
    SHADOW: Mode(UNFORKED, None),  # plain decoding decides; what the tree would have done is only noted
}


@group("Rounds", later=True)
class Rounds:
    """Decoding in rounds. stop: token ids that end a text. Raises UsageError."""

    rounds: int = option(
        20, "Decode so many rounds for each prompt in each mode. Default: 20 in generate, 6 in sweep, none in compare.",
        "N", least=1,
    )  # fmt: skip
    modes: tuple[str, ...] = option(
        ("linear", "tree_forked", CONTROL), f"Some of {', '.join(ROUND_MODES)}. Default: the first 3.", "MODE,...",
        choices=tuple(ROUND_MODES), verbs=DECODING,
    )  # fmt: skip
    plain: int = option(0, "A plain one-token step after so many rounds; 0 for none.", "N", least=0, verbs=DECODING)
    stop: frozenset[int] = frozenset()

    def __post_init__(self):
        check_options(self)

    def to_json(self) -> dict:
        return {"rounds": self.rounds, "modes": list(self.modes), "plain": self.plain, "stop": sorted(self.stop)}


@dataclass(frozen=True)
class Item:
    """One prompt to run: its id, its token ids, and a tree, recorded drafts or a drafter where the caller brings them.

    drafter: has `length` and `marginals(engine, features, root, length)`, as dflash.Drafter.
    """

    id: str
    tokens: tuple[int, ...]
    tree: DraftTree | None = None
    recorded: DraftTree | Marginals | tuple[DraftTree, ...] | None = None
    drafter: object | None = None


def fits(item: Item, settings: Settings, vocab_size: int, max_length: int | None, *, rounds: bool = False) -> None:
    """Raises UsageError if a model of this vocabulary and context cannot take the prompt and its trees.

    rounds: for rounds alone, where trees are cut to the room that is left, and a tree may be recorded for each round.
    """
    given = item.tree or item.recorded
    if isinstance(given, tuple) and not rounds:
        raise UsageError(
            f"prompt {item.id}: got a recorded tree for each round, which generate takes; "
            "expected 'tree' or 'marginals'"
        )
    deepest = max(given.depth) if isinstance(given, DraftTree) else settings.length
    if rounds:
        deepest = 0
    if max_length is not None and len(item.tokens) + 1 + deepest > max_length:
        raise UsageError(
            f"prompt {item.id}: {len(item.tokens)} tokens and a tree {deepest} deep do not fit; "
            f"the model's context is {max_length}; shorten the prompt"
        )
    try:
        token_ids(f"prompt {item.id}", item.tokens, vocab_size)
        if isinstance(given, DraftTree):
            check_vocab(Case(item.id, item.tokens, given, {}), vocab_size)
        elif isinstance(given, tuple):
            for number, tree in enumerate(given):
                check_vocab(Case(f"{item.id}, round {number}", item.tokens, tree, {}), vocab_size)
        elif isinstance(given, Marginals):
            for depth, ids in enumerate(given.ids, start=1):
                token_ids(f"prompt {item.id}: marginals: depth {depth}", ids, vocab_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
