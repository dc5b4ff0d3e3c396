"""Benchmarks: what is measured, how it is recorded, and how records become tables, plots and reports.

Imports nothing of the engine: whoever runs a model does it through LLM, and servers are reached over HTTP.
docs/metrics.md defines every figure.
"""
