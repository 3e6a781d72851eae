"""Who decides what runs: one file per method, registered when it is imported here."""

from cofire.gates import blockdrop, fbs, fixed, ftwt_offline, lccl
from cofire.gates.ftwt import FTWT

DEFAULT = FTWT
"""The method of a recipe that names none."""

__all__ = ["DEFAULT", "blockdrop", "fbs", "fixed", "ftwt_offline", "lccl"]
