"""Files and object stores: durable writes, URLs opened through fsspec, and one-line descriptions of storage errors."""
