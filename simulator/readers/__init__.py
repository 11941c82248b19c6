"""Arrays and other people's files in."""
