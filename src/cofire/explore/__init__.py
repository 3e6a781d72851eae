"""A page to look at: which filters fire for a picture, and what that saves.

``knob.py``: what the slider moves; ``subject.py``: what is looked at; ``look.py``: one picture through it;
``drawing.py``: that as HTML; ``page.py``: the page.
"""
