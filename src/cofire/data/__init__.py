"""Images: from files, scikit-learn or a formula, to batches ``(x_BCHW, label_B)``.

``images.py``: what a set is, in memory, and how it is fed; ``decoding.py``: from encoded pictures to pixels;
``archives.py``: the original archives of CIFAR; ``layouts.py``, ``shards.py``, ``stored.py``: sets larger than memory;
``sources.py``: where the pictures come from.
"""

from cofire.data.augmenting import Augment, crop_flip, random_boxes, resized_crop
from cofire.data.feeding import AnyLoader, feed
from cofire.data.images import AbstractImages, Batch, Images, Loader
from cofire.data.sources import (
    cifar10,
    cifar100,
    digits,
    folder,
    imagenet,
    imagenet_parquet,
    list_sources,
    pictures,
    prepare,
    source,
    synthetic,
)
from cofire.data.stored import StoredImages

__all__ = [
    "AbstractImages",
    "AnyLoader",
    "Augment",
    "Batch",
    "Images",
    "Loader",
    "StoredImages",
    "cifar10",
    "cifar100",
    "crop_flip",
    "digits",
    "feed",
    "folder",
    "imagenet",
    "imagenet_parquet",
    "list_sources",
    "pictures",
    "prepare",
    "random_boxes",
    "resized_crop",
    "source",
    "synthetic",
]
