"""Attention over edges."""
