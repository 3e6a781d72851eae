"""Who decides which filters run, one file per method; importing a method's file registers it."""

from cofire.gates import ftwt as ftwt
