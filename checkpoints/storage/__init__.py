"""Storage of bytes, a disk or an object store, by one protocol."""
