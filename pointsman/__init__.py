"""The root of the installed package, which contains `picker`, `worker` and `fleet` there.

In the repository they stand beside it: `scripts/one_package.py` moves them as a wheel is built.
"""
