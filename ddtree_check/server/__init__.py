"""Two servers of one model, with and without speculation, compared through an OpenAI-compatible API alone."""
