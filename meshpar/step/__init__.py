"""A step of a parallel module.

A call of it goes through ``forward.py``, calls of modules inside it through ``inner_calls.py``, its backward through
``backward.py``; ``moment.py`` is the protocol of what happens around them.
"""
