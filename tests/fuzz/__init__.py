"""Drawn calls of the layer, each compared with float64, until one is wrong or the time is up.

python -m tests.fuzz --minutes 10 --seed 1 --device cuda     drawn calls
python -m tests.fuzz --case 'x=(2,3,5,7) seed=1'             one call, as a failure prints it

What is not named in a case is as in ``call.Call``.
"""
