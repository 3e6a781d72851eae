"""Who decides which filters run: one file per method. Importing this registers them all."""

from cofire.gates.fixed import Fixed
from cofire.gates.ftwt import FTWT

DEFAULT = FTWT
"""The method of a recipe that names none."""

__all__ = ["DEFAULT", "FTWT", "Fixed"]
