"""Under the trainer people know."""
