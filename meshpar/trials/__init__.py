"""Trials of what passes divide, before anybody trusts it."""
