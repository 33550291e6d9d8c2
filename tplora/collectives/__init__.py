"""How the ranks of a tp group communicate: raw, differentiable, and when."""
