"""Targets of ``meshpar launch``: each renders a scheduler's job file and has the command that submits it."""
