"""A run from its recipe to its folder; each command is a few calls of what is here."""
