"""Who decides what runs: one file per method, registered when ``cofire`` imports it."""

from cofire.gates.ftwt import FTWT

DEFAULT = FTWT
"""The method of a recipe that names none."""

__all__ = ["DEFAULT"]
