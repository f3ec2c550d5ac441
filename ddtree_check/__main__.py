"""`python -m ddtree_check` is `ddtree-check`."""

import sys


def main() -> int:
    """Run the command line and return its exit code; 3 with one line where a library cannot be imported."""
    try:
        from .cli.main import main as run
    except Exception as error:  # a broken library's; Python's own exit code is 1, a defect
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"ddtree-check: import: {said}, expected libraries as in constraints.txt", file=sys.stderr)
        return 3
    return run()


if __name__ == "__main__":
    sys.exit(main())
