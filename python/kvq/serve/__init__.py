"""The OpenAI-compatible HTTP server; needs the extra ``serve``."""
