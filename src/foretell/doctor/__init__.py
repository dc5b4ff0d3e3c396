"""Doctor: why speculation is as fast as it is, and what to change. Measured evidence, pure findings, words."""
