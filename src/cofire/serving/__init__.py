"""Programs behind HTTP: the Open Inference Protocol v2, with limits, back-pressure and metrics. No PyTorch here."""
