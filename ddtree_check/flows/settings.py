"""What a run does and to what: the settings, the prompts, and whether a model can take them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..base.errors import UsageError, usage_errors
from ..base.words import option
from ..judge.nodes import MODES
from ..judge.rule import Rule
from ..judge.sampling.processing import RULES, Sampling
from ..model.wiring import UNFORKED, Wiring
from ..tree.case import Case, check_vocab
from ..tree.draft_tree import DraftTree
from ..tree.drafts.best_first import PUBLISHED
from ..tree.drafts.recorded import Marginals
from ..tree.token_ids import token_ids
from .commit import check_pattern

DRAFTS = ("self", "ngram", "recorded", "dflash")
LENGTH = 15  # positions of a draft block of 16


@dataclass(frozen=True)
class Settings:
    """What a run does. Everything in it is in the record, so that the run can be made again.

    budgets      draft nodes per tree, one tree each;  order  its flat order: heap (as built), breadth, depth
    draft        self, ngram, recorded or dflash;  acceptance  the share of depths where `self` puts the target's token
                 first;  length  positions that are drafted, at most so many
    shape        a published static tree by name, in place of budgets;  candidates  tokens offered at each depth, None
                 for as many as the budget
    require      the modes that decide the exit code
    ar           strict (one node at a time) or batched (level by level)
    controls     how many leaf paths the chain control and the full forward passes run, those that hold most nodes;
                 None for all
    accept       which paths to commit by force, see `commit.accept_nodes`; none by default
    wiring       what the unforked control reads wrong, such as 'state=flat'; None for states and windows in row order
    attribute    whose faults to look for: True every failing mode's, the control's too, False none, None a required
                 mode's
    temperature ... frequency_penalty   as in `sampling.Sampling`; history  which nodes the unforked control's penalties
                 count, of sampling.RULES;  draws  walks drawn from each tree and mode, to be tested against ar
    vocab_size   tokens of the vocabulary, what follows them is padding; None for the model's
    """

    budgets: tuple[int, ...] = (16, 64)
    order: str = "heap"
    draft: str = "self"
    acceptance: float = 0.7
    length: int = LENGTH
    shape: str | None = None
    candidates: int | None = None
    seed: int = 0
    require: tuple[str, ...] = ("linear", "tree_forked")
    ar: str = "strict"
    controls: int | None = None
    accept: tuple[str, ...] = ()
    wiring: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: str = "path"
    draws: int = 500
    vocab_size: int | None = None
    attribute: bool | None = None
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self):
        for name in ("budgets", "require", "accept"):
            got = getattr(self, name)
            _expect(isinstance(got, (tuple, list)), option(name), repr(got), "a tuple")
        good = bool(self.budgets) and all(_whole(budget, 1) for budget in self.budgets)
        _expect(good, "budget", self.budgets, "numbers of at least 1")
        _expect(_whole(self.seed, 0) and self.seed < 2**63, "seed", repr(self.seed), "a number from 0 to 2**63 - 1")
        _expect(self.order in ("heap", "breadth", "depth"), "order", self.order, "heap, breadth or depth")
        _expect(self.draft in DRAFTS, "draft", self.draft, f"one of {', '.join(DRAFTS)}")
        share = isinstance(self.acceptance, (int, float)) and 0 <= self.acceptance <= 1
        _expect(share, "acceptance", self.acceptance, "a share from 0 to 1")
        _expect(_whole(self.length, 1), "length", self.length, "a number of at least 1")
        _expect(self.shape is None or self.shape in PUBLISHED, "tree", self.shape, f"one of {', '.join(PUBLISHED)}")
        for name, least in (("candidates", 1), ("controls", 1), ("vocab_size", 2)):
            got = getattr(self, name)
            good = got is None or _whole(got, least)
            _expect(good, option(name), got, f"a number of at least {least}")
        _expect(self.ar in ("strict", "batched"), "ar", self.ar, "strict or batched")
        _expect(
            bool(self.require) and set(self.require) <= set(MODES),
            "require",
            repr(", ".join(map(str, self.require))),
            f"some of {', '.join(MODES)}",
        )
        _expect(self.history in RULES, "history", self.history, f"one of {', '.join(RULES)}")
        penalises = self.sampling.penalises
        _expect(self.history == "path" or penalises, "history", self.history, "a penalty that counts it")
        _expect(_whole(self.draws, 0), "draws", self.draws, "a number of at least 0")
        for pattern in self.accept:
            check_pattern(pattern)
        if self.wiring is not None:
            with usage_errors():
                wrong = Wiring.parse(self.wiring)
            read = {channel: getattr(wrong, channel) for channel in ("state", "conv", "mask", "positions")}
            _expect(
                "flat" in read.values(),
                "wiring",
                repr(self.wiring),
                f"a wrong rule for one of {', '.join(read)}, '=flat'",
            )

    @property
    def control(self) -> Wiring:
        """The wiring that runs as tree_unforked."""
        return UNFORKED if self.wiring is None else Wiring.parse(self.wiring)

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn. Raises UsageError for what cannot be drawn from."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.__dataclass_fields__})

    def to_json(self) -> dict:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists = {name: list(getattr(self, name)) for name in ("budgets", "require", "accept")}
        return own | lists | {"rule": self.rule.to_json()}


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


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _expect(good: bool, what: str, got: object, expected: str) -> None:
    if not good:
        raise UsageError(f"{what}: got {got}, expected {expected}")
