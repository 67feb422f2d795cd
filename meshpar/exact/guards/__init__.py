"""The guards of one parallel module, a concern a file; each is an entry point of the group ``meshpar.guards``."""
