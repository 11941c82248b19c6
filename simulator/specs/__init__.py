"""The shared vocabulary: frozen, checked data."""
