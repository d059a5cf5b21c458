"""Numbers as people type and read them, with units: 100M, 3h, 20GB, 80%; 1,370 MWh, 160B."""
