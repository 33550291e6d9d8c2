"""How do time, bytes and memory of a step grow with tp_size, r and length?"""
