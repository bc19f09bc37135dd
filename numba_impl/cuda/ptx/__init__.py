"""Every PTX instruction that Numba does not offer, one small primitive each, by topic.

A primitive is a plain Python function that says what the instruction means, under a decorator that
says how to emit it. Compiled, the emitted instruction stands; in Numba's simulator, the Python runs.
"""
