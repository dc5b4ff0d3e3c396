"""Drafter checkpoints as they are published: what a folder holds, and one reader per family."""
