"""Where the files that come with the package lie: in the installed package, or in the clone beside it."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "tiny-qwen3_5"  # the default model: in the repository and in the wheel, nothing to download
DRAFTER = "tiny-dflash"  # its drafter, likewise
_PACKAGE = Path(__file__).resolve().parents[1]


def fixtures_dir(package: Path = _PACKAGE) -> Path:
    """Return the folder with `models/` and `prompts/`: `_fixtures` in an installed wheel, else the clone's `fixtures`.

    Other models than the embedded one are in the clone only. Raises FileNotFoundError if neither folder is there.
    """
    places = (package / "_fixtures", package.parent / "fixtures")
    for place in places:
        if (place / "models").is_dir():  # site-packages may hold a stranger's `fixtures`
            return place
    raise FileNotFoundError(
        f"fixtures: no models/ folder in {places[0]} or {places[1]}; "
        "expected one from the wheel or the clone; reinstall ddtree-check, or install it with pip -e from a whole clone"
    )
