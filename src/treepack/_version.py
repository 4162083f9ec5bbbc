"""The version, kept apart so that building a wheel reads it without importing torch."""

__version__ = "0.1.0"
