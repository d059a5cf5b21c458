"""What the hardware can do: chips as data with a source per figure, and the peak that utilization is a share of."""

from hlat.hardware.catalog import Catalog, Chip, load_catalog
from hlat.hardware.peak import PeakFlops, peak_flops

__all__ = ["Catalog", "Chip", "PeakFlops", "load_catalog", "peak_flops"]
