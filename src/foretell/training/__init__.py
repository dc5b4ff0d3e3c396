"""Train drafters on what their target says: answers, features, losses, the loop, and how well it went in the engine."""
