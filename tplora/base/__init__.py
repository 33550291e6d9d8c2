"""The frozen model."""
