"""Who decides what runs: one file per method, registered when it is imported here."""

from cofire.gates import blockdrop, cgnet, fbs, fixed, ftwt_offline, lccl, lcs, rnp
from cofire.gates.ftwt import FTWT

DEFAULT = FTWT
"""The method of a recipe that names none."""

__all__ = ["DEFAULT", "blockdrop", "cgnet", "fbs", "fixed", "ftwt_offline", "lccl", "lcs", "rnp"]
