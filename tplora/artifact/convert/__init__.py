"""An adapter made into another adapter: other layout, rank, dtype, names, or a sum of several."""
