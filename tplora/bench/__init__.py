"""A recipe's own training step, timed."""
