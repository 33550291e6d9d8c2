"""Adapters that were saved, here or elsewhere: read as data, and never trusted."""
