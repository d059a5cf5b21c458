"""Parts of users: a distribution of its own, installed beside hlat, of which hlat knows nothing."""
