"""How things are called in lines that people read."""


def option(name: str) -> str:
    """A setting as users know it: `budgets` is --budget and `top_k` --top-k."""
    return "budget" if name == "budgets" else name.replace("_", "-")


def counted(number: int, noun: str) -> str:
    """'1 case' or '2 cases'; of nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
