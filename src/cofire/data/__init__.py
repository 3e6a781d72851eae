"""Images: from files, scikit-learn or a formula, to batches ``(x_BCHW, label_B)``.

``images.py``: what is in memory, and how it is fed; ``decoding.py``: from encoded pictures to pixels;
``archives.py``: the original archives of CIFAR; ``sources.py``: where the pictures come from.
"""

from cofire.data.feeding import AnyLoader, feed
from cofire.data.images import Augment, Batch, Images, Loader, crop_flip
from cofire.data.sources import (
    cifar10,
    cifar100,
    digits,
    folder,
    imagenet_parquet,
    list_sources,
    pictures,
    prepare,
    source,
    synthetic,
)

__all__ = [
    "AnyLoader",
    "Augment",
    "Batch",
    "Images",
    "Loader",
    "cifar10",
    "cifar100",
    "crop_flip",
    "digits",
    "feed",
    "folder",
    "imagenet_parquet",
    "list_sources",
    "pictures",
    "prepare",
    "source",
    "synthetic",
]
