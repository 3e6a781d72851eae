"""Networks that come as a graph, ONNX files and programs of `torch.export`, as ordinary modules."""

from cofire.importing.models import Imported, imported

__all__ = ["Imported", "imported"]
