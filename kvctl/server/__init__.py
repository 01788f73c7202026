"""Floor 3: the OpenAI-compatible HTTP server."""
