"""Rows served elsewhere: published folders, their publishers and subscribers."""
