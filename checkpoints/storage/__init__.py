"""Storage of bytes, a disk or an object store, by one protocol, ``Place``.

A store of another scheme is an entry of ``SCHEMES`` in ``objects.py``. A kind of its own has the methods of ``Place``
and ``files.Readable``, and a branch in ``place`` and ``by_storage`` of ``place.py``.
"""
