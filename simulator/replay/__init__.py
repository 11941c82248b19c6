"""Replays a recorded run: as it was, and with something changed."""
