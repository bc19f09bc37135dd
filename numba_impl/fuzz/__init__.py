"""Differential fuzzing of the layer: drawn calls, each compared with float64, until one is wrong or the time is up.

python -m numba_impl.fuzz --minutes 10 --seed 1 --device cuda     drawn calls
python -m numba_impl.fuzz --case 'x=(2,3,5,7) out=4 seed=1'       one call, as a failure prints it

What is not named in a case is as in ``case.Case``. Needs hypothesis, of the extra ``test``, to draw and to shrink.
"""
