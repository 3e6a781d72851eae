"""A recipe file becomes a run, a run becomes a row beside the paper's."""
