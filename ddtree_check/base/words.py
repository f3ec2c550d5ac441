"""How things are called in lines that people read."""

SPOKEN = {"budgets": "budget", "engine_args": "engine-arg"}  # one value each on the command line


def option(name: str) -> str:
    """Return a field as users know it: `budgets` is --budget and `top_k` --top-k."""
    return SPOKEN.get(name, name.replace("_", "-"))


def counted(number: int, noun: str) -> str:
    """Return '1 case' or '2 cases'; of nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
