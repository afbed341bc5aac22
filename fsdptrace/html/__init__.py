"""A run as one HTML file that needs nothing else: no network, no other file, no server."""

from fsdptrace.html.page import render, write

__all__ = ["render", "write"]
