"""Where bytes lie: a disk or an object store, behind one protocol."""
