"""On one card: does the fused layer pay, in 16 and in 4 bits, and are two ranks one?"""
