"""Generators of the pages, and parts of pages, that are written from the code: `make docs`."""
