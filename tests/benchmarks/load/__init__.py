"""How much of a checkpoint does each rank read, and how long does it take beside transformers?"""
