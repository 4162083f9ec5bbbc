"""What spawned children run; light, so that they start at once."""


def put_endlessly(items):
    """Put items larger than a pipe's buffer."""
    while True:
        items.put(b"x" * 10_000_000)
