"""A page to look at: which filters fire for a picture, and what that saves.

``subject.py``: what is looked at; ``look.py``: one picture through it; ``drawing.py``: that as HTML; ``page.py``: the
page.
"""
