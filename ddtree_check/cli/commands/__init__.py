"""The commands of the command line, one module each; `cli` registers them. Heavy imports stand inside them."""
