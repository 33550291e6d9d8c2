"""A merge from files as most tests ask for it."""

from tplora.artifact.merge import merge_adapters


def merge_one(base, adapter, out, **options):
    """One adapter, in full weight."""
    return merge_adapters(str(base), {adapter: 1.0}, out, **options)
