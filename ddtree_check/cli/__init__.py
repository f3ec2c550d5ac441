"""The command line: `ddtree-check` and its commands."""
