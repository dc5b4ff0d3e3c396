"""The OpenAI-compatible server: `foretell serve`. Needs the extra `serve`."""
