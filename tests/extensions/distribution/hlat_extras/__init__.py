"""Parts for hlat in a package of their own: nothing here is known to hlat."""
