"""Label smoothing (Szegedy et al. 2016, arXiv 1512.00567) as a term beside the cross-entropy."""


def label_smoothing(log_z, label, mean, *, epsilon=0.1):
    """Return what the smoothed loss of a token has more than the plain one."""
    return epsilon * (label - mean)
