"""A training step on tensors without storage: what it will take and what it will say."""
